"""Run a comparison: trials first, then every variant with every seed, each in its own run directory."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from dpoptim.app.runs.run_log import Diverged, RunResult, has_diverged, is_finished, read_result
from dpoptim.app.runs.setup import RunSetup, prepare_run, records_of, shared_count
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
        self.done, self.total, self.signal = done, total, signal


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The files of a comparison.

    | name | contents |
    |---|---|
    | request.json | what was asked for, and the settings that all runs share |
    | trials/VARIANT/SETTING/ | run directories of trials |
    | runs/VARIANT/SETTING/seed-0/ | run directories whose scores are compared |
    | comparison.json | the result, computed from the run directories whenever the command runs |
    """

    path: Path

    @property
    def request_file(self) -> Path:
        return self.path / "request.json"

    @property
    def result_file(self) -> Path:
        return self.path / "comparison.json"

    def trial(self, variant: str, setting: Setting) -> Path:
        return self.path / "trials" / variant / name_of_setting(setting)

    def run(self, variant: str, setting: Setting, seed: int) -> Path:
        return self.path / "runs" / variant / name_of_setting(setting) / f"seed-{seed}"

    def earlier_trials(self, variant: str) -> list[Path]:
        return sorted(file.parent for file in (self.path / "trials" / variant).glob("*/plan.json"))

    def private_plans(self, *, with_trials: bool) -> list[PrivacyPlan]:
        """The plans of all runs ever started here on the private records, without the non-private reference."""
        files = [*self.path.glob("runs/*/*/*/plan.json")]
        if with_trials:
            files += self.path.glob("trials/*/*/plan.json")
        kept = sorted(file for file in files if NON_PRIVATE not in file.relative_to(self.path).parts)
        return [PrivacyPlan.from_dict(json.loads(file.read_text(encoding="utf-8"))["plan"]) for file in kept]


@dataclass(frozen=True, kw_only=True)
class _Job:
    name: str
    place: Path
    recipe: Callable[[], Recipe]
    steps: int


def compare(request: Request, folder: str | Path, *, progress: ProgressReporter | None = None) -> dict[str, Any]:
    """Run what is left of a comparison; write its result to comparison.json and return it (see `summarize`).

    Trials come first, then each variant's best setting, seed by seed. A run that finished or diverged never runs
    again; one that was interrupted is resumed.

    Guarantee: all compared runs have the same (ε, δ), sampling, batch size, steps and noise, and each has its own noise
    key. The result states ε of one run, of one run with its tuning, and of everything together.
    """
    progress = progress or ProgressReporter()
    layout = Layout(path=Path(folder).expanduser())
    base = _base_recipe(request, layout, progress)
    assert base.steps is not None
    counts = [len(request.points(variant)) for variant in request.rows]
    trial_count, run_count = sum(count for count in counts if count > 1), len(request.rows) * len(request.seeds)
    trial_steps = request.tuning_steps or base.steps
    runner = _Runner(
        progress,
        total=trial_count + run_count,
        total_steps=trial_count * trial_steps + run_count * base.steps,
        device=request.recipe.device,
    )
    trials: dict[str, list[tuple[Setting, RunResult]]] = {}
    chosen: dict[str, Setting] = {}
    for variant in request.rows:
        points = request.points(variant)
        trials[variant] = []
        for setting in points if len(points) > 1 else ():
            job = _Job(
                name=f"trial of {variant} at {name_of_setting(setting)}",
                place=layout.trial(variant, setting),
                recipe=partial(trial_recipe, request, base, variant, setting),
                steps=trial_steps,
            )
            trials[variant].append((setting, runner.do(job)))
        scores = [(setting, run.last) for setting, run in trials[variant]]
        chosen[variant] = best_setting(scores, request.metric) if scores else points[0]
    runs: dict[str, list[RunResult]] = {variant: [] for variant in request.rows}
    for seed in request.seeds:
        for variant, setting in chosen.items():
            job = _Job(
                name=f"{variant} at {name_of_setting(setting)}, seed {seed}",
                place=layout.run(variant, setting, seed),
                recipe=partial(run_recipe, base, variant, setting, seed),
                steps=base.steps,
            )
            runs[variant].append(runner.do(job))
    progress.stage("composing the cost of all runs")
    plans = layout.private_plans(with_trials=request.tuning_epsilon != PUBLIC)
    result = summarize(request, trials=trials, chosen=chosen, runs=runs, in_folder=plans)
    write_text(layout.result_file, json.dumps(plain(result), indent=2, ensure_ascii=False) + "\n")
    return result


class _Runner:
    """Does one run after another and estimates the time left."""

    def __init__(self, progress: ProgressReporter, *, total: int, total_steps: int, device: str) -> None:
        self._progress, self._total, self._steps_left = progress, total, total_steps
        self._device = None if device == "auto" else device
        self._number = 0
        self._seconds, self._steps = 0.0, 0

    def do(self, job: _Job) -> RunResult:
        self._number += 1
        if not is_finished(job.place) and not has_diverged(job.place):
            self._progress.message(f"run {self._number} of {self._total}: {job.name}{self._time_left()}")
            began = time.perf_counter()
            with contextlib.suppress(Diverged):  # which is a score too: the worst
                if RunDirectory(job.place).recipe_file.exists():
                    summary = resume(job.place, device=self._device, progress=self._progress)
                else:
                    summary = train(job.recipe(), job.place, progress=self._progress)
                if summary["reason"] != "finished":
                    raise Interrupted(done=self._number - 1, total=self._total, signal=summary.get("signal", 2))
            self._seconds += time.perf_counter() - began
            self._steps += job.steps
        self._steps_left -= job.steps
        for old in checkpoints(RunDirectory(job.place).checkpoints):
            shutil.rmtree(old)  # a finished run is never resumed, and there are many runs
        return read_result(job.place)

    def _time_left(self) -> str:
        left = self._seconds / self._steps * self._steps_left if self._steps else 0.0
        return f"; about {duration(left)} left for all" if left else ""


def _base_recipe(request: Request, layout: Layout, progress: ProgressReporter) -> Recipe:
    """The settings that all runs share: from the folder, or at first from the data and the model."""
    asked = plain(request.asked())
    if layout.request_file.is_file():
        found = json.loads(layout.request_file.read_text(encoding="utf-8"))
        for name in sorted(asked.keys() | found["asked"].keys()):
            if asked.get(name) != found["asked"].get(name):
                raise ValueError(
                    f"{layout.path} holds a comparison with {name}={found['asked'].get(name)!r}, not "
                    f"{asked.get(name)!r}; use a different --run-dir"
                )
        base = Recipe.from_dict(found["base"])
        base = base.replace(**{name: getattr(request.recipe, name) for name in LOOSE})
        _check_earlier_trials(request, base, layout)
        _check_variants(request, base, layout, progress, checked=None)
        return base
    if layout.path.exists() and (not layout.path.is_dir() or any(layout.path.iterdir())):
        raise ValueError(f"{layout.path} exists and does not hold a comparison; use a different --run-dir")
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
    _check_variants(request, base, layout, progress, checked=first)
    layout.path.mkdir(parents=True, exist_ok=True)
    stored = {"asked": asked, "base": base.to_dict()}
    write_text(layout.request_file, json.dumps(stored, indent=2, ensure_ascii=False) + "\n")
    return base


def _check_earlier_trials(request: Request, base: Recipe, layout: Layout) -> None:
    """Check that the grid is unchanged if trials share one ε: their noise was calibrated for their number."""
    if not isinstance(request.tuning_epsilon, int | float):
        return
    for variant in request.rows:
        points = {name_of_setting(setting): setting for setting in request.points(variant)}
        for place in layout.earlier_trials(variant):
            same = place.name in points and len(points) > 1
            if same and variant != NON_PRIVATE:
                now = trial_recipe(request, base, variant, points[place.name]).noise_multiplier
                same = read_recipe(RunDirectory(place).recipe_file).noise_multiplier == now
            if not same:
                raise ValueError(
                    f"{place} was a trial of a different grid, whose trials share epsilon={request.tuning_epsilon:g}. "
                    "Keep that grid, or use a different --run-dir"
                )


def _check_variants(
    request: Request, base: Recipe, layout: Layout, progress: ProgressReporter, *, checked: str | None
) -> None:
    """Prepare one run of every variant, to find mistakes before the first is trained; skip those that have run."""
    for variant in request.rows:
        points = request.points(variant)
        is_new = not (layout.path / "runs" / variant).exists() and not (layout.path / "trials" / variant).exists()
        if is_new and variant != checked:
            progress.stage(f"checking {variant}")
            prepare_run(run_recipe(base, variant, points[0], base.seed))
        if is_new and len(points) > 1:
            recipe = trial_recipe(request, base, variant, points[0])
            if request.tuning_epsilon == PUBLIC:
                assert request.tuning_data is not None
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
    return recipe.replace(epsilon=None, noise_multiplier=0.0, noise="independent", clip_norm=_NO_CLIPPING)


def trial_recipe(request: Request, base: Recipe, variant: str, setting: Setting) -> Recipe:
    """The recipe of one trial.

    | tuning_epsilon | records | noise multiplier |
    |---|---|---|
    | an ε | private | the least at which all trials of the variant TOGETHER cost at most ε |
    | "public" | `tuning_data` | the runs', so that what is best there is best in them |
    | "uncovered" | private | the runs' |

    Guarantee: no trial trains on the records that its scores are computed on; with "public", all records are public.
    """
    steps = request.tuning_steps or base.steps
    assert steps is not None  # filled in
    recipe = run_recipe(base, variant, setting, base.seed + _TRIAL_SEED_OFFSET)
    recipe = recipe.replace(steps=steps, evaluate_every=steps, checkpoint_every=None, debug=False)
    if variant != NON_PRIVATE:
        multiplier = _trial_noise(request, base, recipe, len(request.points(variant)))
        recipe = recipe.replace(epsilon=None, noise_multiplier=multiplier)
    if request.tuning_epsilon != PUBLIC:
        return recipe
    # Public records have no neighbours: only the noise matters, which zero-out and add-remove share.
    kind = recipe.adjacency if recipe.adjacency != Adjacency.ADD_REMOVE.value else Adjacency.ZERO_OUT.value
    changes: dict[str, Any] = {"data": request.tuning_data, "validation_data": None, "validation_fraction": None}
    return recipe.replace(**changes, adjacency=kind, num_examples=None, delta=None)


def _trial_noise(request: Request, base: Recipe, trial: Recipe, count: int) -> float:
    """The noise multiplier of a trial; the noise is named by then, so `parameters` decides nothing."""
    budget = request.tuning_epsilon
    if isinstance(budget, str) or budget is None:
        multiplier = plan_of(base, parameters=1).noise_multiplier
    else:
        assert base.delta is not None
        plan = plan_of(trial.replace(epsilon=None, noise_multiplier=1.0), parameters=1)
        multiplier = calibrate_runs(plan, count, epsilon=float(budget), delta=base.delta).noise_multiplier
    assert multiplier is not None
    return multiplier


def best_setting(scores: Sequence[tuple[Setting, Mapping[str, float | None]]], metric: str) -> Setting:
    """The setting with the best score, the first if several are equal; a run that diverged is worst."""
    return min(scores, key=lambda trial: badness(trial[1], metric))[0]
