"""Is the first axis of a layer's input the batch, or does it only have its length?

A table of relative positions looked up with ids of shape [T, T] has as many rows as the batch whenever T examples
come; its gradient would be split by position and clipped as if by example. So the model is run once more, without
gradients, on all examples but the last: every layer's input must then be one shorter too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class BatchAxisError(ValueError):
    """A layer's input does not have the examples as its first axis."""

    def __init__(self, layer: str, shape: torch.Size, examples: int) -> None:
        super().__init__(
            f"layer '{layer}' got an input of shape {tuple(shape)} while the batch has {examples} examples (the "
            "first axis of "
            "the model's first tensor argument): keep the examples as the first axis of every layer's input "
            "(batch_first=True; no flattening of examples with positions), or freeze the layer, so that each gradient "
            "belongs to one example"
        )


class BatchAxisProbe:
    """Runs a model on one example less and holds every layer's input against that."""

    def __init__(self) -> None:
        self.done = False
        self._expected: int | None = None

    @property
    def running(self) -> bool:
        return self._expected is not None

    def run(self, model: nn.Module, examples: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Once, at the first call with at least three examples. A model that cannot run on fewer examples is left
        be.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        if examples < 3 or any(not isinstance(leaf, Tensor | int | float | str | None) for leaf in leaves):
            return
        self.done = True
        fewer = [
            leaf[:-1] if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == examples else leaf for leaf in leaves
        ]
        args, kwargs = pytree.tree_unflatten(fewer, structure)
        with self._expecting(examples - 1), torch.no_grad(), _same_randomness(leaves):
            try:
                model(*args, **kwargs)
            except BatchAxisError:
                raise
            except Exception:  # whatever the model's own code says to a shorter batch
                return

    def see(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One layer call of the shorter run."""
        first = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        if first is None or self._expected is None:
            return
        axis = 1 if getattr(module, "batch_first", True) is False else 0
        if first.ndim <= axis or first.shape[axis] not in (1, self._expected):
            raise BatchAxisError(name, first.shape, self._expected)

    @contextlib.contextmanager
    def _expecting(self, examples: int) -> Iterator[None]:
        self._expected = examples
        try:
            yield
        finally:
            self._expected = None


@contextlib.contextmanager
def _same_randomness(leaves: list[Any]) -> Iterator[None]:
    """Dropout of the extra run must not move the random numbers of the real one."""
    devices = {leaf.device.index for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        yield
