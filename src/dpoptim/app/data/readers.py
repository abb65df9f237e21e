"""Read files, folders and Hugging Face datasets as named columns with one value per record."""

from __future__ import annotations

import bisect
import contextlib
import csv
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpoptim.integrations.optional import first_line, require

Columns = Mapping[str, Sequence[Any]]
Locate = Callable[[int], str]
"""Describes the place of a record, by its index, for errors."""

TABLE_SUFFIXES = (".jsonl", ".csv", ".tsv", ".parquet")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_SPLITS = ("train", "test", "valid", "dev", "eval")


def record_number(index: int) -> str:
    """Name a record by its place in its source, counted from 1."""
    return f"record {index + 1}"


def refuse(wrong: Sequence[int], locate: Locate, what: str, problem: str, advice: str) -> None:
    """Raise a ValueError if there are wrong records; it names the first and quotes none, because they are private."""
    if wrong:
        raise ValueError(f"{what} has {len(wrong)} {problem} (first: {locate(wrong[0])}); {advice}")


def read_tables(files: Sequence[Path]) -> tuple[Columns, Locate]:
    """Read tables with the same columns one after the other; also return a function that names a record's file."""
    tables = [_read_table(path) for path in files]
    for path, table in zip(files, tables, strict=True):
        if set(table) != set(tables[0]):
            raise ValueError(
                f"data {str(path)!r} has columns {', '.join(table)} and {files[0].name} has {', '.join(tables[0])}; "
                "give files with the same columns"
            )
    columns: Columns = {name: [value for table in tables for value in table[name]] for name in tables[0]}
    counts = [len(next(iter(table.values()), ())) for table in tables]
    ends = list(itertools.accumulate(counts))

    def locate(index: int) -> str:
        place = bisect.bisect_right(ends, index)
        return f"{files[place].name!r}, {record_number(index - ends[place] + counts[place])}"

    return columns, locate


def table_files(folder: Path, split: str) -> list[Path]:
    """The tables in and below a folder whose name, or that of a folder above, begins with `split`; all if none does."""
    files = files_below(folder, TABLE_SUFFIXES)
    parts = {path: [part.lower() for part in path.relative_to(folder).parts] for path in files}
    own = [path for path in files if any(part.startswith(split.lower()) for part in parts[path])]
    others = [path for path in files if any(part.startswith(_SPLITS) for part in parts[path])]
    if others and not own:
        raise ValueError(f"split={split!r} is not in any file name in {str(folder)!r}, which has {others[0].name}")
    chosen = own or files
    suffixes = {path.suffix.lower() for path in chosen}
    folders = {next((part for part in parts[path][:-1] if part.startswith(split.lower())), "its files") for path in own}
    for places in (suffixes, folders):
        if len(places) > 1:  # a record that is read twice has a weaker guarantee
            where = " and ".join(sorted(places))
            raise ValueError(f"data {str(folder)!r} has records in {where}, which may repeat them; give one")
    return chosen


def files_below(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files below a folder, sorted; hidden files are copies that editors and systems keep, not records."""
    found = [path for path in sorted(folder.rglob("*")) if path.suffix.lower() in suffixes]
    return [path for path in found if not any(part[0] == "." for part in path.relative_to(folder).parts)]


def read_text(path: Path, newline: str | None = None) -> str:
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as file:
            return file.read()
    except UnicodeDecodeError:  # its own message quotes the record
        raise ValueError(f"data {str(path)!r} is not UTF-8; convert the file first") from None
    except PermissionError as error:
        raise ValueError(f"data {str(path)!r} cannot be read by this user; change its mode, or give a copy") from error


def load_saved_dataset(folder: Path, split: str) -> Columns:
    """The columns of the `datasets.Dataset` in a folder, or of the part `split` of a `DatasetDict`."""
    datasets = require("datasets", f"reading the saved dataset {folder}")
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise ValueError(f"data {str(folder)!r} is not a readable saved dataset: {first_line(error)}") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ValueError(f"split={split!r} is not in {str(folder)!r}, which has {', '.join(found)}")
        found = found[split]
    return {name: HubColumn(found, name) for name in found.column_names}


def load_hub_dataset(name: str, split: str) -> Columns:
    """The columns of the dataset `name` or `name:configuration` on the Hugging Face hub or in its local cache."""
    datasets = require("datasets", f"reading data {name!r}, which is not a file or folder here,")
    path, _, configuration = name.partition(":")
    try:
        found = datasets.load_dataset(path, configuration or None, split=split)
    except Exception as error:  # the hub, the network and the dataset's own files fail in many ways
        raise ValueError(
            f"data {name!r} is not a file or folder, and the Hugging Face hub did not provide it ({first_line(error)})"
        ) from error
    return {name: HubColumn(found, name) for name in found.column_names}


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

    def take(self, indices: Iterable[int]) -> HubColumn:
        return HubColumn(self._dataset.select(indices), self._name)


def _read_table(path: Path) -> Columns:
    readers = {".jsonl": _read_jsonl, ".csv": _read_csv, ".tsv": _read_csv, ".parquet": _read_parquet}
    if path.suffix.lower() not in readers:
        raise ValueError(f"data {str(path)!r} cannot be read; give {', '.join(readers)}, .txt or a folder")
    return readers[path.suffix.lower()](path)


def _read_jsonl(path: Path) -> Columns:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            row = None
            with contextlib.suppress(ValueError, RecursionError):  # its message may quote the record
                row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f'data {str(path)!r}, line {number} is not a JSON object such as {{"text": "…"}}')
            rows.append(row)
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(key for row in rows for key in row)}


def _read_csv(path: Path) -> Columns:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    csv.field_size_limit(2**31 - 1)  # the default refuses texts of more than 131,072 characters
    file = io.StringIO(read_text(path, newline=""), newline="")
    try:
        header, *rows = [row for row in csv.reader(file, delimiter=delimiter) if row] or [[]]
    except csv.Error as error:
        raise ValueError(f"data {str(path)!r} is not a readable table: {first_line(error)}") from error
    repeated = next((name for name in header if header.count(name) > 1), None)
    if repeated is not None:
        raise ValueError(
            f"data {str(path)!r} has the column {repeated!r} more than once; rename one, or start the file with names"
        )
    for index, row in enumerate(rows):
        if len(row) != len(header):
            raise ValueError(
                f"data {str(path)!r}, {record_number(index)} has {len(row)} fields and the header has {len(header)}; "
                "quote fields that contain the separator"
            )
    for mark in (";", "\t", "|", ","):
        counts = {line[0].count(mark) for line in (header, *rows) if len(line) == 1}
        if len(header) == 1 and len(counts) == 1 and counts != {0}:
            raise ValueError(f"data {str(path)!r} separates its fields by {mark!r}; separate them by {delimiter!r}")
    return {name: [row[place] for row in rows] for place, name in enumerate(header)}


def _read_parquet(path: Path) -> Columns:
    parquet = require("pyarrow.parquet", f"reading {path.name}")
    try:
        return dict(parquet.read_table(path).to_pydict())
    except Exception as error:
        raise ValueError(f"data {str(path)!r} is not a readable parquet file: {first_line(error)}") from error
