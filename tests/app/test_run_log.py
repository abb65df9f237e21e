"""Logs and run directories, read back: complete after a crash, refused if a file was changed."""

from __future__ import annotations

import json

import pytest

from dpoptim.app.runs.run_log import RunHistory, RunLog, cut_log, log_lines, read_log, read_runs
from tests.app.report_runs import calibrated, records, write_run


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.jsonl"
    writer = RunLog(path)
    writer.write("start", model="größer\u2028\x85mehr")  # splitlines() would end lines here
    for step in (1, 2, 3):
        writer.write("step", step=step, seconds=0.5)
    return path


def test_written_entries_are_read(log):
    entries = read_log(log)
    assert [entry["kind"] for entry in entries] == ["start", "step", "step", "step"]
    assert entries[0]["model"] == "größer\u2028\x85mehr"
    assert log_lines(log) == entries


@pytest.mark.parametrize("rest", [b'{"kind": "st', '{"kind": "ä'.encode()[:-1], b"rubbish\n"])
def test_truncated_last_line_is_ignored(log, rest):
    complete = read_log(log)
    log.write_bytes(log.read_bytes() + rest)
    assert read_log(log) == complete


@pytest.mark.parametrize("line", ["rubbish", "[1, 2]", "{"])
def test_changed_line_is_refused(log, line):
    lines = log.read_text().split("\n")
    log.write_text("\n".join([lines[0], line, *lines[1:]]))
    with pytest.raises(ValueError, match=r"log\.jsonl, line 2 is not JSON; the file was changed"):
        read_log(log)


def test_log_is_cut_after_a_step(log):
    before = read_log(log)
    cut_log(log, 2)
    assert read_log(log) == before[:3]
    assert json.loads(log.read_bytes().split(b"\n")[0])["model"] == before[0]["model"]


def test_history_of_a_run(tmp_path):
    run = RunHistory(write_run(tmp_path / "run", records(steps=40, taken=30)))
    assert (run.ending, run.last_step, run.plan.steps, run.resumed_from, run.seconds) == (
        "interrupted",
        30,
        40,
        [],
        7.5,
    )
    assert run.plan == calibrated(40)
    assert 0 < run.epsilon_spent < run.epsilon
    with (tmp_path / "run" / "log.jsonl").open("a") as file:
        file.write('{"kind": "start", "resumed_from": 20}\n{"kind": "st')
    run = RunHistory(tmp_path / "run")
    assert (run.ending, len(run.resumed_from)) == ("still running, or killed", 1)
    assert "was cut off" in run.notes[0]


@pytest.mark.parametrize("name", ["recipe.toml", "plan.json", "statement.txt"])
def test_missing_or_broken_file_of_a_run_is_named(name, tmp_path):
    file = write_run(tmp_path / "run", records()) / name
    if name != "statement.txt":
        file.write_text("{")
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            read_runs([tmp_path])
    file.unlink()
    with pytest.raises(ValueError, match=f"{name} cannot be read"):
        RunHistory(tmp_path / "run")


def test_broken_plan_is_refused(tmp_path):
    file = write_run(tmp_path / "run", records()) / "plan.json"
    file.write_text('{"plan": {"steps": 3}, "epsilon": 1, "delta": 1e-6}')
    with pytest.raises(ValueError, match=r"plan\.json cannot be read"):
        RunHistory(tmp_path / "run")
    with pytest.raises(ValueError, match="is not a run directory"):
        RunHistory(tmp_path)
