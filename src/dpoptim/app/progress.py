"""Progress of runs, and step times that reveal little about the batches."""

from __future__ import annotations

import math
import threading
import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from dpoptim.privacy.statement import format_epsilon

NOT_PRIVATE = "not private: for debugging"
SILENCE = 20.0  # seconds without a line after which a log gets one
LEAST_STEPS = 10


class ProgressReporter:
    """Shows runs to a person: a bar in a terminal, occasional lines in a log, nothing without a console.

    Use it as a context manager around each run. If `brief`, a log gets messages only.
    """

    def __init__(self, console: Console | None = None, *, brief: bool = False) -> None:
        self._console, self._brief = console, brief
        self._status = console.status("...") if console is not None and console.is_terminal else None
        self._logs = console is not None and not console.is_terminal and not brief
        self._bar: Progress | None = None
        self._timer: threading.Timer | None = None
        self._printed = time.monotonic()
        self._steps, self._batch_size, self._whole_run, self._unit = 0, 0, False, "step"
        self._spent = self._rate = self._scores = self._loss = ""

    def __enter__(self) -> Self:
        self._spent = self._rate = self._scores = self._loss = ""
        return self

    def __exit__(self, *error: object) -> None:
        self._end_stage()
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def message(self, text: str) -> None:
        """Print a line."""
        if self._console is not None:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
            self._printed = time.monotonic()

    def note(self, text: str) -> None:
        """Print a line about the run, unless the log is brief."""
        if not self._brief:
            self.message(text)

    def stage(self, text: str) -> None:
        """Show what is being done before training; a log mentions it only if it takes long."""
        self._end_stage()
        if self._status is not None:
            self._status.update(f"{text} ...")
            self._status.start()
        elif self._logs:
            self._timer = threading.Timer(SILENCE, self.message, [f"{text} ..."])
            self._timer.daemon = True
            self._timer.start()

    def begin(self, *, step: int, steps: int, batch_size: int, whole_run: bool, unit: str = "step") -> None:
        """Start training after `step` of `steps`; with `whole_run`, ε never changes and is not shown."""
        self._end_stage()
        self._unit = unit
        self._steps, self._batch_size, self._whole_run = steps, batch_size, whole_run
        if self._status is not None:
            # In a narrow terminal only the description is cut.
            rest = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
            columns = (BarColumn(bar_width=16), MofNCompleteColumn(), TimeRemainingColumn(compact=True), rest)
            self._bar = Progress(*columns, console=self._console, expand=True)
            self._bar.add_task("", total=steps, completed=step)
            self._bar.start()

    def step(self, *, step: int, epsilon: float, seconds: float) -> None:
        """A step is done: ε so far, and the seconds per step (0 if unknown)."""
        rate, what = self._batch_size / (seconds or math.inf), "examples" if self._unit == "step" else f"{self._unit}s"
        self._rate = f"{rate:.{0 if rate >= 10 else 1}f} {what}/s" if seconds else ""
        self._spent = "" if self._whole_run else f"epsilon {format_epsilon(epsilon)} so far"
        if self._bar is not None:
            spent = self._spent.replace("epsilon", "ε")
            text = "; ".join(filter(None, (spent, self._rate, self._scores, self._loss)))
            self._bar.update(self._bar.task_ids[0], completed=step, description=text)
        elif self._logs and time.monotonic() - self._printed >= SILENCE:
            self._line(step)

    def not_private(self, loss: float) -> None:
        """The training loss of a step, which no guarantee covers."""
        self._loss = f"training loss {loss:.4f} ({NOT_PRIVATE})"

    def evaluation(self, entry: dict[str, Any]) -> None:
        """Scores on held-out records, as in the log."""
        self._scores = scores_line(entry)
        if self._logs:
            self._line(entry["step"], f": {self._scores}")

    def _line(self, step: int, scores: str = "") -> None:
        rest = ", ".join(filter(None, (self._spent, self._rate, self._loss)))
        self.message(f"{self._unit} {step}/{self._steps}{scores}{f'; {rest}' if step and rest else ''}")

    def _end_stage(self) -> None:
        if self._status is not None:
            self._status.stop()
        if self._timer is not None:
            self._timer.cancel()


def scores_line(entry: dict[str, Any]) -> str:
    """Held-out scores in a few words."""
    loss = entry["loss"]
    if loss is None or not math.isfinite(loss):  # a log has None there
        return "held-out loss not finite"
    text = f"held-out loss {loss:.4f}"
    if entry.get("accuracy") is not None:
        text += f", accuracy {entry['accuracy']:.1%}".replace("%", " %")
    if entry.get("rmse") is not None:
        text += f", root mean squared error {entry['rmse']:.4g}"
    if entry.get("perplexity") is not None:
        text += f", perplexity {entry['perplexity']:.4g}"
    return text


class StepTimes:
    """The mean time of the last complete block of `over` steps, at least ten, with two digits.

    A step's time follows the size of its secret batch (measured correlation: 0.93). Blocks do not overlap, because the
    difference of two means over a sliding window is the difference of two single steps. What the means still reveal is
    not covered by the guarantee.
    """

    def __init__(self, *, over: int) -> None:
        self._over = max(LEAST_STEPS, over)
        self._block: list[float] = []
        self._mean: float | None = None

    def add(self, seconds: float) -> float | None:
        """Add a step; return the mean of the last complete block, or None before there is one."""
        self._block.append(seconds)
        if len(self._block) == self._over:
            self._mean = two_digits(sum(self._block) / self._over)
            self._block = []
        return self._mean


def two_digits(value: float) -> float:
    return float(f"{value:.2g}")
