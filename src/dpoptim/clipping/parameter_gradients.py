"""The per-example gradients of one parameter, their norms and weighted sums.

The gradient of a parameter that is used more than once (tied weights, a layer called twice) is the SUM of its uses.
`ParameterGradients` holds all uses and takes norms of that sum, with cross terms. Nothing here has noise: nothing
outside `dpoptim.clipping` may import this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dpoptim.clipping import gradient_factors
from dpoptim.clipping.gradient_factors import GradientFactors, Materialized, OuterProduct, RowUpdates
from dpoptim.kernels import norms, norms_c
from dpoptim.kernels.choose import outer_on_gpu
from dpoptim.kernels.clip_weights import length_products, row_lengths, sum_of_parts
from dpoptim.kernels.norm_methods import NormMethod
from dpoptim.kernels.norms import BLOCK_ELEMENTS, DOT_ELEMENTS, wide
from dpoptim.kernels.user_rows import UserRows

# A gradient's parts may be this many times larger than the gradient before their rounding matters. If squares cancel,
# the same limit applies to the square. In float64 too: what a part loses to rounding depends on the other examples.
CANCELLATION = 1e3
FAINT = 1e-14  # squares of numbers below this fraction of the largest may vanish in float32
POSITIONS = 256  # sums over more are trusted less, in proportion: their rounding errors may have the same sign
# A squared norm below this fraction of its no-cancellation bound is computed again from the gradient itself.
GRAM_TRUST = 1e-4
TENSOR_CORE_TRUST = 30  # the same as CANCELLATION, for norms from products of positions that tensor cores round


@dataclass
class ParameterGradients:
    """All uses of one parameter in one backward: g_j is the sum of the uses."""

    shape: torch.Size
    precision: torch.dtype = torch.float32  # of norms and sums; float64 for float64 parameters or exact noise
    outers: list[OuterProduct] = field(default_factory=list)
    rows: list[RowUpdates] = field(default_factory=list)
    dense: Tensor | None = None
    kept: list[tuple[Tensor, int]] = field(default_factory=list)  # each tensor with its version

    def add(self, given: GradientFactors, extra_memory: int = 0) -> int:
        """Add a use, as g_j itself if memory allows; return how many of the extra bytes it takes."""
        factors, spent = gradient_factors.choose_factors(given, self.shape, extra_memory)
        if isinstance(factors, Materialized) and self.dense is not None:
            self.dense = wide(self.dense) + wide(factors.grads)  # a new tensor, so the parts can be freed
            return spent
        self.kept += [(part, part._version) for part in factors if part is not None]
        if isinstance(factors, OuterProduct):
            self.outers.append(factors)
        elif isinstance(factors, RowUpdates):
            self.rows.append(factors)
        else:
            self.dense = factors.grads
        return spent

    @property
    def was_overwritten(self) -> bool:
        """Whether a tensor was changed in place since it was added, such as a reused input buffer."""
        return any(part._version != version for part, version in self.kept)

    @property
    def _first(self) -> Tensor:
        return self.dense if self.dense is not None else self.outers[0].left if self.outers else self.rows[0].ids

    @property
    def examples(self) -> int:
        return self._first.shape[0]

    @property
    def positions(self) -> int:
        """Number of positions of all uses; 0 if only gradients themselves are held."""
        if self.is_dense:
            return 0
        return sum(use.left.shape[1] for use in self.outers) + sum(use.ids.shape[1] for use in self.rows)

    @property
    def is_dense(self) -> bool:
        """Whether only the gradients themselves are held."""
        return not self.outers and not self.rows

    def held_bytes(self) -> int:
        tensors = [self.dense, *(part for use in (*self.outers, *self.rows) for part in use)]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def select(self, keep: Tensor) -> ParameterGradients:
        """Return the gradients of the examples where `keep` is true."""
        return self._mapped(lambda part: part[keep])

    def double(self) -> ParameterGradients:
        """Return the same gradients, whose norms and sums are then computed in float64."""
        own = self._mapped(lambda part: part.double() if part.is_floating_point() else part)
        return replace(own, precision=torch.float64)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> ParameterGradients:
        outers = [gradient_factors.map_factors(use, change) for use in self.outers]
        rows = [gradient_factors.map_factors(use, change) for use in self.rows]
        return replace(
            self, outers=outers, rows=rows, dense=None if self.dense is None else change(self.dense), kept=[]
        )

    def of_users(self, users: UserRows) -> ParameterGradients:
        """Return the gradients of users: the sum over the rows of each, as one use in all their positions."""
        found = ParameterGradients(self.shape, self.precision)
        uses: list[OuterProduct | RowUpdates] = [*self.outers, *self.rows]
        for use in uses:
            found.add(gradient_factors.map_factors(use, users.side_by_side))
        if self.dense is not None:
            found.add(Materialized(users.summed(self.dense)))
        return found

    # -- norms -----------------------------------------------------------------------------------------------------

    def norm_method(self, *, scaled: bool) -> NormMethod:
        if self.is_dense:
            return NormMethod.FORMED
        if self.outers and self.dense is not None:
            return NormMethod.BLOCKS
        if self.rows:
            return NormMethod.PARTS if self.outers or self.dense is not None else NormMethod.ROWS
        factors = [part for use in self.outers for part in (use.left, use.right)]
        if self.precision == torch.float32 and outer_on_gpu(*factors):
            is_gram = not scaled and norms.gram_on_gpu(self.positions, *factors)
            return NormMethod.GRAM_ON_GPU if is_gram else NormMethod.TILES
        if self.positions == 1:
            return NormMethod.ONE_POSITION
        rows, cols = self._matrix
        return NormMethod.GRAM if not scaled and 0 < self.positions * (rows + cols) < rows * cols else NormMethod.BLOCKS

    def measured(self, scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return ‖scale ⊙ g_j‖² for each example j, in float64, and the smallest norm that can be trusted.

        Below that norm so much of g_j cancels that rounding is no longer small. None means that every norm can be
        trusted, because the measured vector is the one that is summed.
        """
        method = self.norm_method(scaled=scale is not None)
        if method is NormMethod.PARTS:
            return self._by_parts(scale)
        if method is NormMethod.ROWS:
            squares, uncancelled = norms.row_squares(*self._lookups(), scale, self.shape[0])
            return squares, uncancelled / CANCELLATION
        if method is NormMethod.GRAM_ON_GPU:
            squares, uncancelled = norms.gram_squares(*self._factors())
            return squares, uncancelled / TENSOR_CORE_TRUST
        squares = self._squared_norms(method, scale)
        if method in (NormMethod.GRAM, NormMethod.BLOCKS):
            trust = CANCELLATION * min(1.0, POSITIONS / max(1, self.positions))
            return squares, self._uncancelled(scale) / trust
        return squares, None

    @property
    def _matrix(self) -> tuple[int, int]:
        """The parameter's shape as a linear map; a convolution maps patches."""
        return self.shape[0], self.shape[1:].numel()

    def _as_matrix(self, scale: Tensor | None) -> Tensor | None:
        return scale if scale is None or scale.ndim == 2 else scale.reshape(self._matrix)

    def _squared_norms(self, method: NormMethod, scale: Tensor | None) -> Tensor:
        """Return ‖scale ⊙ g_j‖² by any method but PARTS and ROWS."""
        match method:
            case NormMethod.FORMED:
                assert self.dense is not None
                return norms.squares(self.dense, scale)
            case NormMethod.TILES:
                return norms.outer_squares(*self._factors(), self._as_matrix(scale))
            case NormMethod.ONE_POSITION:
                return norms.one_position_squares(*self._factors(), self._as_matrix(scale))
            case NormMethod.GRAM:
                return self._by_gram()
            case NormMethod.GRAM_ON_GPU:
                return norms.gram_squares(*self._factors())[0]
        return self._by_blocks(scale)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """left and right of all linear uses, concatenated."""
        if len(self.outers) == 1:
            return self.outers[0].left, self.outers[0].right
        return torch.cat([use.left for use in self.outers], 1), torch.cat([use.right for use in self.outers], 1)

    def _lookups(self) -> tuple[Tensor, Tensor]:
        """ids and values of all look-ups, concatenated."""
        if len(self.rows) == 1:
            return self.rows[0].ids, self.rows[0].values
        return torch.cat([use.ids for use in self.rows], 1), torch.cat([use.values for use in self.rows], 1)

    def _by_parts(self, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """A table with look-ups E and projections D: ‖D + E‖² = ‖D‖² + 2⟨D, E⟩ + ‖E‖², without forming D + E."""
        alone = replace(self, rows=[], kept=[])
        method = alone.norm_method(scaled=scale is not None)
        projected = alone._squared_norms(method, scale)
        ids, values = self._lookups()
        looked_up, bound = norms.row_squares(ids, values, scale, self.shape[0])
        if self.dense is not None:
            cross = norms.row_products(self.dense, ids, values, scale)
        else:
            cross = norms.outer_row_products(*self._factors(), ids, values, scale)
        on_gpu = method is NormMethod.GRAM_ON_GPU
        trust = TENSOR_CORE_TRUST**2 / 10 if on_gpu else CANCELLATION
        is_gram = on_gpu or method is NormMethod.GRAM
        parts = self._projected_parts(scale)
        return sum_of_parts(projected, looked_up, cross, parts, bound, trust=trust, is_gram=is_gram)

    def _projected_parts(self, scale: Tensor | None) -> Tensor:
        """Σ_t ‖l_t‖·‖r_t‖·(largest scale) over the linear uses, a bound on their norm."""
        if not self.outers:
            return torch.zeros(self.examples, dtype=torch.float64, device=self._first.device)
        largest = None if scale is None else scale.amax()
        first, *others = (
            length_products(use.left, use.right, left_lengths=use.left_lengths, factor=largest) for use in self.outers
        )
        return sum(others, first)

    def _by_gram(self) -> Tensor:
        """‖Σ_t l_t ⊗ r_t‖² = Σ_{t,u} (l_t·l_u)(r_t·r_u), or by blocks if positions cancel or factors nearly vanish."""
        # Let M hold the products r_t·r_u of the narrower factor, and let L be the broader factor. The sum equals
        # Σ (M L) ⊙ L, which fits caches better than L Lᵀ. The lengths of L's rows may be known.
        known = self.outers[0].left_lengths if len(self.outers) == 1 else None
        left, right = (wide(factor) for factor in self._factors())
        if left.shape[2] >= right.shape[2]:
            narrow, broad, lengths = right, left, known
        else:
            narrow, broad, lengths = left, right, None
        narrow, narrow_size = norms.to_size_one(narrow)
        broad, broad_size = norms.to_size_one(broad, lengths=lengths)
        gram = narrow @ narrow.mT
        squared = norms.quadratic_forms(gram, broad)
        if lengths is None:
            lengths = row_lengths(broad)
        elif broad is not left:
            lengths = lengths.double() / broad_size[:, None]
        of_narrow, of_broad = row_lengths(narrow), lengths.double()
        parts = of_narrow * of_broad
        narrow_is_faint = of_narrow < FAINT * of_narrow.amax(1, True)
        broad_is_faint = of_broad < FAINT * of_broad.amax(1, True)
        cancels = squared <= GRAM_TRUST * parts.sum(1).square()
        loses_faint_rows = (parts * (narrow_is_faint | broad_is_faint)).sum(1) > GRAM_TRUST * squared.sqrt()
        doubtful = cancels | loses_faint_rows
        squared *= (narrow_size * broad_size).square()
        if doubtful.any():
            squared[doubtful] = self.select(doubtful)._by_blocks(None)
        return squared

    def _by_blocks(self, scale: Tensor | None) -> Tensor:
        if scale is not None and self.outers and self.dense is None and not self.rows:
            found = norms_c.outer_squares(*self._factors(), scale.reshape(self._matrix))
            if found is not None:
                return found
        total = torch.zeros(self.examples, dtype=torch.float64, device=self._first.device)
        squared_scale = None if scale is None else scale.square()
        for rows, block in self._blocks():  # each block is a new tensor
            squares = block.square_().flatten(1)
            if squared_scale is None:
                total += squares.sum(1)
                continue
            factors = squared_scale[rows].flatten()
            for part, factor in zip(squares.split(DOT_ELEMENTS, 1), factors.split(DOT_ELEMENTS), strict=True):
                total += part @ factor
        return total

    def _uncancelled(self, scale: Tensor | None) -> Tensor:
        """An upper bound on Σ_t ‖scale ⊙ (part of g_j at position t)‖, in float64."""
        total = torch.zeros(self.examples, dtype=torch.float64, device=self._first.device)
        for outer in self.outers:
            left = outer.left if scale is None else wide(outer.left) * scale.flatten(1).amax(1)
            total += length_products(left, outer.right)
        for use in self.rows:
            values = use.values if scale is None else wide(use.values) * scale[use.ids]
            total += row_lengths(values).sum(1)
        return total

    # -- sums ------------------------------------------------------------------------------------------------------

    def example(self, j: int) -> Tensor:
        """Return g_j itself."""
        if self.dense is not None and self.is_dense:
            return wide(self.dense[j])
        own = self.select(torch.tensor([j], device=self._first.device))
        return torch.cat([block[0] for _, block in own._blocks()])

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return Σ_j weights[j]·g_j. An example of weight 0 adds nothing, even if it is not finite."""
        total = torch.empty(self.shape, dtype=weights.dtype, device=weights.device)
        self.weighted_sum_into(total, weights)
        return total

    @torch.no_grad()
    def weighted_sum_into(self, total: Tensor, weights: Tensor) -> None:
        """Write Σ_j weights[j]·g_j to `total`, which is contiguous and has the dtype of `weights`."""
        if self.outers:
            # Beside look-ups, weights are 0 where positions cancel, and ordinary products may make the sum.
            split = bool(self.rows) and norms.split_is_faster(*self._factors(), weights)
            weights = norms.cut(weights) if split else weights  # the same ones for look-ups
            norms.outer_weighted_sum(*self._factors(), weights, out=total.view(self._matrix), split=split)
        else:
            total.zero_()
        if self.rows:
            norms.row_weighted_sum(*self._lookups(), weights, self.shape[0], into=total)
        if self.dense is not None:
            norms.many_weighted_sums([self.dense], weights, [total], add=True)

    def weighted_square_sum(self, weights: Tensor) -> Tensor:
        """Return Σ_j (weights[j]·g_j)², elementwise; examples of weight 0 add nothing."""
        if self.dense is None and not self.outers:
            return norms.row_square_sum(*self._lookups(), weights, self.shape[0])
        ids, values = self._lookups() if self.rows else (None, None)
        if self.dense is None and outer_on_gpu(*self._factors(), values, weights):
            return norms.outer_square_sum(*self._factors(), weights, ids, values).view(self.shape)
        if not bool((weights != 0).all()):
            return self.select(weights != 0).weighted_square_sum(weights[weights != 0])
        total = torch.zeros(self.shape, dtype=weights.dtype, device=weights.device)
        for rows, block in self._blocks():  # weighted first, since g² may overflow
            total[rows] = block.mul_(weights.view(-1, *[1] * (block.ndim - 1))).square_().sum(0)
        return total

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield g_j for a range of the parameter's rows at a time: (rows, [examples, rows, ...])."""
        row_elements = max(1, self.examples * self.shape[1:].numel())
        step = max(1, BLOCK_ELEMENTS // row_elements)
        for start in range(0, self.shape[0], step):
            yield slice(start, start + step), self._block(start, min(start + step, self.shape[0]))

    def _block(self, start: int, stop: int) -> Tensor:
        block: Tensor | None = None
        if self.dense is not None:
            block = wide(self.dense[:, start:stop]).clone(memory_format=torch.contiguous_format)
        for outer in self.outers:
            product = wide(outer.left[..., start:stop]).mT @ wide(outer.right)
            product = product.view(*product.shape[:2], *self.shape[1:])
            block = product if block is None else block.add_(product)
        for use in self.rows:
            values = wide(use.values)
            if block is None:
                block = values.new_zeros(len(values), stop - start, values.shape[-1])
            example, position = torch.nonzero((use.ids >= start) & (use.ids < stop), as_tuple=True)
            slots = example * (stop - start) + use.ids[example, position] - start
            with norms.without_atomics():
                block.view(-1, block.shape[-1]).index_add_(0, slots, values[example, position])
        assert block is not None
        return block
