"""The theory's statements, each predicted and simulated."""

from __future__ import annotations

from experiments.framework import Experiment, Request, run_cells
from experiments.progress import ProgressReporter
from experiments.theory import cells, report


def run(request: Request, reporter: ProgressReporter) -> int:
    """Run every cell that is not in the file yet."""
    return run_cells("theory", cells.cells(request.scale), cells.compute, request, reporter)


EXPERIMENT = Experiment(name="theory", run=run, markdown=report.markdown, pictures=report.pictures)
