"""`make_private` and `make_private_with_epsilon`: Opacus's arguments, dpoptim's plan, one return type."""

from __future__ import annotations

import warnings
from collections.abc import Sized
from typing import Any, NamedTuple, Unpack, cast

import torch
import torch.utils.data
from torch import nn

from dpoptim.data import private_loader
from dpoptim.integrations.opacus.loader import DPDataLoader, checked_loader
from dpoptim.integrations.opacus.optimizers import DPOptimizer, check_optimizer, private_optimizer
from dpoptim.integrations.opacus.own_loss import own_loss_taken_apart
from dpoptim.integrations.opacus.settings import Settings, check_max_grad_norm, check_module, check_settings
from dpoptim.noise import NoiseKey
from dpoptim.privacy import Adjacency, Poisson, PrivacyPlan, Shuffled

_MOST_STEPS = 1_000_000  # of a run without `epochs`: its noise is independent, so ε is that of the steps taken


class Private(NamedTuple):
    """What training needs, always these three: `model, optimizer, data_loader = make_private(...)`."""

    module: nn.Module
    optimizer: DPOptimizer
    data_loader: DPDataLoader

    @property
    def steps_taken(self) -> int:
        return self.optimizer.mechanism.step

    def epsilon(self, delta: float) -> float:
        """ε of the steps taken so far, an upper bound; 0 before the first.

        Noise is independent, so t steps are the run of a plan of t steps, for a t that was fixed in advance: a run that
        is stopped by what was seen of it has the ε of the longest that it could have been.
        """
        if self.steps_taken == 0:
            return 0.0
        return self.optimizer.plan.replace(steps=self.steps_taken).epsilon(delta=delta)

    def statement(self, delta: float | None = None) -> str:
        """What is guaranteed, for an auditor: of the whole run where its length was given, else of the steps taken."""
        plan = self.optimizer.plan
        if self.data_loader.is_open:
            if self.steps_taken == 0:
                raise ValueError("no step has been taken and epochs was not given; ask after training, or pass epochs=")
            plan = plan.replace(steps=self.steps_taken)
        return plan.statement(delta)


def make_private(
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: torch.utils.data.DataLoader[Any] | DPDataLoader,
    noise_multiplier: float,
    max_grad_norm: float,
    epochs: int | None = None,
    **settings: Unpack[Settings],
) -> Private:
    """Module, optimizer and data loader for private training, by Opacus's names and in its units.

    Each step releases (1/B)·(Σ_j min(1, max_grad_norm/‖g_j‖)·g_j + N(0, (noise_multiplier·max_grad_norm)²)), with g_j
    the gradient of ONE example's loss (a mean over the batch is undone), B = ⌊N/len(data_loader)⌋, and every example
    drawn on its own with probability 1/len(data_loader). The module is returned as it came, without a wrapper; the
    optimizer is new, with the rule, groups and settings of the one given; the loader gives one epoch, that is
    len(data_loader) steps, with every iteration.

    Guarantee: `Private.epsilon(delta)`, add-remove neighbours, as `Private.statement` words it. The size of the dataset
    becomes a declared constant here. poisson_sampling=False draws shuffled batches of exactly batch_size, ⌊N/B⌋ an
    epoch; its ε is of zero-out neighbours and has no amplification.
    Edge cases: `epochs` is dpoptim's: a run longer than that is refused. See `Settings` for the other arguments.

    >>> data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
    >>> model = nn.Linear(3, 2)
    >>> model, optimizer, loader = make_private(
    ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data_loader=torch.utils.data.DataLoader(data, batch_size=8), noise_multiplier=1.0, max_grad_norm=1.0)
    >>> for inputs, labels in loader:
    ...     nn.functional.cross_entropy(model(inputs), labels).backward()
    ...     optimizer.step()
    >>> len(loader), optimizer.mechanism.step, optimizer.expected_batch_size
    (5, 5, 8)
    """
    return _assembled(
        module, optimizer, data_loader, settings, max_grad_norm, noise_multiplier=noise_multiplier, epochs=epochs
    )


def make_private_with_epsilon(
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: torch.utils.data.DataLoader[Any] | DPDataLoader,
    target_epsilon: float,
    target_delta: float,
    epochs: int,
    max_grad_norm: float,
    **settings: Unpack[Settings],
) -> Private:
    """As `make_private`, with the least noise that keeps `epochs` epochs within (target_epsilon, target_delta).

    Guarantee: ε at the end is at most target_epsilon, and within 1e-4 of it; more epochs than that are refused.
    """
    target = (target_epsilon, target_delta)
    return _assembled(module, optimizer, data_loader, settings, max_grad_norm, target=target, epochs=epochs)


def _assembled(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: torch.utils.data.DataLoader[Any] | DPDataLoader,
    settings: Settings,
    max_grad_norm: object,
    *,
    noise_multiplier: float | None = None,
    target: tuple[float, float] | None = None,
    epochs: int | None,
) -> Private:
    check_settings(settings)
    check_module(module)
    check_optimizer(optimizer, module)
    original = checked_loader(data_loader)
    is_open = epochs is None and target is None
    if not is_open and (isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1):
        raise ValueError(f"epochs must be a whole number ≥ 1, got {epochs!r}")
    plan, steps_per_epoch = _plan(
        original,
        poisson_sampling=settings.get("poisson_sampling", True),
        clip_norm=check_max_grad_norm(max_grad_norm),
        noise_multiplier=noise_multiplier,
        epochs=epochs,
    )
    if target is not None:
        plan = plan.calibrate(epsilon=target[0], delta=target[1])
    reduction = settings.get("loss_reduction", "mean")
    if reduction == "sum":
        warnings.warn(
            f"loss_reduction='sum': the step is on the average over the expected {plan.batch_size} examples, where "
            f"Opacus leaves the sum; for the same SGD step multiply lr by {plan.batch_size}",
            stacklevel=4,
        )
    given_key = settings.get("key")
    key = NoiseKey.generate() if given_key is None else given_key
    private_batches = private_loader(
        original.dataset,
        plan,
        key=key,
        collate_fn=original.collate_fn,
        num_workers=original.num_workers,
        pin_memory=original.pin_memory,
    )
    with own_loss_taken_apart(module, wanted=hasattr(module, "config") and reduction == "mean"):
        private = private_optimizer(
            module,
            optimizer,
            plan,
            variant=settings.get("variant"),
            variant_options=settings.get("variant_options") or {},
            loss_reduction=reduction,
            key=key,
            steps_are_known=not is_open,
        )
    loader = DPDataLoader(private_batches, private, steps_per_epoch=steps_per_epoch, original=original, is_open=is_open)
    return Private(module, private, loader)


def _plan(
    data_loader: torch.utils.data.DataLoader[Any],
    *,
    poisson_sampling: bool,
    clip_norm: float,
    noise_multiplier: float | None,
    epochs: int | None,
) -> tuple[PrivacyPlan, int]:
    """The plan of Opacus's numbers, and how many of its steps are an epoch.

    Poisson: the rate is exactly 1/L and the divisor ⌊N/L⌋, with L = len(data_loader), as in Opacus; under add-remove
    adjacency num_examples is a declared constant, and L·⌊N/L⌋ is the one that gives this rate.
    """
    size, batches = len(cast(Sized, data_loader.dataset)), len(data_loader)
    if poisson_sampling:
        batch_size, steps_per_epoch = size // batches, batches
        num_examples, adjacency = batches * batch_size, Adjacency.ADD_REMOVE
    else:
        batch_size = min(cast(int, data_loader.batch_size), size)
        num_examples, adjacency, steps_per_epoch = size, Adjacency.ZERO_OUT, size // batch_size
        warnings.warn(
            "poisson_sampling=False: nothing is amplified, so epsilon is larger than what Opacus prints, which is that "
            "of Poisson samples though none are drawn; neighbours are zero-out, since removal would shift the batches",
            stacklevel=5,
        )
    plan = PrivacyPlan(
        num_examples=num_examples,
        batch_size=batch_size,
        steps=_MOST_STEPS if epochs is None else epochs * steps_per_epoch,
        clip_norm=clip_norm,
        sampling=Poisson() if poisson_sampling else Shuffled(),
        adjacency=adjacency,
        noise_multiplier=noise_multiplier,
    )
    return plan, steps_per_epoch
