"""Forwards that give one example's gradient to rows of others are warned of; those that only look like it are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpoptim.clipping import clipped_sum
from dpoptim.clipping.clipped_sums import ClippedSums

B, T, D = 20, 4, 6


class Positions(nn.Module):
    """Tokens and positions; cases differ in what they do with the positions' one row."""

    def __init__(self, used: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.tokens, self.positions, self.out, self.used = (
            nn.Embedding(17, D),
            nn.Embedding(20, D),
            nn.Linear(D, 1),
            used,
        )

    def forward(self, ids: Tensor) -> Tensor:
        places = self.positions(torch.arange(ids.shape[1])[None])
        return self.out(self.used(self.tokens(ids), places)).sum((1, 2))


class ClassToken(nn.Module):
    """One row looked up by an id of shape [1], and put before every text."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.first, self.out = nn.Embedding(17, D), nn.Embedding(1, D), nn.Linear(D, 1)

    def forward(self, ids: Tensor) -> Tensor:
        token = self.first(torch.zeros(1, dtype=torch.long)).unsqueeze(0).expand(len(ids), -1, -1)
        return self.out(torch.cat([token, self.tokens(ids)], 1)).sum((1, 2))


class Sorted(nn.Module):
    """Goes through its layers in another order and puts it back."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(17, D), nn.Linear(D, 1)

    def forward(self, ids: Tensor) -> Tensor:
        order = ids.sum(1).argsort()
        return self.out(self.tokens(ids[order])).sum((1, 2))[order.argsort()]


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(17, D), nn.Linear(D, 1)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids)
        return self.out((hidden - hidden.mean(0)).square()).sum((1, 2))


class TimeFirst(nn.Module):
    """Returns [positions, examples], which is no mixing, whatever the lengths are."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(17, D), nn.Linear(D, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.tokens(ids))[..., 0].T


def losses(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).square()


def ids_of(positions: int = T) -> Tensor:
    return torch.randint(0, 17, (B, positions), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Positions(lambda tokens, places: tokens + places[0]), "positions.weight"),
        (Positions(lambda tokens, places: tokens + places.mean(0)), "positions.weight"),
        (Positions(lambda tokens, places: tokens + places[-1]), "positions.weight"),
        (ClassToken(), "first.weight"),
        (Sorted(), "out.weight"),
        (Centred(), "tokens.weight"),
    ],
    ids=["first row", "mean of rows", "last row", "class token", "sorted", "centred"],
)
def test_rows_of_other_examples_are_warned_of(model, name):
    with pytest.warns(UserWarning, match=f"hangs on the rows of others in the layer of '{name}'"):
        clipped_sum(model, losses, ids_of())


@pytest.mark.parametrize("positions", [T, B])
@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (Positions(lambda tokens, places: tokens + places), losses),
        (Positions(lambda tokens, places: torch.cat([places.expand(len(tokens), -1, -1), tokens], 1)), losses),
        (TimeFirst(), lambda model, ids: model(ids).square().sum(0)),
    ],
    ids=["added", "put before", "time first"],
)
def test_nothing_is_said_where_rows_stay_apart(model, loss, positions):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clipped_sum(model, loss, ids_of(positions))


def test_looking_at_rows_leaves_no_trace():
    """Gradients, random numbers and what hangs on an argument are as if nothing had been looked at."""
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
def test_a_model_inside_a_checkpoint_is_looked_at_and_runs(reentrant):
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 1))
    sums = ClippedSums(model, clip_norm=1.0)
    sums.engine.attach()
    inputs = torch.randn(B, D, requires_grad=True)
    for _ in range(2):
        checkpoint(model, inputs, use_reentrant=reentrant).sum().backward()
        sums.take()
    assert sums.counts.examples == 2 * B


def test_inputs_that_a_forward_writes_to_are_written_to_once():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.mul_(2.0).clone())

    inputs = torch.ones(B, D)
    sums = ClippedSums(InPlace(), clip_norm=1.0)
    sums.engine.attach()
    sums.engine.model(inputs).sum().backward()
    assert torch.equal(inputs, torch.full((B, D), 2.0))


def test_what_is_compared_with_one_example_at_a_time_is_the_batch_itself():
    """A module without a rule that mixes behind the rows that are looked at."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(D))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * (x - (x * (x[:, :1] > 5)).sum(0))

    x = torch.randn(B + 5, D)
    x[-1, 0] = 10.0
    with pytest.raises(ValueError, match="gives another result when its examples are run one at a time"):
        clipped_sum(nn.Sequential(Late(), nn.Linear(D, 1)), lambda model, x: model(x).sum(1), x, clip_norm=1.0)


def test_a_trial_feeds_no_other_engine():
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
    """A row that was picked by its content is not one that all examples share, though shared rows exist."""

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
    """Its backward fails as often as it is told to."""

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


def test_a_backward_that_fails_counts_for_nothing():
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


def test_a_backward_that_failed_may_not_be_run_again_on_the_same_graph():
    model = FailsBetweenLayers()
    sums = ClippedSums(model, clip_norm=1.0)
    sums.engine.attach()
    loss = model(torch.randn(B, D)).sum()
    Failing.left = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(ValueError, match="a backward failed and another went through the same call"):
        sums.take()
