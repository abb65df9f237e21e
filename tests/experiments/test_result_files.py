"""Files of results: whole lines, torn lines, damage, keys."""

from __future__ import annotations

import json

import pytest

from experiments import results_file
from experiments.__main__ import main

SETTING = {"commit": "abc", "machine": "m", "versions": {}, "made": "2026-01-01T00:00:00+00:00", "seconds": 1.0}


def line(**cell):
    return {
        "experiment": "x", "scale": "smoke", "cell": cell, "plan": None, "epsilon": None,
        "adjacency": None, "note": None, "result": {"loss": 0.1 + 0.2}, "setting": SETTING,
    }  # fmt: skip


def test_what_is_appended_is_read_with_all_digits(tmp_path):
    path = tmp_path / "new" / "x.jsonl"
    lines = [line(a=1), line(a=2, b="ζ")]
    for one in lines:
        results_file.append(path, one)
    found = results_file.read(path)
    assert found.lines == lines
    assert found.lines[0]["result"]["loss"] == 0.30000000000000004
    assert found.note is None
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("result", [{}, None, [1.0]])
def test_a_line_without_a_result_is_refused(tmp_path, result):
    with pytest.raises(ValueError, match="has no 'result'"):
        results_file.append(tmp_path / "x.jsonl", line(a=1) | {"result": result})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_refuses_numbers_that_are_not_finite(tmp_path, value):
    with pytest.raises(ValueError, match="not finite"):
        results_file.append(tmp_path / "x.jsonl", line() | {"result": {"loss": value}})
    assert not (tmp_path / "x.jsonl").exists()


def test_refuses_lines_that_do_not_say_what_they_are(tmp_path):
    with pytest.raises(ValueError, match="'plan'"):
        results_file.append(tmp_path / "x.jsonl", {"experiment": "x", "scale": "smoke", "cell": {}})


@pytest.mark.parametrize("kept", [1, 40, -2])
def test_a_torn_last_line_is_dropped_with_a_note_and_mended_by_the_next(tmp_path, kept):
    path = tmp_path / "x.jsonl"
    for number in (1, 2):
        results_file.append(path, line(a=number))
    data = path.read_bytes()
    second = data.index(b"\n") + 1
    path.write_bytes(data[:second] + data[second:][:kept])
    found = results_file.read(path)
    assert [one["cell"] for one in found.lines] == [{"a": 1}]
    assert "line 2" in str(found.note)
    results_file.append(path, line(a=3))
    found = results_file.read(path)
    assert [one["cell"] for one in found.lines] == [{"a": 1}, {"a": 3}]
    assert found.note is None


def test_a_whole_last_line_without_newline_is_kept(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(line(a=1)))
    assert len(results_file.read(path).lines) == 1
    results_file.append(path, line(a=2))
    assert [one["cell"] for one in results_file.read(path).lines] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("damage", ["{", "[1]", '{"experiment": "x"}', ""])
def test_other_damage_names_its_line(tmp_path, damage):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join([json.dumps(line(a=1)), damage, json.dumps(line(a=2)), ""]))
    with pytest.raises(ValueError, match=r"x\.jsonl: line 2 is damaged"):
        results_file.read(path)


@pytest.mark.parametrize("setting", [{}, None, {name: SETTING[name] for name in SETTING if name != "commit"}])
@pytest.mark.parametrize("end", ["", "\n"])
def test_a_line_that_does_not_say_where_it_was_made_is_named(tmp_path, capsys, setting, end):
    """Whether or not it is the last one: a whole JSON object was not cut short."""
    path = tmp_path / "theory.jsonl"
    path.write_text(f"{json.dumps(line(a=1))}\n{json.dumps(line(a=2) | {'setting': setting})}{end}")
    with pytest.raises(ValueError, match=r"theory\.jsonl: line 2 is damaged: it has no 'commit' in its 'setting'"):
        results_file.read(path)
    assert main(["theory", "--render", "--out", str(tmp_path)]) == 2
    assert "line 2 is damaged" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no 'commit' in its 'setting'"):
        results_file.append(path, line(a=3) | {"setting": setting})


def test_keys_go_by_settings_and_scale(tmp_path):
    path = tmp_path / "x.jsonl"
    results_file.append(path, line(a=1, b=2))
    results_file.append(path, line(a=2) | {"scale": "paper"})
    assert results_file.done(path) == {results_file.cell_key({"b": 2, "a": 1}), results_file.cell_key({"a": 2})}
    assert results_file.done(path, scale="paper") == {results_file.cell_key({"a": 2})}


def test_starting_again_keeps_the_old_file(tmp_path):
    path = tmp_path / "x.jsonl"
    assert results_file.start_again(path) is None
    results_file.append(path, line(a=1))
    old = results_file.start_again(path)
    assert old is not None
    assert old == tmp_path / "x.jsonl.old"
    assert len(results_file.read(old).lines) == 1
    assert not path.exists()
    results_file.append(path, line(a=2))
    assert results_file.start_again(path) == tmp_path / "x.jsonl.old2", "none is lost"
    assert len(results_file.read(old).lines) == 1
