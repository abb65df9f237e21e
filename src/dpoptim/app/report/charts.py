"""Charts as SVG text: axes, lines and bands, and the thinning that keeps spikes visible."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from dpoptim.app.runs.run_log import Series

WIDTH, HEIGHT = 360, 220
"""Of every drawing, in its own units: near to one pixel each on a phone, so that letters keep their size."""

COLOURS = 8
"""How many colours the style sheet has; further runs use them again, with dashes."""

_TOP, _RIGHT, _BOTTOM = 25.0, 12.0, 34.0
_LETTER = 6.3
_TINY = 1e-290
"""What counts as 0 on an axis: below it, floats lose their digits."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one run logged in one stretch of steps: a value to draw, the least and the greatest, and how many."""

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One stretch of steps, and a Point a run (None where that run logged nothing there)."""

    first: int
    last: int
    points: list[Point | None]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one run adds to a drawing: bands (x, low, high) behind a line (x, y)."""

    colour: int
    line: list[tuple[float, float]]
    bands: list[list[tuple[float, float, float]]]
    filled: bool = False


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis: its end values, its tick marks, and whether it is logarithmic."""

    low: float
    high: float
    ticks: list[float]
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies between both ends, from 0 to 1; values beyond are put at the end."""
        low, high, value = (self._place(v) for v in (self.low, self.high, value))
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def _place(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean, within the range of the values."""
    return min(max(math.fsum(values) / len(values), min(values)), max(values))


def thin(series: Sequence[Series], *, limit: int, gather: Callable[[Sequence[float]], float] = mean) -> list[Row]:
    """At most `limit` stretches of steps for all runs together; each keeps its least and greatest value.

    Up to `limit` distinct steps stay as they are. `gather` makes one value of a stretch.

    >>> [row] = thin([[(1, 2.0), (2, 9.0), (3, 1.0)]], limit=1)
    >>> row.first, row.last, row.points
    (1, 3, [Point(value=4.0, low=1.0, high=9.0, count=3)])
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
    """One Layer a run: the values as a line, least to greatest as a band where a stretch holds several values."""
    found = []
    for run in range(runs):
        points = [(row.last, point) for row in rows if (point := row.points[run]) is not None]
        several = any(point.count > 1 for _, point in points)
        band = [(float(x), point.low, point.high) for x, point in points]
        line = [(float(x), point.value) for x, point in points]
        found.append(Layer(colour=run, line=line, bands=[band] if several else []))
    return found


def axis(values: Iterable[float], *, zero: bool = False, log: bool = False) -> Axis:
    """An axis over all values, its ends on round numbers; `log` asks for a logarithmic one where that helps.

    Edge cases: logarithmic only if all values are above 0 and span a factor of 30; equal values get room around them.

    >>> axis([0.0, 9.7]).ticks
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    >>> axis([0.002, 40.0], log=True).ticks
    [0.001, 0.01, 0.1, 1.0, 10.0, 100.0]
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


def figures(value: float, digits: int = 6) -> str:
    """A number to read, with so many significant digits.

    >>> figures(3.14159265), figures(12345678.0), figures(1e-7), figures(2048)
    ('3.14159', '12,345,678', '1e-07', '2,048')
    """
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞" if value < 0 else "not a number"
    if value == int(value) and abs(value) < 1e12:
        return f"{int(value):,}"
    return f"{value:,.{digits}g}" if abs(value) < 1e6 else f"{value:,.4g}"


def drawing(layers: Sequence[Layer], *, x: Axis, y: Axis, x_label: str, y_label: str, name: str, title: str) -> str:
    """The SVG element, its id `plot-<name>`: grid, axes with labels, and each layer in the style sheet's colours."""
    left = 10.0 + _LETTER * max(len(figures(tick)) for tick in y.ticks)
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM

    def at(one: float, other: float) -> str:
        across = left + x.share(one) * (right - left)
        return f"{across:.1f} {bottom - y.share(other) * (bottom - _TOP):.1f}"

    parts = [
        f'<svg id="plot-{escape(name)}" class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{escape(title)}; the numbers are in the table below" data-left="{left:.1f}" '
        f'data-right="{right:.1f}" data-low="{x.low!r}" data-high="{x.high!r}">'
    ]
    for tick in y.ticks:
        height = bottom - y.share(tick) * (bottom - _TOP)
        parts.append(f'<path class="grid" d="M{left:.1f} {height:.1f}H{right:.1f}"/>')
        parts.append(f'<text x="{left - 5:.1f}" y="{height + 3.5:.1f}" text-anchor="end">{figures(tick)}</text>')
    parts.append(f'<path class="axis" d="M{left:.1f} {bottom:.1f}H{right:.1f}"/>')
    for tick in _apart(x, right - left):
        across = left + x.share(tick) * (right - left)
        parts.append(f'<path class="axis" d="M{across:.1f} {bottom:.1f}v4"/>')
        anchor = "end" if across > right - _LETTER * len(figures(tick)) / 2 else "middle"
        edge = min(across + (8 if anchor == "end" else 0), WIDTH - 2.0)
        parts.append(f'<text x="{edge:.1f}" y="{bottom + 15:.1f}" text-anchor="{anchor}">{figures(tick)}</text>')
    middle = (left + right) / 2
    parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 4}" text-anchor="middle" class="label">{escape(x_label)}</text>')
    parts.append(f'<text x="2" y="10" class="label">{escape(y_label)}</text>')
    few = all(len(layer.line) <= 30 for layer in layers)
    for layer in layers:
        parts += _drawn(layer, at, dots=few)
    parts.append(f'<path class="cursor" d="M0 {_TOP}V{bottom:.1f}"/></svg>')
    return "".join(parts)


def _drawn(layer: Layer, at: Callable[[float, float], str], *, dots: bool) -> list[str]:
    style = colour_class(layer.colour)
    parts = []
    for band in layer.bands:
        if len(band) == 1:  # one stretch alone: a band of no width would not be seen
            ((across, low, high),) = band
            parts.append(f'<path class="line {style}" d="M{at(across, low)}L{at(across, high)}"/>')
        else:
            there = "L".join(at(across, high) for across, _, high in band)
            back = "L".join(at(across, low) for across, low, _ in reversed(band))
            parts.append(f'<path class="band {style}" d="M{there}L{back}Z"/>')
    if len(layer.line) > 1:
        kind = "filled" if layer.filled else "line"
        parts.append(f'<path class="{kind} {style}" d="M{"L".join(at(*point) for point in layer.line)}"/>')
    if (dots or len(layer.line) == 1) and layer.line and not layer.filled:
        parts.append(f'<path class="dots {style}" d="{"".join(f"M{at(*point)}h0" for point in layer.line)}"/>')
    return parts


def colour_class(run: int) -> str:
    """The style sheet's classes of the colour of the run in that place."""
    return f"c{run % COLOURS}" + (f" dashed{run // COLOURS % 3}" if run >= COLOURS else "")


def _apart(x: Axis, room: float) -> list[float]:
    """As many of the ticks as have room for their numbers, evenly spaced."""
    widest = _LETTER * max(len(figures(tick)) for tick in x.ticks) + 10
    stride = max(1, math.ceil(len(x.ticks) * widest / room))
    return x.ticks[::stride]
