"""One cell: a fine-tuning run that can stop and resume, and its losses on held-out abstracts."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpoptim.data import private_loader
from dpoptim.data.lengths import part_multiple
from dpoptim.noise import NoiseKey
from experiments.framework import Outcome
from experiments.results_file import cell_key
from experiments.tinybert.data import Indices, Texts, make_part
from experiments.tinybert.grid import Scoring, described, guarantee, plan_of
from experiments.tinybert.metrics import RunMetrics
from experiments.tinybert.model import MaskedLM, mean_losses, optimizer_of


class TimeLimitReached(Exception):
    """A run stopped at the time limit and was saved."""


@dataclass(frozen=True)
class Unfinished:
    """The folder of unfinished runs, and the time limit of all runs (by `time.time`).

    A file holds weights, moments and curves of a run on public texts, but not the key.
    """

    folder: Path
    until: float = math.inf
    every: float = 60.0  # seconds between two checkpoints of a run
    _kept: dict[str, float] = field(default_factory=dict)

    def is_over(self) -> bool:
        """Whether the time limit has passed."""
        return time.time() >= self.until

    def keep(self, cell: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Save a run; an interrupted write leaves the previous file."""
        path = self._file(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        torch.save(dict(state), part)
        os.replace(part, path)
        self._kept[path.name] = time.time()

    def is_due(self, cell: Mapping[str, Any]) -> bool:
        """Whether the last checkpoint (or, without one, the first call) is old enough."""
        now = time.time()
        return now - self._kept.setdefault(self._file(cell).name, now) >= self.every

    def found(self, cell: Mapping[str, Any]) -> dict[str, Any] | None:
        """The saved state of this cell, if any."""
        path = self._file(cell)
        if not path.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(f"{path} cannot be read; delete it to start its run again") from error
        return state

    def forget(self, cell: Mapping[str, Any]) -> None:
        """Delete the file of a finished run."""
        self._file(cell).unlink(missing_ok=True)

    def _file(self, cell: Mapping[str, Any]) -> Path:
        return self.folder / f"{hashlib.sha256(cell_key(cell).encode()).hexdigest()[:16]}.pt"


Curve = list[tuple[int, float]]
WORSE = 0.05
"""From half of its steps on, a tuning run this much worse than the best of its place is abandoned."""
WORSE_BEFORE_DECAY = 0.3
"""The same with a schedule: higher rates are worse until the decay, and then gain more from it."""
WARMUP, DECAY = 0.1, 0.3


def rate_factor(schedule: str, step: int, steps: int) -> float:
    """What multiplies the learning rate of step `step`, from 0.

    "constant" is 1. "wsd" (warm-up, stable, decay) rises linearly over the first 10 % of the steps, stays at 1, and
    falls linearly over the last 30 %; it would reach 0 one step after the last.

    >>> [rate_factor("wsd", step, 20) for step in (0, 1, 2, 13, 14, 17, 19)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.16666666666666666]
    """
    if schedule == "constant":
        return 1.0
    if schedule != "wsd":
        raise ValueError(f"schedule={schedule!r} must be constant or wsd")
    rising, falling = max(round(WARMUP * steps), 1), max(round(DECAY * steps), 1)
    return min(1.0, (step + 1) / rising, (steps - step) / falling)


def dtype_on(device: str) -> torch.dtype:
    """bfloat16 on a GPU, float32 elsewhere."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


@dataclass(frozen=True)
class Workspace:
    """What all cells share: texts on the device, and how to make a fresh model."""

    train: Texts
    validation: Texts
    test: Texts
    fresh_model: Callable[[], MaskedLM]
    device: str
    scoring: Scoring
    longest: int = 512
    bucket: int = 64
    part_tokens: int = 2**17  # smaller parts have less padding but cost host time, which workers share

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters; the optimizer keeps rounding remainders in float32."""
        return dtype_on(self.device)

    def model(self) -> MaskedLM:
        """A fresh model to train."""
        return self.fresh_model().to(self.device, self.dtype).train()

    def validation_loss(self, model: MaskedLM) -> float:
        """Mean loss over masked tokens of the validation texts."""
        examples = self.scoring.validation_examples
        return mean_losses(model, self.validation, examples=examples, longest=self.longest)["tokens"]

    def test_losses(self, model: MaskedLM) -> dict[str, Any]:
        """The test losses for a line; None if not finite."""
        examples = min(self.scoring.test_examples or len(self.test), len(self.test))
        losses = mean_losses(model, self.test, examples=examples, longest=self.longest)
        return {"test": {name: _finite(loss) for name, loss in losses.items()}, "test_examples": examples}

    def losses_of_average(self, model: MaskedLM) -> dict[str, Any]:
        """The losses for a line of a model that has averaged weights; None if not finite."""
        return {"validation_average": _finite(self.validation_loss(model)),
                "test_average": self.test_losses(model)["test"]}  # fmt: skip


class WeightAverage:
    """The exponential moving average of a model's weights, in float32: a ← decay·a + (1 − decay)·w."""

    def __init__(self, model: MaskedLM, decay: float) -> None:
        self._model, self._decay = model, decay
        self._average = [weight.float().clone() for weight in self._weights()]

    def after_step(self) -> None:
        """Include the weights as they are now."""
        weights = [weight.float() for weight in self._weights()]
        torch._foreach_lerp_(self._average, weights, 1 - self._decay)

    @contextmanager
    def in_model(self) -> Iterator[MaskedLM]:
        """The model with the averaged weights, which it has until the block ends."""
        own = [weight.clone() for weight in self._weights()]
        try:
            torch._foreach_copy_(self._weights(), self._average)
            yield self._model
        finally:
            torch._foreach_copy_(self._weights(), own)

    def state_dict(self) -> dict[str, Any]:
        """The average so far."""
        return {"average": self._average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from there."""
        torch._foreach_copy_(self._average, [value.to(self._average[0].device) for value in state["average"]])

    def _weights(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self._model.parameters()]


def run(
    cell: Mapping[str, Any], workspace: Workspace, *, beat: Curve | None = None, unfinished: Unfinished | None = None
) -> Outcome:
    """Train and score the cell. Raises `TimeLimitReached` after saving the run to `unfinished`.

    `beat` is the curve of the best tuning run of the same place so far.
    """
    training = _Training(cell, workspace)
    if unfinished is not None and (state := unfinished.found(cell)) is not None:
        training.load_state_dict(state)
    ended, steps = "finished", cell["steps"]
    for step in training.steps():
        if step % max(steps // workspace.scoring.points, 1) == 0 or step == steps:
            training.curve.append((step, workspace.validation_loss(training.model)))
            ended = _verdict(training.curve, beat, steps, WORSE_BEFORE_DECAY if "schedule" in cell else WORSE)
            if ended != "finished":
                break
        if unfinished is not None and step < steps:
            over = unfinished.is_over()
            if over or unfinished.is_due(cell):
                unfinished.keep(cell, training.state_dict())
            if over:
                raise TimeLimitReached
    result: dict[str, Any] = {
        "ended": ended,
        "validation": _finite(training.curve[-1][1]),
        "curve": [(at, _finite(loss)) for at, loss in training.curve],
        "steps_done": training.done,
        "ms_a_step": round(1e3 * training.seconds() / training.done, 2),
        **training.metrics.seen(),
    }
    if cell["purpose"] == "final":
        result |= workspace.test_losses(training.model)
        if training.average is not None:
            with training.average.in_model() as model:
                result |= workspace.losses_of_average(model)
    epsilon, note = guarantee(cell, training.plan)
    adjacency = None if note else training.plan.adjacency.value
    return Outcome(result=result, plan=described(training.plan), epsilon=epsilon, note=note, adjacency=adjacency)


class _Training:
    """A run in progress.

    The key is derived from the cell's seed. So batches, masks and noise of one seed are the same for every row, and
    rows are compared on equal terms. (The texts are public; a real run needs a secret key.)
    """

    def __init__(self, cell: Mapping[str, Any], workspace: Workspace) -> None:
        self.plan = plan_of(cell)
        key, run_id = NoiseKey.from_bytes(hashlib.sha256(f"tinybert {cell['seed']}".encode()).digest()), "tinybert"
        self.model = workspace.model()
        self.optimizer = optimizer_of(cell, self.model, self.plan, key=key, run_id=run_id)
        self.loader = private_loader(
            Indices(len(workspace.train)), self.plan, lengths=workspace.train.lengths,
            micro_batch_tokens=workspace.part_tokens, bucket=workspace.bucket,
            collate_fn=lambda rows: workspace.train.part(
                np.array(rows), bucket=workspace.bucket, longest=workspace.longest
            ),
            pin_memory=workspace.device.startswith("cuda"), key=key, run_id=run_id,
        )  # fmt: skip
        self._differentiate = self.optimizer.captured(self.model, pad_to_multiple=part_multiple(self.plan.batch_size))
        self.metrics = RunMetrics(cell, self.optimizer)
        self.average = WeightAverage(self.model, cell["average"]) if "average" in cell else None
        self._cell = cell
        self.curve: Curve = []
        self._workspace, self._secret, self._begun = workspace, key.for_run(run_id), time.perf_counter()

    @property
    def done(self) -> int:
        """The number of steps taken."""
        return self.loader.next_step

    def seconds(self) -> float:
        """Seconds since the run began, without interruptions."""
        return time.perf_counter() - self._begun

    def steps(self) -> Iterator[int]:
        """Take the remaining steps; yields their number after each."""
        workspace, begins = self._workspace, True
        generator = torch.Generator(workspace.device)
        vocabulary = self.model.bert.config.vocab_size
        for indices, width, most, _ in self.loader:
            step = self.optimizer.mechanism.step
            if begins:
                generator.manual_seed(int.from_bytes(self._secret.subkey("masks", str(step))[:8], "little") % 2**63)
                self._set_rate(step)
            self._differentiate(make_part(workspace.train, indices, width, most, vocabulary, generator))
            self.optimizer.step()
            begins = self.loader.step_ends
            if begins:
                self.metrics.after(step)
                if self.average is not None:
                    self.average.after_step()
                yield step + 1

    def _set_rate(self, step: int) -> None:
        factor = rate_factor(self._cell.get("schedule", "constant"), step, self._cell["steps"])
        for group in self.optimizer.param_groups:
            group["lr"] = factor * self._cell["lr"]

    def state_dict(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        return {**parts, "curve": self.curve, "seconds": self.seconds()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.curve = list(state["curve"])
        self._begun = time.perf_counter() - state["seconds"]

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader, "metrics": self.metrics}
        return parts if self.average is None else {**parts, "average": self.average}


def _verdict(curve: Curve, beat: Curve | None, steps: int, worse: float = WORSE) -> str:
    """Whether to continue: "finished" means yes, until the end.

    >>> _verdict([(10, math.nan)], None, 20), _verdict([(10, 5.0)], [(10, 4.0)], 20), _verdict([(5, 5.0)], [], 20)
    ('diverged', 'given up', 'finished')
    """
    step, loss = curve[-1]
    if not math.isfinite(loss) or loss > curve[0][1] + 2:
        return "diverged"
    best = dict(beat or []).get(step)
    if best is not None and steps > step >= steps / 2 and loss > best + worse:
        return "given up"
    return "finished"


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
