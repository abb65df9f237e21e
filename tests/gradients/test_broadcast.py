"""Parameters that a module broadcasts over the batch, and modules that only look as if they did."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpoptim.gradients import clipped_sum
from dpoptim.gradients.layers.generic import _broadcasting
from tests.gradients.models import squares
from tests.gradients.one_at_a_time import clipped_sum_one_at_a_time


class Broadcast(nn.Module):
    """A layer with a token of its own in front of what a linear layer gives, joined to it in some way."""

    def __init__(self, join) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.inside = nn.Linear(4, 4)
        self.gate = nn.Linear(4, 4)
        nn.init.zeros_(self.gate.weight)
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self, self.inside(x))


JOINS = {
    "in front": (lambda m, x: torch.cat([m.token.expand(len(x), -1, -1), x], dim=1), True),
    "added": (lambda m, x: x + m.token, True),
    "of the first example": (lambda m, x: x + m.token[0], False),
    "averaged": (lambda m, x: x + m.token.mean(0), False),
    "averaged behind a gate that is 0": (lambda m, x: x + m.gate(m.token.mean(0)), False),
    "of the example before": (lambda m, x: x + m.token.expand(len(x), -1, -1).roll(1, 0), False),
}


@pytest.mark.parametrize("name", JOINS)
def test_parameters_that_are_broadcast_over_the_batch(name):
    """Rows of a broadcast parameter belong to their examples; where they would not, each example is run alone."""
    join, broadcasts = JOINS[name]
    torch.manual_seed(0)
    model = nn.Sequential(Broadcast(join), nn.Linear(4, 3)).double()
    x = torch.randn(5, 6, 4, dtype=torch.float64)
    sums, norms = clipped_sum(model, squares, x, clip_norm=0.7)
    expected, each = clipped_sum_one_at_a_time(model, squares, x, 5, 0.7, None)
    torch.testing.assert_close(norms, each, rtol=1e-9, atol=1e-12)
    for n, total in expected.items():
        torch.testing.assert_close(sums[n], total, rtol=1e-9, atol=1e-12)
    assert list(_broadcasting[model[0]].values()) == [broadcasts]
