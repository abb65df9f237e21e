"""CUDA graphs: capture what a function launches, and lend the memory of its results."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class GraphMemory:
    """The stream and memory that graphs share. Only one of them runs at a time, and it overwrites what others left."""

    def __init__(self) -> None:
        self.stream: Any = None
        self.pool: Any = None
        self._loans: weakref.WeakSet[_Loan] = weakref.WeakSet()

    @property
    def is_lent(self) -> bool:
        """Whether a tensor that `lend` returned, or a view of one, still exists."""
        return len(self._loans) > 0

    def lend(self, results: Results) -> list[Tensor]:
        """Return the results of a graph's last run; running a graph again would overwrite them."""
        loans = [_Loan(place, results.graph) for place in results.places]
        self._loans.update(loans)
        return [torch.as_tensor(loan, device="cuda") for loan in loans]


class Results:
    """Where a graph leaves its results. Their tensors can be freed, so that the next capture may use their memory."""

    def __init__(self, tensors: Sequence[Tensor], graph: object) -> None:
        self.places = [tensor.__cuda_array_interface__ for tensor in tensors]
        self.graph = graph  # keeps the memory allocated


class _Loan:
    """What torch.as_tensor needs to make a tensor; the tensor's storage keeps it alive."""

    def __init__(self, place: dict[str, Any], graph: object) -> None:
        self.__cuda_array_interface__ = place
        self._graph = graph


def graph_of(run: Callable[[], None], memory: GraphMemory) -> Callable[[], None]:
    """Capture what `run` launches. It first runs once to compile kernels and let the engine check the call."""
    graph = torch.cuda.CUDAGraph()
    if memory.stream is None:
        memory.stream, memory.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a graph has its own memory, and torch frees none during a capture
    with torch.cuda.stream(memory.stream):
        try:
            # Relaxed, because tables are written to pinned memory that is allocated during the capture.
            graph.capture_begin(pool=memory.pool, capture_error_mode="relaxed")
            try:
                run()
            finally:
                graph.capture_end()
        except BaseException:
            _clean_up_failed_capture(memory)
            raise
    return graph.replay


def _clean_up_failed_capture(memory: GraphMemory) -> None:
    """Stop using the graph's memory pool and random state, which torch's `capture_end` keeps after a failure."""
    device: int = torch.cuda.current_device()
    with contextlib.suppress(Exception):
        torch._C._cuda_endAllocateToPool(device, memory.pool)
    with contextlib.suppress(Exception):
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())
    memory.stream = None
