"""`dpoptim advise`: which variant and which noise to train with, why, and which constants to try."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dpoptim.app import Recipe
from dpoptim.app.cli import advise_plot, advise_probe, advise_table, mechanism_rows
from dpoptim.app.cli.model_size import ModelSize, model_size, typed_count
from dpoptim.app.cli.quiet import silence_libraries
from dpoptim.app.cli.training_options import (
    add_noise_memory,
    add_output,
    add_training,
    check_parameters,
    check_plot,
    uncalibrated_plan,
)
from dpoptim.app.cli.training_text import note_weak_delta, progress_on, train_line
from dpoptim.integrations.losses import Task
from dpoptim.integrations.named_settings import CLIP_NORM
from dpoptim.noise import NoiseMemory
from dpoptim.theory import Advice, Alternative, advise

if TYPE_CHECKING:
    from argparse import Namespace

_DESCRIPTION = """\
Say which optimizer variant and which noise to train MODEL with at (epsilon, delta), and why: noise multiplier, the
noise's variance against the squared gradient, how many second moments bias correction would leave negative, the window
of scale_then_privatize's eps_scale, which constants to try, and what the alternatives would cost.

Clip norm and sampling are those of `dpoptim train` unless given, and the command that follows the advice is printed.
How long and how evenly spread gradients are is ASSUMED (.27 clip norms, evenly) unless --probe measures it on public
examples. Which variant wins on a task is an empirical matter; the advice says what it rests on.
"""

_EXAMPLES = """\
examples:
  dpoptim advise 4.4M --steps 2000 --batch-size 2048 --num-examples 1700000 --epsilon 10 --delta 1e-7
      a model of 4.4 million parameters, gradients as assumed
  dpoptim advise ./bert-tiny ... --sampling shuffled --plot advice.png
      parameters counted from the folder's config.json; no amplification; a picture
  dpoptim advise ./bert-tiny ... --probe public.txt --task masked-lm
      gradients measured on PUBLIC texts, one a line
"""


def add_to(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "advise",
        help="say which variant, noise and constants to train with, and why",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="trained parameters (4.4M), a folder with config.json, or a Hugging Face name"
    )
    training = add_training(parser, sampling=Recipe.sampling)
    training.add_argument(
        "--clip-norm", type=float, default=CLIP_NORM, metavar="C", help="of a gradient (default: %(default)s)"
    )
    training.add_argument("--beta1", type=float, default=0.9, metavar="B", help="of Adam (default: 0.9)")
    training.add_argument("--beta2", type=float, default=0.999, metavar="B", help="of Adam (default: 0.999)")
    add_noise_memory(parser.add_argument_group("the noise"))
    advise_probe.add_options(parser)
    add_output(parser)
    parser.set_defaults(run=run)


def run(options: Namespace) -> int:
    """Print the advice as tables or as JSON, and draw it where asked."""
    plan = uncalibrated_plan(options, clip_norm=options.clip_norm)
    number = typed_count(options.model)
    advise_probe.check_options(options, number=number)
    if options.plot is not None:
        check_plot(options.plot)
    silence_libraries()
    console, signal = Console(stderr=True), None
    with progress_on(console) as tell:
        if number is not None:
            size = ModelSize(parameters=number)
        elif options.probe is None:
            tell(f"reading {options.model} ...")
            size = model_size(options.model, task=None if options.task is None else Task(options.task))
        else:
            console.print(advise_probe.PUBLIC, highlight=False, soft_wrap=True)
            tell(f"reading {options.model} and {options.probe} ...")
            signal = advise_probe.measured(options, progress=lambda n: tell(f"gradients of {n} public examples ..."))
            size = ModelSize(parameters=signal.parameters)
        check_parameters(size.parameters, "MODEL")
        advice = advise(
            plan,
            epsilon=options.epsilon,
            delta=options.delta,
            parameters=size.parameters,
            signal=signal,
            beta1=options.beta1,
            beta2=options.beta2,
            memory_budget=options.memory_budget,
            memory=NoiseMemory(bits=options.bits),
            progress=lambda name: tell(f"optimizing and calibrating {name} ..."),
        )
    train = train_line(
        advice.plan,
        epsilon=options.epsilon,
        delta=options.delta,
        variant=advice.variant,
        betas=(options.beta1, options.beta2),
        model=None if number is not None else options.model,
    )
    if options.json:
        json.dump({**as_json(advice, counted=size.counted), "train": train}, sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        advise_table.print_advice(advice, train=train, counted=size.counted)
    note_weak_delta(console, delta=options.delta, num_examples=options.num_examples)
    if options.plot is not None:
        advise_plot.draw(advice, options.plot)
        console.print(f"wrote {options.plot}")
    return 0


def as_json(advice: Advice, *, counted: str | None = None) -> dict[str, Any]:
    """The advice as plain values.

    Variances, eps and clip norms are in gradient units; `snr` is the mean squared gradient over the noise's variance
    at the last step. In `signal`, `squares` are in units of the squared clip norm, `weights` shares of the coordinates.
    In `mechanisms`, rmse is of prefix sums of averaged gradients, for clip norm 1, `epsilon` is at the calibrated noise
    and `epsilon_at_chosen_error` what the mechanism would cost at the chosen one's rmse_mean (null: not computed).
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
        "mechanisms": [_row(row, advice.delta) for row in advice.alternatives],
    }


def _fields(source: object, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _row(row: Alternative, delta: float) -> dict[str, Any]:
    return {
        **mechanism_rows.as_values(row.candidate, delta=delta),
        **_fields(row, "chosen", "accountant", "epsilon_at_chosen_error"),
        "adjacency": row.adjacency.value,
    }
