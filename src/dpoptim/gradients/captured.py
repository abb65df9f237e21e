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
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpoptim.gradients.clipping import ClippedSums, Sums, told_later
from dpoptim.gradients.flat import FlatTensors, end_to_end
from dpoptim.gradients.per_example import Weighed
from dpoptim.gradients.physical_batch import PhysicalBatch
from dpoptim.gradients.release import PrivateRelease
from dpoptim.noise import gpu

MOST_GRAPHS = 64
"""Of more shapes than this the later ones are not captured: each graph takes a fraction of a second, and memory."""


class Captured:
    """Differentiates batches of examples, each by one replay of a graph where it can; made by `optimizer.captured`.

    Guarantee: every batch adds the same clipped sum as `losses(...).sum().backward()` would, to rounding; rows that
    fill a batch up to a captured shape have weight 0 and add nothing.
    Edge cases: on a CPU, without Triton, under an autocast that was begun outside of `losses`, and for what a graph
    cannot hold (a wait for the device, in the model or in `losses`), batches run in the ordinary way.
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
        self._engine.flush()  # before its rows are overwritten
        leaves, structure = pytree.tree_flatten((args, kwargs))
        devices = {parameter.device for parameter in self._sums.parameters.values()}
        tensors, others = _sorted(leaves, next(iter(devices)))
        batch = _Batch(self._losses, tensors, others, structure)
        if batch.examples == 0 or not _can_capture(devices):
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
        if graph is None:
            return self._run(batch)
        return self._replay(graph, batch)

    def _run(self, batch: _Batch) -> Tensor:
        """The ordinary way."""
        losses = batch.losses()
        (losses.mean() if self._sums.mean_loss else losses.sum()).backward()
        return losses.detach()

    def _look_at_places(self) -> None:
        """Graphs that read parameters or buffers where they are no more are not used again."""
        model = self._engine.model
        places = (
            tuple((parameter.data_ptr(), parameter.requires_grad) for parameter in model.parameters()),
            tuple(buffer.data_ptr() for buffer in model.buffers()),
        )
        if places != self._places:
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
        except Exception as error:  # of any kind: nothing of it has run, and the ordinary way says what is wrong
            self._engine.discard()
            self._engine.end_step()
            self._room.stream = None  # torch may still take it for one that is captured
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
        self._room.copy_scale()
        graph.fill(batch)
        graph.replay()
        open_batch = self._engine.batch
        open_batch.examples = batch.examples
        open_batch.add_ready = partial(self._add, graph, batch.examples, told_later(graph.found))
        return graph.losses[: batch.examples].clone()

    def _add(self, graph: _Graph, examples: int, apart: Callable[[], list[int]]) -> None:
        """Take in what a replay has summed; examples that must be looked at by themselves are, with their batch."""
        if not apart():
            self._sums.add_sums(self._room.sums, graph.found, examples)
            return
        with torch.enable_grad():
            self._run(graph.batch.first(examples))
        self._engine.flush()


def _sorted(leaves: Sequence[Any], device: torch.device) -> tuple[dict[int, Tensor], dict[int, Any]]:
    """Tensors, on the device, and what else is given, by their places among the arguments."""
    given = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    tensors = {i: tensor.detach().to(device, non_blocking=True) for i, tensor in given.items()}
    first_axes = {tensor.shape[:1] for tensor in tensors.values()}
    if len(first_axes) != 1 or first_axes == {torch.Size([])}:
        raise ValueError(
            "a captured function takes tensors that have the examples as their first axis, as many in each, got "
            f"{[tuple(tensor.shape) for tensor in tensors.values()]}; what all examples share is not an argument"
        )
    return tensors, {i: leaf for i, leaf in enumerate(leaves) if i not in tensors}


@dataclass(frozen=True)
class _Batch:
    """A batch with what is to be computed of it."""

    function: Callable[..., Tensor]
    tensors: dict[int, Tensor]
    others: dict[int, Any]
    structure: Any

    @property
    def examples(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    @property
    def key(self) -> Hashable:
        """What two batches that one graph serves have in common."""
        shapes = tuple((i, tensor.shape[1:], tensor.dtype) for i, tensor in self.tensors.items())
        return shapes, tuple(self.others.items()), self.structure

    def losses(self) -> Tensor:
        args, kwargs = pytree.tree_unflatten(self._leaves(), self.structure)
        losses = self.function(*args, **kwargs)
        if not isinstance(losses, Tensor) or losses.shape != (self.examples,):
            found = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(f"losses must return one loss an example, of shape ({self.examples},), got {found}")
        return losses

    def _leaves(self) -> list[Any]:
        given = self.tensors | self.others
        return [given[i] for i in range(len(given))]

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


class _Room:
    """What all graphs share: they run one after the other, and what one has made is taken in before the next."""

    def __init__(self, sums: ClippedSums) -> None:
        self._clipped_sums = sums
        self._sums: Sums | None = None
        self._scale: FlatTensors | None = None
        self._copied: object = None  # the scale that was copied last
        self.memory: Any = None
        self.stream: Any = None

    @property
    def sums(self) -> Sums:
        if self._sums is None:
            self._sums = self._clipped_sums.empty_sums()
        return self._sums

    def copy_scale(self) -> FlatTensors | None:
        """The scale of this step, in a place of its own."""
        scale = self._clipped_sums.scale
        if scale is None:
            return None
        if self._scale is None:
            self._scale = FlatTensors(self._clipped_sums.parameters)
        if scale is not self._copied:
            for names, vector in zip(self._scale.names, self._scale.vectors, strict=True):
                vector.copy_(end_to_end([scale[name] for name in names], vector.dtype))
            self._copied = scale
        return self._scale


@dataclass
class _Graph:
    """One shape's graph, with what it reads and what it leaves."""

    replay: Callable[[], None]
    batch: _Batch  # whose tensors are read
    real: Tensor  # bool [rows]: which of them count
    losses: Tensor
    found: Weighed
    held: list[Tensor]  # what else is read
    filled: int

    def fill(self, batch: _Batch) -> None:
        """Rows beyond the batch's stay as they were: they count for nothing."""
        examples = batch.examples
        for i, tensor in batch.tensors.items():
            self.batch.tensors[i][:examples].copy_(tensor, non_blocking=True)
        if examples != self.filled:
            self.real[:examples], self.real[examples:] = True, False
            self.filled = examples


def _capture(sums: ClippedSums, batch: _Batch, room: _Room) -> _Graph:
    engine, rows = sums.engine, batch.examples
    real = torch.ones(rows, dtype=torch.bool, device=next(iter(batch.tensors.values())).device)
    scale, into = room.copy_scale(), room.sums
    found: list[Weighed] = []
    losses: list[Tensor] = []

    def on_batch(kept: PhysicalBatch) -> None:
        if found or kept.examples != rows:
            raise ValueError("a captured function must run the model once, on all of the examples")
        found.append(sums.clip_and_sum_apart(kept, scale, real, into))

    def run() -> None:
        found.clear()
        losses[:] = [batch.losses()]
        losses[0].sum().backward()
        engine.flush()

    ordinary, engine.on_batch = engine.on_batch, on_batch
    try:
        with _held_tables() as held:
            replay = _graph_of(run, room)
    finally:
        engine.on_batch = ordinary
    return _Graph(replay, batch, real, losses[0].detach(), found[0], held, rows)


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
    torch.cuda.synchronize()
    with torch.cuda.stream(room.stream):
        with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
            run()
        torch.cuda.synchronize()
        # Relaxed: tables are sent from pinned memory that is allocated on the way.
        graph.capture_begin(pool=room.memory, capture_error_mode="relaxed")
        try:
            run()
        finally:
            graph.capture_end()
    return graph.replay
