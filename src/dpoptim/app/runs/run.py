"""Run private training: from a recipe to a trained model in a run directory; resume it; load the model."""

from __future__ import annotations

import contextlib
import math
import platform
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from dpoptim.app.files import make_folder
from dpoptim.app.models.loading import load_model
from dpoptim.app.models.prepared import not_finite
from dpoptim.app.progress import ProgressReporter, two_digits
from dpoptim.app.recipes.recipe import BUILT_IN, Recipe, read_recipe
from dpoptim.app.runs.loop import Loop
from dpoptim.app.runs.metrics import evaluate
from dpoptim.app.runs.run_directory import RunDirectory, checkpoints, load_checkpoint, save_checkpoint, step_of
from dpoptim.app.runs.run_log import (
    Diverged,
    RunLog,
    cut_log,
    ending_by,
    is_finished,
    read_log,
    tensorboard_writer,
    write_scalars,
)
from dpoptim.app.runs.setup import RunSetup, prepare_run, training_digest
from dpoptim.integrations.losses import Task
from dpoptim.integrations.named_settings import name_of_noise
from dpoptim.integrations.optional import first_line
from dpoptim.noise import NoiseKey
from dpoptim.privacy import PrivacyPlan
from dpoptim.privacy.composition import EpsilonSpent
from dpoptim.privacy.statement import headline
from dpoptim.privacy.step_ledger import released_count
from dpoptim.version import __version__


def train(recipe: Recipe, directory: str | Path, *, progress: ProgressReporter | None = None) -> dict[str, Any]:
    """Prepare a run, make its directory and train.

    Ctrl-C stops at the end of a step with a checkpoint; the summary's `reason` is then "interrupted".

    Args:
        recipe: The settings.
        directory: The run directory to make. It is removed again if the first checkpoint cannot be written.
        progress: Shows the run. Defaults to silence.

    Returns:
        The summary, which is also in summary.json.

    Raises:
        ValueError: Something is wrong with the input; the directory is not made then.
        Diverged: Parameters are not finite at a log, an evaluation or a checkpoint.

    Guarantee: the whole run satisfies statement.txt. Scores on held-out records, and what `debug` logs, are outside of
    it.
    """
    progress = progress or ProgressReporter()
    place = RunDirectory(Path(directory).expanduser())
    place.check_new()
    with progress:
        setup = prepare_run(recipe, stage=progress.stage)
        for line in setup.messages:
            progress.note(line)
        key = NoiseKey.generate()
        place.create(setup.recipe, setup.plan, key)
        try:
            return _run(setup, place, progress, key)
        except OSError as error:
            if checkpoints(place.checkpoints) or released_count(place.steps_file):
                raise
            place.remove()
            raise OSError(f"{error}; nothing was released, and {place.path} is removed") from error


def resume(
    directory: str | Path, *, device: str | None = None, progress: ProgressReporter | None = None
) -> dict[str, Any]:
    """Resume a run at its last checkpoint; it continues bit for bit on the same machine.

    Args:
        directory: The run directory.
        device: A different device. Defaults to the recipe's.
        progress: Shows the run. Defaults to silence.

    Returns:
        The summary. A finished run returns it at once and needs no key.

    Raises:
        ValueError: The folder is not a run directory, its records or settings have changed, or a repeated step would
            release different content.

    Guarantee: a released step is released again with exactly the same content or not at all.
    """
    progress = progress or ProgressReporter()
    place = RunDirectory(Path(directory).expanduser())
    if is_finished(place.path):
        return _summary(place, place.read_plan())
    recipe, plan, key = place.read()
    with progress:
        recipe = recipe if device is None else recipe.replace(device=device)
        setup = prepare_run(recipe, plan=plan, stage=progress.stage)
        return _run(setup, place, progress, key)


def _run(setup: RunSetup, place: RunDirectory, progress: ProgressReporter, key: NoiseKey) -> dict[str, Any]:
    found = checkpoints(place.checkpoints)
    progress.stage("taking digests of the records")
    with contextlib.closing(Loop(setup, key, digest=training_digest(setup.prepared, key))) as loop:
        if found:
            loop.load_state_dict(load_checkpoint(found[-1]))
        step = loop.step if found else None
        with contextlib.closing(loop.open_ledger(place.steps_file, step=step)):  # locks the run
            if step is not None:
                cut_log(place.log_file, step)
            with RunLog(place.log_file) as log, stopping_between_steps() as stop:
                try:
                    return _Run(setup, place, progress, log, loop, stop).train(resumed_from=step)
                except torch.OutOfMemoryError as error:
                    raise ValueError(
                        "the device ran out of memory; set a smaller micro_batch_size or micro_batch_tokens"
                    ) from error
                except OSError as error:
                    found = checkpoints(place.checkpoints)
                    command = f"continue with: dpoptim train --resume {place.path}"
                    saved = f"; step {step_of(found[-1])} is saved, {command}" if found else ""
                    raise OSError(f"training stopped: {first_line(error)}{saved}") from error


class _Run:
    """The loop with its log, evaluations and checkpoints."""

    def __init__(
        self,
        setup: RunSetup,
        place: RunDirectory,
        progress: ProgressReporter,
        log: RunLog,
        loop: Loop,
        stop: StopRequest,
    ) -> None:
        self._setup, self._place, self._progress = setup, place, progress
        self._log, self._loop, self._stop = log, loop, stop
        self._writer = None
        if setup.recipe.report_to == "tensorboard":
            self._writer = tensorboard_writer(place.path / "tensorboard", read_log(place.log_file))
        self._began = time.perf_counter()
        self._finite_at = loop.step

    def train(self, *, resumed_from: int | None) -> dict[str, Any]:
        recipe, loop, steps = self._setup.recipe, self._loop, self._loop.plan.steps
        assert recipe.evaluate_every is not None  # filled in
        assert recipe.checkpoint_every is not None
        self._log.write("start", **self._description(resumed_from))
        self._progress.begin(
            step=loop.step, steps=steps, batch_size=loop.plan.batch_size, whole_run=loop.epsilon_is_whole
        )
        try:
            if resumed_from is None:
                self._checkpoint()  # repeated first steps must get the same noise
                self._evaluate()
            for entry in loop:
                if "released" in entry:
                    self._write("step", entry)
                    if "not_private" in entry:
                        self._progress.not_private(entry["not_private"]["loss"])
                self._progress.step(step=loop.step, epsilon=entry["epsilon"], seconds=entry["seconds"] or 0.0)
                last = loop.step == steps
                evaluates = last or loop.step % recipe.evaluate_every == 0
                stops = not last and self._stop.signal is not None  # read once: it may change at any moment
                saves = last or stops or loop.step % recipe.checkpoint_every == 0
                if "released" in entry or evaluates or saves:
                    self._check_finite()
                if evaluates:
                    self._evaluate()
                if saves:
                    self._checkpoint()
                if stops:
                    return self._end("interrupted")
            self._save_model()
            return self._end("finished")
        except BaseException as error:
            with contextlib.suppress(OSError):  # the disk may be full; the last checkpoint is complete
                self._log_end(ending_by(error))
            raise

    def _write(self, kind: str, entry: dict[str, Any]) -> None:
        self._log.write(kind, **entry)
        if self._writer is not None:
            write_scalars(self._writer, {"kind": kind, **entry})

    def _description(self, resumed_from: int | None) -> dict[str, Any]:
        setup, plan = self._setup, self._loop.plan
        return {
            "versions": _versions(),
            "device": torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else "cpu",
            "parameters": sum(p.numel() for p in setup.model.parameters()),
            "trained_parameters": setup.trained_parameters,
            "examples": plan.num_examples,
            "validation_examples": 0 if setup.validation is None else len(setup.validation.records),
            "steps": plan.steps,
            "batch_size": plan.batch_size,
            "epsilon": plan.epsilon(),
            "delta": plan.delta,
            "noise_multiplier": plan.noise_multiplier,
            "clip_norm": plan.clip_norm,
            "variant": setup.recipe.variant,
            "mechanism": name_of_noise(plan.noise),
            "sampling": setup.recipe.sampling,
            "resumed_from": resumed_from,
        }

    def _check_finite(self) -> None:
        """Stop before parameters that are not finite are saved; they are released, so looking costs no privacy."""
        found = not_finite(self._setup.model)
        if not found:
            self._finite_at = self._loop.step
            return
        saved = step_of(checkpoints(self._place.checkpoints)[-1])
        raise Diverged(
            f"training diverged between steps {self._finite_at} and {self._loop.step}: {len(found)} parameters (first: "
            f"{found[0]!r}) are not finite; the last checkpoint is of step {saved}. Train in a new directory with a "
            f"learning_rate below {self._setup.recipe.learning_rate:g} (its privacy loss adds to this one's)"
        )

    def _evaluate(self) -> None:
        setup = self._setup
        if setup.validation is None:
            return
        with setup.precision():
            scores = evaluate(setup.validation, setup.model, batch_tokens=setup.recipe.micro_batch_tokens or 2**16)
        entry = {
            "step": self._loop.step,
            "split": "validation",
            "loss": scores.loss,
            "accuracy": scores.accuracy,
            "perplexity": None if setup.prepared.task.is_classification else scores.perplexity,
            "examples": scores.examples,
            "outside_guarantee": True,
        }
        self._write("evaluation", entry)
        self._progress.evaluation(entry)

    def _checkpoint(self) -> None:
        path = save_checkpoint(self._place.checkpoints, self._loop.step, self._loop.state_dict())
        self._log.write("checkpoint", step=self._loop.step, path=str(path.relative_to(self._place.path)))

    def _save_model(self) -> None:
        """Save with `save_pretrained` and the tokenizer; a plain module as model.pt."""
        model: Any = self._setup.model
        tokenizer = self._setup.prepared.tokenizer
        self._loop.close()

        def fill(folder: Path) -> None:
            if hasattr(model, "save_pretrained"):
                model.save_pretrained(folder)
            else:
                torch.save(model.state_dict(), folder / "model.pt")
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)

        shutil.rmtree(self._place.model, ignore_errors=True)
        make_folder(self._place.model, fill, secret=False)

    def _log_end(self, reason: str) -> None:
        seconds = two_digits(time.perf_counter() - self._began)
        self._log.write("end", step=self._loop.step, reason=reason, seconds=seconds)

    def _end(self, reason: str) -> dict[str, Any]:
        self._log_end(reason)
        summary = _summary(self._place, self._loop.plan)
        if self._stop.signal is not None:
            summary["signal"] = int(self._stop.signal)
        self._place.write_summary(summary)
        return summary


def _summary(place: RunDirectory, plan: PrivacyPlan) -> dict[str, Any]:
    """Summarize a run from its log."""
    entries = read_log(place.log_file)
    start = next(entry for entry in reversed(entries) if entry["kind"] == "start")
    end = next(entry for entry in reversed(entries) if entry["kind"] == "end")
    scores = [entry for entry in entries if entry["kind"] == "evaluation"]
    kept = ("epsilon", "delta", "noise_multiplier", "variant", "mechanism", "sampling", "examples", "batch_size")
    return {
        "run": str(place.path),
        "reason": end["reason"],
        "step": end["step"],
        "steps": plan.steps,
        "seconds": sum(entry["seconds"] for entry in entries if entry["kind"] == "end"),
        **{name: start[name] for name in kept},
        "epsilon_spent": EpsilonSpent(plan).at(end["step"]),
        "validation": {"first": scores[0], "last": scores[-1]} if scores else None,
        "model": str(place.model) if end["reason"] == "finished" else None,
        "guarantee": headline(plan, math.inf if start["epsilon"] is None else start["epsilon"], plan.delta),
    }


def _versions() -> dict[str, str]:
    names = ["transformers", "peft"]
    loaded = {name: str(sys.modules[name].__version__) for name in names if name in sys.modules}
    return {"dpoptim": __version__, "python": platform.python_version(), "torch": torch.__version__, **loaded}


# -- stopping between steps --------------------------------------------------------------------------------------------


@dataclass
class StopRequest:
    """The signal that asked for a stop, or None."""

    signal: int | None = None


@contextlib.contextmanager
def stopping_between_steps() -> Iterator[StopRequest]:
    """Record the first Ctrl-C or SIGTERM, and let a second one interrupt at once; only in the main thread."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(number: int, frame: FrameType | None) -> None:
        if stop.signal is not None:
            raise KeyboardInterrupt
        stop.signal = number

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- the trained model -------------------------------------------------------------------------------------------------


def load_trained(directory: str | Path) -> nn.Module:
    """Load the model of a finished run in evaluation mode, on the CPU; LoRA factors are merged.

    Its tokenizer is `load_tokenizer(directory / "model")`. Its labels, in order, are the recipe's `label_names`.

    Raises:
        ValueError: The folder is not a run directory, or the run has not finished.
    """
    place = RunDirectory(Path(directory).expanduser())
    place.check_is_run()
    if not place.model.is_dir():
        raise ValueError(f"{place.path} has no model yet; finish the run with: dpoptim train --resume {place.path}")
    recipe = read_recipe(place.recipe_file)
    names = recipe.label_names
    if recipe.model in BUILT_IN:
        state: dict[str, Any] = torch.load(place.model / "model.pt", map_location="cpu", weights_only=True)
        columns = next(iter(state.values())).shape[1]
        model = load_model(Task(recipe.task), recipe.model, num_labels=len(names or ()), columns=columns)
        model.load_state_dict(state)
        return model.eval()
    labels = None if names is None else len(names)
    return load_model(Task(recipe.task), place.model, num_labels=labels, label_names=names).eval()
