"""The audit of a run's files: do plan, statement, key, released steps and log agree?"""

from __future__ import annotations

import base64
import json
import math
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpoptim.app.audit.checks import Check
from dpoptim.app.recipes.recipe import Recipe, read_recipe
from dpoptim.app.runs.run_directory import RunDirectory
from dpoptim.app.runs.run_log import log_lines
from dpoptim.integrations.named_settings import noise_of, sampling_of
from dpoptim.noise import NoiseKey
from dpoptim.privacy import PrivacyPlan
from dpoptim.privacy.format_epsilon import format_epsilon
from dpoptim.privacy.step_ledger import read_ledger


def audit_folder(folder: Path) -> tuple[PrivacyPlan, Recipe, list[Check]]:
    """Check a run's files, without reading any record; return its plan, its recipe and the checks."""
    run = RunDirectory(folder)
    if not run.plan_file.is_file() or not run.recipe_file.is_file():
        raise ValueError(
            f"RUN {folder} is not a run directory of `dpoptim train` (plan.json or recipe.toml is missing). Check the "
            "path, or give a file with json.dumps(plan.to_dict())"
        )
    recipe = read_recipe(run.recipe_file)
    try:
        plan, claimed = run.read_plan(), _claimed(run)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{run.plan_file} is not the plan of a run ({type(error).__name__}); restore the original"
        ) from None
    key_check, key = _key(run)
    checks = [
        epsilon_check(plan, claimed),
        _second_opinion(plan),
        _asked(recipe, plan),
        _statement(run, plan),
        key_check,
        _steps(run, plan, key),
        _log(run, recipe, claimed),
    ]
    return plan, recipe, checks


def _claimed(run: RunDirectory) -> float:
    value = json.loads(run.plan_file.read_text(encoding="utf-8"))["epsilon"]
    return math.inf if value is None or value == "inf" else float(value)


def epsilon_check(plan: PrivacyPlan, claimed: float) -> Check:
    """Check that the plan spends no more than is claimed."""
    now = plan.epsilon()
    return Check(
        name="epsilon follows from the plan",
        passed=now <= claimed * (1 + 1e-9),
        found=f"claimed {format_epsilon(claimed)} at delta = {plan.delta:g}; recomputed {format_epsilon(now)}",
    )


def _second_opinion(plan: PrivacyPlan) -> Check:
    bound = plan.rdp_epsilon()
    name = "a second accountant agrees"
    if bound is None:
        return Check(name=name, passed=True, found="none supports this sampling and adjacency")
    found = f"an upper bound by Rényi divergences is {format_epsilon(bound)}"
    return Check(name=name, passed=bound >= plan.epsilon() * (1 - 1e-6), found=found)


_SETTINGS = ("num_examples", "batch_size", "steps", "delta", "clip_norm", "adjacency", "noise", "sampling")


def _asked(recipe: Recipe, plan: PrivacyPlan) -> Check:
    words = {"adjacency": plan.adjacency.value, "noise": repr(plan.noise), "sampling": repr(plan.sampling)}
    asked = {name: getattr(recipe, name) for name in _SETTINGS}
    if recipe.noise != "auto":
        asked["noise"] = repr(noise_of(recipe.noise))
    if recipe.sampling != "auto":
        asked["sampling"] = repr(sampling_of(recipe.sampling, plan.noise))
    differ = [
        name
        for name, value in asked.items()
        if value not in (None, "auto", words[name] if name in words else getattr(plan, name))
    ]
    epsilon = plan.epsilon()
    over = recipe.epsilon is not None and epsilon > recipe.epsilon * (1 + 1e-9)
    found = "sizes, clip norm, sampling, noise and epsilon match recipe.toml"
    if differ:
        found = f"{', '.join(differ)} of plan.json and recipe.toml differ"
    elif over:
        found = f"recipe.toml asks for epsilon = {recipe.epsilon:g}, but the plan spends {format_epsilon(epsilon)}"
    return Check(name="the plan matches the recipe", passed=not differ and not over, found=found)


def _statement(run: RunDirectory, plan: PrivacyPlan) -> Check:
    name = "the statement matches the plan"
    if not run.statement_file.is_file():
        return Check(name=name, passed=False, found="statement.txt is missing; write it again with plan.statement()")
    written = run.statement_file.read_text(encoding="utf-8").strip().splitlines()
    own = plan.statement().strip().splitlines()
    differs = "statement.txt differs: it was edited, or a different version of dpoptim wrote it"
    return Check(name=name, passed=written == own, found="word for word" if written == own else differs)


def _key(run: RunDirectory) -> tuple[Check, NoiseKey | None]:
    name = "the noise key is safe"
    if not run.key_file.is_file():
        return Check(name=name, passed=None, found="noise.key is missing"), None
    secret, mode = run.key_file.read_bytes(), stat.S_IMODE(run.key_file.stat().st_mode)
    try:
        key = NoiseKey.from_bytes(secret)
    except ValueError as error:
        return Check(name=name, passed=False, found=f"noise.key: {error}"), None
    found_in = [file for file in _files(run) if _holds(file, secret)]
    wrong = []
    if os.name == "posix" and mode & 0o077:
        wrong.append(f"noise.key has mode {mode:04o}: others can read it and remove the noise; chmod 600")
    if found_in:
        wrong.append(f"its bytes are in {', '.join(str(file.relative_to(run.path)) for file in found_in[:3])}")
    found = "; ".join(wrong) or "mode 0600, and in no file of the run directory"
    return Check(name=name, passed=not wrong, found=found), key


def _files(run: RunDirectory) -> Iterator[Path]:
    return (file for file in sorted(run.path.rglob("*")) if file.is_file() and not file.is_symlink())


def _holds(file: Path, secret: bytes) -> bool:
    """Whether the file contains the secret as bytes, hexadecimal or base64."""
    forms = (secret, secret.hex().encode(), secret.hex().upper().encode(), base64.b64encode(secret).rstrip(b"="))
    if not file.stat().st_size:
        return False  # an empty file cannot be mapped
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as contents:
        return any(contents.find(form) >= 0 for form in forms)


def _steps(run: RunDirectory, plan: PrivacyPlan, key: NoiseKey | None) -> Check:
    name = "released steps are counted"
    try:
        header, count = read_ledger(run.steps_file)
    except FileNotFoundError:  # a run that was handed on has neither key nor ledger
        return Check(name=name, passed=None if key is None else False, found=f"{run.steps_file.name} is missing")
    except ValueError as error:
        return Check(name=name, passed=False, found=str(error))
    if count > plan.steps:
        return Check(name=name, passed=False, found=f"{count:,} were released and the plan covers {plan.steps:,}")
    logged = max((step for entry in _entries(run) if isinstance(step := entry.get("step"), int)), default=0)
    if logged > count:
        return Check(name=name, passed=False, found=f"{count:,} are counted, and the log has step {logged:,}")
    if key is not None and header["key"] != key.fingerprint():
        return Check(name=name, passed=False, found=f"{run.steps_file.name} belongs to a different noise key")
    own = json.loads(json.dumps(plan.to_dict()))  # the optimizer chooses the release
    if any(header["plan"].get(name) != value for name, value in own.items() if name != "release"):
        return Check(name=name, passed=False, found="the steps were released under a different plan than plan.json")
    return Check(name=name, passed=True, found=f"{count:,} of {plan.steps:,}, under this plan")


def _entries(run: RunDirectory) -> list[dict[str, Any]]:
    lines = log_lines(run.log_file) if run.log_file.is_file() else []
    return [line for line in lines if line is not None]


def _log(run: RunDirectory, recipe: Recipe, claimed: float) -> Check:
    name = "the log holds only released values"
    if not run.log_file.is_file():
        return Check(name=name, passed=None, found="log.jsonl is missing")
    lines, entries = log_lines(run.log_file), _entries(run)
    if None in lines[:-1]:
        return Check(name=name, passed=False, found=f"line {lines.index(None) + 1} is not JSON: the file was edited")
    private = sum("not_private" in entry for entry in entries)
    if private or recipe.debug:
        found = f"the run used debug: {private:,} lines hold values that are not private; keep the log secret"
        return Check(name=name, passed=False, found=found)
    values = [entry.get("epsilon") for entry in entries]
    spent = max((float(value) for value in values if isinstance(value, (int, float))), default=0.0)
    if spent > claimed * (1 + 1e-9):
        return Check(name=name, passed=False, found=f"epsilon = {format_epsilon(spent)} is above the claim")
    return Check(name=name, passed=True, found=f"{len(entries):,} lines; epsilon up to {format_epsilon(spent)}")
