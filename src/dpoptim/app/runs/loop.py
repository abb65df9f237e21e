"""The private steps of a run; each is a function of recipe, key and step alone."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpoptim.app.data.examples import Batch
from dpoptim.app.progress import StepTimes, two_digits
from dpoptim.app.recipes.defaults import learning_rate_at, optimizer_of
from dpoptim.app.runs.metrics import Diagnostics
from dpoptim.app.runs.setup import RunSetup
from dpoptim.data import private_loader
from dpoptim.data.lengths import part_multiple
from dpoptim.data.secret_randomness import seed_for_step, seed_generators
from dpoptim.integrations.run_identity import recipe_settings, run_header
from dpoptim.noise import NoiseKey
from dpoptim.privacy import StepLedger
from dpoptim.privacy.composition import EpsilonSpent


class Loop:
    """Iterating takes the remaining steps and yields an entry for the log after each.

    Every `log_every` steps, and at the first and last step, an entry has `released`, and with `debug` `not_private`.

    Guarantee: batches, masks, dropout, learning rate and noise of step t depend on (recipe, key, run, t) alone. So a
    run that resumes from `state_dict` equals the run that never stopped, bit for bit if the arithmetic repeats.
    """

    def __init__(self, setup: RunSetup, key: NoiseKey, *, digest: str) -> None:
        recipe, prepared = setup.recipe, setup.prepared
        self._setup, self._digest = setup, digest
        setup.model.train()
        self.optimizer = optimizer_of(recipe, setup.model, setup.plan, key=key)
        self.plan = self.optimizer.plan  # with the release that the optimizer chose
        cut: dict[str, Any] = {"micro_batch_size": recipe.micro_batch_size}
        if prepared.lengths is not None:
            cut |= {"lengths": prepared.lengths, "micro_batch_tokens": recipe.micro_batch_tokens}
        self._loader = private_loader(
            prepared.dataset, setup.plan, users=prepared.records.users, key=key, bucket=prepared.bucket,
            collate_fn=prepared.collate, pin_memory=setup.device.type == "cuda", digest=digest, **cut,
        )  # fmt: skip
        rows = part_multiple(setup.plan.batch_size)
        self._differentiate = self.optimizer.captured(self._losses, pad_to_multiple=rows)
        self._diagnostics = Diagnostics(self.optimizer)
        self.spent = EpsilonSpent(self.plan)
        self.step = 0  # the number of steps taken
        self._times = StepTimes(over=recipe.log_every)

    def open_ledger(self, path: Path, *, step: int | None) -> StepLedger:
        """Record every step from here on, after the checkpoint of `step`; None begins a new run."""
        settings = recipe_settings(self._setup.recipe.to_dict())
        ledger = StepLedger.open(path, run_header(self.optimizer, settings=settings, data=self._digest), step=step)
        self.optimizer.mechanism.before_step = ledger.before_step
        return ledger

    def close(self) -> None:
        """Detach the optimizer from the model."""
        self.optimizer.detach()

    def state_dict(self) -> dict[str, Any]:
        """The content of a checkpoint; it contains no secret."""
        return {
            "step": self.step,
            "model": self._setup.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": {**self._loader.state_dict(), "next_step": self.step},  # a step that failed is drawn again
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._setup.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._loader.load_state_dict(state["loader"])
        self.step = state["step"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.step == self.plan.steps:
            return
        recipe, loader, optimizer = self._setup.recipe, self._loader, self.optimizer
        losses: list[Tensor] = []
        opens = True
        for batch in self._setup.prepared.batches(loader):
            if opens:
                began, number, losses = time.perf_counter(), optimizer.mechanism.step, []
                is_logged = number == 0 or (number + 1) % recipe.log_every == 0 or number + 1 == self.plan.steps
                rate = learning_rate_at(recipe, number)
                for group in optimizer.param_groups:
                    group["lr"] = rate
                seed_for_step(optimizer)  # the model's own randomness, such as dropout
                if is_logged:
                    self._diagnostics.before()
                counted = copy.copy(optimizer.mechanism.counts_not_private) if is_logged and recipe.debug else None
            loss = self._differentiate(batch)
            if recipe.debug:
                losses.append(loss)
            optimizer.step()
            opens = loader.step_ends
            if opens:
                self.step = number + 1
                seed_generators(recipe.seed)  # drop the secret state
                spent = self.spent.at(number + 1)
                entry: dict[str, Any] = {"step": number + 1, "learning_rate": rate, "epsilon": spent}
                if self.spent.note is not None:
                    entry["epsilon_note"] = self.spent.note
                if is_logged:
                    entry["released"] = self._diagnostics.after()
                if counted is not None:
                    entry["not_private"] = self._not_private(losses, counted)
                seconds = self._times.add(time.perf_counter() - began)
                entry["seconds"] = seconds
                entry["examples_per_second"] = two_digits(self.plan.batch_size / seconds) if seconds else None
                yield entry

    def _losses(self, batch: Batch) -> Tensor:
        with self._setup.precision():
            return self._setup.prepared.loss_per_example(self._setup.model, batch)

    def _not_private(self, losses: list[Tensor], before: Any) -> dict[str, Any]:
        """Values of the step's own examples; `before` are the counts before the step."""
        now = self.optimizer.mechanism.counts_not_private
        return {
            "loss": float(torch.cat(losses).mean()),
            "clipped_fraction": (now.clipped - before.clipped) / max(1, now.examples - before.examples),
            "nonfinite": now.nonfinite - before.nonfinite,
        }
