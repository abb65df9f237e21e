"""Progress of a long run: a bar in a terminal, one line per cell elsewhere, nothing in tests."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column


class ProgressReporter:
    """Prints nothing; the base of those that do."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def say(self, text: str) -> None:
        """Print a line that stays."""

    def begin(self, name: str, *, total: int, done: int) -> None:
        """An experiment of `total` cells starts; `done` of them are in the file already."""

    def doing(self, text: str) -> None:
        """Show what is being worked on."""

    def finished(self, text: str) -> None:
        """A cell is done."""


class LineReporter(ProgressReporter):
    """One line per cell, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def begin(self, name: str, *, total: int, done: int) -> None:
        kept = f", {done} of them done before" if done else ""
        self.say(f"{name}: {total} cells{kept}")

    def finished(self, text: str) -> None:
        self.say(text)


class BarReporter(LineReporter):
    """One bar per experiment, with the current cell, truncated to the width of the terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=12), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[cell]}", table_column=rest), console=console, expand=True,
        )  # fmt: skip
        self._task = self._progress.add_task("", visible=False, cell="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, name: str, *, total: int, done: int) -> None:
        self._task = self._progress.add_task(name, total=total, completed=done, cell="")

    def doing(self, text: str) -> None:
        self._progress.update(self._task, cell=text)

    def finished(self, text: str) -> None:
        self._progress.update(self._task, advance=1, cell="")


def reporter_for(console: Console) -> ProgressReporter:
    """A bar in a terminal, lines elsewhere."""
    return BarReporter(console) if console.is_terminal else LineReporter(console)
