"""The private part of a step as one CUDA graph: forward, backward, norms and clipped sums, launched at once.

A private step has several hundred small operations, and where a physical batch is small the GPU waits for the host to
launch them. A graph holds them all for one shape of the batch. A shape runs in the ordinary way when it is met first,
with every check; when it comes again it is captured, and from then on replayed.

A replay runs no Python: what the engine and the model decide in Python was decided when the graph was made. So a graph
is used only where the same would be decided again: with parameters and buffers in their places, modules in the same
modes, the same clip norm, and a scale or none.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpoptim.clipping.captured_batch import Batch, batch_of
from dpoptim.clipping.clipped_sums import ClippedSums
from dpoptim.clipping.explanation import Explanation
from dpoptim.clipping.mechanism import PrivateMechanism
from dpoptim.clipping.physical_batch import PhysicalBatch
from dpoptim.kernels import choose as gpu
from dpoptim.kernels.clip_weights import ClipResult
from dpoptim.kernels.flat import FlatTensors, flatten

MOST_GRAPHS = 64
"""Shapes beyond so many are not captured: a graph takes a fraction of a second to make, and memory."""


class Captured:
    """Differentiates batches of examples, each by one replay of a graph where it can; made by `optimizer.captured`.

    Guarantee: every batch adds the same clipped sum as `losses(...).sum().backward()` would, to rounding, provided that
    the loss of an example depends on the example alone, and that modes and whatever `losses` reads besides stay as they
    are until the next batch or step: an example that must be looked at by itself runs again then. Rows that fill a
    batch up to a captured shape are copies of its first one, whose losses do not count.
    Edge cases: on a CPU, without Triton, where sums of squares are released too, with numbers, texts or objects among
    the arguments, under an autocast that was begun outside of `losses`, and for what a graph cannot hold (a wait for
    the device, in the model or in `losses`), batches run in the ordinary way.
    """

    def __init__(
        self, release: PrivateMechanism, losses: Callable[..., Tensor], *, together: int | None = None
    ) -> None:
        if not callable(losses):
            raise ValueError(f"losses must be a function of a batch's tensors, got {type(losses).__name__}")
        if together is not None and (isinstance(together, bool) or not isinstance(together, int) or together < 1):
            raise ValueError(f"together={together!r} must be a whole number, 1 or more, or None")
        self._losses, self._together = losses, together
        self._sums: ClippedSums = release._sums
        self._engine = self._sums.engine
        self._room: _Room  # made where places are looked at
        self._places: tuple[Hashable, ...] | None = None
        self._met: set[Hashable] = set()
        self._graphs: dict[Hashable, _Graph | None] = {}  # None: it cannot be captured
        self._has_warned = False
        self._stream: object = None  # that was used last

    @property
    def graphs(self) -> int:
        """How many shapes run as graphs."""
        return sum(graph is not None for graph in self._graphs.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The losses of a batch, [examples], which has been differentiated; `optimizer.step()` comes next.

        Tensors among the arguments have the examples as their first axis and are moved to the model's device.
        """
        if not self._engine.attached:
            raise ValueError("another optimizer was made for this model since, or this one was detached; capture anew")
        if not self._engine.capturing:
            raise ValueError(
                "a captured function differentiates private batches; inside no_grad() or public_data() call the model"
            )
        self._follow_stream()
        self._engine.flush()  # what was replayed last, before it is overwritten
        devices = {parameter.device: None for parameter in self._sums.parameters.values()}
        batch = batch_of(self._losses, args, kwargs, next(iter(devices)))
        if batch.examples == 0 or self._sums.with_squares or not _can_capture(list(devices)):
            return self._run(batch)
        if not batch.is_plain:
            self._warn("batches run without graphs: pass tensors, True, False and None alone", stacklevel=3)
            return self._run(batch)
        self._look_at_places()
        rows = _filled_up(batch.examples, self._together)
        key = (rows, batch.key, self._conditions())
        if key not in self._met:
            if len(self._met) < MOST_GRAPHS:
                self._met.add(key)
            else:
                self._warn(
                    f"batches came in more than {MOST_GRAPHS} shapes, and later ones run without graphs; pad them to "
                    "fewer (dpoptim.pad_to_bucket), or give captured(together=...)",
                    stacklevel=3,
                )
            return self._run(batch)
        if key not in self._graphs:
            self._graphs[key] = self._made(batch, rows)
        graph = self._graphs[key]
        return self._run(batch) if graph is None else self._replay(graph, batch)

    def _run(self, batch: Batch, counts: Tensor | None = None) -> Tensor:
        """The ordinary way; `counts`, bool [examples], says whose losses count, if not all do."""
        losses = batch.losses()
        counted = losses if counts is None else torch.where(counts, losses, 0.0)
        (counted.mean() if self._sums.mean_loss else counted.sum()).backward()
        return losses.detach()

    def _follow_stream(self) -> None:
        """A loop that goes on in another stream waits for the last one: nothing here is ordered between two."""
        if not torch.cuda.is_initialized():
            return
        stream = torch.cuda.current_stream()
        if self._stream not in (None, stream):
            torch.cuda.synchronize()
        self._stream = stream

    def _look_at_places(self) -> None:
        """Forget all graphs once a parameter or buffer lies elsewhere, or has another dtype."""
        model = self._engine.model
        places = (
            tuple((parameter.data_ptr(), parameter.dtype, parameter.requires_grad) for parameter in model.parameters()),
            tuple((buffer.data_ptr(), buffer.dtype) for buffer in model.buffers()),
        )
        if places == self._places:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # one of them may still run
        self._places, self._room = places, _Room(self._sums)
        self._met.clear()
        self._graphs.clear()

    def _conditions(self) -> Hashable:
        """What else decides which way a batch takes, besides its shape."""
        sums, modes = self._sums, tuple(module.training for module in self._engine.model.modules())
        return sums.clip_norm, sums.scale is None, modes, torch.get_float32_matmul_precision()

    def _made(self, batch: Batch, rows: int) -> _Graph | None:
        """The graph of a shape; None where it cannot be captured."""
        try:
            return _capture(self._sums, batch.padded(rows), self._room)
        except Exception as error:  # of any kind: nothing of it has counted, and the ordinary way says what is wrong
            self._warn(
                f"a batch could not be captured as a graph ({type(error).__name__}) and runs as it is: model and "
                "losses must not wait for the device (.item(), .tolist(), print) and must run the model once, on all "
                "rows; keep no earlier loss without detach()",
                stacklevel=4,
            )
            return None

    def _warn(self, line: str, *, stacklevel: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(line, RuntimeWarning, stacklevel=stacklevel)

    def _replay(self, graph: _Graph, batch: Batch) -> Tensor:
        """Run a batch; its sums are taken in when the engine closes it, as those of other batches are, and examples
        apart run again after that.
        """
        bounds, scale = self._sums.bounds(), list((self._sums.scale or {}).values())
        self._room.copy_scale()
        graph.fill(batch)
        graph.replay()
        losses = graph.losses[: batch.examples].clone()
        add = partial(self._add, graph, batch, bounds, scale)
        self._engine.buffers.begin(anew=True)
        self._engine.batch.add_ready = add  # last: a call that fails must not count
        return losses

    def _add(self, graph: _Graph, batch: Batch, bounds: Hashable, held_scale: object) -> None:
        """Take in what a replay has summed. Examples that must be looked at by themselves run again, and all of them
        where clip norm or scale have changed since; the scale is held until then, as another in its place would look
        the same.
        """
        self._check_place()
        self._follow_stream()
        if bounds != self._sums.bounds():
            self._again(batch)
        else:
            again = partial(self._again_alone, batch)
            self._sums.add_sums(self._room.sums, graph.found, batch.examples, graph.explanation, again)

    def _again_alone(self, batch: Batch, rows: list[int]) -> None:
        """Some rows, in a batch of the same size: nothing tells how many they are, and random numbers go on as if it
        had not been.
        """
        self._check_place()
        counts = torch.arange(batch.examples, device=batch.device) < len(rows)
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
            self._again(batch.chosen(rows + rows[:1] * (batch.examples - len(rows))), counts)

    def _again(self, batch: Batch, counts: Tensor | None = None) -> None:
        with torch.enable_grad():
            self._run(batch, counts)
        self._engine.flush()

    def _check_place(self) -> None:
        with torch.enable_grad():  # they are off while the engine closes a batch; so this asks for public_data() alone
            is_private = self._engine.attached and self._engine.capturing
        if not is_private or torch._C._current_graph_task_id() != -1:
            raise ValueError(
                "a captured batch is taken in by optimizer.step() or by the next batch, and not inside of "
                "public_data() or of another batch's backward"
            )


class _Room:
    """What all graphs share: they run one after the other, and what one has made is taken in before the next."""

    def __init__(self, sums: ClippedSums) -> None:
        self._clipped = sums
        self.sums = FlatTensors(sums.parameters)
        self._scale: FlatTensors | None = None
        self.memory: Any = None
        self.stream: Any = None

    def copy_scale(self) -> FlatTensors | None:
        """The scale as it is now, in a place of its own."""
        scale = self._clipped.scale
        if scale is None:
            return None
        if self._scale is None:
            self._scale = FlatTensors(self._clipped.parameters)
        for names, vector in zip(self._scale.names, self._scale.vectors, strict=True):
            vector.copy_(flatten([scale[name] for name in names], vector.dtype))
        return self._scale


@dataclass
class _Graph:
    """One shape's graph, with what it reads and what it leaves."""

    replay: Callable[[], None]
    batch: Batch  # whose tensors are read
    real: Tensor  # bool [rows]: whose losses count
    losses: Tensor
    found: ClipResult
    explanation: Explanation
    tables: Any  # that kernels read

    def fill(self, batch: Batch) -> None:
        self.batch.fill(batch)
        self.real[: batch.examples], self.real[batch.examples :] = True, False


def _capture(sums: ClippedSums, batch: Batch, room: _Room) -> _Graph:
    engine = sums.engine
    real = torch.ones(batch.examples, dtype=torch.bool, device=batch.device)
    scale, into = room.copy_scale(), room.sums
    found: list[ClipResult] = []
    losses: list[Tensor] = []

    def on_batch(kept: PhysicalBatch) -> None:
        if found or kept.examples != batch.examples:
            raise ValueError("a captured function must run the model once, on all of the examples")
        found.append(sums.clip_and_sum_into(into, kept, scale))

    def run() -> None:
        found.clear()
        each = batch.losses()
        losses[:] = [each.detach()]  # alone: autograd's nodes must end with the run, as they belong to its stream
        torch.where(real, each, 0.0).sum().backward()
        engine.flush()

    ordinary, engine.on_batch = engine.on_batch, on_batch
    try:
        with gpu.held_tables() as tables:
            replay = _graph_of(run, room)
    except BaseException:  # an interrupt too: rows that fill the batch up must never be released
        engine.discard()
        engine.end_step()
        raise
    finally:
        engine.on_batch = ordinary
    return _Graph(replay, batch, real, losses[0], found[0], sums.explain(), tables)


def _filled_up(examples: int, together: int | None) -> int:
    """How many rows a graph for so many examples has.

    >>> [_filled_up(examples, None) for examples in (1, 8, 100, 2048)], _filled_up(100, 64)
    ([1, 8, 104, 2048], 128)
    """
    together = together or 1 << max(examples.bit_length() - 4, 0)
    return -(-examples // together) * together


def _can_capture(devices: Sequence[torch.device]) -> bool:
    """On one device with Triton's kernels, as the plain functions wait for it, and under no autocast that was begun
    outside: a graph would go on reading weights that it had cast before.
    """
    return len(devices) == 1 and gpu.available(devices[0]) and not torch.is_autocast_enabled(devices[0].type)


def _graph_of(run: Callable[[], None], room: _Room) -> Callable[[], None]:
    """What `run` launches, as one launch. It runs once before: kernels are compiled, and the engine's trials made."""
    graph = torch.cuda.CUDAGraph()
    if room.stream is None:
        room.stream, room.memory = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        run()
    torch.cuda.synchronize()
    if torch.cuda.mem_get_info()[0] < torch.cuda.memory_reserved():
        torch.cuda.empty_cache()  # a graph's memory is its own, and none is given back while it is captured
    with torch.cuda.stream(room.stream):
        try:
            # Relaxed: tables are written to pinned memory that is allocated on the way.
            graph.capture_begin(pool=room.memory, capture_error_mode="relaxed")
            try:
                with _no_mask_for_none():
                    run()
            finally:
                graph.capture_end()
        except BaseException:
            _give_up(room)
            raise
    return graph.replay


@contextlib.contextmanager
def _no_mask_for_none() -> Iterator[None]:
    """Within a capture Transformers does not look whether an attention mask can be left out, and some releases (5.17
    among them) then build one where none was given, which makes attention several times slower.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    is_tracing = getattr(masking, "is_tracing", None)
    if is_tracing is None:
        yield
        return
    masking.is_tracing = lambda tensor=None: tensor is not None and is_tracing(tensor)
    try:
        yield
    finally:
        masking.is_tracing = is_tracing


def _give_up(room: _Room) -> None:
    """Clean up where torch's own end of a failed capture stops half-way: memory would go on coming from the graph's
    pool, and dropout would wait for the graph.
    """
    device: int = torch.cuda.current_device()
    with contextlib.suppress(Exception):
        torch._C._cuda_endAllocateToPool(device, room.memory)
    with contextlib.suppress(Exception):
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())
    room.stream = None
