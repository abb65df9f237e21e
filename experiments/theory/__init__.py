"""The theory's tables, each statement predicted and simulated."""

from __future__ import annotations

from experiments.experiment import Experiment, Request, run_cells
from experiments.theory import cells, report
from experiments.voice import Voice


def run(request: Request, voice: Voice) -> int:
    """Every statement that is not in the file yet."""
    return run_cells("theory", cells.cells(request.scale), cells.compute, request, voice)


EXPERIMENT = Experiment(name="theory", run=run, markdown=report.markdown, pictures=report.pictures)
