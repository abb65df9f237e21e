"""The report's numbers and its page: one HTML file that holds its style, script and charts, and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import statistics
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from dpoptim.app.files import check_target, write_text
from dpoptim.app.format import duration, plain
from dpoptim.app.report.charts import CURVES, Mark, chart, colour_class, format_number, quantiles_of
from dpoptim.app.runs.run_log import RunHistory, series
from dpoptim.privacy.accounting import describe_accountant
from dpoptim.privacy.statement import format_epsilon
from dpoptim.version import __version__

_POINTS = 280  # ranges of steps in a chart of one run: more than a phone has pixels for
_SETTINGS = ("task", "model", "variant", "mechanism", "noise_multiplier", "clip_norm", "batch_size", "device")
_COUNTS = ("parameters", "trained_parameters", "examples", "validation_examples")
_RELEASED = ("gradient_norm", "noise_norm", "signal_norm", "signal_over_clip", "noise_to_signal", "negative_fraction")


def write_report(runs: Sequence[RunHistory], output: str | Path) -> Path:
    """Write the report of runs from `read_runs`; the file appears complete or not at all.

    Guarantee: what the page shows of private data was released, or is marked as not private or as outside the
    guarantee. The noise key is not read. The file loads nothing.
    """
    output = Path(output)
    check_target("--output", output, ".html", ".htm")  # overwrites no key, log or recipe
    write_text(output, page(runs))
    return output


def all_numbers(runs: Sequence[RunHistory]) -> dict[str, Any]:
    """Everything that the report draws, not thinned, as JSON values (no NaN, no infinity)."""
    found = [
        {
            "name": run.name,
            "folder": str(run.folder),
            "final": final_numbers(run),
            "curves": {c.name: {"mark": c.mark.value, "values": values} for c in CURVES if (values := c.of(run))},
            "scale_quantiles": quantiles_of(run),
            "recipe": run.recipe,
            "versions": run.setting("versions"),
            "statement": run.statement,
            "notes": run.notes,
        }
        for run in runs
    ]
    return {"runs": plain(found)}


def final_numbers(run: RunHistory) -> dict[str, Any]:
    """The run in a few numbers: `epsilon` covers all planned steps, `epsilon_spent` those taken (∞: no guarantee)."""
    plan = run.plan
    released, private = ([r[key] for r in run.steps if r.get(key)] for key in ("released", "not_private"))
    found: dict[str, Any] = {
        **{name: run.setting(name) for name in (*_SETTINGS, *_COUNTS)},
        "steps": run.last_step,
        "planned_steps": plan.steps,
        "ending": run.ending,
        "resumes": len(run.resumed_from),
        "private": plan.is_private,
        "epsilon": run.epsilon,
        "delta": plan.delta,
        "adjacency": plan.adjacency.value,
        "sampling": type(plan.sampling).__name__,
        "accountant": describe_accountant(plan.run),
        "epsilon_spent": run.epsilon_spent,
        "validation": _validation(run),
        "released": {name: released[-1].get(name) for name in _RELEASED} if released else None,
        "seconds": run.seconds,
        "median_seconds_per_step": _median(run, "seconds"),
        "median_examples_per_second": _median(run, "examples_per_second"),
    }
    if private:
        found["not_private"] = {
            "mark": Mark.DEBUG.value,
            "loss": private[-1]["loss"],
            "clipped_fraction": private[-1]["clipped_fraction"],
            "nonfinite": sum(one["nonfinite"] for one in private),
        }
    return found


def _validation(run: RunHistory) -> dict[str, Any] | None:
    """The last evaluation, and the least loss of all."""
    if not run.evaluations:
        return None
    last = run.evaluations[-1]
    best = min(series(run.evaluations, "loss"), key=lambda pair: pair[1], default=(None, None))
    return {
        "mark": Mark.OUTSIDE.value,
        "step": last["step"],
        **{name: last.get(name) for name in ("loss", "accuracy", "rmse", "perplexity", "examples")},
        "best_loss": best[1],
        "best_step": best[0],
    }


def _median(run: RunHistory, path: str) -> float | None:
    values = [value for _, value in series(run.steps, path)]
    return statistics.median(values) if values else None


def page(runs: Sequence[RunHistory]) -> str:
    """Make the HTML file; its security policy allows only its own script and style, by their hashes."""
    assets = files("dpoptim.app.report") / "assets"
    template, style, script = (assets.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["breakable"] = _breakable
    numbers = [final_numbers(run) for run in runs]
    shown = [_shown(run, found, place) for place, (run, found) in enumerate(zip(runs, numbers, strict=True))]
    several = len(runs) > 1
    return environment.from_string(template).render(
        title=f"{len(runs)} runs: {_title(numbers) or 'a comparison'}" if several else _title(numbers) or "dpoptim run",
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; "
        "form-action 'none'",
        style=style,
        script=script,
        timing=Mark.TIMING,
        version=__version__,
        several=several,
        runs=shown,
        finals=_comparison(shown) if several else None,
        charts=[chart(curve, runs, limit=max(40, _POINTS * 3 // (2 + len(runs)))) for curve in CURVES],
        differences=_differences(shown) if several else None,
    )


def _shown(run: RunHistory, found: dict[str, Any], place: int) -> dict[str, Any]:
    """What the template shows of one run."""
    notes = list(run.notes)
    if run.ending != "finished":
        notes.insert(0, f"this run has not finished ({run.ending}); the curves end at its last record")
    return {
        "name": run.name,
        "colour": colour_class(place),
        "guarantee": guarantee_sentence(run),
        "covered": run.plan.is_private and run.last_step <= run.plan.steps,
        "notes": notes,
        "statement": re.sub(r"\n {4,}", " ", run.statement).splitlines(),  # joins lines that continue a paragraph
        "finals": _finals(found),
        "variant": str(found["variant"] or "–"),
        "epsilon": format_epsilon(found["epsilon"]),
        "recipe": {
            name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for name, value in run.recipe.items()
        },
        "recipe_text": run.recipe_text,
        "details": _details(run, found),
        "timed": bool(found["seconds"]),
    }


def _breakable(text: str) -> Markup:
    """Allow line breaks after underscores, for long names."""
    return escape(text).replace("_", Markup("_<wbr>"))


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _title(numbers: Sequence[dict[str, Any]]) -> str:
    """Task, model and variant, as far as all runs share them."""
    shared = [{str(one[name]) for one in numbers} for name in ("task", "model", "variant")]
    names = [one.pop() for one in shared if len(one) == 1 and one != {"None"}]
    return " · ".join(Path(name).name if name.startswith(("/", ".", "~")) else name for name in names)


def guarantee_sentence(run: RunHistory) -> str:
    """The guarantee in one sentence, with ε rounded up; for an unfinished run, also what was spent so far."""
    plan = run.plan
    if not plan.is_private:
        return f"Not private, regardless of the values below: {run.statement.partition(chr(10))[0]}"
    sentence = (
        f"ε = {format_epsilon(run.epsilon)} at δ = {plan.delta!r}, {plan.adjacency.value.replace('_', '-')} adjacency, "
        f"{re.sub(r'(?<=[a-z])(?=[A-Z])', ' ', type(plan.sampling).__name__)} sampling, accountant: "
        f"{describe_accountant(plan.run).rstrip('.')}"
    )
    taken, planned = run.last_step, plan.steps
    if taken > planned:
        return f"The guarantee does not hold: {taken:,} steps were taken, and {sentence} covers {planned:,}."
    if taken < planned:
        took = "took" if run.reason else "is known to have taken"
        sentence += (
            f". The run {took} {taken:,} of {planned:,} steps, which cost ε = {format_epsilon(run.epsilon_spent)}"
        )
    return f"{sentence}."


def _finals(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, number, remark) of the numbers that summarize a run."""
    validation, planned = found["validation"] or {}, found["planned_steps"]
    rows = [
        ("Validation loss", _number(validation.get("loss")), Mark.OUTSIDE.value),
        ("Best validation loss", _number(validation.get("best_loss")), f"at step {validation.get('best_step')}"),
        ("Validation accuracy", _number(validation.get("accuracy")), Mark.OUTSIDE.value),
        ("Validation root mean squared error", _number(validation.get("rmse")), Mark.OUTSIDE.value),
        ("Validation perplexity", _number(validation.get("perplexity")), Mark.OUTSIDE.value),
        ("ε spent", format_epsilon(found["epsilon_spent"]), "rounded up"),
        ("Steps", _number(found["steps"]), f"of {planned:,} planned"),
        ("Time", _time(found["seconds"]), Mark.TIMING.value),
        ("Examples per second", _number(found["median_examples_per_second"], 4), "median; " + Mark.TIMING.value),
    ]
    if "not_private" in found:
        rows.append(("Training loss", _number(found["not_private"]["loss"]), Mark.DEBUG.value))
    return [row for row in rows if row[1] != "–"]


def _comparison(shown: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The final numbers of several runs side by side; headings mark numbers that are not private."""
    remarks: dict[str, str] = {}
    rows = []
    for run in shown:
        row = {"Variant": run["variant"], "ε planned": run["epsilon"]}
        for name, text, remark in run["finals"]:
            head = f"{name} ({remark})" if remark == Mark.DEBUG.value else name
            remarks[head], row[head] = remark, text
        rows.append((run, row))
    heads = ["Variant", "ε planned", *(name for name in remarks if name != "Best validation loss")]
    legend = []
    for mark in (Mark.OUTSIDE.value, Mark.TIMING.value):
        if names := [name for name in heads if mark in remarks.get(name, "")]:
            legend.append(f"{', '.join(names)}: {mark}")
    return {"heads": heads, "rows": rows, "legend": "; ".join(legend)}


def _differences(shown: Sequence[dict[str, Any]]) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """The settings in which the runs differ, with each run's value."""
    names = dict.fromkeys(name for run in shown for name in run["recipe"])
    found = {name: [(run, run["recipe"].get(name, "–")) for run in shown] for name in names}
    return {name: values for name, values in found.items() if len({value for _, value in values}) > 1}


def _details(run: RunHistory, found: dict[str, Any]) -> dict[str, str]:
    nonfinite = "logged only with debug = true"
    if "not_private" in found:
        nonfinite = f"{found['not_private']['nonfinite']:,} ({Mark.DEBUG.value})"
    rows: dict[str, Any] = {
        "Started": run.starts[0].get("time") if run.starts else None,
        "Ended": run.ending,
        "Duration": _time(found["seconds"]),
        "Resumed": f"{found['resumes']} time(s)" + "".join(f", from step {step}" for step in run.resumed_from),
        "Device": found["device"],
        "Parameters": _number(found["parameters"]),
        "Trained parameters": _number(found["trained_parameters"]),
        f"{run.plan.unit.title()}s covered by the guarantee": f"{run.plan.num_examples:,}",
        "Validation examples": _number(found["validation_examples"]),
        "Expected batch size": _number(found["batch_size"]),
        "Noise": found["mechanism"],
        "Noise multiplier": _number(found["noise_multiplier"]),
        "Clip norm": _number(found["clip_norm"]),
        "Median time per step": _number(found["median_seconds_per_step"], 4, "\N{NO-BREAK SPACE}s"),
        "Examples with a non-finite gradient": nonfinite,
        **{f"Version of {name}": text for name, text in (run.setting("versions") or {}).items()},
    }
    return {name: str(value) for name, value in rows.items() if value not in (None, "–")}


def _number(value: Any, digits: int = 6, unit: str = "") -> str:
    return "–" if value is None else format_number(value, digits) + unit


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else duration(seconds).replace(" ", "\N{NO-BREAK SPACE}")
