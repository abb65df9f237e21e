"""Arguments of a layer without a rule: shared by all examples or one per example, of any length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import OPTForCausalLM

from dpoptim.clipping import clipped_sum
from dpoptim.clipping.clipped_sums import ClippedSums
from tests.clipping.models import case, squares
from tests.clipping.one_at_a_time import assert_exact, clipped_sum_one_at_a_time


class Positions(nn.Module):
    """A bare table, looked up by the second argument; the first does not show its axes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(32, 6))

    def forward(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self.table[ids]


class Weighted(nn.Module):
    """A bare parameter times one number per position, shared by all examples, and one number per example."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(6))

    def forward(self, hidden: Tensor, by_position: Tensor, by_example: Tensor) -> Tensor:
        return hidden * self.gain * by_position[:, None] * by_example[:, None, None]


class Model(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.embedding, self.part, self.out = nn.Embedding(61, 6), part, nn.Linear(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, places = self.embedding(ids), torch.arange(ids.shape[1])
        if isinstance(self.part, Positions):
            return self.out((hidden + self.part(hidden, places)).tanh())
        return self.out(self.part(hidden, (places + 1).to(hidden), ids.to(hidden).mean(1) / 30))


def ids(examples: int, positions: int) -> Tensor:
    return torch.randint(0, 61, (examples, positions), generator=torch.Generator().manual_seed(0))


def model(part: type[nn.Module]) -> Model:
    torch.manual_seed(0)
    return Model(part()).double()


@pytest.mark.parametrize("examples", [5, 16])
def test_as_many_positions_as_examples_are_not_mistaken_for_examples(examples):
    """Otherwise one example would move the table's sum by sqrt(examples) clip norms."""
    with pytest.raises(ValueError, match="the first axis of an argument is not the batch"):
        clipped_sum(model(Positions), squares, ids(examples, examples), clip_norm=1.0)


@pytest.mark.parametrize(("examples", "positions"), [(5, 5), (4, 6), (6, 6)])
def test_shared_and_per_example_arguments(examples, positions):
    assert_exact(model(Weighted), squares, ids(examples, positions), examples)


def test_axes_of_the_first_batch_hold_for_later_batches():
    made = model(Weighted)
    sums = ClippedSums(made, clip_norm=0.05)
    sums.engine.attach()
    for examples, positions in ((5, 7), (5, 5), (7, 5), (1, 5), (5, 1)):
        batch = ids(examples, positions)
        squares(made, batch).sum().backward()
        found, _ = sums.take()
        expected, _ = clipped_sum_one_at_a_time(model(Weighted), squares, batch, examples, 0.05, None)
        for name, total in expected.items():
            torch.testing.assert_close(found[name], total, rtol=1e-9, atol=1e-11)


class Scaled(nn.Module):
    """A bare parameter times factors of any shape."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(6))

    def forward(self, hidden: Tensor, factors: Tensor | None) -> Tensor:
        return hidden * self.gain if factors is None else hidden * self.gain * factors[..., None]


class Given(nn.Module):
    """Calls its part with different arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.part = nn.Embedding(61, 6), Scaled()
        self.factors: Callable[[Tensor], Tensor | None] = lambda ids: torch.ones(1, ids.shape[1]).double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.part(self.embedding(ids), self.factors(ids))


def test_a_shared_argument_that_becomes_per_example_is_refused():
    made = Given().double()
    sums = ClippedSums(made, clip_norm=1.0)
    sums.engine.attach()
    squares(made, ids(5, 5)).sum().backward()
    made.factors = lambda ids: ids.double() / 30  # [examples, positions] where [1, positions] was
    for _ in range(2):
        with pytest.raises(ValueError, match="the first axis of an argument is not the batch"):
            squares(made, ids(5, 5))


def test_an_argument_may_be_omitted_later():
    made = Given().double()
    sums = ClippedSums(made, clip_norm=1e9)
    sums.engine.attach()
    made.factors = lambda ids: ids.double() / 30
    squares(made, ids(5, 7)).sum().backward()
    sums.take()
    made.factors = lambda ids: None
    squares(made, ids(5, 7)).sum().backward()
    expected, _ = clipped_sum_one_at_a_time(made, squares, ids(5, 7), 5, 1e9, None)
    for name, total in sums.take()[0].items():
        torch.testing.assert_close(total, expected[name], rtol=1e-9, atol=1e-11)


def test_an_argument_that_the_check_did_not_see_is_refused():
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.randn(6))

        def forward(self, hidden: Tensor, weights: Tensor | None = None) -> Tensor:
            return hidden * self.gain if weights is None else hidden * self.gain * weights[:, None, None]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.part = nn.Embedding(61, 6), Sometimes()

        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.embedding(ids)
            return self.part(hidden) if ids.shape[1] == 7 else self.part(hidden, torch.ones(len(ids)).to(hidden))

    made = Outer().double()
    sums = ClippedSums(made, clip_norm=1.0)
    sums.engine.attach()
    squares(made, ids(5, 7)).sum().backward()
    with pytest.raises(ValueError, match=r"layer 'part' got an argument of shape \(5,\), .* did not show"):
        squares(made, ids(5, 6))


def test_opt_refuses_position_ids_of_one_axis():
    made = case("OPTForCausalLM").model
    assert isinstance(made, OPTForCausalLM)
    batch = ids(5, 5) % made.config.vocab_size

    def loss(given: nn.Module, batch: Tensor, places: Tensor) -> Tensor:
        return given(input_ids=batch, position_ids=places).logits.square().mean((1, 2))

    with pytest.raises(ValueError, match=r"layer '.*embed_positions' got an input of shape \(5,\)"):
        clipped_sum(made, lambda given, rows: loss(given, rows, torch.arange(5)), batch, clip_norm=1.0)
    expected, _ = clipped_sum_one_at_a_time(
        made, lambda given, rows: loss(given, rows, torch.arange(5)[None]), batch, 5, 0.1, None
    )
    sums, _ = clipped_sum(made, lambda given, rows: loss(given, rows, torch.arange(5)[None]), batch, clip_norm=0.1)
    for name, total in expected.items():
        torch.testing.assert_close(sums[name], total, rtol=1e-8, atol=1e-10)
