"""`dpoptim train` killed at random moments and resumed, until the run ends like one that was never killed."""

from __future__ import annotations

import itertools
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from dpoptim.app import RunDirectory
from dpoptim.app.runs.run_directory import checkpoints, load_checkpoint, step_of
from dpoptim.privacy.step_ledger import released_count
from tests.app.runs import log_of, rows_recipe, without_times
from tests.fuzz.commands import kill, run, start, wait
from tests.fuzz.parts import Failure, Outcome

CASES = 100
STEPS = 12
SETTINGS: list[dict[str, Any]] = [
    {"noise": "independent"},
    {"noise": "banded-toeplitz:4", "variant": "post_processing"},
    {"noise": "independent", "variant": "independent_moments", "micro_batch_size": 6, "averaged": 0.5},
]
OTHER_ENDS = 5  # seconds that a process has after the other was killed
CHANGING = {"log.jsonl", "summary.json"}  # hold times


def outcomes(seed: int, cases: int, folder: Path, processes: int = 1) -> Iterator[tuple[int, Outcome]]:
    """Kill runs of different settings in turn, several times each; a seed repeats a run, except for the clock."""
    wholes = [whole_run(folder / f"whole-{number}", settings, processes) for number, settings in enumerate(SETTINGS)]
    left = cases
    for own in itertools.count(seed):
        (whole, seconds), place = wholes[own % len(wholes)], folder / f"run-{own}"
        for hit in kill_and_resume(whole, seconds, place, random.Random(own), left, processes):
            yield own, hit
            left -= 1
        if not left:
            return
        shutil.rmtree(place)


def whole_run(
    folder: Path, settings: dict[str, Any], processes: int = 1, *, one_key: bool = True
) -> tuple[RunDirectory, float]:
    """A run that is not interrupted, and how long it takes."""
    folder.mkdir()
    fast = {"epsilon": None, "noise_multiplier": 1.0, "delta": 1e-3, "steps": STEPS, "device": "cpu"}
    often = {"checkpoint_every": 2, "log_every": 1, "evaluate_every": 4}
    (folder / "recipe.toml").write_text(rows_recipe(folder, **{**fast, **often, **settings}).to_toml())
    place, began = RunDirectory(folder / "run"), time.monotonic()
    command = ["train", str(folder / "recipe.toml"), "--run-dir", str(place.path)]
    if run(command, folder / "printed", processes=processes, one_key=one_key):
        raise Failure(f"a run that nobody killed failed: {last_line(folder / 'printed')}")
    return place, time.monotonic() - began


def kill_and_resume(
    whole: RunDirectory, seconds: float, folder: Path, rng: random.Random, most: int, processes: int
) -> Iterator[Outcome]:
    """Kill a run up to `most` times before it finishes; yield when each kill came, or what it broke."""
    folder.mkdir()
    place, printed = RunDirectory(folder / "run"), folder / "printed"
    hits: list[Outcome] = []
    try:
        while True:
            if not place.recipe_file.exists():  # nothing was released: the error would ask for this
                for part in (place.path, place.secret_folder):
                    shutil.rmtree(part, ignore_errors=True)
            recipe = [str(whole.path.parent / "recipe.toml"), "--run-dir", str(place.path)]
            command = ["train", *(["--resume", str(place.path)] if place.path.exists() else recipe)]
            if len(hits) == most:
                if run(command, printed, processes=processes):
                    raise Failure(f"a killed run does not resume: {last_line(printed)}")
                break
            if killed_in_time(command, printed, rng, seconds, processes):
                hits.append(moment(place))
            else:
                break
        check_same(whole, place)
    except Failure as failure:
        hits = [*hits[:-1], failure]
    yield from hits


def killed_in_time(command: list[str], printed: Path, rng: random.Random, seconds: float, processes: int = 1) -> bool:
    """Run a command and kill all of its processes, or one; False if it ended before."""
    started = start(command, printed, processes=processes)
    statuses = wait(started, rng.uniform(0.0, seconds))
    if None not in statuses:
        if any(statuses):
            raise Failure(f"a killed run does not resume: {last_line(printed)}")
        return False
    running = [process for process, status in zip(started, statuses, strict=True) if status is None]
    first, *others = rng.sample(running, len(running))
    kill(first)
    if others and rng.random() < 0.5:  # the other process may notice, before it is ended as torchrun would do
        wait(others, OTHER_ENDS)
    for process in others:
        kill(process)
    return True


def moment(place: RunDirectory) -> str:
    """What a kill interrupted, from what it left."""
    if not place.recipe_file.exists():
        return "killed before the run folder existed"
    found = checkpoints(place.checkpoints)
    if not found:
        return "killed before the first checkpoint"
    released, saved = released_count(place.steps_file), step_of(found[-1])
    if released > saved:
        return "killed after a release, before its checkpoint"
    return "killed after the last step" if saved == STEPS else "killed right after a checkpoint or a start"


def check_same(whole: RunDirectory, place: RunDirectory) -> None:
    """Raise a Failure unless both runs have the same files; logs may differ in times."""
    for one, other in ((whole.path, place.path), (whole.secret_folder, place.secret_folder)):
        names, others = ({p.relative_to(root) for p in root.rglob("*") if p.is_file()} for root in (one, other))
        # Of older checkpoints, a killed process may leave more, or those of other steps.
        older = {name for name in names | others if name.match("checkpoints/*/*") and f"{STEPS:06d}" not in str(name)}
        if not names ^ others <= older:
            raise Failure(f"other files than in a run that was not killed: {sorted(map(str, names ^ others))}")
        names &= others
        for name in names:
            if name.name not in CHANGING and not same_file(one / name, other / name):
                raise Failure(f"{name} differs from that of a run that was not killed")
    if without_times(log_of(whole.path)) != without_times(log_of(place.path)):
        raise Failure("the log differs from that of a run that was not killed")


def same_file(one: Path, other: Path) -> bool:
    """Whether two files have the same bytes; equal checkpoints may pickle equal texts once or twice."""
    if one.name != "state.pt":
        return one.read_bytes() == other.read_bytes()
    (leaves, structure), (others, other_structure) = (
        tree_flatten(load_checkpoint(path.parent)) for path in (one, other)
    )
    are_equal = (
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(leaves, others, strict=True)
    )
    return structure == other_structure and all(are_equal)


def last_line(printed: Path) -> str:
    """The last line of a command's output, and before it what another process reported."""
    lines = printed.read_text(errors="replace").strip().splitlines() or [""]
    return " / ".join(
        [*(line for line in lines[:-1] if line.startswith("dpoptim: ") and "Traceback" in lines), lines[-1]]
    )
