"""What a layer rule receives, and what it must do.

A rule runs a module's forward through an autograd function. The backward returns the gradient of the input and records
the factors of the per-example gradient of each trainable parameter in the sink. Each kind of layer has its own file.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function

from dpoptim.clipping.gradient_factors import GradientFactors

Recorder = Callable[[nn.Parameter, GradientFactors], None]
"""Records the gradient of one use of a parameter, in the backward of a layer call."""


class GradientSink(Protocol):
    """What a rule sees of the engine."""

    runs_plain: bool

    @property
    def recording(self) -> bool: ...
    @property
    def checking(self) -> bool: ...
    def expand_to_batch(self, tensor: Tensor, layer: str) -> Tensor: ...
    def axes_of(self, layer: str, leaves: list[Any]) -> tuple[int | None, ...] | None: ...
    def recorder(self) -> Recorder: ...


RuleFunction = Callable[[GradientSink, str, Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Layer:
    """A module's name in the model and the rule that runs it."""

    name: str
    rule: RuleFunction
    rewrites: bool = False  # changes the inputs of inner layers, so it also runs without gradients


def apply_fast(function: type[Function], *args: Any) -> Any:
    """Return function.apply(*args) without torch's search for function transforms, which is slower than a rule."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return _apply_of(function)(*args)


@functools.cache
def _apply_of(function: type[Function]) -> Callable[..., Any]:
    apply: Callable[..., Any] = super(Function, function).apply  # type: ignore[misc]
    return apply


def differentiated_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse gradients of gradients; torch's own decorator is slower and misses constant gradients, such as a sum's."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise ValueError(
                "create_graph=True asks for gradients of gradients (a penalty?), which no layer rule sees. Remove it, "
                "or compute it on public data inside `with dpoptim.public_data():`"
            )
        return backward(ctx, *grads)

    return run


@contextlib.contextmanager
def plain(sink: GradientSink) -> Iterator[None]:
    """Let layers run their own forward."""
    before, sink.runs_plain = sink.runs_plain, True
    try:
        yield
    finally:
        sink.runs_plain = before


def only_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the only argument, given by position or by keyword."""
    (tensor,) = (*args, *kwargs.values())
    return tensor


def trainable(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.requires_grad


def any_trainable(*modules: nn.Module) -> bool:
    return any(parameter.requires_grad for module in modules for parameter in module.parameters())
