"""Large models on a GPU: the scale is computed when it is read, and `step()` makes no temporary of the model's size."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dpoptim
from dpoptim.clipping.gradient_factors import OuterProduct
from dpoptim.clipping.parameter_gradients import ParameterGradients
from dpoptim.kernels import choose, flat, inverse_root
from dpoptim.kernels.flat import FlatTensors
from dpoptim.kernels.inverse_root import ComputedScale, LazyInverseRoot
from dpoptim.noise import NormalSource
from dpoptim.optim import optimizer as optimizers
from tests.interpreter import DEVICE, IS_INTERPRETED, needs_triton

KEY = dpoptim.NoiseKey.from_bytes(bytes(range(32)))
PLAN = dpoptim.PrivacyPlan(num_examples=50, batch_size=6, steps=20, clip_norm=0.8, noise_multiplier=0.5)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def begun(model, plan=PLAN, **settings):
    """Two groups with different decays and betas, as trainers make them; the first has the biases."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0, "betas": (0.8, 0.9)},
        {"params": [p for p in model.parameters() if p.ndim > 1]},
    ]
    return dpoptim.scale_then_privatize(
        model,
        plan,
        1e-2,
        rule=dpoptim.AdamW(),
        param_groups=groups,
        key=KEY,
        run_id="",
        external_batches=True,
        **settings,
    )


def small(dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 31), nn.Tanh(), nn.Linear(31, 3)).to(device, dtype)


def trained(model, optimizer, steps):
    """Each step sums two micro-batches."""
    parameter = next(model.parameters())
    x = torch.randn(6, 7, generator=torch.Generator().manual_seed(1)).to(parameter)
    for _ in range(steps):
        for part in x.split(4):
            model(part).square().sum().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


@pytest.fixture
def computed(monkeypatch):
    monkeypatch.setattr(optimizers.PrivateOptimizer, "_computes_scale", lambda self: True)


@pytest.mark.parametrize("settings", [{}, {"start": 0.5}, {"exponent": 0.25, "debias": False}], ids=str)
def test_a_computed_scale_is_the_stored_one(settings, monkeypatch):
    model = small()
    expected = trained(model, begun(model, **settings), 6)
    monkeypatch.setattr(optimizers.PrivateOptimizer, "_computes_scale", lambda self: True)
    model = small()
    optimizer = begun(model, **settings)
    assert isinstance(optimizer.mechanism.scale, ComputedScale)
    torch.testing.assert_close(trained(model, optimizer, 6), expected, rtol=1e-11, atol=1e-12)


def test_a_run_with_a_computed_scale_resumes_bit_for_bit(computed):
    model = small()
    optimizer = begun(model)
    trained(model, optimizer, 4)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = trained(model, optimizer, 4)
    model = small()
    optimizer = begun(model)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    assert torch.equal(trained(model, optimizer, 4), expected)


def test_a_computed_scale_stays_fixed_within_a_step(computed):
    """Between two steps nothing changes the second moment, and a change from outside is refused."""
    model = small()
    optimizer = begun(model)
    trained(model, optimizer, 2)
    seen = []
    optimizer.observers.append(
        lambda released: seen.append({k: v.clone() for k, v in optimizer.mechanism.scale.items()})
    )
    before = {name: value.clone() for name, value in optimizer.mechanism.scale.items()}
    trained(model, optimizer, 1)
    assert all(torch.equal(value, before[name]) for name, value in seen[0].items())
    assert seen[0].keys() == before.keys() == dict(model.named_parameters()).keys()
    optimizer.state[model[0].weight]["second_moment"].add_(1.0)
    with pytest.raises(ValueError, match="second moment"):
        trained(model, optimizer, 1)


def test_clipping_and_noise_read_the_same_scale(computed, monkeypatch):
    """Even if the scale was read before the moment was changed in a way that torch does not notice."""
    monkeypatch.setattr(inverse_root, "SMALL", 0)
    model = nn.Linear(7, 3, bias=False, dtype=torch.float64)
    optimizer = dpoptim.scale_then_privatize(model, PLAN, 1e-2, key=KEY, run_id="", external_batches=True)
    model(torch.randn(6, 7, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    scale = optimizer.mechanism.scale
    assert scale is not None
    scale["weight"].mul_(1e-3)
    optimizer.state[model.weight]["second_moment"].data.zero_()
    model(1e6 * torch.ones(1, 7, dtype=torch.float64)).sum().backward()
    sums, _ = optimizer.mechanism._sums.take()
    assert float((sums["weight"] * scale["weight"]).norm()) == pytest.approx(PLAN.clip_norm)


def test_the_ledger_sees_which_parameters_a_scale_belongs_to():
    """Moments are restored by position, so groups in a different order give parameters a different scale."""
    model, moments = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(2))), torch.rand(2, 3, 3)
    mechanism = dpoptim.scale_then_privatize(model, PLAN, 1e-2, external_batches=True).mechanism
    sums, contents = FlatTensors(dict(model.named_parameters())), set()
    for vector in sums.vectors:
        vector.zero_()
    for names in (["0.weight", "1.weight"], ["1.weight", "0.weight"]):
        whole = LazyInverseRoot(moments.flatten(), 0.5, 1.0, 1.0)
        mechanism.scale = ComputedScale([(whole, dict(zip(names, moments, strict=True)))])
        contents.add(mechanism._content(sums, None, None, torch.zeros(())))
    assert len(contents) == 2


def test_the_ledger_sees_a_changed_scale(computed):
    """The content of a step differs if only the second moment differs, or only its settings."""
    contents = {}
    for name, moment, beta2 in [("a", 0.0, 0.9), ("b", 1.0, 0.9), ("c", 1.0, 0.95), ("again", 1.0, 0.9)]:
        model = small()
        optimizer = begun(model)
        optimizer.mechanism.step = 1
        for group in optimizer.param_groups:
            group["betas"] = (0.8, beta2)
        for state in optimizer.state.values():
            state["second_moment"].fill_(moment)
        optimizer._set_scale()
        optimizer.mechanism.before_step = lambda step, content, name=name: contents.update({name: content})
        optimizer.mechanism.privatize()
    assert len({contents[name] for name in "abc"}) == 3
    assert contents["again"] == contents["b"]


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_add_noise_and_compute_the_scale(dtype, monkeypatch):
    """Steps agree with those of the plain functions up to rounding."""
    steps = 2 if IS_INTERPRETED else 6
    if IS_INTERPRETED:  # clip by plain functions, because the interpreter's products of bfloat16 are wrong
        monkeypatch.setattr(choose, "on_current_device", lambda *tensors: False)
    model = small(dtype, DEVICE)
    with monkeypatch.context() as plain:
        plain.setattr(choose, "available", lambda device: False)
        expected = trained(model, begun(model), steps)
    monkeypatch.setattr(choose, "available", lambda device: True)
    monkeypatch.setattr(NormalSource, "combined", None)  # no row of noise is made
    for computes, kind in ((False, dict), (True, ComputedScale)):
        monkeypatch.setattr(optimizers.PrivateOptimizer, "_computes_scale", lambda self, computes=computes: computes)
        model = small(dtype, DEVICE)
        optimizer = begun(model)
        assert isinstance(optimizer.mechanism.scale, kind)
        found = trained(model, optimizer, steps)
        tolerance = 1e-4 if dtype == torch.float32 else 1e-2
        assert float((found - expected).norm()) <= tolerance * float(expected.norm())


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("exponent", [0.5, 0.3])
@pytest.mark.parametrize("elements", [1 << 27, 64])
def test_captured_batches_use_the_computed_scale(monkeypatch, elements, exponent, parts):
    monkeypatch.setattr(optimizers, "MAX_STORED_SCALE", 0)
    monkeypatch.setattr(flat, "MAX_ELEMENTS", elements)
    plan = dpoptim.PrivacyPlan(num_examples=50, batch_size=12, steps=20, clip_norm=0.8, noise_multiplier=0.5)
    found = []
    for captured in (False, True):
        model = small(torch.float32, "cuda")
        optimizer = begun(model, plan, exponent=exponent)
        differentiate = optimizer.captured(lambda x, model=model: model(x).square().sum(1))
        x = torch.randn(12, 7, generator=torch.Generator().manual_seed(1)).cuda()
        for _ in range(6):
            for part in x.split(12 // parts):
                if captured:
                    differentiate(part)
                else:
                    model(part).square().sum().backward()
            optimizer.step()
        assert differentiate.graphs == int(captured)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@on_gpu
def test_graphs_of_a_large_model_share_the_memory_of_their_sums():
    model = nn.Sequential(*(nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(16)))
    numel = sum(p.numel() for p in model.parameters())
    optimizer = begun(model)
    differentiate = optimizer.captured(lambda x: model(x).square().sum(1))
    reserved = []
    for examples in (2, 3, 4):
        for _ in range(3):
            differentiate(torch.randn(examples, 4096, device="cuda", dtype=torch.bfloat16))
            optimizer.step()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert differentiate.graphs == 3
    assert reserved[-1] - reserved[0] < numel  # a quarter of the sums


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("variant", ["scaled", "flat"])
def test_a_step_makes_no_temporary_of_the_models_size(variant, monkeypatch):
    """Kept: parameters and remainders in 16 bits, two moments in float32. A step adds the sums and nothing else."""
    monkeypatch.setattr(optimizers, "MAX_STORED_SCALE", 0)
    model = nn.Sequential(*(nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(16)))
    numel = sum(p.numel() for p in model.parameters())
    start = torch.cuda.memory_allocated() - 2 * numel
    optimizer = begun(model, eps_scale=1e-3 if variant == "scaled" else float("inf"))
    x = torch.randn(2, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        model(x).square().sum().backward()
        optimizer.mechanism.close_physical_batch()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() <= before + numel // 8  # an eighth of a byte per parameter
    assert torch.cuda.memory_allocated() - start <= 12.5 * numel  # cuBLAS takes some too


VARIANTS = {
    "scaled": dpoptim.scale_then_privatize,
    "flat": dpoptim.post_processing,
    "momentum": lambda *args, **settings: dpoptim.dp_sgd(*args, momentum=0.9, **settings),
    "squares": dpoptim.joint_moments,
}
NOISES = {
    "independent": {},
    "BandMF": {"noise": dpoptim.Banded(bands=3)},
    "16 bits": {"noise": dpoptim.Banded(bands=3)},
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_sums_in_several_vectors_change_nothing(variant, noise, monkeypatch):
    """Neither the noise nor the updates depend on how many vectors hold the sums."""
    memory = dpoptim.NoiseMemory(bits=16) if noise == "16 bits" else dpoptim.NoiseMemory()
    found, vectors = [], []
    for limit in (1 << 27, 100):
        monkeypatch.setattr(flat, "MAX_ELEMENTS", limit)
        monkeypatch.setattr(inverse_root, "SMALL", 0)
        monkeypatch.setattr(optimizers.PrivateOptimizer, "_computes_scale", lambda self, limit=limit: limit == 100)
        model = small()
        optimizer = VARIANTS[variant](
            model, PLAN.replace(**NOISES[noise]), 1e-2, key=KEY, run_id="", external_batches=True, noise_memory=memory
        )
        optimizer.observers.append(lambda released: vectors.append(len(FlatTensors.vectors.__get__(released.gradient))))
        found.append(trained(model, optimizer, 6))
    assert set(vectors) == {1, 3}
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-12)


def test_gradients_are_freed_while_they_are_summed(monkeypatch):
    """A vector of sums takes memory only when it is needed, and then earlier gradients are gone."""
    monkeypatch.setattr(flat, "MAX_ELEMENTS", 100)
    monkeypatch.setattr(OuterProduct, "can_be_formed", False)  # keeps the factors of the two weights
    model = small()
    sums = begun(model).mechanism._sums
    add, weighted_sum_into, batches, held = sums._add, ParameterGradients.weighted_sum_into, [], []

    def add_seen(batch):
        batches.append(batch)
        add(batch)

    def sum_seen(own, *args):
        allocated = sum(vector is not None for vector in sums._sums._sums._vectors)
        held.append((len(batches[0].gradients), allocated))
        weighted_sum_into(own, *args)

    monkeypatch.setattr(sums.engine, "on_batch", add_seen)
    monkeypatch.setattr(ParameterGradients, "weighted_sum_into", sum_seen)
    model(torch.randn(4, 7, dtype=torch.float64)).square().sum().backward()
    sums.engine.flush()
    assert held == [(3, 1), (2, 2)]  # the biases, and at first the other weight
