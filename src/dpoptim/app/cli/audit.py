"""Attack a privacy guarantee, and check a run's files.

Each game is a complete training run on canaries: examples whose gradients are as conspicuous as clipping allows. A coin
flip decides whether a canary is in the data. The best attack guesses the coins from everything released, which proves a
lower bound on the epsilon spent. Batches, clipping and noise are checked too. The exit status is 1 if the claim is
contradicted or a check fails. A bound below the claim only means that this attack found nothing.

RUN is a folder of `dpoptim train`, whose files are checked too, or a .json file with a plan
(json.dumps(plan.to_dict())). Without RUN, the options define a plan. With --recipe, each game also trains the recipe's
model on its records. To attack your own training loop, use dpoptim.app.audit.audit_loop in Python.

examples:
  dpoptim audit runs/first --plot audit.png
  dpoptim audit --steps 200 --batch-size 256 --num-examples 20000 --epsilon 8 --delta 1e-6 --noise banded-toeplitz:16
  dpoptim audit plan.json --variant dp_sgd --canaries 100k --json
  dpoptim audit --recipe recipe.toml --games 2
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from dpoptim.app.audit import (
    Check,
    PlanAudit,
    Training,
    audit_folder,
    audit_plan,
    default_canaries,
    epsilon_check,
    games_needed,
)
from dpoptim.app.audit.plan_audit import LEAST_GAMES
from dpoptim.app.audit.statistics import TradeOff
from dpoptim.app.cli import options as shared
from dpoptim.app.plot_style import BLUE, GREY, ORANGE, RED, SKY, new_figure
from dpoptim.app.recipes.defaults import optimizer_of, plan_of
from dpoptim.app.recipes.recipe import VARIANTS, Recipe, read_recipe
from dpoptim.arguments import check_number
from dpoptim.integrations.named_settings import make_optimizer, release_of
from dpoptim.privacy import PrivacyPlan
from dpoptim.privacy.statement import format_epsilon

_MARKS = {True: "ok    ", False: "FAILED", None: "-     "}
_REQUIRED = ("steps", "batch_size", "num_examples", "epsilon", "delta")
_MAX_EPSILON = 100.0  # above it accounting takes minutes, and the guarantee means nothing
_OPTIONAL = ("noise", "sampling", "adjacency", "clip_norm", "records_per_user")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_or_plan", nargs="?", metavar="RUN", type=Path, help="a run directory, or a .json file with a plan"
    )
    parser.add_argument("--recipe", metavar="FILE", help="a recipe of `dpoptim train`: also train its model")
    plan = shared.add_training(parser, required=False, title="plan, if no RUN is given")
    plan.add_argument("--noise", metavar="KIND", help="as in `dpoptim train` (default: independent)")
    plan.add_argument("--sampling", metavar="KIND", help="shuffled (default), auto, poisson, cyclic or cyclic:GROUPS")
    plan.add_argument("--clip-norm", type=float, metavar="C", help="bound on one gradient (default: 1)")
    game = parser.add_argument_group("game")
    variants = f"{', '.join(VARIANTS)} (default: the run's, or {VARIANTS[0]})"
    shared.add_setting(game, "--variant", help=variants)
    game.add_argument(
        "--canaries",
        type=shared.count,
        metavar="N",
        help="more give a tighter bound (default: 10,000 per game, if they fit)",
    )
    game.add_argument("--games", type=int, default=LEAST_GAMES, metavar="N", help="fewest games to play (default: 10)")
    game.add_argument(
        "--confidence", type=float, default=0.99, metavar="P", help="confidence of the bounds (default: 0.99)"
    )
    game.add_argument("--seed", type=int, default=0, help="seed of coins, batches and noise (default: 0)")
    game.add_argument("--files-only", action="store_true", help="check the run's files and skip the game")
    shared.add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Audit, print, and draw if asked; return 1 if something is wrong."""
    shared.check_plot(options.plot)
    if options.plot is not None and options.files_only:
        raise ValueError("--plot draws the game, which --files-only skips; leave one of them out")
    training: Training | None = None
    if options.recipe is None:
        plan, make, variant, files = _target(options)
    else:
        plan, make, variant, training = _training_of(options)
        files = []
    sizes: dict[str, Any] = {"least": options.games, "beside": training is not None}
    canaries = default_canaries(plan, **sizes) if options.canaries is None else options.canaries
    found: PlanAudit | None = None
    if not options.files_only:
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            steps = bar.add_task("steps over canaries", total=games_needed(plan, canaries, **sizes) * plan.steps)
            found = audit_plan(
                plan,
                make,
                canaries=canaries,
                confidence=options.confidence,
                seed=options.seed,
                games=options.games,
                training=training,
                after_step=lambda: bar.advance(steps),
            )
    if plan.allow_mixing is not None:
        files.append(Check(name="examples do not mix", passed=None, found=f"not covered: {plan.allow_mixing}"))
    passed = all(check.passed is not False for check in files) and (found is None or found.passed)
    if options.json:
        values = {
            "passed": passed,
            "plan": plan.to_dict(),
            "variant": variant,
            "files": [dataclasses.asdict(check) for check in files],
            "game": None if found is None else found.as_values(),
        }
        print(json.dumps(values, indent=2, allow_nan=False))
    else:
        _print(plan, variant, files, found)
    if found is not None:
        shared.draw(options, functools.partial(draw_audit, found))
    return 0 if passed else 1


def _target(options: argparse.Namespace) -> tuple[PrivacyPlan, Any, str, list[Check]]:
    """The plan, a function that makes its optimizer, the variant's name, and the checks of a run's files."""
    path: Path | None = options.run_or_plan
    given = [name for name in (*_REQUIRED, *_OPTIONAL) if getattr(options, name) is not None]
    if path is not None and given:
        raise ValueError(f"--{given[0].replace('_', '-')} and RUN {path} both define a plan; leave one out")
    if options.files_only and (path is None or path.is_file()):
        raise ValueError("--files-only checks the files of a run; give its folder")
    if path is not None and path.is_dir():
        plan, recipe, checks = audit_folder(path)
        if options.variant is None or options.variant == recipe.variant:
            return plan, functools.partial(optimizer_of, recipe), recipe.variant, checks
    elif path is not None:
        plan, checks = _read_plan(path)
    else:
        plan, checks = _plan_of(options), []
        plan = plan.with_release(release_of(options.variant or VARIANTS[0]))
    variant = options.variant or next((name for name in VARIANTS if type(release_of(name)) is type(plan.release)), "")
    if not variant or type(release_of(variant)) is not type(plan.release):
        of_variant = f"but --variant {variant} releases {release_of(variant)}" if variant else "which no variant does"
        raise ValueError(f"the plan releases {plan.release}, {of_variant}")
    own: dict[str, Any] = {"betas": (0.9, 0.999), "eps": None, "eps_scale": None, "weight_decay": 0.0}
    make = functools.partial(make_optimizer, variant, learning_rate=1e-3, **own)
    return plan, make, variant, checks


def _training_of(options: argparse.Namespace) -> tuple[PrivacyPlan, Any, str, Training]:
    """The plan, optimizer and variant of a recipe, and its model with loss and records."""
    given = [name for name in (*_REQUIRED, *_OPTIONAL) if getattr(options, name) is not None]
    if given or options.run_or_plan is not None or options.files_only:
        other = f"--{given[0].replace('_', '-')}" if given else "--files-only" if options.files_only else "RUN"
        raise ValueError(f"--recipe and {other} cannot be used together; leave one out")
    shared.silence_libraries()
    from dpoptim.app.runs.setup import prepare_run

    setup = prepare_run(read_recipe(options.recipe, **shared.fields(options, "variant")), estimate_columns=False)
    recipe, prepared = setup.recipe, setup.prepared

    def loss(model: Any, batch: Any) -> Any:
        with setup.precision():
            return prepared.loss_per_example(model, prepared.at_step(batch, 0))

    tokens = recipe.micro_batch_tokens
    training = Training(
        model=setup.model,
        loss=loss,
        dataset=prepared.dataset,
        collate_fn=prepared.collated,
        users=prepared.records.users,
        micro_batch_size=recipe.micro_batch_size or max(1, (tokens or 1) // (prepared.max_length or 1)),
    )
    return setup.plan, functools.partial(optimizer_of, recipe), recipe.variant, training


def _plan_of(options: argparse.Namespace) -> PrivacyPlan:
    missing = [f"--{name.replace('_', '-')}" for name in _REQUIRED if getattr(options, name) is None]
    if missing:
        raise ValueError(f"give RUN, a folder of `dpoptim train`, or a plan: {', '.join(missing)} missing")
    check_number("--epsilon", options.epsilon, above=0, high=_MAX_EPSILON)
    asked = shared.fields(options, *_REQUIRED, *_OPTIONAL)
    given = {name: value for name, value in asked.items() if value is not None}
    given |= {"user_column": "audit"} if "records_per_user" in given else {}
    recipe = Recipe(model="audit", data="audit", **{"noise": "independent", "clip_norm": 1.0, **given})
    return plan_of(recipe, parameters=options.canaries or 10_000)


def _read_plan(path: Path) -> tuple[PrivacyPlan, list[Check]]:
    """The plan in a file, and a check of the epsilon that is written beside it, if there is one."""
    if not path.is_file():
        raise ValueError(f"RUN {path} does not exist; give a folder of `dpoptim train` or a .json file with a plan")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        plan = PrivacyPlan.from_dict(values.get("plan", values))
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"RUN {path} is not a plan ({type(error).__name__}); write one with json.dumps(plan.to_dict())"
        ) from None
    if not plan.is_private:
        raise ValueError(f"RUN {path}: the plan makes no guarantee (no noise, or a square without noise)")
    if "plan" not in values or "epsilon" not in values or plan.delta is None:
        return plan, []
    claimed = values["epsilon"]
    if isinstance(claimed, bool) or not isinstance(claimed, int | float):
        raise ValueError(f"RUN {path}: epsilon={claimed!r} must be a number, or be left out")
    return plan, [epsilon_check(plan, claimed)]


def _print(plan: PrivacyPlan, variant: str, files: list[Check], found: PlanAudit | None) -> None:
    parts = {"Plan and files": files}
    if found is not None:
        times = "" if found.games == 1 else f" in {found.games} trainings"
        title = f"Game: {found.canaries:,} canaries{times}, bounds hold with confidence {found.confidence:g}"
        parts[title] = list(found.checks)
    results = [check.passed for checks in parts.values() for check in checks]
    failed, skipped = results.count(False), results.count(None)
    verdict = f"{failed} FAILED" if failed else "nothing contradicts the claim"
    print(f"{verdict}{f'; {skipped} not checked' if skipped else ''}")
    adjacency = plan.adjacency.value.replace("_", "-") + " adjacency" + " of users" * (plan.unit == "user")
    print(
        f"{variant}, {plan.noise!r}, {plan.sampling!r}, {adjacency}: epsilon = {format_epsilon(plan.epsilon())} at "
        f"delta = {plan.delta:g} over {plan.steps:,} steps"
    )
    for title, checks in parts.items():
        if checks:
            print(f"\n{title}")
        for check in checks:
            print(f"  {_MARKS[check.passed]}  {check.name}: {check.found}")


def draw_audit(found: PlanAudit) -> Any:
    """Draw the scores of canaries that were in and out, and the attack's errors against what the claim allows."""
    figure = new_figure(11, 4.6)
    histogram, errors = figure.subplots(1, 2)
    inside, outside = found.scores[found.included], found.scores[~found.included]
    edges = np.histogram_bin_edges(found.scores, bins=60)
    histogram.hist(outside, edges, color=ORANGE, alpha=0.6, label="out")
    histogram.hist(inside, edges, color=BLUE, alpha=0.6, label="in")
    histogram.set(xlabel="score: log likelihood ratio of in against out", ylabel="canaries")
    histogram.set_title(f"{found.canaries:,} canaries, each in or out by a coin flip")
    histogram.legend()

    thresholds = np.sort(found.scores)
    missed = np.searchsorted(np.sort(inside), thresholds, side="right") / len(inside)
    wrong = 1.0 - np.searchsorted(np.sort(outside), thresholds, side="right") / len(outside)
    seen = (missed > 0) & (wrong > 0)
    errors.plot(wrong[seen], missed[seen], color=SKY, linewidth=4, label="the attack, measured")
    least = 0.3 / len(inside)
    grid = np.geomspace(least, 1.0, 400)
    one_pair = TradeOff(epsilons=np.array([found.epsilon]), deltas=np.array([found.delta]))
    for curve, colour, style, label in (
        (found.allowed, RED, "-", "the least that the plan allows, at any δ"),
        (one_pair, GREY, "--", f"what ε = {format_epsilon(found.epsilon)}, δ = {found.delta:g} alone allows"),
    ):
        allowed = curve.least_missed(grid)
        kept = allowed > least
        errors.plot(grid[kept], allowed[kept], color=colour, linestyle=style, label=label)
    errors.set(xscale="log", yscale="log", xlim=(least, 1.5), ylim=(least, 1.5))
    errors.set(xlabel="false positives: out, classified as in", ylabel="false negatives: in, classified as out")
    errors.set_title("errors below the red line would contradict the claim")
    errors.legend(loc="lower left")
    errors.grid(alpha=0.3, which="both")
    return figure
