"""Whatever is called, and however often: rows that are not examples are never clipped as if they were, unsaid."""

from __future__ import annotations

import copy
import warnings
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpoptim
from dpoptim.clipping import check_example_independence, clipped_sum
from dpoptim.clipping.clipped_sums import ClippedSums
from dpoptim.clipping.probe import BatchAxisError
from tests.clipping.one_at_a_time import assert_exact

B = 6


@pytest.fixture(autouse=True)
def every_warning_is_seen():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


class Positions(nn.Module):
    """Adds a table of positions, where they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.table = nn.Linear(4, 4), nn.Embedding(50, 4)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        h = self.body(x)
        return (h if positions is None else h * self.table(positions)).sum((1, 2))

    def losses(self, x: Tensor) -> Tensor:
        return (x * self.table(torch.arange(x.shape[1]))).sum((1, 2))


class Inside(nn.Module):
    """A model of which a loop calls the part `net`."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))[:, 0]


class Mean(nn.Sequential):
    """Returns a loss of its own, as a Hugging Face model does with labels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


class Towers(nn.Module):
    """Two inputs that the model does not bring together."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(y)


def attached(model: nn.Module) -> ClippedSums:
    sums = ClippedSums(model, clip_norm=1.0)
    sums.engine.attach()
    return sums


# -- calls that meet in one backward -------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", ["weight", "bias"])
@pytest.mark.parametrize("extra_memory", [0, 1 << 20])
@pytest.mark.parametrize("anchor_first", [True, False])
def test_a_row_that_all_share_beside_the_batch_is_refused(trained, extra_memory, anchor_first):
    model = nn.Linear(4, 4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == trained)
    sums = ClippedSums(model, clip_norm=1.0)
    sums.engine.extra_memory = extra_memory
    sums.engine.attach()
    warnings.simplefilter("ignore")  # of two calls
    inputs = [torch.ones(1, 4), torch.randn(B, 4)]
    one, other = (model(x) for x in (inputs if anchor_first else inputs[::-1]))
    with pytest.raises(ValueError, match=r"has \d examples where other uses have \d in the same backward"):
        (one * other).sum().backward()


def test_two_calls_in_one_backward_are_warned_of_unless_checked():
    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x[:, 0]) * model(x[:, 1])).sum(1)

    def against_prototypes(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) @ model(torch.ones(B, 4)).mT).sum(1)

    model, pairs = nn.Linear(4, 4), torch.randn(B, 2, 4)
    with pytest.raises(UserWarning, match="two calls of Linear meet in one backward: row j of each"):
        clipped_sum(model, losses, pairs)
    check_example_independence(model, losses, pairs)
    assert_exact(model.double(), losses, pairs.double(), B)
    model.float()
    with pytest.raises(ValueError, match="examples mix"):
        check_example_independence(model, against_prototypes, torch.randn(B, 4))
    with pytest.raises(UserWarning, match="two calls"):  # what no longer satisfies is warned of again
        clipped_sum(model, against_prototypes, torch.randn(B, 4))


def test_a_backward_through_a_call_that_was_counted_is_refused():
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


def test_a_part_that_is_called_by_itself_is_tried():
    model = Inside(Positions())
    attached(model)
    with pytest.raises(BatchAxisError, match=r"layer 'net.table' got an input of shape \(6,\)"):
        model.net(torch.randn(B, B, 4), torch.arange(B))


def test_parts_one_after_the_other_are_one_batch():
    def losses(model: Any, x: Tensor) -> Tensor:
        return model.head(model.net(x))[:, 0]

    model = Inside(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    assert_exact(model.double(), losses, torch.randn(B, 4).double(), B)
    model.float()
    sums = attached(model)
    for part in torch.randn(B + 3, 4).split(B):  # micro-batches of other sizes
        model.head(model.net(part)).sum().backward()
    sums.engine.flush()
    assert [len(norms) for norms in sums.norms] == [B, 3]


def test_a_loss_of_a_part_is_refused_as_the_models_would_be():
    model = Inside(Mean(nn.Linear(4, 4)))
    attached(model)
    with pytest.raises(ValueError, match="Mean returned a scalar that needs a gradient"):
        model.net(torch.randn(B, 4))


def test_layers_that_no_call_shows_are_warned_of():
    model = Positions()
    with pytest.raises(UserWarning, match="layer 'table' runs outside a call of Positions"):
        clipped_sum(model, Positions.losses, torch.randn(B, B, 4))  # type: ignore[arg-type]


def test_forward_is_not_called_by_itself():
    model = Inside(nn.Sequential(nn.Linear(4, 4)))
    attached(model)
    with pytest.raises(ValueError, match=r"Inside.forward was called by itself.*call the model"):
        model.forward(torch.randn(B, 4))
    assert model(torch.randn(B, 4)).shape == (B,)


@pytest.mark.parametrize("by_parts", [False, True])
def test_a_loop_that_was_interrupted_is_begun_again(by_parts):
    class Stops(nn.Tanh):
        stops = True

        def forward(self, x: Tensor) -> Tensor:
            if self.stops:
                raise KeyboardInterrupt
            return super().forward(x)

    def losses(model: Any, x: Tensor) -> Tensor:
        return model.head(model.net(x))[:, 0] if by_parts else model(x)

    model = Inside(nn.Sequential(nn.Linear(4, 4), Stops()))
    sums = attached(model)
    Stops.stops = False
    losses(model, torch.randn(B, 4)).sum().backward()
    Stops.stops = True
    with pytest.raises(KeyboardInterrupt):
        losses(model, torch.randn(B, 4))
    Stops.stops = False
    for size in (B - 1, B):
        losses(model, torch.randn(size, 4)).sum().backward()
    sums.engine.flush()
    assert [len(norms) for norms in sums.norms] == [B, B - 1, B]


def test_a_copy_tells_nobody():
    model = Inside(nn.Sequential(nn.Linear(4, 4)))
    attached(model)
    twin = copy.deepcopy(model)
    assert twin.forward(torch.randn(B, 4)).shape == (B,)
    assert twin.net(torch.randn(B, 4)).requires_grad


# -- what it is called with ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [(), (torch.zeros(2, 3, dtype=torch.long),), (torch.arange(3)[None],)])
def test_arguments_of_another_kind_are_tried_when_they_come(before):
    model = Positions()
    attached(model)
    model(torch.randn(2, 3, 4), *before).sum().backward()
    with pytest.raises(BatchAxisError, match="layer 'table'"):
        model(torch.randn(B, B, 4), torch.arange(B))


def test_arguments_of_one_kind_are_tried_once():
    model, runs = Positions(), []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    attached(model)
    for length in (3, 4, 5):
        model(torch.randn(B, length, 4), torch.zeros(B, length, dtype=torch.long)).sum().backward()
    assert len(runs) == 3 + 4  # all, one less, one less but in the positions, and a few, to be differentiated


@pytest.mark.parametrize("swapped", [False, True])
def test_an_argument_that_need_not_be_as_long_as_the_batch_is_warned_of(swapped):
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classes = nn.Embedding(9, 4)

        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            x, ids = (other, one) if swapped else (one, other)
            return x @ self.classes(ids).mT

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return model(*((torch.arange(B), x) if swapped else (x, torch.arange(B)))).sum(1)

    with pytest.raises(UserWarning, match="takes another number of rows in its argument of shape"):
        clipped_sum(Scores(), losses, torch.randn(B, 4))
    with pytest.raises(ValueError, match="examples mix"):
        check_example_independence(Scores(), losses, torch.randn(B, 4))


def test_two_towers_are_right_once_checked():
    def losses(model: nn.Module, batch: Any) -> Tensor:
        left, right = model(*batch)
        return (left * right).sum(1)

    def in_batch_negatives(model: nn.Module, batch: Any) -> Tensor:
        left, right = model(*batch)
        return -(left @ right.mT).log_softmax(1).diagonal()

    model, batch = Towers(), (torch.randn(B, 4), torch.randn(B, 4))
    with pytest.raises(UserWarning, match="takes another number of rows"):
        clipped_sum(model, losses, batch)
    check_example_independence(model, losses, batch)
    assert_exact(model.double(), losses, tuple(part.double() for part in batch), B)
    model.float()
    with pytest.raises(ValueError, match="examples mix"):
        check_example_independence(model, in_batch_negatives, batch)


# -- the check itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["before any layer", "behind a layer"])
def test_a_running_sum_over_the_batch_leaves_the_first_example_alone(where):
    model = nn.Linear(4, 4)

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.cumsum(0)).sum(1) if where == "before any layer" else model(x).cumsum(0).square().sum(1)

    with pytest.raises(ValueError, match=f"examples mix: .*example {B // 2} has") as told:
        check_example_independence(model, losses, torch.randn(B, 4))
    assert not any(character.isdigit() for character in str(told.value).replace(f"example {B // 2}", "")), "no loss"


# -- what a trial has not met --------------------------------------------------------------------------------------


class Switched(nn.Module):
    """Looks positions up where something is switched on."""

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


@pytest.mark.parametrize("when", ["a number", "a tensor", "an attribute", "training", "gradients", "a length"])
def test_a_layer_that_was_not_met_is_warned_of(when):
    model = Switched(when)
    attached(model)
    flag: Any = torch.tensor(0) if when == "a tensor" else 0
    if when == "a length":  # one position, whose row is taken for one that all examples share, and meets them all
        with pytest.raises(UserWarning, match=r"hangs on the rows of others in the layer of 'table.weight'"):
            model(torch.randn(B, 1, 4), flag)
    elif when != "gradients":
        model.train(when != "training")(torch.randn(B, 3, 4), flag).sum().backward()
    model.train().on = True
    told = "hangs on the rows of others" if when == "gradients" else "layer 'table' was not met, or with other axes"
    with pytest.raises(UserWarning, match=told):
        model(torch.randn(B, B, 4), flag + 1)


def test_arguments_that_show_no_tensor_are_warned_of():
    model = Switched("an object")
    attached(model)
    with pytest.raises(UserWarning, match="called with arguments that show no tensor"):
        model(UserDict(x=torch.randn(B, B, 4)))


def test_prompts_and_their_mask_go_together():
    class Matches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompts = nn.Embedding(9, 4)

        def forward(self, x: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
            return x @ (self.prompts(ids) * mask[..., None]).sum(1).mT

    with pytest.raises(UserWarning, match="takes another number of rows"):
        clipped_sum(
            Matches(), lambda m, x: m(x, torch.ones(B, 2, dtype=torch.long), torch.ones(B, 2)).sum(1), torch.randn(B, 4)
        )


def test_two_towers_that_are_called_by_themselves_are_two_calls():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = nn.Sequential(nn.Linear(4, 3)), nn.Sequential(nn.Linear(4, 3))

    def losses(model: Any, x: Tensor) -> Tensor:
        return (model.image(x) @ model.text(torch.ones(B, 4)).mT).sum(1)

    with pytest.raises(UserWarning, match="two calls of Both meet in one backward"):
        clipped_sum(Both(), losses, torch.randn(B, 4))


def test_a_layer_behind_a_part_is_warned_of_where_another_axis_is_as_long():
    def losses(model: Any, x: Tensor) -> Tensor:
        return model.head(model.net(x)).sum((1, 2))

    clipped_sum(Inside(nn.Sequential(nn.Linear(4, 4))), losses, torch.randn(B, B - 1, 4))
    with pytest.raises(UserWarning, match="layer 'head' runs outside a call"):
        clipped_sum(Inside(nn.Sequential(nn.Linear(4, 4))), losses, torch.randn(B, B, 4))


def test_losses_with_labels_beside_their_inputs_are_not():
    labels = torch.zeros(B, B, dtype=torch.long)

    def losses(model: Any, x: Tensor) -> Tensor:
        return dpoptim.linear_cross_entropy(model.head, model.net(x), labels).sum(1)

    clipped_sum(Inside(nn.Sequential(nn.Linear(4, 4))), losses, torch.randn(B, B, 4))


def test_a_part_is_tried_after_another_call_was_interrupted():
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


def test_a_check_silences_what_it_met_and_nothing_else():
    class Maybe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classes = nn.Embedding(9, 4)

        def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
            own = self.classes(torch.zeros(len(x), dtype=torch.long))
            return (x * own).sum(1) if ids is None else (x @ self.classes(ids).mT).sum(1)

    model = Maybe()
    check_example_independence(model, lambda m, x: m(x), torch.randn(B, 4))
    with pytest.raises(UserWarning, match="takes another number of rows"):
        clipped_sum(model, lambda m, x: m(x, torch.arange(B)), torch.randn(B, 4))
