"""The ways in which norms are computed, and a readable description of those that a physical batch used."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class NormMethod(enum.Enum):
    """How the norms of a parameter's per-example gradients are computed."""

    FORMED = "gradients formed once, measured and summed"
    TILES = "tiles of the products, measured in registers and never stored"
    ONE_POSITION = "one position per example: squares of the factors"
    GRAM = "products of positions with each other"
    GRAM_ON_GPU = "products of positions with each other, by tensor cores"
    ROWS = "looked-up rows, summed by id"
    PARTS = "each use, and their cross terms"
    BLOCKS = "products formed a block at a time"


class ParameterNormMethod(NamedTuple):
    """The norm method of one parameter, and the memory it holds until the batch is clipped."""

    name: str
    shape: torch.Size
    positions: int  # per example; 0 if gradients themselves are held
    norm_method: NormMethod
    held_bytes: int
    extra_bytes: int  # that forming the gradients would take in addition


class Explanation(NamedTuple):
    """The norm methods of all parameters of a physical batch; `str` prints a table."""

    examples: int
    parameters: tuple[ParameterNormMethod, ...]

    @classmethod
    def of(cls, gradients: Mapping[str, Any], *, scaled: bool) -> Explanation:
        """Describe the norm methods of `ParameterGradients` by name."""
        parameters = []
        for name, own in gradients.items():
            extra = sum(max(0, use.extra_bytes) for use in own.outers if use.can_be_formed)
            method = own.norm_method(scaled=scaled)
            parameters.append(ParameterNormMethod(name, own.shape, own.positions, method, own.held_bytes(), extra))
        return cls(next(iter(gradients.values())).examples, tuple(parameters))

    def __str__(self) -> str:
        alike: dict[tuple[str, torch.Size, int, NormMethod], list[ParameterNormMethod]] = {}
        for own in self.parameters:
            kind = re.sub(r"\d+", "*", own.name), own.shape, own.positions, own.norm_method
            alike.setdefault(kind, []).append(own)
        lines = [f"a physical batch of {self.examples} examples"]
        for (pattern, shape, positions, method), members in alike.items():
            name = f"{len(members)} x {pattern}" if len(members) > 1 else members[0].name
            where = f"{positions} positions, " if positions else ""
            held = _bytes(sum(own.held_bytes for own in members))
            lines.append(f"  {name} {list(shape)}: {method.value} ({where}{held} held)")
        extra = sum(own.extra_bytes for own in self.parameters)
        if extra:
            lines.append(f"clipping_memory={extra} ({_bytes(extra)} more per physical batch) would form all gradients")
        return "\n".join(lines)


def _bytes(count: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
