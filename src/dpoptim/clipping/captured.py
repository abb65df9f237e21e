"""Run the private part of a step as one CUDA graph: forward, backward, norms and clipped sums.

If a batch is small, the GPU waits for the host to launch several hundred operations. A graph launches them all at once,
for one shape. The first batch of a shape runs with every check, the second is captured, and later ones are replayed.
All of them run the same operations on the same padded rows, so a resumed run repeats its sums, with or without graphs.

A replay runs no Python, so it repeats every decision that Python made during the capture. A graph is used only if
parameters and buffers are at the same addresses, modules are in the same modes, the clip norm is the same, and a
scale is set if and only if one was set during the capture.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpoptim.arguments import check_whole
from dpoptim.clipping.clipped_sums import ClippedSums
from dpoptim.clipping.engine import PhysicalBatch
from dpoptim.clipping.mechanism import PrivateMechanism
from dpoptim.data.batch_arguments import BatchArguments, padded_rows, read_arguments
from dpoptim.data.secret_randomness import host_generators, save_rng_states
from dpoptim.kernels import choose
from dpoptim.kernels.clip_weights import ClipResult
from dpoptim.kernels.flat import FlatTensors, flatten
from dpoptim.kernels.graphs import GraphMemory, Results, graph_of
from dpoptim.kernels.inverse_root import ComputedScale
from dpoptim.kernels.norm_methods import Explanation
from dpoptim.validation.temporary_changes import no_masks_from_values

MAX_GRAPHS = 64  # more shapes are not captured: each graph takes memory and a fraction of a second


class Captured:
    """Differentiates batches by replaying CUDA graphs where possible; `optimizer.captured` creates it.

    Batches run without a graph on a CPU, without Triton, if the plan protects users, clips groups or has exact noise,
    if sums of squares are released too, if the arguments hold numbers, strings or objects, under an autocast that began
    outside `losses`, or if the model or `losses` waits for the device or draws random numbers on the host. With a large
    model, they also run without a graph while something outside still holds the gradient of the last step, because a
    graph would overwrite it.

    Guarantee: Every batch adds the same clipped sum as `losses(...).sum().backward()`, up to rounding, if each loss
    depends on its example alone. Modes and everything else that `losses` reads must stay the same until the next batch
    or step, because some examples may be recomputed then. Padding rows copy the first row, and their losses do not
    count.
    """

    def __init__(
        self, mechanism: PrivateMechanism, losses: Callable[..., Tensor], *, pad_to_multiple: int | None = None
    ) -> None:
        if pad_to_multiple is not None:
            check_whole("pad_to_multiple", pad_to_multiple)
        self._losses, self._pad_to_multiple = losses, pad_to_multiple
        self._sums: ClippedSums = mechanism._sums
        self._engine = self._sums.engine
        self._workspace: _GraphWorkspace  # set by `_check_addresses`
        self._addresses: list[Hashable] | None = None
        self._shapes: dict[Hashable, _Shape] = {}
        self._has_warned = False
        self._last_stream: object = None

    @property
    def graphs(self) -> int:
        """How many shapes run as graphs."""
        return sum(shape.graph is not None for shape in self._shapes.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Differentiate a batch and return its losses, [examples]; call `optimizer.step()` next.

        Tensors among the arguments have the examples on their first axis and are moved to the model's device.
        """
        if not self._engine.attached:
            raise ValueError("the optimizer was detached or replaced; call optimizer.captured again")
        if not self._engine.recording:
            raise ValueError("inside no_grad() or public_data(), call the model, not a captured function")
        self._follow_stream()
        self._engine.flush()  # adds the last replay before it is overwritten
        devices = list(dict.fromkeys(parameter.device for parameter in self._sums.parameters.values()))
        batch = read_arguments(self._losses, args, kwargs, devices[0])
        is_sharded = self._sums.shards is not None
        is_plain = is_sharded or self._sums.by_user or self._sums.with_squares or len(self._sums.groups) > 1
        if is_plain or self._sums.in_double or batch.examples == 0 or not _can_capture(devices):
            return self._run(batch)
        if not all(other is None or isinstance(other, bool) for other in batch.others.values()):  # others may vary
            self._warn_once("batches run without graphs: pass only tensors, True, False and None")
            return self._run(batch)
        self._check_addresses()
        self._workspace.drop_sums()
        self._workspace.copy_scale()
        rows = padded_rows(batch.examples, self._pad_to_multiple)
        shape = self._shape_of((rows, batch.key, self._conditions()), batch, rows)
        return self._differentiate(shape, batch) if shape.runs_once else self._run(batch)

    def _shape_of(self, key: Hashable, batch: BatchArguments, rows: int) -> _Shape:
        """Return the shape of a batch, with a graph from its second batch on."""
        shape = self._shapes.get(key)
        if shape is None:
            shape = _Shape(self._sums, batch.padded(rows), self._workspace)
            if len(self._shapes) < MAX_GRAPHS:
                self._shapes[key] = shape
            else:
                self._warn_once(
                    f"batches have more than {MAX_GRAPHS} shapes, and later shapes run without graphs. Pad them to "
                    "fewer (dpoptim.pad_to_bucket), or pass captured(pad_to_multiple=...)"
                )
        elif shape.has_run and shape.graph is None and shape.can_be_captured:
            try:
                shape.capture()
            except Exception as error:  # nothing was added yet, and the run without a graph raises the real error
                shape.can_be_captured = False
                self._warn_about_capture(type(error).__name__)
        return shape

    def _warn_about_capture(self, reason: str) -> None:
        self._warn_once(
            f"a batch could not be captured ({reason}) and runs without a graph. The model must run once, on all "
            "rows, and neither model nor losses may wait for the device (.item(), print)"
        )

    def _run(self, batch: BatchArguments) -> Tensor:
        """Run without a graph and without padding."""
        losses = batch.losses()
        (losses.mean() if self._sums.mean_loss else losses.sum()).backward()
        return losses.detach()

    def _follow_stream(self) -> None:
        """Wait for the previous stream if the loop changed streams, since nothing orders the two."""
        if not torch.cuda.is_initialized():
            return
        stream = torch.cuda.current_stream()
        if self._last_stream not in (None, stream):
            torch.cuda.synchronize()
        self._last_stream = stream

    def _check_addresses(self) -> None:
        """Drop all graphs if a parameter or buffer has moved in memory or changed its dtype."""
        scale = self._sums.scale
        addresses: list[Hashable] = [
            (tensor.data_ptr(), tensor.dtype, tensor.requires_grad)
            for module in self._engine.modules  # model.parameters() takes 0.5 ms to find them
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        ]
        addresses.append(scale.layout if isinstance(scale, ComputedScale) else None)
        if addresses == self._addresses:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a graph may still be running
        self._addresses, self._workspace = addresses, _GraphWorkspace(self._sums)
        self._shapes.clear()

    def _conditions(self) -> Hashable:
        """Return what decides how a batch runs, besides its shape."""
        sums, modes = self._sums, tuple(module.training for module in self._engine.model.modules())
        clip_norm = None if sums.is_adaptive else sums.clip_norm  # graphs read an adaptive one
        return clip_norm, sums.scale is None, modes, torch.get_float32_matmul_precision()

    def _warn_once(self, line: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(line, RuntimeWarning, stacklevel=3)

    def _differentiate(self, shape: _Shape, batch: BatchArguments) -> Tensor:
        """Run a shape or replay its graph; the engine adds its sums when it closes the batch, like those of others."""
        bounds, draws = self._sums.bounds(), save_rng_states(host=shape.graph is None or batch.device.type == "cpu")
        # Held until the sums are added: otherwise a new scale at the same address would look unchanged.
        scale = self._sums.scale
        memory = self._workspace.memory
        shape.fill(batch)
        if memory.is_lent:
            self._sums.copy_sums()
        try:
            (shape.run if shape.graph is None or memory.is_lent else shape.replay)()
        except _RunsModelDifferently:
            shape.runs_once = False
            self._warn_about_capture("the model ran more than once, or not on all rows")
            return self._run(batch)
        losses = shape.losses[: batch.examples].clone()
        self._engine.buffers.begin(restart=True)
        add = partial(self._add, shape, batch, draws, bounds, scale)
        self._engine.batch.add_ready = add  # last, since a call that fails must not count
        return losses

    def _add(
        self, shape: _Shape, batch: BatchArguments, draws: Callable[[], None], bounds: Hashable, held_scale: object
    ) -> None:
        """Add the sums of a shape's run. The whole batch runs again if clip norm or scale changed in between."""
        self._check_context()
        self._follow_stream()
        if bounds == self._sums.bounds():
            again = partial(self._clip_rows_again, shape, batch, draws)
            self._sums.add_sums(self._workspace.take_sums(), shape.found, batch.examples, shape.explanation, again)
        else:
            with _repeating(draws), torch.enable_grad():
                self._run(batch)
            self._engine.flush()

    def _clip_rows_again(
        self, shape: _Shape, batch: BatchArguments, draws: Callable[[], None], rows: list[int]
    ) -> None:
        """Clip some rows one by one. The whole batch runs again as before, because `losses` may reorder its rows."""
        self._check_context()
        shape.fill(batch)
        with _repeating(draws), torch.enable_grad():
            shape.differentiate(
                lambda found: self._sums.clip_and_sum_rows(found.gradients, rows, 1, self._sums.clip_norm)
            )

    def _check_context(self) -> None:
        with torch.enable_grad():  # off while the engine closes a batch, so only public_data() matters here
            is_private = self._engine.attached and self._engine.recording
        if not is_private or torch._C._current_graph_task_id() != -1:
            raise ValueError("a captured batch is still open inside public_data() or another batch's backward")


class _GraphWorkspace:
    """Memory that all shapes share: they run one at a time, and each result is added before the next run."""

    def __init__(self, sums: ClippedSums) -> None:
        self._clipped = sums
        self._sums: FlatTensors | None = None  # of the last run, until they are added
        self._numbers: Tensor | None = None
        self._flat_scale: FlatTensors | None = None
        self.scale: Mapping[str, Tensor] | None = None
        device = next(iter(sums.parameters.values())).device
        self._clip_norm = torch.zeros((), dtype=torch.float64, device=device) if sums.is_adaptive else None
        self.memory = GraphMemory()
        self._shared_sums = None if sums.saves_memory else FlatTensors(sums.parameters)
        if self._shared_sums is not None:
            list(self._shared_sums.vectors)  # allocates them now, not while a graph is captured

    def new_sums(self) -> FlatTensors:
        """Return where a run writes its sums. Large models allocate them as the run frees memory."""
        self._sums = self._shared_sums or FlatTensors(self._clipped.parameters)
        return self._sums

    def borrow_sums(self, results: Results | None) -> None:
        """Use the sums of a graph's last run. The memory `is_lent` as long as something holds them."""
        vectors = iter(() if results is None else self.memory.lend(results))
        self._sums = self._shared_sums or FlatTensors(self._clipped.parameters, lambda numel: next(vectors))

    def take_sums(self) -> FlatTensors:
        """Return the sums of the last run, and forget them."""
        sums, self._sums = self._sums, None
        assert sums is not None
        return sums

    def drop_sums(self) -> None:
        """Forget the sums of a run that were not added."""
        self._sums = None

    @property
    def clip_norm(self) -> float | Tensor:
        """The clip norm: if it is adaptive, at the address that graphs read."""
        return self._clipped.clip_norm if self._clip_norm is None else self._clip_norm

    def copy_scale(self) -> None:
        """Copy clip norm and scale, or the numbers from which graphs compute it, to the addresses that graphs read."""
        if self._clip_norm is not None:
            self._clip_norm.fill_(self._clipped.clip_norm)
        self.scale = scale = self._clipped.scale
        if isinstance(scale, ComputedScale):
            numbers = scale.numbers()
            if self._numbers is None or self._numbers.shape != numbers.shape:
                self._numbers = torch.empty_like(numbers, device=scale.wholes[0].moment.device)
            self.scale = scale.reading(self._numbers.copy_(numbers, non_blocking=True))
        elif scale is not None:
            self.scale = self._flat_scale = self._flat_scale or FlatTensors(self._clipped.parameters)
            for names, vector in zip(self._flat_scale.names, self._flat_scale.vectors, strict=True):
                vector.copy_(flatten([scale[name] for name in names], vector.dtype))


class _RunsModelDifferently(ValueError):
    """The model does not run once on all rows, so it is unknown which of them are padding."""


class _Shape:
    """Batches of one shape: their inputs, what a run computes from them, and the graph of the run."""

    def __init__(self, sums: ClippedSums, batch: BatchArguments, workspace: _GraphWorkspace) -> None:
        self._sums, self._workspace = sums, workspace
        self.batch = batch  # its inputs
        self.real = torch.ones(batch.examples, dtype=torch.bool, device=batch.device)  # rows that count
        self.losses: Tensor
        self.found: ClipResult
        self.explanation: Explanation
        self.has_run = False
        self.runs_once = self.can_be_captured = True
        self.graph: Callable[[], None] | None = None
        self._results: Results | None = None  # of the graph, if it has its own sums
        self._tables: Any = None  # read by the graph's kernels

    def fill(self, batch: BatchArguments) -> None:
        """Overwrite the inputs with a batch and its padding."""
        self.batch.fill(batch)
        self.real[: batch.examples], self.real[batch.examples :] = True, False

    def capture(self) -> None:
        """Make a graph of `run`."""
        with choose.held_tables() as self._tables:
            self.graph = graph_of(self.run, self._workspace.memory)
        self._outputs = self.losses, self.found
        if self._sums.saves_memory:
            self._results = Results(self._workspace.take_sums().vectors, self.graph)

    def replay(self) -> None:
        """Do what `run` does, by the graph."""
        assert self.graph is not None
        self.graph()
        self.losses, self.found = self._outputs
        self._workspace.borrow_sums(self._results)

    def run(self) -> None:
        """Differentiate the inputs, and clip and sum them into the workspace; nothing here waits for the device."""

        def clip_and_sum(recorded: PhysicalBatch) -> None:
            workspace = self._workspace
            self.found = self._sums.clip_and_sum_into(
                workspace.new_sums(), recorded, workspace.scale, workspace.clip_norm
            )

        self._workspace.drop_sums()  # of the run before a capture
        is_first = not self.has_run and self.batch.device.type != "cpu"  # on a CPU, dropout itself draws on the host
        before = host_generators() if is_first else None
        self.losses = self.differentiate(clip_and_sum)
        self.explanation = self._sums.explain()
        if is_first and host_generators() != before:
            self.can_be_captured = False  # a graph would repeat the draws of the host, such as which layers to skip
        self.has_run = True

    def differentiate(self, use: Callable[[PhysicalBatch], None]) -> Tensor:
        """Differentiate the inputs, pass the one physical batch to `use`, and return the losses."""
        engine, seen = self._sums.engine, list[int]()

        def on_batch(recorded: PhysicalBatch) -> None:
            seen.append(recorded.examples)
            if seen != [self.batch.examples]:
                raise _RunsModelDifferently("a captured function must run the model once, on all examples")
            use(recorded)

        ordinary, engine.on_batch = engine.on_batch, on_batch
        try:
            with no_masks_from_values():
                losses = self.batch.losses()
                torch.where(self.real, losses, 0.0).sum().backward()
            engine.flush()
            if not seen:
                raise _RunsModelDifferently("a captured function must differentiate the model")
        except BaseException:  # interrupts too, since padding rows must never be released
            engine.discard()
            engine.end_step()
            raise
        finally:
            engine.on_batch = ordinary
        return losses.detach()  # autograd's nodes belong to this run's stream and must not outlive it


@contextlib.contextmanager
def _repeating(restore: Callable[[], None]) -> Iterator[None]:
    """Draw the same random numbers again in this context: `restore` sets the generators to an earlier state."""
    put_back = save_rng_states()
    restore()
    try:
        yield
    finally:
        put_back()


def _can_capture(devices: Sequence[torch.device]) -> bool:
    # Plain functions wait for the device, and a graph would keep reading the weights that an outer autocast cast once.
    return len(devices) == 1 and choose.available(devices[0]) and not torch.is_autocast_enabled(devices[0].type)
