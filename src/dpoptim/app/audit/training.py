"""An audit of a training of one's own: canaries are trained beside a model, with its loss, its records and its loop.

The model gets two more tables, with one number per canary. A canary is one of the records; its loss also has a term
that moves its own number, and that has a gradient of a million clip norms. So it is clipped, summed and noised together
with the model's parameters. A canary that is out has loss 0 (under replace adjacency, its term is negative instead). At
least half of the records stay as they are.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpoptim.clipping import PublicGradients, public_data
from dpoptim.data.users import UserRecords
from dpoptim.privacy import FixedClipNorm, PrivacyPlan

_STANDARD_DEVIATIONS = 5.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """A model with its loss and records; each game trains a copy of the model.

    Args:
        model: The model, on its device.
        loss: The loss of each example of a batch, [examples], from (model, batch).
        dataset: The training records, by number.
        collate_fn: Makes a batch of records, on the model's device.
        users: The user of each record, if the plan protects users.
        micro_batch_size: The most records that are differentiated at once.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    dataset: Any
    collate_fn: Callable[[list[Any]], Any] = torch.utils.data.default_collate
    users: Sequence[Any] | None = None
    micro_batch_size: int | None = None

    def owners(self, plan: PrivacyPlan) -> NDArray[np.int64]:
        """The example or user of each record."""
        owner = np.arange(len(self.dataset)) if self.users is None else UserRecords(self.users).user_of
        units = int(owner.max()) + 1
        if units != plan.num_examples or (self.users is None) != (plan.unit == "example"):
            expected = f"Expected the {plan.num_examples:,} {plan.unit}s of the plan"
            raise ValueError(f"{expected}, got {units:,}. Give the plan's own records, and users if it protects users.")
        return owner

    def batch(self, places: Sequence[int]) -> Any:
        """The batch of the records at these places."""
        return self.collate_fn([self.dataset[int(place)] for place in places])


class BesideModel(nn.Module):
    """The canaries' numbers beside a model; calling it returns both, so that examples are seen not to mix."""

    def __init__(self, training: Training, canaries: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = copy.deepcopy(training.model), training.loss
        self.canaries = canaries.to(next(self.model.parameters()).device)

    def forward(self, rows: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        losses = self.loss(self.model, batch)
        if losses.shape != rows.shape:
            raise ValueError(f"Expected loss to return one value per example, [{len(rows)}], got {list(losses.shape)}")
        return self.canaries(rows), losses


Gradients = dict[str, Tensor]


def expected_gradients(
    model: BesideModel, training: Training, places: Iterable[int], plan: PrivacyPlan, scale: Any
) -> Gradients | None:
    """The sum of the model's clipped gradients, in clip norms, one example at a time; None if they are random."""
    if type(plan.clipping) is not FixedClipNorm or plan.unit != "example":
        return None
    total: Gradients = {}
    for place in places:
        batch = training.batch([place])
        with torch.no_grad(), public_data():
            if not torch.equal(*(training.loss(model.model, batch) for _ in range(2))):
                return None  # such as by dropout
        found = PublicGradients(model.model, training.loss, [batch])()  # of one record, so neither clipped nor mixed
        parts = {f"model.{name}": gradient.double() for name, gradient in found.items()}
        if scale is not None:
            parts = {name: part * scale[name] for name, part in parts.items()}
        norm = math.sqrt(sum(float((part**2).sum()) for part in parts.values()))
        for name, part in parts.items():
            total[name] = total.get(name, 0.0) + part / max(norm, plan.clip_norm)
    return total


def distance(expected: Gradients, released: Mapping[str, Tensor], plan: PrivacyPlan, scale: Any) -> float:
    """How far a release without noise is from what is expected, relative to it."""
    squared = rest = 0.0
    for name, part in expected.items():
        found = released[name].double() * (1.0 if scale is None else scale[name]) * (plan.batch_size / plan.clip_norm)
        squared += float((part**2).sum())
        rest += float(((found - part) ** 2).sum())
    return math.sqrt(rest / max(squared, 1e-6))
