"""Code and objects as plain values: what a collator, loss, scheduler or model is, so that another one is noticed."""

from __future__ import annotations

import datetime
import decimal
import enum
import functools
import inspect
import json
import logging
import os
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import PurePath
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from dpoptim.privacy.record_digests import attributes_of
from dpoptim.training.hugging_face.own_generators import read_by
from dpoptim.training.support.modes import without_peft

_DEPTH = 16
_KNOWN = (  # whose version, or whose own file, tells what they do
    "abc", "accelerate", "builtins", "collections", "contextlib", "copy", "dataclasses", "datasets", "dpoptim", "enum",
    "functools", "itertools", "json", "math", "numpy", "operator", "peft", "random", "safetensors", "tokenizers",
    "torch", "torchvision", "transformers", "typing",
)  # fmt: skip
_BY_NAME = (torch.dtype, torch.device, PurePath, re.Pattern, decimal.Decimal, Fraction, datetime.date, datetime.time,
            datetime.timedelta, range, slice, complex, np.dtype, type(Ellipsis))  # fmt: skip
_NOT_BUILT = {  # of modules: set by whoever loads, saves or trains them
    "_is_hf_initialized", "gradient_checkpointing", "hf_device_map", "is_gradient_checkpointing", "is_loaded_in_8bit",
    "model_tags", "name_or_path", "training", "warnings_issued", *vars(nn.Module()),
}  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Describer:
    """Values for `digest_values`; `gaps` has the kinds of what could not be read, since it shows nothing of itself.

    Functions by their source, their defaults and what they read (closures, and globals that are functions, classes, or
    numbers, texts, tensors and lists and dicts of these); objects by class, the source of its methods and their
    attributes; tensors and arrays by their values; tokenizers by their vocabulary and rules; models by hooks and plain
    attributes of their modules. Libraries are known by their version, but for methods that were put into their classes
    from elsewhere.

    >>> def weighted(weight):
    ...     return lambda losses: losses * weight
    >>> one, other = (Describer().describe(weighted(torch.tensor(value))) for value in (1.0, 2.0))
    >>> str(one) == str(other)
    False
    >>> import threading
    >>> describer = Describer()
    >>> _ = describer.describe({"lock": threading.Lock()})
    >>> describer.gaps
    ['_thread.lock']
    """

    def __init__(self, *, trained: nn.Module | None = None) -> None:
        self.gaps: list[str] = []
        self._trained = set() if trained is None else {id(module) for module in trained.modules()}
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no id is used twice

    def describe(self, value: Any, depth: int = _DEPTH) -> Any:
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return [type(value).__name__, value.value] if isinstance(value, enum.Enum) else value
        if isinstance(value, torch.Tensor | np.ndarray | np.generic):
            return self._array(value)
        if isinstance(value, enum.Enum):
            return [type(value).__name__, value.name]
        if isinstance(value, _BY_NAME):
            return [type(value).__name__, str(value)]
        if isinstance(value, ModuleType):
            return ["module", value.__name__]
        if isinstance(value, logging.Logger):
            return "logger"
        if id(value) in self._seen:
            return ["again", self._seen[id(value)]]
        if depth == 0:
            return self._gap(value)
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return self._content(value, depth - 1)

    def _content(self, value: Any, depth: int) -> Any:
        if isinstance(value, Mapping):
            return ["dict", [[self.describe(name, depth), self.describe(value[name], depth)] for name in value]]
        if isinstance(value, set | frozenset):
            return ["set", sorted((self.describe(part, depth) for part in value), key=str)]
        if isinstance(value, list | tuple):
            return [type(value).__name__, [self.describe(part, depth) for part in value]]
        if isinstance(value, functools.partial):
            return ["partial", *(self.describe(part, depth) for part in (value.func, value.args, value.keywords))]
        if inspect.ismethod(value):
            return ["method", self.describe(value.__func__, depth), self.describe(value.__self__, depth)]
        if inspect.isfunction(value):
            return self._function(value, depth)
        if isinstance(value, type):
            return ["type", self._type(value, depth)]
        if inspect.isbuiltin(value) or inspect.isroutine(value):
            return ["builtin", getattr(value, "__module__", None), getattr(value, "__qualname__", str(value))]
        if isinstance(value, nn.Module):
            weights = [] if id(value) in self._trained else [self._array(part) for part in value.state_dict().values()]
            return ["model", repr(value), self.model(value), weights]
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            held = [getattr(value, name, None) for name in ("lr_lambdas", "_schedulers")]
            return ["schedule", self._type(type(value), depth), self.describe([value.state_dict(), held], depth)]
        if hasattr(value, "get_vocab") and hasattr(value, "special_tokens_map"):
            return self._tokenizer(value, depth)
        return self._object(value, depth)

    def _object(self, value: Any, depth: int) -> Any:
        kind = self._type(type(value), depth)
        if hasattr(value, "to_dict") and _root(type(value)) in _KNOWN:  # a configuration
            return [kind, self.describe(value.to_dict(), depth)]
        held = attributes_of(value)
        if not held and (not hasattr(value, "__dict__") or _root(type(value)) == "builtins"):
            return self._gap(value)
        return [kind, [[name, self.describe(part, depth)] for name, part in sorted(held.items())]]

    def _function(self, value: Any, depth: int) -> Any:
        name = [value.__module__, value.__qualname__]
        if _root(value) in _KNOWN and "<locals>" not in value.__qualname__:
            return ["function", name]
        own = {*value.__code__.co_freevars, *(value.__kwdefaults__ or {})}
        read = [
            [name, self.describe(part, depth)]
            for name, part in read_by(value).items()
            if name in own or name.startswith("default ") or _is_read(part)
        ]
        return ["function", name, source_of(value), read]

    def _type(self, kind: type, depth: int) -> Any:
        """Name, methods and plain values of a class and of those above it."""
        found: list[Any] = []
        for part in kind.__mro__[:-1]:
            known = _root(part) in _KNOWN
            found.append([f"{part.__module__}.{part.__qualname__}"])
            for name, held in sorted(vars(part).items()):
                inner = (getattr(held, kind, None) for kind in ("__func__", "fget", "func"))  # of a method, a property
                function = next((part for part in inner if inspect.isfunction(part)), held)
                if inspect.isfunction(function):
                    if not known or (_root(function) not in _KNOWN and function.__module__ is not None):
                        found[-1].append([name, self.describe(function, depth)])
                elif not known and _is_plain(held) and not name.startswith("__"):
                    found[-1].append([name, self.describe(held, depth)])
        return found

    def _array(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and (value.is_quantized or value.layout != torch.strided or value.is_meta):
            return self._gap(value)
        if isinstance(value, np.ndarray | np.generic) and value.dtype.hasobject:
            return self._gap(value)
        return value

    def _tokenizer(self, value: Any, depth: int) -> Any:
        names = ("special_tokens_map", "padding_side", "truncation_side", "model_max_length", "chat_template")
        held = [self.describe(getattr(value, name, None), depth) for name in names]
        backend = getattr(value, "backend_tokenizer", None)
        if backend is None:
            return ["tokenizer", self._type(type(value), depth), held, sorted(value.get_vocab().items())]
        rules = json.loads(backend.to_str())  # padding and truncation are as the last call left them
        rules = {name: part for name, part in rules.items() if name not in ("padding", "truncation")}
        return ["tokenizer", self._type(type(value), depth), held, json.dumps(rules, sort_keys=True)]

    def model(self, model: nn.Module) -> Any:
        """Hooks, plain attributes, buffers that no checkpoint holds, and code that is of no library."""
        found: list[Any] = []
        kinds: dict[type, Any] = {}
        for name, module in without_peft(model).named_modules():
            held = {key: part for key, part in vars(module).items() if _is_built(key, module) and _is_plain(part)}
            if type(module) not in kinds:
                kinds[type(module)] = self._type(type(module), 3)
            forward = vars(module).get("forward")
            hooks = [hook for kind in _HOOKS for hook in getattr(module, kind).values()]
            own = [part for part in (forward, *hooks) if part is not None and _root(part) not in _KNOWN]
            buffers = [part for key, part in module.named_buffers(recurse=False) if key in _unsaved(module)]
            described = [[key, self.describe(part)] for key, part in sorted(held.items())]
            found.append(
                [name, type(module).__qualname__, described, [self.describe(part) for part in (*own, *buffers)]]
            )
        return [list(kinds.values()), found]

    def _gap(self, value: Any) -> str:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if kind not in self.gaps:
            self.gaps.append(kind)
        return kind


def source_of(function: Any) -> Any:
    """The source of a function; where there is no file, its compiled code."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return _code(function.__code__)


def _code(code: Any) -> Any:
    consts = [_code(part) if inspect.iscode(part) else repr(part) for part in code.co_consts]
    return [code.co_code, consts, list(code.co_names), list(code.co_varnames)]


def _root(value: Any) -> str:
    """The package that a class, a function or the class of an object is of."""
    module = getattr(value, "__module__", None) or getattr(type(value), "__module__", "")
    return str(module).partition(".")[0]


def _is_built(name: str, module: nn.Module) -> bool:
    """Whether an attribute is of the model itself, and not one that transformers keeps on what it loads."""
    return name not in _NOT_BUILT and not (name.startswith("_") and hasattr(module, "config"))


def _unsaved(module: nn.Module) -> set[str]:
    return set(getattr(module, "_non_persistent_buffers_set", ()))


def _is_read(value: Any) -> bool:
    return _is_plain(value) or isinstance(value, type) or inspect.isroutine(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(part) for part in value)
    if isinstance(value, Mapping):
        return all(_is_plain(part) for part in value.values())
    return isinstance(value, bool | int | float | str | torch.Tensor | np.ndarray)


def never_twice() -> str:
    """A value that no other process gives."""
    return os.urandom(8).hex()
