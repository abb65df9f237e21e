"""A private training run: from a recipe to a trained model in a run directory, and on again after an interruption."""

from __future__ import annotations

import contextlib
import math
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

from dpoptim.app.models.finite import not_finite
from dpoptim.app.recipes.recipe import Recipe
from dpoptim.app.runs.checkpoints import checkpoints, load_checkpoint, save_checkpoint, step_of
from dpoptim.app.runs.loop import Loop
from dpoptim.app.runs.metrics import evaluate
from dpoptim.app.runs.progress import ProgressDisplay
from dpoptim.app.runs.run_directory import RunDirectory
from dpoptim.app.runs.run_log import RunLog, cut_log, read_log
from dpoptim.app.runs.run_result import Diverged, ending_by, is_finished
from dpoptim.app.runs.setup import RunSetup, prepare_run
from dpoptim.app.runs.shared_records import training_digest
from dpoptim.app.runs.tensorboard import tensorboard_writer, write_scalars
from dpoptim.app.support.files import make_folder
from dpoptim.app.support.interrupts import StopRequest, stopping_between_steps
from dpoptim.app.support.step_times import two_digits
from dpoptim.integrations.named_settings import name_of_noise
from dpoptim.integrations.optional import first_line
from dpoptim.noise import NoiseKey
from dpoptim.privacy import PrivacyPlan
from dpoptim.privacy.composition import EpsilonSpent
from dpoptim.privacy.statement import headline
from dpoptim.privacy.step_ledger import released_count
from dpoptim.version import __version__


def train(recipe: Recipe, directory: str | Path, *, progress: ProgressDisplay | None = None) -> dict[str, Any]:
    """Set a run up, make its directory and train; returns the summary, which is also in summary.json.

    Guarantee: what can be wrong with the input is told before the directory is made. The whole run satisfies the
    statement in statement.txt; scores on held-out records, and what `debug` logs, are outside of it.
    Edge cases: Ctrl-C stops at the end of a step with a checkpoint; the summary's `reason` is then "interrupted".
    `Diverged`, a ValueError, where parameters are no finite numbers at a log, an evaluation or a checkpoint. Where
    not even the checkpoint before the first step can be written, the directory is removed again.
    """
    progress = progress or ProgressDisplay()
    place = RunDirectory(Path(directory).expanduser())
    place.check_new()
    with progress:
        setup = prepare_run(recipe, tell=progress.tell)
        for line in setup.said:
            progress.say(line)
        place.check_new(bytes_needed=bytes_on_disk(setup))
        key = NoiseKey.generate()
        place.create(setup.recipe, setup.plan, key)
        try:
            return _run(setup, place, progress, key)
        except OSError as error:
            if checkpoints(place.checkpoints) or released_count(place.steps_file):
                raise
            shutil.rmtree(place.path, ignore_errors=True)
            raise OSError(f"{error}; nothing was released, and {place.path} is removed") from error


def resume(
    directory: str | Path, *, device: str | None = None, progress: ProgressDisplay | None = None
) -> dict[str, Any]:
    """Go on with a run where its last checkpoint stands; bit for bit on the same machine.

    Guarantee: no step is released twice but for exactly the same values. One ValueError line, before anything is
    computed, where records or settings are not those that the run was begun with; and one before a step is released
    again that comes out otherwise (another device, other versions, other micro-batches).
    Edge cases: a run that is finished returns its summary, and needs no key for that; one ValueError line where the
    directory is no run.
    """
    progress = progress or ProgressDisplay()
    place = RunDirectory(Path(directory).expanduser())
    if is_finished(place.path):
        return _summary(place, place.read_plan())
    recipe, plan, key = place.read()
    with progress:
        setup = prepare_run(recipe if device is None else recipe.replace(device=device), plan=plan, tell=progress.tell)
        return _run(setup, place, progress, key)


def bytes_on_disk(setup: RunSetup) -> int:
    """What a run writes at most: two checkpoints beside the one being written, and the model."""
    everything = sum(value.numel() * value.element_size() for value in setup.model.state_dict().values())
    return 4 * everything + 3 * 12 * setup.trained_parameters + 2**20


def _run(setup: RunSetup, place: RunDirectory, progress: ProgressDisplay, key: NoiseKey) -> dict[str, Any]:
    found = checkpoints(place.checkpoints)
    progress.tell("taking digests of the records")
    with contextlib.closing(Loop(setup, key, digest=training_digest(setup.prepared, key))) as loop:
        if found:
            loop.load_state_dict(load_checkpoint(found[-1]))
        step = loop.step if found else None
        with contextlib.closing(loop.open_ledger(place.steps_file, step=step)):  # locks the run
            if step is not None:
                cut_log(place.log_file, step)
            with RunLog(place.log_file) as log, stopping_between_steps() as wish:
                try:
                    return _Run(setup, place, progress, log, loop, wish).train(resumed_from=step)
                except (OSError, torch.OutOfMemoryError) as error:
                    raise _told(error, place) from error


class _Run:
    """The loop with everything around it: log, evaluations, checkpoints."""

    def __init__(
        self,
        setup: RunSetup,
        place: RunDirectory,
        progress: ProgressDisplay,
        log: RunLog,
        loop: Loop,
        wish: StopRequest,
    ) -> None:
        self._setup, self._place, self._progress = setup, place, progress
        self._log, self._loop, self._wish = log, loop, wish
        self._writer = tensorboard_writer(place.path / "tensorboard", read_log(place.log_file))
        self._began = time.perf_counter()
        self._finite_at, self._loss_noted = loop.step, False

    def train(self, *, resumed_from: int | None) -> dict[str, Any]:
        recipe, loop = self._setup.recipe, self._loop
        assert recipe.evaluate_every is not None  # filled in
        assert recipe.checkpoint_every is not None
        self._log.write("start", **self._description(resumed_from))
        self._progress.begin(
            step=loop.step, steps=loop.steps, batch_size=loop.batch_size, whole_run=loop.epsilon_is_whole
        )
        try:
            if resumed_from is None:
                self._checkpoint()  # the first steps' noise must be the same if they are ever repeated
                self._evaluate()
            for entry in loop:
                if "released" in entry:
                    self._log.write("step", **entry)
                    write_scalars(self._writer, {"kind": "step", **entry})
                    if "not_private" in entry:
                        self._progress.not_private(entry["not_private"]["loss"])
                self._progress.step(step=loop.step, epsilon=entry["epsilon"], seconds=entry["seconds"] or 0.0)
                last = loop.step == loop.steps
                evaluates = last or loop.step % recipe.evaluate_every == 0
                stops = not last and self._wish.signal is not None  # asked once: it may come at any moment
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
            self._end_with(error)
            raise

    def _description(self, resumed_from: int | None) -> dict[str, Any]:
        setup, plan = self._setup, self._loop.plan
        return {
            "versions": _versions(),
            "device": _device_name(setup.device),
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
        """Stop where training diverged, before such parameters are saved; they are released, so looking is free."""
        found = not_finite(self._setup.model)
        if not found:
            self._finite_at = self._loop.step
            return
        saved = step_of(checkpoints(self._place.checkpoints)[-1])
        raise Diverged(
            f"training stopped after step {self._loop.step} of {self._loop.steps}: {len(found)} parameters (first: "
            f"{found[0]!r}) hold NaN or infinite values, and none did after step {self._finite_at}; learning_rate="
            f"{self._setup.recipe.learning_rate:g} is probably too large. Train anew with a smaller one in another run "
            "directory (its privacy loss adds to this one's); --resume would only repeat the same steps. The last good "
            f"checkpoint, of step {saved}, is kept in {self._place.checkpoints}"
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
        self._log.write("evaluation", **entry)
        write_scalars(self._writer, {"kind": "evaluation", **entry})
        self._progress.evaluation(entry)
        if not math.isfinite(scores.loss) and not self._loss_noted:
            self._loss_noted = True
            self._progress.say(
                f"note: the held-out loss is not finite after step {self._loop.step}, while all parameters are; the "
                "learning rate is probably too large, or a held-out record is far out"
            )

    def _checkpoint(self) -> None:
        path = save_checkpoint(self._place.checkpoints, self._loop.step, self._loop.state_dict())
        self._log.write("checkpoint", step=self._loop.step, path=str(path.relative_to(self._place.path)))

    def _save_model(self) -> None:
        """As `save_pretrained` writes it, with its tokenizer; a plain module as model.pt."""
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

    def _end(self, reason: str) -> dict[str, Any]:
        self._log.write("end", step=self._loop.step, reason=reason, seconds=self._seconds())
        summary = _summary(self._place, self._loop.plan)
        if self._wish.signal is not None:
            summary["signal"] = int(self._wish.signal)
        self._place.write_summary(summary)
        return summary

    def _seconds(self) -> float:
        return two_digits(time.perf_counter() - self._began)

    def _end_with(self, error: BaseException) -> None:
        with contextlib.suppress(OSError):  # the disk is full: what matters is the checkpoint, which is whole
            self._log.write("end", step=self._loop.step, reason=ending_by(error), seconds=self._seconds())


def _summary(place: RunDirectory, plan: PrivacyPlan) -> dict[str, Any]:
    """How a run stands, from its log."""
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


def _told(error: Exception, place: RunDirectory) -> Exception:
    found = checkpoints(place.checkpoints)
    text = first_line(error)
    saved = f"; step {step_of(found[-1])} is saved, continue with: dpoptim train --resume {place.path}" if found else ""
    if isinstance(error, OSError):
        return OSError(f"training stopped: {text}{saved}")
    return ValueError(f"the device has too little memory ({text}); give a smaller --micro-batch-size or -tokens")


def _versions() -> dict[str, str]:
    found = {"dpoptim": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("transformers", "peft", "datasets"):
        if name in sys.modules:
            found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
