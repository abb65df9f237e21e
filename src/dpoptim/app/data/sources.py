"""Files, folders and HF datasets as named columns: every reader gives {column: its values}, one value a record."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from dpoptim.integrations.optional import first_line, require

Columns = dict[str, Sequence[Any]]

TABLE_SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet")
_SPLITS = ("train", "test", "valid", "dev", "eval")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")


def read_table(path: Path) -> Columns:
    """The columns of a .jsonl, .csv, .tsv or .parquet file; every line or row is one record.

    Edge cases: lines without any character are no records, as both formats have it. A .jsonl record without one of
    the columns has None there. A row with more or fewer fields than the header is refused.
    """
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path)
    return _read_jsonl(path) if path.suffix.lower() == ".jsonl" else _read_csv(path)


def read_tables(folder: Path, files: Sequence[Path]) -> Columns:
    """The rows of several files with the same columns, one file after the other."""
    tables = [read_table(path) for path in files]
    for path, table in zip(files, tables, strict=True):
        if set(table) != set(tables[0]):
            raise ValueError(
                f"data {str(folder)!r}: {path.name} has columns {', '.join(table)} and {files[0].name} has "
                f"{', '.join(tables[0])}; give one of the files"
            )
    return {name: [value for table in tables for value in table[name]] for name in tables[0]}


def table_files(folder: Path, split: str) -> list[Path]:
    """The tables in a folder and below it: those whose name or folder begins with `split`, or all if none has a split.

    Edge cases: where files belong to other splits and none to this, ValueError, since taking all would mix them.
    """
    files = [path for path in _visible(folder) if path.suffix.lower() in TABLE_SUFFIXES]
    parts = {path: [part.lower() for part in path.relative_to(folder).parts] for path in files}
    own = [path for path in files if any(part.startswith(split.lower()) for part in parts[path])]
    others = [path for path in files if any(part.startswith(_SPLITS) for part in parts[path])]
    if others and not own:
        raise ValueError(f"split={split!r} is in no name of {str(folder)!r}, which has {others[0].name}; name another")
    chosen = own or files
    suffixes = sorted({path.suffix.lower() for path in chosen})
    if len(suffixes) > 1:
        raise ValueError(f"data {str(folder)!r} has files of {' and '.join(suffixes)}: records twice? give one file")
    places = {next((part for part in parts[path][:-1] if part.startswith(split.lower())), "its files") for path in own}
    if len(places) > 1:
        raise ValueError(
            f"data {str(folder)!r} has {' and '.join(sorted(places))} for split={split!r}: records twice? give one"
        )
    return chosen


def _visible(folder: Path) -> list[Path]:
    """Everything below a folder by name, but what is hidden: copies that editors and systems keep are no records."""
    return [path for path in sorted(folder.rglob("*")) if not any(p[0] == "." for p in path.relative_to(folder).parts)]


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that are not blank; a blank line is no record."""
    with _utf8(path), path.open(encoding="utf-8") as file:
        return [text for line in file if (text := line.strip())]


def text_files(folder: Path) -> list[Path]:
    """The .txt files of a folder and of those below it, in the order of their names; a file is one text."""
    return [path for path in _visible(folder) if path.suffix == ".txt"]


def read_texts(files: Sequence[Path]) -> list[str]:
    """The text of each file."""
    texts = []
    for path in files:
        with _utf8(path):
            texts.append(path.read_text(encoding="utf-8"))
    return texts


def image_files(folder: Path) -> list[tuple[Path, str]]:
    """Every image folder/CLASS/… with its class, in the order of classes and names."""
    return [
        (path, kind.name)
        for kind in sorted(entry for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
        for path in _visible(kind)
        if path.suffix.lower() in IMAGE_SUFFIXES
    ]


def is_saved_dataset(folder: Path) -> bool:
    """Whether `datasets.Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote this folder."""
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()
    )


def load_saved_dataset(folder: Path, split: str) -> Any:
    """The `datasets.Dataset` saved in a folder; of a DatasetDict the part `split`."""
    datasets = require("datasets", f"reading the saved dataset {folder}")
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise ValueError(f"data {str(folder)!r} is no readable saved dataset: {first_line(error)}") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ValueError(f"split={split!r} is not in {str(folder)!r}, which has {', '.join(found)}")
        return found[split]
    return found


def load_hub_dataset(name: str, split: str) -> Any:
    """The dataset `name` or `name:configuration` of the Hugging Face hub (or of its cache on this machine)."""
    missing = f"data {name!r} is neither a file nor a folder here"
    try:
        datasets = require("datasets", "reading a dataset of the Hugging Face hub")
    except ValueError as error:
        raise ValueError(f"{missing}, and {error}") from None
    path, _, configuration = name.partition(":")
    try:
        return datasets.load_dataset(path, configuration or None, split=split)
    except Exception as error:  # the hub, the network and the dataset's own files fail in many ways
        raise ValueError(
            f"{missing}, and the Hugging Face hub does not give it ({first_line(error)}); give a local file or folder"
        ) from error


def columns_of(dataset: Any) -> Columns:
    """The columns of a `datasets.Dataset`, which stay in its files until they are asked for."""
    return {name: HubColumn(dataset, name) for name in dataset.column_names}


class HubColumn(Sequence[Any]):
    """One column of a `datasets.Dataset`; images are decoded one by one, when they are asked for.

    `class_names` are those that the dataset's schema declares for a column of labels, or None.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset, self._name = dataset.select_columns([name]), name
        feature = dataset.features[name]
        self.is_image = type(feature).__name__ == "Image"
        self.class_names: tuple[str, ...] | None = tuple(getattr(feature, "names", None) or ()) or None
        self.is_string = getattr(feature, "dtype", None) in ("string", "large_string")

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        if self.is_image:
            return (self[i] for i in range(len(self)))
        return iter(self._dataset[:][self._name])

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.take(range(*index.indices(len(self))))
        return self._dataset[index][self._name]

    def take(self, indices: Sequence[int]) -> HubColumn:
        """The entries at these places."""
        return HubColumn(self._dataset.select(indices), self._name)


def place_of(files: Sequence[Path], index: int) -> str:
    """Where record `index` (from 0) of these files lies, by file and line; found again, since only errors tell it."""
    left = index
    for path in files:
        suffix = path.suffix.lower()
        if suffix == ".txt":  # a file is one text
            places = [""]
        elif suffix == ".parquet":
            rows = require("pyarrow.parquet", f"reading {path.name}").ParquetFile(path).metadata.num_rows
            places = [f", row {row}" for row in range(1, rows + 1)]
        else:
            lines = [line for line, _ in (_jsonl_lines(path) if suffix == ".jsonl" else _csv_rows(path)[1:])]
            places = [f", line {line}" for line in lines]
        if left < len(places):
            return f"{str(path)!r}{places[left]}"
        left -= len(places)
    return record_number(index)


def record_number(index: int) -> str:
    """The place of a record that lies in no file of its own.

    >>> record_number(0)
    'record 1'
    """
    return f"record {index + 1}"


def _read_jsonl(path: Path) -> Columns:
    rows: list[dict[str, Any]] = []
    for number, line in _jsonl_lines(path):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            reason = error.msg.partition(":")[0]  # what may follow is of the record
            raise ValueError(
                f"data {str(path)!r}, line {number} is not JSON: {reason} at column {error.colno}"
            ) from None
        if not isinstance(row, dict):
            raise ValueError(
                f"data {str(path)!r}, line {number} is a JSON {type(row).__name__}; each line must be an object "
                'such as {"text": "…"}'
            )
        rows.append(row)
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(key for row in rows for key in row)}


def _jsonl_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    with _utf8(path), path.open(encoding="utf-8") as file:
        yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())


def _read_csv(path: Path) -> Columns:
    (_, header), *rows = _csv_rows(path) or [(1, [])]
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise ValueError(f"data {str(path)!r} has the column {repeated[0]!r} more than once; rename one")
    for line, row in rows:
        if len(row) != len(header):
            raise ValueError(
                f"data {str(path)!r}, line {line} has {len(row)} fields and the header {len(header)}; quote fields "
                "that hold the separator"
            )
    return {name: [row[place] for _, row in rows] for place, name in enumerate(header)}


def _csv_rows(path: Path) -> list[tuple[int, list[str]]]:
    """The rows that are not blank, the header first, each with the line that it begins in."""
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with _utf8(path), _long_fields(), path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        rows, line = [], 1
        try:
            for row in reader:
                if row:
                    rows.append((line, row))
                line = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(f"data {str(path)!r}, line {reader.line_num}: {first_line(error)}") from error
    return rows


def _read_parquet(path: Path) -> Columns:
    parquet = require("pyarrow.parquet", f"reading {path.name}")
    try:
        return dict(parquet.read_table(path).to_pydict())
    except PermissionError as error:
        raise ValueError(_unreadable(path)) from error
    except Exception as error:
        raise ValueError(f"data {str(path)!r} is no readable parquet file: {first_line(error)}") from error


@contextlib.contextmanager
def _utf8(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:  # it knows the place in what was read last, and holds the record
        with path.open("rb") as file:
            line = next(number for number, line in enumerate(file, start=1) if not _is_utf8(line))
        raise ValueError(f"data {str(path)!r}, line {line} is not UTF-8; convert the file first") from None
    except PermissionError as error:
        raise ValueError(_unreadable(path)) from error


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _unreadable(path: Path) -> str:
    return f"data {str(path)!r} cannot be read by this user; change its mode, or give a copy"


@contextlib.contextmanager
def _long_fields() -> Iterator[None]:
    """A text may be longer than the 131,072 characters that `csv` allows; its limit is put back."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)
