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

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dpoptim.gradients import kernels
from dpoptim.gradients.kernels import wide

BLOCK_ELEMENTS = 1 << 24
"""Per-example gradients are materialised in blocks of at most this many elements (64 MiB in fp32)."""

_SMALL = 1 << 14  # elements of a parameter whose gradients are put side by side with others

GRAM_TRUST = {torch.float32: 1e-4, torch.float64: 1e-12}
"""A squared norm below this fraction of its no-cancellation bound is computed again from the gradient itself."""


def _lengths(vectors: Tensor) -> Tensor:
    """Norms along the last axis; never 0 for a vector that is not, though its squares underflow."""
    largest = torch.linalg.vector_norm(vectors, ord=math.inf, dim=-1)
    return torch.maximum(torch.linalg.vector_norm(vectors, dim=-1), largest).double()


def _to_size_one(factors: Tensor) -> tuple[Tensor, Tensor]:
    """(factors over their largest entry, that entry), example by example."""
    size = factors.abs().flatten(1).amax(1)
    size = torch.where(size > 0, size, 1.0)
    return factors / size[:, None, None], size.double()


@dataclass(frozen=True)
class Outer:
    """g_j = Σ_t left[j, t] ⊗ right[j, t], for a parameter of shape [rows, cols]."""

    left: Tensor  # [examples, positions, rows]
    right: Tensor  # [examples, positions, cols]

    def select(self, keep: Tensor) -> Outer:
        return Outer(self.left[keep], self.right[keep])

    @property
    def is_smaller_formed(self) -> bool:
        """Whether g_j itself takes no more memory than its factors; asked on a GPU, where forming it costs no more
        than the weight gradient that it replaces.
        """
        (_, positions, rows), cols = self.left.shape, self.right.shape[2]
        return self.left.is_cuda and self.left.dtype != torch.float64 and rows * cols <= positions * (rows + cols)

    def formed(self) -> Tensor:
        """g_j as [examples, rows, cols], in the dtype of the factors: rounded once, and from then on what is both
        measured and summed.
        """
        return torch.bmm(self.left.mT, self.right)


@dataclass(frozen=True)
class Rows:
    """Row ids[j, t] of g_j receives values[j, t], for a parameter of shape [rows, cols]."""

    ids: Tensor  # [examples, positions], integers
    values: Tensor  # [examples, positions, cols]

    def select(self, keep: Tensor) -> Rows:
        return Rows(self.ids[keep], self.values[keep])

    @property
    def _shared(self) -> bool:
        """Whether all examples look up the same rows, as they do positions: one row of ids, expanded."""
        return len(self.ids) > 1 and self.ids.stride(0) == 0

    def is_smaller_formed(self, num_rows: int) -> bool:
        """Whether the table itself takes hardly more memory than the values; asked on a GPU."""
        on_gpu = self.values.is_cuda and self.values.dtype != torch.float64
        return on_gpu and (num_rows <= 16 or (self._shared and num_rows <= 2 * self.ids.shape[1]))

    def formed(self, num_rows: int) -> Tensor:
        """g_j as [examples, num_rows, cols], in the dtype of the values."""
        ids = self.ids[0] if self._shared else self.ids
        chosen = torch.nn.functional.one_hot(ids, num_rows).to(self.values.dtype)
        return chosen.mT @ self.values


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
    tensor([15., 15., 15., 15.], dtype=torch.float64)
    """

    shape: torch.Size
    outers: list[Outer] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    dense: Tensor | None = None
    kept: list[tuple[Tensor, int]] = field(default_factory=list)  # what is held, and the version it had

    def add(self, form: Form) -> None:
        if isinstance(form, Outer) and form.is_smaller_formed:
            form = Dense(form.formed())
        elif isinstance(form, Rows) and form.is_smaller_formed(self.shape[0]):
            form = Dense(form.formed(self.shape[0]))
        if isinstance(form, Dense) and self.dense is not None:
            self.dense = wide(self.dense) + wide(form.grads)  # a new tensor: the parts need not be held
            return
        self.kept += [(part, part._version) for part in vars(form).values()]
        if isinstance(form, Outer):
            self.outers.append(form)
        elif isinstance(form, Rows):
            self.rows.append(form)
        else:
            self.dense = form.grads

    @property
    def was_overwritten(self) -> bool:
        """Whether something that is held has been changed in place since: a reused input buffer, say."""
        return any(part._version != version for part, version in self.kept)

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
            kept=[],
        )

    def measured(self, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(`squared_norms`, `cancellation_bounds`), in the cheapest way for these forms."""
        if len(self.outers) == len(self.rows) == 1 and self.dense is None:
            return self._tied_measure(scale)
        on_gpu = kernels.on_gpu(*self._tensors(), scale) is not None
        if not on_gpu or len(self.outers) > 1 or len(self.rows) > 1 or (self.dense is not None and self._in_parts):
            return self.squared_norms(scale), self.cancellation_bounds(scale)
        zero = torch.zeros(self.examples, dtype=torch.float64, device=self._device())
        if self.dense is not None:
            return kernels.squares(self.dense, scale), zero
        if self.outers:
            return kernels.outer_squares(self.outers[0].left, self.outers[0].right, scale), zero
        return kernels.row_squares(self.rows[0].ids, self.rows[0].values, scale, self.shape[0])

    @property
    def _in_parts(self) -> bool:
        return bool(self.outers or self.rows)

    def _tied_measure(self, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """A table that is looked up and projected by, ‖D + E‖² = ‖D‖² + 2⟨D, E⟩ + ‖E‖²; D + E is never formed."""
        outer, use = self.outers[0], self.rows[0]
        if kernels.on_gpu(outer.left, outer.right, scale) is not None:
            by_outer = kernels.outer_squares(outer.left, outer.right, scale)
        else:
            by_outer = replace(self, rows=[], kept=[]).squared_norms(scale)
        by_rows, bound = kernels.row_squares(use.ids, use.values, scale, self.shape[0])
        cross = kernels.outer_row_products(outer.left, outer.right, use.ids, use.values, scale)
        return (by_outer + 2 * cross + by_rows).clamp(min=0), by_outer.sqrt() + bound

    def _tensors(self) -> list[Tensor]:
        floats = [part for form in self.outers for part in (form.left, form.right)] + [
            form.values for form in self.rows
        ]
        return floats if self.dense is None else [*floats, self.dense]

    def squared_norms(self, scale: Tensor | None = None) -> Tensor:
        """‖scale ⊙ g_j‖² for each example j, in float64 (made of fp32 products where the model is fp32)."""
        if self.dense is not None and not self.outers and not self.rows:
            return kernels.squares(self.dense, scale)
        if self.rows and not self.outers and self.dense is None:
            return self._rows_squared_norms(scale)
        if self.outers and not self.rows and self.dense is None:
            return self._outer_squared_norms(scale)
        return self._squared_norms_by_blocks(scale)

    def cancellation_bounds(self, scale: Tensor | None = None) -> Tensor:
        """What the norms could be if nothing cancelled, Σ_t ‖scale ⊙ (part of g_j at position t)‖ or more, in float64.

        Where it far exceeds the norm, rounding of the sum over positions is no longer small beside the norm.
        """
        total = torch.zeros(self.examples, dtype=torch.float64, device=self._device())
        for outer in self.outers:
            left = wide(outer.left) if scale is None else wide(outer.left) * scale.amax(1)
            total += (_lengths(left) * _lengths(wide(outer.right))).sum(1)
        for use in self.rows:
            values = wide(use.values) if scale is None else wide(use.values) * scale[use.ids]
            total += _lengths(values).sum(1)
        return total

    def example(self, j: int) -> Tensor:
        """g_j itself, of the parameter's shape."""
        if self.dense is not None and not self.outers and not self.rows:
            return wide(self.dense[j])
        own = self.select(torch.tensor([j], device=self._device()))
        return torch.cat([block[0] for _, block in own._blocks()])

    def _device(self) -> torch.device:
        if self.dense is not None:
            return self.dense.device
        return (self.outers[0].left if self.outers else self.rows[0].ids).device

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_j weights[j]·g_j, of the parameter's shape."""
        total = torch.zeros(self.shape, dtype=weights.dtype, device=weights.device)
        for outer in self.outers:
            total += kernels.outer_weighted_sum(outer.left, outer.right, weights)
        for use in self.rows:
            total += kernels.row_weighted_sum(use.ids, use.values, weights, self.shape[0])
        if self.dense is not None:
            total += kernels.weighted_sum(self.dense, weights)
        return total

    def weighted_square_sum(self, weights: Tensor) -> Tensor:
        """Σ_j (weights[j]·g_j)², elementwise, of the parameter's shape."""
        if not self.shape:
            assert self.dense is not None
            return (weights * wide(self.dense)).square().sum()
        total = torch.zeros(self.shape, dtype=weights.dtype, device=weights.device)
        for rows, block in self._blocks():
            total[rows] = torch.tensordot(weights.square(), block.square(), dims=1)
        return total

    def _outer_squared_norms(self, scale: Tensor | None) -> Tensor:
        rows, cols = self.shape
        positions = sum(form.left.shape[1] for form in self.outers)
        by_gram = scale is None and positions * (rows + cols) < rows * cols
        if positions > 1 and not by_gram:
            return self._squared_norms_by_blocks(scale)
        # Squares of the factors: each example's are brought to size 1 first, or they could underflow.
        left, left_size = _to_size_one(torch.cat([wide(form.left) for form in self.outers], dim=1))
        right, right_size = _to_size_one(torch.cat([wide(form.right) for form in self.outers], dim=1))
        if positions > 1:
            norms = self._gram_squared_norms(left, right)
        elif scale is None:
            norms = kernels.squares(left, None) * kernels.squares(right, None)
        else:
            norms = ((left[:, 0].square() @ scale.square()) * right[:, 0].square()).double().sum(1)
        doubtful = norms < 0
        norms *= (left_size * right_size).square()
        if doubtful.any():
            norms[doubtful] = self.select(doubtful)._squared_norms_by_blocks(scale)
        return norms

    def _gram_squared_norms(self, left: Tensor, right: Tensor) -> Tensor:
        """‖Σ_t l_t ⊗ r_t‖² = Σ_{t,u} (l_t·l_u)(r_t·r_u); −1 where positions cancel and the product cannot be
        trusted.
        """
        left_gram, right_gram = left @ left.mT, right @ right.mT
        norms = (left_gram * right_gram).sum((1, 2)).double()
        diagonals = left_gram.diagonal(dim1=1, dim2=2) * right_gram.diagonal(dim1=1, dim2=2)
        bound = diagonals.clamp(min=0).sqrt().sum(1).square()
        return norms.masked_fill(norms <= GRAM_TRUST[left.dtype] * bound, -1.0)

    def _rows_squared_norms(self, scale: Tensor | None) -> Tensor:
        """Values of equal ids of one example are summed before they are squared."""
        ids = torch.cat([form.ids for form in self.rows], dim=1)
        values = torch.cat([wide(form.values) for form in self.rows], dim=1)
        return kernels.row_squares(ids, values, scale, self.shape[0])[0]

    def _squared_norms_by_blocks(self, scale: Tensor | None) -> Tensor:
        total = torch.zeros(self.examples, dtype=torch.float64, device=self._device())
        for rows, block in self._blocks():  # which are ours to overwrite
            scaled = block if scale is None else block.mul_(scale[rows])
            total += scaled.square_().reshape(*scaled.shape[:2], -1).sum(2).sum(1, dtype=torch.float64)
        return total

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """g_j itself, a range of the parameter's rows at a time: (rows, [examples, rows, ...])."""
        row_elements = max(1, self.examples * self.shape[1:].numel())
        step = max(1, BLOCK_ELEMENTS // row_elements)
        for start in range(0, self.shape[0], step):
            yield slice(start, start + step), self._block(start, min(start + step, self.shape[0]))

    def _block(self, start: int, stop: int) -> Tensor:
        block: Tensor | None = None if self.dense is None else wide(self.dense[:, start:stop]).clone()
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


def joined_small(gradients: dict[str, ExampleGradients]) -> list[tuple[list[str], Tensor]]:
    """Small gradients that are kept as they are (biases, norms), side by side: (names, [examples, all elements]).

    A model has many of them, and one operation on all costs hardly more than on one. One list for each dtype.
    """
    kinds: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, own in gradients.items():
        if own.dense is not None and not own.outers and not own.rows and own.shape.numel() <= _SMALL:
            kinds.setdefault(own.dense.dtype, {})[name] = own.dense.reshape(own.examples, -1)
    return [(list(parts), torch.cat(list(parts.values()), 1)) for parts in kinds.values() if len(parts) > 1]
