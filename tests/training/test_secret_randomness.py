"""Dropout and masks come from the secret key, step by step, and leave no trace behind."""

from __future__ import annotations

import torch
from torch import nn

import dpoptim
from dpoptim.training.support.secret_randomness import forget_seed, seed_secretly


def drawn(key: dpoptim.NoiseKey, *, run_id: str = "a", steps: int = 0) -> torch.Tensor:
    plan = dpoptim.PrivacyPlan(num_examples=100, batch_size=10, steps=5, noise_multiplier=1.0)
    optimizer = dpoptim.dp_sgd(nn.Linear(2, 1), plan, lr=0.1, key=key, run_id=run_id, own_batches=True)
    for _ in range(steps):
        optimizer.step()
    with torch.random.fork_rng():
        seed_secretly(optimizer)
        return torch.rand(8)


def test_draws_are_a_function_of_key_run_and_step():
    key, other = (dpoptim.NoiseKey.from_bytes(bytes([number]) * 32) for number in (1, 2))
    first = drawn(key)
    assert torch.equal(first, drawn(key))
    for changed in (drawn(other), drawn(key, run_id="b"), drawn(key, steps=1)):
        assert not torch.equal(first, changed)


def test_nothing_of_the_secret_stays_in_the_generator():
    states = []
    for number in (1, 2):
        with torch.random.fork_rng():
            drawn(dpoptim.NoiseKey.from_bytes(bytes([number]) * 32))
            forget_seed(7)
            states.append(torch.get_rng_state())
    assert torch.equal(*states)
