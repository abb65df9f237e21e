"""The badly scaled quadratic in two dimensions: preconditioners, noise ellipses and trajectories of every variant."""

from __future__ import annotations

from experiments.framework import Experiment, Request, run_cells
from experiments.progress import ProgressReporter
from experiments.quadratic import cells, report


def run(request: Request, reporter: ProgressReporter) -> int:
    """Run every cell that is not in the file yet."""
    return run_cells("quadratic", cells.cells(request.scale), cells.compute, request, reporter)


EXPERIMENT = Experiment(name="quadratic", run=run, markdown=report.markdown, pictures=report.pictures)
