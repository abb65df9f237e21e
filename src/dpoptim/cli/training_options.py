"""What every command that plans a training asks for, and says about it."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from dpoptim.cli.units import count, size
from dpoptim.privacy import Adjacency, Poisson, PrivacyPlan, Shuffled

if TYPE_CHECKING:
    from argparse import Namespace


def add_training(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add steps, sizes, (epsilon, delta), sampling and adjacency."""
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
    return training


def add_noise_memory(group: argparse._ArgumentGroup) -> None:
    """Add what correlated noise may keep between steps."""
    group.add_argument(
        "--memory-budget",
        type=size,
        metavar="SIZE",
        help="4GB, say; what the chosen mechanism may keep (default: 16 bytes a parameter, at least 4 GiB)",
    )
    group.add_argument("--bits", type=int, choices=[32, 16], default=32, help="of a kept number (default: 32)")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add --json and --plot."""
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON and nothing else on standard output")
    output.add_argument("--plot", type=Path, metavar="FILE", help="draw it (.png, .svg or .pdf); needs matplotlib")


def plan_of(options: Namespace, *, clip_norm: float = 1.0) -> PrivacyPlan:
    """The plan that the options describe, not calibrated."""
    return PrivacyPlan(
        num_examples=options.num_examples,
        batch_size=options.batch_size,
        steps=options.steps,
        clip_norm=clip_norm,
        sampling=Poisson() if options.sampling == "poisson" else Shuffled(),
        adjacency=Adjacency(options.adjacency),
    )


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be written, before the work."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {path} must be a file name that ends in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}")


def wide_console() -> Console:
    """Standard output, 120 columns wide where it is no terminal."""
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=120)


def headline(plan: PrivacyPlan, *, epsilon: float, delta: float) -> str:
    """The training and its guarantee, in a line."""
    sampling = "secret Poisson sampling (cyclic where noise is correlated)"
    if isinstance(plan.sampling, Shuffled):
        sampling = (
            f"shuffled (no amplification): {plan.max_participations} participations at least "
            f"{plan.min_separation:,} steps apart"
        )
    return (
        f"{plan.steps:,} steps of {plan.batch_size:,} from {plan.num_examples:,} examples; "
        f"epsilon = {epsilon:g} at delta = {delta:g}; {plan.adjacency.value} neighbours; {sampling}"
    )


def plan_line(plan: PrivacyPlan, *, epsilon: float, delta: float) -> str:
    """What to type to get the plan, with all digits, and all that is not a default but its sizes."""
    clip_norm = "" if plan.clip_norm == 1 else f"clip_norm={plan.clip_norm!r}, "
    adjacency = "" if plan.adjacency is Adjacency.ZERO_OUT else f"adjacency=Adjacency.{plan.adjacency.name}, "
    return (
        f"PrivacyPlan(..., {clip_norm}{adjacency}sampling={plan.sampling!r}, noise={plan.noise!r})"
        f".calibrate(epsilon={epsilon!r}, delta={delta!r})"
    )


def note_weak_delta(console: Console, options: Namespace) -> None:
    """Say so where delta would let one example in full go free."""
    if options.delta > 1 / options.num_examples:
        console.print(f"note: delta = {options.delta:g} is above 1/num-examples, {1 / options.num_examples:.2g}: weak")


def rounded_up(epsilon: float) -> str:
    """To five digits, rounded up: never a smaller claim than the accountant's.

    >>> rounded_up(9.99999), rounded_up(1.23451e-5), rounded_up(math.inf)
    ('10.0000', '1.2346e-05', 'inf')
    """
    if math.isinf(epsilon):
        return "inf"
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 4)
    rounded = math.ceil(epsilon / unit - 1e-7) * unit
    return f"{rounded:.4f}" if rounded >= 0.1 else f"{rounded:.4e}"
