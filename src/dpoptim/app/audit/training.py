"""An audit of your own training: canaries are trained beside a model, with its loss and its records.

The model gets two more tables, with one number per canary. A canary is one of the records; its loss also has a term
that moves its own number, and that has a gradient of a million clip norms. So it is clipped, summed and noised together
with the model's parameters. A canary that is out has loss 0 (under replace adjacency, its term is negative instead). At
least half of the records stay as they are. The loop is the audit's, for a `Training`, or a function of the user's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.app.audit.game import Game, MakeOptimizer, Scale
from dpoptim.clipping import PublicGradients, Released
from dpoptim.data.secret_randomness import save_rng_states
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


def beside_model(training: Training, make_optimizer: MakeOptimizer) -> Callable[[Game], None]:
    """A loop that trains a copy of the model."""

    def train(game: Game) -> None:
        loader = game.private_loader(
            training.dataset,
            users=training.users,
            micro_batch_size=training.micro_batch_size or -(-2 * game.plan.batch_size // 3),
            collate_fn=training.collate_fn,
            check_schema=False,
        )
        beside = game.model(_Losses(training))
        optimizer = game.optimizer(make_optimizer, beside)
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
    found: list[float] = []

    def observe(released: Released, scale: Scale) -> None:
        expected = _expected_gradients(training, game.plain_records(), game.plan, scale)
        if expected is not None:
            unit = plan.batch_size / plan.clip_norm
            seen = {name: released.gradient[name].double() * _scale_of(name, scale) * unit for name in expected}
            found.append(_distance(seen, expected, least=1e-6))

    game = Game(plan, canaries=1, seed=seed, steps=1, observe=observe)
    game.play(beside_model(training, make_optimizer))
    return next(iter(found), None)


def _expected_gradients(training: Training, places: Iterable[int], plan: PrivacyPlan, scale: Scale) -> Gradients | None:
    """The sum of the model's clipped gradients, in clip norms, one example at a time; None if they are random."""
    if type(plan.clipping) is not FixedClipNorm or plan.unit != "example":
        return None
    total, model = Gradients(), copy.deepcopy(training.model)
    for place in places:
        batch = training.batch([place])
        with torch.no_grad():
            if not torch.equal(*(training.loss(model, batch) for _ in range(2))):
                return None  # such as by dropout
        found = PublicGradients(model, training.loss, [batch])()  # of one record, so neither clipped nor mixed
        own = {f"model.model.{name}": gradient.double() for name, gradient in found.items()}
        parts = {name: part * _scale_of(name, scale) for name, part in own.items()}
        norm = math.sqrt(sum(float((part**2).sum()) for part in parts.values()))
        for name, part in parts.items():
            total[name] = total.get(name, 0.0) + part / max(norm, plan.clip_norm)
    return total


def _scale_of(name: str, scale: Scale) -> Tensor | float:
    return 1.0 if scale is None else scale[name]


def _distance(found: Gradients, expected: Gradients, *, least: float) -> float:
    """How far gradients are from what is expected, relative to its square or to `least`."""
    rest = sum(float(((found[name] - part) ** 2).sum()) for name, part in expected.items())
    return math.sqrt(rest / max(sum(float((part**2).sum()) for part in expected.values()), least))


def distance_from_single_examples(plan: PrivacyPlan, train: Callable[[Game], Any], *, seed: int) -> float | None:
    """How far the first release of a loop without noise is from that with one example or user at a time.

    None if the loop draws random numbers for a batch or its loss.
    """
    first: list[Gradients] = []

    def observe(released: Released, scale: Scale) -> None:
        first.append({name: value.double() for name, value in released.gradient.items() if name.startswith("model.")})

    put_back = save_rng_states()
    for one_by_one in (False, True):
        game = Game(plan, canaries=1, seed=seed, steps=1, observe=observe, one_by_one=one_by_one)
        game.play(train)
        put_back()
        if game.draws_random_numbers:
            return None
    return _distance(*first, least=1e-12)
