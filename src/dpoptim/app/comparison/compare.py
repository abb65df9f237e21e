"""A comparison: trials, then every variant with every seed, each a run directory, resumed where it stopped."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dpoptim.app.comparison.grids import NON_PRIVATE, Setting, name_of_setting, with_setting
from dpoptim.app.comparison.request import LOOSE, PUBLIC, Request
from dpoptim.app.comparison.result import summarize
from dpoptim.app.comparison.tuning import best_setting, check_tuning_data, run_recipe, trial_recipe
from dpoptim.app.files import write_text
from dpoptim.app.format import plain
from dpoptim.app.progress import ProgressReporter
from dpoptim.app.recipes.recipe import Recipe, read_recipe, whole_path
from dpoptim.app.runs.checkpoints import checkpoints
from dpoptim.app.runs.run import resume, train
from dpoptim.app.runs.run_directory import RunDirectory
from dpoptim.app.runs.run_log import Diverged, RunResult, has_diverged, is_finished, read_result
from dpoptim.app.runs.setup import prepare_run
from dpoptim.privacy import PrivacyPlan


class Watch:
    """Says nothing about the runs of a comparison; also the shape of those that do."""

    def tell(self, text: str) -> None:
        """What is being done before the first run."""

    def note(self, text: str) -> None:
        """What a person should know before the first run."""

    def begin(self, number: int, total: int, name: str, seconds_left: float | None) -> None:
        """Run `number` of `total` starts; `seconds_left` is for all that are left, None before one was timed."""

    def progress(self) -> ProgressReporter:
        """What shows a single run."""
        return ProgressReporter()


class Interrupted(Exception):
    """Ctrl-C at the end of a step, which is saved; `done` of `total` runs are finished."""

    def __init__(self, *, done: int, total: int, signal: int) -> None:
        super().__init__(f"interrupted with {done} of {total} runs finished")
        self.done, self.total, self.signal = done, total, signal


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the parts of a comparison lie.

    | name | what it holds |
    |---|---|
    | request.json | what was asked for, and the settings that all runs share |
    | trials/VARIANT/SETTING/ | run directories of trials |
    | runs/VARIANT/SETTING/seed-0/ | run directories whose scores are compared |
    | comparison.json | the result; made anew from the run directories whenever the command runs |
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

    def earlier_trials(self, variant: str) -> list[Path]:
        return sorted(file.parent for file in (self.path / "trials" / variant).glob("*/plan.json"))

    def private_plans(self, *, with_trials: bool) -> list[PrivacyPlan]:
        """Of every run that was ever started here on the private records, but for the reference without privacy."""
        files = [*self.path.glob("runs/*/*/*/plan.json")]
        if with_trials:
            files += self.path.glob("trials/*/*/plan.json")
        kept = sorted(file for file in files if NON_PRIVATE not in file.relative_to(self.path).parts)
        return [PrivacyPlan.from_dict(json.loads(file.read_text(encoding="utf-8"))["plan"]) for file in kept]

    def run(self, variant: str, setting: Setting, seed: int) -> Path:
        return self.path / "runs" / variant / name_of_setting(setting) / f"seed-{seed}"


@dataclass(frozen=True, kw_only=True)
class _Job:
    name: str
    place: Path
    recipe: Callable[[], Recipe]
    steps: int


def compare(request: Request, folder: str | Path, *, watch: Watch | None = None) -> dict[str, Any]:
    """Do what is left of a comparison, and return its result, which is also in comparison.json.

    Trials come first; each variant's best setting then runs with every seed, seed by seed, so that what is there after
    an interruption compares. A run that finished or diverged is never run again, one that was interrupted goes on.
    Guarantee: every run of a variant that is compared has the same (ε, δ), sampling, batch size, steps and noise, and a
    noise key of its own. The result states ε of one run, of one run with its tuning, and of everything together.
    Edge cases: `Interrupted` where Ctrl-C stopped it; one ValueError line for bad input, before the first run, and
    where the folder holds another comparison.
    """
    watch = watch or Watch()
    layout = Layout(path=Path(folder).expanduser())
    base = _base_recipe(request, layout, watch)
    assert base.steps is not None
    counts = [len(request.points(variant)) for variant in request.rows]
    trial_count, run_count = sum(count for count in counts if count > 1), len(request.rows) * len(request.seeds)
    trial_steps = request.tuning_steps or base.steps
    runner = _Runner(
        watch,
        total=trial_count + run_count,
        total_steps=trial_count * trial_steps + run_count * base.steps,
        device=request.recipe.device,
    )
    trials: dict[str, list[tuple[Setting, RunResult]]] = {}
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
    chosen = {
        variant: best_setting([(setting, run.last) for setting, run in trials[variant]], request.metric)
        if trials[variant]
        else request.points(variant)[0]
        for variant in request.rows
    }
    runs: dict[str, list[RunResult]] = {variant: [] for variant in request.rows}
    for seed in request.seeds:
        for variant in request.rows:
            setting = chosen[variant]
            job = _Job(
                name=f"{variant} at {name_of_setting(setting)}, seed {seed}",
                place=layout.run(variant, setting, seed),
                recipe=partial(run_recipe, base, variant, setting, seed),
                steps=base.steps,
            )
            runs[variant].append(runner.do(job))
    watch.tell("adding up what all runs cost")
    plans = layout.private_plans(with_trials=request.budget_for_tuning != PUBLIC)
    result = summarize(request, trials=trials, chosen=chosen, runs=runs, in_folder=plans)
    write_text(layout.result_file, json.dumps(plain(result), indent=2, ensure_ascii=False) + "\n")
    return result


class _Runner:
    """Does one run after another and knows how long the rest will take."""

    def __init__(self, watch: Watch, *, total: int, total_steps: int, device: str) -> None:
        self._watch, self._total, self._steps_left = watch, total, total_steps
        self._device = None if device == "auto" else device
        self._number = 0
        self._seconds, self._steps = 0.0, 0

    def do(self, job: _Job) -> RunResult:
        self._number += 1
        if not is_finished(job.place) and not has_diverged(job.place):
            left = self._seconds / self._steps * self._steps_left if self._steps else None
            self._watch.begin(self._number, self._total, job.name, left)
            began = time.perf_counter()
            progress = self._watch.progress()
            with contextlib.suppress(Diverged):  # a score too: the worst
                if RunDirectory(job.place).recipe_file.exists():
                    summary = resume(job.place, device=self._device, progress=progress)
                else:
                    summary = train(job.recipe(), job.place, progress=progress)
                if summary["reason"] != "finished":
                    raise Interrupted(done=self._number - 1, total=self._total, signal=summary.get("signal", 2))
            self._seconds += time.perf_counter() - began
            self._steps += job.steps
        self._steps_left -= job.steps
        for old in checkpoints(RunDirectory(job.place).checkpoints):
            shutil.rmtree(old)  # many runs are kept, and a finished one is never taken up again
        return read_result(job.place)


def _base_recipe(request: Request, layout: Layout, watch: Watch) -> Recipe:
    """The settings that all runs share, from the folder or, at the first time, from the data and the model."""
    asked = plain(request.asked())
    if layout.request_file.is_file():
        found = json.loads(layout.request_file.read_text(encoding="utf-8"))
        for name in sorted(asked.keys() | found["asked"].keys()):
            if asked.get(name) != found["asked"].get(name):
                raise ValueError(
                    f"{layout.path} holds a comparison with {name}={found['asked'].get(name)!r}, and now it is "
                    f"{asked.get(name)!r}; choose another folder with -o"
                )
        base = Recipe.from_dict(found["base"])
        base = base.replace(**{name: getattr(request.recipe, name) for name in LOOSE})
        _check_earlier_trials(request, base, layout)
        _try(request, base, layout, watch, tried=None)
        return base
    if layout.path.exists() and (not layout.path.is_dir() or any(layout.path.iterdir())):
        raise ValueError(f"{layout.path} is there already and holds no comparison; choose another folder with -o")
    first = request.variants[0]
    setup = prepare_run(with_setting(request.recipe, first, request.points(first)[0]), stage=watch.tell)
    check_tuning_data(request, setup)
    for note in setup.notes if setup.validation is not None else ():
        watch.note(note)
    if setup.validation is None:
        raise ValueError("nothing is held out to compare on; give validation_data or a validation_fraction above 0")
    if request.metric == "accuracy" and not setup.prepared.task.is_classification:
        raise ValueError(f"metric='accuracy' is for classification, and this is {setup.recipe.task}; use loss")
    shared = (
        "task", "model", "data", "validation_data", "validation_fraction", "num_examples", "label_names", "max_length",
        "delta", "batch_size", "steps", "epochs", "noise", "sampling", "dtype",
    )  # fmt: skip
    base = request.recipe.replace(**{name: getattr(setup.recipe, name) for name in shared})
    del setup
    _try(request, base, layout, watch, tried=first)
    layout.path.mkdir(parents=True, exist_ok=True)
    stored = {"asked": asked, "base": base.to_dict()}
    write_text(layout.request_file, json.dumps(stored, indent=2, ensure_ascii=False) + "\n")
    return base


def _check_earlier_trials(request: Request, base: Recipe, layout: Layout) -> None:
    """Trials that share one ε were calibrated for their number: the grid they belong to cannot change any more."""
    if not isinstance(request.budget_for_tuning, int | float):
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
                    f"{place} was a trial among another number of settings of {variant}, and their noise was made for "
                    f"epsilon={request.budget_for_tuning:g} together; keep that grid, or choose another folder with -o"
                )


def _try(request: Request, base: Recipe, layout: Layout, watch: Watch, *, tried: str | None) -> None:
    """Find what is wrong with any variant before the first of them is trained; those with runs were tried before."""
    for variant in request.rows:
        points = request.points(variant)
        new = not (layout.path / "runs" / variant).exists() and not (layout.path / "trials" / variant).exists()
        if new and variant != tried:
            watch.tell(f"checking {variant}")
            prepare_run(run_recipe(base, variant, points[0], base.seed))
        if new and len(points) > 1:
            recipe = trial_recipe(request, base, variant, points[0])
            if request.budget_for_tuning == PUBLIC:
                assert request.tuning_data is not None
                watch.tell(f"checking trials on {whole_path(request.tuning_data)}")
                prepare_run(recipe)
