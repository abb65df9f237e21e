"""Copy the numbers of a log to TensorBoard and to Weights & Biases, without what would reveal single steps.

A step's time follows the size of its batch, which may be secret. So the events of TensorBoard have no time of day, and
W&B gets entries in bundles of at least ten steps, without its own records of the machine.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from dpoptim.app.files import write_text
from dpoptim.app.progress import LEAST_STEPS
from dpoptim.app.runs.run_log import LogCopy, parsed
from dpoptim.integrations.optional import first_line, require

_DESCRIPTION = (
    "epsilon", "delta", "noise_multiplier", "clip_norm", "steps", "batch_size", "variant", "mechanism", "sampling",
    "examples", "trained_parameters", "versions", "device",
)  # fmt: skip


def copies_of(targets: tuple[str, ...], run: Path) -> list[LogCopy]:
    """Open a copy of a run's log for each target: "tensorboard" or "wandb"."""
    return [TensorBoard(run) if target == "tensorboard" else WeightsAndBiases(run) for target in targets]


def private_numbers(entry: dict[str, Any]) -> dict[str, float]:
    """The numbers of an entry that may be published, and held-out scores, by name; none that are not private."""
    parts: dict[str, dict[str, Any]] = {}
    if entry["kind"] == "evaluation":
        parts["held-out"] = {name: entry[name] for name in ("loss", "accuracy", "perplexity")}
    elif entry["kind"] == "step":
        parts["run"] = {name: entry[name] for name in ("epsilon", "learning_rate", "seconds")}
        parts["released"] = entry["released"]
    return _flat(parts)


def _flat(parts: dict[str, dict[str, Any]]) -> dict[str, float]:
    every = ((f"{group}/{name}", value) for group, values in parts.items() for name, value in values.items())
    return {name: value for name, value in every if isinstance(value, int | float)}


class TensorBoard:
    """Writes events to RUN/tensorboard; the names of values that are not private say so."""

    def __init__(self, run: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run / "tensorboard"
        # Two versions of a repeated step, from devices that sum in a different order, would differ by no noise.
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = SummaryWriter(str(folder))

    def write(self, entry: dict[str, Any]) -> None:
        debugging = _flat({"not private, for debugging": entry.get("not_private", {})})
        for name, value in {**private_numbers(entry), **debugging}.items():
            self._writer.add_scalar(name, value, entry["step"], walltime=0.0)
        self._writer.flush()


class WeightsAndBiases:
    """Sends entries to W&B, at checkpoints and at the end; never what `debug` logs.

    RUN/wandb.json names the W&B run and the last entry that was sent. So no step is sent in two versions when a resumed
    run repeats it. In W&B's offline mode, the run is written to RUN/wandb.
    """

    def __init__(self, run: Path) -> None:
        wandb = require("wandb", "report_to='wandb'")
        self._file, self._waiting = run / "wandb.json", list[tuple[tuple[int, bool], dict[str, float]]]()
        known: dict[str, Any] = parsed(self._file, json.loads) if self._file.is_file() else {}
        self._sent = tuple(known.get("sent", (-1, False)))  # step, and whether the entry was an evaluation
        try:
            # Records of the machine over time, and of its output, would reveal more than the log.
            settings = wandb.Settings(
                x_disable_stats=True, x_disable_meta=True, console="off", disable_git=True, disable_code=True
            )
            named = {"id": known["id"], "resume": "allow"} if known else {}
            self._run = wandb.init(
                dir=str(run), project=None if "WANDB_PROJECT" in os.environ else "dpoptim", name=run.resolve().name,
                settings=settings, **named,
            )  # fmt: skip
        except Exception as error:  # W&B and pydantic raise errors of many types
            raise OSError(
                f"W&B cannot start ({first_line(error)}). Use wandb 0.19 or later, and run `wandb login` or set "
                "WANDB_MODE=offline"
            ) from error
        self._note_sent()

    def write(self, entry: dict[str, Any]) -> None:
        if entry["kind"] == "start":
            self._run.config.update({name: entry[name] for name in _DESCRIPTION}, allow_val_change=True)
        numbers, place = private_numbers(entry), (entry.get("step", 0), entry["kind"] == "evaluation")
        if numbers and place > self._sent:
            self._waiting.append((place, numbers))
        steps = entry.get("step", 0) - self._waiting[0][0][0] if self._waiting else 0
        if entry["kind"] == "end" or (entry["kind"] == "checkpoint" and steps >= LEAST_STEPS):
            self._send()
        if entry["kind"] == "end":
            self._run.finish()

    def _send(self) -> None:
        if self._waiting:
            self._sent = self._waiting[-1][0]
            self._note_sent()  # before sending: an entry may get lost, but is not sent twice
        for (step, _), numbers in self._waiting:
            self._run.log(numbers, step=step)
        self._waiting = []

    def _note_sent(self) -> None:
        write_text(self._file, json.dumps({"id": self._run.id, "sent": self._sent}) + "\n")
