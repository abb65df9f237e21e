"""A CUDA graph without CUDA: a tape records operations with their tensors, and runs them again on the same tensors.

As with a graph, no Python of the model runs again, and inputs and results stay at their addresses. Triton kernels are
recorded too if the interpreter runs them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpoptim.clipping import captured
from dpoptim.kernels import flat
from dpoptim.kernels.graphs import GraphMemory
from tests.interpreter import IS_INTERPRETED


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._entries: list[Callable[[], None]] = []
        self._is_paused = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if not self._is_paused:
            # Detached, because a graph holds memory and no autograd nodes.
            again = partial(self._again, function, *pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs, found)))
            self._entries.append(again)
        return found

    def launch(self, run: Callable[[], None]) -> None:
        """Run a kernel now and in every replay; its inner operations are not recorded."""
        self._is_paused = True
        run()
        self._is_paused = False
        self._entries.append(run)

    @staticmethod
    def _again(function: Any, args: Any, kwargs: Any, before: Any) -> None:
        now = function(*args, **(kwargs or {}))
        for old, new in zip(pytree.tree_leaves(before), pytree.tree_leaves(now), strict=True):
            if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)

    def replay(self) -> None:
        with torch.no_grad():
            for entry in self._entries:
                entry()


def tape_graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace graphs by tapes, also on a CPU; return a list of the number of replays of each."""
    replays: list[int] = []

    def graph_of(run: Any, memory: Any) -> Callable[[], None]:
        tape, parameters = Tape(), run.__self__._sums.parameters
        with torch.random.fork_rng(devices=[]):  # a capture draws no random numbers
            run()
            if held := [name for name, parameter in parameters.items() if _is_in_a_graph(parameter)]:
                pytest.fail(f"autograd still holds nodes of a different stream, which ends a capture: {held}")
            with _kernels_on(tape), tape:
                run()
        number = len(replays)
        replays.append(0)

        def replay() -> None:
            replays[number] += 1
            tape.replay()

        return replay

    monkeypatch.setattr(captured, "graph_of", graph_of)
    monkeypatch.setattr(captured, "_can_capture", lambda devices: True)
    return replays


class _Loan:
    """Memory of a CPU tensor, as numpy takes it."""

    def __init__(self, place: dict[str, Any]) -> None:
        self.__array_interface__ = place


def lend_memory_of_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lend the memory of tapes as that of graphs is lent, and let small models keep their sums in several vectors."""

    def results(tensors: list[Tensor], graph: object) -> list[dict[str, Any]]:
        return [tensor.numpy().__array_interface__ for tensor in tensors]

    def lend(memory: GraphMemory, places: list[dict[str, Any]]) -> list[Tensor]:
        loans = [_Loan(place) for place in places]
        memory._loans.update(loans)  # type: ignore[arg-type]
        return [torch.from_numpy(np.asarray(loan)) for loan in loans]

    monkeypatch.setattr(flat, "MAX_ELEMENTS", 20)
    monkeypatch.setattr(captured, "Results", results)
    monkeypatch.setattr(GraphMemory, "lend", lend)


def never_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the padded operations of graphs without graphs, as the first batch of each shape does."""
    monkeypatch.setattr(captured, "_can_capture", lambda devices: True)
    monkeypatch.setattr(captured, "MAX_GRAPHS", 0)


def _is_in_a_graph(parameter: Tensor) -> bool:
    """Return whether a live autograd graph ends at this leaf; a capture would reuse its node."""

    class Hook:
        def __call__(self, *args: Any) -> None: ...

    hook = Hook()
    seen = weakref.ref(hook)
    torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(hook)
    del hook
    return seen() is not None


@contextlib.contextmanager
def _kernels_on(tape: Tape) -> Iterator[None]:
    """Launch kernels through the tape in this context."""
    if not IS_INTERPRETED:
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction

    launch = InterpretedFunction.run
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            InterpretedFunction, "run", lambda *args, **kwargs: tape.launch(lambda: launch(*args, **kwargs))
        )
        yield
