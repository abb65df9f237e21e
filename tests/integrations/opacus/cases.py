"""Small models and data that the tests of the migration share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpoptim.integrations.opacus import PrivateTraining, make_private, make_private_with_epsilon

DELTA = 1e-5
EXPECTED_WARNINGS = pytest.mark.filterwarnings(
    "ignore:Secure RNG turned off", "ignore:Using a non-full backward hook", "ignore:Full backward hook is firing",
    "ignore:Optimal order is the largest alpha", "ignore:poisson_sampling=False", "ignore:loss_reduction='sum'",
)  # fmt: skip


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.out = nn.Linear(4 * 4 * 4, 3)

    def forward(self, images):
        return self.out(F.relu(self.norm(self.conv(images))).flatten(1))


def images(n: int = 12) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        3 * torch.randn(n, 1, 6, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)
    )


def convolutions() -> Convolutions:
    torch.manual_seed(7)
    return Convolutions()


def one_epoch(model: nn.Module, optimizer: Any, loader: Any, reduction: str = "mean") -> None:
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    for inputs, target in loader:
        optimizer.zero_grad()
        criterion(model(inputs), target).backward()
        optimizer.step()


def of_linear(
    examples: int = 50, batch_size: int = 8, *, data_loader: Any = None, optimizer: Any = None, model: Any = None,
    **arguments: Any,
) -> PrivateTraining:  # fmt: skip
    model = nn.Linear(3, 2) if model is None else model
    data = TensorDataset(torch.randn(examples, 3), torch.randint(0, 2, (examples,)))
    make = make_private_with_epsilon if "target_epsilon" in arguments else make_private
    defaults = {} if make is make_private_with_epsilon else {"noise_multiplier": 1.0}
    return make(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer(model.parameters()),
        data_loader=DataLoader(data, batch_size=batch_size) if data_loader is None else data_loader(data),
        **{"max_grad_norm": 1.0, **defaults, **arguments},
    )
