"""The charts of a report: which numbers of the log each shows, and what it says about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape

from dpoptim.app.report.charts import Layer, Point, axis, colour_class, drawing, figures, layers, mean, thin
from dpoptim.app.runs.run_log import RunHistory, Series, number, series, value_at
from dpoptim.privacy.format_epsilon import format_epsilon

QUANTILES = ("least", "5 %", "25 %", "median", "75 %", "95 %", "greatest")
_MASSES = (0.05, 0.20, 0.25, 0.25, 0.20, 0.05)


class Mark(Enum):
    """What the guarantee says of a number; every number that is shown has one."""

    RELEASED = "from released values"
    KNOWN = "known without the data"
    OUTSIDE = "computed on data outside the guarantee"
    TIMING = "timing: not covered by the guarantee"
    DEBUG = "not private: for debugging"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One number of the log against steps: where it lies, what it is called, and what to see in it.

    `absent` is the line that stands in its place where no run logged it; without one, nothing does. `no_such` is that
    line where the log says null throughout: the number does not exist for the runs' variants. `gap` says, after a
    number, why single values are missing; a null is no such value where a number `may_be_absent`, and otherwise one
    that JSON could not write.
    """

    name: str
    title: str
    y_label: str
    path: str
    mark: Mark
    caption: str
    absent: str = ""
    no_such: str = ""
    may_be_absent: bool = False
    gap: str = "logged value(s) are no finite number, and are not drawn"
    of_evaluations: bool = False
    zero: bool = False
    log: bool = False
    gather: Callable[[Sequence[float]], float] = mean
    show: Callable[[float], str] = figures

    def of(self, run: RunHistory) -> Series:
        """The run's finite values."""
        return series(run.evaluations if self.of_evaluations else run.steps, self.path)


_NO_DIAGNOSTICS = "no released diagnostics were logged"

LOSSES = (
    Curve(
        name="validation-loss",
        title="Validation loss",
        y_label="loss (nats)",
        path="loss",
        mark=Mark.OUTSIDE,
        of_evaluations=True,
        caption="Lower is better; a curve that turns up again has been trained too long.",
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
        caption="The raw loss of private examples: far below the validation loss means memorising.",
    ),
    Curve(
        name="clipped-fraction",
        title="Clipped fraction",
        y_label="share of the batch's examples",
        path="not_private.clipped_fraction",
        mark=Mark.DEBUG,
        zero=True,
        caption="Near 1, the clip norm sets every example's length; near 0, noise is larger than need be.",
        absent="Clipped fraction: logged only with debug = true, because it is not private.",
    ),
)

DIAGNOSTICS = (
    Curve(
        name="signal-over-clip",
        title="Gradient against clip norm, ‖g‖/ζ",
        y_label="‖g‖/ζ (ratio), estimated",
        path="released.signal_over_clip",
        mark=Mark.RELEASED,
        zero=True,
        caption="‖g‖ is estimated as √(‖g̃‖² − noise²), 0 where the noise hides it; without scales, agreeing examples "
        "could bring it to 1 at most.",
        absent=f"‖g‖/ζ: {_NO_DIAGNOSTICS}.",
    ),
    Curve(
        name="noise-to-signal",
        title="Noise to signal",
        y_label="noise norm / ‖g‖ (ratio), estimated",
        path="released.noise_to_signal",
        mark=Mark.RELEASED,
        log=True,
        caption="Above 1, a step is more noise than gradient, and only averages over steps tell anything.",
        absent=f"Noise to signal: {_NO_DIAGNOSTICS}, or the noise hid every gradient.",
        gap="logged step(s) have their gradient hidden by the noise, and are not drawn",
    ),
    Curve(
        name="negative-fraction",
        title="Negative second moments ν̂",
        y_label="share of coordinates",
        path="released.negative_fraction",
        mark=Mark.RELEASED,
        zero=True,
        caption="Near one half, ν̂ after its noise is taken off is mostly noise, and corrected moments say little.",
        absent=f"Negative ν̂: {_NO_DIAGNOSTICS}.",
        no_such="Negative second moments ν̂: does not apply to {variants}. It is for variants that take the noise's "
        "share off ν̂, or could; one that scales gradients before the noise, or keeps no second moment, has none.",
    ),
)

COSTS = (
    Curve(
        name="seconds-per-step",
        title="Time per step",
        y_label="seconds per step",
        path="seconds",
        may_be_absent=True,  # before steps enough for a mean
        mark=Mark.TIMING,
        log=True,
        zero=True,
        caption="Flat is healthy; the first steps may be slower, and a drift upwards is not expected.",
        absent="Time per step: no step was logged.",
    ),
    Curve(
        name="examples-per-second",
        title="Throughput",
        y_label="examples per second",
        path="examples_per_second",
        may_be_absent=True,
        mark=Mark.TIMING,
        zero=True,
        caption="Higher is cheaper.",
        absent="Throughput: no step was logged.",
    ),
    Curve(
        name="epsilon",
        title="Privacy spent, ε",
        y_label="ε at the run's δ, of the steps so far",
        path="epsilon",
        mark=Mark.KNOWN,
        zero=True,
        gather=max,
        show=format_epsilon,
        caption="What stopping at a step would have cost; numbers are rounded up.",
        absent="ε against steps: not logged, or infinite because the run is not private.",
    ),
)

CURVES = (*LOSSES, *DIAGNOSTICS, *COSTS)


def _why_absent(curve: Curve, runs: Sequence[RunHistory]) -> str:
    *parts, name = curve.path.split(".")
    groups = [value_at(record, ".".join(parts)) for run in runs for record in run.steps] if parts else []
    says_null = any(isinstance(group, dict) and name in group for group in groups)
    if not curve.no_such or not says_null:
        return curve.absent
    variants = dict.fromkeys(str(run.setting("variant") or run.name) for run in runs)
    return curve.no_such.format(variants=", ".join(variants))


def curve_figure(curve: Curve, runs: Sequence[RunHistory], *, limit: int) -> str:
    """The curve of all runs as HTML: heading, legend, drawing, caption and table; a line where no run logged it."""
    found = [curve.of(run) for run in runs]
    if not any(found):
        return _line(_why_absent(curve, runs)) if curve.absent else ""
    rows = thin(found, limit=limit, gather=curve.gather)
    drawn = layers(rows, len(runs))
    ends = [value for layer in drawn for band in layer.bands for _, *pair in band for value in pair]
    svg = drawing(
        drawn,
        x=axis((row.last for row in rows), zero=True),
        y=axis([*(value for layer in drawn for _, value in layer.line), *ends], zero=curve.zero, log=curve.log),
        x_label="step",
        y_label=curve.y_label,
        name=curve.name,
        title=curve.title,
    )
    heads = ["step", *(run.name for run in runs)] if len(runs) > 1 else ["step", curve.title]
    body = [(_steps(row.first, row.last), row.last, [_cell(p, curve.show) for p in row.points]) for row in rows]
    remarks = list(_remarks(curve, runs, found, thinned=any(layer.bands for layer in drawn)))
    return _figure(curve.name, curve.title, curve.mark, runs, svg, " ".join([curve.caption, *remarks]), heads, body)


def _remarks(curve: Curve, runs: Sequence[RunHistory], found: Sequence[Series], *, thinned: bool) -> Iterator[str]:
    if thinned:
        kind = "greatest" if curve.gather is max else "mean"
        yield f"The line is the {kind} of each stretch of steps, the band its least to greatest value."
    for run, values in zip(runs, found, strict=True):
        whose = f"{run.name}: " if len(runs) > 1 else ""
        records = run.evaluations if curve.of_evaluations else run.steps
        parent, _, key = curve.path.rpartition(".")
        holders = [value_at(record, parent) if parent else record for record in records]
        logged = [one[key] for one in holders if isinstance(one, dict) and key in one]
        missing = sum(value is not None or not curve.may_be_absent for value in logged) - len(values)
        if missing and values:
            yield f"{whose}{missing} {curve.gap}."
        if not values and curve.absent and len(runs) > 1:
            yield f"{whose}not logged."
    if curve.name == "epsilon":
        notes = dict.fromkeys((run.name, record.get("epsilon_note")) for run in runs for record in run.steps)
        for note in dict.fromkeys(note for _, note in notes if isinstance(note, str)):
            whose = ", ".join(name for name, said in notes if said == note)
            yield f"ε{f' of {whose}' if len(runs) > 1 else ''} is {note.rstrip('.')}."


def quantiles_of(run: RunHistory) -> list[tuple[int, list[float]]]:
    """(step, the seven quantiles of the scales) where they were logged whole and finite."""
    found = []
    for record in run.steps:
        values = value_at(record, "released.scale_quantiles")
        if isinstance(values, list) and len(values) == len(QUANTILES):
            numbers = [value for value in map(number, values) if value is not None]
            if len(numbers) == len(QUANTILES):
                found.append((record["step"], sorted(numbers)))
    return found


def scale_figures(runs: Sequence[RunHistory], *, limit: int) -> list[str]:
    """The scales s: a fan of quantiles over steps, and a histogram of the last ones; one line where there are none."""
    found = [quantiles_of(run) for run in runs]
    if not any(found):
        return [_line("Scales s: this variant scales nothing before it clips, or no released diagnostics were logged.")]
    return [_fan(runs, found, limit=limit), _histogram(runs, found)]


def _fan(runs: Sequence[RunHistory], found: Sequence[list[tuple[int, list[float]]]], *, limit: int) -> str:
    """One run: least to greatest, 5 to 95 % and 25 to 75 % as bands; several: 5 to 95 % of each."""
    width = len(QUANTILES)
    parts: list[Series] = [[(step, values[i]) for step, values in one] for one in found for i in range(width)]
    rows = thin(parts, limit=limit)
    pairs = [(0, 6), (1, 5), (2, 4)] if len(runs) == 1 else [(1, 5)]
    drawn = []
    for run in range(len(runs)):
        fans = [(row.last, *_fan_values(row.points[width * run : width * (run + 1)])) for row in rows]
        fans = [fan for fan in fans if len(fan) > 1]
        bands = [[(float(x), fan[low], fan[high]) for x, *fan in fans] for low, high in pairs]
        drawn.append(Layer(colour=run, line=[(float(x), fan[3]) for x, *fan in fans], bands=bands))
    shown = [value for layer in drawn for band in layer.bands for _, *pair in band for value in pair]
    svg = drawing(
        drawn,
        x=axis((row.last for row in rows), zero=True),
        y=axis(shown, zero=True, log=True),
        x_label="step",
        y_label="scale s (no unit)",
        name="scales",
        title="Scales s over steps",
    )
    if len(runs) == 1:
        heads, body = ["step", *QUANTILES], []
        for row in rows:
            body.append((_steps(row.first, row.last), row.last, [figures(v, 4) for v in _fan_values(row.points)]))
        caption = "Line: median coordinate; bands: half, nine tenths and all of them."
    else:
        heads, body = ["step", *(run.name for run in runs)], []
        for row in rows:
            cells = []
            for run in range(len(runs)):
                fan = _fan_values(row.points[width * run : width * (run + 1)])
                cells.append(f"{figures(fan[3], 4)} ({figures(fan[1], 4)}–{figures(fan[5], 4)})" if fan else "")
            body.append((_steps(row.first, row.last), row.last, cells))
        caption = "Line: median coordinate; band: nine tenths of them."
    caption += " A wide fan means that coordinates are told apart; all near 1, clipping is as without scales."
    return _figure("scales", "Scales s over steps", Mark.RELEASED, runs, svg, caption, heads, body)


def _fan_values(points: Sequence[Point | None]) -> list[float]:
    """The seven quantiles of a stretch: means, but the ends are the least and the greatest of all; else empty."""
    there = [point for point in points if point is not None]
    if len(there) < len(QUANTILES):
        return []
    return [there[0].low, *(point.value for point in there[1:-1]), there[-1].high]


def _histogram(runs: Sequence[RunHistory], found: Sequence[list[tuple[int, list[float]]]]) -> str:
    """The last logged scales as a density: between two quantiles lies a known share of the coordinates."""
    lasts = [one[-1] if one else None for one in found]
    x = axis([value for last in lasts if last for value in last[1]], log=True)
    scaled: Callable[[float], float] = (lambda value: math.log10(value)) if x.log else (lambda value: value)
    thinnest = (scaled(x.high) - scaled(x.low)) / 80
    drawn = []
    for run, last in enumerate(lasts):
        line: list[tuple[float, float]] = []
        places = [scaled(value) for value in last[1]] if last else []
        for low, high, mass in zip(places, places[1:], _MASSES, strict=False):
            if high - low < thinnest:  # so that a share which sits on one value is still seen
                middle = (low + high) / 2
                low, high = middle - thinnest / 2, middle + thinnest / 2
            back = [10.0**edge if x.log else edge for edge in (low, high)]
            density = mass / (high - low)
            line += [(back[0], 0.0), (back[0], density), (back[1], density), (back[1], 0.0)]
        drawn.append(Layer(colour=run, line=line, bands=[], filled=True))
    unit = "per factor of 10" if x.log else "per unit of s"
    svg = drawing(
        drawn,
        x=x,
        y=axis([value for layer in drawn for _, value in layer.line], zero=True),
        x_label="scale s (no unit)",
        y_label=f"share of coordinates {unit}",
        name="scale-histogram",
        title="Histogram of the last scales s",
    )
    heads = ["quantile", *(f"{run.name}, step {last[0]:,}" for run, last in zip(runs, lasts, strict=True) if last)]
    columns = [last[1] for last in lasts if last]
    body = [(name, None, [figures(column[place]) for column in columns]) for place, name in enumerate(QUANTILES)]
    caption = "Areas are shares of the coordinates, from the seven quantiles that are logged; the last logged step."
    title = "Histogram of the last scales s"
    return _figure("scale-histogram", title, Mark.RELEASED, runs, svg, caption, heads, body)


def _figure(
    name: str,
    title: str,
    mark: Mark,
    runs: Sequence[RunHistory],
    svg: str,
    caption: str,
    heads: Sequence[str],
    body: Sequence[tuple[str, int | None, Sequence[str]]],
) -> str:
    legend = ""
    if len(runs) > 1:
        items = (f'<li><i class="{colour_class(i)}"></i>{escape(run.name)}</li>' for i, run in enumerate(runs))
        legend = f'<ul class="legend">{"".join(items)}</ul>'
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    lines = []
    for text, place, cells in body:
        at = "" if place is None else f' data-x="{place}"'
        lines.append(f"<tr{at}><th>{escape(text)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return (
        f'<figure id="chart-{name}"><h3>{escape(title)}</h3>{chip(mark)}{legend}{svg}'
        f'<p class="readout" aria-hidden="true"></p><figcaption>{escape(caption)}</figcaption>'
        f'<details><summary>The numbers</summary><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div></details></figure>"
    )


def chip(mark: Mark) -> str:
    """The mark as a small label."""
    return f'<p class="chip {mark.name.lower()}">{escape(mark.value)}</p>'


def _line(text: str) -> str:
    return f'<p class="absent">{escape(text)}</p>'


def _steps(first: int, last: int) -> str:
    return f"{first:,}–{last:,}" if first < last else f"{last:,}"


def _cell(point: Point | None, show: Callable[[float], str]) -> str:
    if point is None:
        return ""
    if point.low == point.high:
        return show(point.value)
    return f"{show(point.value)} ({show(point.low)}–{show(point.high)})"
