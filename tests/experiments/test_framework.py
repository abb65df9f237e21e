"""The framework: cells, results files, rendering, progress, provenance."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import pytest
from rich.console import Console

from experiments import provenance, results_file
from experiments.__main__ import main
from experiments.framework import (
    NAMES,
    Experiment,
    MissingInput,
    Outcome,
    Request,
    experiments,
    lines_of,
    marks,
    render,
    render_into,
    run_cells,
)
from experiments.markdown import made_by, table
from experiments.progress import BarReporter, ProgressReporter
from experiments.tinybert.report import command

CELLS = [{"kind": kind, "size": size} for kind in ("a", "b") for size in (1, 2)]


class Recorder(ProgressReporter):
    """Keeps the messages."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)


def request(tmp_path, **changes):
    return Request(**({"scale": "smoke", "out": tmp_path, "commit": "abc"} | changes))


def outcome(cell):
    return Outcome(result={"doubled": 2 * cell["size"]})


def markdown(lines):
    return "sum " + str(sum(line["result"]["doubled"] for line in lines)) + "\n\n![p](images/x-p.png)"


EXPERIMENT = Experiment(
    name="x",
    run=lambda request, reporter: 0,
    markdown=markdown,
    pictures=lambda lines: {},
)


def _computed(request, reporter=None):
    """Runs all cells, and counts those that were computed."""
    seen = []

    def watched(cell):
        seen.append(cell)
        return outcome(cell)

    assert run_cells("x", CELLS, watched, request, reporter or ProgressReporter()) == 0, "none is left"
    return len(seen)


def test_resumes_after_an_interruption(tmp_path):
    """Three cells are done when it is interrupted; the next run computes the fourth and nothing else."""
    seen: list[dict[str, object]] = []

    def watched(cell):
        seen.append(cell)
        return outcome(cell)

    def interrupted(cell):
        if len(seen) == 3:
            raise KeyboardInterrupt
        return watched(cell)

    with pytest.raises(KeyboardInterrupt):
        run_cells("x", CELLS, interrupted, request(tmp_path), ProgressReporter())
    assert seen == CELLS[:3]
    run_cells("x", CELLS, watched, request(tmp_path), ProgressReporter())
    assert seen == CELLS, "the fourth cell alone is new"
    assert [line["cell"] for line in results_file.read(tmp_path / "x.jsonl").lines] == CELLS


def test_a_torn_line_is_run_again(tmp_path):
    run_cells("x", CELLS, outcome, request(tmp_path), ProgressReporter())
    path, reporter = tmp_path / "x.jsonl", Recorder()
    path.write_bytes(path.read_bytes()[:-20])
    assert _computed(request(tmp_path), reporter) == 1
    assert any("cut short" in text for text in reporter.texts)
    assert [line["cell"] for line in results_file.read(path).lines] == CELLS


def test_a_line_records_where_it_comes_from(tmp_path):
    run_cells("x", CELLS[:1], outcome, request(tmp_path), ProgressReporter())
    (line,) = results_file.read(tmp_path / "x.jsonl").lines
    assert (line["experiment"], line["scale"], line["cell"]) == ("x", "smoke", CELLS[0])
    assert line["setting"]["commit"] == "abc"
    assert set(line["setting"]) == {"commit", "machine", "versions", "made", "seconds"}
    assert "torch" in line["setting"]["versions"]


def test_only_scale_and_overwrite(tmp_path):
    assert _computed(request(tmp_path, only=("kind=b", "size=2"))) == 1
    assert _computed(request(tmp_path)) == 3
    assert _computed(request(tmp_path, scale="paper")) == 4, "another scale"
    assert _computed(request(tmp_path, overwrite=True)) == 4
    assert len(results_file.read(tmp_path / "x.jsonl").lines) == 4
    assert len(results_file.read(tmp_path / "x.jsonl.old").lines) == 8
    with pytest.raises(MissingInput, match="leaves no cell"):
        run_cells("x", CELLS, outcome, request(tmp_path, only=("kind=c",)), ProgressReporter())
    with pytest.raises(ValueError, match="NAME=VALUE"):
        request(tmp_path, only=("kind",))


def test_no_cell_starts_past_the_time_limit(tmp_path):
    reporter = Recorder()
    late = request(tmp_path, time_limit=10.0, started=time.perf_counter() - 20.0)
    assert run_cells("x", CELLS, outcome, late, reporter) == 4
    assert not (tmp_path / "x.jsonl").exists()
    assert "4 cells are left" in reporter.texts[-1]


def test_renders_the_largest_scale_from_the_file(tmp_path):
    run_cells("x", CELLS, outcome, request(tmp_path), ProgressReporter())
    run_cells("x", CELLS[:1], outcome, request(tmp_path, scale="paper"), ProgressReporter())
    assert [line["scale"] for line in lines_of(EXPERIMENT, tmp_path)] == ["paper"]
    (page,) = render(EXPERIMENT, tmp_path)
    assert page.read_text().startswith("sum 2\n")
    render(EXPERIMENT, tmp_path, scale="smoke")
    assert page.read_text().startswith("sum 12\n")
    document = tmp_path / "results.md"
    document.write_text("before\n<!-- begin x -->\n<!-- end x -->\nafter\n")
    render_into(document, EXPERIMENT, tmp_path)
    text = document.read_text()
    assert text.startswith("before\n<!-- begin x -->\nsum 2\n")
    assert "(images/x-p.png)" in text
    assert text.endswith("<!-- end x -->\nafter\n")
    short = tmp_path / "short.md"
    short.write_text("<!-- begin x table -->\n<!-- end x table -->\n")
    assert render_into(short, replace(EXPERIMENT, table=lambda lines: f"{len(lines)} lines"), tmp_path) == [short]
    assert short.read_text() == "<!-- begin x table -->\n1 lines\n<!-- end x table -->\n"
    with pytest.raises(ValueError, match="holds no result"):
        lines_of(EXPERIMENT, tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "<!-- begin x -->", "<!-- end x --><!-- begin x -->", "<!-- begin x -->" * 2])
def test_a_page_needs_its_marks(text):
    with pytest.raises(ValueError, match="marks"):
        marks(text, EXPERIMENT)


def test_a_table_needs_rows_of_one_length():
    with pytest.raises(ValueError, match="2 cells"):
        table(["a"], [["1", "2"]])


def test_every_name_has_an_experiment_of_that_name():
    assert [one.name for one in experiments(["all"])] == list(NAMES)
    with pytest.raises(ValueError, match="must be one of"):
        experiments(["nothing"])


def test_the_commit_is_that_of_the_repository(monkeypatch, tmp_path):
    """Without the repository, the version takes its place."""
    provenance.this_commit.cache_clear()
    assert provenance.this_commit().split("+")[0] == provenance._git("rev-parse", "--short", "HEAD")
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    provenance.this_commit.cache_clear()
    assert provenance.this_commit() == f"dpoptim {provenance.__version__}"
    provenance.this_commit.cache_clear()


# Results files.

SETTING = {"commit": "abc", "machine": "m", "versions": {}, "made": "2026-01-01T00:00:00+00:00", "seconds": 1.0}


def line(**cell):
    return {
        "experiment": "x", "scale": "smoke", "cell": cell, "plan": None, "epsilon": None,
        "adjacency": None, "note": None, "result": {"loss": 0.1 + 0.2}, "setting": SETTING,
    }  # fmt: skip


def test_lines_are_read_with_all_digits(tmp_path):
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


def test_refuses_incomplete_lines(tmp_path):
    with pytest.raises(ValueError, match="'plan'"):
        results_file.append(tmp_path / "x.jsonl", {"experiment": "x", "scale": "smoke", "cell": {}})


@pytest.mark.parametrize("kept", [1, 40, -2])
def test_a_torn_last_line_is_dropped_and_repaired(tmp_path, kept):
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
def test_other_damage_is_reported_with_its_line(tmp_path, damage):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join([json.dumps(line(a=1)), damage, json.dumps(line(a=2)), ""]))
    with pytest.raises(ValueError, match=r"x\.jsonl: line 2 is damaged"):
        results_file.read(path)


@pytest.mark.parametrize(("setting", "end"), [({}, ""), (None, "\n"), (SETTING | {"commit": None}, "")][:2])
def test_a_line_without_its_origin_is_refused(tmp_path, capsys, setting, end):
    """Whether or not it is the last one: a whole JSON object was not cut short."""
    path = tmp_path / "theory.jsonl"
    path.write_text(f"{json.dumps(line(a=1))}\n{json.dumps(line(a=2) | {'setting': setting})}{end}")
    with pytest.raises(ValueError, match=r"theory\.jsonl: line 2 is damaged: it has no 'commit' in its 'setting'"):
        results_file.read(path)
    assert main(["theory", "--render", "--out", str(tmp_path)]) == 2
    assert "line 2 is damaged" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no 'commit' in its 'setting'"):
        results_file.append(path, line(a=3) | {"setting": setting})


def test_keys_depend_on_settings_and_scale(tmp_path):
    path = tmp_path / "x.jsonl"
    results_file.append(path, line(a=1, b=2))
    results_file.append(path, line(a=2) | {"scale": "paper"})
    assert results_file.done(path) == {results_file.cell_key({"b": 2, "a": 1}), results_file.cell_key({"a": 2})}
    assert results_file.done(path, scale="paper") == {results_file.cell_key({"a": 2})}


def test_starting_over_keeps_the_old_file(tmp_path):
    path = tmp_path / "x.jsonl"
    assert results_file.start_over(path) is None
    results_file.append(path, line(a=1))
    old = results_file.start_over(path)
    assert old is not None
    assert old == tmp_path / "x.jsonl.old"
    assert len(results_file.read(old).lines) == 1
    assert not path.exists()
    results_file.append(path, line(a=2))
    assert results_file.start_over(path) == tmp_path / "x.jsonl.old2", "none is lost"
    assert len(results_file.read(old).lines) == 1


# Progress and provenance.


@pytest.mark.parametrize(
    "cell", ["sparse, dense", "sparse, independent_moments_for_free, independent", "x" * 200], ids=len
)
def test_the_bar_fits_into_80_columns(cell):
    console = Console(width=80, force_terminal=True, color_system=None)
    reporter = BarReporter(console)
    reporter.begin("quadratic", total=411, done=96)
    reporter.doing(cell)
    with console.capture() as shown:
        console.print(reporter._progress.get_renderable())
    (line,) = shown.get().splitlines()
    found = re.fullmatch(r"quadratic [━╸╺ ]{12,}  96/411 0:00:0\d -:--:-- (.*)", line)
    assert found, line
    assert found[1][:20].rstrip() == cell[:20], "as much of the cell as there is room for"
    assert len(line) <= 80


@pytest.mark.parametrize(
    ("machine", "scale", "given"),
    [
        ("NVIDIA H200", "paper", " --data DIR --model DIR --device cuda"),
        ("x86_64, 2 cores, 1 threads", "small", " --data DIR --model DIR"),
        ("x86_64, 2 cores, 1 threads", "smoke", ""),
    ],
)
def test_the_command_names_the_device(machine, scale, given):
    lines = [{"scale": scale, "setting": {"machine": machine}}]
    assert command("experiments tinybert", lines) == f"python -m experiments tinybert --scale {scale}{given}"


def test_one_gpu_line_is_enough_to_name_it():
    lines = [{"scale": "paper", "setting": {"machine": name}} for name in ("x86_64, 2 cores, 1 threads", "NVIDIA H200")]
    assert command("tinybert", lines).endswith("--device cuda")


@pytest.mark.parametrize(
    ("begin", "text"), [(42, "18 s (several at a time, 10 s in total)"), (51, "18 s on a machine")]
)
def test_cells_that_shared_the_machine_are_reported(begin, text):
    """One cell ran for 10 s until second 51, and one for 8 s."""
    lines = [
        {"setting": {"commit": "c", "machine": "a machine", "made": f"2026-01-01T00:00:{end}+00:00", "seconds": long}}
        for end, long in ((51, 10.0), (begin + 8, 8.0))
    ]
    assert text in made_by(lines, "a command")
