"""Every table of experiments/results.md comes from the committed results; no number is typed by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dpoptim.privacy import PrivacyPlan
from experiments import results_file
from experiments.framework import NAMES, SCALES, Experiment, experiments, lines_of
from experiments.results_file import cell_key
from experiments.tinybert import report
from experiments.tinybert.grid import ROWS, described, guarantee, plan_of
from experiments.tinybert.report import scores
from experiments.tinybert.schedule import SETTINGS
from experiments.tinybert.scheduled import FINAL, SEARCH, lines_in

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "results", ROOT / "experiments" / "results.md"


def experiment(name: str) -> Experiment:
    (found,) = experiments([name])
    return found


WORDS = ("begin", "end")
COMMITTED = [name for name in NAMES if (RESULTS / f"{experiment(name).file}.jsonl").exists()]
FILES = sorted({experiment(name).file for name in COMMITTED} | {FINAL, SEARCH})


def between_marks(name: str) -> str:
    text = PAGE.read_text(encoding="utf-8")
    return text.split(f"<!-- begin {name} -->\n")[1].split(f"\n<!-- end {name} -->")[0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "tinybert" else ()) for name in COMMITTED]
)
def test_the_page_matches_the_results(name):
    one = experiment(name)
    assert between_marks(name) == one.markdown(lines_of(one, RESULTS))


@pytest.mark.parametrize(("page", "name"), [("results.md", "tinybert"), ("from-opacus.md", "fashion_mnist")])
def test_the_documentation_shows_the_table_of_the_results(page, name):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    begin, end = (f"<!-- {at} {name} table -->" for at in WORDS)
    one = experiment(name)
    assert one.table is not None
    assert text.split(f"{begin}\n")[1].split(f"\n{end}")[0] == one.table(lines_of(one, RESULTS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logistic", "quadratic", "claims", "theory"])
def test_a_changed_result_would_be_detected(name):
    """All numbers of any one line, doubled, change the page: every line of these is in it."""
    one, changed = experiment(name), 0
    lines = lines_of(one, RESULTS)
    expected = one.markdown(lines)
    for index, line in enumerate(lines):
        doubled = line | {"result": _doubled(line["result"])}
        changed += one.markdown([*lines[:index], doubled, *lines[index + 1 :]]) != expected
    assert changed == len(lines)


def _doubled(value):
    if isinstance(value, dict):
        return {key: _doubled(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_doubled(part) for part in value]
    return 2 * value if isinstance(value, float) else value


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_committed_results_are_complete(name):
    found = results_file.read(RESULTS / f"{name}.jsonl")
    assert found.note is None
    assert (RESULTS / f"{name}.jsonl").stat().st_size < 800_000
    for line in found.lines:
        assert line["experiment"] == name
        assert line["scale"] in SCALES
        assert set(line["setting"]) >= {"commit", "machine", "versions", "made", "seconds"}


def test_no_cell_appears_twice():
    for name in FILES:
        lines = results_file.read(RESULTS / f"{name}.jsonl").lines
        keys = [(line["scale"], cell_key(line["cell"])) for line in lines]
        assert len(set(keys)) == len(keys), name


@pytest.mark.slow
def test_every_guarantee_of_tinybert_is_that_of_its_cell():
    """Plan, ε and what is not private, recomputed from each cell's settings."""
    known: dict[str, tuple[Any, ...]] = {}
    both = [*lines_of(experiment("tinybert"), RESULTS), *lines_in(RESULTS, FINAL, "paper")]
    lines = [line for line in both if line["plan"] is not None]
    assert len(lines) > 400
    for line in lines:
        cell = line["cell"]
        key = str([cell.get(name) for name in ("row", "column", "steps", "batch_size", "num_examples", "clip_norm")])
        if key not in known:
            plan = plan_of(cell)
            known[key] = (described(plan), *guarantee(cell, plan))
        plan_again, epsilon, note = known[key]
        sigma = pytest.approx(plan_again["noise_multiplier"], rel=1e-6)
        assert line["plan"] == plan_again | {"noise_multiplier": sigma}, cell
        assert line["epsilon"] == (None if epsilon is None else pytest.approx(epsilon, rel=1e-6)), cell
        assert (line["note"], line["adjacency"]) == (note, None if note else "zero_out"), cell
        assert cell["num_examples"] == 817_503


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logistic", "quadratic"])
def test_every_epsilon_of_the_small_experiments_is_that_of_its_plan(name):
    private = [line for line in lines_of(experiment(name), RESULTS) if line["epsilon"] is not None]
    assert len(private) >= 8
    plans = {str(line["plan"]): PrivacyPlan.from_dict(line["plan"]) for line in private}
    epsilons = {text: plan.epsilon(delta=1e-5) for text, plan in plans.items()}
    for line in private:
        plan, cell = plans[str(line["plan"])], line["cell"]
        asked = {"batch_size": cell["batch_size"], "steps": cell["steps"], "noise_multiplier": cell["noise_multiplier"]}
        assert asked == {key: line["plan"][key] for key in asked}
        assert plan.num_examples == plan.batch_size * plan.steps, "one pass"
        assert line["epsilon"] == pytest.approx(epsilons[str(line["plan"])], rel=1e-6)
        assert (line["adjacency"], plan.adjacency.value) == ("zero_out", "zero_out")


def test_losses_at_equal_errors_of_prefix_sums():
    """Errors within .5 %; DP-SGD's losses differ least and scale-then-privatize's most, by the summary's .249."""
    lines = lines_of(experiment("tinybert"), RESULTS)
    cells = [
        next(line["cell"] for line in lines if line["cell"].get("column") == name and line["cell"]["row"] == "dp_sgd")
        for name in report.EQUAL_ERRORS
    ]
    plans = [plan_of(cell | {"steps": 2000, "batch_size": 2048}) for cell in cells]
    low, high = (
        plan.noise_stddevs().gradient_sum * plan.strategy.mean_error() * plan.strategy.column_norm / 2048
        for plan in plans
    )
    assert high == pytest.approx(low, rel=5e-3)
    text = report._equal_errors(lines, scores(lines))
    assert f"is {low:.5f} (" in text
    assert f"and {high:.6f} (" in text
    rows = [line.split(" | ") for line in text.splitlines()[4:]]
    assert (rows[0][0], rows[-1][0]) == ("| DP-SGD", "| scale-then-privatize")
    apart = scores(lines)
    first, second = (apart["scale_then_privatize", name] for name in report.EQUAL_ERRORS)
    mean = sum(second[seed] - first[seed] for seed in first) / len(first)
    assert rows[-1][3].startswith(f"{mean:.3f} ±")
    assert f"losses differ by {mean:.3f}" in " ".join((ROOT / "docs" / "results.md").read_text().split())


@pytest.mark.slow
def test_a_changed_run_of_tinybert_would_be_detected():
    """The test loss of any final run is in the tables."""

    def tables(lines):
        return report.main_table(lines) + report._beyond(lines, scores(lines))

    lines, unseen = lines_of(experiment("tinybert"), RESULTS), []
    expected = tables(lines)
    for index, line in enumerate(lines):
        if line["cell"]["purpose"] == "final":
            other = line | {"result": line["result"] | {"test": {"tokens": line["result"]["test"]["tokens"] + 0.05}}}
            if tables([*lines[:index], other, *lines[index + 1 :]]) == expected:
                unseen.append(line["cell"])
    assert unseen == []


def test_every_picture_of_the_page_exists_and_has_a_text():
    links = re.findall(r"!\[([^\]]*)\]\(([^)]*)\)", PAGE.read_text(encoding="utf-8"))
    assert len(links) >= 5
    for text, link in links:
        assert text
        assert (PAGE.parent / link).read_bytes().startswith(b"\x89PNG"), link


def test_cells_of_tinybert_have_the_settings_that_can_be_requested():
    cells = [line["cell"] for line in results_file.read(RESULTS / "tinybert.jsonl").lines]
    assert {name for cell in cells for name in cell} == SETTINGS | {knob.name for each in ROWS for knob in each.knobs}
