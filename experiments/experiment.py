"""What an experiment is: cells of settings to run, and tables and pictures of the lines that the cells leave."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments import provenance, result_files
from experiments.result_files import Line
from experiments.voice import Voice

SCALES = ("smoke", "small", "paper")
"""Seconds, for tests; minutes on two cores; the paper's size."""


class MissingInput(ValueError):
    """What an experiment needs and does not find (data, a model): a run of all passes over it."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a person asked for.

    seeds: how many, where an experiment repeats by seeds; None is the scale's own number.
    workers: processes that share the device, where an experiment can use several; None is its own number.
    data, model: folders or names, where an experiment needs them.
    commit: what to write down as the commit; None finds out.
    time_limit: seconds after which no further cell is begun, and long ones stop to be taken up again; None is no limit.
    again: begin afresh; the old file is kept as NAME.old.
    only: "NAME=VALUE" texts; cells whose setting NAME is not VALUE are left out.

    >>> request = Request(scale="smoke", out=Path("results"), only=("noise=dense",))
    >>> request.file("logistic").as_posix(), request.wants({"noise": "dense"}), request.wants({"noise": "other"})
    ('results/logistic.jsonl', True, False)
    """

    scale: str
    out: Path
    seeds: int | None = None
    device: str = "cpu"
    workers: int | None = None
    data: str | None = None
    model: str | None = None
    commit: str | None = None
    time_limit: float | None = None
    again: bool = False
    only: tuple[str, ...] = ()
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ValueError(f"scale={self.scale!r} must be one of {', '.join(SCALES)}")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device={self.device!r} must be cpu, cuda or cuda:N")
        for name in ("seeds", "workers", "time_limit"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be more than 0")
        for text in self.only:
            if "=" not in text:
                raise ValueError(f"only={text!r} must be NAME=VALUE, as in variant=post_processing")

    def file(self, name: str) -> Path:
        """Where the lines of an experiment are."""
        return self.out / f"{name}.jsonl"

    def wants(self, cell: Mapping[str, Any]) -> bool:
        """Whether `only` leaves this cell in: it has one of the values asked for of each name.

        >>> request = Request(scale="smoke", out=Path(), only=("row=a", "row=b", "column=x"))
        >>> [request.wants({"row": name, "column": "x"}) for name in "abc"], request.wants({"row": "a"})
        ([True, True, False], False)
        """
        asked: dict[str, list[str]] = {}
        for text in self.only:
            name, _, value = text.partition("=")
            asked.setdefault(name, []).append(value)
        return all(name in cell and str(cell[name]) in values for name, values in asked.items())

    def seconds_left(self) -> float:
        """Until the limit is over; infinite where there is none."""
        return math.inf if self.time_limit is None else self.time_limit - (time.perf_counter() - self.started)

    def out_of_time(self) -> bool:
        """Whether the limit is over."""
        return self.seconds_left() < 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a cell gave. `note` says what ε does not cover, or why there is none ("NOT private: no noise")."""

    result: Mapping[str, Any]
    plan: Mapping[str, Any] | None = None
    epsilon: float | None = None
    adjacency: str | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A named experiment.

    run: does the cells that are missing, and returns how many are left; raises `MissingInput` where it cannot.
    markdown: the section of tables for the lines of ONE scale; its pictures are linked as images/NAME-PICTURE.png.
    pictures: what to draw for them, each a function that returns a matplotlib figure, by PICTURE.
    results: the experiment whose file of results it reads and adds to, where it has none of its own.
    table: the one table of the section that another page may show, where there is one.
    """

    name: str
    run: Callable[[Request, Voice], int]
    markdown: Callable[[Sequence[Line]], str]
    pictures: Callable[[Sequence[Line]], Mapping[str, Callable[[], Any]]]
    results: str = ""
    table: Callable[[Sequence[Line]], str] | None = None

    @property
    def file(self) -> str:
        """The name of its file of results, which another experiment may share."""
        return self.results or self.name


def open_results(name: str, request: Request, voice: Voice) -> list[Line]:
    """The lines of this scale in an experiment's file, begun afresh where that is asked for."""
    path = request.file(name)
    if request.again and (old := result_files.start_again(path)):
        voice.say(f"{name}: the old results are now {old}")
    contents = result_files.read(path)
    if contents.note:
        voice.say(contents.note)
    return [line for line in contents.lines if line["scale"] == request.scale]


def line_of(
    name: str, request: Request, cell: Mapping[str, Any], outcome: Outcome, started: float, *, device: str = "cpu"
) -> Line:
    """A cell that was begun then (by `time.perf_counter`) and came out so on that device, as a line for the file."""
    return {
        "experiment": name,
        "scale": request.scale,
        "cell": dict(cell),
        "plan": outcome.plan,
        "epsilon": outcome.epsilon,
        "adjacency": outcome.adjacency,
        "note": outcome.note,
        "result": outcome.result,
        "setting": provenance.setting(started, commit=request.commit, device=device),
    }


def run_cells(
    name: str,
    cells: Iterable[Mapping[str, Any]],
    compute: Callable[[dict[str, Any]], Outcome],
    request: Request,
    voice: Voice,
) -> int:
    """Compute those cells that the file has not, one after the other, each appended as soon as it is done.

    Returns how many are left, which is 0 but past the time limit: then no cell is begun, and a line says so. Edge
    cases: `request.again` renames the old file first.
    """
    path = request.file(name)
    there = {result_files.cell_key(line["cell"]) for line in open_results(name, request, voice)}
    all_cells = [dict(cell) for cell in cells]
    wanted = [cell for cell in all_cells if request.wants(cell)]
    if not wanted and request.only:
        raise MissingInput(f"only={','.join(request.only)} leaves no cell of {name}; {_settings_in_words(all_cells)}")
    missing = [cell for cell in wanted if result_files.cell_key(cell) not in there]
    voice.begin(name, total=len(wanted), done=len(wanted) - len(missing))
    for count, cell in enumerate(missing):
        if request.out_of_time():
            voice.say(f"{name}: time is over, {len(missing) - count} cells are left; the same command goes on")
            return len(missing) - count
        started = time.perf_counter()
        voice.doing(short(cell))
        line = line_of(name, request, cell, compute(cell), started)
        result_files.append(path, line)
        voice.finished(f"{name}: {short(cell)}: {line['setting']['seconds']:.1f} s")
    return 0


def _settings_in_words(cells: Sequence[Mapping[str, Any]]) -> str:
    """Which words cells have, by setting.

    >>> _settings_in_words([{"noise": "dense", "steps": 3}, {"noise": "none", "steps": 3}])
    'noise is dense, none'
    """
    words: dict[str, list[str]] = {}
    for cell in cells:
        for name, value in cell.items():
            if isinstance(value, str) and value not in words.setdefault(name, []):
                words[name].append(value)
    return "; ".join(f"{name} is {', '.join(values)}" for name, values in words.items())


def short(cell: Mapping[str, Any]) -> str:
    """The settings that are words, which tell cells apart.

    >>> short({"variant": "IME", "noise": "dense", "steps": 100})
    'IME, dense'
    """
    return ", ".join(str(value) for value in cell.values() if isinstance(value, str)) or result_files.cell_key(cell)
