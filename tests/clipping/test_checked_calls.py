"""Checks beside other engines, checkpoints and failed backwards; rows that no check has seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpoptim.clipping import clipped_sum
from dpoptim.clipping.clipped_sums import ClippedSums

B, D = 20, 6


def test_a_check_leaves_no_trace():
    """Gradients, random numbers and the graph of an argument are the same as without a check."""
    model = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Linear(D, 1)).train()
    sums = ClippedSums(model, clip_norm=1.0)
    sums.engine.attach()
    before = torch.randn(B, D, requires_grad=True)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    inputs = before.tanh()
    sums.engine.begin_call(model, (inputs,), {})
    assert torch.equal(torch.rand(3), expected)
    sums.engine.end_call(model, inputs)
    assert before.grad is None
    model(inputs).sum().backward()
    assert before.grad is not None
    assert all(parameter.grad is None for parameter in model.parameters())
    sums.take()
    assert sums.counts.examples == B


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_inside_a_checkpoint_is_checked_and_runs(reentrant):
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1))
    sums = ClippedSums(model, clip_norm=1.0)
    sums.engine.attach()
    inputs = torch.randn(B, D, requires_grad=True)
    for _ in range(2):
        checkpoint(model, inputs, use_reentrant=reentrant).sum().backward()
        sums.take()
    assert sums.counts.examples == 2 * B


def test_a_model_that_calls_itself_without_gradients_stays_in_its_call():
    """Self-conditioning: the inner call must not end the outer one."""

    class SelfConditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x: Tensor, inner: bool = False) -> Tensor:
            if not inner:
                with torch.no_grad():
                    x = x + self(x, inner=True)
            return self.linear(x)

    model, x = SelfConditioned(), torch.randn(B, D)
    sums = ClippedSums(model, clip_norm=1.0)
    sums.engine.attach()
    model(x).sum().backward()
    sums.take()
    assert sums.counts.examples == B


def test_the_generic_rule_compares_the_whole_batch():
    """A module without a rule mixes only outside the rows of the check."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(D))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * (x - (x * (x[:, :1] > 5)).sum(0))

    x = torch.randn(B + 5, D)
    x[-1, 0] = 10.0
    with pytest.raises(ValueError, match="gives a different result when its examples run one at a time"):
        clipped_sum(nn.Sequential(Late(), nn.Linear(D, 1)), lambda model, x: model(x).sum(1), x, clip_norm=1.0)


def test_a_check_records_nothing_in_other_engines():
    inner = nn.Linear(D, D)
    of_inner = ClippedSums(inner, clip_norm=1.0)
    of_inner.engine.attach()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.other = nn.Linear(D, D), nn.Linear(D, 1), [inner]

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.other[0](self.first(x)))

    sums = ClippedSums(Outer(), clip_norm=1.0)
    sums.engine.attach()
    sums.engine.model(torch.randn(B, D)).sum().backward()
    sums.take(), of_inner.take()
    assert sums.counts.examples == of_inner.counts.examples == B


def test_one_row_that_is_not_shared_is_refused():
    """A row that is picked by its content is not shared by all examples."""

    class Picked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.picked = nn.Linear(D, D), nn.Linear(D, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(x)
            chosen = x[:, 0] > 0
            return (
                hidden.sum(1).index_put((chosen,), self.picked(hidden[chosen])[:, 0]) if chosen.any() else hidden.sum(1)
            )

    sums = ClippedSums(Picked(), clip_norm=1.0)
    sums.engine.attach()
    model = sums.engine.model
    x = -torch.rand(2, D)
    model(x).sum().backward()
    x = x.clone()
    x[1, 0] = 1.0
    with pytest.raises(ValueError, match="layer 'picked' got an input of shape"):
        model(x)


class Failing(torch.autograd.Function):
    """Its backward fails `left` times."""

    left = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Failing.left:
            Failing.left -= 1
            raise RuntimeError("out of memory, say")
        return grad


class FailsBetweenLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Failing.apply(self.first(x)))[:, 0]


def test_a_failed_backward_does_not_count():
    torch.manual_seed(0)
    model, x = FailsBetweenLayers(), torch.randn(B, D)
    sums = ClippedSums(model, clip_norm=1.0)
    sums.engine.attach()
    loss = model(x).sum()
    Failing.left = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        loss.backward()
    for part in x.split(B // 2):
        model(part).sum().backward()
    found, _ = sums.take()
    assert sums.counts.examples == B
    sums.engine.detach()
    expected, _ = clipped_sum(model, lambda model, x: model(x), x)
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total)


def test_a_failed_backward_cannot_run_again_on_the_same_graph():
    model = FailsBetweenLayers()
    sums = ClippedSums(model, clip_norm=1.0)
    sums.engine.attach()
    loss = model(torch.randn(B, D)).sum()
    Failing.left = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(ValueError, match="a backward failed and a second one ran through the same call"):
        sums.take()
