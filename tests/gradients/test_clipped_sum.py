"""Clipped sums against one example at a time, for every kind of layer, tying pattern and scale."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dpoptim.gradients import clipped_sum
from dpoptim.gradients.clipping import ClippedSums
from tests.gradients.models import CASES, EXAMPLES, case
from tests.gradients.one_at_a_time import clipped_sum_one_at_a_time, gradients_one_at_a_time, random_scale


def middle_norm(norms: torch.Tensor) -> float:
    """A clip norm that clips some examples and not others."""
    ordered = norms.sort().values
    return float((ordered[1] + ordered[2]) / 2)


@pytest.mark.parametrize("scaled", [False, True], ids=["flat", "scaled"])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_example_at_a_time(name, scaled):
    made = case(name)
    scale = random_scale(made.model) if scaled else None
    _, norms = clipped_sum_one_at_a_time(made.model, made.loss_fn, made.batch, EXAMPLES, 1.0, scale)
    clip_norm = middle_norm(norms)
    expected, norms = clipped_sum_one_at_a_time(made.model, made.loss_fn, made.batch, EXAMPLES, clip_norm, scale)
    sums, found = clipped_sum(made.model, made.loss_fn, made.batch, clip_norm=clip_norm, scale=scale)
    torch.testing.assert_close(found, norms, rtol=1e-10, atol=1e-12)
    assert sums.keys() == expected.keys()
    for parameter, total in expected.items():
        torch.testing.assert_close(sums[parameter], total, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("scaled", [False, True], ids=["flat", "scaled"])
@pytest.mark.parametrize("name", CASES)
def test_one_example_never_passes_the_clip_norm(name, scaled):
    made = case(name)
    scale = random_scale(made.model) if scaled else None
    clip_norm = 1e-3
    for j in range(EXAMPLES):
        own = torch.utils._pytree.tree_map(lambda t, j=j: t[j : j + 1], made.batch)
        sums, norms = clipped_sum(made.model, made.loss_fn, own, clip_norm=clip_norm, scale=scale)
        assert float(norms[0]) > clip_norm
        released = sum(float(((s if scale is None else s * scale[n]) ** 2).sum()) for n, s in sums.items()) ** 0.5
        assert released <= clip_norm * (1 + 1e-12)
        assert released >= clip_norm * (1 - 1e-9)


@pytest.mark.parametrize("name", CASES)
def test_model_is_given_back_untouched(name):
    made = case(name)
    before = copy.deepcopy(made.model)
    clipped_sum(made.model, made.loss_fn, made.batch)
    for (n, p), q in zip(made.model.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q), n
        assert p.grad is None
    for module in made.model.modules():
        assert "forward" not in module.__dict__
        assert "_dpoptim_engine" not in module.__dict__
        assert not module._forward_pre_hooks
    gradients_one_at_a_time(made.model, made.loss_fn, made.batch, EXAMPLES)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel", "mlp with in-place activations", "cnn", "tied"])
def test_fp32_is_close(name):
    made = case(name, torch.float32)
    exact = case(name)
    scale = random_scale(made.model)
    sums, norms = clipped_sum(made.model, made.loss_fn, made.batch, scale=scale)
    expected, expected_norms = clipped_sum(
        exact.model, exact.loss_fn, exact.batch, scale={n: s.double() for n, s in scale.items()}
    )
    torch.testing.assert_close(norms.double(), expected_norms, rtol=2e-6, atol=0)
    for n, total in expected.items():
        assert float((sums[n].double() - total).norm()) <= 1e-5 * max(float(total.norm()), 1e-3), n


@pytest.mark.parametrize(
    "name",
    [
        "BertForMaskedLM",
        "GPT2LMHeadModel",
        "mlp with in-place activations",
        "cnn",
        "tied",
        "lstm",
        "attention",
    ],
)
def test_bf16_autocast(name):
    """Under autocast the forward is rounded to bf16; what is measured and released is that gradient, in fp32."""
    made = case(name, torch.float32)

    def loss_fn(model: nn.Module, batch: object) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return made.loss_fn(model, batch).float()

    expected, norms = clipped_sum_one_at_a_time(made.model, loss_fn, made.batch, EXAMPLES, 1.0, None)
    sums, found = clipped_sum(made.model, loss_fn, made.batch)
    torch.testing.assert_close(found, norms, rtol=0.03, atol=0)
    total = sum(float((sums[n] - expected[n]).square().sum()) for n in sums) ** 0.5
    assert total <= 0.05 * sum(float(e.square().sum()) for e in expected.values()) ** 0.5
    for j in range(EXAMPLES):  # what is released obeys the bound however coarse the forward was
        own = torch.utils._pytree.tree_map(lambda t, j=j: t[j : j + 1], made.batch)
        alone, _ = clipped_sum(made.model, loss_fn, own, clip_norm=1e-3)
        assert sum(float(s.square().sum()) for s in alone.values()) ** 0.5 <= 1e-3 * (1 + 1e-5)


def test_bf16_model_is_measured_in_fp32():
    made = case("mlp with in-place activations", torch.bfloat16)
    sums, norms = clipped_sum(made.model, made.loss_fn, made.batch, clip_norm=1e-3)
    assert norms.dtype == torch.float32
    assert all(total.dtype == torch.float32 for total in sums.values())


def test_gram_norm_is_checked_against_cancellation():
    """Positions that cancel: the Gram product loses every digit in fp32, the gradient itself does not."""
    model = nn.Linear(64, 64, bias=False)
    x = torch.randn(3, 2, 64)
    x[:, 1] = x[:, 0] * (1 + 1e-4)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return 1e3 * (y[:, 0] - y[:, 1]).sum(1)

    _, norms = clipped_sum(model, loss_fn, x)
    exact = copy.deepcopy(model).double()
    _, expected = clipped_sum(exact, loss_fn, x.double())
    torch.testing.assert_close(norms.double(), expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["mlp with in-place activations", "linear 3-D", "cnn", "lstm", "attention"])
def test_example_that_is_not_finite_has_weight_zero(name, bad):
    made = case(name)
    batch = made.batch.clone()
    batch[2] = bad
    sums, norms = clipped_sum(made.model, made.loss_fn, batch, clip_norm=0.5)
    rest = torch.cat([made.batch[:2], made.batch[3:]])
    expected, _ = clipped_sum(made.model, made.loss_fn, rest, clip_norm=0.5)
    assert not norms[2].isfinite()
    for n, total in expected.items():
        torch.testing.assert_close(sums[n], total, rtol=1e-10, atol=1e-12)


def test_every_parameter_of_bert_tiny_is_covered_once():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)
    sums = ClippedSums(BertForMaskedLM(config), clip_norm=1.0)
    assert sum(p.numel() for p in sums.parameters.values()) == 4_416_698
