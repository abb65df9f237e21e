"""Which calls of a model the engine is told of: those of the model, and of parts of it that a loop calls by themselves.

A step of a Lightning module runs `self.bert(...)` and never the module itself; what goes in and comes out is then
looked at there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Container, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

_DEPTH = 3  # how far below the model its parts are looked at: hooks on every small one would cost time
_REMEMBERED = 4096


@functools.cache
def keep_compilers_out(cls: type, *methods: str) -> None:
    """From now on torch.compile leaves these methods alone, with all that they call.

    No decorator, for it imports the compiler, which takes seconds: optimizers of torch do so when they are made.
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
    """Who is told; only the outermost call is of interest, and the listener sees to that."""

    is_compiled: bool  # what begins next

    def begin_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def end_call(self, module: nn.Module, output: Any) -> None: ...


@dataclass
class _Hooks:
    """Copies and pickles of an engine are None: a copied model tells nobody."""

    listener: Listener | None

    def ask(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Is this module compiled? Only what is compiled with it can know, and of all hooks this one is."""
        self._tell(torch.compiler.is_compiling())

    def _tell(self, is_compiled: bool) -> None:
        if self.listener is not None:
            self.listener.is_compiled = is_compiled

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.listener is not None:
            self.listener.begin_call(module, args, kwargs)

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.listener is not None:
            self.listener.end_call(module, output)


def watch_calls(model: nn.Module, layers: Container[nn.Module], listener: Listener) -> Iterator[RemovableHandle]:
    """Tell `listener` of calls of the model and of its larger parts, those that hold some of the layers.

    Members of a list are not such parts: blocks are called by what they lie in.
    """
    keep_compilers_out(_Hooks, "_tell", "begin", "end")
    hooks = _Hooks(listener)
    lists = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    for name, module in model.named_modules():
        is_near = name.count(".") < _DEPTH and not name.startswith(lists)
        if module is model or (is_near and module not in layers and any(m in layers for m in module.modules())):
            yield module.register_forward_pre_hook(hooks.ask)
            yield module.register_forward_pre_hook(hooks.begin, with_kwargs=True)
            yield module.register_forward_hook(hooks.end, always_call=True)


def refuse_bare_forward(model: nn.Module) -> None:
    """ValueError where the model's own forward is running, and so was not called through the model."""
    forward = _place(getattr(inspect.unwrap(type(model).forward), "__code__", None))
    frame = inspect.currentframe()
    while frame is not None:
        if _place(frame.f_code) == forward and any(value is model for value in frame.f_locals.values()):
            raise ValueError(
                f"{type(model).__name__}.forward was called by itself, where nothing can look at what goes in and "
                "comes out; call the model: model(...), not model.forward(...)"
            )
        frame = frame.f_back


def _place(code: CodeType | None) -> tuple[str, int, str] | None:
    """Where a function is written: compilers run other code of it, from the same place."""
    return None if code is None else (code.co_filename, code.co_firstlineno, code.co_name)
