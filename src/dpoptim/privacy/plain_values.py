"""Frozen dataclasses as plain JSON values and back, at any depth: how a plan travels in a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import dpoptim.noise


def to_plain(value: Any) -> Any:
    """A dataclass as a dict of its fields with its class name as "kind"; a tuple as a list; others as they are.

    >>> to_plain(dpoptim.noise.Independent())["kind"]
    'Independent'
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {part.name: to_plain(getattr(value, part.name)) for part in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    return [to_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def from_plain(name: str, value: Any, module: ModuleType) -> Any:
    """What `to_plain` described: the outer kind is a dataclass of `module`, those inside of it are of `dpoptim.noise`.

    Guarantee: builds dataclasses of those two modules and nothing else; unknown kinds and fields are refused, with
    `name`, the place in the plan. Lists become tuples, since frozen dataclasses hold no lists.

    >>> noise = dpoptim.noise.BandedToeplitz(bands=4)
    >>> from_plain("noise", to_plain(noise), dpoptim.noise) == noise
    True
    """
    if isinstance(value, (tuple, list)):
        return tuple(from_plain(name, item, module) for item in value)
    if not (isinstance(value, Mapping) and "kind" in value):
        return value
    kind = getattr(module, str(value["kind"]), None)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ValueError(f"{name} has the unknown kind {value['kind']!r}; was it saved by a newer version?")
    fields = {key: from_plain(f"{name}.{key}", part, dpoptim.noise) for key, part in value.items() if key != "kind"}
    if unknown := set(fields) - {part.name for part in dataclasses.fields(kind)}:
        raise ValueError(f"{name} has the unknown fields {sorted(unknown)}; was it saved by a newer version?")
    return kind(**fields)
