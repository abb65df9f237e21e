"""Recommend a variant and noise for training MODEL at (epsilon, delta), and print the `dpoptim train` command.

Clip norm and sampling default to those of `dpoptim train`. The length and spread of gradients are ASSUMED (0.03 to 0.3
clip norms, spread evenly) unless --probe measures them on public examples. The best variant depends on your task, so
treat the advice as a starting point; --verbose explains it and lists the evidence.

examples:
  dpoptim advise 4.4M --steps 2000 --batch-size 2048 --num-examples 1700000 --epsilon 10 --delta 1e-7
      a model of 4.4 million parameters, with assumed gradients
  dpoptim advise ./bert-tiny ... --sampling shuffled --plot advice.png
      counts the parameters from the folder's config.json; no amplification; draws a plot
  dpoptim advise ./bert-tiny ... --probe public.txt --task masked-lm
      measures gradients on PUBLIC texts, one per line
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from dpoptim.app import Recipe, load_model, prepare, read_records
from dpoptim.app.cli import options as shared
from dpoptim.app.cli.options import count, fields
from dpoptim.app.cli.plan import LEGEND, headline, mechanism_row, mechanism_values, plan_line
from dpoptim.app.models.loading import task_of_model
from dpoptim.app.plot_style import new_figure
from dpoptim.app.progress import ProgressReporter
from dpoptim.integrations.losses import Task
from dpoptim.integrations.named_settings import CLIP_NORM, name_of_noise, name_of_sampling
from dpoptim.integrations.optional import require
from dpoptim.noise import NoiseMemory
from dpoptim.privacy import Adjacency, PrivacyPlan
from dpoptim.privacy.statement import format_epsilon
from dpoptim.theory import Advice, GradientSignal, advise, measure_signal
from dpoptim.theory.adviser import MANY_NEGATIVE
from dpoptim.theory.stability_window import rounded

_PUBLIC = "note: you declare the examples of --probe PUBLIC: their gradients enter the advice without noise"
_MIN_PROBE_EXAMPLES = 16
_ONLY_WITH_PROBE = ("--text-column", "--label-column", "--max-length", "--from-scratch")


def add_options(parser: argparse.ArgumentParser) -> None:
    model = "a count of parameters (4.4M), a folder with config.json, or a Hugging Face name"
    parser.add_argument("model", metavar="MODEL", help=model)
    training = shared.add_training(parser, required=True, title="training")
    shared.add_sampling(training)
    shared.add_setting(training, "--clip-norm", help=f"bound on one example's gradient (default: {CLIP_NORM})")
    shared.add_setting(training, "--betas")
    shared.add_noise_memory(parser.add_argument_group("noise"))
    probe = parser.add_argument_group("measured gradients")
    probe.add_argument(
        "--probe",
        metavar="DATA",
        help="PUBLIC examples: .txt, .jsonl, .csv, a folder or a dataset's name. They must be public: their gradients "
        "enter the advice without noise, and no guarantee covers them",
    )
    probe.add_argument("--probe-examples", type=count, default=256, metavar="N", help="how many (default: 256)")
    for flag in _ONLY_WITH_PROBE:
        shared.add_setting(probe, flag)
    shared.add_setting(probe, "--task")
    shared.add_output(parser, verbose="also explain the advice, show every mechanism, and list the evidence")


def run(options: argparse.Namespace) -> int:
    """Print the advice as text or as JSON, and draw it if asked."""
    betas = tuple(options.betas or Recipe.betas)
    plan = shared.uncalibrated_plan(options, clip_norm=CLIP_NORM if options.clip_norm is None else options.clip_norm)
    number = typed_count(options.model)
    _check_probe(options, number=number)
    shared.check_plot(options.plot)
    shared.silence_libraries()
    signal = counted = None
    with ProgressReporter(Console(stderr=True)) as progress:
        if number is not None:
            parameters = number
        elif options.probe is None:
            progress.stage(f"reading {options.model}")
            parameters, counted = model_size(options.model, task=_task(options))
        else:
            progress.message(_PUBLIC)
            progress.stage(f"reading {options.model} and {options.probe}")
            signal = _measure(options, plan, progress=lambda n: progress.stage(f"gradients of {n} public examples"))
            parameters = signal.parameters
        advice = advise(
            plan,
            epsilon=options.epsilon,
            delta=options.delta,
            parameters=parameters,
            signal=signal,
            beta1=betas[0],
            beta2=betas[1],
            memory_budget=options.memory_budget,
            memory=NoiseMemory(bits=options.noise_bits),
            progress=lambda name: progress.stage(f"optimizing and calibrating {name}"),
        )
    train = train_line(advice, betas=betas, model=None if number is not None else options.model)
    if options.json:
        print(json.dumps({**as_json(advice, counted=counted), "train": train}, indent=2, allow_nan=False))
    else:
        _print_advice(advice, options, train=train, counted=counted)
    shared.draw(options, lambda: draw_advice(advice))
    return 0


def train_line(advice: Advice, *, betas: tuple[float, ...], model: str | None) -> str:
    """The `dpoptim train` command that follows the advice; it derives eps and eps_scale in the same way."""
    plan = advice.plan
    flags: dict[str, Any] = {
        "model": model or "MODEL",
        "data": "DATA",
        "epsilon": advice.epsilon,
        "delta": advice.delta,
        "steps": plan.steps,
        "batch-size": plan.batch_size,
        "clip-norm": plan.clip_norm,
        "sampling": name_of_sampling(plan.sampling),
        "noise": name_of_noise(plan.noise),
        "variant": advice.variant,
    }
    if plan.adjacency is not Adjacency.ZERO_OUT:
        flags["adjacency"] = plan.adjacency.value.replace("_", "-")
    if plan.adjacency is Adjacency.ADD_REMOVE:
        flags["num-examples"] = plan.num_examples
    if plan.records_per_user is not None:
        flags |= {"user-column": "COLUMN", "records-per-user": plan.records_per_user}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return shlex.join(["dpoptim", "train", *words, *(["--betas", *map(str, betas)] if betas != Recipe.betas else [])])


def as_json(advice: Advice, *, counted: str | None = None) -> dict[str, Any]:
    """The advice as plain values.

    `snr` is the mean squared gradient over the noise's variance at the last step. `epsilon_at_chosen_error` is a
    mechanism's cost at the chosen one's rmse_mean (null: not computed).
    """
    plan, window = advice.plan, advice.window
    return {
        **fields(advice, "epsilon", "delta"),
        **fields(plan, "steps", "batch_size", "num_examples", "clip_norm", "noise_multiplier"),
        "parameters": advice.signal.parameters,
        "noise_to_signal": plan.outlook(parameters=advice.signal.parameters).noise_to_signal,
        "counted": counted,
        "mechanism": advice.choice.chosen.name,
        "mechanism_reason": advice.choice.reason,
        "sampling": repr(plan.sampling),
        "adjacency": plan.adjacency.value,
        **fields(advice, "variant", "reason", "noise_variance", "snr", "signal_share", "scaled_share"),
        **fields(advice, "negative_fraction", "many_negative", "notes"),
        "assumptions": [fields(one, "norm", "variant", "snr", "negative_fraction") for one in advice.assumptions],
        "forecasts": [
            {
                **fields(forecast, "step", "noise_variance"),
                "negative_bias_correction": forecast.bias_correction,
                "negative_independent_moments": forecast.independent_moments,
            }
            for forecast in advice.forecasts
        ],
        "signal": fields(
            advice.signal, "measured", "examples", "norm", "agreement", "example_norms", "squares", "weights"
        ),
        "window": {
            "eps_scale": [window.low, window.high],
            "eps_scale_likely_high": window.likely_high,
            "clip_norm_over_eps_scale": window.clip_norms,
            "default": window.default,
            "default_is": window.regime(window.default).value,
        },
        "try": {
            "eps_scale": window.to_try,
            "eps_scale_is": [window.place(value) for value in window.to_try],
            "eps": advice.eps_to_try,
            "clip_norm": advice.clip_norms_to_try,
        },
        "mechanisms": [
            {
                **mechanism_values(row.candidate, delta=advice.delta),
                **fields(row, "chosen", "accountant", "epsilon_at_chosen_error"),
                "adjacency": row.candidate.plan.adjacency.value,
            }
            for row in advice.alternatives
        ],
    }


def _print_advice(advice: Advice, options: argparse.Namespace, *, train: str, counted: str | None) -> None:
    """Print the advice once all of it is made. Strings are code to be copied, so they are never wrapped."""
    console = shared.output_console()
    more = _explanation(advice) if options.verbose else ["--verbose explains this and shows every mechanism."]
    for part in [*_answer(advice, options, train, counted), *more]:
        if isinstance(part, str):
            print(part)
        else:
            console.print(part, highlight=False)


def _answer(advice: Advice, options: argparse.Namespace, train: str, counted: str | None) -> Iterator[RenderableType]:
    source = "measured" if advice.signal.measured else "ASSUMED (--probe measures them)"
    of = "" if counted is None else f" of {counted}"
    constant = {
        "scale_then_privatize": f", eps_scale={advice.window.default:.3g}",
        "bias_correction": f", rule=Adam(eps={advice.eps_to_try[1]:.3g})",
    }
    yield Text(f"Use {advice.variant} with {advice.choice.chosen.name}:", style="bold green")
    yield f"  {train}"
    yield "or in Python:"
    yield f"  plan = {plan_line(advice.plan, options)}"
    yield f"  optimizer = {advice.variant}(model, plan, lr=...{constant.get(advice.variant, '')})"
    yield ""
    outlook = advice.plan.outlook(parameters=advice.signal.parameters)
    if outlook.verdict != "good":
        yield Text.assemble(("outlook", "bold"), f": {outlook}.")
    reason = advice.reason if options.verbose else advice.reason.partition(". ")[0]
    yield Text.assemble((advice.variant, "bold"), f": {reason}.")
    yield Text.assemble(("noise", "bold"), f": {advice.choice.reason.removeprefix(f'{advice.choice.chosen.name}: ')}.")
    yield Text(headline(advice.plan, options))
    yield f"{advice.signal.parameters:,} parameters{of}; clip norm {advice.plan.clip_norm:g}; gradients {source}."
    rows = _to_try(advice, every_variant=options.verbose)
    if options.verbose:
        yield shared.table_of(rows, words=3)
    else:
        yield shared.table_of([{"to try": row["to try"], "values": row["values"]} for row in rows], words=2)


def _explanation(advice: Advice) -> Iterator[RenderableType]:
    numbers = Table.grid(padding=(0, 2))
    for name, text in _numbers(advice).items():
        numbers.add_row(name, text)
    yield ""
    yield numbers
    yield ""
    rows, cells = advice.alternatives, []
    for row in rows:
        one, cost = row.candidate, row.epsilon_at_chosen_error
        named = mechanism_row(one, {}, mechanism=one.name, sampling=repr(one.plan.sampling))
        cells.append({**named, "epsilon*": "-" if cost is None else format_epsilon(cost)})
    yield shared.table_of(cells, words=2, chosen=[row.chosen for row in rows].index(True))
    yield Text(f"{LEGEND}\nepsilon*: the mechanism's cost at the chosen one's mean RMSE.\nAccountants:")
    for accountant in dict.fromkeys(row.accountant for row in rows):
        kinds = (type(row.candidate.plan.sampling).__name__ for row in rows if row.accountant == accountant)
        yield Text(f"  {', '.join(dict.fromkeys(kinds))}: {accountant}")
    yield ""
    for note in advice.notes:
        yield Text(f"- {note}")


def _numbers(advice: Advice) -> dict[str, str]:
    plan, window, signal = advice.plan, advice.window, advice.signal
    rows = {
        "noise multiplier": f"{plan.noise_multiplier:.4f}, times column norm {plan.strategy.column_norm:.4g}",
        "noise variance phi": f"{advice.noise_variance:.3g} per coordinate of the averaged gradient (last step)",
        "squared gradient": f"{signal.mean * plan.clip_norm**2:.3g} per coordinate on average, {advice.snr:.3g} times "
        f"phi; norm {signal.norm:.3g} clip norms",
        "window of eps_scale": f"({window.low:.6g}, {window.high:.6g}] at clip norm {plan.clip_norm:g}, up to "
        f"{window.likely_high:.6g} if examples agree as little as {signal.agreement:.2g}",
        "its default": f"{window.default:.4g}, {window.describe(window.default)}",
    }
    steps = sorted({1, max(1, plan.steps // 4), plan.steps})
    for name, kind in (("bias correction", "bias_correction"), ("IME", "independent_moments")):
        found = {f.step: getattr(f, kind) for f in advice.forecasts if f.step in steps}
        if None not in found.values():
            rows[f"negative by {name}"] = ", ".join(f"{value:.1%} at step {step:,}" for step, value in found.items())
    for one in advice.assumptions:
        rows[f"if gradients are {one.norm:g}"] = (
            f"{one.variant}; squared gradient {one.snr:.3g} times phi, {one.negative_fraction:.1%} negative at the end"
        )
    if signal.measured:
        share = f"{advice.signal_share:.3f} of it on average"
        rows["signal in an update"] = f"{share}, at most {advice.scaled_share:.3f} where scaling evens it"
    return rows


def _to_try(advice: Advice, *, every_variant: bool) -> list[dict[str, str]]:
    """Values of the settings of the advised variant, or of every variant."""
    window = advice.window
    marked = ", ".join(f"{value:.6g} ({window.describe(value).partition(':')[0]})" for value in window.to_try)
    if window.too_narrow:
        marked += "; the window is too narrow to hold a value that is clear of divergence"
    eps, clip_norms = (", ".join(f"{value:.3g}" for value in v) for v in (advice.eps_to_try, advice.clip_norms_to_try))
    source = "10, 50 and 90 % of the public norms; " if advice.signal.example_norms else ""
    rows = [
        ("eps_scale", "scale_then_privatize", marked),
        ("eps", "bias_correction, IME", f"{eps} (0.3, 1 and 3 times the noise)"),
        ("clip_norm", "all", f"{clip_norms} ({source}eps_scale and eps in proportion)"),
    ]
    return [
        {"to try": setting, "for": variants, "values": values}
        for setting, variants, values in rows
        if every_variant or variants == "all" or advice.variant in variants
    ]


def typed_count(model: str) -> int | None:
    """Return MODEL as a number, such as 124M, or None if it is a folder or a name."""
    try:
        number = count(model)
    except argparse.ArgumentTypeError:
        number = 0
    if not number and re.match(r"[-+\d]", model) and "/" not in model and not Path(model).is_dir():
        raise ValueError(f"MODEL {model!r} is neither a number of parameters, such as 4.4M, nor an existing folder")
    return number or None


def _task(options: argparse.Namespace) -> Task:
    return task_of_model(options.model) if options.task is None else Task(options.task)


def model_size(model: str, *, task: Task) -> tuple[int, str]:
    """Count the trained parameters of MODEL and name its class; it is built on the meta device, without weights."""
    if task.is_tabular:
        raise ValueError(f"MODEL {model!r}: its size depends on the columns of the data; give a number")
    labels = 2
    if task.is_classification and model != "small-cnn":
        with contextlib.suppress(OSError, ValueError):  # load_model reports what is wrong
            config = require("transformers", f"MODEL {model!r}").AutoConfig.from_pretrained(model)
            labels = max(2, int(config.num_labels))
    with torch.device("meta"):
        made = load_model(task, model, num_labels=labels if task.is_classification else None, from_scratch=True)
    return sum(p.numel() for p in made.parameters() if p.requires_grad), type(made).__name__


def _check_probe(options: argparse.Namespace, *, number: int | None) -> None:
    """Check the options of --probe before anything slow; `number` is MODEL if it is a number."""
    unused = [flag for flag in _ONLY_WITH_PROBE if getattr(options, flag[2:].replace("-", "_")) is not None]
    if options.probe is None and unused:
        raise ValueError(f"{unused[0]} needs --probe; leave it out, or give --probe")
    if options.probe is not None and number is not None:
        raise ValueError(f"--probe needs a model, and MODEL {options.model!r} is a number; give a folder or a name")
    if options.probe_examples < _MIN_PROBE_EXAMPLES:
        raise ValueError(f"--probe-examples {options.probe_examples} is too few; give {_MIN_PROBE_EXAMPLES} or more")


def _measure(options: argparse.Namespace, plan: PrivacyPlan, *, progress: Callable[[int], None]) -> GradientSignal:
    """Measure MODEL's gradients on the public records, in small batches and with dropout, as in training."""
    records = read_records(options.probe, text_column=options.text_column, label_column=options.label_column)
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(0))[: options.probe_examples]
    if len(order) < _MIN_PROBE_EXAMPLES:
        raise ValueError(
            f"--probe {options.probe} has {len(order)} records; give {_MIN_PROBE_EXAMPLES} or more, better hundreds"
        )
    prepared = prepare(
        task=_task(options),
        model=options.model,
        records=records.take(order.tolist()),
        max_length=options.max_length,
        from_scratch=bool(options.from_scratch),
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = prepared.model.to(device).train()
    dataset: Any = prepared.dataset

    def batches() -> Iterator[Any]:
        for step, part in enumerate(torch.arange(len(order)).split(8)):
            yield prepared.at_step(prepared.collated([dataset[int(i)] for i in part]), step)

    with torch.random.fork_rng(devices=[] if device.type == "cpu" else None):
        torch.default_generator.manual_seed(0)
        return measure_signal(
            model,
            prepared.loss_per_example,
            batches(),
            clip_norm=plan.clip_norm,
            batch_size=plan.batch_size,
            progress=progress,
        )


def draw_advice(advice: Advice) -> Any:
    """Draw how many second moments turn negative, and the window of eps_scale with the values to try."""
    figure = new_figure(12, 5)
    negative, window = figure.subplots(1, 2)
    plan = advice.plan
    kind = f"assumed, {advice.signal.norm:.2g} clip norms"
    if advice.signal.measured:
        kind = f"measured on {advice.signal.examples} public examples"
    figure.suptitle(
        f"advice: {advice.variant} with {advice.choice.chosen.name}\n"
        f"ε = {advice.epsilon:g}, δ = {advice.delta:g}; {plan.steps:,} steps of {plan.batch_size:,} from "
        f"{plan.num_examples:,}; {advice.signal.parameters:,} parameters; gradients {kind}",
        fontsize=11,
    )
    _negative(negative, advice)
    _window(window, advice)
    for axes in (negative, window):
        axes.grid(alpha=0.25)
    return figure


def _negative(axes: Any, advice: Advice) -> None:
    steps = [forecast.step for forecast in advice.forecasts]
    for label, name, colour in (("bias correction", "bias_correction", "C0"), ("IME", "independent_moments", "C1")):
        values = [getattr(forecast, name) for forecast in advice.forecasts]
        if None not in values:
            axes.plot(steps, [100 * value for value in values], marker="o", label=label, color=colour)
    axes.axhline(100 * MANY_NEGATIVE, color="0.4", linestyle="--", linewidth=1, label=f"{MANY_NEGATIVE:.0%}")
    axes.set(xscale="log", xlabel="step", ylabel="coordinates with ν̂ below 0, %", ylim=(-2, 72))
    axes.legend(fontsize=8)
    axes.set_title("(a) above the dashed line, too few second moments see a gradient", fontsize=9)


def _window(axes: Any, advice: Advice) -> None:
    window = advice.window
    points = [*window.to_try, window.default, window.high, *([window.low] if window.low else [])]
    left, right = 0.5 * min(points), 2 * max(points)
    low = max(left, window.low)
    axes.axvspan(left, low, color="#f4c7c3", label="ν̂ diverges")
    axes.axvspan(low, window.high, color="#cfe8cf", label="ν̂ is steady")
    axes.axvspan(window.high, right, color="#e3e3e3", label="ν̂ collapses")
    axes.axvline(window.likely_high, color="C2", linestyle=":", label="upper end if examples disagree")
    axes.plot(window.to_try, [0.38] * len(window.to_try), "o", color="C0", label="to try", markersize=8)
    axes.plot([window.default], [0.2], "D", color="C3", label="default", markersize=8)
    for index, value in enumerate(window.to_try):  # alternate above and below, so that close labels do not overlap
        place = (0, 9 if index % 2 == 0 else -17)
        axes.annotate(f"{value:.4g}", (value, 0.38), textcoords="offset points", xytext=place, ha="center", fontsize=8)
    ticks = [rounded(float(value)) for value in np.geomspace(left, right, 7)[1:-1]]
    axes.set(xscale="log", xlim=(left, right), ylim=(0, 1), yticks=[])
    axes.set_xticks(ticks, [f"{value:.5g}" for value in ticks], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_xlabel(f"eps_scale of scale_then_privatize at clip norm {window.clip_norm:g}, gradient units")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
    axes.set_title("(b) left of the window noise feeds on itself, right of it scaling fades", fontsize=9)
