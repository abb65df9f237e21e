"""Flat storage: few vectors that hold all parameters, with a view for each parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from dpoptim.kernels.norms import wide_dtype

MAX_ELEMENTS = 1 << 27  # of a vector that holds several parameters


def group_parameters(parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of the parameters that share a vector: one dtype and device, at most `MAX_ELEMENTS`."""
    groups: list[list[str]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[str], int]] = {}  # with their elements
    for name, parameter in parameters.items():
        kind, numel = (wide_dtype(parameter.dtype), parameter.device), parameter.numel()
        group, filled = open_groups.get(kind, ([], 0))
        if not group or filled + numel > MAX_ELEMENTS:
            group, filled = [], 0
            groups.append(group)
        group.append(name)
        open_groups[kind] = group, filled + numel
    return groups


class FlatTensors(Mapping[str, Tensor]):
    """One tensor per parameter, in at least float32, as views of one vector per group of parameters.

    >>> ones = FlatTensors({"weight": torch.ones(2, 3), "bias": torch.ones(3)}, lambda *kind: torch.ones(*kind))
    >>> [len(vector) for vector in ones.vectors]
    [9]
    >>> ones.mapped(torch.neg)["bias"]
    tensor([-1., -1., -1.])
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        make: Callable[..., Tensor] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Use the shapes and order of `parameters`; `make(numel)` creates each vector.

        By default a vector is uninitialized, and takes memory only when it is first needed. Its `dtype` is by default
        at least float32.
        """
        self._parameters, self.names, self._dtype = parameters, group_parameters(parameters), dtype
        self._place = {name: place for place, names in enumerate(self.names) for name in names}
        self._numels = [sum(parameters[name].numel() for name in names) for names in self.names]
        self._vectors = [None if make is None else make(numel) for numel in self._numels]
        self._views: dict[str, Tensor] = {}

    def _with(self, vectors: Sequence[Tensor | None]) -> FlatTensors:
        found = copy.copy(self)
        found._vectors, found._views = list(vectors), {}
        return found

    @property
    def vectors(self) -> list[Tensor]:
        return [self._vector(place) for place in range(len(self.names))]

    def _vector(self, place: int) -> Tensor:
        vector = self._vectors[place]
        if vector is None:
            first = self._parameters[self.names[place][0]]
            dtype = self._dtype or wide_dtype(first.dtype)
            vector = self._vectors[place] = first.new_empty(self._numels[place], dtype=dtype)
        return vector

    def unallocated(self) -> FlatTensors:
        """Return new, uninitialized tensors for the same parameters."""
        return self._with([None] * len(self.names))

    def rounded(self) -> FlatTensors:
        """Return the tensors in the default dtype."""
        if self._dtype is None:
            return self
        firsts = [self._parameters[names[0]] for names in self.names]
        return self._with([v.to(wide_dtype(p.dtype)) for v, p in zip(self.vectors, firsts, strict=True)])

    def mapped(self, function: Callable[[Tensor], Tensor]) -> FlatTensors:
        """Return new tensors with `function` applied to each vector."""
        return self._with([function(vector) for vector in self.vectors])

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._views:
            place = self._place[name]
            own = {other: self._parameters[other] for other in self.names[place]}
            self._views.update(zip(own, unflatten(self._vector(place), list(own.values())), strict=True))
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
