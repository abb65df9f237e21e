"""Estimate the memory and time of a run by taking a step on random examples; nothing is released or written."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch

from dpoptim.app.models.prepared import random_batch
from dpoptim.app.recipes.defaults import optimizer_of
from dpoptim.app.runs.setup import RunSetup
from dpoptim.data.lengths import cut_by_length, part_multiple
from dpoptim.data.processes import check_alone
from dpoptim.data.users import UserRecords
from dpoptim.optim.out_of_memory import RUNNING, advising, state_bytes


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes and seconds of a run; `working_bytes` is the extra memory of one micro-batch."""

    parameter_bytes: int
    optimizer_bytes: int
    noise_bytes: int
    working_bytes: int
    step_seconds: float
    run_seconds: float

    @property
    def memory_bytes(self) -> int:
        return self.parameter_bytes + self.optimizer_bytes + self.noise_bytes + self.working_bytes


def estimate(setup: RunSetup) -> Estimate:
    """Measure a private step on random examples; it changes the model, so `setup` cannot be used afterwards."""
    check_alone("--dry-run")
    prepared, plan, device = setup.prepared, setup.plan, setup.device
    setup.model.train()
    most = plan.records_per_user or 1
    sizes = {"num_examples": plan.num_examples * most, "batch_size": plan.batch_size * most, "delta": None}
    of_examples = plan.replace(unit="example", records_per_user=None, **sizes)  # clipped one by one, at the same cost
    optimizer = optimizer_of(setup.recipe, setup.model, of_examples, external_batches=True)
    parts = _parts(setup)
    before = _peak(device)
    seconds: list[float] = []
    for warm in (True, False):
        for part in parts[: 1 if warm else 3]:
            began = _now(device)
            with advising(optimizer, RUNNING):
                with setup.precision():
                    loss = prepared.loss_per_example(setup.model, random_batch(prepared, part))
                loss.sum().backward()
            if not warm:
                seconds.append(_now(device) - began)
        began = _now(device)
        if plan.steps > 1 or not warm:  # a plan of one step has one update
            optimizer.step()
        update = _now(device) - began
    working = max(0, _peak(device) - before)
    optimizer.detach()
    step_seconds = len(parts) * float(np.mean(seconds)) + update
    return Estimate(
        parameter_bytes=sum(value.nbytes for value in setup.model.parameters()),
        optimizer_bytes=state_bytes(optimizer),
        noise_bytes=optimizer.mechanism.noise_memory_bytes,
        working_bytes=working,
        step_seconds=step_seconds,
        run_seconds=step_seconds * plan.steps,
    )


def _parts(setup: RunSetup) -> list[list[int]]:
    """The lengths of the records in each micro-batch of a batch of the expected size."""
    recipe, prepared = setup.recipe, setup.prepared
    assert recipe.batch_size is not None
    records = recipe.batch_size
    if prepared.records.users is not None and recipe.records_per_user is not None:
        counts = np.bincount(UserRecords(prepared.records.users).user_of)
        records = round(records * np.minimum(counts, recipe.records_per_user).mean())
    if prepared.lengths is None:
        size = recipe.micro_batch_size or records
        return [[1] * min(size, records - start) for start in range(0, records, size)]
    drawn = np.random.default_rng(0).choice(prepared.lengths, records)
    cuts = cut_by_length(
        drawn,
        max_tokens=recipe.micro_batch_tokens or int(drawn.sum()),
        max_examples=recipe.micro_batch_size,
        bucket=prepared.bucket,
        multiple=part_multiple(records),
    )
    found = [drawn[cut].tolist() for cut in cuts]
    np.random.default_rng(1).shuffle(found)
    return found


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
