"""The audit of a run's files: do plan, statement, key, released steps and log agree?"""

from __future__ import annotations

import base64
import json
import mmap
import os
import stat
from pathlib import Path
from typing import Any

from dpoptim.app.audit.checks import Check
from dpoptim.app.recipes.recipe import Recipe
from dpoptim.app.runs.run_directory import RunDirectory
from dpoptim.app.runs.run_log import log_lines, parsed, plan_and_epsilon
from dpoptim.integrations.named_settings import CLIPPING, noise_of, sampling_of
from dpoptim.noise import NoiseKey
from dpoptim.privacy import Adjacency, PrivacyPlan
from dpoptim.privacy.statement import format_epsilon
from dpoptim.privacy.step_ledger import read_ledger

_ROUNDING = 1 + 1e-9  # two values of ε may differ by this factor
_Answer = tuple[bool | None, str]  # of a check: whether it passed, and what was found
_Log = list[dict[str, Any] | None]  # None for a line that is not JSON


def audit_folder(folder: Path) -> tuple[PrivacyPlan, Recipe, list[Check]]:
    """Check a run's files, without reading any record; return its plan, its recipe and the checks."""
    run = RunDirectory(folder)
    run.check_is_run()
    recipe = run.read_recipe()
    plan, claimed = parsed(run.plan_file, plan_and_epsilon)
    key_answer, key = _key(run)
    log = log_lines(run.log_file) if run.log_file.is_file() else None
    answers = {
        "the plan matches the recipe": _recipe(recipe, plan),
        "the statement matches the plan": _statement(run, plan),
        "the noise key is safe": key_answer,
        "released steps are counted": _steps(run, plan, key, log or []),
        "the log holds only released values": _log(log, recipe, claimed),
    }
    checks = [Check(name=name, passed=passed, found=found) for name, (passed, found) in answers.items()]
    return plan, recipe, [epsilon_check(plan, claimed), *checks]


def epsilon_check(plan: PrivacyPlan, claimed: float) -> Check:
    """Check that the plan spends no more than is claimed."""
    now = plan.epsilon()
    return Check(
        name="epsilon follows from the plan",
        passed=now <= claimed * _ROUNDING,
        found=f"claimed {format_epsilon(claimed)} at delta = {plan.delta:g}; recomputed {format_epsilon(now)}",
    )


def _recipe(recipe: Recipe, plan: PrivacyPlan) -> _Answer:
    asked = {name: getattr(recipe, name) for name in ("num_examples", "batch_size", "steps", "delta", "clip_norm")}
    asked |= {"adjacency": Adjacency(recipe.adjacency), "clipping": CLIPPING[recipe.clipping]}
    if recipe.noise != "auto":
        asked["noise"] = noise_of(recipe.noise)
    if recipe.sampling != "auto":
        asked["sampling"] = sampling_of(recipe.sampling, plan.noise)
    differ = [name for name, value in asked.items() if value is not None and value != getattr(plan, name)]
    differ += [n for n in ("records_per_user", "exact_noise") if getattr(recipe, n) != getattr(plan, n)]
    if differ:
        return False, f"{', '.join(differ)} of plan.json and recipe.toml differ"
    if recipe.epsilon is not None and plan.epsilon() > recipe.epsilon * _ROUNDING:
        return False, f"the recipe asks for {recipe.epsilon:g}, but the plan spends {format_epsilon(plan.epsilon())}"
    return True, "sizes, clip norm, sampling, noise and epsilon match recipe.toml"


def _statement(run: RunDirectory, plan: PrivacyPlan) -> _Answer:
    if not run.statement_file.is_file():
        return False, "statement.txt is missing; write it again with plan.statement()"
    written = run.statement_file.read_text(encoding="utf-8")
    if written.strip().splitlines() != plan.statement().strip().splitlines():
        return False, "statement.txt differs: it was edited, or a different version of dpoptim wrote it"
    return True, "word for word"


def _key(run: RunDirectory) -> tuple[_Answer, NoiseKey | None]:
    if not run.key_file.is_file():
        return (None, "noise.key is missing"), None
    secret, mode = run.key_file.read_bytes(), stat.S_IMODE(run.key_file.stat().st_mode)
    try:
        key = NoiseKey.from_bytes(secret)
    except ValueError as error:
        return (False, f"noise.key: {error}"), None
    files = [file for file in sorted(run.path.rglob("*")) if file.is_file() and not file.is_symlink()]
    leaked = [str(file.relative_to(run.path)) for file in files if _holds(file, secret)]
    wrong = []
    if os.name == "posix" and mode & 0o077:
        wrong.append(f"noise.key has mode {mode:04o}: others can read it and remove the noise; chmod 600")
    if leaked:
        wrong.append(f"its bytes are in {', '.join(leaked[:3])}")
    return (not wrong, "; ".join(wrong) or "mode 0600, and in no file of the run directory"), key


def _holds(file: Path, secret: bytes) -> bool:
    """Whether the file contains the secret as bytes, hexadecimal or base64."""
    forms = (secret, secret.hex().encode(), secret.hex().upper().encode(), base64.b64encode(secret).rstrip(b"="))
    if not file.stat().st_size:
        return False  # an empty file cannot be mapped
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as contents:
        return any(contents.find(form) >= 0 for form in forms)


def _steps(run: RunDirectory, plan: PrivacyPlan, key: NoiseKey | None, log: _Log) -> _Answer:
    try:
        header, _, digests = read_ledger(run.steps_file)
    except FileNotFoundError:  # a run that was passed on has neither key nor ledger
        return None if key is None else False, f"{run.steps_file.name} is missing"
    except ValueError as error:
        return False, str(error)
    count = len(digests)
    if count > plan.steps:
        return False, f"{count:,} were released, but the plan covers {plan.steps:,}"
    steps = [entry.get("step") for entry in log if entry is not None]
    logged = max((step for step in steps if isinstance(step, int)), default=0)
    if logged > count:
        return False, f"{count:,} are counted, but the log has step {logged:,}"
    if key is not None and header["key"] != key.fingerprint():
        return False, f"{run.steps_file.name} belongs to a different noise key"
    own = json.loads(json.dumps(plan.to_dict()))  # the optimizer chooses the release
    if any(header["plan"].get(name) != value for name, value in own.items() if name != "release"):
        return False, "the steps were released under a different plan than plan.json"
    return True, f"{count:,} of {plan.steps:,}, under this plan"


def _log(log: _Log | None, recipe: Recipe, claimed: float) -> _Answer:
    if log is None:
        return None, "log.jsonl is missing"
    if None in log[:-1]:  # a crash may have cut off the last line
        return False, f"line {log.index(None) + 1} is not JSON: the file was edited"
    entries = [entry for entry in log if entry is not None]
    private = sum("not_private" in entry for entry in entries)
    if private or recipe.debug:
        return False, f"the run used debug: {private:,} lines hold values that are not private; keep the log secret"
    if not entries:
        return None, "log.jsonl has no line that can be read"
    values = [entry.get("epsilon") for entry in entries]
    spent = max((float(value) for value in values if isinstance(value, (int, float))), default=0.0)
    if spent > claimed * _ROUNDING:
        return False, f"epsilon = {format_epsilon(spent)} is above the claim"
    return True, f"{len(entries):,} lines; epsilon up to {format_epsilon(spent)}"
