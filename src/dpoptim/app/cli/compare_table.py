"""The table of `dpoptim compare`, and what must be said about it."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from dpoptim.app.cli.training_text import wide_console
from dpoptim.app.format import duration
from dpoptim.privacy.format_epsilon import format_epsilon


def show(result: dict[str, Any]) -> None:
    """Print the comparison on standard output."""
    console = wide_console()
    for line in headline(result):
        console.print(line, highlight=False, markup=False)
    console.print(_table(result))
    for line in notes(result):
        console.print(line, highlight=False, markup=False, style="bold red" if "NOT " in line else None)


def headline(result: dict[str, Any]) -> list[str]:
    """What all rows have in common."""
    return [
        f"{result['steps']:,} steps of {result['batch_size']:,} from {result['examples']:,} examples, "
        f"{result['sampling']} sampling, {result['mechanism']} noise, {result['adjacency']} neighbours",
        f"each run: epsilon = {_epsilon(result['epsilon']['one_run'])} at delta = {result['delta']:g}",
    ]


def notes(result: dict[str, Any]) -> list[str]:
    """What the numbers cover and what they do not, a line each."""
    found = [_interval_note(result), f"Tuning: {result['tuning']['note']}."]
    cost = result["epsilon"]
    if any(cost["tuning"].values()):
        parts = ", ".join(
            f"{variant} {_epsilon(cost['one_run_with_tuning'][variant])} (trials alone {_epsilon(spent)})"
            for variant, spent in cost["tuning"].items()
        )
        found.append(f"epsilon of one run together with its variant's trials: {parts}.")
    everything = f"epsilon of everything in this table: {_epsilon(cost['everything'])}"
    added = f"added up: epsilon {_epsilon(cost['added']['epsilon'])} at delta {cost['added']['delta']:g}"
    found.append(
        f"{everything}, composed over {cost['runs_on_private_records']} runs at delta = {cost['delta']:g} ({added})."
    )
    if cost["runs_in_folder"] != cost["runs_on_private_records"]:
        number, spent = cost["runs_in_folder"], _epsilon(cost["folder"])
        found.append(f"epsilon of all {number} runs that were ever started in this folder: {spent}.")
    found += [f"{text}: it has no guarantee, and is in none of these numbers." for text in cost["without"]]
    text = result["outside_guarantee"]
    return [*found, f"{text[0].upper()}{text[1:]} ({result['validation_examples']:,} records)."]


def _interval_note(result: dict[str, Any]) -> str:
    share, seeds = f"{100 * result['confidence']:g} %", len(result["seeds"])
    if seeds == 1:
        return "One seed: there is no interval, and no difference can be told from chance; use --seeds 3 or more."
    wide = " Two seeds make it very wide (t = 12.7; three 4.3, five 2.8): use more." if seeds == 2 else ""
    return (
        f"± is a {share} interval (Student's t over {seeds} seeds).{wide} Differences to {result['best']} are paired "
        "by seed; apart: their interval excludes 0, not corrected for there being several."
    )


def _table(result: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("variant", no_wrap=True)
    table.add_column("setting", overflow="fold")
    has_accuracy = result["variants"][0]["accuracy"] is not None
    titles = ["held-out loss", *(["accuracy, %"] if has_accuracy else [])]
    for title in (*titles, f"{result['metric']} − best's", "apart", "seeds", "σ", "time"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in (*result["variants"], *result["references"]):
        is_best = row["variant"] == result["best"]
        multiplier = row["noise_multiplier"]
        table.add_row(
            row["label"],
            setting_text(row["setting"]),
            interval_text(row["loss"], "{:.4f}"),
            *([interval_text(row["accuracy"], "{:.1f}", times=100)] if has_accuracy else []),
            "best" if is_best else _difference(row, result["metric"]),
            "" if is_best else _told_apart(row),
            str(len(row["loss"]["values"])),
            "-" if multiplier is None else f"{multiplier:.4f}",
            duration(row["seconds"]) if row["seconds"] else "-",
            style="bold green" if is_best else None,
        )
    return table


def interval_text(values: dict[str, Any], form: str, *, times: float = 1.0) -> str:
    """mean ± half-width.

    >>> interval_text({"mean": 0.5, "half_width": 0.01}, "{:.1f}", times=100)
    '50.0 ± 1.0'
    >>> interval_text({"mean": 0.5, "half_width": None}, "{:.2f}"), interval_text({"mean": float("inf")}, "{:.2f}")
    ('0.50', 'diverged')
    """
    if values["mean"] == float("inf"):
        return "diverged"
    text = form.format(times * values["mean"])
    return text if values["half_width"] is None else f"{text} ± {form.format(times * values['half_width'])}"


def setting_text(setting: dict[str, Any]) -> str:
    """A chosen setting, in short.

    >>> setting_text({"learning_rate": 0.001, "betas": [0.9, 0.99]}), setting_text({})
    ('learning_rate 0.001, betas 0.9:0.99', '-')
    """
    words = {
        name: ":".join(f"{part:g}" for part in value)
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
        for name, value in setting.items()
    }
    return ", ".join(f"{name} {word}" for name, word in words.items()) or "-"


def _difference(row: dict[str, Any], metric: str) -> str:
    found = row["difference_to_best"]
    if found is None:
        return "-"
    times, form = (100, "{:+.1f}") if metric == "accuracy" else (1, "{:+.4f}")
    text = form.format(times * found["mean"])
    if found["half_width"] is None:
        return text
    return f"{text} ± {form.replace('+', '').format(times * found['half_width'])}"


def _told_apart(row: dict[str, Any]) -> str:
    found = row["difference_to_best"]
    if found is None or found["half_width"] is None:
        return "-"
    return "yes" if found["excludes_zero"] else "no"


def _epsilon(value: float) -> str:
    return "0" if value == 0 else format_epsilon(value)
