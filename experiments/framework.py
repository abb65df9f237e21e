"""What an experiment is, the list of experiments, and how their results become tables and pictures.

An experiment runs cells of settings. Each finished cell is one line of a results file. Tables and pictures are made
from that file alone.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments import plot_style as style
from experiments import provenance, results_file
from experiments.progress import ProgressReporter
from experiments.results_file import Line

SCALES = ("smoke", "small", "paper")
"""Seconds, for tests; minutes on two cores; the paper's size."""
NAMES: dict[str, str] = {
    "logistic": "AdaGrad on sparse 1-D logistic regression: the paper's first example, over many dataset draws",
    "quadratic": "the badly scaled quadratic in two dimensions: preconditioners, noise ellipses, trajectories",
    "claims": "four claims of the paper's section 4: same gradients, prefix sums, one strategy offline, public data",
    "theory": "the theory's limits and closed forms, each next to a simulation",
    "tinybert": "BERT-Tiny on arXiv abstracts: the paper's table (needs --data and --model, and a GPU at paper scale)",
    "figures": "pictures of BERT-Tiny's runs, and the clip norm runs that one of them needs (same needs as tinybert)",
    "fashion_mnist": "dpoptim beside Opacus on Fashion-MNIST at equal ε (a GPU at paper scale; --data: its files)",
}
"""Every experiment, in the order of a run of all."""


class MissingInput(ValueError):
    """Something an experiment needs is missing (data, a model). A run of all skips the experiment."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for.

    Attributes:
        scale: One of SCALES.
        out: The folder of the results.
        seeds: How many seeds, for experiments with seeds; None is the scale's own number.
        device: cpu, cuda or cuda:N.
        workers: Processes that share the device; None is the experiment's own number.
        data: A folder or name, for experiments that need data.
        model: A folder or name, for experiments that need a model.
        commit: What to record as the commit; None asks git.
        time_limit: After so many seconds no further cell starts, and long ones stop and resume next time.
        overwrite: Start over. The old file is kept as NAME.jsonl.old.
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
    overwrite: bool = False
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
        """Whether `only` keeps this cell: it has one of the requested values of each name.

        >>> request = Request(scale="smoke", out=Path(), only=("row=a", "row=b", "column=x"))
        >>> [request.wants({"row": name, "column": "x"}) for name in "abc"], request.wants({"row": "a"})
        ([True, True, False], False)
        """
        wanted: dict[str, list[str]] = {}
        for text in self.only:
            name, _, value = text.partition("=")
            wanted.setdefault(name, []).append(value)
        return all(name in cell and str(cell[name]) in values for name, values in wanted.items())

    def seconds_left(self) -> float:
        """Seconds until the time limit; infinite if there is none."""
        return math.inf if self.time_limit is None else self.time_limit - (time.perf_counter() - self.started)

    def out_of_time(self) -> bool:
        """Whether the time limit has passed."""
        return self.seconds_left() < 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a cell. `note` is what ε does not cover, or why there is none ("NOT private: no noise")."""

    result: Mapping[str, Any]
    plan: Mapping[str, Any] | None = None
    epsilon: float | None = None
    adjacency: str | None = None
    note: str | None = None


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A named experiment.

    Attributes:
        name: Its name on the command line.
        run: Runs the missing cells and returns how many are left. Raises `MissingInput` if it cannot.
        markdown: The section of tables for the lines of ONE scale. It links pictures as images/NAME-PICTURE.png.
        pictures: What to draw for them: functions that return a matplotlib figure, by PICTURE.
        results: The experiment whose results file it shares; empty if it has its own.
        table: The one table of the section that other pages may show.
    """

    name: str
    run: Callable[[Request, ProgressReporter], int]
    markdown: Callable[[Sequence[Line]], str]
    pictures: Callable[[Sequence[Line]], Mapping[str, Callable[[], Any]]]
    results: str = ""
    table: Callable[[Sequence[Line]], str] | None = None

    @property
    def file(self) -> str:
        """The name of its results file."""
        return self.results or self.name


def experiments(names: Sequence[str]) -> list[Experiment]:
    """Import the named experiments, each once, in the order of NAMES; "all" is every one.

    >>> [one.name for one in experiments(["theory", "theory"])]
    ['theory']
    """
    for name in names:
        if name != "all" and name not in NAMES:
            raise ValueError(f"experiment={name!r} must be one of {', '.join(NAMES)} or all")
    return [
        importlib.import_module(f"experiments.{name}").EXPERIMENT for name in NAMES if name in names or "all" in names
    ]


# Running cells.


def open_results(name: str, request: Request, reporter: ProgressReporter) -> list[Line]:
    """The lines of this scale in an experiment's file, after starting over if requested."""
    path = request.file(name)
    if request.overwrite and (old := results_file.start_over(path)):
        reporter.say(f"{name}: the old results are now {old}")
    contents = results_file.read(path)
    if contents.note:
        reporter.say(contents.note)
    return [line for line in contents.lines if line["scale"] == request.scale]


def line_of(
    name: str, request: Request, cell: Mapping[str, Any], outcome: Outcome, started: float, *, device: str = "cpu"
) -> Line:
    """A line for the file; `started` is by `time.perf_counter`."""
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
    reporter: ProgressReporter,
    *,
    workers: int = 1,
    device: str = "cpu",
) -> int:
    """Compute the cells that the file lacks, and append each as soon as it is done.

    With several `workers`, that many processes compute. `device` is what they compute on.
    Returns how many are left, which is 0 unless the time limit passed.
    """
    path = request.file(name)
    there = {results_file.cell_key(line["cell"]) for line in open_results(name, request, reporter)}
    all_cells = [dict(cell) for cell in cells]
    wanted = [cell for cell in all_cells if request.wants(cell)]
    if not wanted and request.only:
        raise MissingInput(f"only={','.join(request.only)} leaves no cell of {name}; {_settings_in_words(all_cells)}")
    missing = [cell for cell in wanted if results_file.cell_key(cell) not in there]
    reporter.begin(name, total=len(wanted), done=len(wanted) - len(missing))
    left, compute_all = len(missing), _at_once if workers > 1 else _in_turn
    for cell, outcome, seconds in compute_all(missing, compute, request, reporter, workers):
        line = line_of(name, request, cell, outcome, time.perf_counter() - seconds, device=device)
        results_file.append(path, line)
        reporter.finished(f"{name}: {short(cell)}: {line['setting']['seconds']:.1f} s")
        left -= 1
    if left:
        reporter.say(f"{name}: time limit reached, {left} cells are left; run the command again")
    return left


Cell = dict[str, Any]
Compute = Callable[[Cell], Outcome]


def _in_turn(
    cells: Sequence[Cell], compute: Compute, request: Request, reporter: ProgressReporter, workers: int
) -> Iterator[tuple[Cell, Outcome, float]]:
    """Compute one cell after the other until the time limit; yields each with its outcome and seconds."""
    for cell in cells:
        if request.out_of_time():
            return
        reporter.doing(short(cell))
        yield cell, *_timed(compute, cell)


def _at_once(
    cells: Sequence[Cell], compute: Compute, request: Request, reporter: ProgressReporter, workers: int
) -> Iterator[tuple[Cell, Outcome, float]]:
    """The same in several processes; cells come as they finish."""
    waiting, running = list(cells), dict[Future[tuple[Outcome, float]], Cell]()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:  # CUDA does not survive a fork
        while waiting or running:
            while waiting and len(running) < workers and not request.out_of_time():
                cell = waiting.pop(0)
                reporter.doing(short(cell))
                running[pool.submit(_timed, compute, cell)] = cell
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), *future.result()


def _timed(compute: Compute, cell: Cell) -> tuple[Outcome, float]:
    """The outcome of a cell and the seconds that it took."""
    started = time.perf_counter()
    return compute(cell), time.perf_counter() - started


def _settings_in_words(cells: Sequence[Mapping[str, Any]]) -> str:
    """The text values of each setting.

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
    """The settings that are text, which distinguish cells.

    >>> short({"variant": "IME", "noise": "dense", "steps": 100})
    'IME, dense'
    """
    return ", ".join(str(value) for value in cell.values() if isinstance(value, str)) or results_file.cell_key(cell)


# Rendering.


def lines_of(experiment: Experiment, out: Path, scale: str | None = None) -> list[Line]:
    """The lines of one scale, by default the largest in the file. If a cell appears twice, the last line counts."""
    path = out / f"{experiment.file}.jsonl"
    lines = results_file.read(path).lines
    scales = {line["scale"] for line in lines}
    if unknown := scales - set(SCALES):
        raise ValueError(f"{path}: a line has scale {unknown.pop()!r}; it must be one of {', '.join(SCALES)}")
    scale = scale or max(scales, key=SCALES.index, default="")
    found = {results_file.cell_key(line["cell"]): line for line in lines if line["scale"] == scale}
    if not found:
        others = f" of scale {scale}, only of {', '.join(sorted(scales))}" if scales else ""
        raise MissingInput(f"{path} holds no result{others}; run `python -m experiments {experiment.name} --out {out}`")
    return list(found.values())


def render(experiment: Experiment, out: Path, *, scale: str | None = None, pictures: bool = True) -> list[Path]:
    """Write OUT/NAME.md and OUT/images/NAME-PICTURE.png; returns the files."""
    lines = lines_of(experiment, out, scale)
    page = out / f"{experiment.name}.md"
    page.write_text(experiment.markdown(lines) + "\n", encoding="utf-8")
    return [page, *(_draw(experiment, lines, out / "images") if pictures else [])]


def render_into(
    page: Path, experiment: Experiment, out: Path, *, scale: str | None = None, pictures: bool = True
) -> list[Path]:
    """Put the section between its marks in a page, and its pictures into the images folder next to it.

    A page that has only the marks of the experiment's table gets that table and no pictures.
    """
    lines = lines_of(experiment, out, scale)
    text = page.read_text(encoding="utf-8")
    begin, end = marks(text, experiment)
    only_table = experiment.table is not None and begin == _begin(f"{experiment.name} table")
    section = experiment.table(lines) if only_table and experiment.table else experiment.markdown(lines)
    page.write_text(replaced(text, begin, end, section), encoding="utf-8")
    return [page, *(_draw(experiment, lines, page.parent / "images") if pictures and not only_table else [])]


def marks(text: str, experiment: Experiment) -> tuple[str, str]:
    """The marks that a page has for the experiment's table, or else for its section."""
    has_table = experiment.table is not None and _begin(f"{experiment.name} table") in text
    return marks_named(text, f"{experiment.name} table" if has_table else experiment.name)


def marks_named(text: str, name: str) -> tuple[str, str]:
    """The marks of that name, which the page must have once each."""
    begin, end = _begin(name), f"<!-- end {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the page must hold the marks {begin} and {end} once each, in this order; add them")
    return begin, end


def _begin(name: str) -> str:
    return f"<!-- begin {name} -->"


def replaced(text: str, begin: str, end: str, section: str) -> str:
    """The text with what is between the marks replaced.

    >>> replaced("a\\n<x>\\nold\\n</x>\\nb", "<x>", "</x>", "new")
    'a\\n<x>\\nnew\\n</x>\\nb'
    """
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{section}\n{end}{rest.partition(end)[2]}"


def _draw(experiment: Experiment, lines: list[Line], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, draw in experiment.pictures(lines).items():
        file = folder / f"{experiment.name}-{name}.png"
        style.save(draw(), file)
        files.append(file)
    return files
