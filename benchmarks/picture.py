"""The picture of step times in the README, from what steps.py found.

    python benchmarks/steps.py --json FILE
    python benchmarks/picture.py FILE -o docs/images/speed.png

Bars are step times over that of "off", the same code without privacy; the line at 1 is "off" itself. Opacus stands with
the faster of its modes. A bar far beyond the others is cut and says its length; a way that failed says so.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib.figure import Figure
from steps import fastest_peer, read

# Okabe and Ito's colours, which the colour-blind can tell apart; Opacus is hatched besides.
BARS = {
    "plain": ("#999999", "plain PyTorch"),
    "compiled": ("#56B4E9", "torch.compile"),
    "flat": ("#009E73", "dpoptim, flat clipping"),
    "scaled": ("#D55E00", "dpoptim, scale then privatize"),
    "opacus": ("#F0E442", "Opacus, faster mode"),
}
LONGEST = 2.0  # a bar may be this many times the longest that is not Opacus's; beyond, it is cut


def lengths_of(case: dict[str, Any]) -> dict[str, float | str]:
    """The length of each bar, or why there is none; a way that was not asked for has none and no reason."""
    ways, peer = case["ways"], fastest_peer(case["ways"])
    off, given = ways.get("off", {}), {}
    for bar in BARS:
        found = ways.get(peer or "opacus" if bar == "opacus" else bar)
        if found is not None and "ms" in off:
            given[bar] = found["ms"] / off["ms"] if "ms" in found else found["error"]
    return given


def draw(record: dict[str, Any], path: Path) -> None:
    cases = [(case, lengths) for case in record["cases"] if (lengths := lengths_of(case))]
    if not cases:
        raise SystemExit('there is no case with a time of "off" and of another way to compare with it')
    every = [(bar, length) for _, lengths in cases for bar, length in lengths.items() if isinstance(length, float)]
    ours = max([1.0, *(length for bar, length in every if bar != "opacus")])
    limit = min(max([1.0, *(length for _, length in every)]), LONGEST * ours)
    rows = sum(len(lengths) for _, lengths in cases) + 0.8 * len(cases)
    figure = Figure(figsize=(8, 1.7 + 0.21 * rows), layout="constrained")
    axes = figure.subplots()
    place, ticks, used = 0.0, [], {}
    for case, lengths in cases:
        first = place
        for bar, length in lengths.items():
            colour = BARS[bar][0]
            if isinstance(length, str):
                reason = length.split(":")[0]
                axes.text(0.01 * limit, place, f"{bar}: {reason}", va="center", fontsize=8, style="italic", color="0.4")
            else:
                hatch = "///" if bar == "opacus" else None
                drawn = axes.barh(
                    place, min(length, limit), 0.86, color=colour, hatch=hatch, edgecolor="0.25", linewidth=0.4
                )
                used.setdefault(bar, drawn)
                cut = " →" if length > limit else ""
                # On white, so that the line at 1 does not run through it.
                axes.text(
                    min(length, limit) + 0.012 * limit,
                    place,
                    f"{length:.2f}{cut}",
                    va="center",
                    fontsize=8.5,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
                )
            place += 1
        ticks.append(((first + place - 1) / 2, f"{case['name']}\noff: {case['ways']['off']['ms']:.3g} ms"))
        place += 0.8
    axes.axvline(1.0, color="black", linewidth=1.2)
    axes.set_xlim(0, 1.12 * limit)
    axes.set_ylim(place - 1.2, -0.9)
    axes.set_yticks([tick for tick, _ in ticks], [label for _, label in ticks], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("step time / step time without privacy (off, the line at 1); shorter is faster", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    handles = {bar: used[bar] for bar in BARS if bar in used}
    figure.legend(
        handles.values(),
        [BARS[bar][1] for bar in handles],
        fontsize=9,
        ncols=3,
        loc="outside upper center",
        frameon=False,
    )
    versions = record["versions"]
    with_peer = any("opacus" in lengths for _, lengths in cases)
    named = ("torch", "opacus") if with_peer else ("torch",)
    shown = ", ".join(f"{name} {versions[name]}" for name in named if name in versions)
    measured = (
        f"{record['machine']}, {shown}; {record['date']}, commit {record['commit']}, {record['repeats']} steps each"
    )
    twins = any(case["note"] and isinstance(lengths.get("opacus"), float) for case, lengths in cases)
    note = "\nOpacus trains twins of the transformers, of equal sizes, in layers that it accepts" if twins else ""
    figure.supxlabel(measured + note, fontsize=8, color="0.3")
    figure.savefig(path, dpi=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="what steps.py --json wrote")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the picture, .png or .svg")
    options = parser.parse_args()
    draw(read(options.files), options.output)


if __name__ == "__main__":
    main()
