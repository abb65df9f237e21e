"""The progress of `dpoptim compare`: which run of how many, the run itself, and the time that is left."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console

from dpoptim.app.comparison.compare import Watch
from dpoptim.app.format import duration
from dpoptim.app.progress import ProgressReporter


class Told(Watch):
    """A line a run on standard error, and in a terminal a bar for its steps."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("...")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._status.stop()

    def tell(self, text: str) -> None:
        if self._console.is_terminal:
            self._status.update(f"{text} ...")
            self._status.start()

    def note(self, text: str) -> None:
        self._status.stop()
        self._console.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)

    def begin(self, number: int, total: int, name: str, seconds_left: float | None) -> None:
        self._status.stop()
        left = "" if seconds_left is None else f"; about {duration(seconds_left)} left for all"
        self._console.print(f"run {number} of {total}: {name}{left}", highlight=False, markup=False, soft_wrap=True)

    def progress(self) -> ProgressReporter:
        return ProgressReporter(self._console, brief=True)
