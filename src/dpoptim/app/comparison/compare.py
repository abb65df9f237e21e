"""Run a comparison: trials first, then every variant with every seed, each in its own run directory.

| file in the folder | contents |
|---|---|
| request.json | what was asked for, and the settings that all runs share |
| trials/VARIANT/SETTING/ | run directories of trials |
| runs/VARIANT/SETTING/seed-0/ | run directories whose scores are compared |
| comparison.json | the result, computed from the run directories whenever the command runs |
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dpoptim.app.comparison.request import LOOSE, NON_PRIVATE, PUBLIC, Request, Setting, name_of_setting, with_setting
from dpoptim.app.comparison.result import badness, summarize
from dpoptim.app.files import write_text
from dpoptim.app.format import duration, plain
from dpoptim.app.progress import ProgressReporter
from dpoptim.app.recipes.defaults import plan_of
from dpoptim.app.recipes.recipe import Recipe, read_recipe, whole_path
from dpoptim.app.runs.run import resume, train
from dpoptim.app.runs.run_directory import RunDirectory, checkpoints
from dpoptim.app.runs.run_log import DIVERGED, Diverged, RunHistory, last_reason, parsed
from dpoptim.app.runs.setup import RunSetup, prepare_run, records_of, shared_count
from dpoptim.data.processes import check_alone
from dpoptim.privacy import Adjacency, PrivacyPlan
from dpoptim.privacy.composition import calibrate_runs

_NO_CLIPPING = 1e9  # a clip norm that no gradient reaches
_TRIAL_SEED_OFFSET = 1_000_000  # trials use a seed that no run has
_FROM_SETUP = (
    "task", "model", "data", "validation_data", "validation_fraction", "num_examples", "label_names", "max_length",
    "delta", "batch_size", "steps", "epochs", "noise", "sampling", "dtype",
)  # fmt: skip


class Interrupted(Exception):
    """Ctrl-C stopped a comparison after a step, which is saved; `done` of `total` runs are finished."""

    def __init__(self, *, done: int, total: int, signal: int) -> None:
        super().__init__(f"interrupted with {done} of {total} runs finished")
        self.signal = signal


def compare(request: Request, folder: str | Path, *, progress: ProgressReporter | None = None) -> dict[str, Any]:
    """Run what is left of a comparison; write its result to comparison.json and return it (see `summarize`).

    Guarantee: all compared runs have the same (ε, δ), sampling, batch size, steps and noise, and each has its own noise
    key. The result states ε of one run, of one run with its tuning, and of everything together.
    """
    check_alone("dpoptim compare")
    progress = progress or ProgressReporter()
    folder = Path(folder).expanduser()
    base = _base_recipe(request, folder, progress)
    assert base.steps is not None
    trial_steps = request.tuning_steps or base.steps
    choices = {variant: request.points(variant) for variant in request.rows}
    tuned = {variant: settings if len(settings) > 1 else [] for variant, settings in choices.items()}
    steps = [trial_steps] * sum(map(len, tuned.values())) + [base.steps] * len(request.rows) * len(request.seeds)
    runner = _Runner(progress, steps, device=request.recipe.device)
    trials: dict[str, list[tuple[Setting, RunHistory]]] = {variant: [] for variant in request.rows}
    chosen: dict[str, Setting] = {}
    for variant, settings in tuned.items():
        for setting in settings:
            name = name_of_setting(setting)
            recipe = partial(trial_recipe, request, base, variant, setting)
            run = runner.run(f"trial of {variant} at {name}", folder / "trials" / variant / name, recipe)
            trials[variant].append((setting, run))
        scores = [(badness(run.scores, request.metric), setting) for setting, run in trials[variant]]
        chosen[variant] = min(scores, key=lambda score: score[0])[1] if scores else choices[variant][0]
    runs: dict[str, list[RunHistory]] = {variant: [] for variant in request.rows}
    for seed in request.seeds:
        for variant, setting in chosen.items():
            name = name_of_setting(setting)
            recipe = partial(run_recipe, base, variant, setting, seed)
            place = folder / "runs" / variant / name / f"seed-{seed}"
            runs[variant].append(runner.run(f"{variant} at {name}, seed {seed}", place, recipe))
    progress.stage("composing the cost of all runs")
    plans = _private_plans(folder, with_trials=request.tuning_epsilon != PUBLIC)
    result = summarize(request, trials=trials, chosen=chosen, runs=runs, in_folder=plans)
    write_text(folder / "comparison.json", json.dumps(plain(result), indent=2, ensure_ascii=False) + "\n")
    return result


def _private_plans(folder: Path, *, with_trials: bool) -> list[PrivacyPlan]:
    """The plans of all runs ever started here on the private records, without the non-private reference."""
    files = [*folder.glob("runs/*/*/*/plan.json"), *(folder.glob("trials/*/*/plan.json") if with_trials else ())]
    kept = sorted(file for file in files if NON_PRIVATE not in file.relative_to(folder).parts)
    return [RunDirectory(file.parent).read_plan() for file in kept]


class _Runner:
    """Executes runs with these numbers of steps one after another, and estimates the time left."""

    def __init__(self, progress: ProgressReporter, steps: list[int], *, device: str) -> None:
        self._progress, self._steps = progress, steps
        self._device = None if device == "auto" else device
        self._done = 0
        self._seconds, self._steps_taken = 0.0, 0

    def run(self, name: str, place: Path, recipe: Callable[[], Recipe]) -> RunHistory:
        if last_reason(place) not in ("finished", DIVERGED):
            left = ""
            if self._steps_taken:
                seconds = self._seconds / self._steps_taken * sum(self._steps[self._done :])
                left = f"; about {duration(seconds)} left for all"
            self._progress.message(f"run {self._done + 1} of {len(self._steps)}: {name}{left}")
            began = time.perf_counter()
            with contextlib.suppress(Diverged):  # which is a score too: the worst
                if RunDirectory(place).recipe_file.exists():
                    summary = resume(place, device=self._device, progress=self._progress)
                else:
                    summary = train(recipe(), place, progress=self._progress)
                if summary["reason"] != "finished":
                    raise Interrupted(done=self._done, total=len(self._steps), signal=summary.get("signal", 2))
            self._seconds += time.perf_counter() - began
            self._steps_taken += self._steps[self._done]
        self._done += 1
        for old in checkpoints(RunDirectory(place).checkpoints):
            shutil.rmtree(old)  # a finished run is never resumed, and there are many runs
        return RunHistory(place)


def _base_recipe(request: Request, folder: Path, progress: ProgressReporter) -> Recipe:
    """The settings that all runs share: from the folder, or at first from the data and the model."""
    file = folder / "request.json"
    asked = plain(request.asked())
    if file.is_file():
        found = parsed(file, json.loads)
        for name in sorted(asked.keys() | found["asked"].keys()):
            now, earlier = asked.get(name), found["asked"].get(name)
            if now != earlier:
                raise ValueError(
                    f"{folder} holds a comparison with {name}={earlier!r}, not {now!r}; use a different --run-dir"
                )
        base = Recipe.from_dict(found["base"])
        base = base.replace(**{name: getattr(request.recipe, name) for name in LOOSE})
        _check_earlier_trials(request, base, folder)
        _check_variants(request, base, folder, progress)
        return base
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and does not hold a comparison; use a different --run-dir")
    first = request.variants[0]
    setup = prepare_run(with_setting(request.recipe, first, request.points(first)[0]), stage=progress.stage)
    _check_tuning_data(request, setup)
    if setup.validation is None:
        raise ValueError("no records are held out to compare on; give validation_data or a validation_fraction above 0")
    if request.metric == "accuracy" and not setup.prepared.task.is_classification:
        raise ValueError(f"metric='accuracy' needs a classification task, not {setup.recipe.task}; use loss")
    for note in setup.notes:
        progress.message(f"note: {note}")
    base = request.recipe.replace(**{name: getattr(setup.recipe, name) for name in _FROM_SETUP})
    del setup
    _check_variants(request, base, folder, progress, checked=first)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps({"asked": asked, "base": base.to_dict()}, indent=2, ensure_ascii=False) + "\n")
    return base


def _check_earlier_trials(request: Request, base: Recipe, folder: Path) -> None:
    """Check that the grid is unchanged if trials share one ε: their noise was calibrated for their number."""
    if not isinstance(request.tuning_epsilon, int | float):
        return
    for variant in request.rows:
        points = {name_of_setting(setting): setting for setting in request.points(variant)}
        for file in sorted((folder / "trials" / variant).glob("*/recipe.toml")):
            place = file.parent
            same = place.name in points and len(points) > 1
            if same and variant != NON_PRIVATE:
                now = trial_recipe(request, base, variant, points[place.name]).noise_multiplier
                same = read_recipe(file).noise_multiplier == now
            if not same:
                raise ValueError(
                    f"{place} was a trial of a different grid, whose trials share epsilon={request.tuning_epsilon:g}. "
                    "Keep that grid, or use a different --run-dir"
                )


def _check_variants(
    request: Request, base: Recipe, folder: Path, progress: ProgressReporter, *, checked: str | None = None
) -> None:
    """Prepare one run of every variant, to find mistakes before the first is trained; skip those that have run."""
    for variant in request.rows:
        if (folder / "runs" / variant).exists() or (folder / "trials" / variant).exists():
            continue
        points = request.points(variant)
        if variant != checked:
            progress.stage(f"checking {variant}")
            prepare_run(run_recipe(base, variant, points[0], base.seed))
        if len(points) > 1:
            recipe = trial_recipe(request, base, variant, points[0])
            if request.tuning_data is not None:
                progress.stage(f"checking trials on {whole_path(request.tuning_data)}")
                prepare_run(recipe)


def _check_tuning_data(request: Request, setup: RunSetup) -> None:
    """Check that no private record, trained on or held out, is in the data declared public; labels are ignored."""
    if request.tuning_data is None:
        return
    whole = {"data": request.tuning_data, "validation_data": None, "validation_fraction": 0.0, "num_examples": None}
    public, _ = records_of(setup.recipe.replace(**whole), setup.prepared.task)
    private = [part.records for part in (setup.prepared, setup.validation) if part is not None]
    shared = shared_count(public, *private)
    if shared:
        raise ValueError(
            f"tuning_data={request.tuning_data!r} is declared public, but {shared} of its {len(public)} records are "
            "private ones. Give other records, or an epsilon as tuning_epsilon"
        )


def run_recipe(base: Recipe, variant: str, setting: Setting, seed: int) -> Recipe:
    """The recipe of one run whose scores count; the reference without privacy has neither noise nor clipping."""
    recipe = with_setting(base, variant, setting).replace(seed=seed)
    if variant != NON_PRIVATE:
        return recipe
    return recipe.replace(
        epsilon=None, noise_multiplier=0.0, noise="independent", clipping="fixed", clip_norm=_NO_CLIPPING
    )


def trial_recipe(request: Request, base: Recipe, variant: str, setting: Setting) -> Recipe:
    """The recipe of one trial. At an ε, its noise lets all trials of the variant TOGETHER cost at most that ε.

    Guarantee: no trial trains on the records that its scores are computed on; with "public", all records are public.
    """
    steps = request.tuning_steps or base.steps
    recipe = run_recipe(base, variant, setting, base.seed + _TRIAL_SEED_OFFSET)
    recipe = recipe.replace(steps=steps, evaluate_every=steps, checkpoint_every=None, debug=False)
    if variant != NON_PRIVATE:
        if isinstance(request.tuning_epsilon, int | float):
            assert base.delta is not None
            plan = plan_of(recipe.replace(epsilon=None, noise_multiplier=1.0), parameters=1)
            count, budget = len(request.points(variant)), float(request.tuning_epsilon)
            plan = calibrate_runs(plan, count, epsilon=budget, delta=base.delta)
        else:
            plan = plan_of(base, parameters=1)  # the noise is named by then, so `parameters` decides nothing
        recipe = recipe.replace(epsilon=None, noise_multiplier=plan.noise_multiplier)
    if request.tuning_epsilon != PUBLIC:
        return recipe
    # Public records have no neighbours: only the noise matters, which zero-out and add-remove share.
    kind = recipe.adjacency if recipe.adjacency != Adjacency.ADD_REMOVE.value else Adjacency.ZERO_OUT.value
    changes: dict[str, Any] = {"data": request.tuning_data, "validation_data": None, "validation_fraction": None}
    return recipe.replace(**changes, adjacency=kind, num_examples=None, delta=None)
