"""Cells of the committed results, recomputed in a cheaper way that must give the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import results_file
from experiments.logistic import cells as logistic_cells
from experiments.quadratic import cells as quadratic_cells

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).parents[2] / "results"
NEAR = 1e-4
"""Relative, because machines round differently."""


def committed(name: str, **settings: object) -> results_file.Line:
    lines = results_file.read(RESULTS / f"{name}.jsonl").lines
    (line,) = [line for line in lines if settings.items() <= {**line["cell"], "scale": line["scale"]}.items()]
    return line


@pytest.mark.parametrize(
    ("variant", "noise"),
    [("ground_truth", "none"), ("post_processing_eps_tuned", "independent"), ("independent_moments", "independent")],
)
def test_the_first_draws_of_the_logistic_regression(variant, noise):
    """Draws are the same however many there are."""
    line = committed("logistic", scale="paper", variant=variant, noise=noise)
    again = logistic_cells.compute(line["cell"] | {"draws": 2})
    for name, values in again.result.items():
        wanted = line["result"][name]
        assert values == pytest.approx(wanted[:2] if isinstance(wanted, list) else wanted, rel=NEAR), name
    assert set(again.result) == set(line["result"])
    assert again.epsilon == (None if line["epsilon"] is None else pytest.approx(line["epsilon"], rel=1e-6))


@pytest.mark.parametrize(("variant", "spread"), [("bias_correction", 1.0), ("independent_moments", 0.0)])
def test_the_quadratic_at_the_settings_it_was_tuned_to(monkeypatch, variant, spread):
    """With no other settings to tune over, and without trajectories."""
    monkeypatch.setattr(quadratic_cells, "trajectories", lambda path: None)
    line = committed("quadratic", scale="paper", variant=variant, spread=spread)
    grid = {name: [value] for name, value in line["result"]["tuned"].items()}
    again = quadratic_cells.compute(line["cell"] | {"grid": grid})
    for name in sorted(set(line["result"]) - {"at_edge", "trajectories"}):
        assert again.result[name] == pytest.approx(line["result"][name], rel=NEAR), name
    assert again.plan == line["plan"]
    assert again.epsilon == pytest.approx(line["epsilon"], rel=1e-6)
