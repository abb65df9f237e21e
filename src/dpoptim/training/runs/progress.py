"""A run as a person sees it: a bar in a terminal, a line an evaluation elsewhere, nothing for a program."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dpoptim.privacy.shown import rounded_up

NOT_PRIVATE = "not private: for debugging"


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
    """One line an evaluation, for logs of batch systems."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._epsilon, self._seconds, self._steps, self._batch_size, self._loss = 0.0, 0.0, 0, 0, ""
        self._so_far = "so far"

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def begin(self, *, step: int, steps: int, batch_size: int, whole_run: bool) -> None:
        self._steps, self._batch_size, self._so_far = steps, batch_size, "for the whole run" if whole_run else "so far"

    def step(self, *, step: int, epsilon: float, seconds: float) -> None:
        self._epsilon, self._seconds = epsilon, seconds

    def not_private(self, loss: float) -> None:
        self._loss = f", training loss {loss:.4f} ({NOT_PRIVATE})"

    def evaluation(self, entry: dict[str, Any]) -> None:
        rate = f", {self._batch_size / self._seconds:.0f} examples/s" if self._seconds else ""
        spent = f"; epsilon {rounded_up(self._epsilon)} {self._so_far}{rate}{self._loss}" if entry["step"] else ""
        self.say(f"step {entry['step']}/{self._steps}: {scores_line(entry)}{spent}")


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
        super().step(step=step, epsilon=epsilon, seconds=seconds)
        told = f"ε {rounded_up(epsilon)} {self._so_far}"
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
    text = "held-out loss not finite" if entry["loss"] is None else f"held-out loss {entry['loss']:.4f}"
    if entry.get("accuracy") is not None:
        text += f", accuracy {entry['accuracy']:.1%}".replace("%", " %")
    if entry.get("perplexity") is not None:
        text += f", perplexity {entry['perplexity']:.4g}"
    return text
