"""AdaGrad on sparse logistic regression in one dimension, over many draws of the data."""

from __future__ import annotations

from experiments.framework import Experiment, Request, run_cells
from experiments.logistic import cells, report
from experiments.progress import ProgressReporter


def run(request: Request, reporter: ProgressReporter) -> int:
    """Run every cell that is not in the file yet."""
    return run_cells("logistic", cells.cells(request.scale), cells.compute, request, reporter)


EXPERIMENT = Experiment(name="logistic", run=run, markdown=report.markdown, pictures=report.pictures)
