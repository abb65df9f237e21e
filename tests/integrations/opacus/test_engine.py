"""What make_private returns and refuses, and the epsilon it reports."""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, TensorDataset

import dpoptim
from dpoptim.integrations.opacus import (
    BatchMemoryManager,
    DPDataLoader,
    DPOptimizer,
    PrivacyEngine,
    PrivateTraining,
    make_private,
)
from tests.integrations.opacus.cases import DELTA, EXPECTED_WARNINGS, convolutions, images, of_linear, one_epoch

pytestmark = EXPECTED_WARNINGS


@pytest.mark.parametrize(("examples", "drop_last"), [(50, False), (50, True), (48, False), (5, False)])
def test_rate_and_divisor_follow_the_rule_of_opacus(examples, drop_last):
    private = of_linear(examples, data_loader=lambda d: DataLoader(d, batch_size=8, drop_last=drop_last))
    batches = examples // 8 if drop_last else math.ceil(examples / 8)
    assert len(private.data_loader) == batches
    assert private.data_loader.sample_rate == 1 / batches
    assert private.optimizer.expected_batch_size == examples // batches


@pytest.mark.slow
@pytest.mark.parametrize(("examples", "drop_last"), [(50, False), (50, True), (48, False), (5, False)])
def test_opacus_has_the_same_rate_and_divisor(examples, drop_last):
    opacus = pytest.importorskip("opacus")
    private = of_linear(examples, data_loader=lambda d: DataLoader(d, batch_size=8, drop_last=drop_last))
    model = nn.Linear(3, 2)
    _, optimizer, loader = opacus.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0, noise_multiplier=1.0,
        data_loader=DataLoader(private.data_loader.dataset, batch_size=8, drop_last=drop_last),
    )  # fmt: skip
    assert (len(loader), loader.sample_rate) == (len(private.data_loader), private.data_loader.sample_rate)
    assert optimizer.expected_batch_size == private.optimizer.expected_batch_size


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 10])
def test_epsilon_agrees_with_opacus(epochs):
    """Within a percent of its PRV accountant, and below its Rényi accountant."""
    accountants = pytest.importorskip("opacus.accountants")
    private = of_linear(5000, 50, epochs=epochs)
    private.optimizer.mechanism.step = 100 * epochs
    prv, rdp = accountants.PRVAccountant(), accountants.RDPAccountant()
    prv.history = rdp.history = [(1.0, 1 / 100, 100 * epochs)]
    ours = private.epsilon(DELTA)
    assert ours == pytest.approx(float(prv.get_epsilon(DELTA, eps_error=0.002)), rel=0.01)
    assert ours < rdp.get_epsilon(DELTA)


@pytest.mark.slow
def test_calibrated_noise_is_at_most_that_of_opacus():
    pytest.importorskip("opacus")
    from opacus.accountants.utils import get_noise_multiplier

    private = of_linear(5000, 50, target_epsilon=2.0, target_delta=DELTA, epochs=5)
    theirs = get_noise_multiplier(
        target_epsilon=2.0, target_delta=DELTA, sample_rate=1 / 100, epochs=5, accountant="rdp"
    )
    assert 0.8 * theirs < private.optimizer.noise_multiplier < theirs


def test_epsilon_grows_with_the_steps_taken():
    engine = PrivacyEngine(accountant="rdp")
    with pytest.raises(ValueError, match="Call make_private first"):
        engine.get_epsilon(DELTA)
    model = nn.Linear(3, 2)
    data = DataLoader(TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,))), batch_size=4)
    made = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=data, noise_multiplier=1.0,
        max_grad_norm=1.0,
    )  # fmt: skip
    assert engine.get_epsilon(DELTA) == 0.0
    with pytest.raises(ValueError, match="no step has been taken"):
        engine.statement(DELTA)
    spent = []
    for _ in range(2):
        one_epoch(*made)
        spent.append(engine.get_epsilon(DELTA))
    assert 0 < spent[0] < spent[1] == engine.accountant.get_epsilon(delta=DELTA)
    assert len(engine.accountant) == 20
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
def test_an_engine_serves_one_run(steps):
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
    with pytest.raises(ValueError, match="Create a new PrivacyEngine"):
        engine.make_private(**again, noise_multiplier=5.0)
    with pytest.raises(ValueError, match="Create a new PrivacyEngine"):
        engine.make_private_with_epsilon(**again, target_epsilon=1.0, target_delta=DELTA, epochs=1)
    assert len(engine.accountant) == steps


def test_an_engine_can_be_used_after_a_refusal():
    engine = PrivacyEngine()
    model = nn.Linear(3, 2)
    given: dict[str, Any] = {
        "module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "noise_multiplier": 1.0,
        "data_loader": DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=4), "max_grad_norm": 1.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match="clipping"):
        engine.make_private(**given, clipping="per_layer")
    engine.make_private(**given)


@pytest.mark.parametrize("is_secure", [False, True])
def test_secure_mode_is_exact_noise(is_secure):
    engine = PrivacyEngine(secure_mode=is_secure)
    model = nn.Linear(3, 2)
    data = DataLoader(TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,))), batch_size=4)
    adam = torch.optim.Adam(model.parameters())
    private = engine.make_private(
        module=model, optimizer=adam, data_loader=data, noise_multiplier=1.0, max_grad_norm=1.0
    )
    assert private.optimizer.plan.exact_noise == is_secure
    for inputs, labels in private.data_loader:
        nn.functional.cross_entropy(model(inputs), labels).backward()
        private.optimizer.step()
    assert ("rounded to a grid" in " ".join(engine.statement(1e-3).split())) == is_secure


def test_every_run_has_its_own_key():
    first, second = of_linear(), of_linear()
    keys = [private.optimizer.key.fingerprint() for private in (first, second)]
    assert keys[0] != keys[1]
    assert keys == [private.data_loader.private_loader.key.fingerprint() for private in (first, second)]
    fixed = [dpoptim.NoiseKey.from_bytes(bytes([byte]) * 32).fingerprint() for byte in range(256)]
    assert not {*keys} & {*fixed}  # the keys that a placeholder would have


def test_loading_a_checkpoint_does_not_undo_steps(tmp_path):
    key = dpoptim.NoiseKey.generate()
    fresh, model = engine_of_linear(key=key), nn.Linear(3, 2)
    assert fresh.private is not None
    fresh.save_checkpoint(path=tmp_path / "fresh.pt", module=fresh.private.module)
    engine = engine_of_linear(model, key=key)
    assert engine.private is not None
    engine.save_checkpoint(path=tmp_path / "own.pt", module=model)
    with pytest.raises(ValueError, match="Pass those that make_private returned"):
        engine.load_checkpoint(path=tmp_path / "own.pt", module=nn.Linear(3, 2))
    with pytest.raises(ValueError, match="Pass those that make_private returned"):
        engine.load_checkpoint(path=tmp_path / "own.pt", module=model, optimizer=fresh.private.optimizer)
    one_epoch(*engine.private)
    spent, trained = engine.get_epsilon(DELTA), model.weight.detach().clone()
    for name, why in (("fresh.pt", "a different run"), ("own.pt", "is before step 10")):
        with pytest.raises(ValueError, match=why):
            engine.load_checkpoint(path=tmp_path / name, module=model)
    assert torch.equal(model.weight, trained)
    assert engine.get_epsilon(DELTA) == spent
    one_epoch(*engine.private)
    assert engine.get_epsilon(DELTA) > spent


def test_shuffled_batches_have_their_own_epsilon():
    with pytest.warns(UserWarning, match="epsilon is not amplified"):
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


def test_one_return_type_and_no_wrapper():
    model = convolutions()
    keys = list(model.state_dict())
    for mode in ("hooks", "functorch", "ew"):
        private = make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(images(), batch_size=4), noise_multiplier=1.0, max_grad_norm=1.0,
            grad_sample_mode=mode, rand_on_empty=True,
        )  # fmt: skip
        assert type(private) is PrivateTraining
        assert private._fields == ("module", "optimizer", "data_loader")
        assert private.module is model
        assert isinstance(private.optimizer, DPOptimizer)
        assert isinstance(private.data_loader, DPDataLoader)
    assert list(model.state_dict()) == keys
    assert (private.optimizer.noise_multiplier, private.optimizer.max_grad_norm) == (1.0, 1.0)
    assert len(cast(Sized, private.data_loader.dataset)) == 12


def test_a_run_resumes_from_its_checkpoint(tmp_path):
    data, key = images(), dpoptim.NoiseKey.generate()

    def begun(model: nn.Module) -> PrivacyEngine:
        engine = PrivacyEngine()
        engine.make_private(
            module=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01), max_grad_norm=1.0,
            data_loader=DataLoader(data, batch_size=4), noise_multiplier=1.0, key=key,
        )  # fmt: skip
        return engine

    whole = convolutions()
    engine = begun(whole)
    assert engine.private is not None
    one_epoch(*engine.private)
    engine.save_checkpoint(path=tmp_path / "last.pt", module=whole, checkpoint_dict={"epoch": 1})
    assert key.fingerprint() in str(torch.load(tmp_path / "last.pt"))  # and the key itself is not
    one_epoch(*engine.private)

    again = convolutions()
    engine = begun(again)
    assert engine.load_checkpoint(path=tmp_path / "last.pt", module=again)["epoch"] == 1
    assert engine.private is not None
    assert engine.private.steps_taken == 3
    one_epoch(*engine.private)
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(3), torch.tensor(0))])


class GradSampleModule(nn.Linear):
    """Has the name of Opacus's wrapper."""


def with_scheduler(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    return optimizer


def with_steps(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    optimizer = torch.optim.Adam(parameters)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return optimizer


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ghost": ({"grad_sample_mode": "ghost"}, r"unpack \(model, optimizer, data_loader\)"),
    "unknown mode": ({"grad_sample_mode": "magic"}, "grad_sample_mode='magic' is not supported"),
    "per layer": ({"clipping": "per_layer"}, "clipping='per_layer' is not supported"),
    "adaptive": ({"clipping": "adaptive"}, "clipping='adaptive' is not supported"),
    "norms of layers": ({"max_grad_norm": [1.0, 2.0]}, r"Expected max_grad_norm > 0 or inf, got \[1.0, 2.0\]"),
    "no norm": ({"max_grad_norm": 0.0}, "Expected max_grad_norm > 0 or inf, got 0.0"),
    "batch last": ({"batch_first": False}, "examples on the first axis"),
    "generator": ({"noise_generator": torch.Generator()}, "Noise comes from a secret key"),
    "hooks": ({"wrap_model": False}, "optimizer.detach()"),
    "unknown": ({"alphas": [2, 3]}, "alphas is not an argument"),
    "reduction": ({"loss_reduction": "none"}, "loss_reduction='none'"),
    "criterion": ({"criterion": nn.CrossEntropyLoss(reduction="sum")}, "criterion has reduction='sum'"),
    "weights": ({"criterion": nn.CrossEntropyLoss(weight=torch.ones(2))}, "class weights"),
    "ignored": ({"criterion": nn.CrossEntropyLoss(ignore_index=0)}, "ignore_index=0, so its mean"),
    "ignored below 0": ({"criterion": nn.NLLLoss(ignore_index=-1)}, "ignore_index=-1, so its mean"),
    "external_batches": ({"variant_options": {"external_batches": True}}, "variant_options has 'external_batches'"),
    "run_id": ({"variant_options": {"run_id": "same"}}, "variant_options has 'run_id'"),
    "key": ({"variant_options": {"key": dpoptim.NoiseKey.generate()}}, "variant_options has 'key'"),
    "loss_reduction": ({"variant_options": {"loss_reduction": "sum"}}, "variant_options has 'loss_reduction'"),
    "rule": ({"variant_options": {"rule": None}, "optimizer": torch.optim.Adam}, "variant_options has 'rule'"),
    "param_groups": ({"variant_options": {"param_groups": []}}, "variant_options has 'param_groups'"),
    "no epochs": (
        {"target_epsilon": 1.0, "target_delta": 1e-5, "epochs": None},
        "Expected epochs to be a whole number",
    ),
    "epochs": ({"epochs": 1.5}, "Expected epochs to be a whole number"),
    "variant of SGD": ({"variant": "scale_then_privatize"}, "optimizer is SGD"),
    "unknown variant": ({"variant": "adadps", "optimizer": torch.optim.Adam}, "Expected variant to be one of"),
    "length": (
        {"variant": "scale_then_privatize", "optimizer": torch.optim.Adagrad},
        "epochs=...",
    ),
    "another optimizer": ({"optimizer": torch.optim.Adamax}, "Adamax, which has no private version"),
    "nesterov": (
        {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)},
        "Use nesterov=False",
    ),
    "amsgrad": ({"optimizer": lambda p: torch.optim.Adam(p, amsgrad=True)}, "amsgrad=True"),
    "centered": ({"optimizer": lambda p: torch.optim.RMSprop(p, centered=True)}, "centered=True"),
    "lr_decay": ({"optimizer": lambda p: torch.optim.Adagrad(p, lr_decay=0.1)}, "lr_decay=0.1"),
    "scheduler before": ({"optimizer": with_scheduler}, "scheduler after make_private"),
    "steps before": ({"optimizer": with_steps}, "has taken steps"),
    "others' parameters": (
        {"optimizer": lambda _: torch.optim.Adam(nn.Linear(3, 2).parameters())},
        "that the module does not have",
    ),
    "missing": ({"optimizer": lambda p: torch.optim.Adam([next(p)])}, "lacks the trainable parameter 'bias'"),
    "wrapper": ({"model": GradSampleModule(3, 2)}, "module is a GradSampleModule"),
    "batch norm": ({"model": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))}, "mixes examples"),
    "stream": ({"data_loader": lambda d: DataLoader(Stream(), batch_size=4)}, "IterableDataset"),
    "a list": ({"data_loader": lambda d: [d[0]]}, "must be a torch DataLoader, got list"),
    "no batches": ({"data_loader": lambda d: DataLoader(d, batch_size=None)}, "batch_size=None"),
    "too few": ({"data_loader": lambda d: DataLoader(d, batch_size=64, drop_last=True)}, "no full batch"),
    "a subset": (
        {"data_loader": lambda d: DataLoader(d, batch_size=4, sampler=SubsetRandomSampler([1, 2, 3]))},
        "SubsetRandomSampler.*torch.utils.data.Subset",
    ),
    "a part": (
        {"data_loader": lambda d: DataLoader(d, batch_size=4, sampler=RandomSampler(d, num_samples=10))},
        "RandomSampler.*torch.utils.data.Subset",
    ),
    "a seed": (
        {"data_loader": lambda d: DataLoader(d, batch_size=4, shuffle=True, generator=torch.Generator())},
        "drawn with a secret key",
    ),
    "a sampler's seed": (
        {"data_loader": lambda d: DataLoader(d, 4, sampler=RandomSampler(d, generator=torch.Generator()))},
        "drawn with a secret key",
    ),
    "own batches": ({"data_loader": lambda d: DataLoader(d, batch_sampler=[[0, 1], [2, 3]])}, "data_loader has a list"),
    "worker_init_fn": (
        {"data_loader": lambda d: DataLoader(d, batch_size=4, num_workers=1, worker_init_fn=print)},
        "worker_init_fn",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message) as refused:
        of_linear(**arguments)
    assert "\n" not in str(refused.value)


def test_unsupported_engines_and_memory_managers_are_refused():
    with pytest.raises(ValueError, match="Expected accountant to be one of"):
        PrivacyEngine(accountant="moments")
    private, other = of_linear(), of_linear()
    with pytest.raises(ValueError, match="loader that make_private returned"):
        BatchMemoryManager(
            data_loader=private.data_loader.original, max_physical_batch_size=4, optimizer=private.optimizer  # type: ignore[arg-type]
        )  # fmt: skip
    with pytest.raises(ValueError, match="does not belong to data_loader"):
        BatchMemoryManager(data_loader=private.data_loader, max_physical_batch_size=4, optimizer=other.optimizer)
    with pytest.raises(ValueError, match="max_physical_batch_size"):
        BatchMemoryManager(data_loader=private.data_loader, max_physical_batch_size=0, optimizer=private.optimizer)


def test_criteria_that_do_not_mix_are_accepted():
    of_linear(criterion=nn.CrossEntropyLoss())
    of_linear(criterion=nn.CrossEntropyLoss(reduction="sum", ignore_index=0), loss_reduction="sum")
    of_linear(criterion=nn.MSELoss())
