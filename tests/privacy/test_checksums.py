"""Checksums of what a step releases: equal for equal bits, wherever they are summed, and for nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dpoptim
from dpoptim.clipping import PrivateMechanism
from dpoptim.privacy.checksums import checksums


def random_vector(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(size))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9000), st.floats(0, 1, exclude_max=True), st.integers(0, 31),
    st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_one_bit_changes_them(size, where, bit, dtype):
    vector = random_vector(size, dtype)
    other = vector.clone()
    words = other.view(torch.int32)
    words[int(where * len(words))] ^= (1 << bit) if bit < 31 else -(1 << 31)
    assert checksums([vector]) == checksums([vector.clone()])
    assert checksums([vector]) != checksums([other])


@pytest.mark.parametrize("size", [2, 700, 2048, 2049, 5000, 100_001])
def test_places_and_lengths_count(size):
    vector = random_vector(size)
    for other in (vector.flip(0), vector.roll(1), torch.cat([vector, torch.zeros(1)]), vector[:-1]):
        assert checksums([vector]) != checksums([other])
    assert checksums([vector, -vector]) != checksums([-vector, vector])


def test_the_order_of_summation_is_no_matter():
    vector = random_vector(300_001)
    threads, found = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(checksums([vector]))
    torch.set_num_threads(threads)
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_they_are_the_same_on_a_gpu():
    vector = random_vector(300_001)
    assert checksums([vector]) == checksums([vector.cuda()])


def contents(model: nn.Module, plan: dpoptim.PrivacyPlan, *, make: str, shift: float = 0.0) -> list[bytes]:
    """What two steps show before their noise is made."""
    key = dpoptim.NoiseKey.from_bytes(bytes(32))
    optimizer = getattr(dpoptim, make)(copy.deepcopy(model), plan, lr=0.1, key=key, run_id="run", external_batches=True)
    found: list[bytes] = []
    optimizer.mechanism.before_step = lambda step, content: found.append(content)
    for step in range(2):
        inputs = torch.linspace(-1, 1, 12).view(4, 3) + step
        inputs[2, 1] += shift
        optimizer.mechanism._sums.engine.model(inputs).square().sum(1).sum().backward()
        optimizer.step()
    return found


@pytest.mark.parametrize("make", ["post_processing", "independent_moments", "scale_then_privatize"])
def test_a_release_shows_whether_it_is_the_same(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    plan = dpoptim.PrivacyPlan(
        steps=2, batch_size=4, num_examples=40, clip_norm=1.0, noise_multiplier=1.0, sampling=dpoptim.Poisson()
    )
    first = contents(model, plan, make=make)
    assert contents(model, plan, make=make) == first
    assert first[0] != first[1]
    other = contents(model, plan, make=make, shift=1e-6)
    assert other[0] != first[0]
    assert other[1] != first[1]
    louder = contents(model, plan.replace(noise_multiplier=2.0), make=make)
    assert louder[0] != first[0], "the same sums with other noise"


def test_the_bound_of_the_squares_is_taken_once_a_step(monkeypatch):
    taken = []
    bound_of = PrivateMechanism._bounding_factor

    def counted(release, sums):
        taken.append(release)
        return bound_of(release, sums)

    monkeypatch.setattr(PrivateMechanism, "_bounding_factor", counted)
    plan = dpoptim.PrivacyPlan(
        steps=2, batch_size=4, num_examples=40, clip_norm=1.0, noise_multiplier=1.0, sampling=dpoptim.Poisson()
    )
    for make, times in (("independent_moments", 2), ("joint_moments", 0), ("post_processing", 0)):
        taken.clear()
        contents(nn.Linear(3, 2), plan, make=make)
        assert len(taken) == times, make
