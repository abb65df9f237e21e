r"""Train several variants at one (epsilon, delta), and print a table with 95 % intervals.

Sampling, batch size and steps are the same for all variants. Each one runs with several seeds, at its best setting of a
grid. RECIPE is a recipe of `dpoptim train`; its [compare] table may hold all settings below, and flags override it.

Trying settings on private records costs privacy too. So --tuning-epsilon is required if there are settings to try:
  EPSILON    the trials of a variant together cost at most this epsilon
  public     trials run on --tuning-data, records that are not private; no cost
  uncovered  trials run on the private records, and the epsilon of a run does NOT cover them

Each seed is a separate release. The table states the epsilon of one run and the composed epsilon of everything in the
table. Every run has a run directory in DIR. Ctrl-C saves, and the same command resumes without repeating finished runs.

examples:
  dpoptim compare recipe.toml --variants scale_then_privatize,post_processing --seeds 5
      at the recipe's own settings
  dpoptim compare recipe.toml --grid learning_rate=3e-4,1e-3 --tuning-epsilon 1
      two learning rates, tried at epsilon 1 per variant
  dpoptim compare recipe.toml --grid learning_rate=3e-4,1e-3 --grid scale_then_privatize.eps_scale=1e-6,1e-5 \
      --tuning-epsilon public --tuning-data public.jsonl --tuning-steps 200
      tuned on public records; eps_scale for one variant only
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console

from dpoptim.app.cli import options as shared
from dpoptim.app.comparison.compare import Interrupted, compare
from dpoptim.app.comparison.request import PUBLIC, UNCOVERED, read_request
from dpoptim.app.format import duration, plain
from dpoptim.app.plot_style import new_figure
from dpoptim.app.progress import ProgressReporter
from dpoptim.privacy.statement import format_epsilon

_SETTINGS = ("epsilon", "device", "variants", "seeds", "metric", "tuning_epsilon", "tuning_data", "tuning_steps")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file, with or without a [compare] table")
    what = parser.add_argument_group("comparison")
    what.add_argument("--variants", type=_names, metavar="A,B", help="names as in `dpoptim train` (default: all)")
    what.add_argument("--seeds", type=shared.count, metavar="N", help="how many, starting at the recipe's (default: 3)")
    what.add_argument("--references", action="store_true", help="add rows without fine-tuning, and NOT PRIVATE")
    what.add_argument("--metric", choices=("loss", "accuracy"), help="what ranks settings and variants (default: loss)")
    what.add_argument("--epsilon", type=float, metavar="E", help="of one run; overrides the recipe's")
    tuning = parser.add_argument_group("tuning")
    tuning.add_argument(
        "--grid",
        action="append",
        metavar="NAME=V,V",
        help="values of a setting for all variants, or for one as VARIANT.NAME=V,V; may be repeated",
    )
    tuning.add_argument("--tuning-epsilon", type=_value, metavar="E", help=f"an epsilon, {PUBLIC}, or {UNCOVERED}")
    tuning.add_argument("--tuning-data", metavar="D", help="public records for the trials")
    tuning.add_argument(
        "--tuning-steps", type=shared.count, metavar="N", help="steps of a trial (default: those of a run)"
    )
    runs = parser.add_argument_group("runs")
    runs.add_argument("--run-dir", metavar="DIR", help="folder of the runs (default: runs/compare-RECIPE)")
    shared.add_setting(runs, "--device")
    shared.add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Run what is left of the comparison and print it; return 128 + the signal if it was interrupted."""
    shared.check_plot(options.plot)
    shared.silence_libraries()
    given = shared.fields(options, *_SETTINGS)
    grid, references = _grid(options.grid or []), options.references or None
    request = read_request(options.recipe, grid=grid, references=references, **given)
    folder = options.run_dir or f"runs/compare-{Path(options.recipe).stem}"
    try:
        with ProgressReporter(Console(stderr=True), brief=True) as progress:
            result = compare(request, folder, progress=progress)
    except (Interrupted, KeyboardInterrupt) as stop:
        what = stop if isinstance(stop, Interrupted) else "interrupted"
        shared.say(f"{what}; run the same command again to resume")
        return 128 + (stop.signal if isinstance(stop, Interrupted) else 2)
    if options.json:
        print(json.dumps(plain(result), indent=2, ensure_ascii=False))
    else:
        _print_result(result)
    shared.draw(options, lambda: draw_comparison(result))
    shared.say(f"runs, each with its secret key beside it: {folder}; numbers: {Path(folder, 'comparison.json')}")
    return 0


def _grid(given: list[str]) -> dict[str, Any]:
    """Parse the grid of the flags: NAME=V,V, or VARIANT.NAME=V,V, where 0.9:0.99 is a pair."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, values = text.partition("=")
        variant, dot, setting = name.strip().rpartition(".")
        if not equals or not setting or (dot and not variant):
            raise ValueError(f"--grid {text!r} must be written as NAME=VALUE,VALUE or VARIANT.NAME=VALUE,VALUE")
        place = found.setdefault(variant, {}) if variant else found
        if setting in place:
            raise ValueError(f"--grid gives {name.strip()} twice; put all its values into one flag")
        place[setting] = [_value(part.strip()) for part in values.split(",") if part.strip()]
    return found


def _value(text: str) -> Any:
    """A number, numbers separated by colons, or a word."""
    try:
        return [float(part) for part in text.split(":")] if ":" in text else float(text)
    except ValueError:
        return text


def _names(text: str) -> list[str]:
    return [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]


def _print_result(result: dict[str, Any]) -> None:
    """Print the table, and what its numbers cover."""
    console = shared.output_console()
    rows = [*result["variants"], *result["references"]]
    best = [row["variant"] for row in rows].index(result["best"])
    table = shared.table_of([_row(row, result, is_best=row is rows[best]) for row in rows], words=2, chosen=best)
    for column in table.columns[2:]:
        column.no_wrap = True
    print(
        f"{result['steps']:,} steps of {result['batch_size']:,} from {result['examples']:,} examples, "
        f"{result['sampling']} sampling, {result['mechanism']} noise, {result['adjacency'].replace('_', '-')} adjacency"
    )
    print(f"each run: epsilon = {format_epsilon(result['epsilon']['one_run'])} at delta = {result['delta']:g}")
    console.print(table)
    for line in _notes(result):
        console.print(line, highlight=False, markup=False, style="bold red" if "NOT " in line else None)


def _notes(result: dict[str, Any]) -> list[str]:
    """What the numbers cover and what they do not."""
    notes, cost = [_interval_note(result), f"Tuning: {result['tuning']['note']}."], result["epsilon"]
    if any(cost["tuning"].values()):
        parts = ", ".join(
            f"{variant} {format_epsilon(cost['one_run_with_tuning'][variant])} (trials alone {format_epsilon(spent)})"
            for variant, spent in cost["tuning"].items()
        )
        notes.append(f"epsilon of one run with its variant's trials: {parts}.")
    notes.append(
        f"epsilon of everything in this table: {format_epsilon(cost['everything'])}, composed over "
        f"{cost['runs_on_private_records']} runs at delta = {cost['delta']:g}."
    )
    if cost["runs_in_folder"] != cost["runs_on_private_records"]:
        number, spent = cost["runs_in_folder"], format_epsilon(cost["folder"])
        notes.append(f"epsilon of all {number} runs ever started in this folder: {spent}.")
    notes += [f"{text}: it has no guarantee, and none of these numbers includes it." for text in cost["without"]]
    outside = result["outside_guarantee"]
    return [*notes, f"{outside[0].upper()}{outside[1:]} ({result['validation_examples']:,} records)."]


def _interval_note(result: dict[str, Any]) -> str:
    share, seeds = f"{100 * result['confidence']:g} %", len(result["seeds"])
    if seeds == 1:
        return "One seed gives no interval, and a difference may be chance. Use --seeds 3 or more."
    wide = " Two seeds make it very wide (t = 12.7; 4.3 with three, 2.8 with five): use more." if seeds == 2 else ""
    return (
        f"± is a {share} interval (Student's t over {seeds} seeds).{wide} Differences from {result['best']} are paired "
        "by seed; apart: their interval excludes 0, not corrected for several comparisons."
    )


def _row(row: dict[str, Any], result: dict[str, Any], *, is_best: bool) -> dict[str, str]:
    has_accuracy = result["variants"][0]["accuracy"] is not None
    difference, apart = ("best", "") if is_best else _difference(row, result["metric"])
    multiplier = row["noise_multiplier"]
    return {
        "variant": row["label"],
        "setting": ", ".join(f"{name} {_word(value)}" for name, value in row["setting"].items()) or "-",
        "held-out loss": _interval(row["loss"], "{:.4f}"),
        **({"accuracy, %": _interval(row["accuracy"], "{:.1f}", times=100)} if has_accuracy else {}),
        f"{result['metric']} − best's": difference,
        "apart": apart,
        "seeds": str(len(row["loss"]["values"])),
        "σ": "-" if multiplier is None else f"{multiplier:.4f}",
        "time": duration(row["seconds"]) if row["seconds"] else "-",
    }


def _interval(values: dict[str, Any], form: str, *, times: float = 1.0) -> str:
    """Format an interval as mean ± half-width."""
    if values["mean"] == float("inf"):
        return "diverged"
    text = form.format(times * values["mean"])
    width = values["half_width"]
    return text if width is None else f"{text} ± {form.replace('+', '').format(times * width)}"


def _difference(row: dict[str, Any], metric: str) -> tuple[str, str]:
    """The difference from the best variant, and whether its interval excludes 0."""
    found = row["difference_to_best"]
    if found is None:
        return "-", "-"
    text = _interval(found, "{:+.1f}", times=100) if metric == "accuracy" else _interval(found, "{:+.4f}")
    return text, "-" if found["half_width"] is None else "yes" if found["excludes_zero"] else "no"


def _word(value: Any) -> str:
    """Format the value of a setting briefly, such as 0.001 or 0.9:0.99."""
    if isinstance(value, list):
        return ":".join(map(_word, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def draw_comparison(result: dict[str, Any]) -> Any:
    """Draw a dot per seed and an interval per variant; the best is on top, and references are grey."""
    metric = result["metric"]
    ranked = sorted(result["variants"], key=lambda row: row[metric]["mean"], reverse=metric == "accuracy")
    ranked.sort(key=lambda row: math.isinf(row[metric]["mean"]))  # a run diverged: last
    rows = ranked + result["references"]
    figure = new_figure(8, 1.4 + 0.5 * len(rows))
    axes = figure.subplots()
    for place, row in enumerate(rows):
        values = [value for value in row[metric]["values"] if math.isfinite(value)]
        colour = "0.5" if row in result["references"] else f"C{place % 10}"
        if len(values) == len(row[metric]["values"]):
            width = row[metric]["half_width"] or 0.0
            bar = {"fmt": "D", "color": colour, "capsize": 5, "linewidth": 2, "markersize": 6}
            axes.errorbar(row[metric]["mean"], place, xerr=width, **bar)
        axes.plot(values, [place + 0.22] * len(values), "o", color=colour, alpha=0.6, markersize=5)
    axes.set_yticks(range(len(rows)), [str(row["label"]).replace("_", " ") for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(f"held-out {metric} (outside the guarantee)")
    spread = f", bars: {100 * result['confidence']:g} % intervals" if len(result["seeds"]) > 1 else ""
    epsilon = format_epsilon(result["epsilon"]["one_run"])
    title = f"ε = {epsilon}, δ = {result['delta']:g} for one run; dots: seeds{spread}"
    if result["tuning"]["kind"] == UNCOVERED:
        title += "\nTUNING ON THE PRIVATE RECORDS IS NOT COVERED"
    axes.set_title(title, fontsize=10)
    return figure
