"""What a layer rule is given and what it must do.

A rule runs a module's forward through an autograd function whose backward returns the gradient of the input and hands
the per-example gradient of each trainable parameter, as a form, to the keeper. One small file a kind of layer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function

from dpoptim.clipping.gradient_factors import Form


class Use(NamedTuple):
    """One call of a layer: in which call of the model, and in which backward if an activation checkpoint re-ran it."""

    call: int | None
    recomputed_in: int | None


class GradientSink(Protocol):
    """What a rule sees of the engine."""

    inside_generic: bool

    @property
    def capturing(self) -> bool: ...
    @property
    def checking(self) -> bool: ...
    def expand_to_batch(self, tensor: Tensor, layer: str) -> Tensor: ...
    def axes_of(self, layer: str, leaves: list[Any]) -> tuple[int | None, ...] | None: ...
    def use(self) -> Use: ...
    def keep(self, parameter: nn.Parameter, form: Form, use: Use) -> None: ...


RuleFunction = Callable[[GradientSink, str, Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Layer:
    """A module's name in the model and the rule that runs it."""

    name: str
    rule: RuleFunction
    rewrites: bool = False  # what layers inside the module get: in a call of the model, where no gradient is taken too


def batch_axis(module: nn.Module) -> int:
    """Where torch's own layers have the examples in their first input."""
    return 1 if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and not module.batch_first else 0


def applied(function: type[Function], *args: Any) -> Any:
    """function.apply(*args). Outside of torch.func's transforms it goes without the search for what they have left
    behind, which takes longer than a layer rule itself.
    """
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return _apply_of(function)(*args)


@functools.cache
def _apply_of(function: type[Function]) -> Callable[..., Any]:
    apply: Callable[..., Any] = super(Function, function).apply  # type: ignore[misc]
    return apply


def differentiated_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of a function whose gradient has none itself.

    torch's own decorator takes longer, and is silent about a gradient that is a constant to it, such as that of a sum.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise ValueError(
                "create_graph=True asks for gradients of gradients (a penalty on them, say), which no layer rule sees; "
                "take the penalty out, or compute it on public data inside `with dpoptim.public_data():`"
            )
        return backward(ctx, *grads)

    return run


@contextlib.contextmanager
def plain(keeper: GradientSink) -> Iterator[None]:
    """Inside, layers run their own forward."""
    before, keeper.inside_generic = keeper.inside_generic, True
    try:
        yield
    finally:
        keeper.inside_generic = before


def only_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The one tensor that layers of one input take, by position or by keyword."""
    (tensor,) = (*args, *kwargs.values())
    return tensor


def by_position(tensor: Tensor) -> Tensor:
    """A tensor [examples, ..., width] as [examples, positions, width], also one without examples."""
    return tensor if tensor.ndim == 3 else tensor.reshape(len(tensor), tensor.shape[1:-1].numel(), tensor.shape[-1])


def trainable(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.requires_grad


def any_trainable(*modules: nn.Module) -> bool:
    return any(parameter.requires_grad for module in modules for parameter in module.parameters())
