"""Pictures of docs/theory.md: their numbers, their commands, and the page that shows them."""

from __future__ import annotations

import doctest
import math
import re
import shlex
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from dpoptim import theory
from dpoptim.theory import Cost, Signal, second_moments
from experiments import plot_style as picture_style
from experiments.theory import pictures

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "theory.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S) for line in block.splitlines()]
START = ["python", "-m", "experiments.theory.pictures", "docs/images"]


def test_preconditioner_is_flat_below_the_noise():
    lines = pictures.preconditioners()
    np.testing.assert_allclose(lines.y["without noise"], 1 / lines.x)
    np.testing.assert_allclose(lines.y["post_processing"], 1 / np.sqrt(lines.x**2 + 1))
    assert lines.y["post_processing"].max() <= 1  # the ceiling 1/√φ


def test_noise_biases():
    """Averages of the squared row norms with Adam's weights, by the definition; and their ends as on the page."""
    biases, variances = pictures.noise_biases(), pictures.noise_variances()
    for name, strategy in pictures.strategies().items():
        inverse = strategy.noising_matrix()[:50, :50] * strategy.column_norm
        np.testing.assert_allclose(variances.y[name][:50], np.diag(inverse @ inverse.T), rtol=1e-9)
        weights = 0.999 ** np.arange(49.0, -1, -1)
        expected = weights @ np.diag(inverse @ inverse.T) / weights.sum()
        assert biases.y[name][49] == pytest.approx(expected, rel=1e-9)
    ends = {name: round(float(values[-1]), 1) for name, values in biases.y.items()}
    assert ends == {"independent": 1.0, "BandMF": 5.4, "BLT": 4.0}


def test_negative_probabilities():
    """At the first step P(|g + z| < 1) in closed form; at a later one simulated, within four standard errors."""
    found = pictures.negative_by_gradient(steps=(1, 10), points=5)
    for g, chance in zip(found.x, found.y["step 1"], strict=True):
        closed = 0.5 * (math.erf((1 - g) / math.sqrt(2)) + math.erf((1 + g) / math.sqrt(2)))
        assert chance == pytest.approx(closed, abs=1e-9)
    normals = np.random.default_rng(0).standard_normal((10, 40_000))
    weights = 0.999 ** np.arange(9.0, -1, -1) / np.sum(0.999 ** np.arange(10))
    for g, chance in zip(found.x[:3], found.y["step 10"], strict=False):
        simulated = float(np.mean(weights @ (g + normals) ** 2 < 1))
        assert abs(simulated - chance) < 4 * math.sqrt(0.25 / 40_000) < abs(simulated - 0.9 * chance)
    by_step = pictures.negative_by_step(most=100).y
    assert by_step["step by step"][0] == pytest.approx(0.68269, abs=5e-6)
    assert by_step["limit"][0] == pytest.approx(0.5056, abs=5e-5)
    assert np.all(np.diff(by_step["step by step"]) < 0)


def test_dimensions():
    """Powers of B and their factors, written out; the circles of the picture, and the printed numbers outside."""
    kappa, batches = 0.001 / 1.999, pictures.BATCHES
    for signal, power in ((Signal.OPTIMISTIC, 2), (Signal.PESSIMISTIC, 1)):
        lines = pictures.largest_dimensions(signal)
        np.testing.assert_allclose(lines.y["post_processing"], batches**power)
        np.testing.assert_allclose(lines.y["bias_correction"], batches**power / math.sqrt(kappa))
        np.testing.assert_allclose(lines.y["independent_moments"], batches ** (power - 1) / math.sqrt(8 * kappa))
        right = {Signal.OPTIMISTIC: 1.88e8, Signal.PESSIMISTIC: 9.2e4}[signal]
        assert 2048**power / math.sqrt(kappa) == pytest.approx(right, rel=6e-3)
        assert pictures.PRINTED[signal] < right / 4


def test_released_square():
    noise, kappa = pictures.second_moment_noise(), 0.001 / 1.999
    np.testing.assert_allclose(noise.y["bias_correction"], math.sqrt(2 * kappa) / noise.x**2)
    np.testing.assert_allclose(noise.y["independent_moments"], math.sqrt(8 * kappa) / noise.x)
    changes = pictures.square_changes()
    found = {name: dict(zip(changes.x, values, strict=True)) for name, values in changes.y.items()}
    assert found["not projected"][12] == pytest.approx(1.4375)
    assert found["allowed, exactly B"][12] == 7 / 16
    assert found["not projected"][4] == 7 / 16
    assert found["allowed, Poisson"][12] == 0.5
    assert max(found["projected"].values()) <= 0.5
    assert found["projected"][4] == pytest.approx(7 / 16)  # nothing to project yet


@pytest.mark.parametrize("start", [1.0, 0.0])
def test_window_paths(start):
    """Ends of the mean field where the theory puts them, and the simulation there too; the page's resting places."""
    field, simulated = pictures.window_paths(start=start, clip_norms=(19.0, 40.0, 70.0, 120.0), steps=1200)
    given = {"noise_multiplier": 1.0, "batch_size": 100}
    for clip_norm, page in ((40.0, 1.19), (70.0, 1.96)):
        rest = float(theory.steady_second_moment(1.0, clip_norm=clip_norm, **given))
        assert rest == pytest.approx(page, abs=5e-3)
        assert float(field.y[f"{clip_norm:g}"][-1]) == pytest.approx(rest, rel=0.01)
        assert float(simulated.y[f"{clip_norm:g}"][-400:].mean()) == pytest.approx(rest, rel=0.02)
    assert simulated.y["19"][-1] < 0.5
    assert field.y["19"][-1] < 0.5
    assert simulated.y["120"][-1] > 100
    assert field.y["120"][-1] == pytest.approx(simulated.y["120"][-1], rel=0.2)


def test_noise_by_coordinate():
    """Even gradients make no difference between the methods; uneven ones the crossing at the root mean square."""
    even = np.full(400, 0.05)
    noise = pictures.coordinate_noise(even, batch_size=1000.0).y
    np.testing.assert_allclose(noise["post_processing"], 1e-3)
    np.testing.assert_allclose(noise["scale_then_privatize"], 1e-3, rtol=1e-3)
    gradient = pictures.uneven_gradient()
    noise, rms = pictures.coordinate_noise(gradient).y, math.sqrt(float(np.mean(gradient**2)))
    louder = noise["scale_then_privatize"] > noise["post_processing"]
    np.testing.assert_array_equal(louder, gradient > rms)
    assert louder.mean() < 0.05  # "the few largest coordinates"
    np.testing.assert_allclose(noise["scale_then_privatize"] / gradient, 0.1, rtol=0.01)
    assert np.mean(noise["post_processing"] > gradient) > 0.5
    update = pictures.update_noise_by_coordinate(gradient).y
    assert update["post_processing"].max() == pytest.approx(math.sqrt(0.1 / 1.9), rel=1e-6)
    assert update["bias_correction"].max() == pytest.approx(10 * math.sqrt(0.1 / 1.9))
    assert np.ptp(update["scale_then_privatize"]) < 1e-9


def test_momentum_noise():
    lines = pictures.momentum_noise(step=500)
    np.testing.assert_allclose(lines.y["independent"][1:8], np.sqrt((1 - lines.x) / (1 + lines.x))[1:8], rtol=1e-4)
    for name in ("BandMF", "BLT"):
        ratios = lines.y[name] / lines.y["independent"]
        assert 1.9 < ratios[0] < 2.4
        assert 1 / 4 < ratios[-1] < 1 / 3.5
        assert ratios[lines.x.tolist().index(0.9)] == pytest.approx(1, abs=0.11)


@pytest.mark.parametrize("cost", Cost)
@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_no_scale_is_better_than_the_best_exponent(cost, spread):
    """The bound is attained at ¼, ⅓ and ½, and 2,000 random scales, powers of |g| or not, stay above it."""
    rng = np.random.default_rng(0)
    g = np.exp(spread * rng.standard_normal(30))
    least, best = theory.least_noise_cost(g, cost=cost), theory.best_exponent(cost)
    assert theory.noise_cost(g, exponent=best, cost=cost) == pytest.approx(least, rel=1e-12)
    for other in (best - 0.05, best + 0.05):
        assert theory.noise_cost(g, exponent=other, cost=cost) > least * (1 + 1e-4)
    s = g ** (-2 * best) * np.exp(rng.uniform(0.01, 1, (2000, 1)) * rng.standard_normal((2000, 30)))
    sums = {
        Cost.GRADIENT: np.sum(s**-2.0, axis=1),
        Cost.REGRET: np.sum(1 / s, axis=1) ** 2,
        Cost.UPDATE: np.sum((s * g) ** -2.0, axis=1),
    }
    assert np.all(sums[cost] * np.sum((s * g) ** 2, axis=1) > least)
    with pytest.raises(ValueError, match="gradient="):
        theory.noise_cost([1.0, 0.0], exponent=0.25)
    with pytest.raises(ValueError, match="Expected exponent >= 0"):
        theory.noise_cost([1.0], exponent=-1)


def test_exponent_costs():
    lines = pictures.exponent_costs(pictures.uneven_gradient(spread=1.0))
    for cost in Cost:
        assert lines.x[np.argmin(lines.y[cost.value])] == pytest.approx(theory.best_exponent(cost), abs=0.005)
        assert lines.y[cost.value].min() >= 1 - 1e-12
    at = {p: int(np.argmin(np.abs(lines.x - p))) for p in (0.0, 0.5)}
    gradient, update = lines.y["gradient"], lines.y["update"]
    assert gradient[at[0.0]] == pytest.approx(gradient[at[0.5]])
    assert update[at[0.0]] / update[at[0.5]] == pytest.approx(53, abs=0.5)


@pytest.mark.parametrize("command", [c for c in COMMANDS if "--only" in c])
def test_commands_of_the_page_make_their_pictures(command, tmp_path, capsys, monkeypatch):
    """A PNG of 700 to 1,600 by 400 to 700 pixels, 20 to 200 kB, like the one on the page; axes are labelled."""
    words, figures = shlex.split(command), []
    make = picture_style.new_figure

    def remembered(*size):
        figures.append(make(*size))
        return figures[-1]

    monkeypatch.setattr(picture_style, "new_figure", remembered)
    assert words[:4] == START
    pictures.main([str(tmp_path), *words[4:]])
    made = tmp_path / f"theory-{words[-1]}.png"
    assert capsys.readouterr().out == f"{made}\n"
    assert list(tmp_path.iterdir()) == [made]
    for file in (made, DOCS / "images" / made.name):
        raw = file.read_bytes()
        assert raw[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", raw[16:24])
        assert 700 <= width <= 1600
        assert 400 <= height <= 700
        assert 20_000 < len(raw) < 200_000
    check_labels(figures[0])


def check_labels(figure):
    """Both labels on every panel (bars have names in place of one), letters of 8 points or more, no empty panel."""
    for axes in figure.axes:
        assert axes.get_ylabel()
        assert axes.get_xlabel() or len(axes.get_xticklabels()) == 2
        assert axes.get_title(loc="left")
        assert axes.lines or axes.patches
        sizes = [text.get_fontsize() for text in (*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels())]
        assert min(sizes, default=9) >= 8


def test_the_first_command_draws_all_pictures(monkeypatch, tmp_path):
    """The command without --only, as the page has it, with pictures that are quick to draw."""
    assert shlex.split(COMMANDS[0]) == START
    monkeypatch.setattr(pictures, "PICTURES", dict.fromkeys(pictures.PICTURES, lambda: picture_style.new_figure(7, 4)))
    pictures.main([str(tmp_path / "new")])
    assert {file.name for file in (tmp_path / "new").iterdir()} == {f"theory-{name}.png" for name in pictures.PICTURES}


def test_page_and_pictures_agree():
    """Every picture is shown once, with a caption in italics, and has its command."""
    names = re.findall(r"!\[[^]]+\]\(images/theory-([a-z-]+)\.png\)\n\n\*.+?\*\n\n", PAGE, re.S)
    assert sorted(names) == sorted(pictures.PICTURES)
    assert PAGE.count("images/theory-") == len(names)
    for name in names:
        assert f"--only {name}" in PAGE
    assert {file.name for file in (DOCS / "images").glob("theory-*")} == {f"theory-{name}.png" for name in names}
    assert sum("theory.pictures" in command for command in COMMANDS) == len(names) + 1


def test_examples_of_the_page():
    blocks = "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.S))
    test = doctest.DocTestParser().get_doctest(blocks, {}, "docs/theory.md", None, 0)
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0
    assert len(test.examples) > 25


def test_the_page_is_a_doctest():
    """As `python -m doctest docs/theory.md` reads it: what is expected ends before the fence."""
    examples = doctest.DocTestParser().get_examples(PAGE)
    assert len(examples) > 25
    assert not any("```" in example.want for example in examples)


def test_numbers_of_the_captions():
    """Where a second moment is negative less than one time in ten; how far a clip norm below the window gets."""
    at = second_moments.negative_probability([0.20, 0.21], noise_variance=1.0, step=5000)
    assert at[0] > 0.11
    assert at[1] < 0.1
    _, simulated = pictures.window_paths(start=0.0, clip_norms=(19.0,))
    path = simulated.y["19"]
    assert 2e-4 < path[-1] < 4e-4
    assert path[-1] > 1.05 * path[-200]


def test_links_of_the_page():
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert (DOCS / target.partition("#")[0]).exists(), target


def test_refusals(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        pictures.main([str(tmp_path), "--only", "nothing"])
    assert "noise-bias" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        pictures.main([str(tmp_path), "--only", "exponent"])
    assert "pip install 'dpoptim[plots]'" in capsys.readouterr().err


def test_matplotlib_is_imported_inside_functions_only():
    for module in (picture_style, pictures):
        assert not re.search(r"^(import|from) matplotlib", Path(str(module.__file__)).read_text(), re.M)
