"""Random numbers that a collator, loss or model draws elsewhere than from the run's secret key: found and refused.

Masks and dropout are drawn from torch, numpy and `random`, which are seeded from the key at every step. A generator of
one's own has a public seed, so that one record more shifts the masks of all others in a way that can be foreseen, and
it begins again when a run is resumed, so that a released step would be repeated with other masks and the same noise.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from dpoptim.data.record_fingerprint import attributes_of

_GENERATORS = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random, torch.Generator)
_SEEDED = (random._inst, np.random.mtrand._rand, torch.default_generator)
_MAKE_OR_SEED: tuple[tuple[Any, str], ...] = (
    (random, "Random"), (random, "seed"), (np.random, "default_rng"), (np.random, "Generator"),
    (np.random, "RandomState"), (np.random, "seed"), (torch, "Generator"), (torch.random, "manual_seed"),
    (torch, "manual_seed"), (torch.cuda, "manual_seed"), (torch.cuda, "manual_seed_all"),
)  # fmt: skip
_LIBRARIES = sys.stdlib_module_names | {
    "PIL", "accelerate", "datasets", "dpoptim", "numpy", "pandas", "peft", "scipy", "sklearn", "tokenizers", "torch",
    "torchvision", "transformers",
}  # fmt: skip
_DEPTH = 6
MEND = "leave it out: masks and dropout are drawn from the run's secret key"


def check_generators(**named: Any) -> None:
    """Refuse, in one line, a `seed` of a stock collator, and generators that the code of an object can reach.

    Looked at are attributes, those of its class, closures, and what its functions name in their module and in modules
    of one's own; of libraries, the attributes of an object alone.

    >>> check_generators(collate_fn=lambda rows, draws=random.Random(0): rows)
    Traceback (most recent call last):
    ValueError: collate_fn's default 0 is a random.Random: what it draws comes from a public seed, and begins again \
when the run is resumed; leave it out: masks and dropout are drawn from the run's secret key
    """
    for name, value in named.items():
        if getattr(value, "seed", None) is not None and hasattr(value, "create_rng"):
            raise ValueError(
                f"{name} has seed={value.seed}: its masks would come from a public seed, and begin again when the run "
                "is resumed; leave out seed=, masks are drawn from the run's secret key"
            )
        for place, generator in _generators(value, name, _DEPTH, {}):
            raise ValueError(
                f"{place} is a {type(generator).__module__}.{type(generator).__qualname__}: what it draws comes from a "
                f"public seed, and begins again when the run is resumed; {MEND}"
            )


@contextlib.contextmanager
def noted_generators() -> Iterator[list[str]]:
    """A list of what is called inside to make a generator, or to seed torch, numpy or `random`.

    Functions that were imported by name are seen in modules of one's own; those that a library does hold are not. What
    other threads call meanwhile is not noted.

    >>> with noted_generators() as noted:
    ...     draws = np.random.default_rng(0).random(2)
    >>> noted, np.random.default_rng.__name__
    (['numpy.random.default_rng'], 'default_rng')
    """
    noted: list[str] = []
    originals = {f"{owner.__name__}.{name}": getattr(owner, name) for owner, name in _MAKE_OR_SEED}
    substitutes = {id(original): _noting(original, name, noted) for name, original in originals.items()}
    own = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType) and not _of_library(m.__name__)]
    imported = [(m, name) for m in own for name, value in list(vars(m).items()) if id(value) in substitutes]
    changed = [(module, name, vars(module)[name]) for module, name in (*_MAKE_OR_SEED, *imported)]
    try:
        for module, name, original in changed:
            setattr(module, name, substitutes[id(original)])
        yield noted
    finally:
        for module, name, original in changed:
            setattr(module, name, original)


def refuse_noted(who: str, noted: list[str]) -> None:
    """ValueError where generators were made or seeded."""
    if noted:
        raise ValueError(
            f"{who} makes or seeds a generator when it is called ({noted[0]}): what is drawn then, dropout included, "
            f"comes from a public seed; {MEND}, from torch, numpy or random as they stand"
        )


def _noting(original: Any, name: str, noted: list[str]) -> Any:
    """Does what `original` does, and notes that it was called; of a class isinstance holds as before."""
    thread = threading.get_ident()

    def note() -> None:
        if threading.get_ident() == thread:
            noted.append(name)

    if not isinstance(original, type):

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            note()
            return original(*args, **kwargs)

        return call

    class Noting(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            note()
            return original(*args, **kwargs)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original)

        def __getattr__(cls, attribute: str) -> Any:
            return getattr(original, attribute)

    return Noting(original.__name__, (), {})


def _of_library(module: str | None) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def _generators(value: Any, place: str, depth: int, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _GENERATORS):
        if not any(value is one for one in _SEEDED):
            yield place, value
        return
    if depth == 0 or id(value) in seen or isinstance(value, str | bytes | int | float | torch.Tensor | np.ndarray):
        return
    seen[id(value)] = value  # kept, so that no other object gets its id
    for name, part in _parts(value):
        yield from _generators(part, f"{place}{name}", depth - 1, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, ModuleType) or str(type(value).__module__).startswith("dpoptim."):
        return
    if hasattr(value, "get_vocab") and hasattr(value, "pad"):  # a tokenizer, which draws nothing
        return
    if isinstance(value, type):
        yield from _of_class(value)
    elif isinstance(value, nn.Module):
        for name, module in value.named_modules():
            own = {key: part for key, part in vars(module).items() if key not in ("_modules", "_parameters")}
            own |= {type(module).__name__: type(module)}
            yield from ((f".{name}.{key}".replace("..", "."), part) for key, part in own.items())
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif inspect.ismethod(value):
        yield from (("", value.__func__), ("", value.__self__))
    elif inspect.isfunction(value):
        yield from ((f"'s {name}", part) for name, part in read_by(value).items())
    elif isinstance(value, Mapping):
        yield from ((f"[{name!r}]", value[name]) for name in list(value)[:1000])
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{number}]", part) for number, part in zip(range(1000), value, strict=False))
    else:
        yield from ((f".{name}", part) for name, part in attributes_of(value).items())
        yield "", type(value)


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """What a class of one's own, and those that it is made of, hold: methods and other attributes."""
    for base in kind.__mro__:
        if not _of_library(base.__module__):
            for name, part in list(vars(base).items()):
                if isinstance(part, property):
                    part = part.fget
                yield f".{name}", getattr(part, "__func__", part)  # out of staticmethod and classmethod


def read_by(function: Any) -> dict[str, Any]:
    """What a function reads beside its arguments: its closure, its defaults, and globals that its code names.

    Of modules of one's own, their attributes that it names; of a library's function no globals.
    """
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for number, value in enumerate(function.__defaults__ or ()):
        found[f"default {number}"] = value
    found |= function.__kwdefaults__ or {}
    if _of_library(function.__globals__.get("__name__")):
        return found
    names = sorted({name for code in _codes(function.__code__) for name in code.co_names})
    for name in names:
        value = function.__globals__.get(name)
        if not isinstance(value, ModuleType):
            found.setdefault(name, value)
        elif not _of_library(value.__name__):
            found |= {f"{name}.{part}": vars(value)[part] for part in names if part in vars(value)}
    return {name: value for name, value in found.items() if value is not None}


def _codes(code: Any) -> Iterator[Any]:
    yield code
    for part in code.co_consts:
        if inspect.iscode(part):
            yield from _codes(part)
