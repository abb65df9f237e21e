"""Batches are drawn as the plan says, and epsilon is that of what was drawn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpoptim
from dpoptim.integrations.opacus import PrivacyEngine
from tests.integrations.opacus.small import DELTA, of_linear, one_epoch

pytestmark = pytest.mark.filterwarnings(
    "ignore:Secure RNG turned off", "ignore:Using a non-full backward hook", "ignore:Full backward hook is firing",
    "ignore:Optimal order is the largest alpha", "ignore:poisson_sampling=False", "ignore:loss_reduction='sum'",
)  # fmt: skip


@pytest.mark.parametrize(("examples", "drop_last"), [(50, False), (50, True), (48, False), (5, False)])
def test_rate_and_divisor_are_those_of_opacus(examples, drop_last):
    private = of_linear(examples, data_loader=lambda d: DataLoader(d, batch_size=8, drop_last=drop_last and True))
    batches = examples // 8 if drop_last else math.ceil(examples / 8)
    assert len(private.data_loader) == batches
    assert private.data_loader.sample_rate == 1 / batches
    assert private.optimizer.expected_batch_size == examples // batches
    opacus = pytest.importorskip("opacus")
    model = nn.Linear(3, 2)
    _, optimizer, loader = opacus.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0, noise_multiplier=1.0,
        data_loader=DataLoader(private.data_loader.dataset, batch_size=8, drop_last=drop_last),
    )  # fmt: skip
    assert (len(loader), loader.sample_rate) == (len(private.data_loader), private.data_loader.sample_rate)
    assert optimizer.expected_batch_size == private.optimizer.expected_batch_size


def test_every_example_is_drawn_at_that_rate():
    private = of_linear(50, 8, key=dpoptim.NoiseKey.from_bytes(bytes(32)))
    batches = private.data_loader.private_loader.physical_batches
    drawn = np.array([sum(len(part) for part, _ in batches(step)) for step in range(2000)])
    assert abs(drawn.mean() - 50 / 7) < 5 * math.sqrt(50 / 7 / 2000)  # 5 standard errors, 2.6 %
    assert abs(drawn.var() / (50 / 7 * 6 / 7) - 1) < 0.2  # batches of one size, or of a Poisson number, fail


def test_an_iteration_is_an_epoch_and_the_run_has_an_end():
    private = of_linear(50, 8, target_epsilon=3.0, target_delta=DELTA, epochs=2)
    for epoch in (1, 2):
        one_epoch(*private)
        assert private.steps_taken == 7 * epoch
    assert 3.0 - 1e-3 < private.epsilon(DELTA) <= 3.0
    with pytest.raises(ValueError, match="all 14 steps have been taken"):
        iter(private.data_loader)


def test_a_batch_that_was_only_looked_at_is_not_lost():
    private = of_linear()
    looked_at = next(iter(private.data_loader))
    model, optimizer, loader = private
    for number, (inputs, target) in enumerate(loader):
        if number == 0:
            assert torch.equal(inputs, looked_at[0])
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
        if number == 2:
            break  # an epoch left early
    assert private.steps_taken == 3
    one_epoch(*private)
    assert private.steps_taken == 3 + 7


def test_a_batch_that_is_skipped_is_refused():
    private = of_linear()
    with pytest.raises(ValueError, match="call step\\(\\) once for each batch"):
        for _ in private.data_loader:
            pass


def ones_for_targets(batch: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([inputs for inputs, _ in batch]), torch.ones(len(batch)).long()


def test_workers_and_collation_are_kept():
    private = of_linear(
        20, data_loader=lambda d: DataLoader(d, batch_size=8, num_workers=1, collate_fn=ones_for_targets, shuffle=True)
    )
    for inputs, target in private.data_loader:
        assert bool((target == 1).all())
        F.cross_entropy(private.module(inputs), target).backward()
        private.optimizer.step()
    assert private.steps_taken == 3


def test_a_loader_may_be_made_private_again():
    first = of_linear()
    second = of_linear(data_loader=lambda _: first.data_loader)
    assert second.data_loader.dataset is first.data_loader.dataset
    one_epoch(*second)


@pytest.mark.parametrize("epochs", [1, 10])
def test_epsilon_is_that_of_opacus(epochs):
    """Its PRV accountant within a percent, and below its Rényi accountant."""
    accountants = pytest.importorskip("opacus.accountants")
    private = of_linear(5000, 50, epochs=epochs)
    private.optimizer.mechanism.step = 100 * epochs
    prv, rdp = accountants.PRVAccountant(), accountants.RDPAccountant()
    prv.history = rdp.history = [(1.0, 1 / 100, 100 * epochs)]
    ours = private.epsilon(DELTA)
    assert ours == pytest.approx(float(prv.get_epsilon(DELTA, eps_error=0.002)), rel=0.01)
    assert ours < rdp.get_epsilon(DELTA)


def test_noise_is_calibrated_at_least_as_well():
    pytest.importorskip("opacus")
    from opacus.accountants.utils import get_noise_multiplier

    private = of_linear(5000, 50, target_epsilon=2.0, target_delta=DELTA, epochs=5)
    theirs = get_noise_multiplier(
        target_epsilon=2.0, target_delta=DELTA, sample_rate=1 / 100, epochs=5, accountant="rdp"
    )
    assert 0.8 * theirs < private.optimizer.noise_multiplier < theirs


def test_epsilon_grows_with_the_steps_taken():
    engine = PrivacyEngine(accountant="rdp")
    with pytest.raises(ValueError, match="call make_private first"):
        engine.get_epsilon(DELTA)
    model = nn.Linear(3, 2)
    data = DataLoader(TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,))), batch_size=4)
    made = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=data, noise_multiplier=1.0,
        max_grad_norm=1.0,
    )  # fmt: skip
    assert engine.get_epsilon(DELTA) == 0.0
    assert engine.accountant.history == []
    with pytest.raises(ValueError, match="no step has been taken"):
        engine.statement(DELTA)
    spent = []
    for _ in range(2):
        one_epoch(*made)
        spent.append(engine.get_epsilon(DELTA))
    assert 0 < spent[0] < spent[1] == engine.accountant.get_epsilon(delta=DELTA)
    assert engine.accountant.history == [(1.0, 0.1, 20)]
    assert engine.accountant.mechanism() == "rdp"
    statement = engine.statement(DELTA)
    assert statement.startswith(f"Differentially private: epsilon = {math.ceil(spent[1] * 1e4) / 1e4:.4f}")
    assert "add/remove" in statement
    assert "steps = 20" in " ".join(statement.split())


def engine_of_linear(model: nn.Module | None = None, batch_size: int = 4, **arguments: Any) -> PrivacyEngine:
    model = nn.Linear(3, 2) if model is None else model
    data = TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
    engine = PrivacyEngine()
    engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0,
        data_loader=DataLoader(data, batch_size=batch_size), **{"noise_multiplier": 1.0, **arguments},
    )  # fmt: skip
    return engine


@pytest.mark.parametrize("steps", [0, 1])
def test_an_engine_makes_one_run_private(steps):
    engine = engine_of_linear()
    assert engine.private is not None
    model, optimizer, loader = engine.private
    if steps:
        inputs, target = next(iter(loader))
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
    again: dict[str, Any] = {
        "module": nn.Linear(3, 2), "optimizer": None, "data_loader": loader.original, "max_grad_norm": 1.0
    }  # fmt: skip
    with pytest.raises(ValueError, match="make a new PrivacyEngine"):
        engine.make_private(**again, noise_multiplier=5.0)
    with pytest.raises(ValueError, match="make a new PrivacyEngine"):
        engine.make_private_with_epsilon(**again, target_epsilon=1.0, target_delta=DELTA, epochs=1)
    assert len(engine.accountant) == steps


def test_an_engine_whose_run_was_refused_is_still_fresh():
    engine = PrivacyEngine()
    model = nn.Linear(3, 2)
    given: dict[str, Any] = {
        "module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "noise_multiplier": 1.0,
        "data_loader": DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=4), "max_grad_norm": 1.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match="clipping"):
        engine.make_private(**given, clipping="per_layer")
    engine.make_private(**given)


@pytest.mark.parametrize("other", ["the loader that was given", "another engine's loader"])
@pytest.mark.parametrize("began", [False, True])
def test_batches_that_its_loader_did_not_draw_are_refused(other, began):
    model = nn.Linear(3, 2)
    others = engine_of_linear(model, batch_size=20).private
    private = engine_of_linear(model).private
    assert private is not None
    assert others is not None
    if began:
        one_epoch(*private)
    taken = private.steps_taken
    before = model.weight.detach().clone()
    wrong = private.data_loader.original if other == "the loader that was given" else others.data_loader
    with pytest.raises(ValueError, match="called twice for one batch" if began else "loop over that loader"):
        one_epoch(model, private.optimizer, wrong)
    assert torch.equal(model.weight, before)
    assert private.steps_taken == taken
    one_epoch(*private)  # the refused examples are forgotten, and the run goes on
    assert private.steps_taken == taken + 10


def test_every_run_has_a_key_of_its_own():
    first, second = of_linear(), of_linear()
    keys = [private.optimizer.key.fingerprint() for private in (first, second)]
    assert keys[0] != keys[1]
    assert keys == [private.data_loader.private_loader.key.fingerprint() for private in (first, second)]
    fixed = [dpoptim.NoiseKey.from_bytes(bytes([byte]) * 32).fingerprint() for byte in range(256)]
    assert not {*keys} & {*fixed}  # the keys that a placeholder would have


def test_a_checkpoint_does_not_make_steps_forgotten(tmp_path):
    key = dpoptim.NoiseKey.generate()
    fresh, model = engine_of_linear(key=key), nn.Linear(3, 2)
    assert fresh.private is not None
    fresh.save_checkpoint(path=tmp_path / "fresh.pt", module=fresh.private.module)
    engine = engine_of_linear(model, key=key)
    assert engine.private is not None
    engine.save_checkpoint(path=tmp_path / "own.pt", module=model)
    with pytest.raises(ValueError, match="must be those of make_private"):
        engine.load_checkpoint(path=tmp_path / "own.pt", module=nn.Linear(3, 2))
    with pytest.raises(ValueError, match="must be those of make_private"):
        engine.load_checkpoint(path=tmp_path / "own.pt", module=model, optimizer=fresh.private.optimizer)
    one_epoch(*engine.private)
    spent, trained = engine.get_epsilon(DELTA), model.weight.detach().clone()
    for name, why in (("fresh.pt", "another run"), ("own.pt", "lies behind step 10")):
        with pytest.raises(ValueError, match=why):
            engine.load_checkpoint(path=tmp_path / name, module=model)
    assert torch.equal(model.weight, trained)
    assert engine.get_epsilon(DELTA) == spent
    one_epoch(*engine.private)
    assert engine.get_epsilon(DELTA) > spent


def test_shuffled_batches_get_the_epsilon_of_what_runs():
    with pytest.warns(UserWarning, match="nothing is amplified"):
        shuffled = of_linear(50, 8, poisson_sampling=False)
    sizes = []
    for _ in range(2):
        for inputs, target in shuffled.data_loader:
            sizes.append(len(inputs))
            F.cross_entropy(shuffled.module(inputs), target).backward()
            shuffled.optimizer.step()
    assert sizes == [8] * 12  # an epoch is 50 // 8 full batches
    twice = dpoptim.PrivacyPlan(num_examples=2, batch_size=1, steps=4, noise_multiplier=1.0)  # two participations
    assert shuffled.epsilon(DELTA) == pytest.approx(twice.epsilon(delta=DELTA))
    poisson = of_linear(50, 8)
    poisson.optimizer.mechanism.step = 12
    assert shuffled.epsilon(DELTA) > 1.5 * poisson.epsilon(DELTA)
    assert "zero-out" in shuffled.statement(DELTA)
    calibrated = of_linear(50, 8, poisson_sampling=False, target_epsilon=4.0, target_delta=DELTA, epochs=2)
    assert calibrated.statement().startswith("Differentially private: epsilon = 4.0000")


def test_dropout_is_drawn_from_the_key_whatever_the_public_seed():
    """With a public seed one record more would shift the dropout of all others."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
        data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
        private = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=0.0,
            max_grad_norm=1.0,
            data_loader=torch.utils.data.DataLoader(data, batch_size=8), key=dpoptim.NoiseKey.from_bytes(bytes(32)),
        )  # fmt: skip
        private.optimizer.mechanism._begin_run("one")
        private.data_loader.private_loader._begin_run("one")
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        for inputs, labels in private.data_loader:
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            private.optimizer.step()
        assert torch.equal(torch.get_rng_state(), before)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*found)
