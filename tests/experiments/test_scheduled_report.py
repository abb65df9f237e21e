"""The report of the table with scheduled learning rates: gains, verdicts, and the committed page."""

from __future__ import annotations

import math
from typing import Any

import pytest

from experiments.tinybert import scheduled_report as report
from experiments.tinybert.report import CLAIMS, compared, margin_over
from experiments.tinybert.schedule import Setting, final_cell, tuning_cell
from experiments.tinybert.scheduled import FINAL, SEARCH, SIZES_SCHEDULED, lines_in
from tests.experiments.test_results import RESULTS, between_marks

PLACE = ("dp_sgd", "banded")
SHARED = {"num_examples": 817_503}
OTHERS = ("independent_moments", "bias_correction", "dp_sgd")


def final(lr: float, validation: float, seed: int = 0, momentum: float = 0.9) -> dict[str, Any]:
    cell = final_cell(PLACE, (("lr", lr), ("momentum", momentum)), SIZES_SCHEDULED["paper"], SHARED, seed)
    return {"cell": cell, "result": {"validation": validation, "ended": "finished"}}


def tuned(setting: Setting, validation: float) -> dict[str, Any]:
    cell = tuning_cell(PLACE, setting, SIZES_SCHEDULED["paper"], SHARED)
    return {"cell": cell, "result": {"validation": validation, "ended": "finished"}}


def committed():
    return [lines_in(RESULTS, name, "paper") for name in (FINAL, SEARCH, "tinybert")]


@pytest.mark.parametrize("rates", [(0.5, 1.0, 2.0), (0.2, 0.5, 1.0, 2.0, 5.0), (0.2, 1.0, 1.5)])
def test_the_gain_is_that_of_a_parabola(rates):
    """Its minimum is at a rate of e^0.2 and the best rate tried is 1, so the gain is 0.5 · 0.2²."""
    losses = {rate: 3.0 + 0.5 * (math.log(rate) - 0.2) ** 2 for rate in rates}
    assert report.gain(losses) == pytest.approx(0.02)


@pytest.mark.parametrize("losses", [{1.0: 3.0}, {0.5: 3.1, 1.0: 3.0}, {0.5: 3.1, 1.0: 3.0, 2.0: math.inf}])
def test_without_both_neighbours_the_gain_is_unknown(losses):
    assert report.gain(losses) is None


def test_the_gain_comes_from_full_size_if_both_neighbours_ran_there():
    """Otherwise from the search, among runs with the same momentum."""
    e = math.e
    search = [tuned((("lr", lr), ("momentum", 0.9)), loss) for lr, loss in ((1.0, 4.5), (e, 4.0), (e**2, 4.0))]
    search += [tuned((("lr", 1.2), ("momentum", 0.5)), 3.0)]
    two = [final(e, 3.0), final(e**2, 3.5)]
    assert report.gain_at(two, search, PLACE, "paper") == pytest.approx(0.0625)
    assert report.gain_at([*two, final(1.0, 3.5)], search, PLACE, "paper") == 0.0
    assert report.gain_at([*two, final(1.0, math.inf)], search, PLACE, "paper") is None
    assert report.gain_at(two, search[:2], PLACE, "paper") is None


def test_runs_with_the_rate_that_is_best_for_the_first_seed_count():
    lines = [final(1.0, 3.0), final(1.5, 2.9), final(1.0, 2.0, seed=1), final(1.5, 3.1, seed=1)]
    assert report.at_best_settings(lines) == [lines[1], lines[3]]


def test_bounds_of_a_margin_hold_seeds_and_gains():
    """Margins 0.1 and 0.2 have a half-width of 12.706 · 0.05."""
    rows = {"worse": {0: 4.1, 1: 4.2}, "better": {0: 4.0, 1: 4.0}}
    found = margin_over(report.behind("worse", "better"), rows, {"worse": 0.03, "better": 0.01})
    assert found is not None
    assert found.bounds == pytest.approx((0.15 - 0.6353 - 0.03, 0.15 + 0.6353 + 0.01), abs=1e-4)
    one = margin_over(report.behind("worse", "better"), {"worse": {0: 4.1}, "better": {0: 4.0}}, {"worse": 0.03})
    assert one is not None
    assert one.bounds is None


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        (0.0, "0.100 [0.100, 0.100] (0.100), holds"),
        (0.06, "0.100 [0.040, 0.100] (0.100), holds"),
        (0.2, "0.100 [−0.100, 0.100] (0.100), undecided"),
        (None, "0.100 [0.100, 0.100] (0.100), holds*"),
    ],
)
def test_the_next_row_may_be_nearer_than_it_looks(gain, expected):
    losses = {"scale_then_privatize": 3.4, "post_processing": 3.5} | dict.fromkeys(OTHERS, 3.6)
    found = {(name, "x"): {0: loss, 1: loss} for name, loss in losses.items()}
    gains = dict.fromkeys(found, 0.0) | {("post_processing", "x"): gain}
    assert compared(CLAIMS[0], found, "x", losses, gains) == expected


def test_the_page_matches_the_results():
    assert between_marks("scheduled") == report.markdown(*committed())


def test_a_changed_final_run_would_be_detected():
    """In the columns of the tables, that is in all of them."""
    lines, search, constant = committed()
    expected, best = report.markdown(lines, search, constant), report.at_best_settings(lines)
    for line in best:
        test = {name: loss + 0.05 for name, loss in line["result"]["test"].items()}
        changed = line | {"result": line["result"] | {"test": test}}
        others = [changed if each is line else each for each in lines]
        assert report.markdown(others, search, constant) != expected, line["cell"]


def test_the_curve_has_a_row_for_each_noise_with_runs():
    found = {("dp_sgd", "poisson_at_10"): {0: 3.9}, ("scale_then_privatize", "cyclic_x4_at_1"): {0: 3.61}}
    *_, ours, theirs = report._curve(found).splitlines()
    assert (
        ours == "| scale-then-privatize | BandMF, b = 8, cyclic Poisson samples, batches 4 × larger | 3.610 | – | – |"
    )
    assert theirs == "| DP-SGD | independent, Poisson samples | – | – | 3.900 |"
    assert report._curve({}) == ""
