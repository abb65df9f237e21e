"""Flat storage: few vectors that hold all parameters, with a view for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from dpoptim.kernels.norms import wide_dtype

MAX_ELEMENTS = 1 << 27  # of a vector that holds several parameters


class Group(NamedTuple):
    """The parameters that share a vector: neighbours of one dtype and device."""

    names: list[str]
    numel: int
    dtype: torch.dtype  # of the vector, at least float32
    device: torch.device


def group_parameters(parameters: Mapping[str, Tensor]) -> list[Group]:
    """Return groups of at most `MAX_ELEMENTS` elements, in order; a larger parameter has a group of its own."""
    found: list[Group] = []
    last: dict[tuple[torch.dtype, torch.device], int] = {}  # the group to which a kind of parameters is added
    for name, parameter in parameters.items():
        kind, numel = (wide_dtype(parameter.dtype), parameter.device), parameter.numel()
        if kind in last and found[last[kind]].numel + numel <= MAX_ELEMENTS:
            group = found[last[kind]]
            found[last[kind]] = group._replace(names=[*group.names, name], numel=group.numel + numel)
        else:
            last[kind] = len(found)
            found.append(Group([name], numel, *kind))
    return found


class FlatTensors(Mapping[str, Tensor]):
    """One tensor per parameter, in at least float32, as views of one vector per group of parameters.

    >>> ones = FlatTensors({"weight": torch.ones(2, 3), "bias": torch.ones(3)}, lambda *kind: torch.ones(*kind))
    >>> [len(vector) for vector in ones.vectors]
    [9]
    >>> ones.mapped(torch.neg)["bias"]
    tensor([-1., -1., -1.])
    """

    def __init__(self, parameters: Mapping[str, Tensor], make: Callable[..., Tensor] | None = None) -> None:
        """Use the shapes and order of `parameters`; `make(numel)` creates each vector.

        By default a vector is uninitialized, and takes memory only when it is first needed.
        """
        self._parameters, self._groups = parameters, group_parameters(parameters)
        self._place = {name: place for place, group in enumerate(self._groups) for name in group.names}
        self._vectors = [None if make is None else make(group.numel) for group in self._groups]
        self._views: dict[str, Tensor] = {}

    @property
    def names(self) -> list[list[str]]:
        """The parameters of each vector."""
        return [group.names for group in self._groups]

    @property
    def vectors(self) -> list[Tensor]:
        return [self._vector(place) for place in range(len(self._groups))]

    def _vector(self, place: int) -> Tensor:
        vector = self._vectors[place]
        if vector is None:
            group = self._groups[place]
            vector = self._vectors[place] = torch.empty(group.numel, dtype=group.dtype, device=group.device)
        return vector

    def mapped(self, function: Callable[[Tensor], Tensor]) -> FlatTensors:
        """Return new tensors with `function` applied to each vector."""
        vectors = map(function, self.vectors)
        return FlatTensors(self._parameters, lambda numel: next(vectors))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._views:
            place = self._place[name]
            names = self._groups[place].names
            views = unflatten(self._vector(place), [self._parameters[other] for other in names])
            self._views.update(zip(names, views, strict=True))
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into views with the shapes of `like`.

    >>> [tuple(view.shape) for view in unflatten(torch.zeros(7), [torch.ones(2, 3), torch.ones(0, 3), torch.ones(())])]
    [(2, 3), (0, 3), ()]
    """
    views = _unflatten_dense_tensors(vector, like)  # older versions of torch lose the shape of an empty tensor
    return [view if tensor.numel() else view.view(tensor.shape) for view, tensor in zip(views, like, strict=True)]


def flatten(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the tensors as one vector of `dtype`: a view if they are adjacent in memory, else a copy.

    >>> both = torch.arange(5.0)
    >>> flatten([both[:2], both[2:]], torch.float32).data_ptr() == both.data_ptr()
    True
    """
    first, expected = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.data_ptr() != expected:
            return torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])
        expected += tensor.numel() * tensor.element_size()
    if expected > first.untyped_storage().data_ptr() + first.untyped_storage().nbytes():
        return torch.cat([tensor.reshape(-1) for tensor in tensors])  # two storages that happen to be adjacent
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))
