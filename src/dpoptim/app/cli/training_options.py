"""What every command that plans a training asks for, and refuses."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from dpoptim.app.cli.units import count, size
from dpoptim.app.plot_style import check_matplotlib
from dpoptim.privacy import Adjacency, Poisson, PrivacyPlan, Shuffled

if TYPE_CHECKING:
    from argparse import Namespace

MOST_PARAMETERS = 10**13
_CLIP_NORMS = (1e-9, 1e9)


def add_training(parser: argparse.ArgumentParser, *, sampling: str) -> argparse._ArgumentGroup:
    """Add steps, sizes, (epsilon, delta), sampling and adjacency; `sampling` is the default."""
    training = parser.add_argument_group("the training")
    training.add_argument("--steps", type=count, required=True, metavar="N", help="optimizer steps")
    training.add_argument("--batch-size", type=count, required=True, metavar="N", help="examples a step, expected")
    training.add_argument("--num-examples", type=count, required=True, metavar="N", help="examples trained on")
    training.add_argument("--epsilon", type=float, required=True, metavar="E")
    training.add_argument("--delta", type=float, required=True, metavar="D", help="1e-7, say: below 1/num-examples")
    training.add_argument(
        "--sampling",
        choices=["auto", "poisson", "shuffled"],
        default=sampling,
        help="auto and poisson: secret sampling, cyclic where noise is correlated; shuffled: no amplification "
        "(default: %(default)s)",
    )
    training.add_argument(
        "--adjacency",
        type=lambda text: text.replace("-", "_"),
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


def uncalibrated_plan(options: Namespace, *, clip_norm: float = 1.0) -> PrivacyPlan:
    """The plan that the options describe, not calibrated; (epsilon, delta) is checked beside it."""
    plan = PrivacyPlan(
        num_examples=options.num_examples,
        batch_size=options.batch_size,
        steps=options.steps,
        clip_norm=clip_norm,
        sampling=Shuffled() if options.sampling == "shuffled" else Poisson(),
        adjacency=Adjacency(options.adjacency),
    )
    if not 0 < options.epsilon < math.inf:
        raise ValueError(f"epsilon={options.epsilon!r} must be a finite number above 0")
    if not 0 < options.delta < 1:
        raise ValueError(f"--delta {options.delta:g} must lie strictly between 0 and 1")
    if not _CLIP_NORMS[0] <= clip_norm <= _CLIP_NORMS[1]:
        low, high = _CLIP_NORMS
        raise ValueError(f"--clip-norm {clip_norm:g} must lie between {low:g} and {high:g}, in units of a gradient")
    return plan


def check_parameters(parameters: int, name: str) -> None:
    """Refuse what no model has; `name` is the option."""
    if not 1 <= parameters <= MOST_PARAMETERS:
        raise ValueError(f"{name} {parameters:,} must be at least one parameter, and at most {MOST_PARAMETERS:,}")


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be made or written, before the work."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {path} must be a file name that ends in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}")
    check_matplotlib("--plot needs")
