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
import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpoptim.gradients.clipping import ClippedSums, told_later
from dpoptim.gradients.explanation import Explanation
from dpoptim.gradients.flat import FlatTensors, end_to_end
from dpoptim.gradients.per_example import Weighed
from dpoptim.gradients.physical_batch import PhysicalBatch
from dpoptim.gradients.release import PrivateRelease
from dpoptim.noise import gpu

MOST_GRAPHS = 64
"""Of more shapes than this the later ones are not captured: each graph takes a fraction of a second, and memory."""


class Captured:
    """Differentiates batches of examples, each by one replay of a graph where it can; made by `optimizer.captured`.

    Guarantee: every batch adds the same clipped sum as `losses(...).sum().backward()` would, to rounding, provided that
    the loss of an example depends on the example alone. Rows that fill a batch up to a captured shape are copies of its
    first one, whose losses do not count.
    Edge cases: on a CPU, without Triton, where sums of squares are released too, with arguments that are neither
    tensors nor plain values, under an autocast that was begun outside of `losses`, and for what a graph cannot hold (a
    wait for the device, in the model or in `losses`), batches run in the ordinary way.
    """

    def __init__(self, release: PrivateRelease, losses: Callable[..., Tensor], *, together: int = 64) -> None:
        if not callable(losses):
            raise ValueError(f"losses must be a function of a batch's tensors, got {type(losses).__name__}")
        if isinstance(together, bool) or not isinstance(together, int) or together < 1:
            raise ValueError(f"together={together!r} must be a whole number, 1 or more")
        self._losses, self._together = losses, together
        self._sums: ClippedSums = release._sums
        self._engine = self._sums.engine
        self._room = _Room(self._sums)
        self._places: tuple[Hashable, ...] = ()
        self._graphs: dict[Hashable, _Graph | None] = {}  # None: met once, or not to be captured
        self._refused: set[Hashable] = set()
        self._has_warned = False

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
        self._engine.flush()  # what was replayed last, before it is overwritten
        devices = {parameter.device for parameter in self._sums.parameters.values()}
        batch = _batch_of(self._losses, args, kwargs, next(iter(devices)))
        if batch.examples == 0 or self._sums.with_squares or not batch.is_plain or not _can_capture(devices):
            return self._run(batch)
        self._look_at_places()
        rows = -(-batch.examples // self._together) * self._together
        key = (rows, batch.key, self._conditions())
        graph = self._graphs.get(key)
        if graph is None:
            if key not in self._graphs and len(self._graphs) < MOST_GRAPHS:
                self._graphs[key] = None
                return self._run(batch)
            graph = self._made(key, batch, rows)
        return self._run(batch) if graph is None else self._replay(graph, batch)

    def _run(self, batch: _Batch) -> Tensor:
        """The ordinary way."""
        losses = batch.losses()
        (losses.mean() if self._sums.mean_loss else losses.sum()).backward()
        return losses.detach()

    def _look_at_places(self) -> None:
        """Graphs that read parameters or buffers where they are no more are not used again."""
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
        self._graphs.clear()
        self._refused.clear()

    def _conditions(self) -> Hashable:
        """What else decides which way a batch takes, besides its shape."""
        sums, modes = self._sums, tuple(module.training for module in self._engine.model.modules())
        return sums.clip_norm, sums.scale is None, modes, torch.get_float32_matmul_precision()

    def _made(self, key: Hashable, batch: _Batch, rows: int) -> _Graph | None:
        """The graph of a shape; None where there are too many, or where it cannot be captured."""
        if key in self._refused:
            return None
        if key not in self._graphs:
            self._refused.add(key)
            self._warn(f"batches came in more than {MOST_GRAPHS} shapes; pad them to fewer, see pad_to_bucket")
            return None
        try:
            graph = _capture(self._sums, batch.padded(rows), self._room)
        except Exception as error:  # of any kind: nothing of it has counted, and the ordinary way says what is wrong
            self._refused.add(key)
            self._warn(f"a batch could not be captured as a graph ({type(error).__name__}) and runs as it is")
            return None
        self._graphs[key] = graph
        return graph

    def _warn(self, line: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(line, RuntimeWarning, stacklevel=4)

    def _replay(self, graph: _Graph, batch: _Batch) -> Tensor:
        """Run a batch; its sums are taken in when the engine closes it, as those of other batches are."""
        bounds = self._sums.bounds()
        self._room.copy_scale()
        graph.fill(batch)
        graph.replay()
        losses = graph.losses[: batch.examples].clone()
        add = partial(self._add, graph, batch.examples, bounds, told_later(graph.found))
        self._engine.buffers.begin(anew=True)
        self._engine.batch.add_ready = add  # last: a call that fails must not count
        return losses

    def _add(self, graph: _Graph, examples: int, bounds: Hashable, apart: Callable[[], list[int]]) -> None:
        """Take in what a replay has summed. Where one of its examples must be looked at by itself, or what it was
        clipped by is no more what it will be noised by, the batch runs again.
        """
        with torch.enable_grad():
            if not self._engine.capturing or torch._C._current_graph_task_id() != -1:
                raise ValueError(
                    "a captured batch is taken in by optimizer.step() or by the next batch, and not inside of "
                    "public_data() or of another batch's backward"
                )
            if bounds == self._sums.bounds() and not apart():
                self._sums.add_sums(self._room.sums, graph.found, examples, graph.explanation)
                return
            self._run(graph.batch.first(examples))
        self._engine.flush()


@dataclass(frozen=True)
class _Batch:
    """A batch with what is to be computed of it; tensors and other arguments by their places."""

    function: Callable[..., Tensor]
    tensors: dict[int, Tensor]
    others: dict[int, Any]
    structure: Any

    @property
    def examples(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    @property
    def is_plain(self) -> bool:
        """Whether the key tells batches apart: what is in an object may change."""
        return all(isinstance(other, bool | int | float | str | None) for other in self.others.values())

    @property
    def key(self) -> Hashable:
        """What two batches that one graph serves have in common."""
        shapes = tuple((i, tensor.shape[1:], tensor.dtype) for i, tensor in self.tensors.items())
        return shapes, tuple((i, type(other), other) for i, other in self.others.items()), self.structure

    def losses(self) -> Tensor:
        given = self.tensors | self.others
        args, kwargs = pytree.tree_unflatten([given[i] for i in range(len(given))], self.structure)
        losses = self.function(*args, **kwargs)
        if not isinstance(losses, Tensor) or losses.shape != (self.examples,):
            found = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(f"losses must return one loss an example, of shape ({self.examples},), got {found}")
        return losses

    def padded(self, rows: int) -> _Batch:
        """A copy of so many rows, filled up by the first one."""
        where = torch.arange(rows, device=next(iter(self.tensors.values())).device)
        where[self.examples :] = 0
        return self._with({i: tensor[where] for i, tensor in self.tensors.items()})

    def first(self, examples: int) -> _Batch:
        """The first rows alone."""
        return self._with({i: tensor[:examples] for i, tensor in self.tensors.items()})

    def _with(self, tensors: dict[int, Tensor]) -> _Batch:
        return _Batch(self.function, tensors, self.others, self.structure)


def _batch_of(
    function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> _Batch:
    leaves, structure = pytree.tree_flatten((args, kwargs))
    given = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    tensors = {i: tensor.detach().to(device, non_blocking=True) for i, tensor in given.items()}
    first_axes = {tensor.shape[:1] for tensor in tensors.values()}
    if len(first_axes) != 1 or first_axes == {torch.Size([])}:
        raise ValueError(
            "a captured function takes tensors that have the examples as their first axis, as many in each, got "
            f"{[tuple(tensor.shape) for tensor in tensors.values()]}; what all examples share is not an argument"
        )
    return _Batch(function, tensors, {i: leaf for i, leaf in enumerate(leaves) if i not in given}, structure)


class _Room:
    """What all graphs share: they run one after the other, and what one has made is taken in before the next."""

    def __init__(self, sums: ClippedSums) -> None:
        self._clipped = sums
        self._sums: FlatTensors | None = None
        self._scale: FlatTensors | None = None
        self.memory: Any = None
        self.stream: Any = None

    @property
    def sums(self) -> FlatTensors:
        if self._sums is None:
            self._sums = FlatTensors(self._clipped.parameters)
        return self._sums

    def copy_scale(self) -> FlatTensors | None:
        """The scale as it is now, in a place of its own."""
        scale = self._clipped.scale
        if scale is None:
            return None
        if self._scale is None:
            self._scale = FlatTensors(self._clipped.parameters)
        for names, vector in zip(self._scale.names, self._scale.vectors, strict=True):
            vector.copy_(end_to_end([scale[name] for name in names], vector.dtype))
        return self._scale


@dataclass
class _Graph:
    """One shape's graph, with what it reads and what it leaves."""

    replay: Callable[[], None]
    batch: _Batch  # whose tensors are read
    numbers: Tensor  # of its rows
    real: Tensor  # bool [rows]: whose losses count
    losses: Tensor
    found: Weighed
    explanation: Explanation
    held: list[Tensor]  # what else is read

    def fill(self, batch: _Batch) -> None:
        examples = batch.examples
        for i, tensor in batch.tensors.items():
            rows = self.batch.tensors[i]
            rows[:examples].copy_(tensor, non_blocking=True)
            if examples < len(rows):
                rows[examples:] = tensor[:1]
        torch.lt(self.numbers, examples, out=self.real)


def _capture(sums: ClippedSums, batch: _Batch, room: _Room) -> _Graph:
    engine = sums.engine
    numbers = torch.arange(batch.examples, device=next(iter(batch.tensors.values())).device)
    real = numbers < batch.examples
    scale, into = room.copy_scale(), room.sums
    found: list[Weighed] = []
    losses: list[Tensor] = []

    def on_batch(kept: PhysicalBatch) -> None:
        if found or kept.examples != batch.examples:
            raise ValueError("a captured function must run the model once, on all of the examples")
        found.append(sums.clip_and_sum_apart(kept, scale, into))

    def run() -> None:
        found.clear()
        losses[:] = [batch.losses()]
        torch.where(real, losses[0], 0.0).sum().backward()
        engine.flush()

    ordinary, engine.on_batch = engine.on_batch, on_batch
    try:
        with _held_tables() as held:
            replay = _graph_of(run, room)
    except BaseException:  # an interrupt too: rows that fill the batch up must never be released
        engine.discard()
        engine.end_step()
        raise
    finally:
        engine.on_batch = ordinary
    return _Graph(replay, batch, numbers, real, losses[0].detach(), found[0], sums.explain(), held)


@contextlib.contextmanager
def _held_tables() -> Iterator[list[Tensor]]:
    """Small tables that kernels read: those of this time are kept."""
    held: list[Tensor] = []
    gpu.hold_tables(held)
    try:
        yield held
    finally:
        gpu.hold_tables(None)


def _can_capture(devices: set[torch.device]) -> bool:
    """On one device where the kernels are, since plain functions ask the device; and of what an autocast has cast
    before, a graph would see the old values.
    """
    (device, *others) = devices
    return not others and gpu.available(device) and not torch.is_autocast_enabled(device.type)


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
            # Relaxed: tables are sent from pinned memory that is allocated on the way.
            graph.capture_begin(pool=room.memory, capture_error_mode="relaxed")
            try:
                run()
            finally:
                graph.capture_end()
        except BaseException:
            _give_up(room)
            raise
    return graph.replay


def _give_up(room: _Room) -> None:
    """End a capture that has failed also where torch's own end of it stops half-way: memory would go on coming from the
    graph's pool, and dropout would wait for the graph.
    """
    device: int = torch.cuda.current_device()
    with contextlib.suppress(Exception):
        torch._C._cuda_endAllocateToPool(device, room.memory)
    with contextlib.suppress(Exception):
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())
    room.stream = None
