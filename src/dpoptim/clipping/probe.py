"""Is the first axis of a layer's input the batch, or does it only have its length?

A table of relative positions looked up with ids of shape [T, T] has as many rows as the batch whenever T examples
come; its gradient would be split by position and clipped as if by example. And `layer(x.unsqueeze(0))` has one row,
like position ids that all examples share. So a module is run again, without gradients, on all examples and on
all but the last: every layer's input must then be one example shorter, or be shared and stay as it is. The same
runs tell which of a layer's further arguments have the examples, which no length of one run does. Arguments of another
kind (another structure, another number of axes, as long as the batch or not) are tried when they come, and again when
the module is compiled.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpoptim.clipping.layers.rule import batch_axis

_met: weakref.WeakKeyDictionary[nn.Module, set[Any]] = weakref.WeakKeyDictionary()
_checked: weakref.WeakKeyDictionary[nn.Module, set[Any]] = weakref.WeakKeyDictionary()
"""What was met while `check_example_independence` runs on a model, and what was when it was satisfied."""


def warn_unless_checked(model: nn.Module, what: Any, line: str) -> None:
    """What may be right or wrong and only the losses can show is said loudly, but for what a check has met."""
    if model in _met:
        _met[model].add(what)
    elif what not in _checked.get(model, ()):
        told = f"{line}; run dpoptim.check_example_independence(model, loss_fn, batch) before you rely on the guarantee"
        warnings.warn(told, stacklevel=2)


@contextlib.contextmanager
def checking(model: nn.Module) -> Iterator[None]:
    """What is met inside is not warned of, there and, if nothing is raised, afterwards."""
    _met[model] = set()
    try:
        yield
        _checked.setdefault(model, set()).update(_met[model])
    except Exception:
        _checked.pop(model, None)
        raise
    finally:
        del _met[model]


class BatchAxisError(ValueError):
    """A layer's input does not have the examples as its first axis."""

    def __init__(self, layer: str, shape: torch.Size, examples: int, axis: int = 0) -> None:
        super().__init__(
            f"layer '{layer}' got an input of shape {tuple(shape)} while the batch has {examples} examples (the first "
            f"axis of the model's first tensor argument) and the layer reads them on axis {axis}: keep the examples "
            "there (batch_first=True; no flattening of examples with positions), or freeze the layer, so that each "
            "gradient belongs to one example"
        )


Axes = tuple[int | None, ...]  # of each argument: where its examples lie, None where all share it


class Call(NamedTuple):
    """A call of a layer: the shapes of its arguments, None where one is no tensor."""

    layer: str
    shapes: tuple[torch.Size | None, ...]
    axis: int  # where the batch should be in the first tensor

    @property
    def first(self) -> torch.Size:
        """The shape of the first tensor."""
        return next(shape for shape in self.shapes if shape is not None)


class Run(NamedTuple):
    """What the layers got in one run, and the shapes of what came out."""

    calls: list[Call]
    outputs: list[torch.Size]

    @property
    def layers(self) -> list[str]:
        return [call.layer for call in self.calls]


class Trial(NamedTuple):
    """What the runs on all examples and on one less have shown: whether they could be made, by layer the axes of
    its arguments (None where calls of one layer differ), and the layers that had examples, or rows that all share, with
    how many axes; which arguments were shortened, and where the examples lie in each output.
    """

    passed: bool
    axes: dict[str, Axes | None]
    met: frozenset[tuple[str, int]] = frozenset()
    shared: frozenset[tuple[str, int]] = frozenset()
    shortened: tuple[bool, ...] = ()
    outputs: Axes = ()


UNTRIED = Trial(False, {})
Kind = tuple[Any, ...]


class BatchAxisProbe:
    """Tries the modules of `model` that are called on one example less, once for each kind of arguments."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trials: dict[nn.Module, list[tuple[Any, Kind, Trial]]] = {}
        self._calls: list[Call] | None = None
        self._is_compiled = False  # what is tried
        self.trial = UNTRIED  # of the call that began last

    @property
    def running(self) -> bool:
        return self._calls is not None

    def try_call(
        self, module: nn.Module, examples: int | None, leaves: list[Any], structure: Any, *, is_compiled: bool
    ) -> bool:
        """Try a call with these arguments, where none of their kind was tried before: whether that was done, and could
        be. One example needs no trial.

        Warns where the module cannot be run on fewer examples, or ties rows of its arguments loosely.
        """
        self.trial = UNTRIED
        if examples is None or examples < 2:
            return False
        kind, trials = (is_compiled, *_kind(leaves, examples)), self._trials.setdefault(module, [])
        found = next((trial for form, known, trial in trials if known == kind and form == structure), None)
        is_new = found is None
        if found is None:
            self._is_compiled = is_compiled
            found = self._tried(module, leaves, structure, examples)
            trials.append((structure, kind, found))
        self.trial = found
        return is_new and found.passed

    def trial_of_layer(self, *, in_call: bool) -> Trial:
        """What is known of a layer that runs now: of the call it is in, or in a backward, where it runs again for
        whichever call, what all trials agree on.
        """
        if in_call:
            return self.trial
        if torch._C._current_graph_task_id() == -1:
            return UNTRIED
        trials = [trial for own in self._trials.values() for *_, trial in own]
        axes: dict[str, Axes | None] = {}
        for trial in trials:
            for layer, found in trial.axes.items():
                axes[layer] = found if axes.get(layer, found) == found else None
        shared = frozenset[tuple[str, int]]().union(*(trial.shared for trial in trials))
        return Trial(any(trial.passed for trial in trials), axes, shared=shared)

    def _tried(self, module: nn.Module, leaves: list[Any], structure: Any, examples: int) -> Trial:
        first = next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)
        as_long = [_is_as_long(leaf, examples) for leaf in leaves]
        only_first = [leaf is first for leaf in leaves]
        plain = all(isinstance(leaf, Tensor | int | float | str | None) for leaf in leaves)
        whole = self._run(module, leaves, structure) if plain else None
        for shortened in (as_long, only_first) if whole is not None else ():
            part = self._run(module, _shorter(leaves, shortened), structure)
            if whole is not None and part is not None and whole.layers == part.layers:
                axes = _compare(whole.calls, part.calls, examples)
                if shortened is as_long and examples > 2:  # of two, the one that is left would fit to anything
                    self._look_for_loose(module, leaves, structure, as_long, part)
                outputs = tuple(_lost(*shapes, examples) for shapes in zip(whole.outputs, part.outputs, strict=False))
                met, shared = _with_examples(whole.calls, part.calls)
                return Trial(True, axes, met, shared, tuple(shortened), outputs)
        warn_unless_checked(
            self._model,
            ("alone", type(module), _kind(leaves, examples)),
            f"{type(module).__name__} could not be run on one example less, so nothing shows that the first axis of "
            "every layer's input is the batch",
        )
        return UNTRIED

    def _look_for_loose(
        self, module: nn.Module, leaves: list[Any], structure: Any, as_long: list[bool], part: Run
    ) -> None:
        """Warn of an argument as long as the batch that need not be: rows of a mask must, those of class ids need not.

        Two towers whose outputs meet in the loss are right, and so this is no refusal.
        """
        first, *others = [place for place, is_as_long in enumerate(as_long) if is_as_long]
        alone = [[place] for place in others]
        for free in [*alone, others] if len(others) > 1 else alone:  # ids and a mask of theirs go together
            shortened = [short and place not in free for place, short in enumerate(as_long)]
            loose = self._run(module, _shorter(leaves, shortened), structure)
            if loose is not None and loose != part:
                warn_unless_checked(
                    self._model,
                    ("loose", type(module), _kind(leaves, len(leaves[first]))),
                    f"{type(module).__name__} takes another number of rows in its argument of shape "
                    f"{tuple(leaves[free[0]].shape)} than in its first, of shape {tuple(leaves[first].shape)}: "
                    "row j of both is taken for example j, and where all examples share one of them (class ids, "
                    "prompts, prototypes) clipping bounds nothing",
                )
                return

    def see(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One layer call of a run."""
        shapes = tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves((args, kwargs)))
        if self._calls is not None and any(shape is not None for shape in shapes):
            self._calls.append(Call(name, shapes, batch_axis(module)))

    def _run(self, module: nn.Module, leaves: list[Any], structure: Any) -> Run | None:
        own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # it may be written to
        args, kwargs = pytree.tree_unflatten(own, structure)
        # Code may ask whether it is compiled, and the trial must go the way that the call will go.
        called = torch.compile(module, backend="eager") if self._is_compiled else module
        self._calls = []
        try:
            with torch.no_grad(), same_randomness(leaves):
                output = called(*args, **kwargs)
            found = pytree.tree_leaves(dict(output) if isinstance(output, dict) else output)
            return Run(self._calls, [leaf.shape for leaf in found if isinstance(leaf, Tensor)])
        except Exception:  # whatever the module's own code says to such a batch
            return None
        finally:
            self._calls = None


def _is_as_long(leaf: Any, examples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == examples


def _kind(leaves: list[Any], examples: int) -> Kind:
    """What may send a batch another way through the module, but for lengths and values of tensors."""
    own = (
        (leaf.ndim, _is_as_long(leaf, examples)) if isinstance(leaf, Tensor)
        else leaf if isinstance(leaf, bool | None) else type(leaf)
        for leaf in leaves
    )  # fmt: skip
    return (examples > 2, *own)


def _shorter(leaves: list[Any], shortened: list[bool]) -> list[Any]:
    return [leaf[:-1] if short else leaf for leaf, short in zip(leaves, shortened, strict=True)]


def _compare(whole: list[Call], part: list[Call], examples: int) -> dict[str, Axes | None]:
    found: dict[str, Axes | None] = {}
    for call, fewer in zip(whole, part, strict=True):
        shape, shorter, axis = call.first, fewer.first, call.axis
        is_shared = len(shape) > 0 and shape[0] == 1 and shape == shorter  # by all examples
        if not is_shared and (len(shape) <= axis or shape[axis] != examples):
            raise BatchAxisError(call.layer, shape, examples, axis)
        if not is_shared and shorter[axis] != examples - 1:
            raise BatchAxisError(call.layer, shorter, examples - 1, axis)
        pairs = zip(call.shapes, fewer.shapes, strict=False)
        axes = tuple(_changed(one, other, examples, axis) for one, other in pairs)
        same_count = len(call.shapes) == len(fewer.shapes)
        found[call.layer] = axes if same_count and found.get(call.layer, axes) == axes else None
    return found


def _with_examples(
    whole: list[Call], part: list[Call]
) -> tuple[frozenset[tuple[str, int]], frozenset[tuple[str, int]]]:
    """Layers with the number of axes of an argument that lost an example, and of one that did not."""
    found: tuple[set[tuple[str, int]], set[tuple[str, int]]] = set(), set()
    for call, fewer in zip(whole, part, strict=True):
        for shape, shorter in zip(call.shapes, fewer.shapes, strict=False):
            if shape is not None:
                found[shape == shorter].add((call.layer, len(shape)))
    return frozenset(found[0]), frozenset(found[1])


def _changed(shape: torch.Size | None, shorter: torch.Size | None, examples: int, axis: int) -> int | None:
    """The axis that lost an example with the batch."""
    for one in dict.fromkeys((axis, 0)):
        if shape is None or shorter is None or not len(shape) == len(shorter) > one:
            continue
        if shape[one] == examples and shorter[one] == examples - 1:
            return one
    return None


def _lost(shape: torch.Size, shorter: torch.Size, examples: int) -> int | None:
    """The one axis that lost an example."""
    changed = [axis for axis, (one, other) in enumerate(zip(shape, shorter, strict=False)) if one != other]
    is_one = len(shape) == len(shorter) and len(changed) == 1
    if is_one and shape[changed[0]] == examples and shorter[changed[0]] == examples - 1:
        return changed[0]
    return None


@contextlib.contextmanager
def same_randomness(leaves: list[Any]) -> Iterator[None]:
    """Dropout of the extra runs must not move the random numbers of the real one."""
    devices = {leaf.device.index for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        yield
