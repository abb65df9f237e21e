"""Calls of models, parts and layers: rows that are not examples are refused, never clipped as examples."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpoptim
from dpoptim.clipping import check_example_independence, clipped_sum
from dpoptim.clipping.clipped_sums import ClippedSums
from dpoptim.validation.model_check import BatchAxisError
from tests.clipping.one_at_a_time import assert_exact

B = 6


class Positions(nn.Module):
    """Adds a table of positions if they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.table = nn.Linear(4, 4), nn.Embedding(50, 4)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        h = self.body(x)
        return (h if positions is None else h * self.table(positions)).sum((1, 2))

    def losses(self, x: Tensor) -> Tensor:
        return (x * self.table(torch.arange(x.shape[1]))).sum((1, 2))


class Inside(nn.Module):
    """A model whose part `net` is called by a loop."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))[:, 0]


class Mean(nn.Sequential):
    """Returns a mean loss, as a Hugging Face model does with labels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


class Towers(nn.Module):
    """Two inputs that never interact."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(y)


def attached(model: nn.Module) -> ClippedSums:
    sums = ClippedSums(model, clip_norm=1.0)
    sums.engine.attach()
    return sums


# -- calls that share one backward --------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", ["weight", "bias"])
@pytest.mark.parametrize("extra_memory", [0, 1 << 20])
@pytest.mark.parametrize("anchor_first", [True, False])
def test_a_shared_row_in_the_same_backward_as_a_batch_is_refused(trained, extra_memory, anchor_first):
    model = nn.Linear(4, 4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == trained)
    check_example_independence(model, lambda m, x: (m(x) * m(x)).sum(1), torch.randn(B, 4))
    sums = ClippedSums(model, clip_norm=1.0)
    sums.engine.extra_memory = extra_memory
    sums.engine.attach()
    inputs = [torch.ones(1, 4), torch.randn(B, 4)]
    one, other = (model(x) for x in (inputs if anchor_first else inputs[::-1]))
    with pytest.raises(ValueError, match=r"has \d examples where other layers have \d in the same backward"):
        (one * other).sum().backward()


def test_a_second_backward_through_a_closed_call_is_refused():
    model = Inside(nn.Linear(4, 4))
    sums = attached(model)
    x = torch.randn(B, 4)
    first = model(x)
    first.sum().backward(retain_graph=True)
    model(x).sum()
    with pytest.raises(ValueError, match="examples would count twice"):
        first.square().sum().backward()
    sums.engine.discard()


def test_two_backwards_of_one_call_are_one_batch():
    model, x = Inside(nn.Linear(4, 4)), torch.randn(B, 4)
    expected, _ = clipped_sum(model, lambda m, x: 2 * m(x), x)
    sums = attached(model)
    losses = model(x)
    losses.sum().backward(retain_graph=True)
    losses.sum().backward()
    for name, found in sums.take()[0].items():
        torch.testing.assert_close(found, expected[name])


# -- what is called ------------------------------------------------------------------------------------------------


def test_a_call_of_a_part_is_checked():
    model = Inside(Positions())
    attached(model)
    with pytest.raises(BatchAxisError, match=r"layer 'net.table' got an input of shape \(6,\)"):
        model.net(torch.randn(B, B, 4), torch.arange(B))


def test_micro_batches_through_a_part():
    model = Inside(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    sums = attached(model)
    for part in torch.randn(B + 3, 4).split(B):  # micro-batches of other sizes
        model.net(part).sum().backward()
    sums.engine.flush()
    assert [len(norms) for norms in sums.norms] == [B, 3]


def test_successive_parts_need_a_checked_loss():
    def losses(model: Any, x: Tensor) -> Tensor:
        return model.head(model.net(x))[:, 0]

    model = Inside(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    assert_exact(model.double(), losses, torch.randn(B, 4).double(), B)  # checks the loss by itself
    model.float()
    sums = attached(model)
    with pytest.raises(ValueError, match=r"layer 'head' ran outside a call of Inside.*check_example_independence"):
        losses(model, torch.randn(B, 4))
    check_example_independence(model, losses, torch.randn(B, 4))
    for part in torch.randn(B + 3, 4).split(B):
        losses(model, part).sum().backward()
    sums.engine.flush()
    assert [len(norms) for norms in sums.norms] == [B, 3]


def test_a_scalar_loss_of_a_part_is_refused():
    model = Inside(Mean(nn.Linear(4, 4)))
    attached(model)
    with pytest.raises(ValueError, match="Mean returned a scalar that needs a gradient"):
        model.net(torch.randn(B, 4))


def test_layers_outside_a_call_are_refused():
    attached(model := Positions())
    with pytest.raises(ValueError, match="layer 'table' ran outside a call of Positions"):
        model.losses(torch.randn(B, B, 4))


@pytest.mark.parametrize("compiled", [False, True])
def test_calling_forward_directly_is_refused(compiled):
    model = Inside(nn.Sequential(nn.Linear(4, 4)))
    attached(model)
    forward = torch.compile(model.forward, backend="eager") if compiled else model.forward
    with pytest.raises(ValueError, match=r"ran outside a call of Inside.* Call the model itself, model\(\.\.\.\)"):
        forward(torch.randn(B, 4))
    assert model(torch.randn(B, 4)).shape == (B,)


@pytest.mark.parametrize("by_parts", [False, True])
def test_an_interrupted_loop_can_start_again(by_parts):
    class Stops(nn.Tanh):
        stops = True

        def forward(self, x: Tensor) -> Tensor:
            if self.stops:
                raise KeyboardInterrupt
            return super().forward(x)

    def losses(model: Any, x: Tensor) -> Tensor:
        return model.head(model.net(x))[:, 0] if by_parts else model(x)

    model = Inside(nn.Sequential(nn.Linear(4, 4), Stops()))
    Stops.stops = False
    check_example_independence(model, losses, torch.randn(B, 4))
    sums = attached(model)
    losses(model, torch.randn(B, 4)).sum().backward()
    Stops.stops = True
    with pytest.raises(KeyboardInterrupt):
        losses(model, torch.randn(B, 4))
    Stops.stops = False
    for size in (B - 1, B):
        losses(model, torch.randn(size, 4)).sum().backward()
    sums.engine.flush()
    assert [len(norms) for norms in sums.norms] == [B, B - 1, B]


def test_a_copy_runs_without_the_engine():
    model = Inside(nn.Sequential(nn.Linear(4, 4)))
    attached(model)
    twin = copy.deepcopy(model)
    assert twin.forward(torch.randn(B, 4)).shape == (B,)
    assert twin.net(torch.randn(B, 4)).requires_grad


# -- what it is called with ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [(), (torch.zeros(2, 3, dtype=torch.long),), (torch.arange(3)[None],)])
def test_a_new_kind_of_argument_is_checked(before):
    model = Positions()
    attached(model)
    model(torch.randn(2, 3, 4), *before).sum().backward()
    with pytest.raises(BatchAxisError, match="layer 'table'"):
        model(torch.randn(B, B, 4), torch.arange(B))


# -- what a check has not seen --------------------------------------------------------------------------------------


class Switched(nn.Module):
    """Looks up positions if a condition holds."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.body, self.table, self.when, self.on = nn.Linear(4, 4), nn.Embedding(50, 4), when, False

    def forward(self, x: Any, flag: Any = 0) -> Tensor:
        x = x["x"] if isinstance(x, UserDict) else x
        switched = {
            "a number": flag == 1,
            "a tensor": flag == 1,
            "an attribute": self.on,
            "training": self.training and self.on,
            "gradients": torch.is_grad_enabled() and self.on,
            "an object": self.on,
            "a length": True,
        }
        h = self.body(x)
        return (h * self.table(torch.arange(x.shape[1])) if switched[self.when] else h).sum((1, 2))


@pytest.mark.parametrize("when", ["a number", "a tensor", "an attribute"])
def test_a_layer_that_the_check_did_not_see_is_refused(when):
    model = Switched(when)
    attached(model)
    flag: Any = torch.tensor(0) if when == "a tensor" else 0
    model(torch.randn(B, 3, 4), flag).sum().backward()
    model.on = True
    with pytest.raises(ValueError, match=r"layer 'table' did not run when .* was checked, or had different axes"):
        model(torch.randn(B, B, 4), flag + 1)


@pytest.mark.parametrize(("when", "positions"), [("training", 3), ("gradients", B), ("a length", 1)])
def test_a_layer_without_a_batch_axis_is_refused(when, positions):
    model = Switched(when)
    attached(model)
    model.eval().on = False
    if when == "training":
        model(torch.randn(B, positions, 4)).sum().backward()
    model.train().on = True
    with pytest.raises(ValueError, match=r"layer 'table' got an input|examples mix"):
        model(torch.randn(B, positions, 4))


def test_arguments_without_a_visible_tensor_are_refused():
    model = Switched("an object")
    attached(model)
    with pytest.raises(ValueError, match="called without a tensor in its arguments"):
        model(UserDict(x=torch.randn(B, B, 4)))


def test_an_output_without_gradients_needs_a_checked_loss():
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.layer(x - x.mean(0))
            return x

    attached(model := Hides())
    with pytest.raises(ValueError, match="nothing that Hides returns depends on a trained parameter"):
        model(torch.randn(B, 4))


def test_a_fused_loss_after_a_call_belongs_to_it():
    labels = torch.zeros(B, B, dtype=torch.long)

    def losses(model: Any, x: Tensor) -> Tensor:
        return dpoptim.linear_cross_entropy(model.head, model.net(x), labels).sum(1)

    clipped_sum(Inside(nn.Sequential(nn.Linear(4, 4))), losses, torch.randn(B, B, 4))


def test_a_part_is_checked_after_an_interrupted_call():
    class Stops(Positions):
        def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
            if positions is None:
                raise KeyboardInterrupt
            return super().forward(x, positions)

    model = Inside(Stops())
    sums = attached(model)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(B, B, 4))
    sums.take()
    with pytest.raises(BatchAxisError, match=r"layer 'net.table'"):
        model.net(torch.randn(B, B, 4), torch.arange(B))
