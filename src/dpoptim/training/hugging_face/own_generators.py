"""Random numbers that a collator, loss or model draws elsewhere than from the run's secret key: found and refused.

Masks and dropout are drawn from torch, numpy and `random`, which are seeded from the key at every step. A generator of
one's own has a public seed, so that one record more shifts the masks of all others in a way that can be foreseen, and
it begins again when a run is resumed, so that a released step would be repeated with other masks and the same noise.
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from dpoptim.noise import NoiseKey
from dpoptim.privacy.record_digests import attributes_of, digest_values
from dpoptim.privacy.secret_randomness import keep_states, seed_generators

_GENERATORS = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random, torch.Generator)
_SEEDED = (random._inst, np.random.mtrand._rand, torch.default_generator)
_DEPTH = 6
_TRIED = 32  # examples: so many that masks of a generator of one's own do not agree by chance
_MEND = "leave it out: masks and dropout are drawn from the run's secret key"


def check_generators(**named: Any) -> None:
    """Refuse, in one line, a `seed` of a stock collator and generators in attributes, closures and what these read."""
    for name, value in named.items():
        if getattr(value, "seed", None) is not None and hasattr(value, "create_rng"):
            raise ValueError(
                f"{name} has seed={value.seed}: its masks would come from a public seed, and begin again when the run "
                "is resumed; leave out seed=, masks are drawn from the run's secret key"
            )
        for place, generator in _generators(value, name, _DEPTH, set()):
            raise ValueError(
                f"{place} is a {type(generator).__module__}.{type(generator).__qualname__}: what it draws comes from a "
                f"public seed, and begins again when the run is resumed; {_MEND}"
            )


def check_repeats(collate: Callable[[list[Any]], Any], dataset: Any, key: NoiseKey) -> None:
    """Refuse a collator that makes another batch of the same examples under the same seeds.

    The first examples are collated three times, and the results thrown away; the generators are left as they were.
    Edge cases: batches of objects that cannot be compared are taken as they are.
    """
    check_generators(data_collator=collate)
    put_back = keep_states()
    try:
        found = []
        for _ in range(3):
            seed_generators(0)
            examples = [dataset[place] for place in range(min(_TRIED, len(dataset)))]
            found.append(digest_values(collate(copy.deepcopy(examples)), key))  # it may change them
    except ValueError as error:
        if "whose content cannot be read" in str(error) or "not compared" in str(error):
            return
        raise
    finally:
        put_back()
    if len(set(found)) != 1:
        raise ValueError(
            "data_collator makes another batch of the same examples each time, though torch, numpy and random are "
            f"seeded alike: it has random numbers or a count of its own; {_MEND}, from torch, numpy or random"
        )


def _generators(value: Any, place: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _GENERATORS):
        if not any(value is one for one in _SEEDED):
            yield place, value
        return
    if depth == 0 or id(value) in seen or isinstance(value, str | bytes | int | float | torch.Tensor | np.ndarray):
        return
    seen.add(id(value))
    for name, part in _parts(value):
        yield from _generators(part, f"{place}{name}", depth - 1, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, ModuleType | type) or type(value).__module__.startswith("dpoptim."):
        return
    if hasattr(value, "get_vocab") and hasattr(value, "pad"):  # a tokenizer, which draws nothing
        return
    if isinstance(value, nn.Module):
        for name, module in value.named_modules():
            own = {key: part for key, part in vars(module).items() if key not in ("_modules", "_parameters")}
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
        call = getattr(type(value), "__call__", None)  # noqa: B004
        if inspect.isfunction(call):
            yield "", call


def read_by(function: Any) -> dict[str, Any]:
    """What a function reads beside its arguments: its closure, its defaults, and globals that its code names."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for number, value in enumerate(function.__defaults__ or ()):
        found[f"default {number}"] = value
    found |= function.__kwdefaults__ or {}
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    for name in sorted(names):
        if name in function.__globals__ and not isinstance(function.__globals__[name], ModuleType):
            found.setdefault(name, function.__globals__[name])
    return found


def _codes(code: Any) -> Iterator[Any]:
    yield code
    for part in code.co_consts:
        if inspect.iscode(part):
            yield from _codes(part)
