"""The gradients of one parameter, one for each example, kept in the cheapest exact form.

A layer rule never builds per-example gradients where it can say what they are made of:

* `Outer`: g_j = Σ_t left_jt ⊗ right_jt, a linear map used at T positions of example j;
* `Rows`: g_j has value_jt added to row id_jt, a table looked up at T positions;
* `Dense`: g_j itself.

A parameter used more than once (tied weights, a layer called twice) has the SUM of its uses as gradient;
`ExampleGradients` keeps all uses of one parameter and takes norms of that sum, cross terms included.
Everything here is un-noised: nothing outside `dpoptim.gradients` may import this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 24
"""Per-example gradients are materialised in blocks of at most this many elements (64 MiB in fp32)."""

GRAM_TRUST = {torch.float32: 1e-4, torch.float64: 1e-12}
"""A squared norm below this fraction of its no-cancellation bound is computed again from the gradient itself."""


def wide(tensor: Tensor) -> Tensor:
    """The tensor in the precision that norms are taken in: float64 stays, everything else becomes fp32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@dataclass(frozen=True)
class Outer:
    """g_j = Σ_t left[j, t] ⊗ right[j, t], for a parameter of shape [rows, cols]."""

    left: Tensor  # [examples, positions, rows]
    right: Tensor  # [examples, positions, cols]

    def select(self, keep: Tensor) -> Outer:
        return Outer(self.left[keep], self.right[keep])


@dataclass(frozen=True)
class Rows:
    """Row ids[j, t] of g_j receives values[j, t], for a parameter of shape [rows, cols]."""

    ids: Tensor  # [examples, positions], integers
    values: Tensor  # [examples, positions, cols]

    def select(self, keep: Tensor) -> Rows:
        return Rows(self.ids[keep], self.values[keep])


@dataclass(frozen=True)
class Dense:
    """g_j = grads[j]."""

    grads: Tensor  # [examples, *parameter shape]

    def select(self, keep: Tensor) -> Dense:
        return Dense(self.grads[keep])


Form = Outer | Rows | Dense


@dataclass
class ExampleGradients:
    """All uses of one parameter in one backward: g_j is the sum of the uses.

    >>> g = ExampleGradients(shape=torch.Size([2, 3]))
    >>> g.add(Outer(torch.ones(4, 1, 2), torch.ones(4, 1, 3)))
    >>> g.add(Rows(torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1, 3)))
    >>> g.squared_norms()        # three entries of 2 and three of 1
    tensor([15., 15., 15., 15.])
    """

    shape: torch.Size
    outers: list[Outer] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    dense: Tensor | None = None

    def add(self, form: Form) -> None:
        if isinstance(form, Outer):
            self.outers.append(form)
        elif isinstance(form, Rows):
            self.rows.append(form)
        else:
            grads = wide(form.grads)
            self.dense = grads if self.dense is None else self.dense + grads

    @property
    def examples(self) -> int:
        if self.dense is not None:
            return len(self.dense)
        return len(self.outers[0].left) if self.outers else len(self.rows[0].ids)

    def select(self, keep: Tensor) -> ExampleGradients:
        """The same for the examples where `keep` is true."""
        return replace(
            self,
            outers=[form.select(keep) for form in self.outers],
            rows=[form.select(keep) for form in self.rows],
            dense=None if self.dense is None else self.dense[keep],
        )

    def squared_norms(self, scale: Tensor | None = None) -> Tensor:
        """‖scale ⊙ g_j‖² for each example j, in fp32 (float64 where the model is)."""
        if self.dense is not None and not self.outers and not self.rows:
            scaled = self.dense if scale is None else self.dense * scale
            return scaled.square().reshape(len(scaled), -1).sum(1)
        if self.rows and not self.outers and self.dense is None:
            return self._rows_squared_norms(scale)
        if self.outers and not self.rows and self.dense is None:
            return self._outer_squared_norms(scale)
        return self._squared_norms_by_blocks(scale)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_j weights[j]·g_j, of the parameter's shape."""
        total = torch.zeros(self.shape, dtype=weights.dtype, device=weights.device)
        for outer in self.outers:
            left = wide(outer.left) * weights[:, None, None]
            total += left.flatten(0, 1).T @ wide(outer.right).flatten(0, 1)
        for use in self.rows:
            values = wide(use.values) * weights[:, None, None]
            total.index_add_(0, use.ids.flatten(), values.flatten(0, 1))
        if self.dense is not None:
            total += torch.tensordot(weights, self.dense, dims=1)
        return total

    def weighted_square_sum(self, weights: Tensor) -> Tensor:
        """Σ_j (weights[j]·g_j)², elementwise, of the parameter's shape."""
        if not self.shape:
            assert self.dense is not None
            return (weights * self.dense).square().sum()
        total = torch.zeros(self.shape, dtype=weights.dtype, device=weights.device)
        for rows, block in self._blocks():
            total[rows] = torch.tensordot(weights.square(), block.square(), dims=1)
        return total

    def _outer_squared_norms(self, scale: Tensor | None) -> Tensor:
        left = torch.cat([wide(form.left) for form in self.outers], dim=1)
        right = torch.cat([wide(form.right) for form in self.outers], dim=1)
        positions = left.shape[1]
        if positions == 1:
            left_squares, right_squares = left[:, 0].square(), right[:, 0].square()
            if scale is None:
                return left_squares.sum(1) * right_squares.sum(1)
            return ((left_squares @ scale.square()) * right_squares).sum(1)
        rows, cols = self.shape
        if scale is None and positions * (rows + cols) < rows * cols:
            return self._gram_squared_norms(left, right)
        return self._squared_norms_by_blocks(scale)

    def _gram_squared_norms(self, left: Tensor, right: Tensor) -> Tensor:
        """‖Σ_t l_t ⊗ r_t‖² = Σ_{t,u} (l_t·l_u)(r_t·r_u), checked against cancellation."""
        left_gram, right_gram = left @ left.mT, right @ right.mT
        norms = (left_gram * right_gram).sum((1, 2))
        bound = (left_gram.diagonal(dim1=1, dim2=2) * right_gram.diagonal(dim1=1, dim2=2)).clamp(min=0).sqrt()
        doubtful = norms < GRAM_TRUST[norms.dtype] * bound.sum(1).square()
        if doubtful.any():
            norms[doubtful] = self.select(doubtful)._squared_norms_by_blocks(None)
        return norms

    def _rows_squared_norms(self, scale: Tensor | None) -> Tensor:
        """Values of equal ids of one example are summed before they are squared."""
        ids = torch.cat([form.ids for form in self.rows], dim=1)
        values = torch.cat([wide(form.values) for form in self.rows], dim=1)
        examples, num_rows = len(ids), self.shape[0]
        slots = ids + num_rows * torch.arange(examples, device=ids.device)[:, None]
        distinct, where = torch.unique(slots, return_inverse=True)
        sums = values.new_zeros(len(distinct), values.shape[-1])
        sums.index_add_(0, where.flatten(), values.flatten(0, 1))
        if scale is not None:
            sums *= scale[distinct % num_rows]
        return values.new_zeros(examples).index_add_(0, distinct // num_rows, sums.square().sum(1))

    def _squared_norms_by_blocks(self, scale: Tensor | None) -> Tensor:
        total: Tensor | None = None
        for rows, block in self._blocks():
            scaled = block if scale is None else block * scale[rows]
            squares = scaled.square().flatten(1).sum(1)
            total = squares if total is None else total + squares
        assert total is not None
        return total

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """g_j itself, a range of the parameter's rows at a time: (rows, [examples, rows, ...])."""
        row_elements = max(1, self.examples * self.shape[1:].numel())
        step = max(1, BLOCK_ELEMENTS // row_elements)
        for start in range(0, self.shape[0], step):
            yield slice(start, start + step), self._block(start, min(start + step, self.shape[0]))

    def _block(self, start: int, stop: int) -> Tensor:
        block: Tensor | None = None if self.dense is None else self.dense[:, start:stop].clone()
        for outer in self.outers:
            product = wide(outer.left[..., start:stop]).mT @ wide(outer.right)
            block = product if block is None else block.add_(product)
        for use in self.rows:
            values = wide(use.values)
            if block is None:
                block = values.new_zeros(len(values), stop - start, values.shape[-1])
            example, position = torch.nonzero((use.ids >= start) & (use.ids < stop), as_tuple=True)
            slots = example * (stop - start) + use.ids[example, position] - start
            block.view(-1, block.shape[-1]).index_add_(0, slots, values[example, position])
        assert block is not None
        return block
