"""Any other module, exactly but slowly: `torch.func.vmap` runs it on batches of one, each with its own copy of the
parameters.

The copies are expansions (no memory); their gradients are the per-example gradients. The first call of each module
is compared with the module's own forward, so a module that cannot be run one example at a time is refused and never
silently wrong.

A module whose own parameters are broadcast over the batch (a class token, positions: their first axis is 1) runs its
own forward instead, with copies in their place, and the layers inside it run by their rules. That it does broadcast is
not believed but tried: with another copy for each example it must give what vmap gives.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from dpoptim.gradients.forms import Dense
from dpoptim.gradients.layers.rule import Keeper, Use, batch_axis

Axes = tuple[int | None, ...]

_checked: weakref.WeakKeyDictionary[nn.Module, set[Axes]] = weakref.WeakKeyDictionary()
"""Which modules have been compared with their own forward, for which axes of their arguments."""

_broadcasting: weakref.WeakKeyDictionary[nn.Module, dict[Axes, bool]] = weakref.WeakKeyDictionary()
"""Which modules were found to broadcast their own parameters over the batch, or not to."""


class _OneCopyAnExample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, examples: int, keeper: Keeper, use: Use) -> Tensor:
        ctx.keeper, ctx.use, ctx.parameter = keeper, use, parameter
        return parameter.detach().expand(examples, *parameter.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.keeper.keep(ctx.parameter, Dense(grad), ctx.use)
        return None, None, None, None


@dataclass(frozen=True)
class _Call:
    """A module and the arguments it is called with, flat: `axes` says where each has the examples, if it has."""

    module: nn.Module
    leaves: list[Any]
    structure: pytree.TreeSpec
    axes: Axes
    examples: int

    def one_at_a_time(self, parameters: dict[str, Tensor]) -> Any:
        """The outputs where example j is a batch of its own and meets row j of every one of `parameters`."""
        examples_axis = batch_axis(self.module)
        batched = [(leaf, axis) for leaf, axis in zip(self.leaves, self.axes, strict=True) if axis is not None]
        structure_of_outputs: list[Any] = []

        def one_example(parameters: dict[str, Tensor], *own: Tensor) -> list[Tensor]:
            remaining = iter(own)
            filled = [
                leaf if axis is None else next(remaining).unsqueeze(axis)
                for leaf, axis in zip(self.leaves, self.axes, strict=True)
            ]
            args, kwargs = pytree.tree_unflatten(filled, self.structure)
            outputs, spec = pytree.tree_flatten(functional_call(self.module, parameters, args, kwargs))
            structure_of_outputs[:] = [[isinstance(output, Tensor) for output in outputs], spec]
            tensors = [output for output in outputs if isinstance(output, Tensor)]
            return [tensors[0].squeeze(examples_axis), *(output.squeeze(0) for output in tensors[1:])]

        run_all = vmap(one_example, in_dims=(0, *(axis for _, axis in batched)), randomness="different")
        first, *others = run_all(parameters, *(leaf for leaf, _ in batched))
        tensors = iter([first.movedim(0, examples_axis), *others])
        are_tensors, spec = structure_of_outputs
        return pytree.tree_unflatten([next(tensors) if is_tensor else None for is_tensor in are_tensors], spec)

    def broadcasting(self, own: dict[str, Tensor]) -> Any:
        """The outputs of the module's own forward, where its own [1, ...] parameters are [examples, ...] ones."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.structure)
        before = dict(self.module._parameters)
        try:
            self.module._parameters.update(own)  # type: ignore[arg-type]
            return type(self.module).forward(self.module, *args, **kwargs)
        finally:
            self.module._parameters.update(before)


def generic(keeper: Keeper, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule of every module that has no rule of its own."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    examples_axis = batch_axis(module)
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    if first is None:
        raise ValueError(f"layer '{name}' got no tensor, so its examples cannot be told apart; pass it the batch")
    examples = keeper.agree_on_batch(first.movedim(examples_axis, 0), name).shape[0]
    axes = tuple(_axis(leaf, examples, examples_axis, leaf is first) for leaf in leaves)
    leaves = [
        leaf.expand(examples, *leaf.shape[1:]) if axis == 0 and len(leaf) != examples else leaf
        for leaf, axis in zip(leaves, axes, strict=True)
    ]
    call, use = _Call(module, leaves, structure, axes, examples), keeper.use()

    def copies(*, of_layers_inside: bool) -> dict[str, Tensor]:
        return {
            key: _OneCopyAnExample.apply(parameter, examples, keeper, use)
            for key, parameter in module.named_parameters(recurse=of_layers_inside)
            if parameter.requires_grad
        }

    if _is_broadcast(keeper, call):
        return call.broadcasting({key: own.squeeze(1) for key, own in copies(of_layers_inside=False).items()})
    with _plain(keeper), torch.backends.cudnn.flags(enabled=False):
        checked = _checked.setdefault(module, set())
        if axes not in checked:
            _check(call, name, args, kwargs)
            checked.add(axes)
        return call.one_at_a_time(copies(of_layers_inside=True))


def _axis(leaf: Any, examples: int, examples_axis: int, is_first: bool) -> int | None:
    """Where the examples lie in one argument, or None for an argument that all examples share."""
    if not isinstance(leaf, Tensor) or leaf.ndim == 0:
        return None
    if is_first:
        return examples_axis
    for axis in dict.fromkeys((examples_axis, 0)):
        if axis < leaf.ndim and leaf.shape[axis] == examples:
            return axis
    return None


@contextlib.contextmanager
def _plain(keeper: Keeper) -> Iterator[None]:
    """Layers inside the module run their own forward: their parameters are the copies."""
    before, keeper.inside_generic = keeper.inside_generic, True
    try:
        yield
    finally:
        keeper.inside_generic = before


def _is_broadcast(keeper: Keeper, call: _Call) -> bool:
    """Whether the module's own parameters are broadcast over the batch; tried once for each kind of call."""
    own = [parameter for parameter in call.module.parameters(recurse=False) if parameter.requires_grad]
    if call.examples < 2 or batch_axis(call.module) != 0 or any(p.ndim < 2 or p.shape[0] != 1 for p in own):
        return False
    found = _broadcasting.setdefault(call.module, {})
    if call.axes not in found:
        with _plain(keeper), torch.no_grad(), torch.backends.cudnn.flags(enabled=False):
            try:
                found[call.axes] = _each_meets_its_own(call)
            except (RuntimeError, ValueError, TypeError, NotImplementedError):
                found[call.axes] = False
    return found[call.axes]


def _each_meets_its_own(call: _Call) -> bool:
    """Copies that all differ must give what they give one example at a time.

    Tried on a float64 twin whose other parameters are moved too: a factor that happens to be 0 hides nothing.
    """
    twin = copy.deepcopy(call.module).double().eval()
    leaves = [leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in call.leaves]
    tried = replace(call, module=twin, leaves=leaves)
    generator = torch.Generator().manual_seed(0)

    def normals_like(parameter: Tensor, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(parameter.device)

    for parameter in twin.parameters():
        parameter.add_(normals_like(parameter, *parameter.shape), alpha=0.1)
    own = {
        key: parameter + normals_like(parameter, call.examples, *parameter.shape[1:])
        for key, parameter in twin.named_parameters(recurse=False)
        if parameter.requires_grad
    }
    together = pytree.tree_leaves(tried.broadcasting(own))
    apart = pytree.tree_leaves(tried.one_at_a_time({key: copies.unsqueeze(1) for key, copies in own.items()}))
    return len(together) == len(apart) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-8)
        for a, b in zip(together, apart, strict=True)
        if isinstance(b, Tensor)
    )


def _check(call: _Call, name: str, args: Any, kwargs: Any) -> None:
    """Refuse a module whose result changes when its examples are run one at a time."""
    module = call.module
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        with torch.no_grad():
            expected = type(module).forward(module, *args, **kwargs)
            got = call.one_at_a_time(
                {key: p.expand(call.examples, *p.shape) for key, p in module.named_parameters() if p.requires_grad}
            )
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(
            f"layer '{name}' ({type(module).__name__}) has no rule of its own and cannot be run one example at a time "
            f"by torch.func.vmap ({str(error).splitlines()[0]}); freeze it, or build it from layers that have a rule"
        ) from error
    finally:
        for part, training in modes:
            part.training = training
    for ours, theirs in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
        if isinstance(theirs, Tensor) and not _same(ours, theirs):
            raise ValueError(
                f"layer '{name}' ({type(module).__name__}) gives another result when its examples are run one at a "
                "time, so it mixes examples or takes an argument whose first axis only looks like the batch; freeze or "
                "replace it"
            )


def _same(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape and theirs.shape[:1] == (1,):  # an input of one row was expanded to the batch
        theirs = theirs.expand(ours.shape)
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3, equal_nan=True)
