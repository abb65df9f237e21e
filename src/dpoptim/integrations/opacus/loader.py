"""`DPDataLoader` yields one epoch per iteration, and `BatchMemoryManager` yields batches in smaller parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sized
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, cast

import torch.utils.data

from dpoptim.arguments import check_whole
from dpoptim.data import PrivateLoader, secret_randomness
from dpoptim.integrations.opacus.optimizers import DPOptimizer


@dataclass(eq=False)
class DPDataLoader:
    """A private loader that yields one epoch (`steps_per_epoch` steps) per iteration.

    An iteration starts at the first step that was not released. So a batch that was fetched but not trained on
    is drawn again, and so is the rest of an unfinished epoch: the same step has the same examples. An empty Poisson
    sample is one placeholder example, which the optimizer ignores. `len` counts steps, or the expected number of
    micro-batches.

    Guarantee: That of `PrivateLoader`; steps beyond the plan are refused. What the model and the collator draw
    (dropout, masks) comes from the run's secret key, and torch's generators are restored after each step.
    """

    private_loader: PrivateLoader
    optimizer: DPOptimizer
    _: KW_ONLY
    original: torch.utils.data.DataLoader[Any]  # the loader that make_private was given
    is_open: bool  # whether `epochs` was not given
    max_physical_batch_size: int | None = None

    @property
    def dataset(self) -> torch.utils.data.Dataset[Any]:
        """The training examples."""
        return self.private_loader.dataset

    @property
    def batch_size(self) -> int:
        """The expected batch size."""
        return self.private_loader.plan.batch_size

    @property
    def sample_rate(self) -> float:
        """The probability that an example is in a batch; for shuffled batches, its share of the steps."""
        return self.private_loader.plan.sampling_prob

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in one iteration."""
        return self.private_loader.plan.num_examples // self.batch_size

    @property
    def step_ends(self) -> bool:
        """Whether the last yielded part ends a step. Advance a scheduler only then."""
        return self.private_loader.step_ends

    def __len__(self) -> int:
        if self.max_physical_batch_size is None:
            return self.steps_per_epoch
        return -(-self.steps_per_epoch * self.batch_size // self.max_physical_batch_size)

    def __iter__(self) -> Iterator[Any]:
        released = self.optimizer.mechanism.step
        if released >= self.private_loader.steps:
            raise ValueError(
                f"all {released} steps have been taken. Pass more epochs to make_private for a longer run."
            )
        self.private_loader.load_state_dict({**self.private_loader.state_dict(), "next_step": released})
        self.private_loader.micro_batch_size = self.max_physical_batch_size
        return self._epoch(end=released + self.steps_per_epoch)

    def _epoch(self, *, end: int) -> Iterator[Any]:
        for batch in secret_randomness(self.private_loader, self.optimizer):
            last = self.private_loader.next_step >= end
            yield batch
            if last:
                return


def BatchMemoryManager(
    *, data_loader: DPDataLoader, max_physical_batch_size: int, optimizer: DPOptimizer
) -> contextlib.AbstractContextManager[DPDataLoader]:
    """Return a context whose loader yields each batch in parts of at most `max_physical_batch_size` examples.

    The loop calls `zero_grad()`, `backward()` and `step()` for every part. The last part of a step updates the model.
    Pass the loader and the optimizer that `make_private` returned.

    Guarantee: Sums, noise and ε do not depend on the size of the parts.
    """
    if not isinstance(data_loader, DPDataLoader):
        raise ValueError(f"data_loader is a {type(data_loader).__name__}. Pass the loader that make_private returned.")
    if optimizer is not data_loader.optimizer:
        raise ValueError("optimizer does not belong to data_loader. Pass both as make_private returned them.")
    check_whole("max_physical_batch_size", max_physical_batch_size)
    return contextlib.nullcontext(replace(data_loader, max_physical_batch_size=max_physical_batch_size))


def checked_loader(data_loader: object) -> torch.utils.data.DataLoader[Any]:
    """Return the DataLoader to copy dataset, batch size and workers from; refuse options that would be lost."""
    if isinstance(data_loader, DPDataLoader):
        return data_loader.original
    if not isinstance(data_loader, torch.utils.data.DataLoader):
        raise ValueError(f"data_loader must be a torch DataLoader, got {type(data_loader).__name__}")
    if isinstance(data_loader.dataset, torch.utils.data.IterableDataset):
        raise ValueError("data_loader has an IterableDataset, which cannot be sampled. Use an indexed dataset.")
    if data_loader.batch_sampler is None:
        raise ValueError("data_loader has batch_size=None. Give it a batch_size.")
    batches, sampler = data_loader.batch_sampler, data_loader.sampler
    takes_all_once = isinstance(sampler, torch.utils.data.SequentialSampler) or (
        isinstance(sampler, torch.utils.data.RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(cast(Sized, data_loader.dataset))
    )
    if type(batches) is not torch.utils.data.BatchSampler or not takes_all_once:
        lost = type(sampler if type(batches) is torch.utils.data.BatchSampler else batches).__name__
        raise ValueError(
            f"data_loader has a {lost}, but private batches are drawn uniformly. Leave it out, and select examples "
            "with torch.utils.data.Subset."
        )
    if len(data_loader) == 0:
        raise ValueError("data_loader has drop_last=True and no full batch. Use a smaller batch_size.")
    if data_loader.worker_init_fn is not None:
        raise ValueError("data_loader has a worker_init_fn, which is not copied. Do that work in the dataset.")
    if data_loader.generator is not None or getattr(sampler, "generator", None) is not None:
        raise ValueError("data_loader has a generator, but batches are drawn with a secret key. Leave it out.")
    return data_loader
