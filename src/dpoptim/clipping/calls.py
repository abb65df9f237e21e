"""Calls of a model and of its parts, and what the layers get in them.

A Lightning module's own step calls `self.bert(...)` and never the module itself. Such a part is then checked in place
of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from dpoptim.clipping.layers.rule import batch_axis
from dpoptim.validation.example_independence import ExampleMixingError

_DEPTH = 3  # how far below the model its parts are watched: hooks on every small one would cost time
_REMEMBERED = 4096


@functools.cache
def keep_compilers_out(cls: type, *methods: str) -> None:
    """From now on torch.compile leaves these methods alone, with all that they call.

    Not a decorator, because that imports the compiler, which takes seconds. Optimizers of torch import it when they
    are made.
    """
    for name in methods:
        setattr(cls, name, torch.compiler.disable(getattr(cls, name)))


class RecentCalls(dict[int, None]):
    """Numbers of calls, the latest few thousand."""

    def add(self, *calls: int) -> None:
        self.update(dict.fromkeys(calls))
        while len(self) > _REMEMBERED:
            del self[next(iter(self))]


class Listener(Protocol):
    """Hears of every call; only the outermost one matters, which the listener finds out."""

    def begin_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def end_call(self, module: nn.Module, output: Any) -> None: ...


@dataclass
class _Hooks:
    """Copies and pickles of an engine are None, so a copied model has no listener."""

    listener: Listener | None

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.listener is not None:
            self.listener.begin_call(module, args, kwargs)

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.listener is not None:
            self.listener.end_call(module, output)


def watch_calls(model: nn.Module, layers: Container[nn.Module], listener: Listener) -> Iterator[RemovableHandle]:
    """Tell `listener` about calls of the model and of its larger parts, those that hold some of the layers.

    Members of a list are not such parts: blocks are called by the module that holds them.
    """
    keep_compilers_out(_Hooks, "begin", "end")
    hooks = _Hooks(listener)
    lists = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    for name, module in model.named_modules():
        is_near = name.count(".") < _DEPTH and not name.startswith(lists)
        if module is model or (is_near and module not in layers and any(m in layers for m in module.modules())):
            yield module.register_forward_pre_hook(hooks.begin, with_kwargs=True)
            yield module.register_forward_hook(hooks.end, always_call=True)


class BatchAxisError(ValueError):
    """A layer's input does not have the examples as its first axis."""

    def __init__(self, layer: str, shape: torch.Size, examples: int, axis: int = 0) -> None:
        super().__init__(
            f"layer '{layer}' got an input of shape {tuple(shape)} while the batch has {examples} examples (the first "
            f"axis of the model's first tensor argument), which the layer reads on axis {axis}. Keep the examples "
            "there (batch_first=True; no flattening of examples with positions), or freeze the layer"
        )


class LayerCall(NamedTuple):
    """One call of a layer: the shapes of its arguments, None where one is not a tensor."""

    layer: str
    shapes: tuple[torch.Size | None, ...]
    axis: int  # where the layer reads the examples in its first tensor

    @classmethod
    def of(cls, layer: str, module: nn.Module, args: Any) -> LayerCall:
        leaves = pytree.tree_leaves(args)
        shapes = tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves)
        return cls(layer, shapes, batch_axis(module))


Kinds = tuple[int | None, ...]  # of each argument: how many axes a tensor has
Axes = tuple[int | None, ...]  # of each argument: where its examples are, None if all examples share it


@dataclass
class SeenLayers:
    """What checked calls have shown of the layers: who got examples, who got a row that all examples share."""

    examples: set[tuple[str, int]] = field(default_factory=set)  # (layer, axes of the tensor)
    shared: set[tuple[str, int]] = field(default_factory=set)
    axes: dict[tuple[str, Kinds], Axes] = field(default_factory=dict)

    def add(self, calls: list[LayerCall], others: list[LayerCall], count: int, other_count: int) -> None:
        """Compare two runs, with `count` and with `other_count` examples: only the axis of the examples may differ."""
        if [call.layer for call in calls] != [call.layer for call in others]:
            raise ExampleMixingError(
                "the model runs different layers for different numbers of examples, so they cannot be told apart. Run "
                "the same layers for every batch"
            )
        for call, other in zip(calls, others, strict=True):
            first, smaller = (next((s for s in c.shapes if s is not None), None) for c in (call, other))
            if first is None or smaller is None:
                continue
            is_shared = first[:1] == (1,) and first == smaller
            if not is_shared and _axis(first, smaller, count, other_count, call.axis) != call.axis:
                raise BatchAxisError(call.layer, first, count, call.axis)
            pairs = list(zip(call.shapes, other.shapes, strict=True)) if len(call.shapes) == len(other.shapes) else []
            axes = tuple(_axis(one, two, count, other_count, call.axis) for one, two in pairs)
            for (shape, same), axis in zip(pairs, axes, strict=True):
                if shape is not None and axis is not None:
                    self.examples.add((call.layer, len(shape)))
                elif shape is not None and shape[:1] == (1,) and shape == same:
                    self.shared.add((call.layer, len(shape)))
            key = call.layer, tuple(None if shape is None else len(shape) for shape, _ in pairs)
            if self.axes.setdefault(key, axes) != axes:
                self.axes[key] = ()  # different from call to call

    def update(self, other: SeenLayers) -> None:
        self.examples |= other.examples
        self.shared |= other.shared
        for key, axes in other.axes.items():
            if self.axes.setdefault(key, axes) != axes:
                self.axes[key] = ()


def _axis(one: torch.Size | None, other: torch.Size | None, count: int, other_count: int, axis: int) -> int | None:
    """The axis that has the examples: where the layer reads them, or else the first."""
    for place in dict.fromkeys((axis, 0)):
        if one is None or other is None or not len(one) == len(other) > place:
            continue
        if one[place] == count and other[place] == other_count:
            return place
    return None
