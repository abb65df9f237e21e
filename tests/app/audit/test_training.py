"""An audit trains a model of one's own beside the canaries, and finds what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim import Adjacency, Poisson, PrivacyPlan, Shuffled
from dpoptim.app.audit import PlanAudit, Training, audit_plan
from dpoptim.clipping.parameter_gradients import ParameterGradients
from dpoptim.integrations.named_settings import release_of
from tests.app.audit.test_plan_audit import failures, maker, weaker

EXAMPLES = 400
MODEL = "gradients of the model"


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


def losses(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    return cross_entropy(model(inputs), labels, reduction="none")


def training(model: Callable[[], nn.Module] = Tied, **changes: Any) -> Training:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, 6, generator=generator)
    torch.manual_seed(0)
    dataset = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    return Training(**{"model": model(), "loss": losses, "dataset": dataset, **changes})


def plan_of(variant: str = "dp_sgd", *, epsilon: float = 8.0, **changes: Any) -> PrivacyPlan:
    values: dict[str, Any] = {"num_examples": EXAMPLES, "batch_size": 80, "steps": 10, "release": release_of(variant)}
    return PrivacyPlan(**{**values, **changes}).calibrate(epsilon=epsilon, delta=1e-4)


def audit(
    own: Training, variant: str = "dp_sgd", damage: Any = lambda optimizer: None, *, games: int = 2, **changes: Any
) -> PlanAudit:
    return audit_plan(plan_of(variant, **changes), maker(variant, damage), training=own, games=games)


def test_correct_training_passes():
    found = audit(training(), "scale_then_privatize", games=10)
    assert found.passed, failures(found)
    assert found.canaries == 2000  # half of the examples in ten games
    assert 1.0 < found.delta_bound < found.epsilon_bound < found.epsilon
    assert {check.name: check.passed for check in found.checks}[MODEL] is True


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


def squared_with_the_mean(model: nn.Module, batch: Any) -> Tensor:
    found = losses(model, batch)
    return found * found.mean().detach()


def mean_of_batch(model: nn.Module, batch: Any) -> Tensor:
    return losses(model, batch) / len(batch[1])


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (training(loss=squared_with_the_mean), "examples mix: output 1 of BesideCanaries"),
        (training(UsedOutside), r"'model\.model\.first\.weight' was used outside the layer"),
        (training(loss=lambda model, batch: losses(model, batch).mean()), r"one value per example, got shape \[\]"),
        (training(users=[place // 2 for place in range(EXAMPLES)]), "users is given, but the plan has unit='example'"),
    ],
)
def test_mistakes_are_refused(own, words):
    with pytest.raises(ValueError, match=words):
        audit(own)


@pytest.mark.parametrize("factor", [1, 1e5])  # all gradients are clipped
def test_losses_divided_by_the_size_of_the_batch_are_found(factor):
    own = training(loss=lambda model, batch: factor * mean_of_batch(model, batch))
    assert failures(audit(own)) == {MODEL}


def test_mixing_that_was_allowed_is_found():
    mixing = training(loss=squared_with_the_mean)
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
    assert {check.name: check.passed for check in found.checks}[MODEL] is None


def test_other_release_is_refused():
    with pytest.raises(ValueError, match=r"audit its own plan, plan\.with_release\(IndependentMoments"):
        audit_plan(plan_of(), maker("independent_moments"), training=training())


def test_replace_adjacency_passes():
    found = audit(training(), adjacency=Adjacency.REPLACE)
    assert found.passed, failures(found)
