"""Clip and sum: Σ_j c_j g_j with c_j = min(1, clip_norm / ‖scale ⊙ g_j‖).

Guarantee: each example adds a vector v with ‖scale ⊙ v‖ ≤ clip_norm, up to the rounding of the sum. An example whose
gradient is not finite, or has a norm above 1e18, adds nothing. In the scaled norm, the
sum therefore changes by at most clip_norm under zero-out or add-remove adjacency, and by at most 2·clip_norm when one
example replaces another. The scale enters the norm only: dividing the noise by it equals scaling, adding noise and
unscaling.

With `by_user`, "example" means a user: g_j is the mean gradient of all rows of user j, which are in one physical batch.
A rule other than `FixedClipNorm` computes c_j differently, or one c_j per group of parameters; see `clipping_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpoptim.arguments import check_clip_norm
from dpoptim.clipping.engine import Engine, PhysicalBatch
from dpoptim.clipping.parameter_gradients import ParameterGradients
from dpoptim.data.shards import Shards, own_part
from dpoptim.kernels import norms
from dpoptim.kernels.clip_weights import ClipResult, clip_weights, clipped_part
from dpoptim.kernels.flat import FlatTensors
from dpoptim.kernels.inverse_root import ComputedScale
from dpoptim.kernels.norm_methods import Explanation
from dpoptim.kernels.user_rows import UserRows
from dpoptim.privacy.clipping_rules import AdaptiveClipNorm, FixedClipNorm, NormalizedGradients

Gradients = dict[str, ParameterGradients]  # by parameter name
Scale = Mapping[str, Tensor] | None
Factor = float | Tensor  # what undoes the division of a loss: one number, or one per user


@dataclass
class ClippingCounts:
    """What clipping did since the start. NOT private: it depends on single examples and has no noise."""

    examples: int = 0
    clipped: int = 0
    nonfinite: int = 0


class ClippedSums:
    """Accumulates Σ_j c_j g_j, and optionally Σ_j (c_j g_j)², over the physical batches of one step.

    `scale` maps parameter names to positive tensors s_t of the parameter's shape; None means 1 everywhere. It must be a
    function of released values alone and stays fixed from one `take` to the next.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        clip_norm: float,
        squares: bool = False,
        mean_loss: bool = False,  # the loop averages the losses of a physical batch; the division is undone here
        extra_memory: int = 0,  # bytes that a physical batch may use beyond activations and their gradients
        allow_mixing: bool = False,  # lets examples mix in the model, which voids the guarantee above
        shards: Shards | None = None,  # if the parameters are sharded: then sums are added up over the processes
        by_user: bool = False,  # clip the mean gradient of each user's rows
        rule: FixedClipNorm = FixedClipNorm(),  # noqa: B008
        in_double: bool = False,  # measure and sum in float64, where rounding matters little
    ) -> None:
        check_clip_norm(clip_norm)
        self.clip_norm = clip_norm
        self.is_adaptive = isinstance(rule, AdaptiveClipNorm)  # then the clip norm may change after `take`
        self._stability = rule.stability if isinstance(rule, NormalizedGradients) else None
        self.mean_loss = mean_loss
        self.scale: Scale = None
        self.parameters = {name: own_part(p) for name, p in model.named_parameters() if p.requires_grad}
        self.groups = rule.groups_of(self.parameters)
        if len(self.groups) > 1 and shards is not None:
            raise ValueError(
                f"clipping={rule!r} needs whole models for now. Do not call fully_shard, or use another rule"
            )
        self.shards = shards
        self.skips_batch = False  # the next batch is a placeholder
        self.by_user = by_user
        self.rows_of_users: Sequence[int] | None = None  # in the next physical batch, whose rows are in this order
        self.with_squares = squares
        self.in_double = in_double
        self._empty = FlatTensors(self.parameters, dtype=torch.float64 if in_double else None)
        self.saves_memory = len(self._empty.names) > 1  # at the cost of waiting for the device
        self.clear_sums()
        self.examples = 0  # clipped and summed since the start
        self._outcomes: list[Tensor] = []  # `ClipResult.counts` of physical batches, still on the device
        self._counted = ClippingCounts()
        self._explanation: Explanation | None = None
        self._explained: dict[tuple[int, ...], Explanation] = {}  # by shapes
        self.engine = Engine(
            model, self._add, extra_memory=extra_memory, allow_mixing=allow_mixing, shards=shards, may_average=mean_loss
        )

    @property
    def counts(self) -> ClippingCounts:
        """What clipping did since the start; waits for the device."""
        for clipped, nonfinite, _ in torch.stack(self._outcomes).tolist() if self._outcomes else []:
            self._counted.clipped += clipped
            self._counted.nonfinite += nonfinite
        self._outcomes = []
        self._counted.examples = self.examples
        return self._counted

    def explain(self) -> Explanation:
        """How the norms of the last physical batch were computed."""
        self.engine.flush()
        if self._explanation is None:
            raise ValueError("nothing has been differentiated yet; call this after the first step")
        return self._explanation

    def clipped_examples(self) -> Tensor:
        """How many examples of this step are clipped, if the clip norm is adaptive; read before `take`."""
        none = torch.zeros((), dtype=torch.float64, device=next(iter(self.parameters.values())).device)
        return torch.stack([none, *self._clipped]).sum()

    def take(self) -> tuple[FlatTensors, FlatTensors | None]:
        """Return (Σ c_j g_j, Σ (c_j g_j)² or None) of all parameters, and empty the accumulator."""
        try:
            self.engine.end_step()
            self._settle()
            taken = self._sums.taken(), self._square_sums.taken() if self._square_sums is not None else None
        except BaseException:
            self._forget()
            raise
        self.clear_sums()
        return taken

    def clear_sums(self) -> None:
        """Drop everything summed since the last `take`."""
        self._unsettled: Callable[[], None] | None = None
        self._sums = _Accumulator(self._empty)
        self._square_sums = _Accumulator(self._empty) if self.with_squares else None
        self.norms: list[Tensor] = []
        self._clipped: list[Tensor] = []  # if adaptive: how many examples of each physical batch are clipped

    def _add(self, batch: PhysicalBatch) -> None:
        counted = self.examples
        try:
            if batch.add_ready is None:
                if self.in_double:
                    for name, own in batch.gradients.items():  # one by one, to free the narrower ones
                        batch.gradients[name] = own.double()
                self._clip_and_sum(batch)
            else:
                batch.add_ready()
        except BaseException:  # for example out of memory or Ctrl-C: half a batch must never be released
            self._forget()
            self.examples = counted  # the batch is then refused, because examples are missing
            raise

    def _forget(self) -> None:
        """Drop everything accumulated in this step, including a batch that was being recomputed."""
        self.engine.discard()
        self.clear_sums()

    def _clip_and_sum(self, batch: PhysicalBatch) -> None:
        factor: Factor = batch.examples if self.mean_loss else 1
        if self.by_user:
            factor = factor * self._group_by_user(batch)
        if self.shards is not None:
            self._clip_and_sum_shards(batch, factor, self.shards)
            return
        self._remember_norm_methods(batch)
        gradients, found = batch.gradients, []
        for names, share in self.groups:
            own = gradients
            if len(self.groups) > 1:
                own = {name: gradients.pop(name) for name in names if name in gradients}
            if own:
                found.append(self._clip_and_sum_group(own, self.clip_norm * share, factor))
        self.examples += batch.examples
        self._note(
            torch.linalg.vector_norm(torch.stack([one.norms for one in found]), dim=0) if found[1:] else found[0].norms,
            torch.stack([one.counts for one in found]).amax(0) if found[1:] else found[0].counts,
        )

    def _clip_and_sum_group(self, gradients: Gradients, clip_norm: float, factor: Factor) -> ClipResult:
        """Clip parameters that are clipped together, and add their sums."""
        found, is_trusted = self._clip(gradients, self.scale, factor, clip_norm)
        rows = list if is_trusted else _rows_to_recompute(found, found.needs_recompute)
        if self.saves_memory:  # then the sums take memory as the gradients free it
            self.clip_and_sum_rows(gradients, rows(), factor, clip_norm)
        _sum(gradients if self.saves_memory else dict(gradients), found.weights, self._sums, self._square_sums)
        if not self.saves_memory:
            self.clip_and_sum_rows(gradients, rows(), factor, clip_norm)  # read only now, to keep the device busy
        return found

    def _note(self, norms: Tensor, counts: Tensor, examples: int | None = None) -> None:
        """Keep what clipping did to a physical batch, with the norms of all its rows."""
        self._outcomes.append(counts)
        if len(self._outcomes) == 1024:  # so that long runs keep their memory
            self._outcomes = [torch.stack(self._outcomes).sum(0)]
        self.norms.append(norms[:examples].clone())
        if self.is_adaptive:  # a row counts between 0 and 1, and padding, which has no gradient, counts 0
            self._clipped.append(clipped_part(norms / self.clip_norm).sum())

    def _group_by_user(self, batch: PhysicalBatch) -> Tensor:
        """Replace the gradients of rows with the sums over each user's rows; return what turns these into means."""
        counts, self.rows_of_users = self.rows_of_users, None
        if counts is None or sum(counts) != batch.examples:
            raise ValueError(
                "the rows of the batch are not those that the loader drew, so it is unknown which user each belongs "
                "to. Run one model call on the whole batch, one backward and one step() per batch"
            )
        users = UserRows(counts)
        for name in batch.gradients:
            batch.gradients[name] = batch.gradients[name].of_users(users)
        batch.examples = len(counts)
        return 1 / users.counts.to(next(iter(self.parameters.values())).device, torch.float64)

    def _clip_and_sum_shards(self, batch: PhysicalBatch, factor: Factor, shards: Shards) -> None:
        """Clip and sum a batch of this process, and add up the sums of all processes.

        All processes do this equally often, some of them with placeholders, whose clip weights are 0. An example whose
        norm cannot be trusted adds nothing.
        """
        found = []
        for names in shards.buckets:
            scale = None if self.scale is None else shards.whole({name: self.scale[name] for name in names})
            if own := {name: batch.gradients[name] for name in names if name in batch.gradients}:
                found.append(_measured(own, scale))
        trusted = [trust for _, trust in found if trust is not None]
        min_trusted_norm = torch.linalg.vector_norm(torch.stack(trusted), dim=0) if trusted else None
        squares = torch.stack([squares for squares, _ in found]).sum(0)
        clipped = clip_weights(
            squares,
            min_trusted_norm,
            clip_norm=self.clip_norm,
            factor=factor,
            dtype=torch.float64,
            stability=self._stability,
        )
        weights = torch.zeros_like(clipped.weights) if self.skips_batch else clipped.weights
        self._remember_norm_methods(batch)
        for names in shards.buckets:
            own = {name: batch.gradients.pop(name) for name in names if name in batch.gradients}
            for sums, squared in ((self._sums, False), (self._square_sums, True)):
                if sums is not None:
                    totals = {name: _total(gradients, weights, squared=squared) for name, gradients in own.items()}
                    for name, total in shards.added_up(names, totals, device=weights.device, double=self.in_double):
                        sums.add(name, total)
        if not self.skips_batch:
            self.examples += batch.examples
            self._note(clipped.norms, clipped.counts)

    def _clip(
        self, gradients: Gradients, scale: Scale, factor: Factor, clip_norm: float | Tensor
    ) -> tuple[ClipResult, bool]:
        """Return the clip weights, and whether every norm can be trusted."""
        squared, min_trusted_norm = _measured(gradients, scale)
        is_double = any(own.precision == torch.float64 for own in gradients.values())
        dtype = torch.float64 if is_double else torch.float32
        found = clip_weights(
            squared, min_trusted_norm, clip_norm=clip_norm, factor=factor, dtype=dtype, stability=self._stability
        )
        return found, min_trusted_norm is None

    def _remember_norm_methods(self, batch: PhysicalBatch) -> None:
        """Record the norm methods for `explain`, only once per set of shapes because describing them is slow."""
        kind = (self.scale is None, batch.examples, *(own.positions for own in batch.gradients.values()))
        if kind not in self._explained:
            if len(self._explained) == 16:
                self._explained.clear()
            self._explained[kind] = Explanation.of(batch.gradients, scaled=self.scale is not None)
        self._explanation = self._explained[kind]

    def bounds(self) -> Hashable:
        """A value that changes whenever the clip norm or the scale changes."""
        if isinstance(self.scale, ComputedScale):
            return self.clip_norm, self.scale.identity
        scale = None if self.scale is None else tuple((s.data_ptr(), s._version) for s in self.scale.values())
        return self.clip_norm, scale

    def copy_sums(self) -> None:
        """Copy what is summed so far, because a graph is about to overwrite its memory."""
        self._sums.copy()

    def clip_and_sum_into(
        self, into: FlatTensors, batch: PhysicalBatch, scale: Scale, clip_norm: float | Tensor
    ) -> ClipResult:
        """Clip and sum a batch into `into`, for `add_sums`, without waiting for the device, so a graph can capture it.

        The losses must have been summed, not averaged. Examples whose norms cannot be trusted are left out.
        """
        found, _ = self._clip(batch.gradients, scale, 1, clip_norm)
        self._remember_norm_methods(batch)
        sums = _Accumulator(self._empty, into)
        _sum(batch.gradients, found.weights, sums, None)
        sums.taken()
        return found

    def add_sums(
        self,
        of_batch: FlatTensors,
        found: ClipResult,
        examples: int,
        explanation: Explanation,
        again: Callable[[list[int]], None],
    ) -> None:
        """Add what `clip_and_sum_into` computed for a batch in which `examples` rows count.

        Large models keep it without a copy if it is the first. It leaves out examples that need recomputing.
        `again(rows)` differentiates the batch once more without a graph and adds these rows with `clip_and_sum_rows`.
        `rows` are the model's row numbers. The host reads them only when the next such batch is added or the sums are
        taken, so it can prepare a batch while the device is busy.
        """
        rows_to_recompute = _rows_to_recompute(found, found.needs_recompute.clone())
        self._settle()
        self._sums.add_all(of_batch, keep=self.saves_memory)
        self.examples += examples
        self._explanation = explanation
        counts = found.counts.clone()
        padding_is_nonfinite = ((found.weights == 0) & ~found.needs_recompute)[examples:]
        counts[1] -= padding_is_nonfinite.sum()
        self._note(found.norms, counts, examples)  # a loss may reorder its rows, so all of them are counted

        def settle() -> None:
            if rows := rows_to_recompute():
                again(rows)

        self._unsettled = settle

    def _settle(self) -> None:
        """Recompute what the last captured batch left out; if that fails, the caller drops the sums."""
        settle, self._unsettled = self._unsettled, None
        if settle is not None:
            settle()

    def clip_and_sum_rows(self, of: Gradients, rows: list[int], factor: Factor, clip_norm: float) -> None:
        """Clip examples whose positions nearly cancel, one by one: the measured vector is the summed one."""
        for j in rows:
            own_factor = factor[j] if isinstance(factor, Tensor) else factor
            own = {name: gradients.example(j) for name, gradients in of.items()}
            scaled = own if self.scale is None else {name: g * self.scale[name] for name, g in own.items()}
            squared = torch.stack([g.double().square().sum() for g in scaled.values()]).sum(0, keepdim=True)
            found = clip_weights(
                squared, None, clip_norm=clip_norm, factor=own_factor, dtype=torch.float64, stability=self._stability
            )
            found.counts[0] = 0  # clipping was counted with its batch
            self._outcomes.append(found.counts)
            alone = {name: ParameterGradients(g.shape, g.dtype, dense=g[None]) for name, g in own.items()}
            _sum(alone, found.weights, self._sums, self._square_sums)


def _measured(gradients: Gradients, scale: Scale) -> tuple[Tensor, Tensor | None]:
    """Squared norms over all parameters, and the smallest norms that can be trusted (None: all can)."""
    dense = {name: own.dense for name, own in gradients.items() if own.dense is not None and own.is_dense}
    squared: list[Tensor] = []
    min_trusted_norms: list[Tensor] = []
    read = None if scale is None else scale.reader() if isinstance(scale, ComputedScale) else scale.__getitem__
    if dense:
        scales = None if scale is None else [scale[name].to(gradients[name].precision) for name in dense]
        squared.append(norms.many_squares(list(dense.values()), scales))
    for name, own in gradients.items():
        if name in dense:
            continue
        more, trusted = own.measured(None if read is None else read(name).to(own.precision))
        squared.append(more)
        if trusted is not None:
            min_trusted_norms.append(trusted)
    total = torch.stack(squared).sum(0)
    if not min_trusted_norms:
        return total, None
    # Errors of the parameters add up as their gradients do. They may make a square negative, but not NaN.
    return total.clamp_(min=0), torch.linalg.vector_norm(torch.stack(min_trusted_norms), dim=0)


def _total(own: ParameterGradients, weights: Tensor, *, squared: bool) -> Tensor:
    """Return Σ_j weights[j]·g_j of a parameter, or the sum of the squares of the summands."""
    return (own.weighted_square_sum if squared else own.weighted_sum)(weights.to(own.precision))


def _sum(gradients: Gradients, weights: Tensor, sums: _Accumulator, square_sums: _Accumulator | None) -> None:
    """Add Σ_j weights[j]·g_j to `sums`, and the squares of the summands to `square_sums`; remove factors when added."""
    dense = {name: own.dense for name, own in gradients.items() if own.dense is not None and own.is_dense}
    for name in [name for name in gradients if name not in dense]:
        own = gradients.pop(name)
        sums.add_sum(name, own, weights.to(own.precision))
        if square_sums is not None:
            square_sums.add(name, own.weighted_square_sum(weights.to(own.precision)))
    sums.add_dense(dense, weights)  # last, because it allocates all sums
    if square_sums is not None:
        square_sums.add_dense(dense, weights, squared=True)


def _rows_to_recompute(found: ClipResult, needs_recompute: Tensor) -> Callable[[], list[int]]:
    """Return a function that gives the rows where `needs_recompute` is true; only calling it waits for the device."""
    is_cuda = found.counts.is_cuda
    number = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=is_cuda)
    number.copy_(found.counts[2], non_blocking=is_cuda)
    copied = torch.cuda.Event() if is_cuda else None
    if copied is not None:
        copied.record(torch.cuda.current_stream(found.counts.device))

    def rows() -> list[int]:
        if copied is not None:
            copied.synchronize()
        return torch.nonzero(needs_recompute).flatten().tolist() if number else []

    return rows


class _Accumulator:
    """Sums by parameter in flat storage; parameters that received nothing are 0 when the sums are taken."""

    def __init__(self, empty: FlatTensors, sums: FlatTensors | None = None) -> None:
        self._empty = empty
        self._sums = sums  # storage; existing contents are overwritten
        self._begun: set[str] = set()

    def _target(self, name: str) -> Tensor:
        if self._sums is None:
            self._sums = self._empty.unallocated()
        return self._sums[name]

    def add(self, name: str, value: Tensor) -> None:
        total = self._target(name)
        if name in self._begun:
            total += value
        else:
            total.copy_(value)
            self._begun.add(name)

    def add_sum(self, name: str, gradients: ParameterGradients, weights: Tensor) -> None:
        """Add Σ_j weights[j]·g_j; the first sum is computed in place."""
        total = self._target(name)
        if name in self._begun or total.dtype != weights.dtype:
            self.add(name, gradients.weighted_sum(weights))
        else:
            gradients.weighted_sum_into(total, weights)
            self._begun.add(name)

    def add_dense(self, gradients: Mapping[str, Tensor], weights: Tensor, *, squared: bool = False) -> None:
        """Add Σ_j weights[j]·gradients[name][j] for all names, or the squares of the summands."""
        kinds: dict[tuple[bool, torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
        for name, grads in gradients.items():
            total = self._target(name)
            same = kinds.setdefault((name in self._begun, total.dtype, total.device), ([], []))
            same[0].append(grads)
            same[1].append(total)
        for (begun, dtype, _), (several, totals) in kinds.items():
            norms.many_weighted_sums(several, weights.to(dtype), totals, add=begun, squared=squared)
        self._begun.update(gradients)

    def copy(self) -> None:
        """Move the sums to new memory."""
        if self._sums is not None:
            self._sums = self._sums.mapped(torch.clone)

    def add_all(self, sums: FlatTensors, *, keep: bool) -> None:
        """Add these sums of all parameters: with `keep`, the first ones are not copied."""
        if self._sums is None:
            self._sums = sums if keep else sums.mapped(torch.clone)
        else:
            for total, more in zip(self.taken().vectors, sums.vectors, strict=True):
                total += more
        self._begun.update(sums)

    def taken(self) -> FlatTensors:
        sums = self._empty.unallocated() if self._sums is None else self._sums
        for name in sums.keys() - self._begun:
            sums[name].zero_()
        return sums
