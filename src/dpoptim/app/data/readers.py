"""Read files, folders and Hugging Face datasets as named columns with one value per record."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dpoptim.integrations.optional import first_line, require

Columns = dict[str, Sequence[Any]]
Locate = Callable[[int], str]
"""Where the record of an index is, for errors."""

TABLE_SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_SPLITS = ("train", "test", "valid", "dev", "eval")


def record_number(index: int) -> str:
    """Name a record by its place in its source, counted from 1."""
    return f"record {index + 1}"


def read_tables(files: Sequence[Path]) -> tuple[Columns, Locate]:
    """Read tables with the same columns, one after the other; return the columns, and what names a record by index."""
    tables = [_read_table(path) for path in files]
    for path, table in zip(files, tables, strict=True):
        if set(table) != set(tables[0]):
            raise ValueError(
                f"data {str(path)!r} has columns {', '.join(table)} and {files[0].name} has {', '.join(tables[0])}; "
                "give files with the same columns"
            )
    columns: Columns = {name: [value for table in tables for value in table[name]] for name in tables[0]}
    counts = [len(next(iter(table.values()), ())) for table in tables]

    def locate(index: int) -> str:
        for path, count in zip(files, counts, strict=True):
            if index < count:
                return f"{path.name!r}, {record_number(index)}"
            index -= count
        raise IndexError(index)

    return columns, locate


def table_files(folder: Path, split: str) -> list[Path]:
    """The tables in and below a folder whose name, or that of a folder above, begins with `split`; all if none does."""
    files = [path for path in _visible(folder) if path.suffix.lower() in TABLE_SUFFIXES]
    parts = {path: [part.lower() for part in path.relative_to(folder).parts] for path in files}
    own = [path for path in files if any(part.startswith(split.lower()) for part in parts[path])]
    others = [path for path in files if any(part.startswith(_SPLITS) for part in parts[path])]
    if others and not own:
        raise ValueError(f"split={split!r} is in no file name of {str(folder)!r}, which has {others[0].name}")
    chosen = own or files
    suffixes = {path.suffix.lower() for path in chosen}
    folders = {next((part for part in parts[path][:-1] if part.startswith(split.lower())), "its files") for path in own}
    for places in (suffixes, folders):
        if len(places) > 1:  # a record that is read twice has a weaker guarantee
            where = " and ".join(sorted(places))
            raise ValueError(f"data {str(folder)!r} has records in {where}, which may repeat them; give one")
    return chosen


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that are not blank."""
    with _readable(path), path.open(encoding="utf-8") as file:
        return [text for line in file if (text := line.strip())]


def text_files(folder: Path) -> list[Path]:
    """The .txt files in a folder and below it, sorted by name."""
    return [path for path in _visible(folder) if path.suffix == ".txt"]


def read_text(path: Path) -> str:
    """The whole file as one text."""
    with _readable(path):
        return path.read_text(encoding="utf-8")


def image_files(folder: Path) -> list[tuple[Path, str]]:
    """Every image folder/CLASS/… with its class, sorted by class and name."""
    return [
        (path, kind.name)
        for kind in sorted(entry for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
        for path in _visible(kind)
        if path.suffix.lower() in IMAGE_SUFFIXES
    ]


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` of a `datasets.Dataset` or `DatasetDict` wrote this folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def load_saved_dataset(folder: Path, split: str) -> Any:
    """Load the `datasets.Dataset` in a folder, or the part `split` of a `DatasetDict`."""
    datasets = require("datasets", f"reading the saved dataset {folder}")
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise ValueError(f"data {str(folder)!r} is not a readable saved dataset: {first_line(error)}") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ValueError(f"split={split!r} is not in {str(folder)!r}, which has {', '.join(found)}")
        return found[split]
    return found


def load_hub_dataset(name: str, split: str) -> Any:
    """Load the dataset `name` or `name:configuration` from the Hugging Face hub or its local cache."""
    missing = f"data {name!r} is not a file or folder here"
    datasets = require("datasets", f"{missing}, and reading it from the Hugging Face hub")
    path, _, configuration = name.partition(":")
    try:
        return datasets.load_dataset(path, configuration or None, split=split)
    except Exception as error:  # the hub, the network and the dataset's own files fail in many ways
        raise ValueError(f"{missing}, and the Hugging Face hub did not provide it ({first_line(error)})") from error


class HubColumn(Sequence[Any]):
    """One column of a `datasets.Dataset`; images are decoded one by one when they are needed."""

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

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index][self._name]

    def take(self, indices: Sequence[int]) -> HubColumn:
        """The entries at these places."""
        return HubColumn(self._dataset.select(indices), self._name)


def _visible(folder: Path) -> list[Path]:
    """Everything below a folder, sorted; hidden files are copies that editors and systems keep, not records."""
    return [path for path in sorted(folder.rglob("*")) if not any(p[0] == "." for p in path.relative_to(folder).parts)]


def _read_table(path: Path) -> Columns:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _read_parquet(path)
    return _read_jsonl(path) if suffix == ".jsonl" else _read_csv(path)


def _read_jsonl(path: Path) -> Columns:
    rows: list[dict[str, Any]] = []
    with _readable(path), path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                reason = error.msg.partition(":")[0]  # the rest may quote the record
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


def _read_csv(path: Path) -> Columns:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    csv.field_size_limit(2**31 - 1)  # the default refuses texts of more than 131,072 characters
    with _readable(path), path.open(encoding="utf-8-sig", newline="") as file:
        try:
            header, *rows = [row for row in csv.reader(file, delimiter=delimiter) if row] or [[]]
        except csv.Error as error:
            raise ValueError(f"data {str(path)!r} is not a readable table: {first_line(error)}") from error
    repeated = sorted({name for name in header if header.count(name) > 1})
    if repeated:
        raise ValueError(f"data {str(path)!r} has the column {repeated[0]!r} more than once; rename one")
    for index, row in enumerate(rows):
        if len(row) != len(header):
            raise ValueError(
                f"data {str(path)!r}, {record_number(index)} has {len(row)} fields and the header has {len(header)}; "
                "quote fields that contain the separator"
            )
    return {name: [row[place] for row in rows] for place, name in enumerate(header)}


def _read_parquet(path: Path) -> Columns:
    parquet = require("pyarrow.parquet", f"reading {path.name}")
    try:
        return dict(parquet.read_table(path).to_pydict())
    except Exception as error:
        raise ValueError(f"data {str(path)!r} is not a readable parquet file: {first_line(error)}") from error


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:  # its own message quotes the record
        raise ValueError(f"data {str(path)!r} is not UTF-8; convert the file first") from None
    except PermissionError as error:
        raise ValueError(f"data {str(path)!r} cannot be read by this user; change its mode, or give a copy") from error
