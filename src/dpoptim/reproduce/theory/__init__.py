"""The theory's tables, each statement predicted and simulated."""

from __future__ import annotations

from dpoptim.reproduce.experiment import Experiment, Request, run_cells
from dpoptim.reproduce.theory.cells import cells, compute
from dpoptim.reproduce.theory.report import markdown, pictures
from dpoptim.reproduce.voice import Voice


def run(request: Request, voice: Voice) -> None:
    """Every statement that is not in the file yet."""
    run_cells("theory", cells(request.scale), compute, request, voice)


EXPERIMENT = Experiment(name="theory", run=run, markdown=markdown, pictures=pictures)
