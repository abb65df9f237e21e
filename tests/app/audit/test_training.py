"""An audit trains a model of one's own beside the canaries, and finds what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpoptim
from dpoptim import Adjacency, Poisson, Shuffled
from dpoptim.app.audit import PlanAudit, Training, audit_plan
from dpoptim.clipping.parameter_gradients import ParameterGradients
from dpoptim.integrations.named_settings import release_of
from tests.app.audit.test_own_loop import (
    DATA,
    EXAMPLES,
    MODEL,
    compared,
    divided_by_the_batch,
    losses_of,
    plan_of,
    reduced,
    weighed_by_the_batch,
)
from tests.app.audit.test_plan_audit import failures, maker, weaker


class Tied(nn.Module):
    """Two layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 2)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


class UsedOutside(Tied):
    """The shared weight is also used without its layer."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(nn.functional.linear(torch.tanh(self.first(inputs)), self.first.weight)))


def training(model: Callable[[], nn.Module] = Tied, **changes: Any) -> Training:
    torch.manual_seed(0)
    return Training(**{"model": model(), "loss": losses_of, "dataset": DATA, **changes})


def audit(
    own: Training, variant: str = "dp_sgd", damage: Any = lambda optimizer: None, *, games: int = 2, **changes: Any
) -> PlanAudit:
    plan = plan_of(release=release_of(variant), **changes)
    return audit_plan(plan, maker(variant, damage), training=own, games=games)


def test_correct_training_passes():
    found = audit(training(), "scale_then_privatize", games=10)
    assert found.passed, failures(found)
    assert found.canaries == 2000  # half of the examples in ten games
    assert 1.0 < found.delta_bound < found.epsilon_bound < found.epsilon
    assert compared(found)


@pytest.mark.parametrize("sampling", [Shuffled(), Poisson()], ids=repr)
def test_weaker_noise_contradicts_the_claim(sampling):
    found = audit(training(), "dp_sgd", weaker(0.4), sampling=sampling, games=10, epsilon=4.0)
    assert failures(found) >= {"the claim stands", "noise level"}
    assert found.epsilon_bound > found.epsilon


def scaled_after_clipping(optimizer: Any) -> None:
    add_noise = optimizer.mechanism._add_noise

    def scale_first(which: str, sums: Any, *rest: Any) -> Any:
        for value in sums.values():
            value.mul_(1.3)
        return add_noise(which, sums, *rest)

    optimizer.mechanism._add_noise = scale_first


def test_gradients_scaled_after_clipping_are_found():
    assert failures(audit(training(), damage=scaled_after_clipping)) >= {"clipping", MODEL}


def test_a_forgotten_use_of_a_tied_weight_is_found(monkeypatch):
    add = ParameterGradients.add

    def first(uses: ParameterGradients, *given: Any) -> int:
        return 0 if uses.kept else add(uses, *given)

    monkeypatch.setattr(ParameterGradients, "add", first)
    assert failures(audit(training())) == {MODEL}


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (training(loss=weighed_by_the_batch), "examples mix: output 1 of BesideCanaries"),
        (training(UsedOutside), r"'model\.model\.first\.weight' was used outside the layer"),
        (training(loss=reduced(losses_of)), r"one value per example, got shape \[\]"),
        (training(users=[place // 2 for place in range(EXAMPLES)]), "users is given, but the plan has unit='example'"),
    ],
)
def test_mistakes_are_refused(own, words):
    with pytest.raises(ValueError, match=words):
        audit(own)


@pytest.mark.parametrize("factor", [1, 1e5])  # all gradients are clipped
def test_losses_divided_by_the_size_of_the_batch_are_found(factor):
    own = training(loss=lambda model, batch: factor * divided_by_the_batch(model, batch))
    assert failures(audit(own)) == {MODEL}


def test_mixing_that_was_allowed_is_found():
    mixing = training(loss=weighed_by_the_batch)
    make = partial(dpoptim.dp_sgd, lr=0.1, allow_mixing="a test")
    found = audit_plan(plan_of(allow_mixing="a test"), make, training=mixing, games=1)
    assert MODEL in failures(found)


@pytest.mark.parametrize("own", [training(lambda: nn.Sequential(Tied(), nn.Dropout())), None])
def test_random_losses_and_users_are_not_compared(own):
    changes: dict[str, Any] = {}
    if own is None:
        own = training(users=[place // 2 for place in range(EXAMPLES)])
        changes = {"num_examples": EXAMPLES // 2, "batch_size": 40, "unit": "user", "records_per_user": 2}
    found = audit(own, **changes)
    assert found.passed, failures(found)
    assert compared(found) is None


def test_replace_adjacency_passes():
    found = audit(training(), adjacency=Adjacency.REPLACE)
    assert found.passed, failures(found)
