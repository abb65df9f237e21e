"""AdaGrad on sparse logistic regression in one dimension, over many draws of the data."""

from __future__ import annotations

from experiments.experiment import Experiment, Request, run_cells
from experiments.logistic import cells, report
from experiments.voice import Voice


def run(request: Request, voice: Voice) -> int:
    """Every variant, noise and setting that is not in the file yet."""
    return run_cells("logistic", cells.cells(request.scale), cells.compute, request, voice)


EXPERIMENT = Experiment(name="logistic", run=run, markdown=report.markdown, pictures=report.pictures)
