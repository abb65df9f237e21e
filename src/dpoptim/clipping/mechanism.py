"""The private mechanism: the only place that adds noise to clipped sums, and the only way out of this package.

Step t releases (1/B)·(Σ_j c_j g_j + std·(C⁻¹z)_t / s_t). The plan gives std, the plan's strategy and the key give C⁻¹z,
and s_t depends on earlier releases. A second moment has a separate noise stream, with its own strategy if the plan has
one. An adaptive clip norm multiplies std by `clip_factor`, and the count that it follows is released with the gradient.

Guarantee: The sequence of releases satisfies `plan.epsilon(delta=...)` as stated by `plan.statement()`, if batches are
drawn as the plan says, the key is secret, and `scale` is a function of released values alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dpoptim.arguments import check_number, check_whole
from dpoptim.clipping.clipped_sums import ClippedSums, ClippingCounts
from dpoptim.data import batch_handshake
from dpoptim.data.processes import Processes
from dpoptim.data.shards import Shards
from dpoptim.kernels.flat import FlatTensors, flatten, group_parameters
from dpoptim.kernels.inverse_root import ComputedScale, uncomputed
from dpoptim.kernels.norm_methods import Explanation
from dpoptim.kernels.norms import wide_dtype
from dpoptim.noise import NoiseKey, NoiseMemory, NoiseStream, Strategy, TensorPart, saved_strategy, strategy_state
from dpoptim.privacy import (
    AdaptiveClipNorm,
    IndependentMoments,
    JointMoments,
    NoiselessSquare,
    PrivacyPlan,
    Release,
)
from dpoptim.privacy.step_ledger import checksums, strategy_digest


@dataclass(frozen=True)
class Released:
    """What one step releases, by parameter name."""

    step: int
    gradient: Mapping[str, Tensor]  # the noisy average gradient
    square: Mapping[str, Tensor] | None  # noisy, except under NoiselessSquare, which is not private
    noise_variance: float  # on one coordinate of `gradient`, at scale 1; public
    clip_factor: float = 1.0  # the step's clip norm over the plan's; public


class PrivateMechanism:
    """Turns the backwards of a logical batch into one release."""

    def __init__(
        self,
        model: nn.Module,
        plan: PrivacyPlan,
        release: Release,
        *,
        key: NoiseKey | None = None,
        run_id: str | None = None,
        mean_loss: bool = False,
        external_batches: bool = False,
        noise_memory: NoiseMemory = NoiseMemory(),  # noqa: B008
        clipping_memory: int = 1 << 26,
        allow_mixing: str | None = None,
    ) -> None:
        if isinstance(plan.release, NoiselessSquare) != isinstance(release, NoiselessSquare):
            raise ValueError(
                f"the plan has {plan.release} and the optimizer {release}. Squares without noise are not private, so "
                "both must request them (plan.with_release(dpoptim.NoiselessSquare())), or neither"
            )
        if plan.unit == "user" and external_batches:
            raise ValueError("external_batches=True cannot show whose records are whose. Use private_loader(users=...)")
        if not isinstance(noise_memory, NoiseMemory):
            raise ValueError(f"noise_memory must be a NoiseMemory such as NoiseMemory(bits=16), got {noise_memory!r}")
        clipping_memory = check_whole("clipping_memory", clipping_memory, low=0)
        self.processes = Processes.current()
        self.shards = Shards.of(model, self.processes)
        self._drawn_for = plan  # the object that a private_loader may be bound to
        self.plan = plan if plan.release == release else plan.with_release(release)
        if allow_mixing is not None:
            self.plan = self.plan.replace(allow_mixing=allow_mixing)
            line = "allow_mixing: the guarantee does not cover mixed examples. Publish optimizer.plan.statement()"
            warnings.warn(line, stacklevel=2)
        self.key, run_id = self.processes.shared_run("optimizer", key, run_id)
        self.step = 0
        self.noise_memory = noise_memory
        strategies = {"gradient": self.plan.strategy}
        if self.plan.noise_stddevs().square:
            strategies["square"] = self.plan.square_strategy
        self._set_strategies(strategies)
        averages_squares = isinstance(release, JointMoments) or getattr(release, "squares", None) == "average_of"
        self._sums = ClippedSums(
            model,
            clip_norm=plan.clip_norm,
            squares=averages_squares,
            mean_loss=mean_loss,
            extra_memory=clipping_memory,
            allow_mixing=self.plan.allow_mixing is not None,
            shards=self.shards,
            by_user=plan.unit == "user",
            rule=self.plan.clipping,
            in_double=self.plan.exact_noise and self.plan.is_private,
        )
        self._set_clip_factor(1.0)
        self._sums.engine.attach()
        self._own_processes = f"{self.processes.count}{'' if self.shards is None else ' with sharded parameters'}"
        self._last_processes = self._own_processes  # that took the last step; others round sums differently
        self.before_step: Callable[[int, bytes], None] | None = None
        """Called before noise is added, with the step and the `_content` of the release."""
        # Batches and their tickets from a private_loader:
        self._external_batches = external_batches
        # Refuse batches that no private_loader drew:
        self.needs_loader = self.processes.count > 1 or plan.unit == "user"
        self.loader_key_fingerprint: str | None = None
        self.part_limit: tuple[str, int] | None = None  # the loader's setting that bounds a physical batch
        self._has_loader = self._batch_is_open = False
        self._at_last_ticket = 0  # examples counted up to then
        self._at_last_release = 0
        # Warnings that are given once:
        self._warned = False
        self._nonfinite_reported = False
        self._begin_run(run_id)
        own = {"the plan": self.plan.to_dict(), "the noise strategy": self.strategy_digest, "run_id": self.run_id}
        self.processes.begin(model, {**own, "the noise key": self.key.fingerprint()})
        batch_handshake.bind(plan, self)

    def _set_strategies(self, strategies: dict[str, Strategy]) -> None:
        """Set the strategy of each noise stream; plan and column norm give the noise level."""
        self._strategies = strategies
        stddevs = self.plan.noise_stddevs()
        self._stddevs = {"gradient": stddevs.gradient_sum, "square": stddevs.square or 0.0}
        for stream, strategy in strategies.items():
            self._stddevs[stream] *= strategy.column_norm
        self._row_norms = strategies["gradient"].row_norms()
        self.strategy_digest = strategy_digest(strategies, self.noise_memory.bits)  # for the step ledger

    def _begin_run(self, run_id: str) -> None:
        """Start the noise streams. Noise depends on key, run_id, step, parameter and element: runs never share it."""
        self.run_id = run_id
        exact = self.plan.exact_noise and self.plan.is_private
        key, parameters = self.key.for_run(run_id), self._sums.parameters
        start = self.shards.start if self.shards is not None else lambda name: 0
        self._run_fingerprint = key.fingerprint()
        # One stream for all parameters of a vector; each parameter gets the noise it would get alone.
        self._noise: dict[str, list[NoiseStream]] = {stream: [] for stream in self._strategies}
        for stream, strategy in self._strategies.items():
            for names in group_parameters(parameters):
                parts = [TensorPart(name=n, numel=parameters[n].numel(), start=start(n)) for n in names]
                first = parameters[names[0]]
                kind: dict[str, Any] = {"dtype": wide_dtype(first.dtype), "device": first.device, "exact": exact}
                rows = strategy.stream(key, parts, stream=stream, memory=self.noise_memory, **kind)
                self._noise[stream].append(rows)
        self._count_noise: NoiseStream | None = None
        if isinstance(self.plan.clipping, AdaptiveClipNorm):
            part = [TensorPart(name="count", numel=1)]
            kind = {"dtype": torch.float64, "exact": exact}
            self._count_noise = self._strategies["gradient"].stream(key, part, stream="count", **kind)

    @property
    def noise_memory_bytes(self) -> int:
        """Memory that the noise streams use between steps."""
        return sum(rows.memory_bytes for streams in self._noise.values() for rows in streams)

    def state(self) -> dict[str, Any]:
        """Return the progress of the run, as plain values without secrets, for `resume`."""
        return {
            "run_id": self.run_id,
            "step": self.step,
            "clip_factor": self.clip_factor,
            "processes": self._last_processes,
            "loader_key_fingerprint": self.loader_key_fingerprint,
            "noise_bits": self.noise_memory.bits,
            "strategies": {stream: strategy_state(strategy) for stream, strategy in self._strategies.items()},
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue the run of a `state`, and drop what has been accumulated."""
        run_id, step = state["run_id"], check_whole("step", state["step"], low=0)
        check_number("clip_factor", state["clip_factor"], above=0.0)
        if self.step > 0 and (run_id != self.run_id or step < self.step):
            which = "belongs to a different run" if run_id != self.run_id else f"is before step {self.step}"
            raise ValueError(
                f"step={step} of the state {which}, but this optimizer has already released {self.step} steps. Create "
                "a new model and optimizer to resume a run"
            )
        if state["noise_bits"] != self.noise_memory.bits:
            bits = self.noise_memory.bits
            raise ValueError(
                f"noise_memory has bits={bits}, but the run started with bits={state['noise_bits']}; use that"
            )
        # Strategies come from the state, because a search may round differently on a different machine.
        strategies = {
            stream: saved_strategy(state["strategies"][stream], like=own) for stream, own in self._strategies.items()
        }
        for stream, own in self._strategies.items():
            saved, ratio = strategies[stream], self.plan.sensitivity_ratio
            if saved != own and ratio(saved) > (1 + 1e-6) * ratio(own):
                raise ValueError(f"the state's {stream} strategy has a larger sensitivity than the plan accounts for")
        self._drop(everything=True)
        self._has_loader = False
        batch_handshake.bind(self._drawn_for, self)
        self.step = step
        self._set_clip_factor(float(state["clip_factor"]))
        self._set_strategies(strategies)
        self._begin_run(run_id)
        self.loader_key_fingerprint = state["loader_key_fingerprint"]
        self._last_processes = str(state["processes"])

    @property
    def counts_not_private(self) -> ClippingCounts:
        """Number of examples, clipped and non-finite, since the start. NOT private: for debugging only."""
        return self._sums.counts

    @property
    def scale(self) -> Mapping[str, Tensor] | None:
        """The scale s_t of the next step by parameter, or None; it must be a function of released values alone."""
        return self._sums.scale

    @scale.setter
    def scale(self, scale: Mapping[str, Tensor] | None) -> None:
        if scale is not None and isinstance(self.plan.release, IndependentMoments | JointMoments):
            raise ValueError(f"scale: {self.plan.release} has no proof for scaled clipping. Use the Flat() geometry")
        self._sums.scale = scale

    def explain(self) -> Explanation:
        """Describe how the norms of the last physical batch were computed, from shapes alone."""
        return self._sums.explain()

    def detach(self) -> None:
        self._sums.engine.detach()

    def close_physical_batch(self) -> bool:
        """Close the physical batch; return whether it completes a logical batch."""
        self._check_ready()
        ticket = None if self._external_batches else batch_handshake.take(self._drawn_for, self)
        if ticket is not None:
            self._begin_ticket(ticket)
        elif not self._external_batches:
            self._check_without_ticket()
        try:
            self._sums.engine.flush()
        except BaseException:  # the rest of the batch is refused
            self._drop(everything=True)
            raise
        self._sums.rows_of_users = None
        examples = self._sums.examples
        arrived, self._at_last_ticket = examples - self._at_last_ticket, examples
        if ticket is None:
            return True
        if ticket.step != self.step:
            self._refuse_batch(
                f"the loader is at step {ticket.step} and the optimizer at step {self.step}. Call step() once per "
                f"batch, or create the loader with its own key, run_id and start_step={self.step}"
            )
        if arrived != (0 if ticket.is_placeholder else ticket.physical_examples):
            self._refuse_batch(
                "the number of differentiated examples is not the (secret) size of the batch. Run one model call, one "
                "backward and one step() per batch; to save memory, set private_loader(micro_batch_size=...)"
            )
        self._batch_is_open = not ticket.closes_batch
        return ticket.closes_batch

    def _begin_ticket(self, ticket: batch_handshake.Ticket) -> None:
        """Refuse a second sampling key, which would draw examples more often than planned; drop what does not count."""
        self._has_loader = True
        if ticket.processes != self.processes:
            self._refuse_batch("torch.distributed was started between loader and optimizer. Start it before both")
        if self.loader_key_fingerprint not in (None, ticket.key_fingerprint):
            self._refuse_batch(
                "the batches are drawn with a key or run_id that is not the run's. Load the state_dict of the run's "
                "loader, or pass its private_loader(key=..., run_id=...)"
            )
        self.loader_key_fingerprint, self.part_limit = ticket.key_fingerprint, ticket.part_limit
        if not ticket.opens_batch and not self._batch_is_open:
            self._refuse_batch(
                "an earlier part of this batch failed, so the rest is refused. Create the loader again, with its own "
                f"key and run_id, and start_step={self.step}"
            )
        self._sums.skips_batch, self._sums.rows_of_users = ticket.is_placeholder, ticket.rows_of_users
        if ticket.is_placeholder and self.shards is not None and not self._sums.engine.batch.is_open:
            self._refuse_batch("a batch was not differentiated, and other processes wait. Run one backward per batch")
        if ticket.is_placeholder and self.shards is None:
            if ticket.opens_batch:
                self._drop(everything=True)
            self._sums.engine.discard()
        elif ticket.opens_batch and self._batch_is_open:  # the loop abandoned a logical batch
            if self._sums.examples > self._at_last_ticket:
                self._refuse_batch("a batch was abandoned for a new one. Call step() once per batch of the loader")
            self._drop(everything=False)

    def _check_without_ticket(self) -> None:
        """Refuse or warn about a step without a batch of a private_loader."""
        if self._has_loader:
            self._refuse_batch("step() was called twice for one batch of the loader. Call it once per batch")
        if batch_handshake.pending_elsewhere(self._drawn_for):
            self._refuse_batch("the private_loader has a different plan object. Give both the same (calibrated) plan")
        if self.needs_loader:
            self._refuse_batch("the batch was not drawn by this optimizer's private loader. Loop over that loader")
        if not self._warned:
            self._warned = True
            warnings.warn(
                "no private_loader with this plan feeds this optimizer. Loop over private_loader(dataset, plan), "
                f"or pass external_batches=True if your batches are drawn as the plan says ({self.plan.sampling})",
                stacklevel=6,
            )

    def _drop(self, *, everything: bool) -> None:
        """Drop the sums, and with `everything` the open physical batch too."""
        if everything:
            self._sums.engine.discard()
        self._sums.clear_sums()
        self._batch_is_open = False
        self._at_last_release = self._at_last_ticket = self._sums.examples

    def _refuse_batch(self, why: str) -> NoReturn:
        self._drop(everything=True)
        raise ValueError(why)

    def _check_ready(self) -> None:
        if not self._sums.engine.attached:
            raise ValueError("the optimizer was detached or replaced. Create only one optimizer per model")
        if Processes.current() != self.processes:
            raise ValueError("torch.distributed was started after the optimizer was created. Start it first")
        if self.step >= self.plan.steps:
            raise ValueError(f"all {self.plan.steps} steps of the plan have been released. Calibrate a longer plan")

    def privatize(self) -> Released:
        """Add noise to the sums of the batch, release them, and empty the accumulators."""
        self._check_ready()
        self._sums.engine.flush()
        device, own = next(iter(self._sums.parameters.values())).device, self._sums.examples - self._at_last_release
        common = [self.step, int(self._run_fingerprint[:15], 16), self._scale_code()]
        examples = self.processes.total(own, common, device)
        if examples is None:
            self._refuse_batch("the processes differ in step, run or scale. Load the same state_dict in all of them")
        most = self.plan.sampling.largest_batch(batch_size=self.plan.batch_size)
        if examples > most:
            self._refuse_batch(f"a batch of {examples} examples arrived where the plan's sampling draws at most {most}")
        try:
            clipped = self._sums.clipped_examples()
            sums, square_sums = self._sums.take()
        finally:  # sums that could not be taken are dropped
            self._at_last_release = self._sums.examples
        if self.shards is None:
            self.processes.add_up([*sums.vectors, *(square_sums.vectors if square_sums is not None else ())])
        if self._sums.is_adaptive:
            self.processes.add_up([clipped])
        self._report_nonfinite()
        squares_the_average = isinstance(self.plan.release, IndependentMoments) and square_sums is None
        bound = self._bounding_factor(sums) if squares_the_average else None
        content = None if self.shards is None else self._content(sums, square_sums, bound, clipped)

        def record() -> None:
            if self.before_step is not None:
                self.before_step(self.step, content or self._content(sums, square_sums, bound, clipped))
            elif (last := self._last_processes) != (now := self._own_processes):
                raise ValueError(f"Expected processes={last}, got {now}. To change them, use the run's step ledger")

        self.processes.only_first(record, device)
        square = self._square(sums, square_sums, bound)  # before noise is added to the sums, in place
        self._add_noise("gradient", sums, self.scale, self.plan.batch_size)
        factor = self.clip_factor
        stddev = self._stddevs["gradient"] * factor * float(self._row_norms[self.step]) / self.plan.batch_size
        square, found = None if square is None else square.rounded(), sums.rounded()
        released = Released(self.step, gradient=found, square=square, noise_variance=stddev**2, clip_factor=factor)
        next_factor = self._next_clip_factor(clipped)
        self.step += 1  # before anything of the release can be seen
        self._last_processes = self._own_processes
        if next_factor is not None:
            self._set_clip_factor(next_factor)
        return released

    def _next_clip_factor(self, clipped: Tensor) -> float | None:
        """If the clip norm is adaptive, release the noisy share of clipped examples; return the factor it leads to."""
        rule = self.plan.clipping
        if not isinstance(rule, AdaptiveClipNorm) or self._count_noise is None:
            return None
        weight = rule.count_weight * self.plan.clip_norm
        share = torch.tensor([weight * float(clipped)], dtype=torch.float64)
        divisor = weight * self.plan.batch_size
        self._count_noise.add_to(share, self.step, stddev=self._stddevs["gradient"], scale=None, divisor=divisor)
        noise = self._stddevs["gradient"] * float(self._row_norms[self.step]) / divisor
        return rule.next_factor(self.clip_factor, float(share), noise)

    @property
    def clip_factor(self) -> float:
        """The next step's clip norm over the plan's: 1, unless it is adaptive. A function of released values."""
        return self._clip_factor

    def _set_clip_factor(self, factor: float) -> None:
        self._clip_factor, self._sums.clip_norm = factor, self.plan.clip_norm * factor

    def _content(
        self, sums: FlatTensors, square_sums: FlatTensors | None, bound: float | None, clipped: Tensor
    ) -> bytes:
        """Describe a release before its noise. NOT private: store only a keyed digest."""
        vectors = [*sums.vectors, *(square_sums.vectors if square_sums is not None else ()), clipped.view(1)]
        own, settings = self._describe_scale(sums.names)
        levels = sorted(self._stddevs.items())
        header = f"{self.run_id} {self.strategy_digest} {levels} {bound!r} {settings} {self.clip_factor!r} "
        content = header.encode() + checksums([*vectors, *own])
        return content if self.shards is None else b"".join(self.processes.gathered(content))

    def _describe_scale(self, groups: list[list[str]]) -> tuple[list[Tensor], list[object]]:
        """Return vectors and values that decide the scale."""
        scale = self.scale
        if isinstance(scale, ComputedScale):  # a function of these moments, names and settings
            moments = [whole.moment for whole in scale.wholes]
            return moments, [list(scale), *(whole.settings for whole in scale.wholes)]
        if scale is None:
            return [], []
        dtypes = [wide_dtype(self._sums.parameters[names[0]].dtype) for names in groups]
        found = zip(groups, dtypes, strict=True)
        return [flatten([scale[name] for name in names], dtype) for names, dtype in found], []

    def _scale_code(self) -> int:
        """Return a number that tells processes with different scales apart: each clips by its own scale."""
        if self.processes.count == 1:
            return 0
        vectors, settings = self._describe_scale(group_parameters(self._sums.parameters))
        vectors = vectors if self.shards is None else []  # each process has its own rows of one scale
        known = repr((self.clip_factor, settings)).encode()
        digest = blake2b(known + checksums(vectors), digest_size=7).digest()
        return int.from_bytes(digest, "little")

    def _report_nonfinite(self) -> None:
        """Warn once about non-finite gradients if the plan has no noise; otherwise their existence is private."""
        # Counting waits for an accelerator, so this happens only every 64 steps there.
        waits = any(parameter.device.type != "cpu" for parameter in self._sums.parameters.values())
        if self.plan.is_private or (waits and self.step % 64 and self.step < self.plan.steps - 1):
            return
        if self._nonfinite_reported or not self._sums.counts.nonfinite:
            return
        self._nonfinite_reported = True
        line = "an example's gradient was not finite and was left out; counts_not_private counts such examples"
        warnings.warn(line, RuntimeWarning, stacklevel=7)

    def _square(self, sums: FlatTensors, square_sums: FlatTensors | None, bound: float | None) -> FlatTensors | None:
        batch_size = self.plan.batch_size
        match self.plan.release:
            case IndependentMoments() | JointMoments() if square_sums is not None:
                squares = square_sums.mapped(lambda total: total / batch_size)
            case IndependentMoments():
                assert bound is not None  # `privatize` computes it for squared sums
                averaged = bound / batch_size
                squares = sums.mapped(lambda total: (total * averaged).square())
            case NoiselessSquare():
                return sums.mapped(lambda total: (total / batch_size).square())
            case _:
                return None
        self._add_noise("square", squares, None, 1)
        return squares

    def _bounding_factor(self, sums: FlatTensors) -> float:
        """Return the factor that bounds the averaged gradient by clip_norm; a large batch may exceed it."""
        norms = [torch.linalg.vector_norm(vector, dtype=torch.float64) for vector in sums.vectors]
        squared = torch.stack([norm.cpu() for norm in norms]).square().sum()
        if self.shards is not None:
            squared = torch.stack(self.processes.gathered(squared)).sum()
        norm = float(squared.sqrt()) / self.plan.batch_size
        return min(1.0, self.plan.clip_norm / norm) if norm > 0 else 1.0

    def _add_noise(self, stream: str, to: FlatTensors, scale: Mapping[str, Tensor] | None, divisor: float) -> None:
        """Add stddev·(this step's noise) / scale to `to` and divide by `divisor`, in place."""
        stddev = self._stddevs[stream] * self.clip_factor
        if stddev == 0:
            for vector in to.vectors:
                vector /= divisor
            return
        for names, vector, rows in zip(to.names, to.vectors, self._noise[stream], strict=True):
            divided_by = None if scale is None else uncomputed(scale, names)
            rows.add_to(vector, self.step, stddev=stddev, scale=divided_by, divisor=divisor)
