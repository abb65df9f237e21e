"""How near tuning runs are to what they stand for: in a step's noise, and in the loss at the same step."""

from __future__ import annotations

from collections.abc import Sequence

from dpoptim.optim.variants import noise_level
from dpoptim.privacy import Gradient
from experiments.markdown import thousandths
from experiments.result_files import Line
from experiments.tinybert.privacy import plan_of
from experiments.tinybert.schedule import Cell, Place, chosen, final_lines, setting_of, tuning_lines
from experiments.tinybert.scores import mean, scores
from experiments.tinybert.sizes import Size
from experiments.tinybert.table_of_cells import column, places, row

PLAIN = "post_processing"


def how_near(lines: Sequence[Line], size: Size) -> str:
    """Both, in words; nothing where no place has a tuning run and a final one."""
    levels, gaps = [], {True: 0.0, False: 0.0}  # by whether the row is private
    for place in [*places(beyond=False), *places(beyond=True)]:
        if (pair := _pair(lines, place, size)) is None:
            continue
        tuned, final = pair
        private = row(place[0]).note is None
        gaps[private] = max(gaps[private], _widest_gap(tuned, final))
        if place[0] == "scale_then_privatize":
            levels.append(f"{level(tuned['cell']) / level(final['cell']):.3f} ({column(place[1]).label})")
    if not levels:
        return ""
    return (
        "The proxy: a step's noise in the average gradient, its standard deviation in a tuning run (at its noisiest "
        f"step) over that in the final run, is {', '.join(levels)}; correlated noise is optimised for a run's own "
        "number of steps. At the same step the tuning run that was chosen and the final run (seed 0) differ in loss by "
        f"up to {gaps[True]:.2f} in private rows and {gaps[False]:.2f} in others." + _moved(lines, size)
    )


def _moved(lines: Sequence[Line], size: Size) -> str:
    """How far rows change places between their tuning runs and their final ones: which margins not to believe."""
    found, moves = scores(lines), {}
    for name, kind in places(beyond=False):
        pairs = [_pair(lines, (each, kind), size) for each in (name, PLAIN)]
        if name == PLAIN or None in pairs:
            continue
        own, plain = (pair[0]["result"]["validation"] for pair in pairs if pair)
        if own is not None and plain is not None:  # where nothing but diverged, there is no loss
            moves[name, kind] = (own - plain, mean(found[name, kind]) - mean(found[PLAIN, kind]))
    if not moves:
        return ""
    far = max(moves, key=lambda place: abs(moves[place][1] - moves[place][0]))
    tuned, final = moves[far]
    return (
        f" Behind {row(PLAIN).label}, a row moves between the two by up to {abs(final - tuned):.2f} "
        f"({row(far[0]).label}, {column(far[1]).label}: {thousandths(tuned)} in tuning, {thousandths(final)} in the "
        "final runs)."
    )


def level(cell: Cell) -> float:
    """Standard deviation of the noise on a coordinate of the average gradient, at the noisiest step of a cell's run."""
    return noise_level(plan_of(cell), Gradient())


def _pair(lines: Sequence[Line], place: Place, size: Size) -> tuple[Line, Line] | None:
    """The tuning run whose setting was chosen, and the final run of the first seed."""
    setting = chosen(lines, place, size)
    tuned = [line for line in tuning_lines(lines, place, size) if setting_of(line["cell"]) == setting]
    final = [line for line in final_lines(lines, place) if line["cell"]["seed"] == 0]
    return (tuned[0], final[-1]) if tuned and final else None


def _widest_gap(tuned: Line, final: Line) -> float:
    later = dict(final["result"]["curve"])
    both = [(loss, later[step]) for step, loss in tuned["result"]["curve"] if step in later]
    return max((abs(loss - other) for loss, other in both if loss is not None and other is not None), default=0.0)
