"""The charts of a report: which logged numbers each shows, how they are thinned, and where they are drawn.

This module computes positions and texts; `assets/page.html` turns them into SVG.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dpoptim.app.runs.run_log import RunHistory, Series, number, series, value_at
from dpoptim.privacy.format_epsilon import format_epsilon

WIDTH, HEIGHT = 360, 220
"""The size of a plot in its own units, about one pixel each on a phone, so that letters keep their size."""

QUANTILES = ("least", "5 %", "25 %", "median", "75 %", "95 %", "greatest")
_COLOURS = 8  # of the style sheet; further runs reuse them with dashes
_TOP, _RIGHT, _BOTTOM = 25.0, 12.0, 34.0
_LETTER = 6.3
_TINY = 1e-290  # counts as 0 on an axis: smaller floats lose digits


class Mark(Enum):
    """What the guarantee says about a number; every number shown has one."""

    RELEASED = "from released values"
    KNOWN = "known without the data"
    OUTSIDE = "computed on data outside the guarantee"
    TIMING = "timing: not covered by the guarantee"
    DEBUG = "not private: for debugging"


def format_number(value: float, digits: int = 6) -> str:
    """A number to read, with this many significant digits.

    >>> format_number(3.14159265), format_number(12345678.0)
    ('3.14159', '12,345,678')
    """
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞" if value < 0 else "not a number"
    if value == int(value) and abs(value) < 1e12:
        return f"{int(value):,}"
    return f"{value:,.{digits}g}" if abs(value) < 1e6 else f"{value:,.4g}"


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean, kept within the range of the values."""
    return min(max(math.fsum(values) / len(values), min(values)), max(values))


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One logged number against steps.

    `absent` replaces the chart if no run logged the number. `gap` explains missing single values. A null counts as
    missing unless `may_be_null`.
    """

    name: str
    title: str
    y_label: str
    path: str
    mark: Mark
    caption: str
    absent: str = ""
    may_be_null: bool = False
    gap: str = "logged value(s) are not finite and are not drawn"
    of_evaluations: bool = False
    zero: bool = False
    log: bool = False
    gather: Callable[[Sequence[float]], float] = mean
    show: Callable[[float], str] = format_number

    def of(self, run: RunHistory) -> Series:
        """The run's finite values."""
        return series(self.records(run), self.path)

    def records(self, run: RunHistory) -> list[dict[str, Any]]:
        """The records that may hold the number."""
        return run.evaluations if self.of_evaluations else run.steps


_NO_DIAGNOSTICS = "no released diagnostics were logged"

CURVES = (
    Curve(
        name="validation-loss",
        title="Validation loss",
        y_label="loss (nats)",
        path="loss",
        mark=Mark.OUTSIDE,
        of_evaluations=True,
        caption="Lower is better. If the curve rises again, training was too long.",
        absent="Validation loss: no evaluation was logged.",
    ),
    Curve(
        name="validation-accuracy",
        title="Validation accuracy",
        y_label="accuracy (share of predictions)",
        path="accuracy",
        mark=Mark.OUTSIDE,
        of_evaluations=True,
        caption="Higher is better.",
    ),
    Curve(
        name="training-loss",
        title="Training loss",
        y_label="mean loss of the batch (nats)",
        path="not_private.loss",
        mark=Mark.DEBUG,
        caption="The raw loss of private examples. Far below the validation loss, the model memorizes.",
    ),
    Curve(
        name="clipped-fraction",
        title="Clipped fraction",
        y_label="share of the batch's examples",
        path="not_private.clipped_fraction",
        mark=Mark.DEBUG,
        zero=True,
        caption="Near 1, the clip norm sets every example's length. Near 0, the noise is larger than necessary.",
        absent="Clipped fraction: logged only with debug = true, because it is not private.",
    ),
    Curve(
        name="signal-over-clip",
        title="Gradient against clip norm, ‖g‖/ζ",
        y_label="‖g‖/ζ (ratio), estimated",
        path="released.signal_over_clip",
        mark=Mark.RELEASED,
        zero=True,
        caption="‖g‖ is estimated as √(‖g̃‖² − noise²), and is 0 where the noise hides it. Without scales it is at most "
        "1, when all examples agree.",
        absent=f"‖g‖/ζ: {_NO_DIAGNOSTICS}.",
    ),
    Curve(
        name="noise-to-signal",
        title="Noise to signal",
        y_label="noise norm / ‖g‖ (ratio), estimated",
        path="released.noise_to_signal",
        mark=Mark.RELEASED,
        log=True,
        caption="Above 1, a step is more noise than gradient, and only averages over steps mean anything.",
        absent=f"Noise to signal: {_NO_DIAGNOSTICS}, or the noise hid every gradient.",
        gap="logged step(s) are not drawn, because the noise hides their gradient",
    ),
    Curve(
        name="negative-fraction",
        title="Negative second moments ν̂",
        y_label="share of coordinates",
        path="released.negative_fraction",
        mark=Mark.RELEASED,
        zero=True,
        caption="Near one half, ν̂ is mostly noise after the noise's share is subtracted, and correction helps little.",
        absent="Negative second moments ν̂: only variants that subtract, or could subtract, the noise's share from ν̂ "
        "log them.",
    ),
    Curve(
        name="seconds-per-step",
        title="Time per step",
        y_label="seconds per step",
        path="seconds",
        may_be_null=True,  # until there are enough steps for a mean
        mark=Mark.TIMING,
        log=True,
        zero=True,
        caption="It should be flat. The first steps may be slower.",
        absent="Time per step: no step was logged.",
    ),
    Curve(
        name="epsilon",
        title="Privacy spent, ε",
        y_label="ε of the steps so far, at the run's δ",
        path="epsilon",
        mark=Mark.KNOWN,
        zero=True,
        gather=max,
        show=format_epsilon,
        caption="What stopping at a step would have cost. Numbers are rounded up.",
        absent="ε against steps: not logged, or infinite because the run is not private.",
    ),
)
SCALES_AFTER = "negative-fraction"
"""The chart of scales follows this curve."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one run logged in one range of steps: a value to draw, the least, the greatest, and how many."""

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One range of steps, with one Point per run (None if that run logged nothing there)."""

    first: int
    last: int
    points: list[Point | None]

    @property
    def steps(self) -> str:
        """The range as text."""
        return f"{self.first:,}–{self.last:,}" if self.first < self.last else f"{self.last:,}"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one run adds to a plot: bands (x, low, high) behind a line (x, y)."""

    line: list[tuple[float, float]]
    bands: list[list[tuple[float, float, float]]]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis: its ends, its ticks, and whether it is logarithmic."""

    low: float
    high: float
    ticks: list[float]
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies between the ends, from 0 to 1; values beyond an end are moved to it."""
        low, high, value = (math.log10(max(v, 1e-300)) if self.log else v for v in (self.low, self.high, value))
        return min(max((value - low) / (high - low), 0.0), 1.0)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart: the plot, its texts, and the table of its numbers as (steps, last step, cells)."""

    name: str
    title: str
    mark: Mark
    caption: str
    heads: list[str]
    rows: list[tuple[str, int, list[str]]]
    plot: dict[str, Any]


def thin(series: Sequence[Series], *, limit: int, gather: Callable[[Sequence[float]], float] = mean) -> list[Row]:
    """Merge steps into at most `limit` ranges for all runs; each range keeps its least and greatest value.

    >>> [row] = thin([[(1, 2.0), (2, 9.0), (3, 1.0)]], limit=1)
    >>> row.steps, row.points
    ('1–3', [Point(value=4.0, low=1.0, high=9.0, count=3)])
    """
    steps = sorted({step for one in series for step, _ in one})
    width = -(-len(steps) // limit) if steps else 1
    lasts = [steps[min(start + width, len(steps)) - 1] for start in range(0, len(steps), width)]
    columns: list[list[list[float]]] = [[[] for _ in lasts] for _ in series]
    for column, one in zip(columns, series, strict=True):
        for step, value in one:
            column[bisect.bisect_left(lasts, step)].append(value)
    return [
        Row(first=steps[place * width], last=last, points=[_point(column[place], gather) for column in columns])
        for place, last in enumerate(lasts)
    ]


def _point(values: list[float], gather: Callable[[Sequence[float]], float]) -> Point | None:
    if not values:
        return None
    return Point(value=gather(values), low=min(values), high=max(values), count=len(values))


def layers(rows: Sequence[Row], runs: int) -> list[Layer]:
    """One Layer per run: values as a line, and a band from least to greatest if a range holds several values."""
    found = []
    for run in range(runs):
        points = [(float(row.last), point) for row in rows if (point := row.points[run]) is not None]
        band = [(x, point.low, point.high) for x, point in points]
        is_thinned = any(point.count > 1 for _, point in points)
        found.append(Layer(line=[(x, point.value) for x, point in points], bands=[band] if is_thinned else []))
    return found


def axis(values: Iterable[float], *, zero: bool = False, log: bool = False) -> Axis:
    """An axis over all values that ends on round numbers; with `log`, logarithmic if they span a factor of 30.

    >>> axis([0.0, 9.7]).ticks
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    found = list(values) or [0.0, 1.0]
    low, high = min(found), max(found)
    if log and low > _TINY and high / low >= 30:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        stride = -(-(last - first) // 6)
        last = first + stride * -(-(last - first) // stride)
        ticks = [float(f"1e{power}") for power in range(first, min(last, 308) + 1, stride)]
        return Axis(low=ticks[0], high=ticks[-1], ticks=ticks, log=True)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), _TINY):
        room = 0.5 * abs(high) if abs(high) > _TINY else 0.5
        low, high = (low if zero and low == 0 else low - room), high + room
    step = _round_step((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [float(f"{place * step:.12g}") for place in range(first, last + 1)]
    return Axis(low=ticks[0], high=ticks[-1], ticks=ticks)


def _round_step(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(max(raw, 1e-300)))
    return next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9)) * power


def plot(layers: Sequence[Layer], *, x: Axis, y: Axis, y_label: str) -> dict[str, Any]:
    """The positions of grid lines, ticks and paths, for the template."""
    left = 10.0 + _LETTER * max(len(format_number(tick)) for tick in y.ticks)
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM

    def across(value: float) -> float:
        return left + x.share(value) * (right - left)

    def height(value: float) -> float:
        return bottom - y.share(value) * (bottom - _TOP)

    def path(points: Iterable[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{across(one):.1f} {height(other):.1f}" for one, other in points)

    ticks = []
    for tick in _spaced(x, right - left):
        at, text = across(tick), format_number(tick)
        is_last = at > right - _LETTER * len(text) / 2
        ticks.append((at, min(at + 8, WIDTH - 2.0) if is_last else at, "end" if is_last else "middle", text))
    few_points = all(len(layer.line) <= 30 for layer in layers)
    paths = []
    for run, layer in enumerate(layers):
        colour = colour_class(run)
        for band in layer.bands:
            edge = [(at, high) for at, _, high in band] + [(at, low) for at, low, _ in reversed(band)]
            is_point = len(band) == 1  # a band of no width would be invisible
            paths.append((f"{'line' if is_point else 'band'} {colour}", path(edge) + ("" if is_point else "Z")))
        if len(layer.line) > 1:
            paths.append((f"line {colour}", path(layer.line)))
        if layer.line and (few_points or len(layer.line) == 1):
            paths.append((f"dots {colour}", "".join(f"{path([point])}h0" for point in layer.line)))
    return {
        "x": x, "y_label": y_label, "left": left, "right": right, "top": _TOP, "bottom": bottom,
        "grid": [(height(tick), format_number(tick)) for tick in y.ticks], "ticks": ticks, "paths": paths,
    }  # fmt: skip


def colour_class(run: int) -> str:
    """The style sheet's classes for the colour of a run."""
    return f"c{run % _COLOURS}" + (f" dashed{run // _COLOURS % 3}" if run >= _COLOURS else "")


def _spaced(x: Axis, room: float) -> list[float]:
    """As many evenly spaced ticks as have room for their numbers."""
    widest = _LETTER * max(len(format_number(tick)) for tick in x.ticks) + 10
    stride = max(1, math.ceil(len(x.ticks) * widest / room))
    return x.ticks[::stride]


def all_charts(runs: Sequence[RunHistory], *, limit: int) -> list[Chart | str]:
    """Every chart of the runs, thinned to `limit` ranges of steps; a sentence in place of each that has no numbers."""
    found: list[Chart | str] = []
    for curve in CURVES:
        found.append(_curve_chart(curve, runs, limit=limit))
        if curve.name == SCALES_AFTER:
            found.append(_scales_chart(runs, limit=limit))
    return [chart for chart in found if chart]


def _curve_chart(curve: Curve, runs: Sequence[RunHistory], *, limit: int) -> Chart | str:
    found = [curve.of(run) for run in runs]
    if not any(found):
        return curve.absent
    rows = thin(found, limit=limit, gather=curve.gather)
    drawn = layers(rows, len(runs))
    remarks = _remarks(curve, runs, found, thinned=any(layer.bands for layer in drawn))
    return Chart(
        name=curve.name,
        title=curve.title,
        mark=curve.mark,
        caption=" ".join([curve.caption, *remarks]),
        heads=["step", *(run.name for run in runs)] if len(runs) > 1 else ["step", curve.title],
        rows=[(row.steps, row.last, [_cell(point, curve.show) for point in row.points]) for row in rows],
        plot=_plot_of(rows, drawn, y_label=curve.y_label, zero=curve.zero, log=curve.log),
    )


def _plot_of(rows: Sequence[Row], drawn: Sequence[Layer], *, y_label: str, zero: bool, log: bool) -> dict[str, Any]:
    lines = [value for layer in drawn for _, value in layer.line]
    ends = [value for layer in drawn for band in layer.bands for _, *pair in band for value in pair]
    x = axis((row.last for row in rows), zero=True)
    return plot(drawn, x=x, y=axis([*lines, *ends], zero=zero, log=log), y_label=y_label)


def _cell(point: Point | None, show: Callable[[float], str]) -> str:
    if point is None:
        return ""
    if point.low == point.high:
        return show(point.value)
    return f"{show(point.value)} ({show(point.low)}–{show(point.high)})"


def _remarks(curve: Curve, runs: Sequence[RunHistory], found: Sequence[Series], *, thinned: bool) -> Iterator[str]:
    if thinned:
        kind = "greatest" if curve.gather is max else "mean"
        yield f"The line is the {kind} of each range of steps, the band its least to greatest value."
    parent, _, key = curve.path.rpartition(".")
    for run, values in zip(runs, found, strict=True):
        name = f"{run.name}: " if len(runs) > 1 else ""
        holders = [value_at(record, parent) if parent else record for record in curve.records(run)]
        logged = [one[key] for one in holders if isinstance(one, dict) and key in one]
        missing = sum(value is not None or not curve.may_be_null for value in logged) - len(values)
        if missing and values:
            yield f"{name}{missing} {curve.gap}."
        if not values and curve.absent and len(runs) > 1:
            yield f"{name}not logged."
    if curve.name == "epsilon":
        notes = dict.fromkeys((run.name, record.get("epsilon_note")) for run in runs for record in run.steps)
        for note in dict.fromkeys(note for _, note in notes if isinstance(note, str)):
            names = ", ".join(name for name, text in notes if text == note)
            yield f"ε{f' of {names}' if len(runs) > 1 else ''} is {note.rstrip('.')}."


def quantiles_of(run: RunHistory) -> list[tuple[int, list[float]]]:
    """(step, the seven quantiles of the scales) wherever all seven were logged and are finite."""
    found = []
    for record in run.steps:
        values = value_at(record, "released.scale_quantiles")
        if isinstance(values, list) and len(values) == len(QUANTILES):
            numbers = [value for value in map(number, values) if value is not None]
            if len(numbers) == len(QUANTILES):
                found.append((record["step"], sorted(numbers)))
    return found


def _scales_chart(runs: Sequence[RunHistory], *, limit: int) -> Chart | str:
    """The quantiles of the scales: three bands for one run; for several, 5 to 95 % of each."""
    found = [quantiles_of(run) for run in runs]
    if not any(found):
        return "Scales s: this variant does not scale before clipping, or no released diagnostics were logged."
    width, is_one = len(QUANTILES), len(runs) == 1
    parts: list[Series] = [[(step, values[i]) for step, values in one] for one in found for i in range(width)]
    rows = thin(parts, limit=limit)
    fans = [[_fan(row.points[start : start + width]) for start in range(0, len(parts), width)] for row in rows]
    drawn = []
    for run in range(len(runs)):
        own = [(float(row.last), fan[run]) for row, fan in zip(rows, fans, strict=True) if fan[run]]
        pairs = [(0, 6), (1, 5), (2, 4)] if is_one else [(1, 5)]
        bands = [[(x, fan[low], fan[high]) for x, fan in own] for low, high in pairs]
        drawn.append(Layer(line=[(x, fan[3]) for x, fan in own], bands=bands))
    shares = "half, nine tenths and all of them" if is_one else "nine tenths of them"
    return Chart(
        name="scales",
        title="Scales s over steps",
        mark=Mark.RELEASED,
        caption=f"Line: median coordinate; bands: {shares}. A wide fan means that coordinates are scaled differently. "
        "If all are near 1, scaling does nothing.",
        heads=["step", *(QUANTILES if is_one else (run.name for run in runs))],
        rows=[
            (row.steps, row.last, [format_number(v, 4) for v in fan[0]] if is_one else [_fan_cell(one) for one in fan])
            for row, fan in zip(rows, fans, strict=True)
        ],
        plot=_plot_of(rows, drawn, y_label="scale s (no unit)", zero=True, log=True),
    )


def _fan(points: Sequence[Point | None]) -> list[float]:
    """The quantiles of a range of steps: means, with the least and the greatest of all at the ends; or nothing."""
    there = [point for point in points if point is not None]
    if len(there) < len(QUANTILES):
        return []
    return [there[0].low, *(point.value for point in there[1:-1]), there[-1].high]


def _fan_cell(fan: list[float]) -> str:
    return f"{format_number(fan[3], 4)} ({format_number(fan[1], 4)}–{format_number(fan[5], 4)})" if fan else ""
