"""The generic rule, exact but slow: `torch.func.vmap` runs a module on batches of one, each with its own parameters.

The copies are views; their gradients are the per-example gradients. A first call is compared with the own forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from dpoptim.clipping.gradient_factors import Materialized
from dpoptim.clipping.layers.rule import GradientSink, Recorder, differentiated_once, plain
from dpoptim.validation.model_check import batch_axis
from dpoptim.validation.temporary_changes import in_eval_mode, steady

_checked: weakref.WeakKeyDictionary[nn.Module, set[tuple[Any, ...]]] = weakref.WeakKeyDictionary()
"""The argument axes for which each module has been compared with its own forward."""


class PerExampleCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, examples: int, record: Recorder) -> Tensor:
        ctx.record, ctx.parameter = record, parameter
        return parameter.detach().expand(examples, *parameter.shape)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.record(ctx.parameter, Materialized(grad))
        return None, None, None


def generic(sink: GradientSink, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule for every module without a specific rule."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    examples_axis = batch_axis(module)
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    if first is None:
        raise ValueError(f"layer '{name}' got no tensor, so its examples cannot be found. Pass it the batch")
    examples = sink.expand_to_batch(first.movedim(examples_axis, 0), name).shape[0]
    if not examples:
        raise ValueError(f"layer '{name}' got an empty batch. Skip forward and backward for an empty sample")
    guessed = [_axis(leaf, examples, examples_axis, leaf is first) for leaf in leaves]
    axes = guessed if examples == 1 or sink.checking else _seen_axes(sink, name, guessed, leaves, first)
    leaves = [
        leaf.expand(examples, *leaf.shape[1:]) if axis == 0 and len(leaf) != examples else leaf
        for leaf, axis in zip(leaves, axes, strict=True)
    ]
    record = sink.recorder()
    copies = {
        key: PerExampleCopy.apply(parameter, examples, record)
        for key, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    batched = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis is not None]
    batched_axes = [axis for axis in axes if axis is not None]
    output_structure: list[Any] = []

    def one_example(parameters: dict[str, Tensor], *own: Tensor) -> list[Tensor]:
        remaining = iter(own)  # the module sees a batch of one
        filled = [
            leaf if axis is None else next(remaining).unsqueeze(axis) for leaf, axis in zip(leaves, axes, strict=True)
        ]
        own_args, own_kwargs = pytree.tree_unflatten(filled, structure)
        outputs, spec = pytree.tree_flatten(functional_call(module, parameters, own_args, own_kwargs))
        output_structure[:] = [[isinstance(output, Tensor) for output in outputs], spec]
        tensors = [output for output in outputs if isinstance(output, Tensor)]
        return [tensors[0].squeeze(examples_axis), *(output.squeeze(0) for output in tensors[1:])]

    def run(parameters: dict[str, Tensor]) -> Any:
        run_all = vmap(one_example, in_dims=(0, *batched_axes), randomness="different")
        try:
            first_output, *others = run_all(parameters, *batched)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            raise ValueError(
                f"layer '{name}' ({type(module).__name__}) has no specific rule and cannot run one example at a time "
                f"by torch.func.vmap ({str(error).splitlines()[0]}). Freeze it, or use layers that have a rule"
            ) from error
        tensors = iter([first_output.movedim(0, examples_axis), *others])
        are_tensors, spec = output_structure
        outputs = [next(tensors) if is_tensor else None for is_tensor in are_tensors]
        return pytree.tree_unflatten(outputs, spec)

    with plain(sink), steady(module), torch.backends.cudnn.flags(enabled=False):
        checked = _checked.setdefault(module, set())
        kind = tuple((axis, leaf.ndim) for axis, leaf in zip(axes, leaves, strict=True) if isinstance(leaf, Tensor))
        is_new = kind not in checked or axes != guessed  # a shared argument may hold examples now
        if is_new and not sink.checking:  # compare the whole batch, not a few rows of a check
            _check(run, module, name, examples, args, kwargs)
            checked.add(kind)
        return run(copies)


def _axis(leaf: Any, examples: int, examples_axis: int, is_first: bool) -> int | None:
    """Return the axis of the examples in one argument, or None if all examples share it."""
    if not isinstance(leaf, Tensor) or leaf.ndim == 0:
        return None
    if is_first:
        return examples_axis
    for axis in dict.fromkeys((examples_axis, 0)):
        if axis < leaf.ndim and leaf.shape[axis] == examples:
            return axis
    return None


def _seen_axes(
    sink: GradientSink, name: str, guessed: list[int | None], leaves: list[Any], first: Tensor
) -> list[int | None]:
    """Return the axes that the check of the model found; a length alone can match by chance."""
    seen, found = sink.axes_of(name, leaves), list(guessed)
    for i, leaf in enumerate(leaves):
        if leaf is first or not isinstance(leaf, Tensor) or (seen is None and guessed[i] is None):
            continue
        if seen is None or seen[i] not in (None, guessed[i]):
            raise ValueError(
                f"layer '{name}' got an argument of shape {tuple(leaf.shape)}, and the check of the model did not "
                "show whether it holds examples. Pass the same kinds of arguments in every call, or freeze the layer"
            )
        found[i] = seen[i]
    return found


def _check(
    run: Callable[[dict[str, Tensor]], Any], module: nn.Module, name: str, examples: int, args: Any, kwargs: Any
) -> None:
    """Refuse a module whose result changes when its examples run one at a time."""
    with in_eval_mode(module):
        expected = type(module).forward(module, *args, **kwargs)
        got = run({key: p.expand(examples, *p.shape) for key, p in module.named_parameters() if p.requires_grad})
    for ours, theirs in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
        if isinstance(theirs, Tensor) and not _same(ours, theirs):
            raise ValueError(
                f"layer '{name}' ({type(module).__name__}) gives a different result when its examples run one at a "
                "time: it mixes them, or the first axis of an argument is not the batch. Freeze or replace it"
            )


def _same(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape and theirs.shape[:1] == (1,):  # an input of one row was expanded to the batch
        theirs = theirs.expand(ours.shape)
    return ours.shape == theirs.shape and torch.allclose(
        ours.to(theirs.dtype), theirs, rtol=1e-2, atol=1e-3, equal_nan=True
    )
