"""dpoptim beside Opacus on Fashion-MNIST at equal ε: three models, nine methods, the same tuning for each.

    apt-get install dataset-fashion-mnist        # or --data FOLDER, with its four gzipped files
    python -m experiments fashion_mnist --scale paper --device cuda --workers 4
    python -m experiments fashion_mnist --scale paper --device cuda --workers 4 --only purpose=search --only model=cnn

The phases `speed`, `search` and `final` run in this order; `--only purpose=PHASE` runs one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from dpoptim.integrations.optional import require
from experiments.fashion_mnist import report
from experiments.fashion_mnist.cells import ROW, SIZES, Cell, fastest
from experiments.fashion_mnist.data import PACKAGE, SYNTHETIC, check
from experiments.fashion_mnist.training import compute
from experiments.framework import Experiment, MissingInput, Request, open_results, run_cells
from experiments.progress import ProgressReporter
from experiments.results_file import Line, cell_key

NAME = "fashion_mnist"
_GUESSED_MS = {"dpoptim": 8.0, "Opacus": 30.0, "PyTorch": 4.0}  # per step on an H200, until steps are timed
_START = 2.0  # seconds of a cell beyond its steps


def run(request: Request, reporter: ProgressReporter) -> int:
    """Run the cells that are not in the file yet, phase by phase; returns how many are left."""
    folder = SYNTHETIC if request.scale == "smoke" else request.data or PACKAGE
    _check(folder, request.device)
    size, left, any_wanted = SIZES[request.scale], 0, False
    size = replace(size, seeds=request.seeds or size.seeds)
    for phase in ("speed", "search", "final"):
        lines = open_results(NAME, request, reporter)
        request = replace(request, overwrite=False)
        cells = {"speed": size.speed_cells, "search": size.search_cells}.get(phase, partial(size.final_cells, lines))()
        wanted = [cell for cell in cells if request.wants(cell)]
        if not wanted:
            continue
        any_wanted, workers = True, 1 if phase == "speed" else request.workers or 1
        if request.device != "cpu":
            seconds = estimate(wanted, lines)
            reporter.say(f"{NAME}, {phase}: about {seconds:.0f} s on an H200, less with several --workers")
        modes = {place: result["mode"] for place, result in fastest(lines).items() if "mode" in result}
        one = partial(compute, folder=folder, device=request.device, modes=modes)
        left += run_cells(NAME, wanted, one, request, reporter, workers=workers, device=request.device)
    if not any_wanted:
        raise MissingInput(
            f"only={','.join(request.only)} leaves no cell of {NAME}. The phases are purpose=speed, search and final, "
            "and final needs a finished search."
        )
    return left


def estimate(cells: Sequence[Cell], lines: Sequence[Line]) -> float:
    """Seconds that the cells which the file lacks take on an H200, one at a time."""
    there, timed = {cell_key(line["cell"]) for line in lines}, fastest(lines)
    return sum(
        _START + 1e-3 * cell["steps"] * timed.get(
            (cell["model"], cell["row"]), {"ms_per_step": _GUESSED_MS[ROW[cell["row"]].library]})["ms_per_step"]
        for cell in cells if cell_key(cell) not in there
    )  # fmt: skip


def _check(folder: str, device: str) -> None:
    """Raise MissingInput in one line if files, Opacus or the device are missing."""
    check(folder)
    try:
        require("opacus", NAME)
    except ValueError as error:
        raise MissingInput(str(error)) from error
    if device != "cpu" and not torch.cuda.is_available():
        raise MissingInput(f"{NAME}: PyTorch finds no CUDA device; leave out --device {device}")


EXPERIMENT = Experiment(
    name=NAME, run=run, markdown=report.markdown, pictures=report.pictures, table=report.short_tables
)
