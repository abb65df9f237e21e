"""What a person hears of a long run: a bar in a terminal, a line a cell elsewhere, nothing in tests."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column


class Voice:
    """Says nothing; also the shape of those that do."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def say(self, text: str) -> None:
        """A line that stays."""

    def begin(self, name: str, *, total: int, done: int) -> None:
        """An experiment of `total` cells starts; `done` of them are in the file already."""

    def doing(self, text: str) -> None:
        """What is being worked on, within a cell too."""

    def finished(self, text: str) -> None:
        """A cell is done."""


class LinesVoice(Voice):
    """A line a cell, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def begin(self, name: str, *, total: int, done: int) -> None:
        kept = f", {done} of them done before" if done else ""
        self.say(f"{name}: {total} cells{kept}")

    def finished(self, text: str) -> None:
        self.say(text)


class BarVoice(LinesVoice):
    """One bar an experiment, with the cell that is being run, cut where a narrow terminal has no room for it."""

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


def voice_of(console: Console) -> Voice:
    """A bar where someone looks at it, lines elsewhere."""
    return BarVoice(console) if console.is_terminal else LinesVoice(console)
