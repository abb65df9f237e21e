"""The quadratic's cells: axes, preconditioners and trajectories are those of the simulation."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from experiments.quadratic import cells as quadratic_cells
from experiments.quadratic import report
from experiments.quadratic.problem import VARIANTS, Quadratic, simulate

pytestmark = pytest.mark.slow

PROBLEM = Quadratic(steps=12, repeats=3, clip_norm=0.5, eps_scale=0.1, seed=3)


def test_trajectories_end_where_runs_end():
    path = simulate(PROBLEM, "scale_then_privatize")
    kept = quadratic_cells.trajectories(path)
    theta = np.array(kept["theta"])
    assert theta.shape == (quadratic_cells.RUNS, len(kept["steps"]), 2)
    assert kept["steps"][0] == 0
    assert kept["steps"][-1] == PROBLEM.steps
    np.testing.assert_array_equal(theta[:, 0], np.ones((quadratic_cells.RUNS, 2)))
    np.testing.assert_allclose(theta[:3, -1], path.final, rtol=1e-5)


def test_noise_axes():
    """ζσ/B where nothing is scaled (√2 of it for IME), ζσ/(B·s) where it is."""
    nu_hat = np.array([0.09, 0.0])
    flat = 0.5 / PROBLEM.batch_size
    axes = {
        variant: quadratic_cells.noise_axes(simulate(PROBLEM, variant), nu_hat)
        for variant in ("post_processing", "independent_moments", "scale_then_privatize")
    }
    np.testing.assert_allclose(axes["post_processing"], [flat, flat])
    np.testing.assert_allclose(axes["independent_moments"], math.sqrt(2) * np.array([flat, flat]))
    np.testing.assert_allclose(axes["scale_then_privatize"], [flat * 4, flat], err_msg="s = .1/(.3 + .1) and 1")


def test_preconditioners():
    nu_hat = np.array([0.25, -1.0])

    def found(variant):
        plan = quadratic_cells.plan_of(PROBLEM, variant)
        return quadratic_cells.preconditioner(simulate(PROBLEM, variant), nu_hat, plan)

    level = 0.5 / PROBLEM.batch_size
    np.testing.assert_allclose(found("bias_correction"), [2.0, 1 / level])
    ime = math.sqrt(2) * level
    np.testing.assert_allclose(found("independent_moments"), [1 / (0.5 + ime), 1 / ime])
    np.testing.assert_allclose(found("dp_sgd"), [1.0, 1.0])
    np.testing.assert_allclose(found("post_processing")[0], 2.0, rtol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_private_variants_have_an_epsilon(variant):
    (cell, _) = (cell for cell in quadratic_cells.cells("smoke") if cell["variant"] == variant)
    outcome = quadratic_cells.compute(cell | {"steps": 5, "repeats": 2, "tuning_repeats": 2})
    assert (outcome.epsilon is None) == ("NOT private" in VARIANTS[variant])
    assert (outcome.adjacency is None) == (outcome.epsilon is None)
    if outcome.epsilon is not None:
        assert outcome.epsilon == pytest.approx(Quadratic().plan().epsilon(delta=quadratic_cells.DELTA))
    assert set(outcome.result["tuned"]) == set(cell["grid"])


def test_tuning_and_report_use_different_seeds(monkeypatch):
    reported, tuned_on = [], []

    def watched(problem, variant, noise=None):
        reported.append((problem.seed, problem.repeats))
        return simulate(problem, variant, noise)

    def one(problem, variant, **grid):
        tuned_on.append((problem.seed, problem.repeats))
        return dataclasses.replace(problem, lr=0.01)

    monkeypatch.setattr(quadratic_cells, "simulate", watched)
    monkeypatch.setattr(quadratic_cells, "tuned", one)
    cell = quadratic_cells.cells("smoke")[0] | {"steps": 3, "repeats": 2, "tuning_repeats": 5}
    quadratic_cells.compute(cell)
    assert tuned_on == [(cell["seed"], 5)]
    assert reported[0] == (cell["seed"] + 1, 2)
    assert {seed for seed, _ in reported} == {cell["seed"] + 1}


def test_a_cell_runs_with_its_settings(monkeypatch):
    given = {"curvatures": (2.0, 0.5), "start": (1.0, -1.0), "batch_size": 7, "noise_multiplier": 0.5, "spread": 0.3,
             "betas": (0.8, 0.9), "steps": 4, "seed": 11}  # fmt: skip
    seen = []

    def one(problem, variant, **grid):
        seen.append(problem)
        return problem

    monkeypatch.setattr(quadratic_cells, "tuned", one)
    quadratic_cells.compute(quadratic_cells.cells("smoke")[0] | {"repeats": 2} | given)
    assert {name: getattr(seen[0], name) for name in given} == given


@pytest.mark.parametrize(("lr", "at_edge"), [(0.1, ["lr"]), (0.2, []), (0.3, ["lr"])])
def test_a_setting_at_the_end_of_its_grid_is_reported(monkeypatch, lr, at_edge):
    def one(problem, variant, **grid):
        return dataclasses.replace(problem, lr=lr, clip_norm=0.5)

    monkeypatch.setattr(quadratic_cells, "tuned", one)
    (cell, _) = (cell for cell in quadratic_cells.cells("smoke") if cell["variant"] == "dp_sgd")
    grid = {"lr": [0.1, 0.2, 0.3], "clip_norm": [0.1, 0.5, 1.0]}
    result = quadratic_cells.compute(cell | {"steps": 3, "repeats": 2, "grid": grid}).result
    assert (result["tuned"], result["at_edge"]) == ({"lr": lr, "clip_norm": 0.5}, at_edge)


def test_every_variant_has_a_name_and_a_colour():
    assert set(report.NAMES) == set(VARIANTS) == set(report.COLOURS) & set(VARIANTS)
    for variant, text in VARIANTS.items():
        assert ("NOT private" in text) == ("NOT private" in report.NAMES[variant])
