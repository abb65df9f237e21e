"""Run private training: from a recipe to a trained model in a run directory; resume it; load the model."""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from dpoptim.app.files import make_folder, remove_unfinished, write_text
from dpoptim.app.format import plain
from dpoptim.app.models.loading import load_model
from dpoptim.app.progress import ProgressReporter, two_digits
from dpoptim.app.recipes.defaults import smaller_micro_batch
from dpoptim.app.recipes.recipe import BUILT_IN, Recipe
from dpoptim.app.runs.loop import Loop
from dpoptim.app.runs.metrics import evaluate
from dpoptim.app.runs.report_to import copies_of
from dpoptim.app.runs.run_directory import (
    RunDirectory,
    checkpoints,
    load_checkpoint,
    load_newest,
    load_tensors,
    save_checkpoint,
    set_aside_newer,
    step_of,
)
from dpoptim.app.runs.run_log import Diverged, RunHistory, RunLog, cut_log, ending_by, last_reason
from dpoptim.app.runs.setup import RunSetup, prepare_run, training_digest
from dpoptim.data.processes import Processes
from dpoptim.integrations.losses import Task
from dpoptim.integrations.named_settings import name_of_noise
from dpoptim.integrations.optional import first_line
from dpoptim.integrations.released_norms import not_finite
from dpoptim.integrations.run_identity import recipe_settings
from dpoptim.noise import NoiseKey
from dpoptim.optim.out_of_memory import RUNNING, add_advice, advising, is_out_of_memory
from dpoptim.privacy.statement import headline
from dpoptim.privacy.step_ledger import check_unchanged, read_ledger, released_count
from dpoptim.version import __version__


def train(recipe: Recipe, directory: str | Path, *, progress: ProgressReporter | None = None) -> dict[str, Any]:
    """Prepare a run, make its directory and train.

    Ctrl-C stops at the end of a step with a checkpoint; the summary's `reason` is then "interrupted".

    Args:
        recipe: The settings.
        directory: The run directory to make. It is removed again if the first checkpoint cannot be written.
        progress: Shows the run. Defaults to silence.

    Returns:
        The summary, which is also in summary.json. Under torchrun, only process 0 returns it and writes files.

    Raises:
        ValueError: Something is wrong with the input; the directory is not made then.
        Diverged: Parameters are not finite when the run logs, evaluates or saves.

    Guarantee: the whole run satisfies statement.txt. Scores on held-out records, and what `debug` logs, are outside of
    it.
    """
    processes = Processes.current()
    progress = progress or ProgressReporter()
    place = RunDirectory(Path(directory).expanduser())
    if processes.rank == 0:
        place.check_new()
    with progress:
        setup = prepare_run(recipe, stage=progress.stage)
        key, _ = processes.shared_run("dpoptim train", None, None)
        if processes.rank > 0:
            return _follow(setup, key, processes)
        outlook = setup.plan.outlook(parameters=setup.trained_parameters)
        worries = [] if outlook.verdict == "good" else [f"note: outlook {outlook}"]
        for line in [*setup.messages, *worries]:
            progress.note(line)
        place.create(setup.recipe, setup.plan, key)
        try:
            return _run(setup, place, progress, key)
        except OSError as error:
            if checkpoints(place.checkpoints) or released_count(place.steps_file):
                raise
            for folder in (place.path, place.secret_folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise OSError(f"{error}; nothing was released, and {place.path} is removed") from error


def resume(
    directory: str | Path,
    *,
    device: str | None = None,
    micro_batch_size: int | None = None,
    micro_batch_tokens: int | None = None,
    progress: ProgressReporter | None = None,
) -> dict[str, Any]:
    """Resume a run at its last checkpoint; it continues bit for bit on the same machine.

    Args:
        directory: The run directory.
        device: A different device. Defaults to the recipe's.
        micro_batch_size: A different limit, which replaces the recipe's. Refused if steps were released after the last
            checkpoint: their sums would round differently.
        micro_batch_tokens: The same, in tokens.
        progress: Shows the run. Defaults to silence.

    Returns:
        The summary. A finished run with its model returns it at once and needs no key; if the step ledger is still
        there, recipe and plan are compared with it.

    Raises:
        ValueError: The folder is not a run directory, its records or settings have changed, or a repeated step would
            release different content.

    Guarantee: a released step is released again with exactly the same content or not at all.
    """
    processes = Processes.current()
    progress = progress or ProgressReporter()
    place = RunDirectory(Path(directory).expanduser())
    if last_reason(place.path) == "finished" and place.model.is_dir():
        summary = _summary(place)
        if processes.rank == 0 and not place.summary_file.exists():  # the process was killed just before
            _write_summary(place, summary)
        with contextlib.suppress(FileNotFoundError):  # a run that was shared has no ledger
            settings = recipe_settings(place.read_recipe().to_dict())
            now = {"plan": place.read_plan().to_dict(), "settings": settings}
            check_unchanged(read_ledger(place.steps_file)[0], json.loads(json.dumps(now)))
        processes.from_first(None)  # one that ended now would fail those that still connect
        return summary
    recipe, plan, key = place.read()
    with progress:
        limits = {"micro_batch_size": micro_batch_size, "micro_batch_tokens": micro_batch_tokens}
        if changes := {name: limit for name, limit in limits.items() if limit is not None}:
            recipe = recipe.replace(**changes)
            newest = load_newest(place.checkpoints, lambda text: None)
            saved = 0 if newest is None else step_of(newest[0])
            del newest  # its memory
            released = released_count(place.steps_file)
            if released > saved:
                name, value = next(iter(changes.items()))
                raise ValueError(
                    f"{name}={value} would change the rounding of step {saved + 1}, which was released after the last "
                    f"checkpoint. Resume without it, stop with Ctrl-C after step {released}, and change it then."
                )
            if processes.rank == 0:
                write_text(place.recipe_file, recipe.to_toml())  # later sessions must repeat the same sums
        recipe = recipe if device is None else recipe.replace(device=device)
        setup = prepare_run(recipe, plan=plan, stage=progress.stage)
        if processes.rank > 0:
            return _follow(setup, key, processes)
        return _run(setup, place, progress, key)


def _follow(setup: RunSetup, key: NoiseKey, processes: Processes) -> dict[str, Any]:
    """Take the steps of a run that process 0 logs, evaluates, saves and stops; return no summary."""
    loop = Loop(setup, key, digest=training_digest(setup.prepared, key))
    # A signal is only noted here: process 0 decides when all stop.
    with contextlib.closing(loop), stopping_between_steps(), advising(loop.optimizer, RUNNING):
        found = processes.from_first(None)
        if found is not None:
            loop.load_state_dict(load_checkpoint(Path(found)))
        for _ in loop:
            if processes.from_first(None):
                break
    return {}


def _run(setup: RunSetup, place: RunDirectory, progress: ProgressReporter, key: NoiseKey) -> dict[str, Any]:
    newest = load_newest(place.checkpoints, progress.message)
    progress.stage("taking digests of the records")
    with contextlib.closing(Loop(setup, key, digest=training_digest(setup.prepared, key))) as loop:
        Processes.current().from_first(None if newest is None else str(newest[0].resolve()))
        if newest is not None:
            loop.load_state_dict(newest[1])
        step = None if newest is None else loop.step
        del newest  # its memory
        with contextlib.closing(loop.open_ledger(place.steps_file, step=step)):  # locks the run
            cut_log(place.log_file, -1 if step is None else step)
            if step is not None:
                set_aside_newer(place.checkpoints, step)
            with stopping_between_steps() as stop:
                try:
                    log = RunLog(place.log_file, copies=copies_of(setup.recipe.report_to, place.path))
                    return _Run(setup, place, progress, log, loop, stop).train(resumed_from=step)
                except OSError as error:
                    found = checkpoints(place.checkpoints)
                    command = f"resume with: dpoptim train --resume {place.path}"
                    saved = f"; step {step_of(found[-1])} is saved, {command}" if found else ""
                    raise OSError(f"training stopped: {first_line(error)}{saved}") from error


@dataclass
class _Run:
    """The loop with its log, evaluations and checkpoints."""

    setup: RunSetup
    place: RunDirectory
    progress: ProgressReporter
    log: RunLog
    loop: Loop
    stop: SimpleNamespace  # `signal` is the signal that asked for a stop, or None

    def train(self, *, resumed_from: int | None) -> dict[str, Any]:
        recipe, loop, plan = self.setup.recipe, self.loop, self.loop.plan
        assert recipe.evaluate_every is not None  # filled in
        assert recipe.checkpoint_every is not None
        began, finite_at = time.perf_counter(), loop.step
        self.log.write("start", **self._description(), resumed_from=resumed_from)
        whole_run = loop.spent.note is not None
        self.progress.begin(step=loop.step, steps=plan.steps, batch_size=plan.batch_size, whole_run=whole_run)
        reason = "finished"
        try:
            if resumed_from is None:
                self._evaluate()  # first: a run that resumes at this checkpoint does not evaluate again
                self._checkpoint()  # repeated first steps must get the same noise
            for entry in loop:
                is_logged, last = "released" in entry, loop.step == plan.steps
                if is_logged:
                    self.log.write("step", **entry)
                if "not_private" in entry:
                    self.progress.not_private(entry["not_private"]["loss"])
                self.progress.step(step=loop.step, epsilon=entry["epsilon"], seconds=entry["seconds"] or 0.0)
                evaluates = last or loop.step % recipe.evaluate_every == 0
                stops = not last and self.stop.signal is not None  # read once: it may change at any moment
                saves = last or stops or loop.step % recipe.checkpoint_every == 0
                if is_logged or evaluates or saves:
                    self._check_finite(finite_at)
                    finite_at = loop.step
                if evaluates:
                    self._evaluate()
                Processes.current().from_first(stops)  # fails if a process has ended: the step is in the log by then
                if saves:
                    self._checkpoint()
                if stops:
                    reason = "interrupted"
                    break
            else:
                self._save_model()
        except BaseException as error:
            if isinstance(error, Exception) and (is_out_of_memory(error) or isinstance(error, ConnectionError)):
                add_advice(error, loop.optimizer, RUNNING)
                with contextlib.suppress(OSError, RuntimeError, MemoryError):
                    self._save_before_failed_step(error)
            with contextlib.suppress(OSError):  # the disk may be full; the last checkpoint is complete
                self._log_end(ending_by(error), began)
            raise
        self._log_end(reason, began)
        summary = _summary(self.place)
        if self.stop.signal is not None:
            summary["signal"] = int(self.stop.signal)
        _write_summary(self.place, summary)
        return summary

    def _description(self) -> dict[str, Any]:
        setup, plan = self.setup, self.loop.plan
        packages = {name: sys.modules[name].__version__ for name in ("transformers", "peft") if name in sys.modules}
        own = {"dpoptim": __version__, "python": platform.python_version(), "torch": torch.__version__}
        return {
            "versions": {**own, **packages},
            "device": torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else "cpu",
            "parameters": sum(p.numel() for p in setup.model.parameters()),
            "trained_parameters": setup.trained_parameters,
            "examples": plan.num_examples,
            "validation_examples": 0 if setup.validation is None else len(setup.validation.records),
            "epsilon": plan.epsilon(),
            **{name: getattr(plan, name) for name in ("steps", "batch_size", "delta", "noise_multiplier", "clip_norm")},
            "variant": setup.recipe.variant,
            "mechanism": name_of_noise(plan.noise),
            "sampling": setup.recipe.sampling,
        }

    def _check_finite(self, finite_at: int) -> None:
        """Stop before parameters that are not finite are saved; they are released, so looking costs no privacy."""
        found = not_finite(self.setup.model)
        if found:
            saved = step_of(checkpoints(self.place.checkpoints)[-1])
            raise Diverged(
                f"training diverged between steps {finite_at} and {self.loop.step}: {len(found)} parameters (first: "
                f"{found[0]!r}) are not finite; the last checkpoint is of step {saved}. Train in a new directory with "
                f"a learning_rate below {self.setup.recipe.learning_rate:g} (its privacy loss adds to this one's)"
            )

    def _evaluate(self) -> None:
        setup = self.setup
        if setup.validation is None:
            return
        with setup.precision(), self.loop.optimizer.averaged_weights():
            scores = evaluate(setup.validation, setup.model, batch_tokens=setup.recipe.micro_batch_tokens or 2**16)
        entry = {
            "step": self.loop.step,
            "split": "validation",
            "loss": scores.loss,
            "accuracy": scores.accuracy,
            "rmse": scores.rmse,
            "perplexity": None if setup.prepared.task.has_label else scores.perplexity,
            "examples": scores.examples,
            "outside_guarantee": True,
        }
        self.log.write("evaluation", **entry)
        self.progress.evaluation(entry)

    def _checkpoint(self) -> None:
        path = save_checkpoint(self.place.checkpoints, self.loop.step, self.loop.state_dict())
        self.log.write("checkpoint", step=self.loop.step, path=str(path.relative_to(self.place.path)))

    def _save_before_failed_step(self, error: Exception) -> None:
        """Save the steps taken: smaller micro-batches may resume only where no released step is repeated."""
        if released_count(self.place.steps_file) != self.loop.step or not_finite(self.setup.model):
            return
        self._checkpoint()
        command = f"dpoptim train --resume {self.place.path} {smaller_micro_batch(self.setup.recipe)}"
        error.add_note(f"Step {self.loop.step} is saved. Resume with: {command.rstrip()}")

    def _save_model(self) -> None:
        """Save with `save_pretrained` and the tokenizer; a plain module as model.pt."""
        model: Any = self.setup.model
        self.loop.close()

        def fill(folder: Path) -> None:
            if hasattr(model, "save_pretrained"):
                model.save_pretrained(folder)
            else:
                torch.save(model.state_dict(), folder / "model.pt")
            if self.setup.prepared.tokenizer is not None:
                self.setup.prepared.tokenizer.save_pretrained(folder)

        shutil.rmtree(self.place.model, ignore_errors=True)
        remove_unfinished(self.place.path)
        with self.loop.optimizer.averaged_weights():
            make_folder(self.place.model, fill, secret=False)

    def _log_end(self, reason: str, began: float) -> None:
        self.log.write("end", step=self.loop.step, reason=reason, seconds=two_digits(time.perf_counter() - began))


def _summary(place: RunDirectory) -> dict[str, Any]:
    """Summarize a run from its log."""
    run = RunHistory(place.path)
    start, end, scores = run.starts[-1], run.ends[-1], run.evaluations
    kept = ("epsilon", "delta", "noise_multiplier", "variant", "mechanism", "sampling", "examples", "batch_size")
    return {
        "run": str(place.path),
        "reason": end["reason"],
        "step": end["step"],
        "steps": run.plan.steps,
        "seconds": sum(entry["seconds"] for entry in run.ends),
        **{name: start[name] for name in kept},
        "epsilon_spent": run.epsilon_spent,
        "validation": {"first": scores[0], "last": scores[-1]} if scores else None,
        "model": str(place.model) if end["reason"] == "finished" else None,
        "guarantee": headline(run.plan, run.epsilon, run.plan.delta),
    }


def _write_summary(place: RunDirectory, summary: dict[str, Any]) -> None:
    write_text(place.summary_file, json.dumps(plain(summary), indent=2, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def stopping_between_steps() -> Iterator[SimpleNamespace]:
    """Record the first Ctrl-C or SIGTERM as `signal`; a second one interrupts at once. Only in the main thread."""
    stop = SimpleNamespace(signal=None)

    def note(number: int, frame: FrameType | None) -> None:
        if stop.signal is not None:
            raise KeyboardInterrupt
        stop.signal = number

    in_main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if in_main else ()
    before = {number: signal.signal(number, note) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def load_trained(directory: str | Path) -> nn.Module:
    """Load the model of a finished run in evaluation mode, on the CPU; LoRA factors are merged.

    Its tokenizer is `load_tokenizer(directory / "model")`. Its labels, in order, are the recipe's `label_names`.

    Raises:
        ValueError: The folder is not a run directory, the run has not finished, or a file is broken.
    """
    place = RunDirectory(Path(directory).expanduser())
    place.check_is_run()
    if not place.model.is_dir():
        raise ValueError(f"{place.path} has no model yet; finish the run with: dpoptim train --resume {place.path}")
    recipe = place.read_recipe()
    task, names = Task(recipe.task), recipe.label_names
    if recipe.model not in BUILT_IN:
        return load_model(task, place.model, label_names=names).eval()
    file = place.model / "model.pt"
    state = load_tensors(file)
    try:
        columns = next(iter(state.values())).shape[1]
        model = load_model(task, recipe.model, label_names=names, columns=columns, width=recipe.width)
        model.load_state_dict(state)
    except (AttributeError, IndexError, RuntimeError, StopIteration, TypeError) as error:
        raise ValueError(f"{file} cannot be read ({first_line(error)}). Restore the original.") from error
    return model.eval()
