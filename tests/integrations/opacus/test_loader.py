"""Batches are drawn as the plan says, one epoch per iteration, whole or in parts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset

import dpoptim
from dpoptim.integrations.opacus import (
    BatchMemoryManager,
    PrivacyEngine,
    make_private,
)
from tests.integrations.opacus.cases import DELTA, EXPECTED_WARNINGS, convolutions, images, of_linear, one_epoch

pytestmark = EXPECTED_WARNINGS


def test_every_example_is_drawn_at_the_sampling_rate():
    private = of_linear(50, 8, key=dpoptim.NoiseKey.from_bytes(bytes(32)))
    batches = private.data_loader.private_loader.physical_batches
    drawn = np.array([sum(len(part) for part, _ in batches(step)) for step in range(2000)])
    assert abs(drawn.mean() - 50 / 7) < 5 * math.sqrt(50 / 7 / 2000)  # 5 standard errors, 2.6 %
    assert abs(drawn.var() / (50 / 7 * 6 / 7) - 1) < 0.2  # batches of one size, or of a Poisson number, fail


def test_an_iteration_is_an_epoch_and_the_run_ends_as_planned():
    private = of_linear(50, 8, target_epsilon=3.0, target_delta=DELTA, epochs=2)
    for epoch in (1, 2):
        one_epoch(*private)
        assert private.steps_taken == 7 * epoch
    assert 3.0 - 1e-3 < private.epsilon(DELTA) <= 3.0
    with pytest.raises(ValueError, match="all 14 steps have been taken"):
        iter(private.data_loader)


def test_a_batch_that_was_not_used_is_drawn_again():
    private = of_linear()
    looked_at = next(iter(private.data_loader))
    model, optimizer, loader = private
    for number, (inputs, target) in enumerate(loader):
        if number == 0:
            assert torch.equal(inputs, looked_at[0])
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
        if number == 2:
            break  # an epoch left early
    assert private.steps_taken == 3
    one_epoch(*private)
    assert private.steps_taken == 3 + 7


def test_skipping_a_batch_is_refused():
    private = of_linear()
    with pytest.raises(ValueError, match=r"Call step\(\) once for each batch"):
        for _ in private.data_loader:
            pass


def ones_for_targets(batch: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([inputs for inputs, _ in batch]), torch.ones(len(batch)).long()


def test_workers_and_collation_are_kept():
    private = of_linear(
        20, data_loader=lambda d: DataLoader(d, batch_size=8, num_workers=1, collate_fn=ones_for_targets, shuffle=True)
    )
    for inputs, target in private.data_loader:
        assert bool((target == 1).all())
        F.cross_entropy(private.module(inputs), target).backward()
        private.optimizer.step()
    assert private.steps_taken == 3


def test_a_loader_may_be_made_private_again():
    first = of_linear()
    second = of_linear(data_loader=lambda _: first.data_loader)
    assert second.data_loader.dataset is first.data_loader.dataset
    one_epoch(*second)


@pytest.mark.parametrize("other", ["the loader that was given", "another engine's loader"])
@pytest.mark.parametrize("began", [False, True])
def test_batches_of_other_loaders_are_refused(other, began):
    model = nn.Linear(3, 2)
    others = of_linear(40, 20, model=model)
    private = of_linear(40, 4, model=model)
    if began:
        one_epoch(*private)
    taken = private.steps_taken
    before = model.weight.detach().clone()
    wrong = private.data_loader.original if other == "the loader that was given" else others.data_loader
    with pytest.raises(ValueError, match="called twice for one batch" if began else "Loop over that loader"):
        one_epoch(model, private.optimizer, wrong)
    assert torch.equal(model.weight, before)
    assert private.steps_taken == taken
    one_epoch(*private)  # the refused examples are dropped, and the run continues
    assert private.steps_taken == taken + 10


def test_dropout_depends_on_the_key_and_not_on_the_public_seed():
    """With a public seed, one more record would shift the dropout of all others."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
        data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
        private = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=0.0,
            max_grad_norm=1.0,
            data_loader=torch.utils.data.DataLoader(data, batch_size=8), key=dpoptim.NoiseKey.from_bytes(bytes(32)),
        )  # fmt: skip
        private.optimizer.mechanism._begin_run("one")
        private.data_loader.private_loader._begin_run("one")
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        for inputs, labels in private.data_loader:
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            private.optimizer.step()
        assert torch.equal(torch.get_rng_state(), before)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found)


def test_parameters_change_once_per_step_with_micro_batches():
    model = convolutions()
    private = make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(images(), batch_size=12), noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    moved, sizes = [], []
    with BatchMemoryManager(
        data_loader=private.data_loader, max_physical_batch_size=5, optimizer=private.optimizer
    ) as parts:
        assert len(parts) == 3
        for inputs, target in parts:
            before = model.out.weight.detach().clone()
            private.optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            private.optimizer.step()
            moved.append(not torch.equal(before, model.out.weight))
            sizes.append(len(inputs))
    assert sizes == [4, 4, 4]
    assert moved == [False, False, True]


def test_an_empty_batch_is_a_step_of_noise(monkeypatch):
    monkeypatch.setattr(dpoptim.Poisson, "indices", lambda *_, **__: np.zeros(0, dtype=np.int64))
    key = dpoptim.NoiseKey.from_bytes(bytes(range(32)))
    for sigma, moves in ((0.0, False), (1.0, True)):
        model = convolutions()
        private = make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(images(), batch_size=4), noise_multiplier=sigma, max_grad_norm=1.0, key=key,
        )  # fmt: skip
        one_epoch(*private)
        assert private.steps_taken == 3
        same = [torch.equal(a, b) for a, b in zip(model.parameters(), convolutions().parameters(), strict=True)]
        assert same == [not moves] * len(same)


def test_a_subset_selects_examples():
    private = of_linear(data_loader=lambda d: DataLoader(Subset(d, range(10)), batch_size=5))
    one_epoch(*private)
    assert private.steps_taken == 2


class PublicSeed:
    """A collator with its own generator."""

    def __init__(self) -> None:
        self.draws = torch.Generator().manual_seed(0)

    def __call__(self, rows: Any) -> Any:
        return torch.rand(len(rows), 3, generator=self.draws), torch.zeros(len(rows), dtype=torch.long)


def test_a_collator_with_a_public_seed_is_refused():
    with pytest.raises(ValueError, match=r"collate_fn.*public seed"):
        of_linear(data_loader=lambda d: DataLoader(d, batch_size=4, collate_fn=PublicSeed()))
