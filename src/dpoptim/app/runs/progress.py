"""A run as a person sees it: a bar in a terminal, a line now and then elsewhere, nothing for a program."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dpoptim.privacy.format_epsilon import format_epsilon

NOT_PRIVATE = "not private: for debugging"
SILENCE = 20.0  # seconds after which a log of a batch system gets a line


class ProgressDisplay:
    """Says nothing; also the shape of those that do."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def tell(self, text: str) -> None:
        """What is being done before training."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def begin(self, *, step: int, steps: int, batch_size: int, whole_run: bool) -> None:
        """Training starts after `step` of `steps`; `whole_run` says that ε is the whole run's from the first step."""

    def step(self, *, step: int, epsilon: float, seconds: float) -> None:
        """A step is done: ε so far, and how long steps take."""

    def not_private(self, loss: float) -> None:
        """The training loss of a step, which no guarantee covers."""

    def evaluation(self, entry: dict[str, Any]) -> None:
        """Scores on held-out records, as in the log."""


class Lines(ProgressDisplay):
    """One line an evaluation, and one after `SILENCE`: the stage that takes so long, or the step; for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._epsilon, self._seconds, self._steps, self._batch_size, self._loss = 0.0, 0.0, 0, 0, ""
        self._so_far = "so far"
        self._said = time.monotonic()
        self._stage: threading.Timer | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end_stage()

    def tell(self, text: str) -> None:
        self._end_stage()
        self._stage = threading.Timer(SILENCE, self.say, [f"{text} ..."])
        self._stage.daemon = True
        self._stage.start()

    def _end_stage(self) -> None:
        if self._stage is not None:
            self._stage.cancel()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._said = time.monotonic()

    def begin(self, *, step: int, steps: int, batch_size: int, whole_run: bool) -> None:
        self._end_stage()
        self._steps, self._batch_size, self._so_far = steps, batch_size, "for the whole run" if whole_run else "so far"

    def step(self, *, step: int, epsilon: float, seconds: float) -> None:
        self._epsilon, self._seconds = epsilon, seconds
        if time.monotonic() - self._said >= SILENCE:
            self.say(f"step {step}/{self._steps}{self._spent()}")

    def not_private(self, loss: float) -> None:
        self._loss = f", training loss {loss:.4f} ({NOT_PRIVATE})"

    def evaluation(self, entry: dict[str, Any]) -> None:
        spent = self._spent() if entry["step"] else ""
        self.say(f"step {entry['step']}/{self._steps}: {scores_line(entry)}{spent}")

    def _spent(self) -> str:
        rate = f", {self._batch_size / self._seconds:.0f} examples/s" if self._seconds else ""
        return f"; epsilon {format_epsilon(self._epsilon)} {self._so_far}{rate}{self._loss}"


class Bar(Lines):
    """A bar with the step, ε so far, examples a second, time left and the last held-out scores."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._stack = contextlib.ExitStack()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=False,
        )
        self._task: Any = None
        self._scores = ""

    def __enter__(self) -> Self:
        self._status = self._stack.enter_context(self._console.status("..."))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def tell(self, text: str) -> None:
        self._status.update(f"{text} ...")

    def begin(self, *, step: int, steps: int, batch_size: int, whole_run: bool) -> None:
        super().begin(step=step, steps=steps, batch_size=batch_size, whole_run=whole_run)
        self._status.stop()
        self._stack.enter_context(self._progress)
        self._task = self._progress.add_task("training", total=steps, completed=step, told="")

    def step(self, *, step: int, epsilon: float, seconds: float) -> None:
        told = f"ε {format_epsilon(epsilon)} {self._so_far}"
        if seconds:
            told += f"  {self._batch_size / seconds:.0f} ex/s"
        self._progress.update(self._task, completed=step, told=told + self._scores + self._loss)

    def evaluation(self, entry: dict[str, Any]) -> None:
        self._scores = f"  {scores_line(entry)}"


def scores_line(entry: dict[str, Any]) -> str:
    """Held-out scores in a few words.

    >>> scores_line({"loss": 2.5, "accuracy": 0.75, "perplexity": None})
    'held-out loss 2.5000, accuracy 75.0 %'
    """
    loss = entry["loss"]
    if loss is None or not math.isfinite(loss):  # a log has None there
        return "held-out loss not finite"
    text = f"held-out loss {loss:.4f}"
    if entry.get("accuracy") is not None:
        text += f", accuracy {entry['accuracy']:.1%}".replace("%", " %")
    if entry.get("perplexity") is not None:
        text += f", perplexity {entry['perplexity']:.4g}"
    return text
