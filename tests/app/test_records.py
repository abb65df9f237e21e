"""Every source yields every record once and in order; every bad source is refused in one line."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dpoptim.app import RecordKind, Records, prepare, read_records
from dpoptim.integrations.losses import Task

TEXTS = ["first, with a comma", 'second "quoted"\nand two lines', "", "naïve – 日本語", "  "]
LABELS = ["yes", "no", "no", "yes", "maybe"]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def write_csv(path: Path, columns: dict[str, list[Any]], delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def write(folder: Path, kind: str, columns: dict[str, list[Any]], name: str = "data") -> Path:
    path = folder / f"{name}.{kind}"
    if kind == "jsonl":
        return write_jsonl(path, [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
    if kind == "parquet":
        pq.write_table(pa.table(columns), path)
        return path
    if kind == "saved":
        datasets.Dataset.from_dict(columns).save_to_disk(str(path))
        return path
    return write_csv(path, columns, "\t" if kind == "tsv" else ",")


def first_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


# -- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet", "saved"])
def test_tables_of_texts_keep_every_record(kind, tmp_path):
    path = write(tmp_path, kind, {"id": [3, 1, 4, 1, 5], "text": TEXTS, "label": LABELS})
    records = read_records(path)
    assert records.kind is RecordKind.TEXT
    assert list(records.texts) == TEXTS
    assert records.label_names == ("maybe", "no", "yes")
    assert records.labels is not None
    assert [records.label_names[i] for i in records.labels] == LABELS
    assert records.source == str(path)
    assert len(records) == 5


@pytest.mark.parametrize("kind", ["csv", "saved"])
def test_only_string_column_becomes_the_text(kind, tmp_path):
    path = write(tmp_path, kind, {"number": [1, 2, 3, 4, 5], "words": TEXTS, "score": [0.5, 1.5, 2.0, 2.5, 3.0]})
    records = read_records(path)
    assert list(records.texts) == TEXTS
    assert records.labels is None
    assert records.label_names == ()


@pytest.mark.parametrize("kind", ["csv", "saved"])
def test_columns_can_be_named(kind, tmp_path):
    path = write(tmp_path, kind, {"text": LABELS, "body": TEXTS, "grade": [2, 10, 1, 2, 10]})
    records = read_records(path, text_column="body", label_column="grade")
    assert list(records.texts) == TEXTS
    assert records.label_names == ("1", "2", "10")  # numbers by size
    assert records.labels is not None
    assert records.labels.tolist() == [1, 2, 0, 1, 2]


@pytest.mark.parametrize("kind", ["jsonl", "saved"])
def test_missing_column_is_refused(kind, tmp_path):
    path = write(tmp_path, kind, {"a": TEXTS, "b": LABELS})
    with pytest.raises(ValueError, match="text_column='body' is not a column; the columns are a, b") as error:
        read_records(path, text_column="body")
    first_line(error)
    with pytest.raises(ValueError, match="label_column='kind' is not a column; the columns are a, b"):
        read_records(path, text_column="a", label_column="kind")
    with pytest.raises(ValueError, match=r"2 columns of strings; set text_column \(--text-column\) to one of a, b"):
        read_records(path)
    assert list(read_records(path, label_column="b").texts) == TEXTS


def test_each_line_of_a_text_file_is_a_record(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("one\n\n  two  \n\t\nthree", encoding="utf-8")
    assert read_records(path).texts == ["one", "two", "three"]


def test_each_text_file_in_a_folder_is_a_record(tmp_path):
    (tmp_path / "b").mkdir()
    for name, text in {"z.txt": "last\nof all", "a.txt": "first", "b/m.txt": ""}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    records = read_records(tmp_path)
    assert records.texts == ["first", "", "last\nof all"]


def test_null_texts_are_empty_records(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "one"}, {"text": None}, {"other": 1}])
    records = read_records(path)
    assert records.texts == ["one", "", ""]


@pytest.mark.parametrize("kind", ["csv", "saved"])
def test_missing_texts_are_refused(kind, tmp_path):
    records = read_records(write(tmp_path, kind, {"id": [3, 1, 4, 1, 5], "body": TEXTS}), text_column="body")
    where = "record 3" if kind == "saved" else rf"'data\.{kind}', record 3"
    with pytest.raises(ValueError, match=rf"has 2 records without 'body' \(first: {where}\); remove") as error:
        records.refuse_empty()
    first_line(error)
    records.take([0, 1, 3]).refuse_empty()


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_unreadable_file_is_refused(name, tmp_path, monkeypatch):
    def refuse(*arguments: Any, **named: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    (tmp_path / name).write_text("text\n")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=rf"data '.*{name}' cannot be read by this user") as error:
        read_records(tmp_path / name)
    first_line(error)


def test_long_csv_fields_are_read(tmp_path):
    path = write_csv(tmp_path / "data.csv", {"text": ["x" * 200_000, "y"]})
    assert len(read_records(path).texts[0]) == 200_000


def test_folder_of_tables_is_read_by_split(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", "parquet", {"text": ["a", "b"]}, "train-00000-of-00002")
    write(tmp_path / "data", "parquet", {"text": ["c"]}, "train-00001-of-00002")
    write(tmp_path / "data", "parquet", {"text": ["d"]}, "test-00000-of-00001")
    assert read_records(tmp_path).texts == ["a", "b", "c"]
    assert read_records(tmp_path, split="test").texts == ["d"]
    with pytest.raises(ValueError, match="split='validation' is not in any file name in"):
        read_records(tmp_path, split="validation")
    plain = tmp_path / "plain"
    plain.mkdir()
    write(plain, "csv", {"text": ["1", "2"]}, "x")
    write(plain, "csv", {"text": ["3"]}, "y")
    assert read_records(plain).texts == ["1", "2", "3"]
    write(plain, "csv", {"words": ["4"]}, "z")
    with pytest.raises(ValueError, match=r"z\.csv' has columns words and x\.csv has text"):
        read_records(plain)


def test_saved_dataset_is_read_by_split(tmp_path):
    parts = {"train": {"text": ["a", "b"], "label": [1, 0]}, "test": {"text": ["c"], "label": [-1]}}
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    datasets.DatasetDict(
        {name: datasets.Dataset.from_dict(part, features=features) for name, part in parts.items()}
    ).save_to_disk(str(tmp_path / "saved"))
    records = read_records(tmp_path / "saved")
    assert records.texts == ["a", "b"]
    assert records.labels is not None
    assert records.labels.tolist() == [1, 0]
    assert records.label_names == ("neg", "pos")
    unlabelled = read_records(tmp_path / "saved", split="test")
    assert (unlabelled.texts, unlabelled.labels) == (["c"], None)
    with pytest.raises(ValueError, match="label_column='label' has 1 records without a label"):
        read_records(tmp_path / "saved", split="test", label_column="label")
    with pytest.raises(ValueError, match=r"split='dev' is not in .* which has train, test"):
        read_records(tmp_path / "saved", split="dev")


def test_label_names_can_be_declared(tmp_path):
    path = write(tmp_path, "csv", {"text": TEXTS, "label": LABELS})
    records = read_records(path, label_names=["yes", "no", "maybe", "never"])
    assert records.label_names == ("yes", "no", "maybe", "never")
    assert records.labels is not None
    assert records.labels.tolist() == [0, 1, 1, 0, 2]
    with pytest.raises(
        ValueError, match=r"has 1 labels that are not in label_names \(first: 'data\.csv', record 5\)"
    ) as error:
        read_records(path, label_names=["yes", "no"])
    assert "maybe" not in str(error.value)  # the content of a record is private
    with pytest.raises(ValueError, match="has a name twice"):
        read_records(path, label_names=["yes", "yes"])


def test_invalid_labels_are_refused_if_they_were_requested(tmp_path):
    path = write(tmp_path, "csv", {"text": TEXTS, "label": ["a", "", "b", "a", "b"]})
    assert read_records(path).labels is None
    with pytest.raises(ValueError, match=r"has 1 records without a label \(first: '.*', record 2\); every record"):
        read_records(path, label_column="label")
    path = write(tmp_path, "jsonl", {"text": TEXTS, "label": [0.5, 1, 1, 0, 0]})
    with pytest.raises(ValueError, match="has 1 values that are neither class names nor whole numbers"):
        read_records(path, label_column="label")
    path = write(tmp_path, "csv", {"text": TEXTS, "label": ["0.5", "1.5", "1", "1.0", "a"]})
    with pytest.raises(ValueError, match="has 2 values that are neither class names nor whole numbers"):
        read_records(path, label_column="label")
    path = write(tmp_path, "csv", {"text": TEXTS, "label": ["0.5", "NA", "1", "1.0", "a"]})
    with pytest.raises(ValueError, match=r"has 1 records with NA, None or the like as label .* or declare label_names"):
        read_records(path, label_column="label")
    read_records(path, label_column="label", label_names=["0.5", "NA", "1", "1.0", "a"])
    path = write(tmp_path, "csv", {"text": TEXTS * 8, "label": [f"patient {number}" for number in range(40)]})
    with pytest.raises(ValueError, match="has 40 different labels in 40 records; use a different column") as error:
        read_records(path, label_column="label")
    assert "patient" not in str(error.value)
    read_records(path, label_names=[f"patient {number}" for number in range(40)])
    path = write(tmp_path, "jsonl", {"text": TEXTS, "label": [[1], [2], [1], [0], [0]]})
    with pytest.raises(ValueError, match="has 5 values that are neither class names nor whole numbers"):
        read_records(path, label_column="label")


# -- tables of numbers, and images ------------------------------------------------------------------------------------


AGES = {"age": {"low": 0, "high": 100}, "dose": {"center": 1, "scale": 2}}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_declared_columns_become_features(kind, tmp_path):
    path = write(tmp_path, kind, {"age": [30, 50, 70], "kind": ["a", "b", "a"], "dose": [0.5, -1.0, 99.0]})
    records = read_records(path, label_column="kind", declared=AGES)
    assert records.kind is RecordKind.TABULAR
    assert records.feature_names == ("age", "age (missing)", "dose", "dose (missing)")
    expected = np.array([[-0.8, 0, -0.25, 0], [0, 0, -1, 0], [0.8, 0, 10, 0]], np.float32)
    assert records.features is not None
    np.testing.assert_allclose(np.asarray(records.features), expected, rtol=1e-6)
    assert records.labels is not None
    assert records.labels.tolist() == [0, 1, 0]
    taken = records.take([2, 0])
    np.testing.assert_array_equal(np.asarray(taken.features), records.features[[2, 0]])


def test_bad_tables_are_refused(tmp_path):
    path = write(tmp_path, "csv", {"age": ["30", "", "x"], "label": [0, 1, 0]})
    with pytest.raises(ValueError, match=r"'age' has 1 values that are not numbers \(first: '.*', record 3\); "):
        read_records(path, kind=RecordKind.TABULAR, declared={"age": AGES["age"]})
    with pytest.raises(ValueError, match="column 'age' is not declared") as refused:
        read_records(path, kind=RecordKind.TABULAR)
    assert 'age = {low = 0, high = 120} for numbers or age = ["a", "b"] for categories' in first_line(refused)
    (tmp_path / "data.csv").write_text("age;label\n30;a\n31;b\n")
    with pytest.raises(ValueError, match="separates its fields by ';'; separate them by ','"):
        read_records(tmp_path / "data.csv")
    path = write(tmp_path, "csv", {"age": [1, 2], "dose": [1, 2]})
    with pytest.raises(ValueError, match=r"has no column 'label'; set label_column .* to one of age, dose"):
        read_records(path)
    path = write(tmp_path, "csv", {"label": [1, 2]})
    with pytest.raises(ValueError, match="has no column besides the label"):
        read_records(path, label_column="label")
    with pytest.raises(ValueError, match="has 0 columns of images; one is needed"):
        read_records(path, kind=RecordKind.IMAGE)


def test_folders_of_images_are_labels(tmp_path):
    for name, colour in {"dog/b.png": 10, "cat/a.jpg": 20, "dog/a.png": 30}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (5, 4), (colour, 0, 255)).save(tmp_path / name)
    records = read_records(tmp_path)
    assert records.kind is RecordKind.IMAGE
    assert [path.name for path in records.images] == ["a.jpg", "a.png", "b.png"]
    assert records.label_names == ("cat", "dog")
    assert records.labels is not None
    assert records.labels.tolist() == [0, 1, 1]
    assert [path.name for path in records.take([2]).images] == ["b.png"]
    with pytest.raises(ValueError, match="text_column='text' is not a column; the columns are image, label"):
        read_records(tmp_path, text_column="text")
    (tmp_path / "note.txt").write_text("one")
    with pytest.raises(ValueError, match=r"holds 0 tables, 1 \.txt files and 3 images in folders"):
        read_records(tmp_path)
    assert len(read_records(tmp_path, kind=RecordKind.IMAGE)) == 3


def test_images_of_a_saved_dataset_are_decoded_lazily(tmp_path):
    paths = []
    for number in range(3):
        paths.append(str(tmp_path / f"{number}.png"))
        Image.new("RGB", (6, 6), (number * 100, 0, 0)).save(paths[-1])
    columns = {"picture": paths, "label": [1, 0, 1]}
    features = datasets.Features({"picture": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y"])})
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(tmp_path / "saved"))
    records = read_records(tmp_path / "saved")
    assert records.kind is RecordKind.IMAGE
    assert len(records) == 3
    assert records.images[2].size == (6, 6)
    assert records.label_names == ("x", "y")
    prepared = prepare(task=Task.IMAGE_CLASSIFICATION, model="small-cnn", records=records.take([2, 0]), image_size=8)
    values, label = prepared.dataset[0]
    assert values.shape == (3, 8, 8)
    np.testing.assert_allclose(values[:, 0, 0], [200 / 127.5 - 1, -1, -1], rtol=1e-5)
    assert label == 1


# -- one line for each bad source -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.jsonl", "", "has no records; check the file"),
        ("a.csv", "text,label\n", "has no records; check the file"),
        ("a.csv", "", "has no records; check the file"),
        ("a.txt", "\n \n", "has no records; check the file"),
        ("a.jsonl", "[" * 100_000, "line 1 is not a JSON object"),
        ("a.jsonl", '{"text": ' + "1" * 5_000 + "}", "line 1 is not a JSON object"),
        ("a.jsonl", '["x"]\n', "line 1 is not a JSON object"),
        ("a.jsonl", '{"text": 5}\n', "has 1 values that are not strings (first: 'a.jsonl', record 1); choose"),
        ("a.jsonl", '{"text": "x"}\n\n{"text": secret}\n', "line 3 is not a JSON object"),
        ("a.csv", 'text,label\n"x\ny",a\n\n"z\n', "record 2 has 1 fields and the header has 2"),
        ("a.csv", "text,label\nx,y\nz\n", "record 2 has 1 fields and the header has 2"),
        ("a.csv", "text,text\nx,y\n", "has the column 'text' more than once"),
        ("a.parquet", "no parquet", "is not a readable parquet file"),
        ("a.docx", "x", "cannot be read; give .jsonl, .csv, .tsv, .parquet, .txt"),
    ],
)
def test_broken_files_are_refused_in_one_line(name, content, line, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        read_records(tmp_path / name)
    first_line(error)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("source", ["/no/such.csv", "./here", "~/nothing", "missing.jsonl", "missing.txt"])
def test_missing_source_is_refused(source):
    with pytest.raises(ValueError, match="does not exist; check the path"):
        read_records(source)


def test_blank_source_is_refused():
    """An empty path would be the folder one happens to be in."""
    for source in ("", " "):
        with pytest.raises(ValueError, match="is blank"):
            read_records(source)


def test_files_that_are_not_utf8_are_refused(tmp_path):
    for name in ("a.txt", "a.csv", "a.jsonl"):
        (tmp_path / name).write_bytes(b'text\n{"text": "\xff\xfe"}\n')
        with pytest.raises(ValueError, match=r"is not UTF-8; convert the file first"):
            read_records(tmp_path / name)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"a\.txt' is not UTF-8; convert the file first"):
        read_records(folder)


def test_empty_folder_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"holds 0 tables, 0 \.txt files and 0 images in folders \(CLASS/\*\.png\); give a folder"
    ) as error:
        read_records(tmp_path)
    first_line(error)


def test_missing_hub_dataset_is_refused(monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("cannot reach the hub\nwith much advice")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ValueError, match="the Hugging Face hub did not provide it") as error:
        read_records("nobody/nothing")
    assert first_line(error).endswith("(cannot reach the hub)")


def test_hub_dataset_is_loaded_by_name_and_split(monkeypatch):
    asked: list[Any] = []

    def load(*args: Any, **kwargs: Any) -> Any:
        asked.append((args, kwargs))
        return datasets.Dataset.from_dict({"text": ["a", "b"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_records("somebody/glue:sst2", split="validation").texts == ["a", "b"]
    assert asked == [(("somebody/glue", "sst2"), {"split": "validation"})]


@pytest.mark.parametrize(
    ("missing", "source", "line"),
    [
        ("pyarrow", "a.parquet", "reading a.parquet needs the package pyarrow; run: pip install 'dpoptim[data]'"),
        ("datasets", "some/name", "needs the package datasets; run: pip install 'dpoptim[data]'"),
    ],
)
def test_missing_packages_are_named(missing, source, line, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    (tmp_path / "a.parquet").write_text("x")
    with pytest.raises(ValueError, match="needs the package") as error:
        read_records(tmp_path / source if source.endswith("parquet") else source)
    assert line in first_line(error)


def test_number_of_labels_must_match():
    with pytest.raises(ValueError, match="labels has 1 entries for 2 records"):
        Records(kind=RecordKind.TEXT, source="memory", texts=["a", "b"], labels=np.array([0]), label_names=("x",))


def test_hidden_files_are_not_read(tmp_path):
    for name in ("table", "texts", "images"):
        (tmp_path / name / ".ipynb_checkpoints").mkdir(parents=True)
    (tmp_path / "table" / "train.csv").write_text("text,label\na,x\nb,y\n")
    (tmp_path / "table" / ".ipynb_checkpoints" / "train-checkpoint.csv").write_text("text,label\na,x\nb,y\n")
    assert read_records(tmp_path / "table").texts == ["a", "b"]
    (tmp_path / "texts" / "a.txt").write_text("one")
    (tmp_path / "texts" / ".ipynb_checkpoints" / "a-checkpoint.txt").write_text("one")
    assert read_records(tmp_path / "texts").texts == ["one"]
    for kind in ("cat", "dog", ".ipynb_checkpoints"):
        (tmp_path / "images" / kind).mkdir(exist_ok=True)
        for name in ("1.png", "._1.png"):
            Image.new("RGB", (8, 8)).save(tmp_path / "images" / kind / name)
    found = read_records(tmp_path / "images")
    assert found.label_names == ("cat", "dog")
    assert len(found) == 2


@pytest.mark.parametrize(
    "names", [["train.csv", "train.jsonl"], ["train-0.csv", "train_backup/a.csv"], ["train/a.csv", "train_old/a.csv"]]
)
def test_folder_that_may_repeat_records_is_refused(names, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n' if name.endswith("jsonl") else "text\na\n")
    with pytest.raises(ValueError, match="may repeat them"):
        read_records(tmp_path)


def test_errors_name_the_file_of_a_record(tmp_path):
    for name, texts in (("a.csv", ["x", "y"]), ("b.csv", ["z", ""])):
        write_csv(tmp_path / name, {"text": texts, "id": [1] * len(texts)})
    with pytest.raises(ValueError, match=r"has 1 records without 'text' \(first: 'b\.csv', record 2\)"):
        read_records(tmp_path).refuse_empty()
