"""Cells: resumed after an interruption, filtered, limited in time; sections and pictures from the file alone."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from experiments import provenance, result_files
from experiments.framework import Experiment, MissingInput, Outcome, Request, run_cells
from experiments.framework import NAMES, chosen
from experiments.markdown import table
from experiments.framework import lines_of, marks, render, render_into
from experiments.progress import ProgressReporter

CELLS = [{"kind": kind, "size": size} for kind in ("a", "b") for size in (1, 2)]


class Heard(ProgressReporter):
    """Keeps what was said."""

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


def test_goes_on_after_an_interruption(tmp_path):
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
    path, reporter = tmp_path / "x.jsonl", Heard()
    path.write_bytes(path.read_bytes()[:-20])
    assert _computed(request(tmp_path), reporter) == 1
    assert any("cut short" in text for text in reporter.texts)
    assert [line["cell"] for line in results_file.read(path).lines] == CELLS


def test_a_line_says_where_it_comes_from(tmp_path):
    run_cells("x", CELLS[:1], outcome, request(tmp_path), ProgressReporter())
    (line,) = results_file.read(tmp_path / "x.jsonl").lines
    assert (line["experiment"], line["scale"], line["cell"]) == ("x", "smoke", CELLS[0])
    assert line["setting"]["commit"] == "abc"
    assert set(line["setting"]) == {"commit", "machine", "versions", "made", "seconds"}
    assert "torch" in line["setting"]["versions"]


def test_only_and_scale_and_again(tmp_path):
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


def test_past_the_time_limit_no_cell_is_begun(tmp_path):
    reporter = Heard()
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
    assert "(images/results-x-p.png)" in text
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
    assert [one.name for one in chosen(["all"])] == list(NAMES)
    with pytest.raises(ValueError, match="must be one of"):
        chosen(["nothing"])


def test_the_commit_is_that_of_the_tree_around_the_package(monkeypatch, tmp_path):
    """Elsewhere, as in an environment inside another repository, the version stands for it."""
    provenance.this_commit.cache_clear()
    assert provenance.this_commit().split("+")[0] == provenance._git("rev-parse", "--short", "HEAD")
    (tmp_path / "dpoptim").mkdir()
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path / "dpoptim")
    provenance.this_commit.cache_clear()
    assert provenance.this_commit() == f"dpoptim {provenance.__version__}"
    provenance.this_commit.cache_clear()
