"""The audit of a run's folder: is what it says about its privacy true of the files that lie there?"""

from __future__ import annotations

import base64
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpoptim.audit.check import Check
from dpoptim.noise import NoiseKey
from dpoptim.privacy import PrivacyPlan
from dpoptim.privacy.released_steps import released_count, released_settings
from dpoptim.privacy.shown import rounded_up
from dpoptim.training.recipes.recipe import Recipe, read_recipe
from dpoptim.training.runs.identity import plan_values
from dpoptim.training.runs.run_directory import RunDirectory
from dpoptim.training.runs.run_log import log_lines

_PIECE = 1 << 24  # bytes of a file that are searched at a time


def audit_folder(folder: Path) -> tuple[PrivacyPlan, Recipe, list[Check]]:
    """The run's plan and recipe, and what was found about its files.

    Edge cases: one ValueError line where there is no run, or its plan cannot be read. Without the noise key (a run that
    was handed on) the steps file is not verified, and the check says so.
    """
    run = RunDirectory(folder)
    if not run.plan_file.is_file() or not run.recipe_file.is_file():
        raise ValueError(f"RUN {folder} is no run directory (plan.json or recipe.toml is missing); check the path")
    recipe = read_recipe(run.recipe_file)
    try:
        plan, claimed = run.read_plan(), _claimed(run)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{run.plan_file} is no plan of a run ({type(error).__name__})") from None
    checks = [_epsilon(plan, claimed), _second_opinion(plan), _asked(recipe, plan), _statement(run, plan)]
    key = None
    if run.key_file.is_file():
        key_check, key = _key(run)
        checks.append(key_check)
    checks += [_steps(run, plan, key), _log(run, claimed)]
    return plan, recipe, checks


def _claimed(run: RunDirectory) -> float:
    value = json.loads(run.plan_file.read_text(encoding="utf-8"))["epsilon"]
    return math.inf if value is None or value == "inf" else float(value)


def _epsilon(plan: PrivacyPlan, claimed: float) -> Check:
    now = plan.epsilon()
    return Check(
        name="epsilon follows from the plan",
        passed=now <= claimed * (1 + 1e-9),
        found=f"plan.json claims {rounded_up(claimed)} at delta = {plan.delta:g}; accounted anew {rounded_up(now)}",
    )


def _second_opinion(plan: PrivacyPlan) -> Check:
    looser = plan.rdp_epsilon()
    name = "a second accountant agrees"
    if looser is None:
        return Check(name=name, passed=True, found="there is none for this sampling and adjacency")
    found = f"an upper bound by Rényi divergences is {rounded_up(looser)}"
    return Check(name=name, passed=looser >= plan.epsilon() * (1 - 1e-6), found=found)


def _asked(recipe: Recipe, plan: PrivacyPlan) -> Check:
    sizes = [name for name in ("num_examples", "batch_size", "steps", "delta") if _differs(recipe, plan, name)]
    epsilon = plan.epsilon()
    over = recipe.epsilon is not None and epsilon > recipe.epsilon * (1 + 1e-9)
    found = "sizes and epsilon are those of recipe.toml"
    if sizes:
        found = f"{', '.join(sizes)} of plan.json and recipe.toml differ"
    elif over:
        found = f"recipe.toml asks for epsilon = {recipe.epsilon:g} and the plan spends {rounded_up(epsilon)}"
    return Check(name="the plan is the recipe's", passed=not sizes and not over, found=found)


def _differs(recipe: Recipe, plan: PrivacyPlan, name: str) -> bool:
    return getattr(recipe, name) not in (None, getattr(plan, name))


def _statement(run: RunDirectory, plan: PrivacyPlan) -> Check:
    name = "statement.txt is the plan's"
    if not run.statement_file.is_file():
        return Check(name=name, passed=False, found="statement.txt is missing")
    same = run.statement_file.read_text(encoding="utf-8").strip() == plan.statement().strip()
    return Check(name=name, passed=same, found="word for word" if same else "it says something else than the plan does")


def _key(run: RunDirectory) -> tuple[Check, NoiseKey | None]:
    name = "the noise key is kept"
    mode = stat.S_IMODE(run.key_file.stat().st_mode)
    if os.name == "posix" and mode & 0o077:
        found = f"noise.key has mode {mode:04o}: others may read it, and take the noise off; chmod 600"
        return Check(name=name, passed=False, found=found), None
    secret = run.key_file.read_bytes()
    found_in = [file for file in _files(run) if file != run.key_file and _holds(file, secret)]
    if found_in:
        where = ", ".join(str(file.relative_to(run.path)) for file in found_in[:3])
        return Check(name=name, passed=False, found=f"its bytes lie in {where} too"), None
    return Check(name=name, passed=True, found="mode 0600, and in no other file of the run"), NoiseKey.load(
        run.key_file
    )


def _files(run: RunDirectory) -> Iterator[Path]:
    return (file for file in sorted(run.path.rglob("*")) if file.is_file() and not file.is_symlink())


def _holds(file: Path, secret: bytes) -> bool:
    """Whether the secret occurs in the file: as bytes, hexadecimal or base64."""
    forms = (secret, secret.hex().encode(), secret.hex().upper().encode(), base64.b64encode(secret).rstrip(b"="))
    longest = max(map(len, forms))
    with file.open("rb") as opened:
        tail = b""
        while piece := opened.read(_PIECE):
            if any(form in tail + piece for form in forms):
                return True
            tail = piece[-longest:]
    return False


def _steps(run: RunDirectory, plan: PrivacyPlan, key: NoiseKey | None) -> Check:
    name = "released steps are counted"
    try:
        count = released_count(run.steps_file)
        settings = {} if key is None else released_settings(run.steps_file, key)
    except (ValueError, FileNotFoundError) as error:
        said = f"{run.steps_file.name} is missing" if isinstance(error, FileNotFoundError) else str(error)
        return Check(name=name, passed=False, found=said)
    if count > plan.steps:
        return Check(name=name, passed=False, found=f"{count:,} were released and the plan covers {plan.steps:,}")
    if key is None:
        return Check(name=name, passed=True, found=f"{count:,} of {plan.steps:,}; not verified, since no key is here")
    if settings.get("plan") != _plain(plan_values(plan)):
        return Check(name=name, passed=False, found="the steps were released under another plan than plan.json's")
    return Check(name=name, passed=True, found=f"{count:,} of {plan.steps:,}, under this plan, as the key vouches")


def _plain(values: dict[str, Any]) -> Any:
    return json.loads(json.dumps(values))


def _log(run: RunDirectory, claimed: float) -> Check:
    name = "the log tells released values alone"
    if not run.log_file.is_file():
        return Check(name=name, passed=True, found="there is no log")
    entries = [line.entry for line in log_lines(run.log_file) if line.entry is not None]
    private = [entry for entry in entries if "not_private" in entry]
    if private:
        found = f"{len(private):,} lines hold values that are not private (the run was made with debug): keep it secret"
        return Check(name=name, passed=False, found=found)
    spent = max((entry["epsilon"] for entry in entries if isinstance(entry.get("epsilon"), float)), default=0.0)
    if spent > claimed * (1 + 1e-9):
        return Check(name=name, passed=False, found=f"it has epsilon = {rounded_up(spent)}, which is above the claim")
    return Check(name=name, passed=True, found=f"{len(entries):,} lines; epsilon up to {rounded_up(spent)}")
