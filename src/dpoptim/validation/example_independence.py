"""Check by value that what a model computes for one example does not depend on the other examples of its batch.

Clipping bounds what one example adds to the sum only if each gradient belongs to one example alone. So a few rows of a
real batch are run and differentiated several times under the same random draws. Some rows are kept; the others are
replaced and get different output gradients. Outputs, input gradients and the per-example gradients of parameters must
stay the same for a kept row.

The check does not see mixing that needs more than `MAX_ROWS` rows (expert capacity), effects smaller than the rounding
of the run's dtype, paths that only a later length, number or attribute opens, or anything outside the checked function.
A sound model is refused if it draws a data-dependent amount of random numbers.

Arguments are tensors in tuples, lists and dicts, with the examples on the first axis. Tensors of a different length or
without axes are shared by all examples and stay unchanged, like everything that is not a tensor. Sparse and nested
tensors are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpoptim.data.secret_randomness import save_rng_states

MAX_ROWS = 4
_MAX_DONORS = 16  # rows that are tried as a replacement for one row
_BLOCK = 1024  # elements of a row that are compared through two random projections
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
_FIX = (
    "Remove what looks across the batch (its mean, norm or order, batch norm, attention between examples), or pass "
    "allow_mixing='<reason>' to the optimizer to train without this part of the guarantee"
)

Gradients = list[tuple[str, Tensor]]  # (parameter name, [rows, numbers]): which distinguish its per-example gradients


class ExampleMixingError(ValueError):
    """A result of one example depends on the other examples, or the check could not rule that out."""


class Arguments(NamedTuple):
    """The arguments of a call as leaves of a tree, and how many examples they hold; None if no tensor shows it."""

    leaves: list[Any]
    structure: Any
    examples: int | None
    only_first: bool = False  # only the first argument has the examples

    @classmethod
    def of(cls, args: Any, name: str) -> Arguments:
        """Flatten `args`; the examples are the first axis of the first tensor that has one."""
        leaves, structure = pytree.tree_flatten(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(tensor.is_nested or tensor.layout != torch.strided for tensor in tensors):
            raise ValueError(f"{name} got a sparse or nested tensor, whose rows cannot be replaced. Pass dense tensors")
        return cls(leaves, structure, next((tensor.shape[0] for tensor in tensors if tensor.ndim), None))

    def has_examples(self, leaf: Any) -> bool:
        """Whether the first axis of an argument is as long as the batch."""
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or leaf.shape[0] != self.examples:
            return False
        return not self.only_first or leaf is next(t for t in self.leaves if isinstance(t, Tensor) and t.ndim)

    def signature(self) -> tuple[Any, ...]:
        """What may send a batch down a different path, except lengths, numbers, texts and the values of tensors."""
        return tuple(
            (leaf.ndim, leaf.dtype, self.has_examples(leaf), leaf.shape[:1] == (1,)) if isinstance(leaf, Tensor)
            else leaf if isinstance(leaf, bool | None) else type(leaf)
            for leaf in self.leaves
        )  # fmt: skip


def check_independence(
    name: str,
    run: Callable[[Any], Any],
    take_gradients: Callable[[], Gradients],
    arguments: Arguments,
    *,
    after_two_sizes: Callable[[], None],
) -> bool:
    """Raise `ExampleMixingError` if `run`, called `name` in messages, mixes examples of the real batch `arguments`.

    `take_gradients` returns and clears the per-example gradients that backwards have recorded. `after_two_sizes` is
    called once, after runs on two numbers of examples, which show the axes of the examples. The result is False if all
    examples of the batch are the same integers, so that mixing cannot be seen.

    Guarantee: random generators are left as they were, and messages hold no values. The cost is seven forwards and
    backwards of at most `MAX_ROWS` + 1 examples, for any batch size.
    """
    rows, replacements = _choose_rows(arguments)
    batched = [arguments.has_examples(leaf) for leaf in arguments.leaves]
    own = [leaf.detach()[rows] if batch else leaf for leaf, batch in zip(arguments.leaves, batched, strict=True)]
    count, put_back = len(rows), save_rng_states()
    # One more row if possible: code around the model may hold tensors as long as the batch.
    others = [*range(count), 0] if (arguments.examples or 0) > count else [*range(count - 1)]

    def run_on(leaves: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors that come out, and the inputs whose gradients are compared."""
        put_back()
        copies = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        inputs = [
            leaf.requires_grad_()
            for leaf, batch in zip(copies, batched, strict=True)
            if batch and (leaf.is_floating_point() or leaf.is_complex())
        ]
        # Copies again, because a model may write to its inputs and torch forbids that for leaves of the graph.
        given = [leaf.clone() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in copies]
        try:
            return _tensors(run(pytree.tree_unflatten(given, arguments.structure))), inputs
        except Exception as error:
            error.add_note(f"(raised when {name} was run on a few rows of the batch to check that examples do not mix)")
            raise

    def observe(leaves: list[Any], keep: Tensor, other_shapes: list[torch.Size] | None) -> _Observed:
        outputs, inputs = run_on(leaves)
        shapes = [output.shape for output in outputs]
        axes = _batch_axes(name, shapes, other_shapes, count, len(others))
        found, differentiated = _Observed(shapes), []
        for number, (output, axis) in enumerate(zip(outputs, axes, strict=True)):
            # A single number counts as a sum of losses if each example receives its own gradient from it.
            is_sum = output.requires_grad and axis is None and output.numel() == 1
            if not is_sum:
                found.add(f"output {number}", output[None] if axis is None else _rows_first(output, axis, count))
            if is_sum or (output.requires_grad and (axis is not None or other_shapes is None)):
                differentiated.append((output, _cotangent(output, axis, keep, number)))
        if differentiated:
            tensors, cotangents = zip(*differentiated, strict=True)
            torch.autograd.backward(tensors, cotangents)
        for number, leaf in enumerate(inputs):
            found.add(f"the gradient of input {number}", torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
        for parameter, gradient in take_gradients():
            if len(gradient) != count and other_shapes is not None:
                raise ExampleMixingError(
                    f"the gradient of '{parameter}' has {len(gradient)} rows for {count} examples. Give the layer one "
                    "row per example, on its first axis"
                )
            found.add(f"the gradient of '{parameter}'", gradient, is_parameter=True)
        return found

    try:
        # Tensors saved for backward must stay out of a surrounding activation checkpoint.
        own_graph = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
        with torch.enable_grad(), own_graph:
            everything = torch.ones(count, dtype=torch.bool, device="cpu")
            other_size = [leaf[others] if batch else leaf for leaf, batch in zip(own, batched, strict=True)]
            other_shapes = observe(other_size, everything, None).output_shapes
            first = observe(own, everything, other_shapes)
            after_two_sizes()
            if replacements is None:
                return False
            again = observe(own, everything, other_shapes)
            if (differs := first.difference(again, everything, None)) is not None:
                raise ExampleMixingError(
                    f"examples may mix: {differs} of {name} changes when the same rows run twice under the same random "
                    f"draws, so mixing cannot be ruled out. {_FIX}"
                )
            for keep in _masks(count):
                replaced = [
                    leaf if other is None else torch.where(_along(keep, leaf), leaf, other)
                    for leaf, other in zip(own, replacements, strict=True)
                ]
                if (differs := first.difference(observe(replaced, keep, other_shapes), keep, again)) is not None:
                    raise ExampleMixingError(
                        f"examples mix: {differs} of {name} changes for one example when other examples of the batch "
                        f"are replaced. {_FIX}"
                    )
    finally:
        put_back()
        take_gradients()
    return True


class _Entry(NamedTuple):
    numbers: Tensor  # [rows, numbers]
    not_finite: Tensor  # [rows], how many numbers were not finite; they count as 0
    is_exact: bool  # integers, which are not rounded
    is_parameter: bool  # a parameter's gradient, compared with the largest of all


class _Observed:
    """What one run showed, by name."""

    def __init__(self, output_shapes: list[torch.Size]) -> None:
        self.output_shapes = output_shapes
        self.entries: dict[str, _Entry] = {}
        dtypes = [torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
        self.tolerance = max((_TOLERANCE.get(dtype, 0.0) for dtype in dtypes), default=0.0)

    def add(self, name: str, tensor: Tensor, *, is_parameter: bool = False) -> None:
        while name in self.entries:  # a parameter that is used more than once
            name += " again"
        self.tolerance = max(self.tolerance, _TOLERANCE.get(tensor.dtype, 0.0))
        self.entries[name] = _summarize(tensor.detach(), is_parameter)

    def difference(self, other: _Observed, keep: Tensor, again: _Observed | None) -> str | None:
        """The first name whose kept rows differ by more than rounding; `again` shows how much identical runs differ."""
        if list(self.entries) != list(other.entries):
            return "the sequence of layers"
        gradients = [e.numbers.abs().amax() for e in self.entries.values() if e.is_parameter and e.numbers.numel()]
        largest_gradient = _together(gradients).max() if gradients else torch.zeros(())
        differs: dict[str, Tensor] = {}
        for name, one in self.entries.items():
            two = other.entries[name]
            if one.numbers.shape != two.numbers.shape:
                return name
            if not one.numbers.numel():
                continue
            change, size = (one.numbers - two.numbers).abs().amax(1), one.numbers.abs().amax(1)
            # A gradient far below the others is only rounding, and adds nothing to the total norm.
            largest = largest_gradient.to(size.device) if one.is_parameter else size.max()
            allowed = torch.zeros_like(size) if one.is_exact else self.tolerance * (size + 0.05 * largest)
            if again is not None:
                allowed = allowed + 4 * (one.numbers - again.entries[name].numbers).abs().max()
            changed = (change > allowed) | (one.not_finite != two.not_finite)
            differs[name] = (changed[keep.to(changed.device)] if len(changed) == len(keep) else changed).any()
        found = _together(list(differs.values())).tolist() if differs else []  # read at once, since reading waits
        return next((name for name, differ in zip(differs, found, strict=True) if differ), None)


def _together(scalars: list[Tensor]) -> Tensor:
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars])


def _summarize(tensor: Tensor, is_parameter: bool) -> _Entry:
    """Each row, or two random projections of each block of a long row, where effects on few positions stay visible."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    is_exact = not tensor.is_floating_point()
    wide = torch.float64 if is_exact or tensor.dtype == torch.float64 else torch.float32
    flat = tensor.reshape(len(tensor), tensor.shape[1:].numel()).to(wide)
    not_finite = (~flat.isfinite()).sum(1)
    flat = flat.nan_to_num(0.0, 0.0, 0.0)
    if flat.shape[1] > 2 * _BLOCK:
        generator = torch.Generator("cpu").manual_seed(0)
        projection = torch.randn(_BLOCK, 2, generator=generator, dtype=wide, device="cpu").to(flat.device)
        blocks = torch.nn.functional.pad(flat, (0, -flat.shape[1] % _BLOCK)).view(len(flat), -1, _BLOCK)
        flat = (blocks @ projection).flatten(1)
    return _Entry(flat, not_finite, is_exact, is_parameter)


def _choose_rows(arguments: Arguments) -> tuple[list[int], list[Tensor | None] | None]:
    """The rows to run, and by argument what replaces them (None: shared); None if no row can be replaced."""
    examples = arguments.examples or 0
    count = min(MAX_ROWS, max(2, examples - 1))
    rows = [number * examples // count for number in range(count)]
    outside = [row for row in range(min(examples, _MAX_DONORS + count)) if row not in rows]
    tensors = [leaf.detach() for leaf in arguments.leaves if arguments.has_examples(leaf)]
    donors = []  # other rows of the batch, so that ids stay valid
    for number, row in enumerate(rows):
        start = number % max(1, len(outside))
        candidates = [*outside[start:], *outside[:start], *(other for other in rows if other != row)]
        differs = (c for c in candidates if any(not torch.equal(tensor[row], tensor[c]) for tensor in tensors))
        donors.append(next(differs, candidates[0]))
    found: list[Tensor | None] = []
    is_replaced = [False] * count
    for leaf in arguments.leaves:
        if not arguments.has_examples(leaf):
            found.append(None)
            continue
        own, other = leaf.detach()[rows], leaf.detach()[donors]
        for number in range(count):
            if torch.equal(own[number], other[number]) and (leaf.is_floating_point() or leaf.is_complex()):
                # Halves, and one half for 0, because ids that are stored as floats must stay valid.
                other[number] = torch.where(own[number] == 0, torch.full_like(own[number], 0.5), own[number] / 2)
            is_replaced[number] |= not torch.equal(own[number], other[number])
        found.append(other)
    return rows, found if all(is_replaced) else None


def _masks(count: int) -> Iterator[Tensor]:
    """Which rows are kept: for any two rows there is a mask that keeps the first and replaces the second."""
    rows = torch.arange(count, device="cpu")
    for bit in range((count - 1).bit_length()):
        for side in (0, 1):
            yield (rows >> bit & 1) == side


def _tensors(output: Any) -> list[Tensor]:
    if dataclasses.is_dataclass(output) and not isinstance(output, dict | type):
        output = vars(output)
    leaves = pytree.tree_leaves(dict(output) if isinstance(output, dict) else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _batch_axes(
    name: str, shapes: list[torch.Size], others: list[torch.Size] | None, count: int, other_count: int
) -> list[int | None]:
    """The axis of each output that has the examples, from its shapes for `count` and for `other_count` examples."""
    if others is None:
        return [None] * len(shapes)
    if len(shapes) != len(others):
        raise ExampleMixingError(f"{name} returns a varying number of tensors. Return the same tensors for every batch")
    axes = []
    for number, (shape, other) in enumerate(zip(shapes, others, strict=True)):
        changed = [axis for axis, (one, two) in enumerate(zip(shape, other, strict=False)) if one != two]
        fits = len(shape) == len(other) and all(shape[axis] * other_count == other[axis] * count for axis in changed)
        if not fits:
            raise ExampleMixingError(
                f"examples may mix: the shape of output {number} of {name} depends on the examples, so it is unknown "
                "whose rows it has. Return one row per example"
            )
        axes.append(changed[0] if changed else None)
    return axes


def _rows_first(tensor: Tensor, axis: int, count: int) -> Tensor:
    """A view [count, ...] of a tensor that has the examples, or examples times positions, on an axis."""
    return tensor.unflatten(axis, (count, tensor.shape[axis] // count)).movedim(axis, 0)


def _cotangent(output: Tensor, axis: int | None, keep: Tensor, number: int) -> Tensor:
    """Return random numbers; rows that are not kept get different, larger ones, so that norms change too."""
    generator = torch.Generator(output.device).manual_seed(number)
    options: Any = {"dtype": output.dtype, "device": output.device, "generator": generator}
    own = torch.randn(output.shape, **options)
    if axis is None or bool(keep.all()):
        return own
    other = 3 * torch.randn(output.shape, **options)
    rows = _rows_first(own, axis, len(keep))
    rows.copy_(torch.where(_along(keep, rows), rows, _rows_first(other, axis, len(keep))))
    return own


def _along(keep: Tensor, tensor: Tensor) -> Tensor:
    """Return the mask with trailing axes of size 1, on the tensor's device."""
    return keep.to(tensor.device).view(-1, *[1] * (tensor.ndim - 1))
