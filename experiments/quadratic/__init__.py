"""The badly scaled quadratic in two dimensions: preconditioners, noise ellipses and trajectories of every variant."""

from __future__ import annotations

from experiments.experiment import Experiment, Request, run_cells
from experiments.quadratic import cells, report
from experiments.voice import Voice


def run(request: Request, voice: Voice) -> int:
    """Every variant that is not in the file yet."""
    return run_cells("quadratic", cells.cells(request.scale), cells.compute, request, voice)


EXPERIMENT = Experiment(name="quadratic", run=run, markdown=report.markdown, pictures=report.pictures)
