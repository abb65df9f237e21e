"""`dpoptim audit`: is a guarantee contradicted by what is released, and is a run's folder what it says?"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dpoptim.app.cli.training_options import add_output, check_plot
from dpoptim.app.cli.training_text import wide_console
from dpoptim.app.cli.units import count
from dpoptim.app.recipes.recipe import VARIANTS
from dpoptim.privacy import Adjacency, PrivacyPlan
from dpoptim.privacy.format_epsilon import format_epsilon

if TYPE_CHECKING:
    from argparse import Namespace

    from dpoptim.app.audit import Check, PlanAudit

_DESCRIPTION = """\
Attack a guarantee. A whole training runs with the loader, clipping, noise and optimizer that train models, over a
dataset of canaries: examples whose gradients are as conspicuous as clipping allows, each in or out by a coin. From all
that is released the best attack guesses the coins, and the guesses prove how much epsilon was spent at the least. Noise
and clipping are measured besides. The exit status is 1 where the claim is contradicted or a check fails.

RUN is a folder of `dpoptim train`, whose files are checked too (epsilon accounted anew, statement, key, released steps,
log; no record is read), or a .json file with a plan (json.dumps(plan.to_dict())). Without it, the options make a plan.

A bound below the claim proves nothing more than that this attack found nothing; near the claim it shows that the
accounting leaves little out. At a small delta few canaries cannot reach epsilon, however good the attack is.
"""

_EXAMPLES = """\
examples:
  dpoptim audit runs/first --plot audit.png
  dpoptim audit --steps 200 --batch-size 256 --num-examples 20000 --epsilon 8 --delta 1e-6 --noise banded-toeplitz:16
  dpoptim audit plan.json --variant dp_sgd --canaries 100k --json
"""

_MARKS = {True: "ok    ", False: "FAILED", None: "-     "}
_SIZES = ("steps", "batch_size", "num_examples", "epsilon", "delta")
_MOST_EPSILON = 100.0  # beyond it accounting takes minutes, and nobody is protected
_OWN = ("noise", "sampling", "adjacency", "clip_norm")


def add_to(commands: Any) -> None:
    """Add the command to argparse's subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "audit",
        help="attack a guarantee with canaries, and check a run's folder",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.add_argument("run_or_plan", nargs="?", metavar="RUN", type=Path, help="a run directory, or a plan's .json")
    plan = parser.add_argument_group("a plan, where no RUN is given")
    plan.add_argument("--steps", type=count, metavar="N", help="optimizer steps")
    plan.add_argument("--batch-size", type=count, metavar="N", help="examples a step, expected")
    plan.add_argument("--num-examples", type=count, metavar="N", help="examples in the dataset")
    plan.add_argument("--epsilon", type=float, metavar="E")
    plan.add_argument("--delta", type=float, metavar="D")
    plan.add_argument("--noise", metavar="KIND", help="as in `dpoptim train` (default: independent)")
    plan.add_argument("--sampling", metavar="KIND", help="auto (default), poisson, shuffled, cyclic or cyclic:GROUPS")
    plan.add_argument("--adjacency", choices=[kind.value for kind in Adjacency], help="default: zero_out")
    plan.add_argument("--clip-norm", type=float, metavar="C", help="default: 1")
    game = parser.add_argument_group("the game")
    game.add_argument(
        "--variant",
        choices=VARIANTS,
        metavar="NAME",
        help=f"which optimizer trains: {', '.join(VARIANTS)} (default: the run's, else {VARIANTS[0]})",
    )
    game.add_argument("--canaries", type=count, default=10_000, metavar="N", help="more prove more (default: 10,000)")
    game.add_argument("--confidence", type=float, default=0.99, metavar="P", help="of the bounds (default: 0.99)")
    game.add_argument("--seed", type=int, default=0, help="of coins, draws and noise (default: 0)")
    game.add_argument("--files-only", action="store_true", help="check the run's files, and play no game")
    add_output(parser)
    parser.set_defaults(run=run)


def run(options: Namespace) -> int:
    """Audit, print, and draw where asked; 1 where something is wrong."""
    from dpoptim.app.audit import audit_plan, games_needed  # late, so that other commands start fast

    if options.plot is not None:
        check_plot(options.plot)
        if options.files_only:
            raise ValueError("--plot shows the game, and --files-only plays none; leave one of them out")
    plan, make_optimizer, variant, files = _what(options)
    found: PlanAudit | None = None
    if not options.files_only:
        with _progress(games_needed(plan, options.canaries) * plan.steps) as after_step:
            found = audit_plan(
                plan,
                make_optimizer,
                canaries=options.canaries,
                confidence=options.confidence,
                seed=options.seed,
                after_step=after_step,
            )
    if options.json:
        json.dump(_as_values(plan, variant, files, found), sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        _print(plan, variant, files, found)
    if options.plot is not None and found is not None:
        from dpoptim.app.cli.audit_plot import draw

        draw(found, options.plot)
        print(f"wrote {options.plot}", file=sys.stderr)
    return 0 if _passed(files, found) else 1


def _passed(files: list[Check], found: PlanAudit | None) -> bool:
    return all(check.passed is not False for check in files) and (found is None or found.passed)


def _what(options: Namespace) -> tuple[PrivacyPlan, Any, str, list[Check]]:
    """The plan, how its optimizer is made, the optimizer's name, and what the files of a run show."""
    from dpoptim.app.audit import audit_folder
    from dpoptim.app.recipes.plans import optimizer_of
    from dpoptim.integrations.named_settings import release_of

    given = [name for name in (*_SIZES, *_OWN) if getattr(options, name) is not None]
    path: Path | None = options.run_or_plan
    if path is not None and given:
        raise ValueError(f"--{given[0].replace('_', '-')} is for a plan of its own, and {path} has one; leave one out")
    if options.files_only and (path is None or path.is_file()):
        raise ValueError("--files-only checks the files of a run; give its folder")
    if path is not None and path.is_dir():
        plan, recipe, checks = audit_folder(path)
        if options.variant is None or options.variant == recipe.variant:
            return plan, functools.partial(optimizer_of, recipe), recipe.variant, checks
    else:
        plan, checks = _plan_of(options, path)
    variant = options.variant or "scale_then_privatize"
    return plan.with_release(release_of(variant)), _maker(variant), variant, checks


def _plan_of(options: Namespace, path: Path | None) -> tuple[PrivacyPlan, list[Check]]:
    from dpoptim.integrations.named_settings import make_plan

    if path is not None:
        return _read_plan(path)
    missing = [f"--{name.replace('_', '-')}" for name in _SIZES if getattr(options, name) is None]
    if missing:
        raise ValueError(f"give RUN, a folder of `dpoptim train`, or a plan: {', '.join(missing)} missing")
    if not 0 < options.epsilon <= _MOST_EPSILON:
        raise ValueError(f"--epsilon {options.epsilon:g} must lie above 0, and be {_MOST_EPSILON:g} at most")
    plan = make_plan(
        num_examples=options.num_examples,
        batch_size=options.batch_size,
        steps=options.steps,
        clip_norm=1.0 if options.clip_norm is None else options.clip_norm,
        sampling=options.sampling or "auto",
        noise=options.noise or "independent",
        adjacency=Adjacency(options.adjacency or Adjacency.ZERO_OUT.value),
        epsilon=options.epsilon,
        noise_multiplier=None,
        delta=options.delta,
        parameters=options.canaries,
    )
    return plan, []


def _read_plan(path: Path) -> tuple[PrivacyPlan, list[Check]]:
    """The plan in a file, and whether an epsilon that stands beside it is its own."""
    from dpoptim.app.audit import epsilon_check

    if not path.is_file():
        raise ValueError(f"RUN {path} is not there; give a folder of `dpoptim train`, or a .json file with a plan")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        plan = PrivacyPlan.from_dict(values.get("plan", values))
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(
            f"RUN {path} is no plan ({type(error).__name__}); write one with json.dumps(plan.to_dict())"
        ) from None
    claimed = values.get("epsilon")
    return plan, [epsilon_check(plan, claimed)] if isinstance(claimed, float) and plan.delta is not None else []


def _maker(variant: str) -> Any:
    from dpoptim.integrations.named_settings import make_optimizer

    own: dict[str, Any] = {"betas": (0.9, 0.999), "eps": None, "eps_scale": None, "weight_decay": 0.0}
    return functools.partial(make_optimizer, variant, learning_rate=1e-3, **own)


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal; elsewhere a line at each quarter."""
    console = Console(stderr=True)
    if console.is_terminal:
        from rich.progress import Progress

        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("steps over canaries", total=steps)
            yield lambda: bar.advance(task)
        return
    done = 0

    def count_one() -> None:
        nonlocal done
        done += 1
        if 4 * done // steps > 4 * (done - 1) // steps:
            print(f"{done:,} of {steps:,} steps over canaries", file=sys.stderr)

    yield count_one


def _as_values(plan: PrivacyPlan, variant: str, files: list[Check], found: PlanAudit | None) -> dict[str, Any]:
    return {
        "passed": _passed(files, found),
        "plan": plan.to_dict(),
        "variant": variant,
        "files": [check.as_values() for check in files],
        "game": None if found is None else found.as_values(),
    }


def _print(plan: PrivacyPlan, variant: str, files: list[Check], found: PlanAudit | None) -> None:
    console = wide_console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    say(
        f"{variant}, {plan.noise!r}, {plan.sampling!r}, {plan.adjacency.value} neighbours: epsilon = "
        f"{format_epsilon(plan.epsilon())} at delta = {plan.delta:g} over {plan.steps:,} steps"
    )
    for title, checks in (("Files", files), ("The game", [] if found is None else found.checks)):
        if not checks:
            continue
        if found is not None and checks is found.checks:
            times = "" if found.games == 1 else f" in {found.games} trainings"
            title += f": {found.canaries:,} canaries{times}, bounds hold with confidence {found.confidence:g}"
        say(f"\n{title}")
        for check in checks:
            say(f"  {_MARKS[check.passed]}  {check.name}: {check.found}")
    passed = [check.passed for check in (*files, *([] if found is None else found.checks))]
    end = f"{passed.count(False)} FAILED" if False in passed else "nothing contradicts the claim"
    say(f"\n{end}{f'; {passed.count(None)} not looked at' if None in passed else ''}")
