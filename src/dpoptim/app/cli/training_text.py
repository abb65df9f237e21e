"""What every command that plans a training says about it: in which words, how wide, with how many digits."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from dpoptim.app.recipes.recipe import Recipe
from dpoptim.integrations.named_settings import name_of_noise, name_of_sampling
from dpoptim.privacy import Adjacency, PrivacyPlan, Shuffled


def wide_console() -> Console:
    """Standard output, 120 columns wide where it is no terminal."""
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=120)


@contextmanager
def progress_on(console: Console) -> Iterator[Callable[[str], None]]:
    """A function that says what is being done: one line that changes on a terminal, else a line for each."""
    if not console.is_terminal:
        yield lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)
        return
    with console.status("...") as status:
        yield status.update


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


def train_line(
    plan: PrivacyPlan, *, epsilon: float, delta: float, variant: str, betas: tuple[float, float], model: str | None
) -> str:
    """What to type to train by the plan and variant; MODEL, where it is None, and DATA are left open.

    Constants that `dpoptim train` makes from the plan in the same way (eps, eps_scale) are left to it.
    """
    flags: dict[str, Any] = {
        "model": model or "MODEL",
        "data": "DATA",
        "epsilon": epsilon,
        "delta": delta,
        "steps": plan.steps,
        "batch-size": plan.batch_size,
        "clip-norm": plan.clip_norm,
        "sampling": name_of_sampling(plan.sampling),
        "noise": name_of_noise(plan.noise),
        "variant": variant,
    }
    if plan.adjacency is not Adjacency.ZERO_OUT:
        flags["adjacency"] = plan.adjacency.value
    if plan.adjacency is Adjacency.ADD_REMOVE:
        flags["num-examples"] = plan.num_examples
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return shlex.join(["dpoptim", "train", *words, *(["--betas", *map(str, betas)] if betas != Recipe.betas else [])])


def note_weak_delta(console: Console, *, delta: float, num_examples: int) -> None:
    """Say so where delta would let one example in full go free."""
    if delta > 1 / num_examples:
        console.print(f"note: delta = {delta:g} is above 1/num-examples, {1 / num_examples:.2g}: weak")
