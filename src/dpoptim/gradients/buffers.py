"""Buffers may not change while a model runs on private data: nothing clips or noises what a forward writes into them.

A running mean, an observer's minimum, a count of tokens: such a buffer holds exact numbers of the private batch, is
saved with the model where it is persistent, and is met by later examples either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn


class _Mark(NamedTuple):
    tensor: Tensor
    version: int
    copy: Tensor | None


class BufferWatch:
    """Refuses buffers of `model` that change between `begin`, before a private call of it, and `check`.

    Another content, a write, a new buffer and one that is gone count as changes; writes that torch does not see
    (`.data`, `.numpy()`) are looked for in the first batch, where buffers are copied. What happens
    outside of private calls (`load_state_dict`, `to`, evaluation) is free. Where a loop calls parts of the model by
    themselves, what happens before the first layer with parameters is not seen. Once refused, always refused.
    Cost: a glance at each buffer for a batch; after the first no copy, and no waiting but for tables that the model
    makes anew each time.

    >>> model = nn.BatchNorm1d(2)
    >>> watch = BufferWatch(model)
    >>> watch.begin(anew=True)
    >>> _ = model(torch.ones(3, 2))
    >>> watch.check()
    Traceback (most recent call last):
    ValueError: buffer 'running_mean' changes when the model runs in training: ...
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._marks: dict[tuple[str, str], _Mark] | None = None
        self._is_first = True
        self._refused: tuple[str, str] | None = None

    def begin(self, *, anew: bool) -> None:
        """Note the buffers as they are, again where that was done before and `anew`."""
        if anew or self._marks is None:
            self._marks = {
                name: _Mark(tensor, _version(tensor), tensor.detach().clone() if self._is_first else None)
                for name, tensor in self._buffers()
            }

    def forget(self) -> None:
        """Leave out the open batch, of which nothing will be released."""
        self._marks = None

    def check(self) -> None:
        """Close the batch; one ValueError line where a buffer is not what it was."""
        marks, self._marks = self._marks, None
        if marks is not None and self._refused is None:
            now = dict(self._buffers())
            self._is_first = False
            changed = [name for name, tensor in now.items() if _has_changed(tensor, marks.get(name))]
            self._refused = next(iter([*changed, *(marks.keys() - now.keys())]), None)
        if self._refused is not None:
            raise ValueError(
                f"buffer '{'.'.join(filter(None, self._refused))}' changes when the model runs in training: what it "
                "takes in (a running statistic, an observer, a count) is neither clipped nor noised, and nothing of "
                "this step is released. Put its module in eval mode, or take the update out; a table that grows with "
                "the longest input can be made before, by one run of that length without gradients"
            )

    def _buffers(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        for prefix, module in self._modules:
            for name, tensor in module._buffers.items():
                if tensor is not None:
                    yield (prefix, name), tensor


def _has_changed(tensor: Tensor, mark: _Mark | None) -> bool:
    if mark is None or mark.version != _version(mark.tensor):
        return True
    before = mark.copy if mark.copy is not None else mark.tensor
    if before is tensor:
        return False
    return before.device != tensor.device or not torch.equal(_bits(before), _bits(tensor))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
