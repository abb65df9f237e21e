"""Is the first axis of a layer's input the batch, or does it only have its length?

A table of relative positions looked up with ids of shape [T, T] has as many rows as the batch whenever T examples
come; its gradient would be split by position and clipped as if by example. And `layer(x.unsqueeze(0))` has one row,
like position ids that all examples share. So the model is run twice more, without gradients, on all examples and on
all but the last: every layer's input must then be one example shorter, or be shared and stay as it is.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpoptim.gradients.layers.rule import batch_axis


class BatchAxisError(ValueError):
    """A layer's input does not have the examples as its first axis."""

    def __init__(self, layer: str, shape: torch.Size, examples: int, axis: int = 0) -> None:
        super().__init__(
            f"layer '{layer}' got an input of shape {tuple(shape)} while the batch has {examples} examples (the first "
            f"axis of the model's first tensor argument) and the layer reads them on axis {axis}: keep the examples "
            "there (batch_first=True; no flattening of examples with positions), or freeze the layer, so that each "
            "gradient belongs to one example"
        )


Seen = list[tuple[str, torch.Size, int]]  # layer, shape of its input, which axis the batch should be


class BatchAxisProbe:
    """Runs a model on its batch and on one example less, and compares what every layer gets."""

    def __init__(self) -> None:
        self.done = self.passed = False
        self._seen: Seen | None = None

    @property
    def running(self) -> bool:
        return self._seen is not None

    def run(self, model: nn.Module, examples: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Once, at the first call with at least two examples; warns where the model cannot be run on fewer."""
        if examples < 2:
            return
        self.done = True
        leaves, structure = pytree.tree_flatten((args, kwargs))
        first = next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)
        as_long = [isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == examples for leaf in leaves]
        only_first = [leaf is first for leaf in leaves]
        plain = all(isinstance(leaf, Tensor | int | float | str | None) for leaf in leaves)
        whole = self._inputs(model, leaves, structure) if plain else None
        for shortened in (as_long, only_first) if whole is not None else ():
            fewer = [leaf[:-1] if short else leaf for leaf, short in zip(leaves, shortened, strict=True)]
            part = self._inputs(model, fewer, structure)
            if whole is not None and part is not None and [s[0] for s in whole] == [s[0] for s in part]:
                _compare(whole, part, examples)
                self.passed = True
                return
        warnings.warn(
            f"{type(model).__name__} could not be run on one example less, so nothing shows that the first axis of "
            "every layer's input is the batch; run dpoptim.check_examples_do_not_mix(model, loss_fn, batch) before you "
            "rely on the guarantee",
            stacklevel=2,
        )

    def see(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One layer call of a run."""
        first = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        if first is not None and self._seen is not None:
            self._seen.append((name, first.shape, batch_axis(module)))

    def _inputs(self, model: nn.Module, leaves: list[Any], structure: Any) -> Seen | None:
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        self._seen = []
        try:
            with torch.no_grad(), _same_randomness(leaves):
                model(*args, **kwargs)
            return self._seen
        except Exception:  # whatever the model's own code says to such a batch
            return None
        finally:
            self._seen = None


def _compare(whole: Seen, part: Seen, examples: int) -> None:
    for (name, shape, axis), (_, shorter, _) in zip(whole, part, strict=True):
        if len(shape) > 0 and shape[0] == 1 and shape == shorter:
            continue  # shared by all examples
        if len(shape) <= axis or shape[axis] != examples:
            raise BatchAxisError(name, shape, examples, axis)
        if shorter[axis] != examples - 1:
            raise BatchAxisError(name, shorter, examples - 1, axis)


@contextlib.contextmanager
def _same_randomness(leaves: list[Any]) -> Iterator[None]:
    """Dropout of the extra runs must not move the random numbers of the real one."""
    devices = {leaf.device.index for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        yield
