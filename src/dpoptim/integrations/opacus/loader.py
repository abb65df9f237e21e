"""One epoch an iteration, and batches in parts: Opacus's two ways of looping, on dpoptim's loader."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sized
from typing import Any, cast

import torch.utils.data

from dpoptim.data import PrivateLoader, secret_randomness
from dpoptim.integrations.opacus.optimizers import DPOptimizer

_OF_WORKERS: dict[str, tuple[Any, ...]] = {  # how workers run, and not what they return; what they are by default
    "timeout": (0,),
    "prefetch_factor": (None, 2),
    "persistent_workers": (False,),
    "multiprocessing_context": (None,),
}


class DPDataLoader:
    """The steps of a `PrivateLoader`, `steps_per_epoch` of them with every `iter()`.

    An iteration begins at the first step that the optimizer has not released: a batch that was only looked at, or an
    epoch that was left early, is drawn again, the same examples for the same step, and is released once.

    Guarantee: that of the `PrivateLoader`. Steps beyond the plan's are refused; `is_open` says that no length was asked
    for, and the plan's is only a bound.
    What the model and the collator draw at random for a step (dropout, masks) comes from the run's secret key, and
    torch's generators have their own state back when the step is released.
    Edge cases: an empty Poisson sample comes as one example that the optimizer leaves out. `len` is in steps; for a
    loader in parts it is the expected number of parts.
    """

    def __init__(
        self,
        private_loader: PrivateLoader,
        optimizer: DPOptimizer,
        *,
        steps_per_epoch: int,
        original: torch.utils.data.DataLoader[Any],
        is_open: bool,
        max_physical_batch_size: int | None = None,
    ) -> None:
        self.private_loader = private_loader
        self.optimizer = optimizer
        self.steps_per_epoch = steps_per_epoch
        self.original = original
        self.is_open = is_open
        self.max_physical_batch_size = max_physical_batch_size

    @property
    def dataset(self) -> torch.utils.data.Dataset[Any]:
        return self.private_loader.dataset

    @property
    def batch_size(self) -> int:
        """The expected one."""
        return self.private_loader.plan.batch_size

    @property
    def sample_rate(self) -> float:
        """The chance of an example to be in a batch (under shuffled batches, its share of the steps)."""
        return self.private_loader.plan.sampling_prob

    @property
    def step_ends(self) -> bool:
        """Whether the part that was yielded last closes a step; advance a scheduler of steps only then."""
        return self.private_loader.step_ends

    def __len__(self) -> int:
        if self.max_physical_batch_size is None:
            return self.steps_per_epoch
        return -(-self.steps_per_epoch * self.batch_size // self.max_physical_batch_size)

    def __iter__(self) -> Iterator[Any]:
        released = self.optimizer.mechanism.step
        if released >= self.private_loader.steps:
            raise ValueError(
                f"all {self.private_loader.steps} steps have been taken, and more are not covered by the epsilon asked "
                "for; for a longer run pass more epochs to make_private"
            )
        self.private_loader.load_state_dict({**self.private_loader.state_dict(), "next_step": released})
        self.private_loader.micro_batch_size = self.max_physical_batch_size
        batches = secret_randomness(self.private_loader, self.optimizer)
        return self._epoch(batches, end=released + self.steps_per_epoch)

    def _epoch(self, batches: Iterator[Any], *, end: int) -> Iterator[Any]:
        for batch in batches:
            last = self.private_loader.next_step >= end
            yield batch
            if last:
                return

    def in_parts(self, max_physical_batch_size: int) -> DPDataLoader:
        """The same steps, each in parts of at most so many examples; the optimizer makes one update a step."""
        return DPDataLoader(
            self.private_loader,
            self.optimizer,
            steps_per_epoch=self.steps_per_epoch,
            original=self.original,
            is_open=self.is_open,
            max_physical_batch_size=max_physical_batch_size,
        )


class BatchMemoryManager:
    """A context whose loader gives each batch in parts of at most `max_physical_batch_size` examples.

    The loop calls `zero_grad()`, `backward()` and `step()` for every part; parameters move at the last part of a step.
    How a step is cut changes no sum, no noise and no guarantee.
    """

    def __init__(self, *, data_loader: DPDataLoader, max_physical_batch_size: int, optimizer: DPOptimizer) -> None:
        if not isinstance(data_loader, DPDataLoader):
            raise ValueError(
                f"data_loader must be the one that make_private returned, got {type(data_loader).__name__}"
            )
        if optimizer is not data_loader.optimizer:
            raise ValueError("optimizer must be the one that make_private returned together with data_loader")
        size = max_physical_batch_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"max_physical_batch_size must be a whole number ≥ 1, got {size!r}")
        self.data_loader, self.optimizer, self.max_physical_batch_size = data_loader, optimizer, size

    def __enter__(self) -> DPDataLoader:
        return self.data_loader.in_parts(self.max_physical_batch_size)

    def __exit__(self, *exception: object) -> None:
        return None


def checked_loader(data_loader: object) -> torch.utils.data.DataLoader[Any]:
    """The DataLoader to take dataset, batch size and workers from; refuses one whose draws would be silently lost."""
    if isinstance(data_loader, DPDataLoader):
        return data_loader.original
    if not isinstance(data_loader, torch.utils.data.DataLoader):
        raise ValueError(f"data_loader must be a torch DataLoader, got {type(data_loader).__name__}")
    if isinstance(data_loader.dataset, torch.utils.data.IterableDataset):
        raise ValueError("data_loader is over an IterableDataset, whose examples cannot be drawn at random; index it")
    if data_loader.batch_sampler is None:
        raise ValueError("data_loader has batch_size=None and no batches; give it a batch_size")
    batches, sampler = data_loader.batch_sampler, data_loader.sampler
    takes_all_once = isinstance(sampler, torch.utils.data.SequentialSampler) or (
        isinstance(sampler, torch.utils.data.RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(cast(Sized, data_loader.dataset))
    )
    if type(batches) is not torch.utils.data.BatchSampler or not takes_all_once:
        lost = type(sampler if type(batches) is torch.utils.data.BatchSampler else batches).__name__
        raise ValueError(
            f"data_loader has a {lost}, and private batches are drawn from the whole dataset with equal chances; put a "
            "selection into torch.utils.data.Subset, give batch_size and leave the sampler out"
        )
    if len(data_loader) == 0:
        raise ValueError("data_loader has no batches: drop_last=True and fewer examples than batch_size")
    if data_loader.worker_init_fn is not None:
        raise ValueError("data_loader has a worker_init_fn, which is not carried over; do that work in the dataset")
    if data_loader.generator is not None or getattr(sampler, "generator", None) is not None:
        raise ValueError(
            "data_loader has a generator, and private batches are drawn with a secret key; leave it out, and pass key= "
            "to make_private to draw the same again"
        )
    left = [name for name, usual in _OF_WORKERS.items() if getattr(data_loader, name) not in usual]
    if left:
        warnings.warn(
            f"{', '.join(left)} of data_loader: not carried over; workers start anew with every epoch, with torch's "
            "defaults",
            stacklevel=5,
        )
    return data_loader
