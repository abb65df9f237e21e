"""Clipped sums without an optimizer, and the test that a model keeps its examples apart."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpoptim.clipping.clipped_sums import ClippedSums
from dpoptim.clipping.engine import Engine
from dpoptim.clipping.physical_batch import PhysicalBatch
from dpoptim.clipping.probe import checking
from dpoptim.data.secret_randomness import save_rng_states
from dpoptim.kernels.norms import wide

LossFunction = Callable[[nn.Module, Any], Tensor]
Norms = dict[str, Tensor]  # squared, [examples], by parameter


def clipped_sum(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    clip_norm: float = 1.0,
    scale: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Σ_j min(1, clip_norm/‖s ⊙ g_j‖)·g_j by parameter name, and the norms ‖s ⊙ g_j‖ [examples].

    `loss_fn(model, batch)` returns one loss an example. NOT private by itself: nothing is noised here.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> x = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    >>> sums, norms = clipped_sum(model, lambda m, x: m(x)[:, 0], x, clip_norm=1.0)
    >>> norms
    tensor([5.0000, 0.5000])
    >>> sums["weight"]           # (3, 4)/5 + (0.3, 0.4)
    tensor([[0.9000, 1.2000]])
    """
    sums = ClippedSums(model, clip_norm=clip_norm)
    if scale is not None:
        _check_scale(scale, sums.parameters)
        scale = {name: wide(scale[name]) for name in sums.parameters}
    sums.scale = scale
    with _attached(sums.engine):
        losses = loss_fn(model, batch)
        _check_losses(losses)
        losses.sum().backward()
        sums.engine.flush()
        if not sums.norms:
            raise ValueError("loss_fn: no trainable parameter received a gradient; does the loss depend on the model?")
        norms = torch.cat(sums.norms)
        if len(norms) != len(losses):
            raise ValueError(
                f"loss_fn returned {len(losses)} losses for a batch of {len(norms)} examples; return one loss an "
                "example"
            )
        return dict(sums.take()[0]), norms


def check_example_independence(model: nn.Module, loss_fn: LossFunction, batch: Any) -> None:
    """Raise ValueError unless each loss depends on its own example alone, as far as this batch can show.

    Three looks, at the first, a middle and the last example: one backward of its loss must leave no gradient at any
    other example of any layer; in eval mode it must have the same loss alone as in the batch (where the batch is made
    of tensors with the examples first); and its gradient must be as long as in a backward of all losses. They catch
    what no list of layer names can: a batch axis in the wrong place, in-batch negatives, a loss normalised over the
    batch, rows that all examples share taken for rows of examples, gradients that a hook normalises over the batch.

    Guarantee: generators are left as they were.
    Edge cases: where it was satisfied, what it met is no longer warned of. Gradients that come out otherwise each time,
    though generators are put back, are not compared in length.
    """
    leaves, places, alone = pytree.tree_leaves(batch), [0], {}
    with checking(model):
        for place in places:
            examples, alone[place] = _squared_norms(model, loss_fn, batch, operator.itemgetter(place))
            _check_other_rows(alone[place], place)
            if place == 0:
                places += sorted({examples // 2, examples - 1} - {0})
            if all(isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == examples for leaf in leaves):
                _check_loss_alone(model, loss_fn, batch, place)
        together = _squared_norms(model, loss_fn, batch, torch.sum)[1]
        for place, norms in alone.items():
            if _as_long(together, norms, place):
                continue
            if _as_long(together, _squared_norms(model, loss_fn, batch, torch.sum)[1], place):
                raise ValueError(
                    f"examples mix: the gradient of example {place} is longer or shorter in a backward of all losses "
                    "than in one of its own. Look for hooks and functions whose backward looks across examples "
                    "(gradients normalised or averaged over the batch)"
                )


def _squared_norms(
    model: nn.Module, loss_fn: LossFunction, batch: Any, chosen: Callable[[Tensor], Tensor]
) -> tuple[int, list[Norms]]:
    """The number of examples, and what a backward of the chosen losses leaves at each of them, call by call."""
    found: list[PhysicalBatch] = []
    engine, put_back = Engine(model, found.append), save_rng_states()
    try:
        with _attached(engine):
            losses = loss_fn(model, batch)
            _check_losses(losses)
            if len(losses) < 2:
                raise ValueError("batch: at least two examples are needed to see whether they mix")
            chosen(losses).backward()
            engine.flush()
    finally:
        put_back()
    for physical in found:
        if physical.examples != len(losses):
            raise ValueError(
                f"loss_fn returned {len(losses)} losses for a batch of {physical.examples} examples; return one "
                "loss an example"
            )
    norms = [{name: gradients.squared_norms() for name, gradients in physical.gradients.items()} for physical in found]
    return len(losses), norms


def _check_other_rows(calls: list[Norms], place: int) -> None:
    for norms in calls:
        for name, squared in norms.items():
            others = squared.clone()
            others[place] = 0
            if bool((others != 0).any()):
                raise ValueError(
                    f"examples mix: the loss of example {place} has a gradient at another example in "
                    f"parameter '{name}'. Look for a batch axis that is not first (batch_first=True), a loss averaged "
                    "over the batch, or a layer that looks across examples"
                )


def _as_long(calls: list[Norms], others: list[Norms], place: int) -> bool:
    """Whether the example's gradient is equally long in both, in each parameter and up to rounding in 16 bits; True
    where none can tell.
    """
    if [norms.keys() for norms in calls] != [norms.keys() for norms in others]:
        return True
    for norms, other in zip(calls, others, strict=True):
        longest = max(float(squared.detach().max()) for squared in norms.values())
        for name, squared in norms.items():
            one, two = (math.sqrt(float(found.detach()[place])) for found in (squared, other[name]))
            least = 1e-3 * math.sqrt(longest)  # what is shorter may be rounding alone
            if one + two < math.inf and max(one, two) > least and not math.isclose(one, two, rel_tol=0.05):
                return False
    return True


def _check_loss_alone(model: nn.Module, loss_fn: LossFunction, batch: Any, place: int) -> None:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            together = loss_fn(model, batch)
            alone = loss_fn(model, pytree.tree_map(lambda leaf: leaf[place : place + 1], batch))[0]
    finally:
        for module, training in modes:
            module.training = training
    if not torch.allclose(together[place], alone, rtol=1e-2, atol=1e-4):
        raise ValueError(
            f"examples mix: example {place} has another loss in its batch than alone. Look for sums or means over the "
            "first axis, in the model or in the loss"
        )


def _check_losses(losses: Tensor) -> None:
    if not isinstance(losses, Tensor) or losses.ndim != 1:
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"loss_fn returned {shape} where a vector with one loss an example is needed; use reduction='none' "
            "and average over the positions of each example, never over the batch"
        )


def _check_scale(scale: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    missing = sorted(set(parameters) - set(scale))
    if missing:
        raise ValueError(f"scale lacks parameter '{missing[0]}'; give one tensor for each trainable parameter")
    for name, parameter in parameters.items():
        if scale[name].shape != parameter.shape:
            raise ValueError(
                f"scale['{name}'] has shape {tuple(scale[name].shape)}; the parameter has {tuple(parameter.shape)}"
            )


@contextlib.contextmanager
def _attached(engine: Engine) -> Iterator[None]:
    """The engine attached for a while; an optimizer's engine that was there comes back afterwards."""
    previous = engine.attach()
    try:
        yield
    finally:
        engine.detach()
        if previous is not None:
            previous.attach()
