"""Private records: texts, images or rows of numbers, with labels, read from where they lie.

A record is the unit of privacy: what the guarantee protects is one of them. So reading drops none and merges none; an
empty text stays a record, and is counted. (A blank line of a .txt, .jsonl or .csv file is no record; hidden files are
not read. Who has two records is protected as two.)

What is computed over all private records is not private. Nothing here normalises features by the data's own mean, and
the label set is PUBLIC BY DECLARATION: names that are found in the data (and not declared by `label_names=` or by the
dataset's schema) are taken as known to everyone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpoptim.app.data import sources
from dpoptim.app.data.columns import (
    Choice,
    Kind,
    count_empty,
    feature_matrix,
    label_column_of,
    labels_among,
    labels_of,
    text_column_of,
    texts_of,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Records:
    """Records of one kind in the order of their source, with a label each where there are labels.

    Exactly one of `texts`, `images` (paths, or images that are decoded when asked for) and `features` is filled.
    `labels[i]` is the place of record i's label in `label_names`, which are public by declaration.

    >>> records = Records(kind=Kind.TEXT, source="memory", texts=["one", "", "two"], empty=1)
    >>> len(records), records.summary()
    (3, '3 text records from memory, 1 of them empty (kept)')
    """

    kind: Kind
    source: str
    texts: Sequence[str] = ()
    images: Sequence[Any] = ()
    features: NDArray[np.float32] | None = None  # [records, columns]
    feature_names: tuple[str, ...] = ()
    labels: NDArray[np.int64] | None = None  # [records]
    label_names: tuple[str, ...] = ()
    empty: int = 0  # texts without any character but blanks
    text_column: str | None = None  # where the texts stood in a table
    place: Callable[[int], str] = sources.record_number  # where the record of an index lies, for errors

    def __post_init__(self) -> None:
        if len(self) == 0:
            raise ValueError(f"data {self.source!r} has no records; there is nothing to train on")
        if self.labels is not None and len(self.labels) != len(self):
            raise ValueError(f"labels has {len(self.labels)} entries for {len(self)} records; give one a record")

    def __len__(self) -> int:
        if self.kind is Kind.TEXT:
            return len(self.texts)
        if self.kind is Kind.IMAGE:
            return len(self.images)
        return 0 if self.features is None else len(self.features)

    @property
    def length(self) -> int:
        """How many records there are; private under add-remove adjacency, public under the others."""
        return len(self)

    def summary(self) -> str:
        """One line: how many records, of which kind, from where; how many are empty; the classes."""
        text = f"{len(self):,} {self.kind.value} records from {self.source}"
        if self.empty:
            text += f", {self.empty:,} of them empty (kept)"
        if self.labels is not None:
            shown = ", ".join(self.label_names[:8]) + (", …" if len(self.label_names) > 8 else "")
            text += f", {len(self.label_names)} labels (public by declaration): {shown}"
        return text

    def refuse_empty(self) -> None:
        """One ValueError line where texts are missing: they would count as records, and teach nothing.

        >>> Records(kind=Kind.TEXT, source="notes", texts=["one", " "], empty=1, text_column="text").refuse_empty()
        Traceback (most recent call last):
        ValueError: 1 of 2 records of data 'notes' have no 'text' (first: record 2); remove them
        """
        if self.empty:
            first = next(index for index, text in enumerate(self.texts) if not text.strip())
            what = "text" if self.text_column is None else repr(self.text_column)
            raise ValueError(
                f"{self.empty} of {len(self)} records of data {self.source!r} have no {what} (first: "
                f"{self.place(first)}); remove them"
            )

    def take(self, indices: Sequence[int] | NDArray[Any]) -> Records:
        """The records at these places, in this order; for holding some out before any training.

        >>> Records(kind=Kind.TEXT, source="memory", texts=["one", "two", "three"]).take([2, 0]).texts
        ['three', 'one']
        """
        chosen = np.asarray(indices, dtype=np.int64)
        return dataclasses.replace(
            self,
            texts=[self.texts[i] for i in chosen] if self.kind is Kind.TEXT else (),
            images=_picked(self.images, chosen.tolist()),
            features=None if self.features is None else self.features[chosen],
            labels=None if self.labels is None else self.labels[chosen],
            empty=sum(not self.texts[i].strip() for i in chosen) if self.kind is Kind.TEXT else 0,
            place=lambda index: self.place(int(chosen[index])),
        )


def _picked(images: Sequence[Any], indices: list[int]) -> Sequence[Any]:
    """Without opening one."""
    if not images:
        return images
    return images.take(indices) if isinstance(images, sources.HubColumn) else [images[i] for i in indices]


def read_records(
    source: str | Path,
    *,
    text_column: str | None = None,
    label_column: str | None = None,
    split: str = "train",
    kind: Kind | None = None,
    label_names: Sequence[str] | None = None,
) -> Records:
    """The records of a file, a folder or an HF dataset.

    | source | a record is |
    |---|---|
    | .jsonl, .csv, .tsv, .parquet | a line or row |
    | .txt | a line that is not blank |
    | a folder with such tables | a row of the files whose names begin with `split`, or of all where none has a split |
    | a folder with .txt files | a file |
    | a folder with CLASS/*.png (.jpg, …) | a file; its label is the name of its folder |
    | a folder written by `datasets` | a row of `split` |
    | any other name, or name:configuration | a row of `split` of that dataset on the Hugging Face hub |

    The text is in `text_column`, else in "text", else in the only column of strings. Labels are in `label_column`, else
    in "label" or "labels". Without a column of strings, the numeric columns beside the label are tabular features.
    `kind` forces one of the ways. `label_names` declares the labels in their order; give those of the training records
    to the records of an evaluation.

    Guarantee: every record of the source is there, once, in order. Texts without a character (or null) stay as records
    and are counted in `.empty`.
    Not private: label names that are found in the data. Declare them if they are not known to everyone. Features come
    as they are.
    Edge cases: one ValueError line for a source that is missing, empty or broken, for a column that is not there, and
    for a label or a feature that is missing.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
    ...     _ = file.write("text,label\\nfine,good\\n,bad\\n")
    ...     file.flush()
    ...     found = read_records(file.name)
    >>> found.texts, found.labels, found.label_names, found.empty
    (['fine', ''], array([1, 0]), ('bad', 'good'), 1)
    """
    if not str(source).strip():
        raise ValueError(f"data {str(source)!r} names nothing; give a file, a folder, or a dataset's name")
    path = Path(source).expanduser()
    chosen = Choice(source=str(source), text=text_column, label=label_column, kind=kind, names=label_names)
    if path.is_dir():
        return _from_folder(path, split, chosen)
    if path.is_file():
        if path.suffix.lower() == ".txt":
            return _only_texts(sources.read_lines(path), chosen)
        if path.suffix.lower() in sources.TABLE_SUFFIXES:
            return _from_columns(sources.read_table(path), _in_files(chosen, [path]))
        raise ValueError(
            f"data {str(source)!r} {f'ends in {path.suffix!r}' if path.suffix else 'has no ending'}; give "
            f"{', '.join(sources.TABLE_SUFFIXES)} or .txt, a folder, or a dataset's name"
        )
    looks_local = path.suffix in (*sources.TABLE_SUFFIXES, ".txt", ".json") or path.is_absolute()
    if looks_local or str(source).startswith((".", "~")):
        raise ValueError(f"data {str(source)!r} does not exist; check the path")
    return _from_dataset(sources.load_hub_dataset(str(source), split), chosen)


def _from_folder(folder: Path, split: str, asked: Choice) -> Records:
    if sources.is_saved_dataset(folder):
        return _from_dataset(sources.load_saved_dataset(folder, split), asked)
    texts = sources.text_files(folder) if asked.kind is not Kind.IMAGE else []
    images = sources.image_files(folder) if asked.kind is not Kind.TEXT else []
    tables = sources.table_files(folder, split) if asked.kind is not Kind.IMAGE else []
    if bool(texts) + bool(images) + bool(tables) > 1:
        raise ValueError(
            f"data {asked.source!r} holds {len(texts)} .txt files, {len(images)} images in folders and {len(tables)} "
            "tables; point to those of one kind"
        )
    if tables:
        return _from_columns(sources.read_tables(folder, tables), _in_files(asked, tables))
    if texts:
        return _only_texts(sources.read_texts(texts), _in_files(asked, texts))
    if images:
        _refuse_columns(asked)
        kinds = [name for _, name in images]
        labels, names = labels_among(
            kinds, asked.names, "the names of its folders", lambda index: str(images[index][0])
        )
        return Records(
            kind=Kind.IMAGE, source=asked.source, images=[path for path, _ in images], labels=labels, label_names=names
        )
    raise ValueError(
        f"data {asked.source!r} is a folder without tables, without .txt files, without images in folders of their "
        "classes (CLASS/*.png), and not saved by save_to_disk; point to a file, or to such a folder"
    )


def _from_dataset(dataset: Any, asked: Choice) -> Records:
    columns = sources.columns_of(dataset)
    images = [name for name, values in columns.items() if isinstance(values, sources.HubColumn) and values.is_image]
    if asked.kind is Kind.IMAGE or (asked.kind is None and asked.text is None and images):
        if len(images) != 1:
            raise ValueError(
                f"data {asked.source!r} has {len(images)} columns of images among {', '.join(columns)}; one is needed"
            )
        labels, names = labels_of(columns, label_column_of(columns, asked), asked)
        return Records(
            kind=Kind.IMAGE, source=asked.source, images=columns[images[0]], labels=labels, label_names=names
        )
    return _from_columns({name: values for name, values in columns.items() if name not in images}, asked)


def _from_columns(columns: sources.Columns, asked: Choice) -> Records:
    if asked.kind is Kind.IMAGE:
        raise ValueError(f"data {asked.source!r} is a table; images are read from folders CLASS/*.png")
    if not columns or not len(next(iter(columns.values()))):
        raise ValueError(f"data {asked.source!r} has no records; there is nothing to train on")
    label = label_column_of(columns, asked)
    text = None if asked.kind is Kind.TABULAR else text_column_of(columns, label, asked)
    labels, names = labels_of(columns, label, asked, needed=text is None)
    if text is not None:
        texts = texts_of(columns, text, asked)
        return Records(
            kind=Kind.TEXT,
            source=asked.source,
            texts=texts,
            labels=labels,
            label_names=names,
            empty=count_empty(texts),
            text_column=text,
            place=asked.place,
        )
    if label is None:
        raise ValueError(
            f"data {asked.source!r}: which column is to be predicted? Set label_column (--label-column) to one of "
            f"{', '.join(columns)}"
        )
    features = [name for name in columns if name != label]
    return Records(
        kind=Kind.TABULAR,
        source=asked.source,
        features=feature_matrix(columns, features, asked),
        feature_names=tuple(features),
        labels=labels,
        label_names=names,
    )


def _only_texts(texts: list[str], asked: Choice) -> Records:
    _refuse_columns(asked)
    if asked.kind not in (None, Kind.TEXT):
        raise ValueError(f"data {asked.source!r} holds texts, and the task reads {asked.kind.value} records")
    return Records(kind=Kind.TEXT, source=asked.source, texts=texts, empty=count_empty(texts), place=asked.place)


def _in_files(asked: Choice, files: Sequence[Path]) -> Choice:
    """The choice, whose errors name file and line."""
    return dataclasses.replace(asked, place=lambda index: sources.place_of(files, index))


def _refuse_columns(asked: Choice) -> None:
    for name, value in (("text_column", asked.text), ("label_column", asked.label)):
        if value is not None:
            raise ValueError(f"{name}={value!r} was given, and data {asked.source!r} has no columns; leave it out")
