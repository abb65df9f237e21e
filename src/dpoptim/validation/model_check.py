"""What layers receive while the independence check runs: which inputs hold examples, and on which axis.

The check runs a call with two different numbers of examples. The axis of the examples is the one that changes. A later
call must use the same layers in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpoptim.validation.changed_state import StateChangeGuard
from dpoptim.validation.example_independence import Arguments, ExampleMixingError, Gradients, check_independence


class BatchAxisError(ValueError):
    """A layer's input does not have the examples as its first axis."""

    def __init__(self, layer: str, shape: torch.Size, examples: int, axis: int = 0) -> None:
        super().__init__(
            f"layer '{layer}' got an input of shape {tuple(shape)} while the batch has {examples} examples (the first "
            f"axis of the model's first tensor argument), which the layer reads on axis {axis}. Keep the examples "
            "there (batch_first=True; no flattening of examples with positions), or freeze the layer"
        )


def batch_axis(module: nn.Module) -> int:
    """Return the axis of the examples in the first input of one of torch's layers."""
    return 1 if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and not module.batch_first else 0


class LayerShapes(NamedTuple):
    """One call of a layer: the shapes of its arguments, None where one is not a tensor."""

    layer: str
    shapes: tuple[torch.Size | None, ...]
    axis: int  # where the layer reads the examples in its first tensor


Kinds = tuple[int | None, ...]  # for each argument, how many axes a tensor has
Axes = tuple[int | None, ...]  # for each argument, the axis of its examples, None if all examples share it


@dataclass
class LayerAxes:
    """Which layers got examples in checked calls, and which got a row that all examples share."""

    examples: set[tuple[str, int]] = field(default_factory=set)  # (layer, axes of the tensor)
    shared: set[tuple[str, int]] = field(default_factory=set)
    axes: dict[tuple[str, Kinds], Axes] = field(default_factory=dict)

    def add(self, calls: list[LayerShapes], others: list[LayerShapes], count: int, other_count: int) -> None:
        """Compare runs on `count` and on `other_count` examples: only the axis of the examples may differ."""
        if [call.layer for call in calls] != [call.layer for call in others]:
            raise ExampleMixingError(
                "the model runs different layers for different numbers of examples. Run the same layers for every batch"
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
            kinds = tuple(None if shape is None else len(shape) for shape, _ in pairs)
            self.update(LayerAxes(axes={(call.layer, kinds): axes}))

    def update(self, other: LayerAxes) -> None:
        self.examples |= other.examples
        self.shared |= other.shared
        for key, axes in other.axes.items():
            if self.axes.setdefault(key, axes) != axes:
                self.axes[key] = ()  # they differ from call to call


def _axis(one: torch.Size | None, other: torch.Size | None, count: int, other_count: int, axis: int) -> int | None:
    """Return the axis of the examples: the one that the layer reads, or else the first."""
    for place in dict.fromkeys((axis, 0)):
        if one is None or other is None or not len(one) == len(other) > place:
            continue
        if one[place] == count and other[place] == other_count:
            return place
    return None


class CheckedLoss(NamedTuple):
    """What the check of a loss has shown. It holds no module, so that engines can store it weakly by model."""

    seen: LayerAxes
    factor_bytes: int  # the most that gradient factors take for one example


class ModelCheck:
    """One run of the independence check on a model: records layer inputs and gradients in place of a real batch.

    A buffer that the check changes is refused afterwards, as it would be without a check.
    """

    running: ModelCheck | None = None
    """One for all engines and threads, because a backward may pass through layers of other engines."""

    def __init__(self, owner: object, buffers: StateChangeGuard, *, allow_mixing: bool) -> None:
        self.owner, self.buffers, self.allow_mixing = owner, buffers, allow_mixing
        self.seen, self.has_gradients = LayerAxes(), False
        self.factor_bytes = 0  # the most that gradient factors take for one example
        self._gradients: Gradients = []
        self._bytes = 0.0
        self._runs: list[tuple[int, list[LayerShapes]]] = []  # the number of examples, and what the layers got

    def check(self, name: str, run: Callable[[Any], Any], arguments: Arguments) -> bool:
        """Run the check. Return False if the batch cannot show mixing; raise for mixing unless it is allowed."""

        def run_on(given: Any) -> Any:
            self._runs.append((Arguments.of(given, name).examples or 0, []))
            return run(given)

        def compare_sizes() -> None:
            (other_count, others), (count, calls) = self._runs
            self.seen.add(calls, others, count, other_count)

        def check(given: Arguments) -> bool:
            self._runs.clear()
            self._take()
            return check_independence(name, run_on, self._take, given, after_two_sizes=compare_sizes)

        ModelCheck.running = self
        try:
            with torch.compiler.set_stance("force_eager"):
                try:
                    return check(arguments)
                except (RuntimeError, IndexError):  # a shared argument may happen to be as long as the batch
                    return check(arguments._replace(only_first=True))
        except ExampleMixingError:
            self.buffers.look()
            self.buffers.check(waiting=False)  # a tensor of the model that changed is named first
            if not self.allow_mixing:
                raise
            return True
        finally:
            ModelCheck.running = None

    def _take(self) -> Gradients:
        taken, self._gradients = self._gradients, []
        self.factor_bytes, self._bytes = max(self.factor_bytes, round(self._bytes)), 0.0
        return taken

    def see(self, owner: object, layer: str, module: nn.Module, args: Any) -> None:
        """Record a call of a layer."""
        if owner is self.owner:
            leaves = pytree.tree_leaves(args)
            shapes = tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in leaves)
            self._runs[-1][1].append(LayerShapes(layer, shapes, batch_axis(module)))

    def expand_to_batch(self, owner: object, tensor: Tensor, layer: str) -> Tensor:
        examples = self._runs[-1][0]
        if owner is not self.owner or tensor.shape[0] == examples:
            return tensor
        if tensor.shape[0] == 1:
            return tensor.expand(examples, *tensor.shape[1:])
        raise BatchAxisError(layer, tensor.shape, examples)

    def record(self, owner: object, parameter: str, factors: Any) -> None:
        if owner is self.owner:
            self.has_gradients = True
            self._gradients.append((parameter, factors.sketch()))
            self._bytes += sum(part.nbytes for part in factors if part is not None) / len(factors[0])


def refuse_scalars(module: nn.Module, output: Any) -> None:
    for leaf in pytree.tree_leaves(dict(output) if isinstance(output, dict) else output):
        if isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.requires_grad:
            raise ValueError(
                f"{type(module).__name__} returned a scalar that needs a gradient: an average over the batch mixes "
                "examples. Call a Hugging Face model without labels, and compute one loss per example from its logits"
            )
