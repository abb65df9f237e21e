"""`dpoptim advise`: recommend an optimizer variant, its noise and the constants to try."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from dpoptim.app import Recipe, load_model, prepare, read_records
from dpoptim.app.cli.options import (
    add_noise_memory,
    add_output,
    add_training,
    check_parameters,
    check_plot,
    count,
    output_console,
    plain_table,
    say,
    silence_libraries,
    uncalibrated_plan,
)
from dpoptim.app.cli.plan import (
    COLUMNS,
    LEGEND,
    headline,
    mechanism_cells,
    mechanism_values,
    note_weak_delta,
    plan_line,
)
from dpoptim.app.models.loading import task_of_model
from dpoptim.app.progress import ProgressReporter
from dpoptim.integrations.losses import Task
from dpoptim.integrations.named_settings import CLIP_NORM, name_of_noise, name_of_sampling
from dpoptim.integrations.optional import require
from dpoptim.noise import NoiseMemory
from dpoptim.privacy import Adjacency
from dpoptim.privacy.format_epsilon import format_epsilon
from dpoptim.theory import Advice, Alternative, GradientSignal, advise, measure_signal

if TYPE_CHECKING:
    from argparse import Namespace

_PUBLIC = "note: you declare the examples of --probe PUBLIC: their gradients enter the advice without noise"
_PROBE_EXAMPLES, _MIN_PROBE_EXAMPLES = 256, 16
_ONLY_WITH_PROBE = ("text_column", "label_column", "probe_examples", "max_length", "from_scratch")
_TASKS = ", ".join(task.value for task in Task)
_PLACES = {
    "in": "in the window",
    "in if examples agree": "in the window if examples agree",
    "above": "above the window",
    "below": "below the window",
}
_CONSTANTS = {
    "scale_then_privatize": "eps_scale={}",
    "bias_correction": "rule=Adam(eps={})",
    "post_processing": "",
}
_DESCRIPTION = """\
Recommend the optimizer variant and the noise to train MODEL with at (epsilon, delta), and the command that does so.
--verbose explains why: the noise's variance against the squared gradient, how many second moments bias correction
would leave negative, the window of scale_then_privatize's eps_scale, and what the alternatives cost.

Clip norm and sampling default to those of `dpoptim train`. The length and spread of gradients are ASSUMED (0.27 clip
norms, spread evenly) unless --probe measures them on public examples. Which variant wins on your task is an empirical
question; --verbose lists the evidence.
"""

_EXAMPLES = """\
examples:
  dpoptim advise 4.4M --steps 2000 --batch-size 2048 --num-examples 1700000 --epsilon 10 --delta 1e-7
      a model of 4.4 million parameters, with assumed gradients
  dpoptim advise ./bert-tiny ... --sampling shuffled --plot advice.png
      counts the parameters from the folder's config.json; no amplification; draws a plot
  dpoptim advise ./bert-tiny ... --probe public.txt --task masked-lm
      measures gradients on PUBLIC texts, one per line
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a count of parameters (4.4M), a folder with config.json, or a Hugging Face name",
    )
    training = add_training(parser, sampling=Recipe.sampling)
    training.add_argument(
        "--clip-norm", type=float, default=CLIP_NORM, metavar="C", help="of one gradient (default: %(default)s)"
    )
    training.add_argument(
        "--betas", type=float, nargs=2, default=Recipe.betas, metavar=("B1", "B2"), help="of Adam (default: 0.9 0.999)"
    )
    add_noise_memory(parser.add_argument_group("noise"))
    probe = parser.add_argument_group("measured gradients")
    probe.add_argument(
        "--probe",
        metavar="DATA",
        help="PUBLIC examples: .txt, .jsonl, .csv, a folder or a dataset's name. They must be public: their gradients "
        "enter the advice without noise, and no guarantee covers them",
    )
    probe.add_argument(
        "--task",
        choices=[task.value for task in Task],
        metavar="TASK",
        help=f"what MODEL learns; --probe needs it: {_TASKS} (default: from MODEL's configuration)",
    )
    probe.add_argument("--text-column", metavar="NAME", help="column of --probe that holds the texts")
    probe.add_argument("--label-column", metavar="NAME", help="column of --probe that holds the labels")
    probe.add_argument(
        "--probe-examples", type=count, metavar="N", help=f"examples to measure (default: {_PROBE_EXAMPLES})"
    )
    probe.add_argument("--max-length", type=count, metavar="N", help="cut texts after this many tokens")
    probe.add_argument("--from-scratch", action="store_true", help="use new weights with MODEL's configuration")
    add_output(parser, verbose="also explain the advice: the numbers behind it, every mechanism, and the evidence")


def run(options: Namespace) -> int:
    """Print the advice as text or as JSON, and draw it if asked."""
    plan = uncalibrated_plan(options, clip_norm=options.clip_norm)
    number = typed_count(options.model)
    _check_probe(options, number=number)
    check_plot(options.plot)
    silence_libraries()
    console, signal, counted = Console(stderr=True), None, None
    with ProgressReporter(console) as progress:
        if number is not None:
            parameters = number
        elif options.probe is None:
            progress.stage(f"reading {options.model}")
            parameters, counted = model_size(options.model, task=None if options.task is None else Task(options.task))
        else:
            progress.message(_PUBLIC)
            progress.stage(f"reading {options.model} and {options.probe}")
            signal = _measure(options, progress=lambda n: progress.stage(f"gradients of {n} public examples"))
            parameters = signal.parameters
        check_parameters(parameters, "MODEL")
        advice = advise(
            plan,
            epsilon=options.epsilon,
            delta=options.delta,
            parameters=parameters,
            signal=signal,
            beta1=options.betas[0],
            beta2=options.betas[1],
            memory_budget=options.memory_budget,
            memory=NoiseMemory(bits=options.noise_bits),
            progress=lambda name: progress.stage(f"optimizing and calibrating {name}"),
        )
    train = train_line(advice, betas=tuple(options.betas), model=None if number is not None else options.model)
    if options.json:
        print(json.dumps({**as_json(advice, counted=counted), "train": train}, indent=2, allow_nan=False))
    else:
        _print_advice(advice, train=train, counted=counted, verbose=options.verbose)
    note_weak_delta(console, delta=options.delta, num_examples=options.num_examples)
    if options.plot is not None:
        from dpoptim.app.cli.plots import draw_advice

        draw_advice(advice, options.plot)
        say(console, f"wrote {options.plot}")
    return 0


def train_line(advice: Advice, *, betas: tuple[float, ...], model: str | None) -> str:
    """The `dpoptim train` command that follows the advice; DATA, and MODEL if it is None, are left open.

    `dpoptim train` derives eps and eps_scale from the plan in the same way, so they are left out.
    """
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
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return shlex.join(["dpoptim", "train", *words, *(["--betas", *map(str, betas)] if betas != Recipe.betas else [])])


def as_json(advice: Advice, *, counted: str | None = None) -> dict[str, Any]:
    """The advice as plain values.

    `snr` is the mean squared gradient over the noise's variance at the last step. `epsilon_at_chosen_error` is a
    mechanism's cost at the chosen one's rmse_mean (null: not computed).
    """
    plan, window = advice.plan, advice.window
    return {
        **_fields(advice, "epsilon", "delta"),
        **_fields(plan, "steps", "batch_size", "num_examples", "clip_norm", "noise_multiplier"),
        "parameters": advice.signal.parameters,
        "counted": counted,
        "mechanism": advice.choice.chosen.name,
        "mechanism_reason": advice.choice.reason,
        "sampling": repr(plan.sampling),
        "adjacency": plan.adjacency.value,
        **_fields(advice, "variant", "reason", "noise_variance", "snr", "signal_share", "scaled_share"),
        **_fields(advice, "negative_fraction", "many_negative", "notes"),
        "forecasts": [
            {
                **_fields(forecast, "step", "noise_variance"),
                "negative_bias_correction": forecast.bias_correction,
                "negative_independent_moments": forecast.independent_moments,
            }
            for forecast in advice.forecasts
        ],
        "signal": _fields(
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
                **_fields(row, "chosen", "accountant", "epsilon_at_chosen_error"),
                "adjacency": row.candidate.plan.adjacency.value,
            }
            for row in advice.alternatives
        ],
    }


def _fields(source: object, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _print_advice(advice: Advice, *, train: str, counted: str | None, verbose: bool) -> None:
    """Print the advice once all of it is made. Strings are code to be copied, so they are never wrapped."""
    console = output_console()
    parts = list(_answer(advice, train, counted, verbose=verbose))
    parts += _explanation(advice) if verbose else [Text("--verbose explains the advice and shows every mechanism.")]
    for part in parts:
        if isinstance(part, str):
            print(part)
        else:
            console.print(part, highlight=False)


def _answer(advice: Advice, train: str, counted: str | None, *, verbose: bool) -> Iterator[RenderableType]:
    plan = advice.plan
    source = "measured" if advice.signal.measured else "ASSUMED (--probe measures them)"
    yield Text(f"Use {advice.variant} with {advice.choice.chosen.name}:", style="bold green")
    yield f"  {train}"
    yield "or in Python:"
    yield f"  plan = {plan_line(plan, epsilon=advice.epsilon, delta=advice.delta)}"
    yield f"  optimizer = {_optimizer_line(advice)}"
    yield ""
    yield Text.assemble((advice.variant, "bold"), f": {advice.reason}.")
    yield Text.assemble(("noise", "bold"), f": {advice.choice.reason}.")
    yield Text(headline(plan, epsilon=advice.epsilon, delta=advice.delta))
    of = "" if counted is None else f" of {counted}"
    yield Text(f"{advice.signal.parameters:,} parameters{of}; clip norm {plan.clip_norm:g}; gradients {source}.\n")
    yield _to_try(advice, every_variant=verbose)


def _explanation(advice: Advice) -> Iterator[RenderableType]:
    yield ""
    yield _numbers(advice)
    yield ""
    yield _mechanisms(advice)
    yield Text(f"{LEGEND}\nepsilon*: the mechanism's cost at the chosen one's mean RMSE.\nAccountants:")
    for accountant in dict.fromkeys(row.accountant for row in advice.alternatives):
        plans = (row.candidate.plan for row in advice.alternatives if row.accountant == accountant)
        kinds = (type(plan.sampling).__name__ for plan in plans)
        yield Text(f"  {', '.join(dict.fromkeys(kinds))}: {accountant}")
    yield ""
    for note in advice.notes:
        yield Text(f"- {note}")


def _optimizer_line(advice: Advice) -> str:
    constant = advice.window.default if advice.variant == "scale_then_privatize" else advice.eps_to_try[1]
    shown = _CONSTANTS[advice.variant].format(f"{constant:.3g}")
    return f"{advice.variant}(model, plan, lr=...{', ' if shown else ''}{shown})"


def _numbers(advice: Advice) -> Table:
    plan, window, signal = advice.plan, advice.window, advice.signal
    rows = {
        "noise multiplier": f"{plan.noise_multiplier:.4f}, times column norm {plan.strategy.column_norm:.4g}",
        "noise variance phi": f"{advice.noise_variance:.3g} per coordinate of the averaged gradient (last step)",
        "squared gradient": f"{signal.mean * plan.clip_norm**2:.3g} per coordinate on average, {advice.snr:.3g} times "
        f"phi; norm {signal.norm:.3g} clip norms",
    }
    steps = sorted({1, max(1, plan.steps // 4), plan.steps})
    for name, kind in (("bias correction", "bias_correction"), ("IME", "independent_moments")):
        found = {f.step: getattr(f, kind) for f in advice.forecasts if f.step in steps}
        if None not in found.values():
            rows[f"negative by {name}"] = ", ".join(f"{value:.1%} at step {step:,}" for step, value in found.items())
    if signal.measured:
        rows["signal in an update"] = (
            f"{advice.signal_share:.3f} of it on average, at most {advice.scaled_share:.3f} where scaling evens it"
        )
    rows["window of eps_scale"] = (
        f"({window.low:.6g}, {window.high:.6g}] at clip norm {plan.clip_norm:g}, up to {window.likely_high:.6g} if "
        f"examples agree as little as {signal.agreement:.2g}"
    )
    rows["its default"] = f"{window.default:.4g}, {window.describe(window.default)}"
    table = plain_table(words=("", ""))
    table.show_header = False
    for row in rows.items():
        table.add_row(*row)
    return table


def _to_try(advice: Advice, *, every_variant: bool) -> Table:
    """Values of the settings of the advised variant, or of every variant."""
    table = plain_table(words=("to try", "for", "values"))
    window = advice.window
    marked = ", ".join(f"{value:.6g} ({_PLACES[window.place(value)]})" for value in window.to_try)
    if window.too_narrow:
        marked += "; the window is too narrow to hold a value that is clear of divergence"
    if every_variant or advice.variant == "scale_then_privatize":
        table.add_row("eps_scale", "scale_then_privatize", marked)
    if every_variant or advice.variant == "bias_correction":
        table.add_row("eps", "bias_correction, IME", f"{_listed(advice.eps_to_try)} (0.3, 1 and 3 times the noise)")
    source = "10, 50 and 90 % of the public norms; " if advice.signal.example_norms else ""
    table.add_row("clip_norm", "all", f"{_listed(advice.clip_norms_to_try)} ({source}eps_scale and eps in proportion)")
    return table


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def _mechanisms(advice: Advice) -> Table:
    table = plain_table(words=("mechanism", "sampling"), numbers=(*COLUMNS, "epsilon*"))
    for row in advice.alternatives:
        table.add_row(
            row.candidate.name,
            repr(row.candidate.plan.sampling),
            *mechanism_cells(row.candidate),
            _cost(row),
            style="bold green" if row.chosen else None,
        )
    return table


def _cost(row: Alternative) -> str:
    return "-" if row.epsilon_at_chosen_error is None else format_epsilon(row.epsilon_at_chosen_error)


def typed_count(model: str) -> int | None:
    """Return MODEL as a number, or None if it is a folder or a name.

    >>> typed_count("124M"), typed_count("gpt2")
    (124000000, None)
    """
    try:
        return count(model)
    except argparse.ArgumentTypeError:
        if re.match(r"[-+\d]", model) and "/" not in model and not Path(model).is_dir():
            raise ValueError(
                f"MODEL {model!r} is neither a number of parameters, such as 4.4M, nor an existing folder"
            ) from None
        return None


def model_size(model: str, *, task: Task | None = None) -> tuple[int, str]:
    """Count the trained parameters of a folder with config.json, a name on the hub, or a built-in model.

    Also returns the name of the class. It is built on the meta device, which needs no weights and no memory.

    >>> model_size("small-cnn")[1]
    'SmallCNN'
    """
    task = task_of_model(model) if task is None else task
    if task is Task.TABULAR_CLASSIFICATION:
        raise ValueError(f"MODEL {model!r}: its size depends on the columns of the data; give a number")
    with torch.device("meta"):
        made = load_model(task, model, num_labels=_labels(model, task), from_scratch=True)
    return sum(p.numel() for p in made.parameters() if p.requires_grad), type(made).__name__


def _labels(model: str, task: Task) -> int | None:
    """The number of labels in the configuration, if the task has labels."""
    if not task.is_classification:
        return None
    if model == "small-cnn" or (Path(model).is_dir() and not (Path(model) / "config.json").is_file()):
        return 2
    try:
        config = require("transformers", f"MODEL {model!r}").AutoConfig.from_pretrained(model)
    except OSError:
        return 2  # load_model reports what is wrong
    return max(2, int(config.num_labels))


def _check_probe(options: Namespace, *, number: int | None) -> None:
    """Check the options of --probe before anything slow; `number` is MODEL if it is a number."""
    if options.probe is None:
        unused = [name for name in _ONLY_WITH_PROBE if getattr(options, name) not in (None, False)]
        if unused:
            raise ValueError(f"--{unused[0].replace('_', '-')} needs --probe; leave it out, or give --probe")
        return
    if number is not None:
        raise ValueError(f"--probe needs a model, and MODEL {options.model!r} is a number; give a folder or a name")
    if options.task is None:
        raise ValueError(f"--probe needs --task, one of {_TASKS}")
    if options.probe_examples is not None and options.probe_examples < _MIN_PROBE_EXAMPLES:
        raise ValueError(f"--probe-examples {options.probe_examples} is too few; give {_MIN_PROBE_EXAMPLES} or more")


def _measure(options: Namespace, *, progress: Callable[[int], None]) -> GradientSignal:
    """Measure MODEL's gradients on the public records, in small batches and with dropout, as in training."""
    records = read_records(options.probe, text_column=options.text_column, label_column=options.label_column)
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(0))
    order = order[: options.probe_examples or _PROBE_EXAMPLES]
    if len(order) < _MIN_PROBE_EXAMPLES:
        raise ValueError(
            f"--probe {options.probe} has {len(order)} records; give {_MIN_PROBE_EXAMPLES} or more, better hundreds"
        )
    prepared = prepare(
        task=Task(options.task),
        model=options.model,
        records=records.take(order.tolist()),
        max_length=options.max_length,
        from_scratch=options.from_scratch,
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = prepared.model.to(device).train()
    dataset: Any = prepared.dataset

    def batches() -> Iterator[Any]:
        for step, part in enumerate(torch.arange(len(order)).split(8)):
            batch = prepared.collate([dataset[int(i)] for i in part])
            yield prepared.at_step({name: values.to(device) for name, values in batch.items()}, step)

    with torch.random.fork_rng(devices=[] if device.type == "cpu" else None):
        torch.default_generator.manual_seed(0)
        return measure_signal(
            model,
            prepared.loss_per_example,
            batches(),
            clip_norm=options.clip_norm,
            batch_size=options.batch_size,
            progress=progress,
        )
