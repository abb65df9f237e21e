"""`dpoptim plan`: every mechanism at one (ε, δ), side by side."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from dpoptim.cli.units import count, size
from dpoptim.noise import Banded, DecayedSums, Dense, NoiseMemory, PrefixSums, StrategySpec, Workload
from dpoptim.noise.dense import dense_seconds
from dpoptim.privacy import Adjacency, Poisson, PrivacyPlan, Shuffled
from dpoptim.theory import Candidate, Choice, choose_noise, format_bytes

if TYPE_CHECKING:
    from argparse import Namespace

_MOST_DENSE_SECONDS = 60.0

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
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    training = parser.add_argument_group("the training")
    training.add_argument("--steps", type=count, required=True, metavar="N", help="optimizer steps")
    training.add_argument("--batch-size", type=count, required=True, metavar="N", help="examples a step, expected")
    training.add_argument("--num-examples", type=count, required=True, metavar="N", help="examples in the dataset")
    training.add_argument("--epsilon", type=float, required=True, metavar="E")
    training.add_argument("--delta", type=float, required=True, metavar="D", help="1e-7, say: below 1/num-examples")
    training.add_argument(
        "--sampling",
        choices=["shuffled", "poisson"],
        default="shuffled",
        help="shuffled: no amplification (default); poisson: secret sampling, cyclic where noise is correlated",
    )
    training.add_argument(
        "--adjacency",
        choices=[kind.value for kind in Adjacency],
        default=Adjacency.ZERO_OUT.value,
        help="which datasets are neighbours (default: %(default)s)",
    )
    noise = parser.add_argument_group("the noise")
    noise.add_argument(
        "--parameters",
        type=count,
        default=4_400_000,
        metavar="N",
        help="trained parameters, for the memory (default: 4.4M, BERT-Tiny)",
    )
    noise.add_argument(
        "--memory-budget",
        type=size,
        metavar="SIZE",
        help="4GB, say; what the chosen mechanism may keep (default: 16 bytes a parameter, at least 4 GiB)",
    )
    noise.add_argument("--bits", type=int, choices=[32, 16], default=32, help="of a kept number (default: 32)")
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
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON and nothing else on standard output")
    output.add_argument("--plot", type=Path, metavar="FILE", help="draw it (.png, .svg or .pdf); needs matplotlib")
    parser.set_defaults(run=run)


def run(options: Namespace) -> int:
    """Print the comparison as a table or as JSON, and draw it where asked."""
    plan = PrivacyPlan(
        num_examples=options.num_examples,
        batch_size=options.batch_size,
        steps=options.steps,
        sampling=Poisson() if options.sampling == "poisson" else Shuffled(),
        adjacency=Adjacency(options.adjacency),
    )
    if options.plot is not None:
        if options.plot.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--plot {options.plot} must be a file name that ends in .png, .svg or .pdf")
        if not options.plot.parent.is_dir():
            raise ValueError(f"--plot {options.plot}: there is no folder {options.plot.parent}")
        from dpoptim.cli import plan_plot  # early, so that a missing matplotlib is told before the work
    console = Console(stderr=True)
    with console.status("...") as status:
        choice = choose_noise(
            plan,
            epsilon=options.epsilon,
            delta=options.delta,
            parameters=options.parameters,
            memory_budget=options.memory_budget,
            memory=NoiseMemory(bits=options.bits),
            workload=options.workload,
            more=_slow_mechanisms(plan, options.workload) if options.all else (),
            progress=lambda name: status.update(f"optimizing and calibrating {name} ..."),
        )
    if options.json:
        json.dump(as_json(choice, options.epsilon, options.delta), sys.stdout, indent=2)
        print()
    else:
        _print_table(choice, options)
    if options.delta > 1 / options.num_examples:
        console.print(f"note: delta = {options.delta:g} is above 1/num-examples, {1 / options.num_examples:.2g}: weak")
    if options.plot is not None:
        plan_plot.draw(choice, options.plot)
        console.print(f"wrote {options.plot}")
    return 0


def as_json(choice: Choice, epsilon: float, delta: float) -> dict[str, Any]:
    """The comparison as plain values.

    `noise_multiplier` is relative to one participation, and `sensitivity` is to one participation (the largest
    column norm), so that rmse_mean = noise_multiplier·sensitivity·mean error/batch size. `total_sensitivity`, where
    sampling does not amplify, is how far one neighbour moves the whole run: of all participations, and twice as much
    under replace adjacency.
    """
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
        "mechanisms": [_row(candidate, delta) for candidate in choice.candidates],
    }


def _row(candidate: Candidate, delta: float) -> dict[str, Any]:
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


def _print_table(choice: Choice, options: Namespace) -> None:
    console = Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=120)
    plan, independent = choice.plan, choice.independent
    sampling = "secret Poisson sampling (cyclic where noise is correlated)"
    if isinstance(plan.sampling, Shuffled):
        sampling = (
            f"shuffled (no amplification): {plan.max_participations} participations at least "
            f"{plan.min_separation:,} steps apart"
        )
    console.print(
        f"{plan.steps:,} steps of {plan.batch_size:,} from {plan.num_examples:,} examples; "
        f"epsilon = {options.epsilon:g} at delta = {options.delta:g}; {plan.adjacency.value} neighbours; {sampling}; "
        f"RMSE of {'prefix sums' if options.workload == PrefixSums() else options.workload}",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("mechanism", overflow="fold")
    for title in ("noise multiplier", "RMSE mean", "RMSE max", "to independent", "memory", "normals a step", "epsilon"):
        table.add_column(title, justify="right", overflow="fold")
    for candidate in choice.candidates:
        table.add_row(
            candidate.name,
            f"{candidate.plan.noise_multiplier:.4f}",
            f"{candidate.rmse_mean:.4g}",
            f"{candidate.rmse_max:.4g}",
            f"{candidate.rmse_mean / independent.rmse_mean:.4f}",
            "-" if candidate.memory_bytes == 0 else format_bytes(candidate.memory_bytes),
            f"{candidate.normal_rows:.0f}",
            _up(candidate.plan.epsilon(delta=options.delta)),
            style="bold green" if candidate is choice.chosen else None,
        )
    console.print(table)
    print(f"Use {choice.reason}:")
    adjacency = "" if plan.adjacency is Adjacency.ZERO_OUT else f"adjacency=Adjacency.{plan.adjacency.name}, "
    print(
        f"  PrivacyPlan(..., {adjacency}sampling={plan.sampling!r}, noise={plan.noise!r})"
        f".calibrate(epsilon={options.epsilon!r}, delta={options.delta!r})"
    )


def _up(epsilon: float) -> str:
    """To five digits, rounded up: never a smaller claim than the accountant's.

    >>> _up(9.99999), _up(1.23451e-5)
    ('10.0000', '1.2346e-05')
    """
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 4)
    rounded = math.ceil(epsilon / unit - 1e-7) * unit
    return f"{rounded:.4f}" if rounded >= 0.1 else f"{rounded:.4e}"


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
