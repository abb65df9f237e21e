"""Pictures of BERT-Tiny's runs and their captions, from the available lines only."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

from dpoptim.theory import clip_norm_window
from experiments import plot_style as style
from experiments.framework import experiments, lines_of
from experiments.tinybert.grid import ROWS
from experiments.tinybert.pictures import (
    LOOKS,
    NOISE_LOOKS,
    WITH_NOISE,
    WORDS,
    markdown,
    pictures,
    share_holding_half,
    shown,
)
from experiments.tinybert.report import LEVEL

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def lines():
    return lines_of(experiments(["figures"])[0], RESULTS)


def with_row(lines, name, like, *, seed=0, less=0.0):
    """The lines plus copies of the final runs of row `like` under a different row or seed, with a lower loss."""
    of_row = [line for line in lines if line["cell"]["purpose"] == "final" and line["cell"]["row"] == like]
    more = [copy.deepcopy(line) for line in of_row if line["cell"]["seed"] == 0]
    for line in more:
        line["cell"] |= {"row": name, "seed": seed}
        line["result"]["validation"] -= less
    return [*lines, *more]


def finding(name, lines):
    return WORDS[name].finding(shown(lines)[name])


def test_every_row_and_every_noise_has_a_distinct_style():
    assert list(LOOKS) == [each.name for each in ROWS if not each.beyond]
    assert set(NOISE_LOOKS) == {kind.name for kind in WITH_NOISE}
    assert len(set(LOOKS.values())) == len(LOOKS)
    assert all(LOOKS[name][0] == colour for name, colour in style.METHODS.items() if name in LOOKS)


def test_each_picture_has_its_own_text_and_caption(lines):
    page = markdown(lines)
    assert set(WORDS) == set(pictures(lines))
    assert page.startswith("Made by `python -m experiments tinybert figures --scale paper")
    for name, words in WORDS.items():
        assert page.count(f"![{words.title}](images/figures-{name}.png)\n\n{words.caption}\n\n**") == 1
        assert page.count(words.caption) == 1


@pytest.mark.parametrize(
    ("name", "row", "key"),
    [
        ("curves", "scale_then_privatize", "validation"),
        ("gradients", "noiseless", "gradient_norms"),
        ("negative", "bias_correction", "negative_fractions"),
        ("moments", "noiseless", "second_moments"),
        ("clipping", "scale_then_privatize", "validation"),
    ],
)
def test_a_finding_follows_its_lines(lines, name, row, key):
    other = copy.deepcopy(lines)
    for line in other:
        result = line["result"]
        if line["cell"]["row"] == row and line["cell"]["column"] == "banded" and key in result:
            if key == "validation":
                result[key] += 1.0
            elif key == "second_moments":
                result[key]["counts"] = result[key]["counts"][::-1]
            else:
                result[key] = [(step, value / 2) for step, value in result[key]]
    before, after = finding(name, lines).split(";"), finding(name, other).split(";")
    same = [a == b for a, b in zip(before, after, strict=True)]
    assert same == [index % 2 == 0 for index in range(len(same))], "the second noise's alone, in each sentence"


def test_half_of_the_squared_gradient_is_counted():
    """4 of 100 coordinates at 1e-3 hold .004, and 96 at 1e-5 hold .00096: half of it needs 2.48 of the former."""
    line = {"result": {"second_moments": {"first_edge": -5.5, "bin": 1.0, "below": 0, "counts": [96, 0, 4]}}}
    assert share_holding_half(line) == pytest.approx(0.0248)


def test_best_next_last_and_level_are_named(lines):
    assert "DP-SGD level with post-processing (independent, σ = 1)" in finding("curves", lines)
    ahead = finding("curves", with_row(lines, "post_processing_eps", "scale_then_privatize", less=0.1))
    assert ahead.count("post-processing, ε_s tuned at") == 3
    assert ahead.count("next scale-then-privatize, 0.100 behind") == 3


def test_level_means_within_the_tolerance_of_claims(lines):
    def level(less):
        text = finding("curves", with_row(lines, "post_processing_eps", "post_processing", less=less))
        return len(re.findall(r"ε_s tuned (?:and [^,;]* )?level with", text))

    assert level(LEVEL - 1e-4) == 3
    assert level(LEVEL + 1e-4) == 0


def test_gradients_are_averaged_over_the_second_half(lines):
    other = copy.deepcopy(lines)
    for line in other:
        if "gradient_norms" in line["result"]:
            line["result"]["gradient_norms"] = [(1, 0.5), (2, 0.4), (3, 0.2), (4, 0.1)]
    assert finding("gradients", other).count("0.500 to 0.150") == 3


def test_the_window_of_the_theory_is_drawn_between_its_ends(lines):
    """Independent noise at σ = 1: from (σ/B)·√m to 1 of the upper end, B/σ."""
    *_, window = pictures(lines)["clipping"]().axes
    bars = [bar.get_xdata() for bar in window.get_lines() if len(set(bar.get_ydata())) == 1]
    moments = next(line["result"]["second_moments"] for line in shown(lines)["moments"])
    low, high = clip_norm_window(dimension=sum(moments["counts"]), noise_multiplier=1.0, batch_size=2048)
    assert len(bars) == 3
    assert list(bars[-1]) == pytest.approx([low / high, 1.0])


def test_failed_clip_norms_are_named(lines):
    other = copy.deepcopy(lines)
    for line in other:
        if line["cell"]["purpose"] == "clip norms" and line["cell"]["eps_over_noise"] == 16.0:
            line["result"]["validation"] = None
    assert finding("clipping", lines).count("failed at 2 and 4 ") == 3
    assert finding("clipping", other).count("failed at 0.0625 and 2 and 4 ") == 3


def test_other_seeds_do_not_change_pictures(lines):
    assert markdown(with_row(lines, "dp_sgd", "dp_sgd", seed=7, less=1.0)) == markdown(lines)


def _drawn(lines, *names):
    """Draws pictures, those named or all, and returns the names of all that there would be."""
    own = pictures(lines)
    for name in names or own:
        own[name]().draw_without_rendering()
    assert markdown(lines)
    return set(own)


def test_a_new_row_is_drawn(lines):
    figure = pictures(with_row(lines, "post_processing_eps", "post_processing"))["curves"]()
    names = [text.get_text() for text in figure.axes[-1].get_legend().get_texts()]
    assert "post-processing, ε_s tuned" in names
    assert len(names) == len(LOOKS)


@pytest.mark.parametrize("row", ["none", "noiseless", "post_processing"])
def test_pictures_are_drawn_without_a_missing_row(lines, row):
    left = [line for line in lines if line["cell"]["row"] != row]
    assert _drawn(left, "curves", "negative", "moments") >= {"curves", "negative", "moments"}


def test_pictures_are_drawn_without_a_missing_noise(lines):
    assert _drawn([line for line in lines if line["cell"]["column"] != "banded"]) == set(WORDS)


@pytest.mark.parametrize(("purpose", "expected"), [("clip norms", {"clipping"}), ("no fine-tuning", set())])
def test_only_pictures_with_runs_are_drawn(lines, purpose, expected):
    assert _drawn([line for line in lines if line["cell"]["purpose"] == purpose]) == expected


def test_runs_that_diverged_are_drawn(lines):
    other = copy.deepcopy(lines)
    for line in other:
        if line["cell"]["row"] == "dp_sgd" and line["cell"]["purpose"] == "final":
            line["result"] |= {"ended": "diverged", "validation": None, "curve": [(100, 5.0), (200, None)]}
    assert "curves" in _drawn(other, "curves")
    assert "DP-SGD" not in finding("curves", other)
