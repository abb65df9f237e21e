"""One cell: a fine-tuning run, its losses on held-out abstracts, and what was seen on the way."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dpoptim.data import private_loader
from dpoptim.data.lengths import part_multiple
from dpoptim.noise import NoiseKey
from experiments.experiment import Outcome
from experiments.tinybert.evaluation import mean_losses
from experiments.tinybert.model import MaskedLM
from experiments.tinybert.optimizers import optimizer_of
from experiments.tinybert.privacy import described, guarantee, plan_of
from experiments.tinybert.sights import RunMetrics
from experiments.tinybert.sizes import Scoring
from experiments.tinybert.texts import Indices, Texts, made_part
from experiments.tinybert.unfinished import TimeIsOver, Unfinished

Curve = list[tuple[int, float]]
WORSE = 0.05
"""A tuning run that is so much worse than the best of its place, from half of its steps on, is given up."""


def dtype_on(device: str) -> torch.dtype:
    """bfloat16 on a GPU, float32 elsewhere."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


@dataclass(frozen=True)
class Workspace:
    """What all cells share: texts on the device, and how a fresh model is made."""

    train: Texts
    validation: Texts
    test: Texts
    fresh_model: Callable[[], MaskedLM]
    device: str
    scoring: Scoring
    longest: int = 512
    bucket: int = 64
    part_tokens: int = 2**17  # more parts have less padding and take longer on the host, which several workers share

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters; what rounding takes from their updates, the optimizer keeps in float32."""
        return dtype_on(self.device)

    def model(self) -> MaskedLM:
        """A fresh one, to be trained."""
        return self.fresh_model().to(self.device, self.dtype).train()

    def validation_loss(self, model: MaskedLM) -> float:
        """Mean over masked tokens of the validation texts that runs are scored on."""
        examples = self.scoring.validation_examples
        return mean_losses(model, self.validation, examples=examples, longest=self.longest)["tokens"]

    def test_losses(self, model: MaskedLM) -> dict[str, Any]:
        """What a line says of the test texts; a loss that is not finite is None."""
        examples = min(self.scoring.test_examples or len(self.test), len(self.test))
        losses = mean_losses(model, self.test, examples=examples, longest=self.longest)
        return {"test": {name: _finite(loss) for name, loss in losses.items()}, "test_examples": examples}


def run(
    cell: Mapping[str, Any], ground: Workspace, *, beat: Curve | None = None, unfinished: Unfinished | None = None
) -> Outcome:
    """Train the cell and score it. Raises `TimeIsOver` where that came first: `unfinished` has what was done.

    `beat` is the curve of the best tuning run of the same place so far.
    """
    training = _Training(cell, ground)
    if unfinished is not None and (state := unfinished.found(cell)) is not None:
        training.load_state_dict(state)
    ended, steps = "finished", cell["steps"]
    for step in training.steps():
        if step % max(steps // ground.scoring.points, 1) == 0 or step == steps:
            training.curve.append((step, ground.validation_loss(training.model)))
            ended = _verdict(training.curve, beat, steps)
            if ended != "finished":
                break
        if unfinished is not None and step < steps:
            over = unfinished.is_over()
            if over or unfinished.is_due(cell):
                unfinished.keep(cell, training.state_dict())
            if over:
                raise TimeIsOver
    result: dict[str, Any] = {
        "ended": ended,
        "validation": _finite(training.curve[-1][1]),
        "curve": [(at, _finite(loss)) for at, loss in training.curve],
        "steps_done": training.done,
        "ms_a_step": round(1e3 * training.seconds() / training.done, 2),
        **training.sights.seen(),
    }
    if cell["purpose"] == "final":
        result |= ground.test_losses(training.model)
    epsilon, note = guarantee(cell, training.plan)
    adjacency = None if note else training.plan.adjacency.value
    return Outcome(result=result, plan=described(training.plan), epsilon=epsilon, note=note, adjacency=adjacency)


class _Training:
    """A run under way.

    The key is made of the cell's seed: batches, masks and noise of one seed are the same for every row, so that
    rows are compared on equal terms. (The texts are public; a real run takes a secret key.)
    """

    def __init__(self, cell: Mapping[str, Any], ground: Workspace) -> None:
        self.plan = plan_of(cell)
        key, run_id = NoiseKey.from_bytes(hashlib.sha256(f"tinybert {cell['seed']}".encode()).digest()), "tinybert"
        self.model = ground.model()
        self.optimizer = optimizer_of(cell, self.model, self.plan, key=key, run_id=run_id)
        self.loader = private_loader(
            Indices(len(ground.train)), self.plan, lengths=ground.train.lengths,
            micro_batch_tokens=ground.part_tokens, bucket=ground.bucket,
            collate_fn=lambda rows: ground.train.part(np.array(rows), bucket=ground.bucket, longest=ground.longest),
            pin_memory=ground.device.startswith("cuda"), key=key, run_id=run_id,
        )  # fmt: skip
        self._differentiate = self.optimizer.captured(self.model, together=part_multiple(self.plan.batch_size))
        self.sights = RunMetrics(cell, self.optimizer)
        self.curve: Curve = []
        self._ground, self._secret, self._begun = ground, key.for_run(run_id), time.perf_counter()

    @property
    def done(self) -> int:
        """How many steps were taken."""
        return self.loader.next_step

    def seconds(self) -> float:
        """Since the run began, without the time in which it was interrupted."""
        return time.perf_counter() - self._begun

    def steps(self) -> Iterator[int]:
        """Take what is left of the steps; yields their number after each."""
        ground, begins = self._ground, True
        generator = torch.Generator(ground.device)
        vocabulary = self.model.bert.config.vocab_size
        for indices, width, most, _ in self.loader:
            step = self.optimizer.mechanism.step
            if begins:
                generator.manual_seed(int.from_bytes(self._secret.subkey("masks", str(step))[:8], "little") % 2**63)
                self.sights.before(step)
            self._differentiate(made_part(ground.train, indices, width, most, vocabulary, generator))
            self.optimizer.step()
            begins = self.loader.step_ends
            if begins:
                self.sights.after(step)
                yield step + 1

    def state_dict(self) -> dict[str, Any]:
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        return {**parts, "curve": self.curve, "seconds": self.seconds()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.curve = list(state["curve"])
        self._begun = time.perf_counter() - state["seconds"]

    def _parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "loader": self.loader, "sights": self.sights}


def _verdict(curve: Curve, beat: Curve | None, steps: int) -> str:
    """Whether to go on: "finished" is yes, until the end.

    >>> _verdict([(10, math.nan)], None, 20), _verdict([(10, 5.0)], [(10, 4.0)], 20), _verdict([(5, 5.0)], [], 20)
    ('diverged', 'given up', 'finished')
    """
    step, loss = curve[-1]
    if not math.isfinite(loss) or loss > curve[0][1] + 2:
        return "diverged"
    best = dict(beat or []).get(step)
    if best is not None and steps > step >= steps / 2 and loss > best + WORSE:
        return "given up"
    return "finished"


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
