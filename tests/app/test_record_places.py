"""Records that cannot be used are named by their file and line, never by what is in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpoptim.app import RecordKind, read_records
from dpoptim.app.data.sources import place_of
from tests.app.runs import rows_recipe
from tests.app.test_run import refused

SECRET = "Alice"


def refuse(source: Path, told: str, **options: object) -> None:
    with pytest.raises(ValueError, match="first: ") as error:
        read_records(source, **options).refuse_empty()  # type: ignore[arg-type]
    assert told in str(error.value)
    assert SECRET not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_line_of_jsonl(tmp_path):
    """Blank lines are no records, and count as lines."""
    path = tmp_path / "data.jsonl"
    for bad, options in (
        ({"text": ""}, {}),
        ({"text": None}, {}),
        ({"name": SECRET}, {}),
        ({"text": [SECRET]}, {}),
        ({"text": SECRET}, {"label_column": "label"}),
        ({"text": "x", "label": [SECRET]}, {"label_column": "label"}),
        ({"text": "x", "label": 0.5}, {"label_column": "label"}),
        ({"text": "x", "label": SECRET}, {"label_names": ["yes"], "label_column": "label"}),
    ):
        good = json.dumps({"text": "one", "label": "yes"})
        path.write_text(f"{good}\n\n{good}\n \n{json.dumps(bad)}\n{json.dumps(bad)}\n")
        refuse(path, f"(first: {str(path)!r}, line 5)", **options)


def test_a_row_of_csv_begins_where_its_first_field_does(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text('text,label\n"two\nlines",a\n\n"\n",b\n')
    refuse(path, f"(first: {str(path)!r}, line 5)")
    path = tmp_path / "data.tsv"
    path.write_text(f"a\tb\tlabel\n1\t2\tx\n1\t{SECRET}\ty\n")
    refuse(path, f"(first: {str(path)!r}, line 3)", kind=RecordKind.TABULAR)


def test_a_file_of_a_folder(tmp_path):
    (tmp_path / "tables").mkdir()
    for name, texts in (("a.jsonl", ["x", "y"]), ("b.jsonl", ["z", ""])):
        (tmp_path / "tables" / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    refuse(tmp_path / "tables", f"(first: {str(tmp_path / 'tables' / 'b.jsonl')!r}, line 2)")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("x")
    (tmp_path / "texts" / "b.txt").write_text(" ")
    refuse(tmp_path / "texts", f"(first: {str(tmp_path / 'texts' / 'b.txt')!r})")


def test_records_that_were_taken_keep_their_places(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n{"text": ""}\n')
    with pytest.raises(ValueError, match=r"1 of 2 records .*data\.jsonl', line 3"):
        read_records(path).take([1, 2]).refuse_empty()


def test_a_line_that_is_not_utf8_is_found_in_a_long_file(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 5000 + b'{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"data\.jsonl', line 5001 is not UTF-8"):
        read_records(path)


def test_a_record_of_files_that_have_changed_is_told_by_its_number(tmp_path):
    assert place_of([], 4) == "record 5"


def test_no_run_is_begun_with_them(tmp_path):
    """So no log can hold what the line says; errors of a run that is begun are logged by their type alone."""
    recipe = rows_recipe(tmp_path)
    with Path(recipe.data).open("a") as file:
        file.write(f"1,2,{SECRET},yes\n")
    refused(recipe, tmp_path, r"column 'c' has 1 values that are no finite numbers \(first: '.*rows\.csv', line 122\)")
    assert not (tmp_path / "run" / "log.jsonl").exists()
