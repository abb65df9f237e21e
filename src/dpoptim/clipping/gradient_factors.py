"""The factors of a parameter's per-example gradients, as layer rules record them.

* `OuterProduct`: g_j = Σ_t left_jt ⊗ right_jt, a linear map used at T positions of example j;
* `RowUpdates`: g_j has value_jt added to row id_jt, a table looked up at T positions;
* `Materialized`: g_j itself.

All fields are tensors with the examples on the first axis. Nothing here has noise: nothing outside `dpoptim.clipping`
may import this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dpoptim.kernels.norms import wide_dtype, with_padding


class OuterProduct(NamedTuple):
    """g_j = Σ_t left[j, t] ⊗ right[j, t], for a parameter of shape [rows, ...] with `cols` elements per row."""

    left: Tensor  # [examples, positions, rows]
    right: Tensor  # [examples, positions, cols]
    left_lengths: Tensor | None = None  # ‖left[j, t]‖, if known

    def sketch(self) -> Tensor:
        """[examples, numbers]: g_j times a few random vectors, from both sides."""
        from_left = (self.left @ _directions(self.left)).mT @ self.right
        from_right = (self.right @ _directions(self.right)).mT @ self.left
        return torch.cat([from_left.flatten(1), from_right.flatten(1)], 1)

    @property
    def extra_bytes(self) -> int:
        """How much more memory g_j takes than its factors; negative if it takes less."""
        (examples, positions, rows), cols = self.left.shape, self.right.shape[2]
        return examples * (rows * cols - positions * (rows + cols)) * self.left.element_size()

    @property
    def can_be_formed(self) -> bool:
        """On a CPU only in full precision, since 16-bit products are slow there."""
        return self.left.is_cuda or self.left.dtype == wide_dtype(self.left.dtype)

    def formed(self) -> Materialized:
        """Return g_j in the dtype of the factors, rounded once; norms and sums see the same numbers."""
        left = with_padding(self.left) if self.left.is_cuda else self.left
        grads = torch.bmm(left.mT, self.right)
        return Materialized(grads if left is self.left else grads[:, : self.left.shape[2]])


class RowUpdates(NamedTuple):
    """Row ids[j, t] of g_j receives values[j, t], for a parameter of shape [rows, cols]."""

    ids: Tensor  # [examples, positions], integers
    values: Tensor  # [examples, positions, cols]

    def sketch(self) -> Tensor:
        """[examples, numbers]: two sums of the rows of g_j, weighted by functions of their ids."""
        angles = self.ids[..., None].double() * torch.tensor([2.399963, 1.618034], device=self.ids.device).double()
        return (angles.cos().to(self.values.dtype).mT @ self.values).flatten(1)

    @property
    def _shared(self) -> bool:
        """Whether all examples look up the same rows, such as positions: one row of ids, expanded."""
        return len(self.ids) > 1 and self.ids.stride(0) == 0

    def is_small_formed(self, num_rows: int) -> bool:
        """Whether g_j takes little more memory than the values and is cheap to form."""
        return num_rows <= 16 or (self.values.is_cuda and self._shared and num_rows <= 2 * self.ids.shape[1])

    def formed(self, num_rows: int) -> Materialized:
        """Return g_j in the dtype of the values."""
        ids = self.ids[0] if self._shared else self.ids
        chosen = F.one_hot(ids.long(), num_rows).to(self.values.dtype)
        return Materialized(chosen.mT @ self.values)


class Materialized(NamedTuple):
    """g_j = grads[j]."""

    grads: Tensor  # [examples, *parameter shape]

    def sketch(self) -> Tensor:
        """[examples, numbers]: g_j itself."""
        return self.grads.reshape(len(self.grads), self.grads.shape[1:].numel())


GradientFactors = OuterProduct | RowUpdates | Materialized
AnyFactors = TypeVar("AnyFactors", bound=OuterProduct | RowUpdates)


def map_factors(factors: AnyFactors, change: Callable[[Tensor], Tensor]) -> AnyFactors:
    """Return the factors with each of their tensors changed, [examples, positions, ...]."""
    parts: list[Any] = [None if part is None else change(part) for part in factors]
    return type(factors)(*parts)


def _directions(factor: Tensor) -> Tensor:
    """Two random vectors, the same every time; a leak that both miss has probability 0."""
    width, generator = factor.shape[-1], torch.Generator("cpu").manual_seed(factor.shape[-1])
    return (torch.randn(width, 2, generator=generator, device="cpu") / width**0.5).to(factor)


def choose_factors(factors: GradientFactors, shape: torch.Size, extra_memory: int) -> tuple[GradientFactors, int]:
    """Return g_j itself if memory allows, else its factors, and how many of the extra bytes it takes."""
    if isinstance(factors, RowUpdates) and factors.is_small_formed(shape[0]):
        return factors.formed(shape[0]), 0
    if not isinstance(factors, OuterProduct) or not factors.can_be_formed:
        return factors, 0
    extra = factors.extra_bytes
    if extra > extra_memory:
        return factors, 0
    formed = factors.formed()
    if formed.grads.shape[1:] != shape:
        formed = Materialized(formed.grads.view(-1, *shape))
    return formed, max(0, extra)
