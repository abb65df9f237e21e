"""Buffers and parameters may not change while a model runs on private data: nothing clips or noises what is written.

A running mean, an observer's minimum, a count of tokens, a codebook: such a tensor holds exact numbers of the private
batch, is saved with the model where it is persistent, and is met by later examples either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

Name = tuple[str, str, str]  # what it is, its module's name in the model, and its own in the module


class _Mark(NamedTuple):
    tensor: Tensor
    version: int
    copy: Tensor | None


class BufferWatch:
    """Refuses buffers and parameters of `model` that change while it runs on private data.

        begin, before a call of the model    look, when the call ends    check, before anything of it is released

    Another content, a write, a new tensor and one that is gone count as changes; writes that torch does not see
    (`.data`, `.numpy()`) are looked for in buffers of the first batch, which are copied. What happens between calls
    (`load_state_dict`, `to`, evaluation) is free, unless a backward waits for its step. Where a loop calls parts of the
    model by themselves, what happens before the first layer with parameters is not seen. Once refused, always refused.
    Cost: a glance at each tensor, three times a batch; after the first no copy, and no waiting but for tables that the
    model makes anew each time.

    >>> model = nn.BatchNorm1d(2)
    >>> watch = BufferWatch(model)
    >>> watch.begin(anew=True)
    >>> _ = model(torch.ones(3, 2))
    >>> watch.check(waiting=True)
    Traceback (most recent call last):
    ValueError: buffer 'running_mean' changes when the model runs in training: ...
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._marks: dict[Name, _Mark] | None = None
        self._is_first = True
        self._refused: Name | None = None

    def begin(self, *, anew: bool) -> None:
        """Note the tensors as they are, again where that was done before and `anew`."""
        if anew or self._marks is None:
            self._marks = {name: self._mark(name, tensor) for name, tensor in self._tensors()}

    def look(self) -> None:
        """Note whether one has changed since `begin`."""
        if self._marks is not None and self._refused is None:
            now = dict(self._tensors())
            changed = [name for name, tensor in now.items() if _has_changed(tensor, self._marks.get(name))]
            self._refused = next(iter([*changed, *(self._marks.keys() - now.keys())]), None)

    def check(self, *, waiting: bool) -> None:
        """Close the batch; one ValueError line where a tensor has changed, in its backward too if one is `waiting`."""
        if waiting:
            self.look()
            self._is_first = False
        self._marks = None
        if self._refused is not None:
            kind, *place = self._refused
            raise ValueError(
                f"{kind} '{'.'.join(filter(None, place))}' changes when the model runs in training: what it takes in "
                "(a running statistic, an observer, a count) is neither clipped nor noised, and nothing of this step "
                "is released. Put its module in eval mode, or take the update out; a table that grows with the "
                "longest input can be made before, by one run of that length without gradients"
            )

    def _mark(self, name: Name, tensor: Tensor) -> _Mark:
        is_copied = self._is_first and name[0] == "buffer" and tensor.layout == torch.strided
        return _Mark(tensor, _version(tensor), tensor.detach().clone() if is_copied else None)

    def _tensors(self) -> Iterator[tuple[Name, Tensor]]:
        for prefix, module in self._modules:
            for kind, held in (("buffer", module._buffers), ("parameter", module._parameters)):
                for name, tensor in held.items():
                    if tensor is not None:
                        yield (kind, prefix, name), tensor


def _has_changed(tensor: Tensor, mark: _Mark | None) -> bool:
    if mark is None or mark.version != _version(mark.tensor):
        return True
    before = mark.copy if mark.copy is not None else mark.tensor
    if before is tensor:
        return False
    alike = before.device == tensor.device and before.layout == tensor.layout == torch.strided
    return not alike or not torch.equal(_bits(before), _bits(tensor))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
