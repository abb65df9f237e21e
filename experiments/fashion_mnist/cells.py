"""The rows, their grids, and the cells of the three phases: speed, search, final."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from experiments.fashion_mnist.models import MODELS
from experiments.results_file import Line

Cell = dict[str, Any]
DELTA, TUNED_AT = 1e-5, 3.0
_CLIP_NORMS = (0.1, 0.3, 1.0)
_ADAM = (1e-3, 2e-3, 5e-3, 0.01, 0.02)
_SGD = (0.05, 0.1, 0.2, 0.5, 1.0)  # of lr·clip_norm, which is about how far a step goes


class Row(NamedTuple):
    """A method with its noise. `method` is a function of dpoptim, or dp_sgd or adam of the other libraries."""

    name: str
    label: str
    method: str
    library: str = "dpoptim"
    noise: str = "Poisson"  # or "default", "cyclic"

    def settings(self) -> list[tuple[float, float | None]]:
        """The grid of (lr, clip_norm): all private rows have the same number of points.

        >>> [len(row.settings()) for row in ROWS]
        [15, 15, 15, 15, 15, 15, 15, 15, 5]
        """
        if self.library == "PyTorch":
            return [(lr, None) for lr in _ADAM]
        if self.method == "dp_sgd":
            return [(float(f"{move / norm:.3g}"), norm) for norm in _CLIP_NORMS for move in _SGD]
        return [(lr, norm) for norm in _CLIP_NORMS for lr in _ADAM]


ROWS = (
    Row("opacus_dp_sgd", "Opacus, DP-SGD", "dp_sgd", "Opacus"),
    Row("opacus_dp_adam", "Opacus, DP-Adam", "adam", "Opacus"),
    Row("dp_sgd", "DP-SGD", "dp_sgd"),
    Row("post_processing", "post-processing (DP-Adam)", "post_processing"),
    Row("bias_correction", "bias correction", "bias_correction"),
    Row("scale_then_privatize", "scale-then-privatize", "scale_then_privatize"),
    Row("default", "scale-then-privatize, default noise", "scale_then_privatize", noise="default"),
    Row("cyclic", "scale-then-privatize, secret batches", "scale_then_privatize", noise="cyclic"),
    Row("non_private", "Adam (NOT private)", "adam", "PyTorch"),
)
ROW = {row.name: row for row in ROWS}


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is run at a scale. The batch size divides the number of examples, as Opacus's sampling rate needs."""

    models: tuple[str, ...] = tuple(MODELS)
    search_examples: int = 50_000
    final_examples: int = 60_000
    batch_size: int = 5_000
    epochs: int = 40
    every: int = 1  # 1 tries every setting of the grids, 7 every seventh
    epsilons: tuple[float, ...] = (1.0, TUNED_AT, 8.0)
    seeds: int = 3
    timed: int = 60  # steps
    modes: tuple[str, ...] = ("hooks", "functorch", "ghost")  # Opacus's ways to clip; the fastest counts

    def speed_cells(self) -> list[Cell]:
        """One cell per model and row, and Opacus in every mode: a few steps, alone on the device."""
        modes = {"Opacus": [{"mode": mode} for mode in self.modes]}
        return [
            self._cell("speed", model, row, row.settings()[0]) | mode | {"steps": self.timed}
            for model in self.models for row in ROWS for mode in modes.get(row.library, [{}])
        ]  # fmt: skip

    def search_cells(self) -> list[Cell]:
        """The grid of every row, on training images only."""
        smaller = replace(self, final_examples=self.search_examples)
        return [
            smaller._cell("search", model, row, setting)
            for model in self.models for row in ROWS for setting in row.settings()[:: self.every]
        ]  # fmt: skip

    def final_cells(self, lines: Sequence[Line]) -> list[Cell]:
        """The best setting of every row whose search has ended, on all training images, one seed after the other."""
        cells = []
        for seed, model, row in ((s, m, r) for s in range(self.seeds) for m in self.models for r in ROWS):
            if (best := self.best_setting(lines, model, row)) is not None:
                cell = self._cell("final", model, row, best) | {"seed": seed}
                cells += [cell | {"epsilon": each} for each in self.epsilons] if "epsilon" in cell else [cell]
        return cells

    def best_setting(self, lines: Sequence[Line], model: str, row: Row) -> tuple[float, float | None] | None:
        """The (lr, clip_norm) with the highest accuracy, then the lowest loss; None while some were not tried."""
        tried = of(lines, "search", model, row.name)
        if len(tried) < len(row.settings()[:: self.every]):
            return None

        def order(line: Line) -> tuple[float, float]:
            loss = line["result"]["loss"]
            return line["result"]["accuracy"], -(math.inf if loss is None else loss)

        best = max(tried, key=order)["cell"]
        return best["lr"], best.get("clip_norm")

    def _cell(self, purpose: str, model: str, row: Row, setting: tuple[float, float | None]) -> Cell:
        private = {} if setting[1] is None else {"epsilon": TUNED_AT, "clip_norm": setting[1]}
        return {"purpose": purpose, "model": model, "row": row.name, **private, "seed": 0, "lr": setting[0],
                "num_examples": self.final_examples, "batch_size": self.batch_size,
                "steps": self.epochs * self.final_examples // self.batch_size}  # fmt: skip


SIZES = {
    "smoke": Size(models=("cnn",), search_examples=200, final_examples=200, batch_size=50, epochs=2, every=15,
                  epsilons=(TUNED_AT,), seeds=1, timed=8, modes=("hooks",)),
    "small": Size(models=("scattering",), search_examples=8_000, final_examples=10_000, batch_size=1_000, epochs=20,
                  every=3, epsilons=(TUNED_AT,), seeds=2, timed=10),
    "paper": Size(every=2),
}  # fmt: skip


def of(lines: Sequence[Line], purpose: str, model: str | None = None, row: str | None = None) -> list[Line]:
    """The lines of a phase, of one model and of one row."""
    cells = ((line, line["cell"]) for line in lines)
    return [line for line, cell in cells if cell["purpose"] == purpose
            and model in (None, cell["model"]) and row in (None, cell["row"])]  # fmt: skip


def fastest(lines: Sequence[Line]) -> dict[tuple[str, str], dict[str, Any]]:
    """The results of the fastest timed steps by (model, row); an Opacus mode that fails is not timed."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in of(lines, "speed"):
        place, result = (line["cell"]["model"], line["cell"]["row"]), line["result"]
        if "ms_per_step" in result and result["ms_per_step"] < found.get(place, {}).get("ms_per_step", math.inf):
            found[place] = result
    return found
