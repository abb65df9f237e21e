"""Functions that need no optimizer: clipped sums, the check that examples do not mix, gradients of public data."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.clipping.clipped_sums import ClippedSums
from dpoptim.clipping.engine import Engine, UncheckedLossError, public_data
from dpoptim.data.processes import Processes
from dpoptim.data.shards import Shards, averaged_gradients, is_sharded, reshard
from dpoptim.kernels.norms import wide

LossFunction = Callable[[nn.Module, Any], Tensor]


def clipped_sum(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    clip_norm: float = 1.0,
    scale: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return Σ_j min(1, clip_norm/‖s ⊙ g_j‖)·g_j by parameter name, and the norms ‖s ⊙ g_j‖ [examples].

    `loss_fn(model, batch)` returns one loss per example. The result is NOT private: it has no noise.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> x = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    >>> sums, norms = clipped_sum(model, lambda m, x: m(x)[:, 0], x, clip_norm=1.0)
    >>> norms
    tensor([5.0000, 0.5000])
    >>> sums["weight"]           # (3, 4)/5 + (0.3, 0.4)
    tensor([[0.9000, 1.2000]])
    """
    if any(map(is_sharded, model.parameters())):
        raise ValueError("clipped_sum needs a whole model. Call it before fully_shard")
    sums = ClippedSums(model, clip_norm=clip_norm)
    if scale is not None:
        for name, parameter in sums.parameters.items():
            if name not in scale or scale[name].shape != parameter.shape:
                raise ValueError(f"scale['{name}'] must be a tensor of the parameter's shape, {tuple(parameter.shape)}")
        sums.scale = {name: wide(scale[name]) for name in sums.parameters}
    with _attached(sums.engine):
        try:
            losses = _losses(model, loss_fn, batch)
            losses.sum().backward()
        except UncheckedLossError:
            sums.engine.check_losses(partial(_losses, model, loss_fn), batch, lasting=False)
            losses = _losses(model, loss_fn, batch)
            losses.sum().backward()
        sums.engine.flush()
        if not sums.norms:
            raise ValueError("loss_fn: no trainable parameter received a gradient; does the loss depend on the model?")
        norms = torch.cat(sums.norms)
        if len(norms) != len(losses):
            raise ValueError(f"loss_fn must return one loss per example, got {len(losses)} for {len(norms)} examples")
        return dict(sums.take()[0]), norms


def check_example_independence(model: nn.Module, loss_fn: LossFunction, batch: Any) -> None:
    """Check on one batch that each example's loss depends on that example alone.

    Optimizers check the model calls themselves, but they cannot see a loss that mixes examples (in-batch negatives, a
    loss normalised over the batch). Run this once before training. It is required if the loss calls the model more
    than once.

    Args:
        model: The model, with or without an optimizer, in the mode in which it is trained.
        loss_fn: `loss_fn(model, batch)` returns one loss per example.
        batch: Two different examples or more, as tensors with the examples on the first axis, in any structure of
            tuples, lists and dicts.

    Raises:
        ExampleMixingError: If a loss or gradient of one example changes when other examples are replaced.

    Guarantee: The model, its optimizer's state and the random generators are left as they were.

    >>> model = nn.Linear(2, 1)
    >>> check_example_independence(model, lambda m, x: m(x)[:, 0], torch.randn(3, 2))
    >>> check_example_independence(model, lambda m, x: m(x - x.mean(0))[:, 0], torch.randn(3, 2))
    Traceback (most recent call last):
    dpoptim.validation.example_independence.ExampleMixingError: examples mix: output 0 of loss_fn changes ...
    """
    check_training_loss(model, loss_fn, batch)


def check_training_loss(model: nn.Module, loss_fn: LossFunction, batch: Any) -> int:
    """Run `check_example_independence`.

    Returns:
        The bytes that the gradient factors of one example take until its batch is clipped.
    """
    engine = Engine(model, lambda _: None, shards=Shards.of(model, Processes.current()))
    with _attached(engine):
        found = engine.check_losses(partial(_losses, model, loss_fn), batch, lasting=True)
    if found is None:
        raise ValueError("batch must hold two different examples or more, on the first axis of its tensors")
    return found.factor_bytes


def _losses(model: nn.Module, loss_fn: LossFunction, batch: Any) -> Tensor:
    losses = loss_fn(model, batch)
    if not isinstance(losses, Tensor) or losses.ndim != 1:
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"loss_fn returned {shape} where a vector with one loss per example is needed. Use reduction='none', and "
            "average over positions only"
        )
    return losses


@contextlib.contextmanager
def _attached(engine: Engine) -> Iterator[None]:
    """Attach an engine in this context; afterwards an optimizer's engine that it replaced comes back."""
    previous = engine.attach()
    try:
        yield
    finally:
        engine.detach()
        if previous is not None:
            previous.attach()


class PublicGradients:
    """Mean gradients of PUBLIC batches, for variants that take their preconditioner from them.

    Each call takes the next batch, starting again after the last, and returns {parameter name: gradient of the mean
    loss}. Nothing is clipped or noised, and no guarantee covers the batches.

    Args:
        model: The model.
        loss_fn: `loss_fn(model, batch)` returns one loss per example.
        batches: The public batches.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, batches: Iterable[Any]) -> None:
        self.model, self.loss_fn = model, loss_fn
        self._batches = itertools.cycle(batches)

    def __call__(self) -> dict[str, Tensor]:
        reshard(self.model)
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if (batch := next(self._batches, None)) is None:
            raise ValueError("batches is empty; pass at least one public batch")
        with public_data(), torch.enable_grad():
            loss = self.loss_fn(self.model, batch).mean()
            if any(map(is_sharded, named.values())):
                gradients = averaged_gradients(loss, list(named.values()))
            else:
                gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return {
            name: torch.zeros_like(p) if gradient is None else gradient
            for (name, p), gradient in zip(named.items(), gradients, strict=True)
        }
