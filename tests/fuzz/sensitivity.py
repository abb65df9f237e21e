"""Clipped sums of random models against brute force, and how far leaving out one example moves them."""

from __future__ import annotations

import copy
import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpoptim.clipping import check_example_independence
from dpoptim.clipping.clipped_sums import ClippedSums
from dpoptim.clipping.engine import UncheckedLossError
from dpoptim.kernels.norms import wide
from tests.clipping.models import Case
from tests.clipping.one_at_a_time import clip_and_sum, gradients_one_at_a_time, random_scale
from tests.fuzz.models import Drawn, draw
from tests.fuzz.parts import Failure, Outcome, each

CASES = 2000
# How far rounding may move a sum, relative to what one example adds. The sums of a model in bfloat16 are in float32.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 1e-5}
Sums = dict[str, Tensor]
Scale = Mapping[str, Tensor] | None


def outcomes(seed: int, cases: int, folder: Path) -> Iterator[tuple[int, Outcome]]:
    return each(case, range(seed, seed + cases))


def case(seed: int) -> str:
    """Check one random model; return how it ended, or raise a Failure."""
    warnings.simplefilter("ignore")
    drawn, rng = draw(seed), random.Random(seed)
    batch = drawn.case.batch
    if not drawn.mixes and batch["x"].is_floating_point() and rng.random() < 0.05:
        batch["x"][rng.randrange(drawn.examples)] = rng.choice([float("nan"), float("inf")])
        drawn.words.append("an example that is not finite")
    scale: Scale = None
    if rng.random() < 0.5:
        scale = {name: wide(s) for name, s in random_scale(drawn.case.model, seed).items()}
    clip_at = rng.choice([1e-3, 0.5, 1.0, 1.0, 1.5, 100.0])
    starts = sorted({0, *(row for row in range(1, drawn.examples) if rng.random() < 0.3)})
    rows = [list(range(*ends)) for ends in zip(starts, [*starts[1:], drawn.examples], strict=True)]
    drawn.words.append(f"{'scaled' if scale else 'flat'}, clip norm {clip_at} of the median, micro-batches {rows}")
    try:
        if drawn.mixes or rng.random() < 0.2:
            check_example_independence(drawn.case.model, drawn.case.loss_fn, batch)
        return _compare(drawn, rows, clip_at, scale)
    except ValueError as refusal:
        return f"refused, {f'mixes examples ({drawn.mixes})' if drawn.mixes else f'sound: {_reason(refusal)}'}"
    except Failure as failure:
        raise Failure(f"{failure}: {'; '.join(drawn.words)}") from failure
    except Exception as error:
        raise Failure(f"{type(error).__name__}: {error}: {'; '.join(drawn.words)}") from error


def _compare(drawn: Drawn, rows: list[list[int]], clip_at: float, scale: Scale) -> str:
    made, dtype = drawn.case, next(drawn.case.model.parameters()).dtype
    exact, exact_scale = _in_float64(made), None if scale is None else {n: s.double() for n, s in scale.items()}
    try:
        gradients = gradients_one_at_a_time(exact.model, exact.loss_fn, exact.batch, drawn.examples)
    except ValueError as error:  # batch norm needs more than one example
        private_sums(made, rows, 1.0, scale)
        raise Failure(f"accepted, although it mixes examples ({error})") from error
    norms = torch.tensor([norm_of(own, exact_scale) for own in gradients])
    clip_norm = clip_at * float(norms[norms.isfinite()].median()) or 1.0
    found = private_sums(made, rows, clip_norm, scale)
    most = [min(clip_norm, float(norm)) if norm.isfinite() else 0.0 for norm in norms]
    rounding = TOLERANCE[dtype] * max(*most, 1e-3 * clip_norm)
    if dtype == torch.bfloat16:  # too coarse to compare with float64
        most = [clip_norm] * drawn.examples
    elif _distance(found, _reference(gradients, clip_norm, exact_scale), scale) > drawn.examples * rounding:
        # In float32 a number may be on the other side of a kink.
        again = gradients_one_at_a_time(made.model.eval(), made.loss_fn, made.batch, drawn.examples)
        if dtype == torch.float64 or (
            _distance(found, _reference(again, clip_norm, scale), scale) > drawn.examples * rounding
        ):
            raise Failure("the clipped sum differs from brute force")
        most = [clip_norm] * drawn.examples
    for left_out in {int(norms.nan_to_num().argmax()), drawn.examples - 1}:
        if dtype == torch.bfloat16:  # other batch sizes would round differently
            others = private_sums(_without_loss(made, left_out), rows, clip_norm, scale)
        else:
            rest = [[row for row in own if row != left_out] for own in rows]
            others = private_sums(made, rest, clip_norm, scale)
        moved = _distance(found, others, scale)
        if not moved <= most[left_out] + drawn.examples * rounding:
            raise Failure(f"example {left_out} moves the sum by {moved:.6g}, more than {most[left_out]:.6g}")
    if drawn.mixes:
        return f"accepted, mixing has no effect ({drawn.mixes})"
    return "within the clip norm (bfloat16)" if dtype == torch.bfloat16 else f"exact ({str(dtype).partition('.')[2]})"


def private_sums(made: Case, rows: list[list[int]], clip_norm: float, scale: Scale) -> Sums:
    """The engine's clipped sums over micro-batches of these rows."""
    sums = ClippedSums(made.model, clip_norm=clip_norm)
    sums.scale = scale
    sums.engine.attach()
    try:
        for own in filter(None, rows):
            batch = pytree.tree_map(lambda tensor, own=own: tensor[own], made.batch)
            try:
                made.loss_fn(made.model, batch).sum().backward()
            except UncheckedLossError:
                sums.engine.check_losses(partial(made.loss_fn, made.model), made.batch, lasting=False)
                made.loss_fn(made.model, batch).sum().backward()
            sums.engine.flush()
        return {name: total.clone() for name, total in sums.take()[0].items()}
    finally:
        sums.engine.detach()


def norm_of(sums: Sums, scale: Scale) -> float:
    """The norm over all parameters, scaled as in clipping."""
    scaled = (s.double() if scale is None else s.double() * scale[name].double() for name, s in sums.items())
    return sum(float(part.square().sum()) for part in scaled) ** 0.5


def _distance(one: Sums, other: Sums, scale: Scale) -> float:
    return norm_of({name: one[name].double() - other[name].double() for name in one}, scale)


def _reference(gradients: Sequence[Sums], clip_norm: float, scale: Scale) -> Sums:
    """Brute force; an example that is not finite adds nothing."""
    zero = {name: torch.zeros_like(gradient) for name, gradient in gradients[0].items()}
    finite = [own for own in gradients if all(bool(gradient.isfinite().all()) for gradient in own.values())]
    return clip_and_sum([zero, *finite], clip_norm, scale)[0]


def _in_float64(made: Case) -> Case:
    """A copy; a spectral norm in evaluation mode has the value that all examples of the next step share."""
    batch = {name: part.double() if part.is_floating_point() else part for name, part in made.batch.items()}
    model = copy.deepcopy(made.model).double()
    if not any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        model.eval()
    return Case(model, made.loss_fn, batch)


def _without_loss(made: Case, left_out: int) -> Case:
    """The case with a loss of zero for one example."""
    counted = torch.ones(len(made.batch["x"]), dtype=torch.bool)
    counted[left_out] = False

    def loss_fn(model: torch.nn.Module, batch: Any) -> Tensor:
        losses = made.loss_fn(model, batch)
        return torch.where(batch["counted"], losses, losses.detach())

    return Case(made.model, loss_fn, {**made.batch, "counted": counted})


def _reason(refusal: ValueError) -> str:
    """The first sentence of a message without names and numbers."""
    text = re.sub(r"'[^']*'|\([^()]*\)", "…", str(refusal).split(". ")[0])
    return re.sub(r"\d+", "N", text)[:110]
