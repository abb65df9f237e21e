"""`dpoptim advise`: which variant and which noise to train with, why, and which constants to try."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from dpoptim.cli import advise_table
from dpoptim.cli.model_size import is_number, parameter_count
from dpoptim.cli.training_options import (
    add_noise_memory,
    add_output,
    add_training,
    check_plot,
    note_weak_delta,
    plan_of,
)
from dpoptim.cli.units import count
from dpoptim.noise import NoiseMemory
from dpoptim.theory import Advice, Alternative, GradientSignal, advise, measure_signal

if TYPE_CHECKING:
    from argparse import Namespace

_TASKS = ("masked-lm", "causal-lm", "text-classification", "image-classification", "tabular-classification")

_DESCRIPTION = """\
Say which optimizer variant and which noise to train MODEL with at (epsilon, delta), and why: noise multiplier, the
noise's variance against the squared gradient, how many second moments bias correction would leave negative, the window
of scale_then_privatize's eps_scale, which constants to try, and what the alternatives would cost.

How long and how evenly spread gradients are is ASSUMED (.27 clip norms, evenly) unless --probe measures it on public
examples. Which variant wins on a task is an empirical matter; the advice says what it rests on.
"""

_EXAMPLES = """\
examples:
  dpoptim advise 4.4M --steps 2000 --batch-size 2048 --num-examples 1700000 --epsilon 10 --delta 1e-7
      a model of 4.4 million parameters, gradients as assumed
  dpoptim advise ./bert-tiny ... --sampling poisson --plot advice.png
      parameters counted from the folder's config.json; secret sampling; a picture
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
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="trained parameters (4.4M), a folder with config.json, or a Hugging Face name"
    )
    training = add_training(parser)
    training.add_argument("--clip-norm", type=float, default=1.0, metavar="C", help="of a gradient (default: 1)")
    training.add_argument("--beta1", type=float, default=0.9, metavar="B", help="of Adam (default: 0.9)")
    training.add_argument("--beta2", type=float, default=0.999, metavar="B", help="of Adam (default: 0.999)")
    add_noise_memory(parser.add_argument_group("the noise"))
    probe = parser.add_argument_group("measured gradients")
    probe.add_argument(
        "--probe",
        metavar="DATA",
        help="PUBLIC examples: .txt, .jsonl, .csv, a folder or a dataset's name. They must be public: their gradients "
        "enter the advice without noise, and no guarantee covers them",
    )
    probe.add_argument("--task", choices=_TASKS, help="what MODEL learns; needed with --probe")
    probe.add_argument("--text-column", metavar="NAME", help="of --probe, where the texts are")
    probe.add_argument("--label-column", metavar="NAME", help="of --probe, where the labels are")
    probe.add_argument("--probe-examples", type=count, default=256, metavar="N", help="how many (default: 256)")
    probe.add_argument("--max-length", type=count, metavar="N", help="tokens a text is cut at")
    probe.add_argument("--from-scratch", action="store_true", help="new weights, of MODEL's configuration")
    add_output(parser)
    parser.set_defaults(run=run)


def run(options: Namespace) -> int:
    """Print the advice as tables or as JSON, and draw it where asked."""
    plan = plan_of(options, clip_norm=options.clip_norm)
    if not 0 < options.epsilon < math.inf:
        raise ValueError(f"--epsilon {options.epsilon:g} must be a finite number above 0")
    if options.plot is not None:
        check_plot(options.plot)
        from dpoptim.cli import advise_plot  # early, so that a missing matplotlib is told before the work
    console = Console(stderr=True)
    with console.status("...") as status:
        signal = None
        if options.probe is not None:
            signal = _probed(options, progress=lambda done: status.update(f"gradients of {done} public examples ..."))
        status.update(f"reading {options.model} ...")
        advice = advise(
            plan,
            epsilon=options.epsilon,
            delta=options.delta,
            parameters=parameter_count(options.model) if signal is None else signal.parameters,
            signal=signal,
            beta1=options.beta1,
            beta2=options.beta2,
            memory_budget=options.memory_budget,
            memory=NoiseMemory(bits=options.bits),
            progress=lambda name: status.update(f"optimizing and calibrating {name} ..."),
        )
    if options.json:
        json.dump(as_json(advice), sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        advise_table.print_advice(advice)
    note_weak_delta(console, options)
    if options.plot is not None:
        advise_plot.draw(advice, options.plot)
        console.print(f"wrote {options.plot}")
    return 0


def _probed(options: Namespace, *, progress: Any) -> GradientSignal:
    """The signal of MODEL on the public records, in small batches, as in training (dropout included)."""
    from dpoptim.training import Task, prepare, read_records  # late: transformers takes seconds to import

    if is_number(options.model):
        raise ValueError(f"--probe needs a model, and MODEL {options.model!r} is a number; give a folder or a name")
    if options.task is None:
        raise ValueError(f"--probe needs --task, one of {', '.join(_TASKS)}")
    if options.probe_examples < 16:
        raise ValueError(f"--probe-examples {options.probe_examples} is too few to measure anything; give 16 or more")
    records = read_records(options.probe, text_column=options.text_column, label_column=options.label_column)
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(0))[: options.probe_examples]
    if len(order) < 16:
        raise ValueError(f"--probe {options.probe} has {len(order)} records; give 16 or more, better a few hundred")
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

    def batches() -> Any:
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


def as_json(advice: Advice) -> dict[str, Any]:
    """The advice as plain values.

    Variances, eps and clip norms are in gradient units; `snr` is the mean squared gradient over the noise's variance
    at the last step. In `signal`, `squares` are in units of the squared clip norm, `weights` shares of the coordinates.
    In `mechanisms`, rmse is of prefix sums of averaged gradients, for clip norm 1, `epsilon` is at the calibrated noise
    and `epsilon_at_chosen_error` what the mechanism would cost at the chosen one's rmse_mean (null: not computed).
    """
    plan, window = advice.plan, advice.window
    return {
        "epsilon": advice.epsilon,
        "delta": advice.delta,
        "steps": plan.steps,
        "batch_size": plan.batch_size,
        "num_examples": plan.num_examples,
        "clip_norm": plan.clip_norm,
        "parameters": advice.signal.parameters,
        "variant": advice.variant,
        "reason": advice.reason,
        "mechanism": advice.choice.chosen.name,
        "mechanism_reason": advice.choice.reason,
        "sampling": repr(plan.sampling),
        "adjacency": plan.adjacency.value,
        "noise_multiplier": plan.noise_multiplier,
        "noise_variance": advice.noise_variance,
        "snr": advice.snr,
        "signal_share": advice.signal_share,
        "scaled_share": advice.scaled_share,
        "negative_fraction": advice.negative_fraction,
        "many_negative": advice.many_negative,
        "forecasts": [
            {
                "step": forecast.step,
                "noise_variance": forecast.noise_variance,
                "negative_bias_correction": forecast.bias_correction,
                "negative_independent_moments": forecast.independent_moments,
            }
            for forecast in advice.forecasts
        ],
        "signal": {
            "measured": advice.signal.measured,
            "examples": advice.signal.examples,
            "norm": advice.signal.norm,
            "agreement": advice.signal.agreement,
            "example_norms": advice.signal.example_norms,
            "squares": advice.signal.squares,
            "weights": advice.signal.weights,
        },
        "window": {
            "eps_scale": [window.low, window.high],
            "eps_scale_likely_high": window.likely_high,
            "clip_norm_over_eps_scale": window.clip_norms,
            "default": window.default,
            "default_is": window.fate(window.default).value,
        },
        "try": {
            "eps_scale": window.to_try,
            "eps": advice.eps_to_try,
            "clip_norm": advice.clip_norms_to_try,
        },
        "mechanisms": [_row(row, advice.delta) for row in advice.alternatives],
        "notes": advice.notes,
    }


def _row(row: Alternative, delta: float) -> dict[str, Any]:
    candidate = row.candidate
    return {
        "name": row.name,
        "chosen": row.chosen,
        "sampling": row.sampling,
        "adjacency": row.adjacency.value,
        "accountant": row.accountant,
        "noise_multiplier": candidate.plan.noise_multiplier,
        "rmse_mean": candidate.rmse_mean,
        "rmse_max": candidate.rmse_max,
        "memory_bytes": candidate.memory_bytes,
        "normal_rows": candidate.normal_rows,
        "epsilon": candidate.plan.epsilon(delta=delta),
        "epsilon_at_chosen_error": row.epsilon_at_chosen_error,
    }
