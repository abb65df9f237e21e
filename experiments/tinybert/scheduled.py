"""The table again with scheduled learning rates: the plan of its search and final runs, and the command that runs it.

Every learning rate rises over the first 10 % of the steps and falls over the last 30 %. Every place (a row and a column
of the table) has the same budget of tuning runs. The search is the table's own: it moves to a neighbour on the grids
until none is better. The rows differ from the table's in their grids, in where the search starts, and in that the
learning rate moves together with ε_s (or against the momentum), because their ratio matters more than either.

Small batches are noisier and prefer smaller learning rates. So the final runs of the first seed also try larger rates:
1.5 times the best of the search, and 1.5 times that if it was better. If the best of the search diverges, they try
smaller ones. The other seeds run with the best of these.

`python -m experiments.tinybert.scheduled search` appends to OUT/scheduled_search.jsonl, and `final` to
OUT/scheduled.jsonl. Runs that are in these files are not run again. `render --docs PAGE` puts the report of both files
between the marks of a page; without a page it prints the report.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from experiments import results_file
from experiments.framework import SCALES, MissingInput, Request
from experiments.options import add_machine, add_output
from experiments.progress import ProgressReporter, reporter_for
from experiments.results_file import Line, cell_key
from experiments.tinybert.experiment import run_jobs
from experiments.tinybert.grid import CURVE, EPSILONS, SIZES, Hyperparameter, Row, Size, rates, row
from experiments.tinybert.schedule import (
    Cell,
    Job,
    Place,
    Setting,
    best_curve,
    final_cell,
    final_lines,
    loss_of,
    setting_of,
    tuning_cell,
    tuning_losses,
    wanted,
)

SEARCH, FINAL = "scheduled_search", "scheduled"
PARTICIPATIONS = 5
"""817,503 texts are 399 batches of 2048, so no text takes part more often in 1995 steps."""
SIZES_SCHEDULED = {
    "smoke": replace(SIZES["smoke"], schedule="wsd", average=0.99, tuned=True),
    "small": replace(SIZES["small"], schedule="wsd", average=0.99, tuned=True),
    "paper": replace(SIZES["paper"], schedule="wsd", average=0.99, steps=1995, examples=817_503),
}
BUDGET = {"smoke": 3, "small": 2, "paper": 16}
"""The most tuning runs of a place, the same for all."""
LARGER = 1.5
MOST_MOVES = 2
"""The final runs of the first seed try learning rates that are larger by this factor, at most so often."""
SEARCH_FILES = 1
"""The search needs only the first train file: a tuning run draws 256,000 texts."""
COLUMN_ORDER = (
    "banded", "none", "independent_low", "independent", "independent_x4", "banded_x4", "independent_x16", "banded_x16",
    *(each.name for each in CURVE),
)  # fmt: skip
"""Which column runs first."""

_EPS = rates(1e-4, low=1e-5, high=0.1).grid
_LR_AND_EPS = ({"lr": 1}, {"lr": 1, "eps": 1})
_LR_AND_MOMENTUM = ({"lr": 1}, {"lr": -1, "momentum": 1})
_RATE_WITH_SCALE = ({"lr": 1}, {"lr": 1, "eps_over_noise": 1}, {"clip_norm": 1})
_MOMENTA = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98)  # 1/(1 − momentum) is 1, 2, 5, 10, …, like the learning rates
_OVER_NOISE = (0.5, 0.8, 1.1, 1.5, 2.0, 4.0, 8.0)
_OVER_LITTLE = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # moves together with the learning rate
_CLIP_NORMS = (0.03, 0.1, 0.25, 0.5, 1.0, 2.0)


def _row(
    name: str,
    grids: Mapping[str, tuple[float, ...]],
    moves: tuple[Mapping[str, int], ...],
    **starts: tuple[float, ...],
) -> Row:
    """A row of the table with other grids; `starts` are by column, in the order of the knobs (lr first)."""
    all_grids = {"lr": rates(1e-3).grid, **grids}
    by_column = {column: dict(zip(all_grids, values, strict=True)) for column, values in starts.items()}
    first = next(iter(by_column.values()))
    knobs = tuple(Hyperparameter(knob, grid, first[knob]) for knob, grid in all_grids.items())
    return replace(row(name), knobs=knobs, moves=moves, starts=by_column)


def _at_epsilons(noise: str, rates: tuple[float, ...], *others: float) -> dict[str, tuple[float, ...]]:
    """Where the search of a noise of the curve starts, at each ε."""
    return {f"{noise}_at_{epsilon:g}": (rate, *others) for epsilon, rate in zip(EPSILONS, rates, strict=True)}


# Searches start one or two steps above the learning rates that were best without a schedule. Where ε_s dominates the
# second moment, which holds for IME and JME, they start at the step lr/ε_s of DP-SGD.
ROWS_SCHEDULED: tuple[Row, ...] = (
    _row(
        "scale_then_privatize", {"clip_norm": _CLIP_NORMS, "eps_over_noise": _OVER_NOISE}, (),
        banded=(0.02, 0.5, 1.1), independent_low=(5e-3, 0.5, 1.5), independent=(1e-3, 0.25, 1.1),
        independent_x4=(5e-3, 0.1, 0.8), banded_x4=(0.05, 0.5, 1.1),
        independent_x16=(5e-3, 0.1, 0.8), banded_x16=(0.02, 0.5, 1.1),
        **_at_epsilons("poisson", (1e-3, 1e-3, 2e-3), 0.25, 1.1),
        **_at_epsilons("poisson_x4", (2e-3, 2e-3, 5e-3), 0.25, 1.1),
        **_at_epsilons("poisson_x16", (5e-3, 5e-3, 0.01), 0.5, 1.1),
        **_at_epsilons("cyclic_x4", (5e-3, 0.01, 0.02), 0.5, 1.1),
        **_at_epsilons("cyclic_x16", (5e-3, 0.01, 0.02), 0.5, 1.1),
        **_at_epsilons("buffered_x4", (5e-3, 0.01, 0.02), 0.5, 1.1),
        **_at_epsilons("inverse_x4", (5e-3, 0.01, 0.02), 0.5, 1.1),
    ),
    _row(
        "rows_scaled", {"eps_over_noise": _OVER_LITTLE, "clip_norm": _CLIP_NORMS}, _RATE_WITH_SCALE,
        banded=(5e-3, 0.2, 0.25), independent=(5e-4, 0.5, 0.1),
        independent_x4=(1e-3, 0.5, 0.1), banded_x4=(0.01, 0.5, 0.25),
    ),
    _row(
        "post_processing", {}, (),
        banded=(0.02,), independent_low=(5e-3,), independent=(1e-3,), independent_x4=(5e-3,), banded_x4=(0.05,),
        independent_x16=(5e-3,), banded_x16=(0.02,), **_at_epsilons("poisson", (1e-3, 1e-3, 2e-3)),
    ),
    _row(
        "dp_sgd", {"momentum": _MOMENTA}, _LR_AND_MOMENTUM,
        banded=(2.0, 0.9), independent_low=(2.0, 0.9), independent=(0.2, 0.9),
        independent_x4=(1.0, 0.9), banded_x4=(2.0, 0.9), independent_x16=(2.0, 0.9), banded_x16=(2.0, 0.9),
        **_at_epsilons("poisson", (0.2, 0.5, 0.5), 0.9),
    ),
    _row(
        "bias_correction", {"eps": _EPS}, _LR_AND_EPS,
        banded=(5e-3, 1e-4), independent_low=(5e-3, 1e-4), independent=(2e-4, 1e-4),
    ),
    _row(
        "independent_moments", {"eps": _EPS}, _LR_AND_EPS,
        banded=(0.1, 0.01), independent_low=(0.05, 5e-3), independent=(0.01, 0.01),
    ),
    _row(
        "joint_moments", {"eps": _EPS}, _LR_AND_EPS,
        banded=(0.1, 0.01), independent_low=(0.05, 5e-3), independent=(0.01, 0.01),
    ),
    _row(
        "post_processing_eps", {"eps": _EPS}, _LR_AND_EPS,
        banded=(0.02, 1e-4), independent_low=(5e-3, 1e-4), independent=(2e-3, 5e-4),
    ),
    _row(
        "noiseless", {"eps": _EPS}, _LR_AND_EPS,
        banded=(5e-3, 1e-4), independent_low=(5e-3, 1e-4), independent=(5e-4, 1e-4),
    ),
    _row(
        "noiseless_scaled", {"eps_over_noise": _OVER_LITTLE, "clip_norm": _CLIP_NORMS},
        _RATE_WITH_SCALE,
        banded=(0.01, 0.2, 1.0), independent_low=(5e-3, 1.0, 1.0), independent=(1e-3, 0.5, 1.0),
    ),
    _row(
        "filtered_rows_scaled", {"eps_over_noise": _OVER_LITTLE, "clip_norm": _CLIP_NORMS}, _RATE_WITH_SCALE,
        banded=(5e-3, 0.2, 0.25), independent=(5e-4, 0.5, 0.1),
        independent_x4=(1e-3, 0.5, 0.1), banded_x4=(0.01, 0.5, 0.25),
    ),
    _row("non_private_adam", {}, (), none=(5e-3,)),
    _row("non_private_sgd", {"momentum": _MOMENTA}, _LR_AND_MOMENTUM, none=(0.05, 0.9)),
)  # fmt: skip
"""Which row runs first, and its search."""


def places_scheduled() -> list[Place]:
    """All places, in the order in which they run.

    >>> len(places_scheduled()), places_scheduled()[0]
    (76, ('scale_then_privatize', 'banded'))
    """
    return [(each.name, column) for column in COLUMN_ORDER for each in ROWS_SCHEDULED if column in each.starts]


def row_scheduled(name: str) -> Row:
    """The row of that name, with its search."""
    return next(each for each in ROWS_SCHEDULED if each.name == name)


def next_settings(lines: Sequence[Line], place: Place, size: Size, budget: int) -> list[Setting]:
    """What to try next at a place; nothing if the search has ended or the budget is spent."""
    tried = tuning_losses(lines, place, size)
    return wanted(row_scheduled(place[0]), place[1], tried)[: max(budget - len(tried), 0)]


def best_setting(lines: Sequence[Line], place: Place, size: Size) -> Setting:
    """The best setting that was tried."""
    tried = tuning_losses(lines, place, size)
    return min(tried, key=lambda setting: tried[setting])


def search_jobs(lines: Sequence[Line], size: Size, budget: int, shared: Cell) -> list[Job]:
    """The tuning runs that can start now, column by column. In a column, the places with the fewest runs come first."""
    found = []
    for place in places_scheduled():
        count, beat = len(tuning_losses(lines, place, size)), best_curve(lines, place, size)
        for setting in next_settings(lines, place, size, budget):
            order = (COLUMN_ORDER.index(place[1]), count)
            found.append((order, Job(tuning_cell(place, setting, size, shared), beat)))
    return [job for _, job in sorted(found, key=lambda each: each[0])]


def at_full_size(lines: Sequence[Line], place: Place) -> dict[Setting, float]:
    """Validation losses of the final runs of the first seed."""
    return {setting_of(line["cell"]): loss_of(line) for line in final_lines(lines, place) if line["cell"]["seed"] == 0}


def rates_to_try(setting: Setting, tried: Mapping[Setting, float]) -> list[Setting]:
    """What to try next at full size, from the best setting of the search; nothing if a larger rate was no better.

    If that setting diverged, a smaller rate.

    >>> rates_to_try((("lr", 0.02),), {})
    [(('lr', 0.02),), (('lr', 0.03),)]
    >>> rates_to_try((("lr", 0.02),), {(("lr", 0.02),): 3.5, (("lr", 0.03),): 3.4})
    [(('lr', 0.045),)]
    >>> rates_to_try((("lr", 0.03),), {(("lr", 0.03),): math.inf, (("lr", 0.045),): math.inf})
    [(('lr', 0.02),)]
    """
    is_too_large = tried.get(setting) == math.inf
    for _ in range(MOST_MOVES):
        other = _with_rate(setting, 1 / LARGER if is_too_large else LARGER)
        if missing := [each for each in (setting, other) if each not in tried]:
            return missing
        if tried[other] < math.inf if is_too_large else tried[other] >= tried[setting]:
            break
        setting = other
    return []


def _with_rate(setting: Setting, factor: float) -> Setting:
    """The setting with its learning rate multiplied, to two digits."""
    return tuple((dict(setting) | {"lr": float(f"{factor * dict(setting)['lr']:.2g}")}).items())


def final_jobs(
    lines: Sequence[Line], search: Sequence[Line], size: Size, budget: int, seeds: int, shared: Cell
) -> list[Job]:
    """The final runs of places whose search has ended: one seed of all before the next, column by column."""
    there = {cell_key(line["cell"]) for line in lines}
    found = []
    for place in places_scheduled():
        if not tuning_losses(search, place, size) or next_settings(search, place, size, budget):
            continue
        tried = at_full_size(lines, place)
        if missing := rates_to_try(best_setting(search, place, size), tried):
            found += [final_cell(place, setting, size, shared, 0) for setting in missing]
        else:
            setting = min(tried, key=lambda each: tried[each])
            found += [final_cell(place, setting, size, shared, seed) for seed in range(1, seeds)]
    left = [cell for cell in found if cell_key(cell) not in there]
    return [Job(cell) for cell in sorted(left, key=lambda cell: cell["seed"])]


def run_search(request: Request, reporter: ProgressReporter, *, needs: float = 0.0) -> int:
    """Run the search; returns how many runs can start but have not."""
    size, budget = SIZES_SCHEDULED[request.scale], BUDGET[request.scale]
    return run_jobs(
        request, reporter, lambda lines, shared: search_jobs(lines, size, budget, shared),
        name=SEARCH, files=SEARCH_FILES, needs=needs,
    )  # fmt: skip


def run_final(request: Request, reporter: ProgressReporter, *, needs: float = 0.0) -> int:
    """Run the final runs of places whose search has ended; returns how many are left of these."""
    size, budget = SIZES_SCHEDULED[request.scale], BUDGET[request.scale]
    search = lines_in(request.out, SEARCH, request.scale)
    seeds = request.seeds or size.seeds
    return run_jobs(
        request, reporter, lambda lines, shared: final_jobs(lines, search, size, budget, seeds, shared),
        name=FINAL, needs=needs, check=lambda count: _check_participations(size, count, request.scale),
    )  # fmt: skip


def _check_participations(size: Size, num_examples: int, scale: str) -> None:
    if scale == "paper" and num_examples // size.batch_size * PARTICIPATIONS < size.steps:
        raise MissingInput(
            f"{size.steps} steps of {size.batch_size} on {num_examples:,} texts use a text more than {PARTICIPATIONS} "
            "times. Add the other train files to --data."
        )


def lines_in(out: Path, name: str, scale: str) -> list[Line]:
    """The lines of one scale in the file of that name."""
    return [line for line in results_file.read(out / f"{name}.jsonl").lines if line["scale"] == scale]


def progress(out: Path, scale: str) -> str:
    """A line per place: tuning runs, whether they have ended, the best loss and setting; and final runs by rate."""
    size, budget = SIZES_SCHEDULED[scale], BUDGET[scale]
    search, final = (lines_in(out, name, scale) for name in (SEARCH, FINAL))
    shown = []
    for place in places_scheduled():
        tried = tuning_losses(search, place, size)
        if tried:
            best = best_setting(search, place, size)
            state = "searching" if next_settings(search, place, size, budget) else "ended"
            full = "".join(f" {line['cell']['lr']:g}: {loss_of(line):.4f}" for line in final_lines(final, place))
            settings = " ".join(f"{name}={value:g}" for name, value in best)
            shown.append(f"{place[1]:<16}{place[0]:<21}{len(tried):>3} {state:<10}{tried[best]:.4f} {settings}{full}")
    return "\n".join(shown)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Bad input prints one line on standard error and returns 2."""
    options = command_line().parse_args(arguments)
    time_limit = None if options.until is None else max(options.until - time.time(), 1e-3)
    request = Request(
        scale=options.scale, out=options.out, device=options.device, workers=options.workers, data=options.data,
        model=options.model, commit=options.commit, time_limit=time_limit, only=tuple(options.only or ()),
    )  # fmt: skip
    try:
        if options.what == "render":
            from experiments.tinybert import scheduled_report  # which reads the plan from this module

            scheduled_report.render(options.docs, options.out, options.scale)
            return 0
        if options.what != "progress":
            with reporter_for(Console(stderr=True)) as reporter:
                runs = run_search if options.what == "search" else run_final
                left = runs(request, reporter, needs=options.needs)
            print(f"{options.what}: {left} runs can start now" if left else f"{options.what}: nothing is left to start")
        print(progress(options.out, options.scale))
    except (ValueError, OSError) as error:
        print(f"scheduled: {error}", file=sys.stderr)
        return 2
    return 0


def command_line() -> argparse.ArgumentParser:
    """The parser of `python -m experiments.tinybert.scheduled`."""
    parser = argparse.ArgumentParser(prog="python -m experiments.tinybert.scheduled", allow_abbrev=False)
    parser.add_argument("what", choices=("search", "final", "progress", "render"), help="the last two run nothing")
    parser.add_argument("--scale", choices=SCALES, default="paper")
    parser.add_argument("--data", metavar="D", help="a folder of packed ids; search reads only its first train file")
    add_machine(parser)
    parser.add_argument(
        "--until", type=float, metavar="TIME", help="then start no more runs, and pause others; seconds since the epoch"
    )
    parser.add_argument(
        "--needs", type=float, default=0.0, metavar="SECONDS",
        help="start no run with less time left; grows to what the longest run took; 0 starts runs until the limit",
    )  # fmt: skip
    parser.add_argument("--only", action="append", metavar="NAME=VALUE", help="only runs with this setting")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="the page that render fills between its marks")
    add_output(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
