"""Training with users as units: every variant against brute force, sensitivity, and misuse."""

from __future__ import annotations

import copy
import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.clipping import PrivateMechanism
from tests.optim.table import RULES, VARIANTS, Task, task
from tests.optim.test_against_reference import KEY, rows_of

RUN: Any = {"key": KEY, "run_id": "the run"}
USERS, STEPS = 30, 20
MOST = 3
IDS = [f"user {(7 * place * place + place) % USERS}" for place in range(4 * USERS)]
IDS += [f"user {user}" for user in range(USERS) if f"user {user}" not in IDS]

PLANS: dict[str, dict[str, Any]] = {
    "independent, Poisson": {"sampling": dpoptim.Poisson()},
    "BandMF, cyclic": {"sampling": dpoptim.CyclicPoisson(bands=3), "noise": dpoptim.Banded(bands=3)},
    "BLT, shuffled": {"sampling": dpoptim.Shuffled(), "noise": dpoptim.BufferedToeplitz(buffers=2)},
}


@functools.cache
def plan_of(kind: str) -> dpoptim.PrivacyPlan:
    return dpoptim.PrivacyPlan(
        num_examples=USERS, batch_size=4, steps=STEPS, clip_norm=0.9, noise_multiplier=0.7, unit="user",
        records_per_user=MOST, **PLANS[kind],
    )  # fmt: skip


def loader_of(plan: dpoptim.PrivacyPlan, data: Any, **options: Any) -> Any:
    return dpoptim.private_loader(data, plan, users=IDS, **RUN, **options)


@dataclass(frozen=True)
class UserTask(Task):
    """A task whose batches are lists of users, each with the records of one step."""

    def gradients(self, theta: Tensor, batch: Any) -> Tensor:
        if isinstance(batch, Tensor):
            return super().gradients(theta, batch)
        if not batch:
            return theta.new_zeros(0, len(theta))
        return torch.stack([super(UserTask, self).gradients(theta, own).mean(0) for own in batch])


def user_task(plan: dpoptim.PrivacyPlan) -> UserTask:
    made = task(replace(plan, num_examples=len(IDS)), torch.float64)
    loader = loader_of(plan, range(len(IDS)))
    batches: Any = []
    for step in range(plan.steps):
        drawn: dict[str, list[int]] = {}
        for part, ticket in loader.physical_batches(step):
            for place in [] if ticket.is_placeholder else part:
                drawn.setdefault(IDS[place], []).append(place)
        assert all(len(own) == min(MOST, IDS.count(user)) for user, own in drawn.items())
        batches.append([torch.tensor(own) for own in drawn.values()])
    return UserTask(made.model, made.inputs, made.targets, batches, made.public)


@pytest.mark.parametrize(("variant", "kind"), zip(VARIANTS, itertools.cycle(PLANS)))
def test_every_variant_equals_brute_force(variant, kind):
    plan = plan_of(kind)
    made = user_task(plan)
    fast_rule, slow_rule = RULES["adam"]
    optimizer = VARIANTS[variant].make(made.model, plan, fast_rule, made, **RUN)
    noise = rows_of(plan, torch.float64, "gradient")
    square_noise = rows_of(optimizer.plan, torch.float64, "square")
    slow = VARIANTS[variant].reference(user_task(plan), noise, square_noise, slow_rule, optimizer.plan)
    plan = optimizer.mechanism._drawn_for  # a noiseless variant has a plan with another release
    loader = loader_of(plan, TensorDataset(torch.arange(len(IDS))), micro_batch_size=7)
    path = []
    for (batch,) in loader:
        made.losses(made.model, batch).sum().backward()
        optimizer.step()
        if loader.step_ends:
            path.append(made.theta().clone())
    fast = torch.stack(path)
    assert float((slow[-1] - slow[0]).norm()) > 0.05, "the run does not move"
    assert float(((fast - slow).norm(dim=1) / slow.norm(dim=1)).max()) <= 1e-10


def released_sums(model: nn.Module, plan: dpoptim.PrivacyPlan, data: Any, ids: list[Any]) -> list[Tensor]:
    """The sums of a run without updates, times the batch size, without noise."""
    mechanism = PrivateMechanism(model, plan, plan.release, **RUN)
    found, loader = [], dpoptim.private_loader(data, plan, users=ids, **RUN)
    for x, y in loader:
        (model(x)[:, 0] - y).square().sum().backward()
        if mechanism.close_physical_batch():
            gradient = mechanism.privatize().gradient
            found.append(torch.cat([part.flatten() for part in gradient.values()]) * plan.batch_size)
    mechanism.detach()
    return found


@pytest.mark.parametrize("sampling", [dpoptim.Shuffled(), dpoptim.Poisson(), dpoptim.CyclicPoisson(bands=2)])
def test_replacing_all_records_of_a_user_moves_only_the_users_steps(sampling):
    """Everything of the user is blanked or replaced: ten records, far more than are used in a step."""
    torch.manual_seed(0)
    ids = [number % 12 for number in range(60)] + [5] * 5
    x, y = torch.randn(65, 3, dtype=torch.float64), torch.randn(65, dtype=torch.float64)
    plan = dpoptim.PrivacyPlan(
        num_examples=12, batch_size=4, steps=12, clip_norm=0.01, noise_multiplier=0.0, sampling=sampling,
        unit="user", records_per_user=4,
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    own = torch.tensor([user == 5 for user in ids])
    sums = released_sums(model, plan, TensorDataset(x, y), ids)
    changed = []
    for records, targets in ((-3 * x, y + 7), (torch.full_like(x, float("nan")), y)):  # replaced; out
        others = TensorDataset(torch.where(own[:, None], records, x), torch.where(own, targets, y))
        factor = 1 if bool(records.isnan().any()) else 2
        for one, other in zip(sums, released_sums(copy.deepcopy(model), plan, others, ids), strict=True):
            distance = float((one - other).norm())
            assert distance <= factor * plan.clip_norm * (1 + 1e-9)
            changed.append(distance > 0)
    draws = KEY.for_run("loader the run")
    turns = [5 in sampling.indices(draws, t, num_examples=12, batch_size=4) for t in range(12)]
    assert changed == turns * 2
    assert any(turns)
    assert not all(turns)


def test_epsilon_is_that_of_the_same_plan_for_examples():
    plan = plan_of("independent, Poisson")
    assert plan.epsilon(delta=1e-6) == plan.replace(unit="example", records_per_user=None).epsilon(delta=1e-6)
    assert plan.epsilon(delta=1e-6) == plan.replace(records_per_user=1000).epsilon(delta=1e-6)


def test_a_run_resumes_bit_for_bit():
    plan = plan_of("BandMF, cyclic")
    data = TensorDataset(torch.arange(len(IDS)))

    def start() -> tuple[UserTask, Any, Any]:
        made = user_task(plan)
        return made, loader_of(plan, data, micro_batch_size=5), dpoptim.scale_then_privatize(made.model, plan, **RUN)

    def train(made: UserTask, loader: Any, optimizer: Any, until: int) -> None:
        for (batch,) in loader:
            made.losses(made.model, batch).sum().backward()
            optimizer.step()
            if loader.step_ends and optimizer.mechanism.step == until:
                return

    whole = start()
    train(*whole, STEPS)
    made, loader, optimizer = start()
    train(made, loader, optimizer, 7)
    saved = copy.deepcopy([made.model.state_dict(), loader.state_dict(), optimizer.state_dict()])
    made, loader, optimizer = start()
    for part, state in zip((made.model, loader, optimizer), saved, strict=True):
        part.load_state_dict(state)
    train(made, loader, optimizer, STEPS)
    assert torch.equal(made.theta(), whole[0].theta())


class TestMisuse:
    def run(self, step: Any, **options: Any) -> None:
        plan = plan_of("BLT, shuffled").replace(noise=dpoptim.Independent())
        made = user_task(plan)
        optimizer = dpoptim.dp_sgd(made.model, plan, lr=0.1, **RUN)
        for (batch,) in loader_of(plan, TensorDataset(torch.arange(len(IDS))), **options):
            step(made, batch, optimizer)

    def test_part_of_the_rows(self):
        def step(made, batch, optimizer):
            made.losses(made.model, batch[1:]).sum().backward()
            optimizer.step()

        with pytest.raises(ValueError, match="unknown which user"):
            self.run(step)

    def test_a_batch_in_two_calls(self):
        def step(made, batch, optimizer):
            made.losses(made.model, batch[:2]).sum().backward()
            made.losses(made.model, batch[2:]).sum().backward()
            optimizer.step()

        with pytest.raises(ValueError, match="unknown which user"):
            self.run(step)

    def test_batches_of_another_loader(self):
        made = user_task(plan_of("independent, Poisson"))
        optimizer = dpoptim.dp_sgd(made.model, plan_of("independent, Poisson").replace(), lr=0.1)
        made.losses(made.model, torch.arange(4)).sum().backward()
        with pytest.raises(ValueError, match=r"not drawn by this optimizer|different plan object"):
            optimizer.step()

    def test_external_batches(self):
        plan = plan_of("independent, Poisson")
        with pytest.raises(ValueError, match=r"external_batches.*private_loader\(users="):
            dpoptim.dp_sgd(user_task(plan).model, plan, lr=0.1, external_batches=True)

    def test_captured_batches_run_without_a_graph(self):
        taken = []

        def step(made, batch, optimizer):
            captured = optimizer.captured(functools.partial(made.losses, made.model))
            captured(batch)
            optimizer.step()
            taken.append(captured.graphs)

        self.run(step)
        assert set(taken) == {0}
