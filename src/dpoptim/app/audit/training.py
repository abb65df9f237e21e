"""An audit of your own training: canaries are trained beside a model, with its loss and its records.

The model gets two more tables, with one number per canary. A canary is one of the records; its loss also has a term
that moves its own number, and that has a gradient of a million clip norms. So it is clipped, summed and noised together
with the model's parameters. A canary that is out has loss 0 (under replace adjacency, its term is negative instead). At
least half of the records stay as they are. The loop is the audit's, for a `Training`, or a function of the user's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.app.audit.game import Game, MakeOptimizer
from dpoptim.clipping import PublicGradients, Released, public_data
from dpoptim.data.secret_randomness import save_rng_states
from dpoptim.optim import PrivateOptimizer
from dpoptim.privacy import FixedClipNorm, PrivacyPlan


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

    def batch(self, places: Sequence[int]) -> Any:
        """The batch of the records at these places."""
        return self.collate_fn([self.dataset[int(place)] for place in places])


class _Losses(nn.Module):
    """A model together with its loss, so that the loss is seen not to mix examples either."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.model, self.loss = copy.deepcopy(training.model), training.loss

    def forward(self, batch: Any) -> Tensor:
        losses = self.loss(self.model, batch)
        if losses.ndim != 1:
            raise ValueError(f"Expected loss to return one value per example, got shape {list(losses.shape)}.")
        return losses


Begin = Callable[[Game, _Losses, PrivateOptimizer], None]


def beside_model(
    training: Training, make_optimizer: MakeOptimizer, begin: Begin = lambda game, losses, optimizer: None
) -> Callable[[Game], None]:
    """A loop that trains a copy of the model; `begin` is called before the first step."""

    def train(game: Game) -> None:
        losses = _Losses(training)
        loader = game.private_loader(
            training.dataset,
            users=training.users,
            micro_batch_size=training.micro_batch_size or -(-2 * game.plan.batch_size // 3),
            collate_fn=training.collate_fn,
            check_schema=False,
        )
        beside = game.model(losses)
        optimizer = game.optimizer(make_optimizer, beside)
        begin(game, losses, optimizer)
        for batch in loader:
            game.insert(beside(batch)).sum().backward()
            optimizer.step()

    return train


Gradients = dict[str, Tensor]


def distance_from_single_gradients(
    plan: PrivacyPlan, training: Training, make_optimizer: MakeOptimizer, *, seed: int
) -> float | None:
    """How far a release without noise is from the sum of gradients that are taken and clipped without the engine.

    None if losses are random, users are protected or the clip norm is not fixed.
    """
    expected: list[Gradients | None] = []
    found: list[float] = []
    scale: Any = None

    def begin(game: Game, losses: _Losses, optimizer: PrivateOptimizer) -> None:
        nonlocal scale
        scale = optimizer.mechanism.scale
        expected.append(_expected_gradients(losses.model, training, game.plain_records(), game.plan, scale))

    def observe(released: Released) -> None:
        if expected[0] is not None:
            found.append(_distance(expected[0], released.gradient, plan, scale))

    Game(plan, canaries=1, seed=seed, steps=1, observe=observe).play(beside_model(training, make_optimizer, begin))
    return next(iter(found), None)


def _expected_gradients(
    model: nn.Module, training: Training, places: Iterable[int], plan: PrivacyPlan, scale: Any
) -> Gradients | None:
    """The sum of the model's clipped gradients, in clip norms, one example at a time; None if they are random."""
    if type(plan.clipping) is not FixedClipNorm or plan.unit != "example":
        return None
    total: Gradients = {}
    for place in places:
        batch = training.batch([place])
        with torch.no_grad(), public_data():
            if not torch.equal(*(training.loss(model, batch) for _ in range(2))):
                return None  # such as by dropout
        found = PublicGradients(model, training.loss, [batch])()  # of one record, so neither clipped nor mixed
        parts = {f"model.model.{name}": gradient.double() for name, gradient in found.items()}
        if scale is not None:
            parts = {name: part * scale[name] for name, part in parts.items()}
        norm = math.sqrt(sum(float((part**2).sum()) for part in parts.values()))
        for name, part in parts.items():
            total[name] = total.get(name, 0.0) + part / max(norm, plan.clip_norm)
    return total


def _distance(expected: Gradients, released: Mapping[str, Tensor], plan: PrivacyPlan, scale: Any) -> float:
    """How far a release without noise is from what is expected, relative to it."""
    squared = rest = 0.0
    for name, part in expected.items():
        found = released[name].double() * (1.0 if scale is None else scale[name]) * (plan.batch_size / plan.clip_norm)
        squared += float((part**2).sum())
        rest += float(((found - part) ** 2).sum())
    return math.sqrt(rest / max(squared, 1e-6))


def distance_from_single_examples(plan: PrivacyPlan, train: Callable[[Game], Any], *, seed: int) -> float | None:
    """How far the first release of a loop without noise is from that with one example or user at a time.

    None if the loop draws random numbers for a batch or its loss.
    """
    first: list[Gradients] = []

    def observe(released: Released) -> None:
        first.append({name: value.double() for name, value in released.gradient.items() if name.startswith("model.")})

    put_back = save_rng_states()
    for one_by_one in (False, True):
        game = Game(plan, canaries=1, seed=seed, steps=1, observe=observe, one_by_one=one_by_one)
        game.play(train)
        put_back()
        if game.draws_random_numbers:
            return None
    together, single = first
    rest = sum(float(((together[name] - part) ** 2).sum()) for name, part in single.items())
    return math.sqrt(rest / max(sum(float((part**2).sum()) for part in single.values()), 1e-12))
