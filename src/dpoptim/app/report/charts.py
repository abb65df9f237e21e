"""The charts of a report: which logged numbers each shows, how they are thinned, and where they are drawn.

This module computes positions and texts; `assets/page.html` turns them into SVG.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter
from statistics import mean  # exact, so it stays within the range of the values
from typing import Any

from dpoptim.app.runs.run_log import RunHistory, Series, series, value_at
from dpoptim.privacy.statement import format_epsilon

WIDTH, HEIGHT = 360, 220
"""The size of a plot in its own units, about one pixel each on a phone, so that letters keep their size."""

QUANTILES = ("least", "5 %", "25 %", "median", "75 %", "95 %", "greatest")
_COLOURS = 8  # of the style sheet; further runs reuse them with dashes
_TOP, _RIGHT, _BOTTOM = 25.0, 12.0, 34.0
_LETTER = 6.3
_TINY = 1e-290  # counts as 0 on an axis: smaller floats lose digits

Fans = list[tuple[int, list[float]]]
"""(step, ascending values): the line goes through the middle value, and bands join those at equal distance from it."""


class Mark(Enum):
    """What the guarantee says about a number; every number shown has one."""

    RELEASED = "from released values"
    KNOWN = "known without the data"
    OUTSIDE = "computed on data outside the guarantee"
    TIMING = "timing: not covered by the guarantee"
    DEBUG = "not private: for debugging"


def format_number(value: float, digits: int = 6) -> str:
    """A number to read, with this many significant digits."""
    if value == int(value) and abs(value) < 1e12:
        return f"{int(value):,}"
    return f"{value:,.{digits}g}" if abs(value) < 1e6 else f"{value:,.4g}"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One logged number against steps."""

    name: str
    title: str
    y_label: str
    path: str  # the dotted key of the number in a log entry
    mark: Mark
    caption: str
    absent: str = "not logged"  # why no run logged it
    gap: str = "logged value(s) are not finite and are not drawn"  # why single values are missing
    zero: bool = True  # of the y axis, as for `axis`
    log: bool = False
    fan: bool = False  # the number is a list of quantiles
    is_epsilon: bool = False  # shown values are rounded up, and the caption repeats what the run logged about ε

    @property
    def gather(self) -> Callable[[Sequence[float]], float]:
        """How several steps become one value."""
        return max if self.is_epsilon else mean

    def show(self, value: float) -> str:
        return format_epsilon(value) if self.is_epsilon else format_number(value, 4 if self.fan else 6)

    def of(self, run: RunHistory) -> Series:
        """The run's finite values."""
        return series(self.records(run), self.path)

    def records(self, run: RunHistory) -> list[dict[str, Any]]:
        """The records that may hold the number."""
        return run.evaluations if self.mark is Mark.OUTSIDE else run.steps


_DEBUG_ONLY = "logged only with debug = true, because it is not private"

CURVES = (
    Curve(
        name="validation-loss",
        title="Validation loss",
        y_label="loss (nats)",
        path="loss",
        mark=Mark.OUTSIDE,
        caption="Lower is better. If the curve rises again, training was too long.",
        zero=False,
    ),
    Curve(
        name="validation-accuracy",
        title="Validation accuracy",
        y_label="accuracy (share of predictions)",
        path="accuracy",
        mark=Mark.OUTSIDE,
        caption="Higher is better.",
        zero=False,
    ),
    Curve(
        name="training-loss",
        title="Training loss",
        y_label="mean loss of the batch (nats)",
        path="not_private.loss",
        mark=Mark.DEBUG,
        caption="The raw loss of private examples. Far below the validation loss, the model memorizes.",
        absent=_DEBUG_ONLY,
        zero=False,
    ),
    Curve(
        name="clipped-fraction",
        title="Clipped fraction",
        y_label="share of the batch's examples",
        path="not_private.clipped_fraction",
        mark=Mark.DEBUG,
        caption="Near 1, the clip norm sets every example's length. Near 0, the noise is larger than necessary.",
        absent=_DEBUG_ONLY,
    ),
    Curve(
        name="signal-over-clip",
        title="Gradient against clip norm, ‖g‖/ζ",
        y_label="‖g‖/ζ (ratio), estimated",
        path="released.signal_over_clip",
        mark=Mark.RELEASED,
        caption="‖g‖ is estimated as √(‖g̃‖² − noise²), and is 0 where the noise hides it. Without scales it is at most "
        "1, when all examples agree.",
    ),
    Curve(
        name="noise-to-signal",
        title="Noise to signal",
        y_label="noise norm / ‖g‖ (ratio), estimated",
        path="released.noise_to_signal",
        mark=Mark.RELEASED,
        caption="Above 1, a step is more noise than gradient, and only averages over steps mean anything.",
        absent="not logged, or the noise hid every gradient",
        gap="logged step(s) are not drawn, because the noise hides their gradient",
        log=True,
        zero=False,
    ),
    Curve(
        name="negative-fraction",
        title="Negative second moments ν̂",
        y_label="share of coordinates",
        path="released.negative_fraction",
        mark=Mark.RELEASED,
        caption="Near one half, ν̂ is mostly noise after the noise's share is subtracted, and correction helps little.",
        absent="only variants that subtract, or could subtract, the noise's share from ν̂ log them",
    ),
    Curve(
        name="scales",
        title="Scales s over steps",
        y_label="scale s (no unit)",
        path="released.scale_quantiles",
        mark=Mark.RELEASED,
        caption="Line: median coordinate. A wide fan means that coordinates are scaled differently. If all are near 1, "
        "scaling does nothing.",
        absent="this variant does not scale before clipping, or they were not logged",
        log=True,
        fan=True,
    ),
    Curve(
        name="seconds-per-step",
        title="Time per step",
        y_label="seconds per step",
        path="seconds",
        mark=Mark.TIMING,
        caption="It should be flat. The first steps may be slower.",
        gap="",  # null until there are enough steps for a mean
        log=True,
    ),
    Curve(
        name="epsilon",
        title="Privacy spent, ε",
        y_label="ε of the steps so far, at the run's δ",
        path="epsilon",
        mark=Mark.KNOWN,
        caption="What stopping at a step would have cost. Numbers are rounded up.",
        absent="not logged, or infinite because the run is not private",
        is_epsilon=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One range of steps, with one fan of values per run (empty if that run logged nothing there)."""

    first: int
    last: int
    fans: list[list[float]]

    @property
    def steps(self) -> str:
        return f"{self.first:,}–{self.last:,}" if self.first < self.last else f"{self.last:,}"


@dataclass(frozen=True)
class Axis:
    """One axis, which ends at its first and last tick."""

    ticks: list[float]
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies between the ends, from 0 to 1; values beyond an end are moved to it."""
        ends = (self.ticks[0], self.ticks[-1], value)
        low, high, place = (math.log10(max(end, 1e-300)) if self.log else end for end in ends)
        return min(max((place - low) / (high - low), 0.0), 1.0)


def thin(found: Sequence[Fans], *, limit: int, gather: Callable[[Sequence[float]], float] = mean) -> list[Row]:
    """Merge steps into at most `limit` ranges for all runs; each range keeps its least and greatest value."""
    steps = sorted({step for one in found for step, _ in one})
    width = max(1, -(-len(steps) // limit))
    rows = []
    for start in range(0, len(steps), width):
        first, last = steps[start], steps[start : start + width][-1]
        fans: list[list[float]] = []
        for one in found:
            begin = bisect.bisect_left(one, first, key=itemgetter(0))
            end = bisect.bisect_right(one, last, key=itemgetter(0))
            fans.append([])
            if begin < end:
                least, *middle, greatest = zip(*(fan for _, fan in one[begin:end]), strict=True)
                fans[-1] = [min(least), *map(gather, middle), max(greatest)]
        rows.append(Row(first=first, last=last, fans=fans))
    return rows


def axis(values: Iterable[float], *, zero: bool = False, log: bool = False) -> Axis:
    """An axis over all values that ends on round numbers; with `log`, logarithmic if they span a factor of 30."""
    found = list(values) or [0.0, 1.0]
    low, high = min(found), max(found)
    if log and low > _TINY and high / low >= 30:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        stride = -(-(last - first) // 6)
        last = first + stride * -(-(last - first) // stride)
        ticks = [float(f"1e{power}") for power in range(first, min(last, 308) + 1, stride)]
        return Axis(ticks, log=True)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), _TINY):
        room = 0.5 * abs(high) if abs(high) > _TINY else 0.5
        low, high = (low if zero and low == 0 else low - room), high + room
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(max(raw, 1e-300)))
    step = next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9)) * power
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis([float(f"{place * step:.12g}") for place in range(first, last + 1)])


def plot(
    rows: Sequence[Row], *, y_label: str, zero: bool = False, log: bool = False, edges: Sequence[int] = (0,)
) -> dict[str, Any]:
    """The positions of grid lines, ticks and paths, for the template; `edges` are the places where bands begin."""
    runs = [[(row.last, fan) for row in rows if (fan := row.fans[run])] for run in range(len(rows[0].fans))]
    places = [place for edge in edges for place in (edge, -1 - edge)]
    values = [value for run in runs for _, fan in run for value in (_middle(fan), *(fan[i] for i in places))]
    x, y = axis((row.last for row in rows), zero=True), axis(values, zero=zero, log=log)
    left = 10.0 + _LETTER * max(len(format_number(tick)) for tick in y.ticks)
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM

    def across(value: float) -> float:
        return left + x.share(value) * (right - left)

    def height(value: float) -> float:
        return bottom - y.share(value) * (bottom - _TOP)

    def path(points: Iterable[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{across(one):.1f} {height(other):.1f}" for one, other in points)

    widest = _LETTER * max(len(format_number(tick)) for tick in x.ticks) + 10
    ticks = []
    for tick in x.ticks[:: max(1, math.ceil(len(x.ticks) * widest / (right - left)))]:
        at, text = across(tick), format_number(tick)
        is_last = at > right - _LETTER * len(text) / 2
        ticks.append((at, min(at + 8, WIDTH - 2.0) if is_last else at, "end" if is_last else "middle", text))
    few_points = max(map(len, runs)) <= 30
    paths = []
    for place, run in enumerate(runs):
        colour = colour_class(place)
        for edge in edges:
            low, high = ([(step, fan[i]) for step, fan in run] for i in (edge, -1 - edge))
            if low != high:
                is_point = len(run) == 1  # a band of no width would be invisible
                edge_path = path(high + low[::-1])
                paths.append((f"line {colour}", edge_path) if is_point else (f"band {colour}", f"{edge_path}Z"))
        line = [(step, _middle(fan)) for step, fan in run]
        if len(line) > 1:
            paths.append((f"line {colour}", path(line)))
        if line and (few_points or len(line) == 1):
            paths.append((f"dots {colour}", "".join(f"{path([point])}h0" for point in line)))
    return {
        "width": WIDTH, "height": HEIGHT, "x": x, "y_label": y_label,
        "left": left, "right": right, "top": _TOP, "bottom": bottom,
        "grid": [(height(tick), format_number(tick)) for tick in y.ticks], "ticks": ticks, "paths": paths,
    }  # fmt: skip


def _middle(fan: Sequence[float]) -> float:
    return fan[len(fan) // 2]


def colour_class(run: int) -> str:
    """The style sheet's classes for the colour of a run."""
    return f"c{run % _COLOURS}" + (f" dashed{run // _COLOURS % 3}" if run >= _COLOURS else "")


def chart(curve: Curve, runs: Sequence[RunHistory], *, limit: int) -> dict[str, Any] | str:
    """Return the chart of a number, thinned to `limit` ranges of steps, or a sentence if no run logged it."""
    found = [quantiles_of(run) if curve.fan else [(step, [one] * 3) for step, one in curve.of(run)] for run in runs]
    if not any(found):
        return f"{curve.title}: {curve.absent}."
    rows = thin(found, limit=limit, gather=curve.gather)
    is_one = len(runs) == 1
    edges = (0,) if not curve.fan else range(3) if is_one else (1,)
    heads, cells = [run.name for run in runs], [[_cell(fan, edges[0], curve.show) for fan in row.fans] for row in rows]
    if is_one:
        heads = [curve.title]
    if is_one and curve.fan:
        heads, cells = list(QUANTILES), [list(map(curve.show, row.fans[0])) for row in rows]
    return {
        "name": curve.name,
        "title": curve.title,
        "mark": curve.mark,
        "caption": " ".join([curve.caption, *_remarks(curve, runs, found, rows)]),
        "heads": ["step", *heads],
        "rows": [(row.steps, row.last, texts) for row, texts in zip(rows, cells, strict=True)],
        "plot": plot(rows, y_label=curve.y_label, zero=curve.zero, log=curve.log, edges=edges),
    }


def _cell(fan: Sequence[float], edge: int, show: Callable[[float], str]) -> str:
    if not fan:
        return ""
    text, low, high = show(_middle(fan)), fan[edge], fan[-1 - edge]
    return text if low == high else f"{text} ({show(low)}–{show(high)})"


def _remarks(curve: Curve, runs: Sequence[RunHistory], found: Sequence[Fans], rows: Sequence[Row]) -> Iterator[str]:
    if curve.fan:
        yield f"Bands: {'half, nine tenths and all' if len(runs) == 1 else 'nine tenths'} of the coordinates."
    elif any(row.first < row.last for row in rows):
        kind = "greatest" if curve.gather is max else "mean"
        yield f"The line is the {kind} of each range of steps, the band its least to greatest value."
    parent, _, key = curve.path.rpartition(".")
    for run, values in zip(runs, found, strict=True):
        name = f"{run.name}: " if len(runs) > 1 else ""
        holders = [value_at(record, parent) if parent else record for record in curve.records(run)]
        missing = sum(isinstance(one, dict) and key in one for one in holders) - len(values)
        if not values:
            yield f"{name}not logged."
        elif missing and curve.gap:
            yield f"{name}{missing} {curve.gap}."
    if curve.is_epsilon:
        notes = dict.fromkeys((run.name, record.get("epsilon_note")) for run in runs for record in run.steps)
        for note in dict.fromkeys(note for _, note in notes if note is not None):
            names = ", ".join(name for name, text in notes if text == note)
            yield f"ε{f' of {names}' if len(runs) > 1 else ''} is {note.rstrip('.')}."


def quantiles_of(run: RunHistory) -> Fans:
    """(step, the seven quantiles of the scales) wherever they were logged and are finite."""
    found = ((record["step"], value_at(record, "released.scale_quantiles")) for record in run.steps)
    return [(step, sorted(values)) for step, values in found if values is not None and None not in values]
