"""The log of a run, read back: whole after a crash, refused where it was changed, and one reader for all."""

from __future__ import annotations

import json

import pytest

from dpoptim.app.runs.run_log import read_run
from dpoptim.app.runs.run_log import RunLog, cut_log, log_lines, read_log


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.jsonl"
    with RunLog(path) as writer:
        writer.write("start", model="größer\u2028\x85mehr")  # what splitlines() would take for ends of lines
        for step in (1, 2, 3):
            writer.write("step", step=step, seconds=0.5)
    return path


def test_what_was_written_is_read(log):
    entries = read_log(log)
    assert [entry["kind"] for entry in entries] == ["start", "step", "step", "step"]
    assert entries[0]["model"] == "größer\u2028\x85mehr"
    assert [line.place for line in log_lines(log)] == [1, 2, 3, 4]
    assert not any(line.is_open for line in log_lines(log))


@pytest.mark.parametrize("rest", [b'{"kind": "st', '{"kind": "ä'.encode()[:-1], b"rubbish\n"])
def test_a_last_line_that_was_cut_off_is_left_out(log, rest):
    whole = read_log(log)
    log.write_bytes(log.read_bytes() + rest)
    assert read_log(log) == whole
    last = log_lines(log)[-1]
    assert (last.place, last.entry, last.is_open) == (5, None, not rest.endswith(b"\n"))
    said = "last line (5) was cut off" if last.is_open else "1 unreadable line(s) ignored: 5"
    assert said in read_run(log.parent).notes[0]


@pytest.mark.parametrize("line", ["rubbish", "[1, 2]", "{"])
def test_a_line_that_was_changed_is_refused_where_a_run_goes_on_and_noted_where_it_is_shown(log, line):
    lines = log.read_text().split("\n")
    log.write_text("\n".join([lines[0], line, *lines[1:]]))
    with pytest.raises(ValueError, match=r"log.jsonl, line 2 is no JSON; was the file changed\?"):
        read_log(log)
    run = read_run(log.parent)
    assert "1 unreadable line(s) ignored: 2" in run.notes[0]
    assert [row["step"] for row in run.steps] == [1, 2, 3]


def test_a_log_is_cut_behind_a_step(log):
    before = read_log(log)
    cut_log(log, 2)
    assert read_log(log) == before[:3]
    assert json.loads(log.read_bytes().split(b"\n")[0])["model"] == before[0]["model"]
