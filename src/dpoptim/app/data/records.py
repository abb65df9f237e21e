"""Private records: texts, images or rows of numbers, with labels.

The unit of privacy is a record, or a user with all their records. So no record is dropped or merged: an empty text is
still a record. A blank line is not a record, and hidden files are not read. Anything computed over all private records
is not private, so the columns of a table are encoded as declared. Label names are PUBLIC BY DECLARATION: those found in
the data are treated as known to everyone.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpoptim.app.data import readers, tables
from dpoptim.app.data.readers import Columns, HubColumn, Locate, refuse
from dpoptim.app.recipes import prompts
from dpoptim.app.recipes.columns import Categories, Number, chosen_columns, column_of
from dpoptim.integrations.chats import Chat, chat_of, problem_of


class RecordKind(enum.Enum):
    """What a record consists of."""

    TEXT = "text"
    IMAGE = "image"
    TABULAR = "tabular"


_MANY_LABELS = 20  # more, in fewer than two records each, are not classes
_RESPONSES = ("response", "completion", "text")
_FIELDS = {RecordKind.TEXT: "texts", RecordKind.IMAGE: "images", RecordKind.TABULAR: "features"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Records:
    """Records of one kind in the order of their source, each with a label if there are labels.

    Exactly one of `texts`, `images` (paths, or images that are decoded when needed) and `features` is filled.
    `labels[i]` is the place of record i's label in `label_names`, which are public by declaration; or, with a
    `label_scale`, a number in its units. `users[i]` is the id of its user. Records with prompts and responses, or with
    messages, have `chats`; then `texts` are all their messages, to compare records.
    """

    kind: RecordKind
    source: str
    texts: Sequence[str] = ()
    chats: Sequence[Chat] | None = None
    prompt_template: str | None = None  # of the prompts in `chats`; None if the records are lists of messages
    images: Sequence[Any] = ()
    features: NDArray[np.float32] | None = None  # [records, columns]
    feature_names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    unfit: NDArray[np.bool_] | None = None  # [records, columns]: outside the declared range, or in no declared category
    labels: NDArray[Any] | None = None  # [records]
    label_names: tuple[str, ...] = ()
    label_scale: Number | None = None
    users: Sequence[Any] | None = None
    text_column: str | None = None  # the column that the texts were read from, if there was a choice
    locate: Locate = readers.record_number

    def __post_init__(self) -> None:
        if self.labels is not None and len(self.labels) != len(self):
            raise ValueError(f"labels has {len(self.labels)} entries for {len(self)} records; give one per record")

    def __len__(self) -> int:
        return len(self.contents)

    @property
    def contents(self) -> Any:
        """The texts, the images or the features."""
        return getattr(self, _FIELDS[self.kind])

    def refuse_empty(self) -> None:
        """Raise a ValueError if texts are missing: they would count as records and teach nothing."""
        wrong = [index for index, text in enumerate(self.texts) if not text.strip()]
        what = "text" if self.text_column is None else repr(self.text_column)
        refuse(wrong, self.locate, f"data {self.source!r}", f"records without {what}", "remove them")

    def take(self, indices: Sequence[int] | NDArray[Any]) -> Records:
        """The records at these places, in this order; use it to hold some out before training.

        >>> Records(kind=RecordKind.TEXT, source="memory", texts=["one", "two", "three"]).take([2, 0]).texts
        ['three', 'one']
        """
        chosen = np.asarray(indices, dtype=np.int64)
        contents = self.contents
        if isinstance(contents, np.ndarray):
            contents = contents[chosen]
        else:
            contents = contents.take(chosen) if isinstance(contents, HubColumn) else [contents[i] for i in chosen]
        return dataclasses.replace(
            self,
            **{_FIELDS[self.kind]: contents},
            labels=None if self.labels is None else self.labels[chosen],
            unfit=None if self.unfit is None else self.unfit[chosen],
            users=None if self.users is None else [self.users[i] for i in chosen],
            chats=None if self.chats is None else [self.chats[i] for i in chosen],
            locate=lambda index: self.locate(int(chosen[index])),
        )


def read_records(
    source: str | Path,
    *,
    text_column: str | None = None,
    label_column: str | None = None,
    user_column: str | None = None,
    users_may_lack: bool = False,
    split: str = "train",
    kind: RecordKind | None = None,
    label_names: Sequence[str] | None = None,
    declared: Mapping[str, Any] | None = None,
    drop: Sequence[str] = (),
    may_be_chats: bool = False,
    prompt_template: str | None = None,
    messages_column: str | None = None,
) -> Records:
    """Read the records of a file, a folder or a Hugging Face dataset.

    | source | a record is |
    |---|---|
    | .jsonl, .csv, .tsv, .parquet | a line or row |
    | .txt | a line that is not blank |
    | a folder with such tables | a row of the files whose names begin with `split`, or of all if none has a split |
    | a folder with .txt files | a file |
    | a folder with CLASS/*.png (.jpg, …) | a file; its label is the name of its folder |
    | a folder written by `datasets` | a row of `split` |
    | any other name, or name:configuration | a row of `split` of that dataset on the Hugging Face hub |

    Args:
        source: A file, a folder or the name of a dataset.
        text_column: The column of texts. Defaults to "text", then to the only column of strings. A table without a
            column of strings is tabular.
        label_column: The column of labels. Defaults to "label" or "labels".
        user_column: The column of user ids. It is not a feature.
        users_may_lack: Accept a source without that column, such as held-out records.
        split: Which part to read if the source has several.
        kind: The kind of record, if it should not be inferred.
        label_names: The labels in their order. Give those of the training records when reading evaluation records.
        declared: For a table, what is publicly known about each column: `{"age": {"low": 0, "high": 120}}`. A declared
            label is read as declared.
        drop: Columns of a table to leave out; "*" for all that are not declared.
        may_be_chats: Without a column "text", look for "messages", or for "prompt" with "response" or "completion".
        prompt_template: The prompt before each text, such as "A {label} review:"; its fields are columns.
        messages_column: The column of chats, which are lists of messages with a role and a content.

    Returns:
        Every record of the source, once and in order. Blank and null texts are kept as empty texts.

    Raises:
        ValueError: The source is missing, empty or broken, a column or label is missing, or a column is not declared.

    Not private: label names that are found in the data. Declare them if they are not known to everyone.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
    ...     _ = file.write("text,label\\nfine,good\\n,bad\\n")
    ...     file.flush()
    ...     found = read_records(file.name)
    >>> found.texts, found.labels, found.label_names
    (['fine', ''], array([1, 0]), ('bad', 'good'))
    """
    columns, locate = read_columns(source, split=split, kind=kind)
    users = None
    if user_column is not None and user_column in columns:
        users, columns = list(columns[user_column]), {own: columns[own] for own in columns if own != user_column}
        what = f"user_column={user_column!r}"
        missing = [index for index, user in enumerate(users) if tables.is_missing(user)]
        refuse(missing, locate, what, "records without a user", "every record needs one, and NA is not an id")
        ids = {user for user in users if isinstance(user, str) and user.isdecimal()}
        twice = [index for index, user in enumerate(users) if str(user).endswith(".0") and str(user)[:-2] in ids]
        refuse(twice, locate, what, "ids such as 12.0 that also occur as 12", "write each id in one way")
        if user_column in {*(declared or ()), *drop}:
            raise ValueError(f"{what} is not a feature; leave it out of columns and drop")
    elif user_column is not None and not users_may_lack:
        raise ValueError(f"user_column={user_column!r} is not a column; the columns are {', '.join(columns)}")
    chosen = (text_column, label_column, kind, label_names, declared or {}, drop)
    reader = _Reader(str(source), columns, locate, *chosen)
    if may_be_chats and (text_column, prompt_template, messages_column) == (None, None, None) and "text" not in columns:
        if "messages" in columns:
            messages_column = "messages"
        elif "prompt" in columns and any(name in columns for name in _RESPONSES):
            prompt_template = "{prompt}"
    if messages_column is not None:
        found = reader.read_messages(messages_column)
    elif prompt_template is not None:
        found = reader.read_prompts(prompt_template)
    else:
        found = reader.read()
    return dataclasses.replace(found, users=users)


def read_columns(source: str | Path, *, split: str = "train", kind: RecordKind | None = None) -> tuple[Columns, Locate]:
    """Read a source as named columns with one value per record; see `read_records`."""
    name = str(source)
    if not name.strip():
        raise ValueError(f"data {name!r} is blank; give a file, a folder or a dataset's name")
    path = Path(source).expanduser()
    locate: Locate = readers.record_number
    if any((path / file).is_file() for file in ("dataset_dict.json", "state.json")):  # written by save_to_disk
        columns = readers.load_saved_dataset(path, split)
    elif path.is_dir():
        columns, locate = _folder(path, split, kind)
    elif path.is_file() and path.suffix.lower() == ".txt":
        columns = {"text": [text for line in readers.read_text(path).split("\n") if (text := line.strip())]}
    elif path.is_file():
        columns, locate = readers.read_tables([path])
    elif path.suffix in (*readers.TABLE_SUFFIXES, ".txt", ".json") or path.is_absolute() or name.startswith((".", "~")):
        raise ValueError(f"data {name!r} does not exist; check the path")
    else:
        columns = readers.load_hub_dataset(name, split)
    if not columns or not len(next(iter(columns.values()))):
        raise ValueError(f"data {name!r} has no records; check the file, or give another")
    return columns, locate


def held_out_places(count: int, fraction: float) -> NDArray[np.int64]:
    """Every k-th place from k − 1 on, k = round(1/fraction): a rule that does not look at the records."""
    every = max(2, round(1 / fraction)) if fraction else count + 1
    return np.arange(every - 1, count, every, dtype=np.int64)


def _folder(folder: Path, split: str, kind: RecordKind | None) -> tuple[Columns, Locate]:
    texts = readers.files_below(folder, (".txt",)) if kind is not RecordKind.IMAGE else []
    pictures = readers.files_below(folder, readers.IMAGE_SUFFIXES) if kind is not RecordKind.TEXT else []
    images = {path: path.relative_to(folder).parts[0] for path in pictures if path.parent != folder}  # with its class
    tables = readers.table_files(folder, split) if kind is not RecordKind.IMAGE else []
    if bool(texts) + bool(images) + bool(tables) != 1:
        raise ValueError(
            f"data {str(folder)!r} holds {len(tables)} tables, {len(texts)} .txt files and {len(images)} images in "
            "folders (CLASS/*.png); give a folder with one kind"
        )
    if tables:
        return readers.read_tables(tables)
    files = texts or list(images)
    if texts:
        columns: Columns = {"text": [readers.read_text(path) for path in texts]}
    else:
        columns = {"image": files, "label": list(images.values())}
    return columns, lambda index: str(files[index])


@dataclass(frozen=True)
class _Reader:
    """Chooses among the columns of a source what the caller of `read_records` asked for."""

    source: str
    columns: Columns
    locate: Locate
    text: str | None
    label: str | None
    kind: RecordKind | None
    label_names: Sequence[str] | None
    declared: Mapping[str, Any]
    drop: Sequence[str]

    def read(self) -> Records:
        label = self._label_column()
        images = [name for name, values in self.columns.items() if _is_images(values)]
        if self.kind is RecordKind.IMAGE or (self.kind is None and self.text is None and images):
            if len(images) != 1:
                raise ValueError(f"data {self.source!r} has {len(images)} columns of images; one is needed")
            return self._records(RecordKind.IMAGE, label, images=self.columns[images[0]])
        text = None if self.kind is RecordKind.TABULAR else self._text_column(label)
        if text is not None:
            values = list(self.columns[text])
            wrong = [index for index, value in enumerate(values) if not isinstance(value, str | None)]
            refuse(wrong, self.locate, f"text_column={text!r}", "values that are not strings", "choose a text column")
            column = None if list(self.columns) == ["text"] else text  # a .txt file has no columns
            return self._records(RecordKind.TEXT, label, texts=[value or "" for value in values], text_column=column)
        if label is None:
            raise ValueError(
                f"data {self.source!r} has no column 'label'; set label_column (--label-column) to one of "
                f"{', '.join(self.columns)}"
            )
        return self._table(label, [name for name in self.columns if name not in (label, *images)])

    def read_messages(self, column: str) -> Records:
        """Chats in one column."""
        found = list(self.columns[self._existing(column, "messages_column")])
        problems = {index: problem for index, chat in enumerate(found) if (problem := problem_of(chat))}
        for problem in dict.fromkeys(problems.values()):
            wrong = [index for index in problems if problems[index] == problem]
            refuse(wrong, self.locate, f"messages_column={column!r}", f"records {problem}", "correct or remove them")
        texts = ["\n".join(message["content"] for message in chat) for chat in found]
        return self._records(RecordKind.TEXT, None, texts=texts, chats=found, text_column=column)

    def read_prompts(self, template: str) -> Records:
        """Prompts that a template makes of columns, and responses."""
        own = [name for name in _RESPONSES if name in self.columns]
        if self.text is None and not own:
            raise ValueError(
                f"data {self.source!r} has no column {' or '.join(map(repr, _RESPONSES))}; set text_column "
                f"(--text-column) to one of {', '.join(self.columns)}"
            )
        text = own[0] if self.text is None else self._existing(self.text, "text_column")
        label, fields = self._label_column(), prompts.fields(template)
        label = label if label in fields else None
        for name in fields:
            if name not in self.columns:
                columns = ", ".join(self.columns)
                raise ValueError(f"prompt_template={template!r} names {name!r}, but the columns are {columns}")
        if text in fields:
            raise ValueError(
                f"prompt_template={template!r} puts the text {text!r} into its own prompt; leave {{{text}}} out, or "
                "set text_column (--text-column)"
            )
        used = {name: list(self.columns[name]) for name in fields}
        responses = list(self.columns[text])
        what = f"data {self.source!r}"
        for name, values in {**used, text: responses}.items():
            absent = [value is None or value != value or not str(value).strip() for value in values]  # NaN is not NaN
            wrong = [place for place, is_absent in enumerate(absent) if is_absent]
            refuse(wrong, self.locate, what, f"records without {name!r}", "remove them")
            wrong = [place for place, value in enumerate(values) if not isinstance(value, str | int | float)]
            refuse(wrong, self.locate, what, f"records whose {name!r} is not a text or a number", "correct them")
        found = self._records(RecordKind.TEXT, label, texts=responses, prompt_template=template, text_column=text)
        if label is not None and found.labels is not None:
            used[label] = [found.label_names[place] for place in found.labels]
        asked = [
            prompts.filled(template, {name: values[index] for name, values in used.items()})
            for index in range(len(responses))
        ]
        pairs = list(zip(asked, map(str, responses), strict=True))
        return dataclasses.replace(
            found,
            texts=["\n".join(pair) for pair in pairs],
            chats=[chat_of(prompt, response) for prompt, response in pairs],
        )

    def _table(self, label: str, names: Sequence[str]) -> Records:
        """The columns of a table, each encoded as it is declared."""
        declared = {name: part for name, part in self.declared.items() if name != label}
        if label in self.drop:
            raise ValueError(f"drop={list(self.drop)} contains the label {label!r}; leave it out, or set label_column")
        chosen = chosen_columns(names, declared, self.drop, self.source)
        if not chosen:
            raise ValueError(f"data {self.source!r} has no column besides the label, so there are no features")
        features, feature_names = tables.encode_table(self.columns, declared, chosen, self.locate)
        unfit = np.stack([tables.unfit(name, declared[name], self.columns[name], self.locate) for name in chosen], 1)
        found = {"features": features, "feature_names": feature_names, "columns": tuple(chosen), "unfit": unfit}
        return self._records(RecordKind.TABULAR, label, **found)

    def _records(self, kind: RecordKind, label: str | None, **contents: Any) -> Records:
        own = None if label is None or label not in self.declared else column_of(label, self.declared[label])
        if label is not None and isinstance(own, Number):
            advice = "correct them, or declare the classes of the label"
            numbers = tables.numbers(label, self.columns[label], self.locate, advice)
            absent = np.flatnonzero(np.isnan(numbers)).tolist()
            refuse(absent, self.locate, f"label_column={label!r}", "records without a label", "every record needs one")
            contents |= {"labels": tables.scaled(own, numbers).astype(np.float32), "label_scale": own}
            return Records(kind=kind, source=self.source, locate=self.locate, **contents)
        labels, names = self._labels(label, own, needed=kind is RecordKind.TABULAR)
        return Records(kind=kind, source=self.source, labels=labels, label_names=names, locate=self.locate, **contents)

    def _label_column(self) -> str | None:
        if self.label is not None:
            return self._existing(self.label, "label_column")
        return next((name for name in ("label", "labels") if name in self.columns and name != self.text), None)

    def _text_column(self, label: str | None) -> str | None:
        """The column of texts; None for a table of numbers."""
        if self.text is not None:
            return self._existing(self.text, "text_column")
        if "text" in self.columns and label != "text":
            return "text"
        strings = [name for name, values in self.columns.items() if name != label and _is_strings(values)]
        if len(strings) == 1:
            return strings[0]
        if strings or self.kind is RecordKind.TEXT:
            raise ValueError(
                f"data {self.source!r} has no column 'text' and {len(strings) or 'no'} columns of strings; set "
                f"text_column (--text-column) to one of {', '.join(self.columns)}"
            )
        return None

    def _existing(self, name: str, argument: str) -> str:
        if name not in self.columns:
            raise ValueError(f"{argument}={name!r} is not a column; the columns are {', '.join(self.columns)}")
        return name

    def _labels(self, label: str | None, own: Any, *, needed: bool) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
        """The labels; none if there is no such column, or if one that was not asked for holds something else."""
        if label is None:
            return None, ()
        values = self.columns[label]
        declared = values.class_names if isinstance(values, HubColumn) else None
        if declared is not None:
            values = [declared[value] if value is not None and value >= 0 else None for value in values]
        try:
            declared = own.names if isinstance(own, Categories) else declared
            what, advice = f"label_column={label!r}", "use a different column, or declare label_names in a recipe"
            if needed:
                advice = f"for a regression declare its range, as --columns {label}=0:50, else label_names in a recipe"
            return _label_places(list(values), self.label_names or declared, what, self.locate, advice)
        except ValueError:
            if needed or self.label is not None or self.label_names is not None:
                raise
            return None, ()


def _is_images(values: Sequence[Any]) -> bool:
    return values.is_image if isinstance(values, HubColumn) else isinstance(values[0], Path)


def _is_strings(values: Sequence[Any]) -> bool:
    """Whether a column holds strings; numbers do not count, although a .csv file holds them as strings."""
    if isinstance(values, HubColumn):
        return values.is_string
    some = [value for value in values if value is not None and value != ""]
    return all(isinstance(value, str) for value in some) and not all(_is_number(value) for value in some)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _is_label(value: Any, *, declared: bool) -> bool:
    """Whether a value is a class: a whole number, or a name; names that are numbers such as 0.5 must be declared."""
    if isinstance(value, str):
        return declared or not _is_number(value) or float(value).is_integer()
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def _label_places(
    values: Sequence[Any], declared: Sequence[str] | None, what: str, locate: Locate, advice: str
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Labels as places in the declared names, or in the names that are found: numbers by size, then strings."""
    wrong = [index for index, value in enumerate(values) if value is None or value == ""]
    refuse(wrong, locate, what, "records without a label", "every record needs one")
    if declared is None:
        wrong = [index for index, value in enumerate(values) if tables.is_missing(value)]
        named = "every record needs one, or declare label_names if such a word is a class"
        refuse(wrong, locate, what, "records with NA, None or the like as label", named)
    wrong = [index for index, value in enumerate(values) if not _is_label(value, declared=declared is not None)]
    refuse(wrong, locate, what, "values that are neither class names nor whole numbers", advice)
    found = [value if isinstance(value, str) else str(int(value)) for value in values]
    if declared is None:
        if len(set(found)) > max(_MANY_LABELS, len(found) / 2):  # their names would be published
            raise ValueError(f"{what} has {len(set(found))} different labels in {len(found)} records; {advice}")
        is_number = {name: name.removeprefix("-").isdecimal() for name in found}
        names = tuple(sorted(is_number, key=lambda name: (0, int(name), "") if is_number[name] else (1, 0, name)))
    else:
        names = tuple(str(name) for name in declared)
        if len(set(names)) < len(names):
            raise ValueError(f"label_names={list(names)} has a name twice; give each once")
        wrong = [index for index, name in enumerate(found) if name not in names]
        refuse(wrong, locate, what, "labels that are not in label_names", "add their names, or remove the records")
    number = {name: place for place, name in enumerate(names)}
    return np.array([number[name] for name in found], dtype=np.int64), names
