"""Claims of the paper's section 4, each on a small problem: predicted, simulated, and what follows."""

from __future__ import annotations

from experiments.claims import cells, report
from experiments.framework import Experiment, Request, run_cells
from experiments.progress import ProgressReporter


def run(request: Request, reporter: ProgressReporter) -> int:
    """Run every cell that is not in the file yet."""
    return run_cells("claims", cells.cells(request.scale), cells.compute, request, reporter)


EXPERIMENT = Experiment(name="claims", run=run, markdown=report.markdown, pictures=report.pictures)
