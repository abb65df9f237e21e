"""`dpoptim plan`: every mechanism at one (ε, δ), side by side."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dpoptim.app.cli import mechanism_rows, plan_plot
from dpoptim.app.cli.training_options import (
    add_noise_memory,
    add_output,
    add_training,
    check_parameters,
    check_plot,
    uncalibrated_plan,
)
from dpoptim.app.cli.training_text import headline, note_weak_delta, plan_line, progress_on, wide_console
from dpoptim.app.cli.units import count
from dpoptim.integrations.named_settings import noise_words
from dpoptim.noise import Banded, DecayedSums, Dense, NoiseMemory, PrefixSums, StrategySpec, Workload
from dpoptim.noise.search.dense import dense_seconds
from dpoptim.privacy import PrivacyPlan, Shuffled
from dpoptim.theory import Choice, choose_noise

if TYPE_CHECKING:
    from argparse import Namespace

_MOST_DENSE_SECONDS = 60.0
_ERRORS = 3  # columns up to those of the errors, behind which their ratio stands

_DESCRIPTION = """\
Compare the mechanisms that a training could add its noise by, all at the same (epsilon, delta), and say which one to
use. RMSE is the root mean square error of the noise on the prefix sums of averaged gradients (or on another
workload), for clip norm 1: it includes the noise multiplier and the sensitivity, and is divided by the batch size.
"""

_EXAMPLES = """\
examples:
  dpoptim plan --steps 2000 --batch-size 2048 --num-examples 1700000 --epsilon 10 --delta 1e-7
      no amplification: batches come from a shuffled order, and nothing about them need be secret
  dpoptim plan ... --sampling poisson
      secret sampling: finds the number of bands that is best between correlation and amplification
  dpoptim plan ... --parameters 124M --memory-budget 2GB --plot plan.png
"""


def add_to(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="compare mechanisms at one (epsilon, delta), and choose one",
        description=_DESCRIPTION,
        epilog=f"{_EXAMPLES}\nwhat to train with, by dpoptim train ... --noise N:\n  {', '.join(noise_words())}",
    )
    add_training(parser, sampling="shuffled")
    noise = parser.add_argument_group("the noise")
    noise.add_argument(
        "--parameters",
        type=count,
        default=4_400_000,
        metavar="N",
        help="trained parameters, for the memory (default: 4.4M, BERT-Tiny)",
    )
    add_noise_memory(noise)
    noise.add_argument(
        "--workload",
        type=_workload,
        default=PrefixSums(),
        metavar="W",
        help="what the error is measured on: prefix (default), momentum:BETA, or moments:BETA2 for Adam's averages",
    )
    noise.add_argument(
        "--all",
        action="store_true",
        help="also Banded and, where it takes less than a minute or so, Dense; without amplification only",
    )
    add_output(parser)
    parser.set_defaults(run=run)


def run(options: Namespace) -> int:
    """Print the comparison as a table or as JSON, and draw it where asked."""
    plan = uncalibrated_plan(options)
    check_parameters(options.parameters, "--parameters")
    if options.plot is not None:
        check_plot(options.plot)
    console = Console(stderr=True)
    with progress_on(console) as tell:
        choice = choose_noise(
            plan,
            epsilon=options.epsilon,
            delta=options.delta,
            parameters=options.parameters,
            memory_budget=options.memory_budget,
            memory=NoiseMemory(bits=options.bits),
            workload=options.workload,
            more=_slow_mechanisms(plan, options.workload) if options.all else (),
            progress=lambda name: tell(f"optimizing and calibrating {name} ..."),
        )
    if options.json:
        json.dump(as_json(choice, options.epsilon, options.delta), sys.stdout, indent=2)
        print()
    else:
        _print_table(choice, options)
    note_weak_delta(console, delta=options.delta, num_examples=options.num_examples)
    if options.plot is not None:
        plan_plot.draw(choice, options.plot)
        console.print(f"wrote {options.plot}")
    return 0


def as_json(choice: Choice, epsilon: float, delta: float) -> dict[str, Any]:
    """The comparison as plain values; `mechanism_rows.as_values` says what the numbers of a mechanism are."""
    return {
        "epsilon": epsilon,
        "delta": delta,
        "steps": choice.plan.steps,
        "batch_size": choice.plan.batch_size,
        "num_examples": choice.plan.num_examples,
        "adjacency": choice.plan.adjacency.value,
        "workload": repr(choice.chosen.workload),
        "parameters": choice.chosen.parameters,
        "chosen": choice.chosen.name,
        "reason": choice.reason,
        "mechanisms": [mechanism_rows.as_values(candidate, delta=delta) for candidate in choice.candidates],
    }


def _print_table(choice: Choice, options: Namespace) -> None:
    console, plan, independent = wide_console(), choice.plan, choice.independent
    told = headline(plan, epsilon=options.epsilon, delta=options.delta)
    workload = "prefix sums" if options.workload == PrefixSums() else options.workload
    first, rest = mechanism_rows.COLUMNS[:_ERRORS], mechanism_rows.COLUMNS[_ERRORS:]
    table = mechanism_rows.plain_table(words=("mechanism",), numbers=(*first, "to independent", *rest))
    for candidate in choice.candidates:
        cells = mechanism_rows.as_cells(candidate, delta=options.delta)
        table.add_row(
            candidate.name,
            *cells[:_ERRORS],
            f"{candidate.rmse_mean / independent.rmse_mean:.4f}",
            *cells[_ERRORS:],
            style="bold green" if candidate is choice.chosen else None,
        )
    console.print(f"{told}; RMSE of {workload}", highlight=False)
    console.print(table)
    print(f"Use {choice.reason}:")
    print(f"  {plan_line(plan, epsilon=options.epsilon, delta=options.delta)}")


def _slow_mechanisms(plan: PrivacyPlan, workload: Workload) -> list[StrategySpec]:
    if not isinstance(plan.sampling, Shuffled):
        return []
    kinds: list[StrategySpec] = [Banded(bands=min(128, plan.min_separation, plan.steps), workload=workload)]
    quick = dense_seconds(plan.steps, plan.max_participations) <= _MOST_DENSE_SECONDS
    return [*kinds, Dense(workload=workload)] if quick else kinds


def _workload(text: str) -> Workload:
    kind, _, value = text.partition(":")
    try:
        if kind == "prefix" and not value:
            return PrefixSums()
        if kind in ("momentum", "moments") and not value:
            raise ValueError(f"{kind} needs a number behind it, as in {kind}:0.9")
        if kind == "momentum":
            return PrefixSums(momentum=float(value))
        if kind == "moments":
            return DecayedSums(beta=float(value))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    raise argparse.ArgumentTypeError(f"{text!r} is not prefix, momentum:BETA or moments:BETA2")
