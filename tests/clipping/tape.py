"""A CUDA graph without CUDA: operations are written down with the tensors they ran on, and run again on the same ones.

As with a graph no Python of the model runs again, inputs are read where they lay, and results appear where they were.
Kernels of Triton are written down too, where its interpreter runs them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpoptim.clipping import captured
from tests.interpreter import IS_INTERPRETED


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._entries: list[Callable[[], None]] = []
        self._is_paused = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if not self._is_paused:
            # Without what autograd adds to them later: a graph holds memory alone.
            again = partial(self._again, function, *pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs, found)))
            self._entries.append(again)
        return found

    def launch(self, run: Callable[[], None]) -> None:
        """A kernel: it runs now, and again at every replay; what it does inside is not written down."""
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
    """From now on tapes take the place of graphs, on a CPU too; the list has the number of replays of each."""
    replays: list[int] = []

    def graph_of(run: Callable[[], None], workspace: Any) -> Callable[[], None]:
        run()
        if held := [name for name, parameter in workspace._clipped.parameters.items() if _is_in_a_graph(parameter)]:
            pytest.fail(f"autograd still holds nodes of another stream, which ends a capture: {held}")
        tape = Tape()
        with _kernels_on(tape), tape:
            run()
        number = len(replays)
        replays.append(0)

        def replay() -> None:
            replays[number] += 1
            tape.replay()

        return replay

    monkeypatch.setattr(captured, "_graph_of", graph_of)
    monkeypatch.setattr(captured, "_can_capture", lambda devices: True)
    return replays


def _is_in_a_graph(parameter: Tensor) -> bool:
    """Whether an autograd graph that is still alive ends at this leaf, whose node would then be taken again."""

    class Hook:
        def __call__(self, *args: Any) -> None: ...

    hook = Hook()
    seen = weakref.ref(hook)
    torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(hook)
    del hook
    return seen() is not None


@contextlib.contextmanager
def _kernels_on(tape: Tape) -> Iterator[None]:
    """While this context is open, kernels are launched through the tape."""
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
