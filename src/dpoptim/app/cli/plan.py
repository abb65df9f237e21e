"""`dpoptim plan`: compare noise mechanisms at one (ε, δ)."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from rich.console import Console

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
    uncalibrated_plan,
)
from dpoptim.app.progress import ProgressReporter
from dpoptim.integrations.named_settings import name_of_noise, name_of_sampling, noise_words
from dpoptim.noise import NoiseMemory
from dpoptim.privacy import Adjacency, PrivacyPlan, Shuffled
from dpoptim.theory import Candidate, Choice, choose_noise, format_bytes

if TYPE_CHECKING:
    from argparse import Namespace

COLUMNS = ("noise multiplier", "RMSE mean", "RMSE max", "memory", "normals per step")
_ERROR_COLUMNS = 3  # the ratio to independent noise follows the first three columns

LEGEND = """\
RMSE: the error that noise leaves on prefix sums of averaged gradients at clip norm 1; lower is better.
normals per step: rows of random numbers, which decide how long the noise takes."""

_DESCRIPTION = """\
Compare mechanisms that could add a run's noise, all at the same (epsilon, delta), and recommend one. RMSE is the root
mean square error that the noise causes on prefix sums of averaged gradients for clip norm 1. It includes the noise
multiplier and the sensitivity, and is divided by the batch size.
"""

_EXAMPLES = """\
examples:
  dpoptim plan --steps 2000 --batch-size 2048 --num-examples 1700000 --epsilon 10 --delta 1e-7
      shuffled batches: no amplification, and the order need not be secret
  dpoptim plan ... --sampling poisson
      secret sampling: finds the number of bands that best balances correlation and amplification
  dpoptim plan ... --parameters 124M --memory-budget 2GB --plot plan.png
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = _DESCRIPTION
    parser.epilog = f"{_EXAMPLES}\nnoise for dpoptim train --noise NAME:\n  {', '.join(noise_words())}"
    add_training(parser, sampling="shuffled")
    noise = parser.add_argument_group("noise")
    noise.add_argument(
        "--parameters",
        type=count,
        default=4_400_000,
        metavar="N",
        help="trained parameters, which determine the memory (default: 4.4M, BERT-Tiny)",
    )
    add_noise_memory(noise)
    add_output(parser, verbose="show every mechanism")


def run(options: Namespace) -> int:
    """Print the comparison as a table or as JSON, and draw it if asked."""
    plan = uncalibrated_plan(options)
    check_parameters(options.parameters, "--parameters")
    check_plot(options.plot)
    console = Console(stderr=True)
    with ProgressReporter(console) as progress:
        choice = choose_noise(
            plan,
            epsilon=options.epsilon,
            delta=options.delta,
            parameters=options.parameters,
            memory_budget=options.memory_budget,
            memory=NoiseMemory(bits=options.noise_bits),
            progress=lambda name: progress.stage(f"optimizing and calibrating {name}"),
        )
    if options.json:
        print(json.dumps(as_json(choice, options.epsilon, options.delta), indent=2))
    else:
        _print_choice(choice, options)
    note_weak_delta(console, delta=options.delta, num_examples=options.num_examples)
    if options.plot is not None:
        from dpoptim.app.cli.plots import draw_plan

        draw_plan(choice, main_candidates(choice), options.plot)
        say(console, f"wrote {options.plot}")
    return 0


def as_json(choice: Choice, epsilon: float, delta: float) -> dict[str, Any]:
    """The comparison as plain values; see `mechanism_values` for the numbers of each mechanism."""
    return {
        "epsilon": epsilon,
        "delta": delta,
        "steps": choice.plan.steps,
        "batch_size": choice.plan.batch_size,
        "num_examples": choice.plan.num_examples,
        "adjacency": choice.plan.adjacency.value,
        "parameters": choice.chosen.parameters,
        "chosen": choice.chosen.name,
        "reason": choice.reason,
        "mechanisms": [mechanism_values(candidate, delta=delta) for candidate in choice.candidates],
    }


def main_candidates(choice: Choice) -> list[Candidate]:
    """At most ten mechanisms: independent noise, the chosen one, and the eight with the least error."""
    best = sorted(choice.candidates, key=lambda candidate: candidate.rmse_mean)[:8]
    wanted = (*best, choice.chosen, choice.independent)
    return [one for one in choice.candidates if any(one is other for other in wanted)]


def _print_choice(choice: Choice, options: Namespace) -> None:
    plan, independent = choice.plan, choice.independent
    shown = choice.candidates if options.verbose else main_candidates(choice)
    first, rest = COLUMNS[:_ERROR_COLUMNS], COLUMNS[_ERROR_COLUMNS:]
    table = plain_table(words=("mechanism",), numbers=(*first, "ratio to independent", *rest))
    for candidate in shown:
        cells = mechanism_cells(candidate)
        table.add_row(
            candidate.name,
            *cells[:_ERROR_COLUMNS],
            f"{candidate.rmse_mean / independent.rmse_mean:.4f}",
            *cells[_ERROR_COLUMNS:],
            style="bold green" if candidate is choice.chosen else None,
        )
    console = output_console()
    console.print(f"Use {choice.reason}.", highlight=False, markup=False)
    print(f"  {plan_line(plan, epsilon=options.epsilon, delta=options.delta)}")  # to be copied: never wrapped
    print(f"  or: dpoptim train ... --sampling {name_of_sampling(plan.sampling)} --noise {name_of_noise(plan.noise)}\n")
    console.print(headline(plan, epsilon=options.epsilon, delta=options.delta), highlight=False, markup=False)
    console.print(table)
    print(LEGEND)
    if len(shown) < len(choice.candidates):
        print(f"{len(shown)} of {len(choice.candidates)} mechanisms are shown; --verbose shows all.")


def mechanism_values(candidate: Candidate, *, delta: float) -> dict[str, Any]:
    """The mechanism as plain values.

    rmse_mean = noise_multiplier·sensitivity·mean error/batch size, with the sensitivity of one participation.
    `total_sensitivity`, given where sampling does not amplify, is how far one neighbour moves the whole run.
    """
    plan, strategy = candidate.plan, candidate.plan.strategy
    total = None
    if isinstance(plan.sampling, Shuffled):
        total = plan.adjacency.sensitivity_factor * plan.sensitivity_ratio(strategy) * strategy.column_norm
    return {
        "name": candidate.name,
        "sampling": repr(plan.sampling),
        "noise_multiplier": plan.noise_multiplier,
        "sensitivity": strategy.column_norm,
        "total_sensitivity": total,
        "rmse_mean": candidate.rmse_mean,
        "rmse_max": candidate.rmse_max,
        "memory_bytes": candidate.memory_bytes,
        "normal_rows": candidate.normal_rows,
        "epsilon": plan.epsilon(delta=delta),
    }


def mechanism_cells(candidate: Candidate) -> list[str]:
    """The mechanism's cells under COLUMNS."""
    return [
        f"{candidate.plan.noise_multiplier:.4f}",
        f"{candidate.rmse_mean:.4g}",
        f"{candidate.rmse_max:.4g}",
        "-" if candidate.memory_bytes == 0 else format_bytes(candidate.memory_bytes),
        f"{candidate.normal_rows:.0f}",
    ]


def headline(plan: PrivacyPlan, *, epsilon: float, delta: float) -> str:
    """The guarantee and the training in two lines."""
    sampling = "Secret Poisson sampling, in cycles if the noise is correlated."
    if isinstance(plan.sampling, Shuffled):
        sampling = (
            f"Shuffled batches, without amplification: {plan.max_participations} participations at least "
            f"{plan.min_separation:,} steps apart."
        )
    return (
        f"epsilon = {epsilon:g} at delta = {delta:g}, {plan.adjacency.value.replace('_', '-')} adjacency; "
        f"{plan.steps:,} steps of {plan.batch_size:,} from {plan.num_examples:,} examples.\n{sampling}"
    )


def plan_line(plan: PrivacyPlan, *, epsilon: float, delta: float) -> str:
    """Python code for the plan, with all digits; its sizes are left out."""
    clip_norm = "" if plan.clip_norm == 1 else f"clip_norm={plan.clip_norm!r}, "
    adjacency = "" if plan.adjacency is Adjacency.ZERO_OUT else f"adjacency=Adjacency.{plan.adjacency.name}, "
    return (
        f"PrivacyPlan(..., {clip_norm}{adjacency}sampling={plan.sampling!r}, noise={plan.noise!r})"
        f".calibrate(epsilon={epsilon!r}, delta={delta!r})"
    )


def note_weak_delta(console: Console, *, delta: float, num_examples: int) -> None:
    """Warn if delta allows publishing a whole example."""
    if delta > 1 / num_examples:
        say(console, f"note: delta = {delta:g} is weak: it is above 1/num-examples, {1 / num_examples:.2g}")
