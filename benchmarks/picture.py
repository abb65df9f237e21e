"""Draw the step times that steps.py measured.

    python benchmarks/steps.py --json FILE
    python benchmarks/picture.py FILE -o docs/images/speed.png

Bars are step times relative to "off": the same model, loss and batch without privacy, at the line at 1. Opacus counts
with its faster mode. A bar far longer than the others is cut off and labelled with its length. A method that failed or
was not measured is labelled so.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from options import PICTURES, input_file, one_line_errors, output_file, require_packages
from record import fastest_peer, listed, own_norms, read, spelled

# Okabe and Ito's colours, which colour-blind readers can tell apart; Opacus is also hatched.
BARS = {
    "plain": ("#999999", "plain PyTorch"),
    "compiled": ("#56B4E9", "torch.compile"),
    "flat": ("#009E73", "dpoptim, flat clipping"),
    "scaled": ("#D55E00", "dpoptim, scale then privatize"),
    "captured": ("#CC79A7", "dpoptim, the same as a CUDA graph"),
    "opacus": ("#F0E442", "Opacus, faster mode"),
}
LONGEST = 2.0  # a bar is cut off at this many times the longest bar that is not Opacus's


def lengths_of(case: dict[str, Any]) -> dict[str, float | str]:
    """Return the length of each bar, or the error of a method that failed; methods that were not run are left out."""
    ways, peer = case["ways"], fastest_peer(case["ways"])
    off, given = ways.get("off", {}), {}
    for bar in BARS:
        found = ways.get(peer or "opacus" if bar == "opacus" else bar)
        if found is not None and "ms" in off:
            given[bar] = found["ms"] / off["ms"] if "ms" in found else found["error"]
    return given


def footnotes(record: dict[str, Any], shown: dict[str, dict[str, float | str]]) -> list[str]:
    """Return machine, versions and caveats; `shown` has the bars of each case."""
    cases = [case for case in record["cases"] if case["name"] in shown]
    ran = {bar for lengths in shown.values() for bar, length in lengths.items() if isinstance(length, float)}
    versions = record["versions"]
    named = [f"{name} {versions[name]}" for name in ("torch", "opacus") if name in versions and name in ("torch", *ran)]
    lines = [
        f"{record['machine']}, {', '.join(named)}; {record['date']}, commit {record['commit']}, "
        f"{record['repeats']} steps each",
        "off: the same model, dpoptim's fused loss and batch with torch.optim.Adam, no privacy",
    ]
    if own_norms(record):
        lines[-1] += "; off uses PyTorch's layer and group norms,\nprivate steps use dpoptim's kernels"
    small = [case for case in cases if case["compiled_micro_batch"] and "compiled" in shown[case["name"]]]
    for case in small:
        size = case["compiled_micro_batch"]
        lines.append(f"torch.compile ran in micro-batches of {size} in {spelled(case['name'])}")
    twins = {case["note"] for case in cases if case["note"] and isinstance(shown[case["name"]].get("opacus"), float)}
    if twins:
        lines.append(
            f"Opacus trains a substitute of the same sizes in layers that it accepts ({'; '.join(sorted(twins))});"
        )
        lines.append("it stores logits, as plain PyTorch does")
    return lines


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw one group of bars per case."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    cases = [(case, lengths) for case in record["cases"] if (lengths := lengths_of(case))]
    if not cases:
        raise ValueError('no case has times of both "off" and another method')
    every = [(bar, length) for _, lengths in cases for bar, length in lengths.items() if isinstance(length, float)]
    ran = [bar for bar in BARS if bar in dict(every)]
    ours = max([1.0, *(length for bar, length in every if bar != "opacus")])
    limit = min(max([1.0, *(length for _, length in every)]), LONGEST * ours)
    notes = footnotes(record, {case["name"]: lengths for case, lengths in cases})
    rows = sum(len(lengths) + any(bar not in lengths for bar in ran) for _, lengths in cases) + 0.8 * len(cases)
    figure = Figure(figsize=(8, 1.5 + 0.14 * len(notes) + 0.21 * rows), layout="constrained")
    axes = figure.subplots()
    place, ticks = 0.0, []
    used: dict[str, Any] = {}  # the handle of each bar in the legend

    def write(words: str) -> None:
        # A white box hides the line at 1 behind the text.
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        axes.text(0.012 * limit, place, words, va="center", fontsize=8, style="italic", color="0.4", bbox=white)

    for case, lengths in cases:
        first = place
        for bar, length in lengths.items():
            colour = BARS[bar][0]
            if isinstance(length, str):
                write(f"{BARS[bar][1]}: {length.split(':')[0]}")
            else:
                hatch = "///" if bar == "opacus" else None
                drawn = axes.barh(
                    place, min(length, limit), 0.86, color=colour, hatch=hatch, edgecolor="0.25", linewidth=0.4
                )
                used.setdefault(bar, drawn)
                cut = " →" if length > limit else ""
                axes.text(
                    min(length, limit) + 0.012 * limit,
                    place,
                    f"{length:.2f}{cut}",
                    va="center",
                    fontsize=8.5,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
                )
            place += 1
        if absent := [BARS[bar][1].split(",")[0] for bar in ran if bar not in lengths]:
            write(f"{listed(absent)}: not measured")
            place += 1
        label = spelled(case["name"]).replace(", ", "\n")
        ticks.append(((first + place - 1) / 2, f"{label}\noff: {case['ways']['off']['ms']:.3g} ms"))
        place += 0.8
    axes.axvline(1.0, color="black", linewidth=1.2, zorder=1.5)
    axes.set_xlim(0, 1.12 * limit)
    axes.set_ylim(place - 1.2, -0.9)
    axes.set_yticks([tick for tick, _ in ticks], [label for _, label in ticks], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("step time / step time without privacy (off, the line at 1); shorter is faster", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        [used[bar] for bar in ran],
        [BARS[bar][1] for bar in ran],
        fontsize=9,
        ncols=3,
        loc="outside upper center",
        frameon=False,
    )
    figure.supxlabel("\n".join(notes), fontsize=8, color="0.3")
    figure.savefig(path, dpi=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=input_file, metavar="FILE", help="results of steps.py --json")
    parser.add_argument(
        "-o",
        "--output",
        type=output_file(*PICTURES),
        required=True,
        metavar="FILE",
        help=f"the picture: {', '.join(PICTURES)}",
    )
    options = parser.parse_args()
    require_packages(parser, "matplotlib")
    with one_line_errors(parser):
        draw(read(options.file), options.output)


if __name__ == "__main__":
    main()
