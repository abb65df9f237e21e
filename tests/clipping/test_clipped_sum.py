"""Clipped sums against one example at a time, for every kind of layer, tying pattern and scale."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dpoptim.clipping import clipped_sum
from dpoptim.clipping.clipped_sums import ClippedSums
from tests.clipping.models import CASES, EXAMPLES, case
from tests.clipping.one_at_a_time import clipped_sum_one_at_a_time, random_scale


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


@pytest.mark.parametrize(("name", "scaled"), [(name, i % 2 == 1) for i, name in enumerate(CASES)])
def test_one_example_never_exceeds_the_clip_norm(name, scaled):
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


@pytest.mark.parametrize("name", ["tied", "lstm", "BertForMaskedLM", "LoRA on DeBERTa"])
def test_the_model_is_restored(name):
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
    """Under autocast the forward is rounded to bf16; that gradient is measured and summed, in fp32."""
    made = case(name, torch.float32)

    def loss_fn(model: nn.Module, batch: object) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return made.loss_fn(model, batch).float()

    expected, norms = clipped_sum_one_at_a_time(made.model, loss_fn, made.batch, EXAMPLES, 1.0, None)
    sums, found = clipped_sum(made.model, loss_fn, made.batch)
    torch.testing.assert_close(found, norms, rtol=0.03, atol=0)
    total = sum(float((sums[n] - expected[n]).square().sum()) for n in sums) ** 0.5
    assert total <= 0.05 * sum(float(e.square().sum()) for e in expected.values()) ** 0.5
    for j in range(EXAMPLES):  # the bound holds however coarse the forward was
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


class TestRounding:
    """Inputs whose norm fp32 arithmetic would underestimate."""

    def released(self, model: nn.Module, loss_fn, x: torch.Tensor, clip_norm: float, scale=None) -> float:
        sums, _ = clipped_sum(model, loss_fn, x, clip_norm=clip_norm, scale=scale)
        return (
            sum(float((s if scale is None else s * scale[n]).double().square().sum()) for n, s in sums.items()) ** 0.5
        )

    @pytest.mark.parametrize("positions", [1, 2])
    @pytest.mark.parametrize("scaled", [False, True])
    def test_squares_of_factors_that_underflow(self, positions, scaled):
        model = nn.Linear(64, 64, bias=False)
        x = torch.full((1, positions, 64), 1e18)
        scale = {"weight": torch.full((64, 64), 1e7)} if scaled else None
        clip_norm = 1.0 if scaled else 1e-6
        found = self.released(model, lambda m, x: 2.6e-23 * m(x).flatten(1).sum(1), x, clip_norm, scale)
        assert found == pytest.approx(clip_norm, rel=1e-4)

    @pytest.mark.parametrize("size", [1e4, 1e6, 1e9])
    def test_positions_that_cancel(self, size):
        torch.manual_seed(0)
        model = nn.Linear(8, 8, bias=False)
        a, b = size * torch.randn(8), size * torch.randn(8)
        x = torch.stack([a, b, -(a + b)] * 4)[None]
        bound = self.released(model, lambda m, x: m(x).flatten(1).sum(1), x, 1.0)
        assert bound <= 1 + 1e-4

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_flush_inside_autocast(self, dtype):
        torch.manual_seed(0)
        model = nn.Linear(64, 8, bias=False)
        sums = ClippedSums(model, clip_norm=1.0)
        sums.scale = {"weight": torch.full((8, 64), 1e-3)}
        sums.engine.attach()
        x = 1e4 * torch.randn(1, 64)
        with torch.autocast("cpu", dtype):
            (1e-4 * model(x).float()).sum(1).sum().backward()
            (total, _) = sums.take()
        assert float((total["weight"] * 1e-3).norm()) <= 1 + 1e-4


def test_one_row_that_is_not_shared_is_refused():
    class Unsqueezes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x.unsqueeze(0))[0]

    with pytest.raises(ValueError, match=r"layer 'layer' got an input of shape \(1, 4, 4\) while the batch has 4"):
        clipped_sum(Unsqueezes(), lambda m, x: m(x).square().sum(1), torch.randn(5, 4))


def test_a_model_that_cannot_run_on_a_few_rows_is_refused():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            assert len(x) == 5, "only batches of five"
            return self.layer(x)

    with pytest.raises(AssertionError, match="only batches of five") as raised:
        clipped_sum(Counts(), lambda m, x: m(x).square().sum(1), torch.randn(5, 4))
    assert "to check that examples do not mix" in raised.value.__notes__[0]


def test_norms_follow_the_gradients_dtype():
    """Also if the model changes its dtype after the optimizer was created."""
    model = nn.Linear(2, 2)
    sums = ClippedSums(model, clip_norm=1.0)
    sums.engine.attach()
    model(torch.ones(3, 2)).sum().backward()
    model.double()
    model(torch.ones(3, 2, dtype=torch.float64)).sum().backward()
    sums.engine.flush()
    assert [norms.dtype for norms in sums.norms] == [torch.float32, torch.float64]


def test_counts_of_long_runs_take_little_memory():
    sums = ClippedSums(torch.nn.Linear(2, 1), clip_norm=1.0)
    for step in range(2500):
        sums._note(torch.ones(3), torch.tensor([step % 3, 1, 0]))
    assert len(sums._outcomes) < 1024
    assert (sums.counts.clipped, sums.counts.nonfinite) == (sum(step % 3 for step in range(2500)), 2500)
