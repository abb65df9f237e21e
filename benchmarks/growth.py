"""Measure how the time of a training step grows with batch size, sequence length, width and vocabulary.

    python benchmarks/growth.py --json FILE                # on the GPU if there is one, else on the CPU
    python benchmarks/growth.py --from FILE --plot FILE    # draw earlier results, without measuring

A BERT with two layers is timed without privacy ("off") and with `scale_then_privatize` ("scaled"). One size varies at a
time, around a base point. The exponent is the slope of log time against log size over the upper half of the sizes,
where constant costs matter least. To reveal cliffs, the table also shows the largest (time growth) / (size growth)
between neighbouring sizes. It is 1 if time is proportional to size, and up to 2 per doubling of length or width.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from pathlib import Path
from typing import Any

from cases import Case, masked_lm
from options import PICTURES, add_device, add_json, at_least, one_line_errors, output_file, report, require_packages
from record import bullets, heading, markdown_table, page, read_as, save, setting
from steps import timed

WAYS = ("off", "scaled")
QUIET = 1.25  # on an idle machine, times of the base point differ by less than this factor
COLOURS = {"off": "#0072B2", "scaled": "#D55E00"}  # blue and vermilion of Okabe and Ito
BASES = {
    "cuda": {"examples": 1024, "positions": 256, "width": 512, "vocabulary": 32768},
    "cpu": {"examples": 8, "positions": 64, "width": 64, "vocabulary": 2048},
}
SIZES = {
    "cuda": {
        "examples": [64, 128, 256, 512, 1024, 2048],
        "positions": [32, 64, 128, 256, 512],
        "width": [128, 256, 512, 1024, 2048],
        "vocabulary": [4096, 8192, 16384, 32768, 65536, 131072],
    },
    "cpu": {
        "examples": [4, 8, 16, 32, 64],
        "positions": [32, 64, 128, 256, 512],
        "width": [32, 64, 128, 256, 512],
        "vocabulary": [1024, 2048, 4096, 8192, 16384, 32768],
    },
}
LABELS = {
    "examples": "batch size, examples",
    "positions": "sequence length, tokens",
    "width": "width, channels",
    "vocabulary": "vocabulary, tokens",
}
Point = dict[str, Any]  # {"size": 64, "off": {"ms": ...}, "scaled": {"ms": ...}}


def points_of(device: str, axis: str, repeats: int) -> list[Point]:
    """Time all sizes of an axis in the same rounds, so that a slow moment affects all of them."""
    runs: dict[str, tuple[Case, str]] = {}
    for size in SIZES[device][axis]:
        sizes = BASES[device] | {axis: size}
        case = masked_lm(
            device, sizes["examples"], sizes["positions"], width=sizes["width"], vocabulary=sizes["vocabulary"]
        )
        runs |= {f"{size} {way}": (case, way) for way in WAYS}
    found = timed(runs, repeats, lambda line: report(f"{axis}: {line}"))
    return [{"size": size, **{way: found[f"{size} {way}"] for way in WAYS}} for size in SIZES[device][axis]]


def base_point_spread(record: dict[str, Any]) -> float:
    """Return the longest over the shortest time of the base point, which every axis measures again."""
    most = 1.0
    for way in WAYS:
        there = [p[way] for axis, points in record["axes"].items() for p in points if p["size"] == record["base"][axis]]
        times = [found["ms"] for found in there if "ms" in found]
        most = max(most, max(times, default=1.0) / min(times, default=1.0))
    return most


def curve(points: list[Point], way: str) -> tuple[list[int], list[float]]:
    """Return sizes and times of the points that ran."""
    ran = [point for point in points if "ms" in point[way]]
    return [point["size"] for point in ran], [point[way]["ms"] for point in ran]


def prices(points: list[Point], kind: str = "ms") -> list[float]:
    """Return scaled / off at each size where both ran, in time ("ms") or memory ("gb")."""
    return [p["scaled"][kind] / p["off"][kind] for p in points if all(kind in p[way] for way in WAYS)]


def span(values: list[float]) -> str:
    """
    >>> span([1.5, 1.26, 2.118]), span([])
    ('1.26 to 2.12', '-')
    """
    return f"{min(values):.2f} to {max(values):.2f}" if values else "-"


def exponent(sizes: list[int], times: list[float]) -> float:
    """Return the least-squares slope of log time against log size over the upper half of the points.

    >>> round(exponent([1, 2, 4, 8, 16], [9.0, 9.0, 16.0, 64.0, 256.0]), 6)
    2.0
    """
    kept = slice(len(sizes) // 2, None)
    if len(sizes[kept]) < 2:
        return math.nan
    x, y = [math.log(size) for size in sizes[kept]], [math.log(time) for time in times[kept]]
    middle, height = sum(x) / len(x), sum(y) / len(y)
    across = sum((a - middle) * (b - height) for a, b in zip(x, y, strict=True))
    return across / sum((a - middle) ** 2 for a in x)


def steepest(sizes: list[int], times: list[float]) -> tuple[float, str]:
    """Return the largest (time growth) / (size growth) between neighbours, and where it is.

    >>> steepest([1, 2, 4], [1.0, 2.0, 12.0])
    (3.0, '2 to 4')
    """
    steps = [
        (times[i + 1] / times[i] / (sizes[i + 1] / sizes[i]), f"{sizes[i]} to {sizes[i + 1]}")
        for i in range(len(sizes) - 1)
    ]
    return max(steps, default=(math.nan, "-"))


def shown(record: dict[str, Any]) -> str:
    titles = ["axis", "method", "sizes", "times, ms", "exponent", "time growth / size growth", "scaled/off", "memory"]
    rows, worst = [], (-math.inf, "")
    for axis, points in record["axes"].items():
        for way in WAYS:
            sizes, times = curve(points, way)
            most, where = steepest(sizes, times)
            worst = max(worst, (most, f"{way}, {LABELS[axis]}, {where}"))
            range_of_sizes = f"{sizes[0]} to {sizes[-1]}" if sizes else "-"
            shown_times = " ".join(f"{p[way]['ms']:.1f}" if "ms" in p[way] else p[way]["error"] for p in points)
            found = [f"{exponent(sizes, times):.2f}", f"at most {most:.2f}, {where}"]
            both = [span(prices(points)), span(prices(points, "gb"))] if way == "scaled" else ["", ""]
            rows.append([LABELS[axis], way, range_of_sizes, shown_times, *found, *both])
    spread = base_point_spread(record)
    lines = [
        f"Steepest: time grows {worst[0]:.2f} times as fast as size ({worst[1]}).",
        f"Times of the base point differ by a factor of up to {spread:.2f}.",
        *(["The machine was busy, so the exponents are unreliable. Measure again."] if spread > QUIET else []),
    ]
    return page("Growth of the time of a step", heading(record), markdown_table(titles, rows), bullets(lines))


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw one log-log panel per axis, with both methods."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure = Figure(figsize=(9, 7.4), layout="constrained")
    for panel, (axis, points) in zip(figure.subplots(2, 2).flat, record["axes"].items(), strict=False):
        for way in WAYS:
            sizes, times = curve(points, way)
            label = f"{way}: time ~ size^{exponent(sizes, times):.2f}"
            panel.loglog(sizes, times, marker="o" if way == "off" else "s", color=COLOURS[way], label=label)
        panel.set(xlabel=LABELS[axis], ylabel="time of a step, ms")
        panel.set_xticks([point["size"] for point in points])
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for side in (panel.xaxis, panel.yaxis):
            side.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
            side.set_minor_locator(NullLocator())
        panel.axvline(record["base"][axis], color="0.6", linewidth=0.8, linestyle=":")
        panel.grid(alpha=0.3)
        panel.set_ymargin(0.3)
        price = f"scaled / off: {span(prices(points))}"
        panel.legend(fontsize=9, loc="upper left", title=price, title_fontsize=9, alignment="left")
    base = ", ".join(f"{LABELS[axis].split(',')[0]} {size}" for axis, size in record["base"].items())
    figure.suptitle(
        "Time of a training step as one size grows, without privacy (off) and with it (scaled)", fontsize=11
    )
    quiet = "" if base_point_spread(record) <= QUIET else " The machine was busy: measure again."
    ways = (
        "A BERT with two layers; off: dpoptim's fused loss and torch.optim.Adam, no privacy; "
        "scaled: the same model, loss and batch with dpoptim.scale_then_privatize."
    )
    note = f"Dotted: the base point ({base}). Exponents are fitted to the upper half of the sizes.{quiet}"
    figure.supxlabel(f"{ways}\n{note}\n{heading(record)}", fontsize=7.5)
    figure.savefig(path, dpi=150)


def short(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument("--only", choices=list(LABELS), help="measure only this axis")
    parser.add_argument("--repeats", type=at_least(2), default=10, metavar="N", help="timed rounds (default: 10)")
    parser.add_argument("--plot", type=output_file(*PICTURES), metavar="FILE", help="draw the results")
    add_json(parser)
    options = parser.parse_args()
    if options.plot:
        require_packages(parser, "matplotlib")
    warnings.simplefilter("ignore")
    if options.earlier:
        with one_line_errors(parser):
            record = read_as(options.earlier, "growth.py", "base", "axes")
    else:
        require_packages(parser, "transformers")
        record = setting(options.device, options.commit) | {"base": BASES[options.device], "axes": {}}
        for axis in [options.only] if options.only else LABELS:
            record["axes"][axis] = points_of(options.device, axis, options.repeats)
            if options.json:
                save(record, options.json)
    print(shown(record))
    if not any("ms" in point[way] for points in record["axes"].values() for point in points for way in WAYS):
        report("No method ran; the table shows the errors.")
        return 1
    if options.plot:
        draw(record, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
