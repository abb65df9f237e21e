"""One cell: a fine-tuning run, its losses on held-out abstracts, and what was seen on the way."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from dpoptim.noise import NoiseKey
from dpoptim.privacy import private_loader
from dpoptim.reproduce.experiment import Outcome
from dpoptim.reproduce.tinybert.evaluation import mean_losses
from dpoptim.reproduce.tinybert.model import MaskedLM
from dpoptim.reproduce.tinybert.optimizers import optimizer_of
from dpoptim.reproduce.tinybert.privacy import described, guarantee, plan_of
from dpoptim.reproduce.tinybert.sights import Sights
from dpoptim.reproduce.tinybert.texts import Texts, made_part

Curve = list[tuple[int, float]]
WORSE = 0.05
"""A tuning run that is so much worse than the best of its place, from half of its steps on, is given up."""


@dataclass(frozen=True)
class Ground:
    """What all cells share: texts on the device, and how a fresh model is made."""

    train: Texts
    validation: Texts
    test: Texts
    fresh_model: Callable[[], MaskedLM]
    device: str
    longest: int = 512
    bucket: int = 64
    part_tokens: int = 2**19
    validation_examples: int = 4096

    def precision(self) -> AbstractContextManager[object]:
        """bfloat16 for products on a GPU, parameters in float32; all float32 elsewhere."""
        return torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else nullcontext()


def run(cell: Mapping[str, Any], ground: Ground, *, beat: Curve | None = None) -> Outcome:
    """Train the cell and score it.

    The key is made of the cell's seed: batches, masks and noise of one seed are the same for every row, so that
    rows are compared on equal terms. (The texts are public; a real run takes a secret key.) `beat` is the curve of the
    best tuning run of the same place so far.
    """
    plan = plan_of(cell)
    key = NoiseKey.from_bytes(hashlib.sha256(f"tinybert {cell['seed']}".encode()).digest())
    run_id = "tinybert"
    model = ground.fresh_model().to(ground.device).train()
    optimizer = optimizer_of(cell, model, plan, key=key, run_id=run_id)
    loader = private_loader(
        cast(Any, range(len(ground.train))), plan, lengths=ground.train.lengths, micro_batch_tokens=ground.part_tokens,
        bucket=ground.bucket, collate_fn=lambda rows: ground.train.part(
            np.array(rows), bucket=ground.bucket, longest=ground.longest
        ), pin_memory=ground.device == "cuda", key=key, run_id=run_id,
    )  # fmt: skip
    secret = key.for_run(run_id)
    generator = torch.Generator(ground.device)
    vocabulary = model.bert.config.vocab_size
    sights = Sights(cell, optimizer)
    curve: Curve = []
    ended = "finished"
    step, begins, started = 0, True, time.perf_counter()
    for indices, width, most, _ in loader:
        if begins:
            generator.manual_seed(int.from_bytes(secret.subkey("masks", str(step))[:8], "little") % 2**63)
            sights.before(step)
        with ground.precision():
            losses = model(made_part(ground.train, indices, width, most, vocabulary, generator))
        losses.sum().backward()
        optimizer.step()
        begins = loader.step_ends
        if not begins:
            continue
        sights.after(step)
        step += 1
        if step % max(cell["steps"] // 20, 1) == 0 or step == cell["steps"]:
            curve.append((step, _validation(model, ground)))
            ended = _verdict(curve, beat, cell["steps"])
            if ended != "finished":
                break
    seconds = time.perf_counter() - started
    result: dict[str, Any] = {
        "ended": ended,
        "validation": _finite(curve[-1][1]),
        "curve": [(at, _finite(loss)) for at, loss in curve],
        "steps_done": step,
        "ms_a_step": round(1e3 * seconds / step, 2),
        **sights.seen(),
    }
    if cell["purpose"] == "final":
        result["test"] = {
            name: _finite(loss)
            for name, loss in mean_losses(model, ground.test, ground.precision(), longest=ground.longest).items()
        }
        result["test_examples"] = len(ground.test)
    epsilon, note = guarantee(cell, plan)
    adjacency = None if note else plan.adjacency.value
    return Outcome(result=result, plan=described(plan), epsilon=epsilon, note=note, adjacency=adjacency)


def _validation(model: MaskedLM, ground: Ground) -> float:
    return mean_losses(
        model, ground.validation, ground.precision(), examples=ground.validation_examples, longest=ground.longest
    )["tokens"]


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
