"""Dropout and masks come from the secret key, step by step, and leave no trace behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dpoptim
from dpoptim.data.secret_randomness import seed_for_step, seed_generators

ONES: Any = list(torch.ones(12, 3))


def drawn(key: dpoptim.NoiseKey, *, run_id: str = "a", steps: int = 0) -> torch.Tensor:
    plan = dpoptim.PrivacyPlan(num_examples=100, batch_size=10, steps=5, noise_multiplier=1.0)
    optimizer = dpoptim.dp_sgd(nn.Linear(2, 1), plan, lr=0.1, key=key, run_id=run_id, external_batches=True)
    for _ in range(steps):
        optimizer.step()
    with torch.random.fork_rng():
        seed_for_step(optimizer)
        return torch.rand(8)


def test_draws_are_a_function_of_key_run_and_step():
    key, other = (dpoptim.NoiseKey.from_bytes(bytes([number]) * 32) for number in (1, 2))
    first = drawn(key)
    assert torch.equal(first, drawn(key))
    for changed in (drawn(other), drawn(key, run_id="b"), drawn(key, steps=1)):
        assert not torch.equal(first, changed)


def test_generator_keeps_no_secret_state():
    states = []
    for number in (1, 2):
        with torch.random.fork_rng():
            drawn(dpoptim.NoiseKey.from_bytes(bytes([number]) * 32))
            seed_generators(7)
            states.append(torch.get_rng_state())
    assert torch.equal(*states)


def trained(seed: int, *, secret: bool, parts: int | None = None, stop: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights after a loop over a model with dropout, and the generator's state after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    plan = dpoptim.PrivacyPlan(num_examples=12, batch_size=4, steps=3, noise_multiplier=0.5)
    key = dpoptim.NoiseKey.from_bytes(bytes(32))
    data: Any = list(torch.arange(36.0).view(12, 3) / 36)
    loader = dpoptim.private_loader(data, plan, key=key, run_id="a", micro_batch_size=parts)
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.1, key=key, run_id="a")
    torch.manual_seed(seed)
    for batch in dpoptim.secret_randomness(loader, optimizer) if secret else loader:
        model(batch).sum(1).sum().backward()
        optimizer.step()
        if loader.step_ends and loader.next_step == stop:
            break
    return torch.cat([p.detach().flatten() for p in model.parameters()]), torch.get_rng_state()


@pytest.mark.parametrize("workers", [0, 1])
def test_resumed_run_draws_the_same_as_the_whole_run(workers):
    """Otherwise a repeated step would add the same noise to a different sum, and the noise would cancel out."""
    key = dpoptim.NoiseKey.from_bytes(bytes(32))
    plan = dpoptim.PrivacyPlan(num_examples=12, batch_size=4, steps=3, noise_multiplier=0.5)
    data: Any = list(torch.arange(36.0).view(12, 3) / 36)

    def run(saved: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        loader = dpoptim.private_loader(data, plan, key=key, run_id="a", num_workers=workers)
        optimizer = dpoptim.post_processing(model, plan, lr=0.1, key=key, run_id="a")
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
        for name, state in (saved or {}).items():
            parts[name].load_state_dict(copy.deepcopy(state))
        states = []
        for batch in dpoptim.secret_randomness(loader, optimizer):
            model(batch).sum(1).sum().backward()
            optimizer.step()
            states.append(copy.deepcopy({name: part.state_dict() for name, part in parts.items()}))
        return states

    whole = run()
    for done in (1, 2):
        again = run(whole[done - 1])
        assert len(again) == 3 - done
        for name, value in whole[-1]["model"].items():
            assert torch.equal(value, again[-1]["model"][name]), f"after {done} steps"


def test_a_plain_loop_draws_from_the_key_and_ignores_the_public_seed():
    assert not torch.equal(trained(1, secret=False)[0], trained(2, secret=False)[0])
    (one, state), (two, other) = trained(1, secret=True), trained(2, secret=True)
    assert torch.equal(one, two)
    for seed, found in ((1, state), (2, other)):
        torch.manual_seed(seed)
        assert torch.equal(found, torch.get_rng_state()), "the public generator is where it was"


def test_parts_of_a_step_continue_its_random_stream():
    """A step in parts seeds once: its parts must not have the same dropout."""
    seeds = []
    plan = dpoptim.PrivacyPlan(num_examples=12, batch_size=4, steps=2, noise_multiplier=0.5)
    loader = dpoptim.private_loader(ONES, plan, micro_batch_size=2)
    model = nn.Linear(3, 1)
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.1)
    for batch in dpoptim.secret_randomness(loader, optimizer):
        seeds.append(float(torch.rand(())))
        model(batch).sum(1).sum().backward()
        optimizer.step()
    assert len(seeds) == len(set(seeds)) == 4
    assert optimizer.observers == []


def test_a_checkpoint_after_a_step_has_no_trace_of_the_secret():
    plan = dpoptim.PrivacyPlan(num_examples=12, batch_size=4, steps=2, noise_multiplier=0.5)
    loader = dpoptim.private_loader(ONES, plan)
    model = nn.Linear(3, 1)
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.1)
    public = torch.get_rng_state()
    for batch in dpoptim.secret_randomness(loader, optimizer):
        assert not torch.equal(torch.get_rng_state(), public)
        model(batch).sum(1).sum().backward()
        optimizer.step()
        assert torch.equal(torch.get_rng_state(), public)
