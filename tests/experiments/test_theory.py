"""The theory's cells: simulations that know no formula, and how agreement is counted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import results_file
from experiments.theory import cells as theory_cells
from experiments.theory.report import agrees, deviation, draw

pytestmark = pytest.mark.slow

Z = 4.0
COMMITTED = Path(__file__).parents[2] / "results" / "theory.jsonl"


def test_averaged_noise_has_the_moments_of_an_exponential_average():
    """Mean 1 and variance 2κ for squares, 0 and κ for normals, κ = (1−β)/(1+β); a β of .8 would be seen."""
    given: dict[str, Any] = {"beta2": 0.9, "steps": 200, "draws": 20_000, "seed": 1}
    squares, plain = (theory_cells.averaged_noise(square=square, **given) for square in (True, False))
    kappa = 0.1 / 1.9
    assert abs(squares.mean() - 1) < Z * math.sqrt(2 * kappa / 20_000)
    for values, wanted in ((squares, math.sqrt(2 * kappa)), (plain, math.sqrt(kappa))):
        found = theory_cells.spread_of(values)
        assert abs(found.value - wanted) < Z * found.standard_error
        assert abs(found.value - math.sqrt(0.2 / 1.8) / math.sqrt(kappa) * wanted) > 2 * Z * found.standard_error


def test_standard_errors_are_those_of_the_mean():
    values = np.random.default_rng(0).standard_normal((2000, 50))
    means = [theory_cells.average_of(row) for row in values]
    real = np.std([one.value for one in means])
    assert np.mean([one.standard_error for one in means]) == pytest.approx(real, rel=0.06)


def test_prefix_errors_of_independent_noise():
    """√((n+1)/2) over all steps and √n at the last."""
    given: dict[str, Any] = {"column_norm": 1.0, "draws": 20_000, "seed": 0}
    found = theory_cells.prefix_errors(np.eye(31), last=False, **given)
    assert abs(found.value - 4.0) < Z * found.standard_error
    found = theory_cells.prefix_errors(np.eye(25), last=True, **given)
    assert abs(found.value - 5.0) < Z * found.standard_error
    doubled = theory_cells.prefix_errors(np.eye(25), last=True, **(given | {"column_norm": 1.1}))
    assert abs(doubled.value - 5.0) > 2 * Z * doubled.standard_error


def test_contraction_without_feedback_is_the_decay():
    assert theory_cells.contraction(feedback=0.0, beta2=0.9, steps=10, draws=2, seed=0).value == pytest.approx(0.9)


@pytest.mark.parametrize("quantity", sorted({cell["quantity"] for cell in theory_cells.cells("smoke")} - {"window"}))
def test_every_quantity_matches_its_prediction(quantity):
    """With 2,000 draws, within Z standard errors; the long averages with fewer steps than at any scale."""
    for cell in theory_cells.cells("smoke"):
        if cell["quantity"] != quantity or cell.get("steps", 0) > 5000:
            continue
        result = theory_cells.compute(cell | ({"draws": 2000} if "draws" in cell else {})).result
        if result["standard_error"]:
            found = (result["simulated"] - result["predicted"]) / result["standard_error"]
            assert abs(found) < Z, cell
        if result["known"] is not None:
            assert agrees(result["predicted"], result["known"]), cell
        if quantity == "change of a square":
            assert result["simulated"] == pytest.approx(result["predicted"])


@pytest.mark.parametrize(("clip_norm", "fate"), [(19.0, "collapses"), (40.0, "steady"), (120.0, "diverges")])
def test_the_window(clip_norm, fate):
    (cell,) = [
        cell
        for cell in theory_cells.cells("small")
        if cell["quantity"] == "window" and cell["clip_norm"] == clip_norm and cell["start"]
    ]
    result = theory_cells.compute(cell | {"steps": 2500}).result
    assert (result["predicted_fate"], result["simulated_fate"]) == (fate, fate)
    assert len(result["steps"]) == len(result["predicted_path"]) == len(result["simulated_path"])
    if fate == "steady":
        assert result["simulated"] == pytest.approx(result["rest"], rel=0.05)


@pytest.mark.parametrize("setting", ["dimension", "batch_size", "noise_multiplier", "beta2", "eps_scale", "start"])
def test_the_window_runs_with_its_settings(setting):
    """Each setting halved moves both paths: the mean field's and the simulation's."""
    cell = next(cell for cell in theory_cells.cells("smoke") if cell["quantity"] == "window")
    given, changed = (
        theory_cells.compute(one | {"steps": 40}).result
        for one in (cell, cell | {setting: type(cell[setting])(cell[setting] / 2)})
    )
    assert given["predicted_path"] != changed["predicted_path"]
    assert given["simulated_path"] != changed["simulated_path"]


def test_prefix_sums_have_the_length_of_the_cell():
    """√((n+1)/2) for independent noise."""
    found = theory_cells.compute(
        {"quantity": "prefix error", "case": "independent", "steps": 31, "draws": 20_000, "seed": 0}
    ).result
    assert found["predicted"] == pytest.approx(4.0)
    assert abs(found["simulated"] - 4.0) < Z * found["standard_error"]


@pytest.mark.parametrize("clip_norm", [22.0, 120.0])
def test_a_committed_window_is_reproduced(clip_norm):
    line = next(
        line
        for line in results_file.read(COMMITTED).lines
        if line["cell"].get("clip_norm") == clip_norm and "start" in line["cell"]
    )
    result, until = line["result"], 500
    again = theory_cells.compute(line["cell"] | {"steps": until}).result
    committed = dict(
        zip(result["steps"], zip(result["predicted_path"], result["simulated_path"], strict=True), strict=True)
    )
    paths = zip(again["steps"], zip(again["predicted_path"], again["simulated_path"], strict=True), strict=True)
    shared = [(values, committed[step]) for step, values in paths if step in committed]
    assert len(shared) > 10
    for found, wanted in shared:
        assert found == pytest.approx(wanted, rel=1e-8)


def test_the_picture_names_the_number_of_coordinates():
    lines = results_file.read(COMMITTED).lines
    other = [
        line | {"cell": line["cell"] | ({"dimension": 77} if "dimension" in line["cell"] else {})} for line in lines
    ]
    assert "mean of 77 coordinates" in draw(other).axes[0].get_ylabel()


def test_cells_are_distinct_and_have_different_seeds():
    for scale in ("smoke", "small", "paper"):
        found = theory_cells.cells(scale)
        seeds = [cell["seed"] for cell in found if "draws" in cell]
        assert len(set(seeds)) == len(seeds)


def test_deviation_is_in_standard_errors():
    result = {"predicted": 1.0, "simulated": 1.5, "standard_error": 0.25}
    assert deviation({"result": result}) == 2.0
    assert deviation({"result": result | {"standard_error": None}}) is None
