"""Refuse buffers and parameters that change while a model runs on private data.

Nothing clips or noises what a running mean, an observer, a token count or a codebook stores. It holds exact numbers
of the private batch, may be saved with the model, and affects later examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.data.shards import is_sharded

Name = tuple[str, str, str]  # buffer or parameter, the module's name, its name in the module


class StateChangeGuard:
    """Refuses buffers and parameters of `model` that change while it runs on private data.

    Different content, a write, a new tensor and a missing tensor are changes. Writes that torch does not see (`.data`,
    `.numpy()`) are found in the first batch, whose buffers are copied. Changes between calls (`load_state_dict`, `to`,
    evaluation) are allowed, unless a backward waits for its step. If a loop calls parts of the model, changes before
    the first layer with parameters are not seen. A refusal is final.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[str, str, dict[str, Tensor | None] | _Unsharded]] = []
        for prefix, module in model.named_modules():
            parameters: dict[str, Any] = module._parameters
            some_sharded = any(map(is_sharded, parameters.values()))
            self._held.append(("buffer", prefix, module._buffers))
            self._held.append(("parameter", prefix, _Unsharded(parameters) if some_sharded else parameters))
        self._marks: list[Tensor] | None = None
        self._state: list[int] = []  # identities and versions of the marks
        self._names: list[Name] = []
        self._copies: dict[Name, Tensor] = {}  # of the first batch's buffers
        self._is_first = True
        self._refused: Name | None = None

    def begin(self, *, restart: bool) -> None:
        """Remember the tensors before a call of the model; with `restart`, even if some are already remembered."""
        if not restart and self._marks is not None:
            return
        self._marks = [tensor for *_, held in self._held for tensor in held.values() if tensor is not None]
        self._state = _state(self._marks)
        if self._is_first or len(self._names) != len(self._marks):
            self._names = [name for name, _ in self._tensors()]
        if self._is_first:
            named = zip(self._names, self._marks, strict=True)
            self._copies = {n: t.detach().clone() for n, t in named if n[0] == "buffer" and t.layout == torch.strided}

    def look(self) -> None:
        """Record, when a call of the model ends, whether a tensor has changed since `begin`."""
        if self._marks is None or self._refused is not None:
            return
        now = [tensor for *_, held in self._held for tensor in held.values() if tensor is not None]
        if self._is_first or _state(now) != self._state:
            versions = dict(zip(self._names, self._state[len(self._names) :], strict=True))
            before = dict(zip(self._names, self._marks, strict=True))
            after = dict(self._tensors())
            changed = [
                name
                for name, tensor in after.items()
                if name not in before
                or _version(before[name]) != versions[name]
                or not _same(self._copies.get(name, before[name]), tensor)
            ]
            self._refused = next(iter([*changed, *(before.keys() - after.keys())]), None)

    def check(self, *, waiting: bool) -> None:
        """Before a release, close the batch and raise if a tensor has changed, even during a `waiting` backward."""
        if waiting:
            self.look()
            self._is_first, self._copies = False, {}
        self._marks = None
        if self._refused is not None:
            kind, *place = self._refused
            raise ValueError(
                f"{kind} '{'.'.join(filter(None, place))}' changes when the model runs in training: what it stores "
                "(a running statistic, a count) is neither clipped nor noised. Put its module in eval mode, remove the "
                "update, or run the longest input without gradients first if it is a table that grows"
            )

    def _tensors(self) -> Iterator[tuple[Name, Tensor]]:
        for kind, prefix, held in self._held:
            for name, tensor in held.items():
                if tensor is not None:
                    yield (kind, prefix, name), tensor


class _Unsharded:
    """The parameters of a module that FSDP does not shard. What a forward writes into sharded ones is not saved."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        self._parameters = parameters
        self._sharded = {name for name, parameter in parameters.items() if is_sharded(parameter)}

    def items(self) -> list[tuple[str, Tensor | None]]:
        return [(name, tensor) for name, tensor in self._parameters.items() if name not in self._sharded]

    def values(self) -> list[Tensor | None]:
        return [tensor for _, tensor in self.items()]


def _state(tensors: list[Tensor]) -> list[int]:
    """Return the identities of the tensors, then their versions."""
    try:
        return [*map(id, tensors), *map(attrgetter("_version"), tensors)]
    except RuntimeError:  # a tensor was created in inference mode
        return [*map(id, tensors), *map(_version, tensors)]


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same object or hold the same bits."""
    if one is other:
        return True
    alike = one.device == other.device and one.layout == other.layout == torch.strided
    return alike and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
