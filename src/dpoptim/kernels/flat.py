"""Flat storage: one vector per dtype and device, with a view for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from dpoptim.kernels.norms import wide_dtype


def group_by_dtype_device(parameters: Mapping[str, Tensor]) -> dict[tuple[torch.dtype, torch.device], list[str]]:
    """Return the names of the parameters of each (dtype, device), in order."""
    kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, parameter in parameters.items():
        kinds.setdefault((wide_dtype(parameter.dtype), parameter.device), []).append(name)
    return kinds


class FlatTensors(Mapping[str, Tensor]):
    """One tensor per parameter, in at least float32, as views of one vector per dtype and device.

    >>> ones = FlatTensors({"weight": torch.ones(2, 3), "bias": torch.ones(3)}, lambda *kind: torch.ones(*kind))
    >>> [len(vector) for vector in ones.vectors]
    [9]
    >>> ones.mapped(torch.neg)["bias"]
    tensor([-1., -1., -1.])
    """

    def __init__(self, parameters: Mapping[str, Tensor], make: Callable[..., Tensor] | None = None) -> None:
        """Use the shapes and order of `parameters`; `make(numel)` creates each vector, uninitialized by default."""
        self._parameters = parameters
        self.vectors: list[Tensor] = []
        self.names: list[list[str]] = []  # of the parameters in each vector
        self._views: dict[str, Tensor] = {}
        for (dtype, device), names in group_by_dtype_device(parameters).items():
            own = [parameters[name] for name in names]
            numel = sum(parameter.numel() for parameter in own)
            vector = torch.empty(numel, dtype=dtype, device=device) if make is None else make(numel)
            self.vectors.append(vector)
            self.names.append(names)
            self._views.update(zip(names, unflatten(vector, own), strict=True))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> FlatTensors:
        """Return new tensors with `function` applied to each vector."""
        vectors = map(function, self.vectors)
        return FlatTensors(self._parameters, lambda numel: next(vectors))

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._views)


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
