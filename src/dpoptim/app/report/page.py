"""The page of a report: one HTML text with its style, its script and its charts inside, that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from dpoptim.app.format import duration
from dpoptim.app.report.charts import colour_class, figures
from dpoptim.app.report.figures import COSTS, DIAGNOSTICS, LOSSES, Mark, chip, curve_figure, scale_figures
from dpoptim.app.report.numbers import final_numbers
from dpoptim.app.runs.run_log import UNKNOWN_END, RunHistory, value_at
from dpoptim.privacy.format_epsilon import format_epsilon
from dpoptim.version import __version__

_POINTS = 280
"""Stretches of steps that a chart of one run is thinned to: more than a phone has pixels for."""

_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


def page(runs: Sequence[RunHistory]) -> str:
    """The whole HTML file.

    Guarantee: everything that comes from files is escaped; the page's own policy lets it run its one script and style
    (by their hashes) and nothing else, and fetch nothing. Charts are thinned the more, the more runs there are.
    """
    limit = max(40, _POINTS * 3 // (2 + len(runs)))
    charts = [
        *(curve_figure(curve, runs, limit=limit) for curve in (*LOSSES, *DIAGNOSTICS)),
        *scale_figures(runs, limit=limit),
        *(curve_figure(curve, runs, limit=limit) for curve in COSTS),
    ]
    numbers = [final_numbers(run) for run in runs]
    title = _title(numbers[0]) if len(runs) == 1 else f"{len(runs)} runs: {_common(numbers)}"
    body = [
        f"<h1>{_breakable(title)}</h1>",
        *(_guarantee(run, several=len(runs) > 1, place=i) for i, run in enumerate(runs)),
        _together() if len(runs) > 1 else "",
        *(_notes(run, several=len(runs) > 1) for run in runs),
        *(_statement(run, several=len(runs) > 1) for run in runs),
        _tiles(numbers[0]) if len(runs) == 1 else _comparison(runs, numbers),
        f'<h2>Curves</h2><div class="charts">{"".join(charts)}</div>',
        "<h2>Recipe</h2>",
        _differences(runs) if len(runs) > 1 else "",
        *(_recipe(run, several=len(runs) > 1) for run in runs),
        "<h2>Versions, machine and course</h2>",
        *(_course(run, found, several=len(runs) > 1) for run, found in zip(runs, numbers, strict=True)),
        f'<p class="soft">Made by dpoptim {escape(__version__)} from the run directories alone.</p>',
    ]
    return _whole(title, "\n".join(part for part in body if part))


def _whole(title: str, body: str) -> str:
    assets = files("dpoptim.app.report") / "assets"
    style, script = ((assets / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    text = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style></head>\n"
        f'<body><main>\n<button id="theme" type="button" hidden>Dark</button>\n{body}\n</main>'
        f"<script>{script}</script></body></html>\n"
    )
    text = text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair, which JSON allows, is no letter
    return _UNPRINTABLE.sub("�", text)


def _breakable(text: str) -> str:
    """Escaped, and long names may be broken behind an underscore."""
    return escape(text).replace("_", "_<wbr>")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _title(numbers: dict[str, Any]) -> str:
    parts = [_short(numbers[name]) for name in ("task", "model", "variant") if numbers[name] is not None]
    return " · ".join(parts) or "A run of dpoptim"


def _short(name: Any) -> str:
    """A name of Hugging Face as it is, a path without its folders.

    >>> _short("google/bert"), _short("/home/me/models/bert"), _short("./bert")
    ('google/bert', 'bert', 'bert')
    """
    text = str(name)
    return text.rstrip("/").rpartition("/")[2] if text.startswith(("/", ".", "~")) else text


def _common(numbers: Sequence[dict[str, Any]]) -> str:
    """Task and model where all runs share them."""
    shared = [{_short(one[name]) for one in numbers} for name in ("task", "model", "variant")]
    return " · ".join(one.pop() for one in shared if len(one) == 1 and one != {"None"}) or "a comparison"


def guarantee_sentence(run: RunHistory) -> str:
    """The guarantee in one sentence, ε rounded up; what was spent so far where not all steps were taken."""
    found = run.guarantee
    if found.epsilon is None:
        return "The guarantee is unknown: plan.json does not tell ε."
    if not found.is_private:
        first = run.statement.splitlines()[0] if run.statement else "epsilon = inf"
        return f"Not private, whatever is shown below: {first}"
    parts = [f"ε = {format_epsilon(found.epsilon)} at δ = {'?' if found.delta is None else repr(found.delta)}"]
    if found.adjacency:
        parts.append(f"{found.adjacency.replace('_', '-').replace('add-remove', 'add-or-remove')} adjacency")
    if found.sampling:
        parts.append(f"{re.sub(r'(?<=[a-z])(?=[A-Z])', ' ', found.sampling)} sampling")
    if found.accountant:
        parts.append(f"accountant: {found.accountant.rstrip('.')}")
    sentence = ", ".join(parts)
    planned, spent = run.planned_steps, run.epsilon_spent
    if planned is not None and run.last_step > planned:
        return f"The guarantee does not hold: {run.last_step:,} steps were taken, and {sentence} covers {planned:,}."
    if planned is not None and run.last_step < planned and spent is not None:
        known = "is known to have taken" if run.ending == UNKNOWN_END else "took"
        sentence += (
            f". The run {known} {run.last_step:,} of the {planned:,} steps, which cost ε = {format_epsilon(spent)}"
        )
    return f"{sentence}."


def _guarantee(run: RunHistory, *, several: bool, place: int) -> str:
    covered = run.planned_steps is None or run.last_step <= run.planned_steps
    kind = "" if run.guarantee.is_private and covered else " none"
    name = f"{_swatch(place)}<strong>{escape(run.name)}</strong>: " if several else ""
    return f'<p class="guarantee{kind}">{name}{escape(guarantee_sentence(run))}</p>'


def _swatch(place: int) -> str:
    return f'<i class="{colour_class(place)}"></i>'


def _together() -> str:
    return (
        '<p class="soft">Each ε covers its own run alone. Runs on the same private data cost more together, and '
        "choosing among them by their private results is covered by none of these sentences.</p>"
    )


def _notes(run: RunHistory, *, several: bool) -> str:
    notes = list(run.notes)
    if run.ending != "finished":
        notes.insert(0, f"this run has not finished ({run.ending}); the curves end at its last record")
    whose = f"{run.name}: " if several else ""
    return "".join(f'<p class="note">{escape(whose + note)}.</p>' for note in notes)


def _statement(run: RunHistory, *, several: bool) -> str:
    if not run.statement:
        return ""
    name = f" of {escape(run.name)}" if several else ""
    return (
        f'<details class="print"><summary class="big">The privacy statement{name}, in full</summary>'
        f'<div class="statement">{_reflowed(run.statement)}</div></details>'
    )


def _reflowed(statement: str) -> str:
    """The statement's own words, its broken lines joined so that they fit any width.

    >>> _reflowed("Noise:      much\\n            more\\n  - it is\\n    secret")
    '<p><b>Noise:</b> much more</p><p class="item">- it is secret</p>'
    """
    lines: list[str] = []
    for line in statement.splitlines():
        if line.startswith("  - ") or not line.startswith(" ") or not lines:
            lines.append(line.strip())
        else:
            lines[-1] += " " + line.strip()
    parts = []
    for line in filter(None, lines):
        head, colon, rest = line.partition(":")
        if line.startswith("- "):
            parts.append(f'<p class="item">{escape(line)}</p>')
        else:
            parts.append(f"<p><b>{escape(head)}{colon}</b> {escape(rest.strip())}</p>")
    return "".join(parts)


def _shown(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(what, number, remark) of the numbers that sum a run up."""
    validation, planned = found["validation"] or {}, found["planned_steps"]
    rows = [
        ("Validation loss", _number(validation.get("loss")), Mark.OUTSIDE.value),
        ("Best validation loss", _number(validation.get("best_loss")), f"at step {validation.get('best_step')}"),
        ("Validation accuracy", _number(validation.get("accuracy")), Mark.OUTSIDE.value),
        ("Validation perplexity", _number(validation.get("perplexity")), Mark.OUTSIDE.value),
        ("ε spent", _epsilon(found["epsilon_spent"]), "rounded up, never down"),
        ("Steps", _number(found["steps"]), f"of {planned:,} planned" if planned else ""),
        ("Time", _time(found["seconds"]), Mark.TIMING.value),
        ("Examples per second", _number(found["median_examples_per_second"], 4), "median; " + Mark.TIMING.value),
    ]
    if "not_private" in found:
        rows.append(("Training loss", _number(found["not_private"]["loss"]), Mark.DEBUG.value))
    return [(what, text, remark) for what, text, remark in rows if text != "–"]


def _tiles(found: dict[str, Any]) -> str:
    tiles = (
        f"<div><dt>{escape(what)}</dt><dd>{escape(text)}<small>{escape(remark)}</small></dd></div>"
        for what, text, remark in _shown(found)
    )
    return f'<dl id="finals" class="tiles">{"".join(tiles)}</dl>'


def _comparison(runs: Sequence[RunHistory], numbers: Sequence[dict[str, Any]]) -> str:
    """The final numbers side by side, a row a run; a number that is not private says so in its heading."""
    remarks: dict[str, str] = {}
    rows: list[dict[str, str]] = []
    for found in numbers:
        row = {"Variant": str(found["variant"] or "–"), "ε planned": _epsilon(found["epsilon"])}
        for what, text, remark in _shown(found):
            head = f"{what} ({remark})" if remark == Mark.DEBUG.value else what
            remarks[head], row[head] = remark, text
        rows.append(row)
    heads = ["Variant", "ε planned", *(what for what in remarks if what != "Best validation loss")]
    lines = []
    for place, (run, row) in enumerate(zip(runs, rows, strict=True)):
        data = (f'<td data-label="{escape(what)}">{_breakable(row.get(what, "–"))}</td>' for what in heads)
        lines.append(f'<tr><th scope="row">{_swatch(place)}{escape(run.name)}</th>{"".join(data)}</tr>')
    head = "".join(f'<th scope="col">{escape(what)}</th>' for what in ("Run", *heads))
    kinds = {
        mark.value: [what for what in heads if mark.value in remarks.get(what, "")]
        for mark in (Mark.OUTSIDE, Mark.TIMING)
    }
    legend = "; ".join(f"{', '.join(whats)}: {mark}" for mark, whats in kinds.items() if whats)
    return (
        f'<h2>Final numbers</h2><table id="finals" class="stack"><thead><tr>{head}</tr></thead>'
        f'<tbody>{"".join(lines)}</tbody></table><p class="soft">{escape(legend)}</p>'
    )


def _flat(values: dict[str, Any], before: str = "") -> dict[str, str]:
    """Nested tables as dotted names, every value as text.

    >>> _flat({"a": True, "b": {"c": "x", "d": [1, 2.5]}})
    {'a': 'true', 'b.c': 'x', 'b.d': '[1, 2.5]'}
    """
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found.update(_flat(value, f"{before}{key}."))
        else:
            plain = isinstance(value, str)
            found[f"{before}{key}"] = value if plain else json.dumps(value, default=str, ensure_ascii=False)
    return found


def _table(values: dict[str, str], name: str = "") -> str:
    rows = "".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in values.items())
    label = f' id="{name}"' if name else ""
    return f'<table class="plain"{label}><tbody>{rows}</tbody></table>'


def _recipe(run: RunHistory, *, several: bool) -> str:
    if not run.recipe_text:
        return f'<p class="absent">{escape(run.name)}: no recipe.toml.</p>'
    name = f" of {escape(run.name)}" if several else ""
    return (
        f'<details class="print"{"" if several else " open"}><summary>Every setting{name}</summary>'
        f"{_table(_flat(run.recipe))}</details>"
        f"<details><summary>As TOML{name}, to copy</summary>"
        f'<div><button class="copy" type="button" hidden>Copy</button><pre>{escape(run.recipe_text)}</pre></div>'
        "</details>"
    )


def _differences(runs: Sequence[RunHistory]) -> str:
    """The settings in which the runs differ, a row a setting."""
    flat = [_flat(run.recipe) for run in runs]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if len({one.get(key) for one in flat}) > 1]
    if not keys:
        return '<p class="soft">The recipes are the same.</p>'
    names = (f'<th scope="col">{_swatch(place)}{escape(run.name)}</th>' for place, run in enumerate(runs))
    lines = []
    for key in keys:
        cells = (
            f'<td data-label="{escape(run.name)}">{_breakable(one.get(key, "–"))}</td>'
            for run, one in zip(runs, flat, strict=True)
        )
        lines.append(f'<tr><th scope="row">{escape(key)}</th>{"".join(cells)}</tr>')
    return (
        '<p class="soft">Where the recipes differ:</p><table id="differences" class="stack">'
        f'<thead><tr><th scope="col">Setting</th>{"".join(names)}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    )


def _course(run: RunHistory, found: dict[str, Any], *, several: bool) -> str:
    start = run.starts[-1] if run.starts else {}
    declared = run.plan.get("num_examples")
    rows: dict[str, Any] = {
        "Started": run.starts[0].get("time") if run.starts else None,
        "Ended": run.ending,
        "Duration": _time(found["seconds"]),
        "Resumed": f"{run.resumes} time(s)" + "".join(f", from step {at}" for at in _resumed_from(run)),
        "Device": found["device"],
        "Machine": start.get("machine"),
        "Parameters": _number(found["parameters"]),
        "Trained parameters": _number(found["trained_parameters"]),
        "Examples covered by the guarantee": _number(declared if declared is not None else found["examples"]),
        "Validation examples": _number(found["validation_examples"]),
        "Expected batch size": _number(found["batch_size"]),
        "Noise": found["mechanism"],
        "Noise multiplier": _number(found["noise_multiplier"]),
        "Clip norm": _number(found["clip_norm"]),
        "Median time per step": _seconds(found["median_seconds_per_step"]),
    }
    private = found.get("not_private")
    rows["Examples with a non-finite gradient"] = (
        f"{private['nonfinite']:,} ({Mark.DEBUG.value})" if private else "logged only with debug = true"
    )
    versions = value_at(start, "versions")
    rows |= {f"Version of {name}": text for name, text in (versions if isinstance(versions, dict) else {}).items()}
    shown = {what: _flat_text(value) for what, value in rows.items() if value not in (None, "–")}
    name = f"<h3>{escape(run.name)}</h3>" if several else ""
    return f"{name}{_table(shown, '' if several else 'course')}{chip(Mark.TIMING) if found['seconds'] else ''}"


def _resumed_from(run: RunHistory) -> list[Any]:
    return [start["resumed_from"] for start in run.starts if start.get("resumed_from") is not None]


def _flat_text(value: Any) -> str:
    return ", ".join(f"{key} {text}" for key, text in _flat(value).items()) if isinstance(value, dict) else str(value)


def _number(value: Any, digits: int = 6) -> str:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    return figures(float(value), digits) if good else "–"


def _epsilon(value: float | None) -> str:
    return "–" if value is None else format_epsilon(value)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}\N{NO-BREAK SPACE}s"


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else duration(seconds).replace(" ", "\N{NO-BREAK SPACE}")
