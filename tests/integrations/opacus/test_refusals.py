"""What is not there is refused in one line."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset, SubsetRandomSampler

import dpoptim
from dpoptim.integrations.opacus import BatchMemoryManager, PrivacyEngine
from tests.integrations.opacus.small import of_linear, one_epoch

pytestmark = pytest.mark.filterwarnings(
    "ignore:Secure RNG turned off", "ignore:Using a non-full backward hook", "ignore:Full backward hook is firing",
    "ignore:Optimal order is the largest alpha", "ignore:poisson_sampling=False", "ignore:loss_reduction='sum'",
)  # fmt: skip


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(3), torch.tensor(0))])


class GradSampleModule(nn.Linear):
    """A class of the name of Opacus's wrapper."""


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
    "unknown mode": ({"grad_sample_mode": "magic"}, "grad_sample_mode='magic' is not known"),
    "per layer": ({"clipping": "per_layer"}, "clipping='per_layer' is not there"),
    "adaptive": ({"clipping": "adaptive"}, "clipping='adaptive' is not there"),
    "norms of layers": ({"max_grad_norm": [1.0, 2.0]}, r"max_grad_norm=\[1.0, 2.0\] must be one number"),
    "no norm": ({"max_grad_norm": 0.0}, "Expected clip_norm > 0"),
    "batch last": ({"batch_first": False}, "examples on the first axis"),
    "generator": ({"noise_generator": torch.Generator()}, "noise comes of a secret key"),
    "hooks": ({"wrap_model": False}, "optimizer.detach()"),
    "unknown": ({"alphas": [2, 3]}, "alphas is not an argument here"),
    "reduction": ({"loss_reduction": "none"}, "loss_reduction='none'"),
    "criterion": ({"criterion": nn.CrossEntropyLoss(reduction="sum")}, "criterion has reduction='sum'"),
    "weights": ({"criterion": nn.CrossEntropyLoss(weight=torch.ones(2))}, "class weights"),
    "ignored": ({"criterion": nn.CrossEntropyLoss(ignore_index=0)}, "ignore_index=0, and its mean"),
    "ignored below 0": ({"criterion": nn.NLLLoss(ignore_index=-1)}, "ignore_index=-1, and its mean"),
    "external_batches": ({"variant_options": {"external_batches": True}}, "variant_options has 'external_batches'"),
    "run_id": ({"variant_options": {"run_id": "same"}}, "variant_options has 'run_id'"),
    "key": ({"variant_options": {"key": dpoptim.NoiseKey.generate()}}, "variant_options has 'key': pass key="),
    "loss_reduction": ({"variant_options": {"loss_reduction": "sum"}}, "variant_options has 'loss_reduction'"),
    "rule": ({"variant_options": {"rule": None}, "optimizer": torch.optim.Adam}, "variant_options has 'rule'"),
    "param_groups": ({"variant_options": {"param_groups": []}}, "variant_options has 'param_groups'"),
    "no epochs": (
        {"target_epsilon": 1.0, "target_delta": 1e-5, "epochs": None},
        "epochs must be a whole number",
    ),
    "epochs": ({"epochs": 1.5}, "epochs must be a whole number"),
    "variant of SGD": ({"variant": "scale_then_privatize"}, "optimizer is SGD"),
    "unknown variant": ({"variant": "adadps", "optimizer": torch.optim.Adam}, "variant='adadps' must be one of"),
    "length": (
        {"variant": "scale_then_privatize", "optimizer": torch.optim.Adagrad},
        "pass epochs=",
    ),
    "another optimizer": ({"optimizer": torch.optim.Adamax}, "Adamax, which has no private counterpart"),
    "nesterov": (
        {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)},
        "use nesterov=False",
    ),
    "amsgrad": ({"optimizer": lambda p: torch.optim.Adam(p, amsgrad=True)}, "amsgrad=True"),
    "centered": ({"optimizer": lambda p: torch.optim.RMSprop(p, centered=True)}, "centered=True"),
    "lr_decay": ({"optimizer": lambda p: torch.optim.Adagrad(p, lr_decay=0.1)}, "lr_decay=0.1"),
    "scheduler before": ({"optimizer": with_scheduler}, "scheduler after make_private"),
    "steps before": ({"optimizer": with_steps}, "has taken steps"),
    "others' parameters": ({"optimizer": lambda _: torch.optim.Adam(nn.Linear(3, 2).parameters())}, "not the module"),
    "missing": ({"optimizer": lambda p: torch.optim.Adam([next(p)])}, "lacks the trainable parameter 'bias'"),
    "wrapper": ({"model": GradSampleModule(3, 2)}, "module is a GradSampleModule"),
    "batch norm": ({"model": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))}, "mixes examples"),
    "stream": ({"data_loader": lambda d: DataLoader(Stream(), batch_size=4)}, "IterableDataset"),
    "a list": ({"data_loader": lambda d: [d[0]]}, "must be a torch DataLoader, got list"),
    "no batches": ({"data_loader": lambda d: DataLoader(d, batch_size=None)}, "batch_size=None"),
    "too few": ({"data_loader": lambda d: DataLoader(d, batch_size=64, drop_last=True)}, "has no batches"),
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
def test_what_is_not_there_is_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as refused:
        of_linear(**arguments)
    assert "\n" not in str(refused.value)


def test_the_engine_and_the_memory_manager_refuse_too():
    with pytest.raises(ValueError, match="not hardened against floating-point attacks"):
        PrivacyEngine(secure_mode=True)
    with pytest.raises(ValueError, match="accountant='moments'"):
        PrivacyEngine(accountant="moments")
    private, other = of_linear(), of_linear()
    with pytest.raises(ValueError, match="the one that make_private returned"):
        BatchMemoryManager(
            data_loader=private.data_loader.original, max_physical_batch_size=4, optimizer=private.optimizer  # type: ignore[arg-type]
        )  # fmt: skip
    with pytest.raises(ValueError, match="together with data_loader"):
        BatchMemoryManager(data_loader=private.data_loader, max_physical_batch_size=4, optimizer=other.optimizer)
    with pytest.raises(ValueError, match="max_physical_batch_size"):
        BatchMemoryManager(data_loader=private.data_loader, max_physical_batch_size=0, optimizer=private.optimizer)


def test_criteria_that_do_not_mix_are_taken():
    of_linear(criterion=nn.CrossEntropyLoss())
    of_linear(criterion=nn.CrossEntropyLoss(reduction="sum", ignore_index=0), loss_reduction="sum")
    of_linear(criterion=nn.MSELoss())


def test_what_workers_lose_is_named():
    with pytest.warns(UserWarning, match="^timeout, prefetch_factor, persistent_workers of data_loader: not carried"):
        of_linear(
            data_loader=lambda d: DataLoader(
                d, batch_size=4, num_workers=1, timeout=5, prefetch_factor=3, persistent_workers=True
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_linear(data_loader=lambda d: DataLoader(d, batch_size=4, num_workers=1))


def test_a_selection_goes_into_a_subset():
    private = of_linear(data_loader=lambda d: DataLoader(Subset(d, range(10)), batch_size=5))
    one_epoch(*private)
    assert private.steps_taken == 2


class Collator:
    def __init__(self) -> None:
        self.rng = torch.Generator().manual_seed(0)

    def __call__(self, rows: Any) -> Any:
        return torch.rand(len(rows), 3, generator=self.rng), torch.zeros(len(rows), dtype=torch.long)


def test_a_collator_with_its_own_generator_is_refused():
    model = nn.Linear(3, 2)
    rows: Any = [(torch.zeros(3), 0)] * 8
    with pytest.raises(ValueError, match=r"collate_fn\.rng is a random generator with a public seed"):
        PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
            data_loader=DataLoader(rows, batch_size=4, collate_fn=Collator()), max_grad_norm=1.0,
        )  # fmt: skip
