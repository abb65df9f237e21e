"""Opacus's other arguments: what each may be here, and one clear line for what it may not."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

import torch
from torch import nn

from dpoptim.noise import NoiseKey


class Settings(TypedDict, total=False):
    """Keyword arguments that `make_private` and `make_private_with_epsilon` share, beyond the required ones.

    Opacus's, with its defaults:
    loss_reduction: "mean" (default) or "sum", how the loop reduces the losses of a batch; clipping is of the raw
        gradient of one example's loss under both.
    poisson_sampling: True (default), or False for shuffled batches, whose ε has no amplification.
    criterion: looked at for a reduction that contradicts `loss_reduction`; never wrapped.
    rand_on_empty: either; an empty batch is a placeholder that is not counted, and its step is noise.
    clipping="flat", batch_first=True, wrap_model=True, noise_generator=None and any grad_sample_mode but "ghost":
        nothing else is there.

    dpoptim's own:
    variant: which private optimizer; by default `dp_sgd` for SGD, else `post_processing`, which is what Opacus runs.
    variant_options: further keyword arguments of it, such as {"eps_scale": 1e-4}.
    key: a NoiseKey, to continue a run or to repeat one.
    """

    criterion: Any
    batch_first: bool
    loss_reduction: Literal["mean", "sum"]
    poisson_sampling: bool
    clipping: str
    noise_generator: Any
    grad_sample_mode: str
    wrap_model: bool
    rand_on_empty: bool
    variant: str | None
    variant_options: Mapping[str, Any] | None
    key: NoiseKey | None


_WRAPPERS = {
    "GradSampleModule": "pass the plain module that it wraps (module._module)",
    "DistributedDataParallel": "private training runs in one process for now; pass the plain module",
    "DifferentiallyPrivateDistributedDataParallel": "private training runs in one process for now; pass the plain one",
    "FSDPModule": "private training runs in one process for now; pass the plain module",
}

_NOT_OPTIONS = {
    "key": "pass key= to make_private itself, which gives it to the optimizer and to the loader",
    "loss_reduction": "pass loss_reduction= to make_private itself",
    "external_batches": "batches are always those of the loader that make_private returns; leave it out",
    "run_id": "every run draws noise of its own, and load_checkpoint restores it; leave it out",
    **dict.fromkeys(
        ("model", "plan", "lr", "rule", "param_groups", "momentum", "weight_decay"),
        "it is read from what make_private is given; set it there",
    ),
}


def check_settings(settings: Settings) -> None:
    """Refuse what is not there, naming the argument, its value and the mend.

    >>> check_settings({"clipping": "per_layer"})
    Traceback (most recent call last):
    ValueError: clipping='per_layer' is not there: one norm over all parameters is clipped; leave clipping out
    """
    unknown = sorted(set(settings) - Settings.__annotations__.keys())
    if unknown:
        raise ValueError(
            f"{unknown[0]} is not an argument here; arguments of a dpoptim variant go into variant_options={{...}}"
        )
    if settings.get("clipping", "flat") != "flat":
        raise ValueError(
            f"clipping={settings['clipping']!r} is not there: one norm over all parameters is clipped; leave clipping "
            "out"
        )
    if settings.get("batch_first", True) is not True:
        raise ValueError("batch_first=False is not there: give the model inputs with the examples on the first axis")
    if settings.get("noise_generator") is not None:
        raise ValueError(
            "noise_generator is not there: noise comes of a secret key, never of a seed; leave it out, or pass "
            "key=dpoptim.NoiseKey.load(path) to continue a run"
        )
    if settings.get("wrap_model", True) is not True:
        raise ValueError(
            "wrap_model=False asks for a hooks object, and nothing is ever wrapped here; leave it out, and replace "
            "hooks.cleanup() by optimizer.detach()"
        )
    mode = settings.get("grad_sample_mode", "hooks")
    if "ghost" in mode:
        raise ValueError(
            f"grad_sample_mode={mode!r} returns four values in Opacus; here norms are always taken without storing "
            "gradients where that is cheaper: leave it out, unpack (model, optimizer, data_loader) and keep your own "
            "criterion"
        )
    if mode not in ("hooks", "functorch", "ew"):
        raise ValueError(f"grad_sample_mode={mode!r} is not known; leave it out, there is nothing to choose")
    _check_reduction(settings)
    taken = sorted(_NOT_OPTIONS.keys() & (settings.get("variant_options") or {}).keys())
    if taken:
        raise ValueError(f"variant_options has {taken[0]!r}: {_NOT_OPTIONS[taken[0]]}")


def _check_reduction(settings: Settings) -> None:
    reduction = settings.get("loss_reduction", "mean")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"loss_reduction={reduction!r} must be 'mean' or 'sum', as the loop reduces the losses")
    criterion = settings.get("criterion")
    own = getattr(criterion, "reduction", reduction)
    if own != reduction:
        raise ValueError(
            f"criterion has reduction={own!r} and loss_reduction={reduction!r}; make them agree, or gradients are "
            "clipped in the wrong unit"
        )
    if reduction == "mean" and getattr(criterion, "weight", None) is not None:
        raise ValueError(
            "criterion has class weights, whose mean is over the batch's weights and so mixes examples; use "
            "reduction='sum' with loss_reduction='sum'"
        )
    ignored = getattr(criterion, "ignore_index", -100)
    if reduction == "mean" and ignored != -100:
        raise ValueError(
            f"criterion has ignore_index={ignored}, and its mean is over the targets that are left in the batch, which "
            "mixes examples; use reduction='sum' with loss_reduction='sum'"
        )


def check_module(module: nn.Module) -> None:
    """Refuse what is not a plain module of one process."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be an nn.Module, got {type(module).__name__}")
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPERS:
            raise ValueError(f"module is a {kind.__name__}; {_WRAPPERS[kind.__name__]}")


def check_max_grad_norm(max_grad_norm: object) -> float:
    """One positive number; Opacus's list, one norm a layer, is refused.

    >>> check_max_grad_norm([1.0, 2.0])
    Traceback (most recent call last):
    ValueError: max_grad_norm=[1.0, 2.0] must be one number: clipping is of the whole gradient, by √(Σ norm²) say
    """
    if isinstance(max_grad_norm, torch.Tensor) and max_grad_norm.numel() == 1:
        return float(max_grad_norm)
    if isinstance(max_grad_norm, bool) or not isinstance(max_grad_norm, numbers.Real):
        raise ValueError(
            f"max_grad_norm={max_grad_norm!r} must be one number: clipping is of the whole gradient, by √(Σ norm²) say"
        )
    return float(max_grad_norm)
