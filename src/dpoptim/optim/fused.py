"""The commonest updates in one pass over memory, where a GPU with Triton has a kernel for them.

Each function here says what its kernel computes, or returns None where the slots compute it themselves; both agree to
the rounding of float32.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from dpoptim.noise import gpu
from dpoptim.optim.bundle import Bundle
from dpoptim.optim.rules import Adam, UpdateRule
from dpoptim.optim.second_moments import OfNoisyGradient, SecondMoment


@functools.cache
def _kernels() -> ModuleType | None:
    if not gpu.available("cuda"):
        return None
    from dpoptim.optim import triton_adam

    return triton_adam


def _kernels_for(bundle: Bundle) -> ModuleType | None:
    on_gpu = bundle.parameters[0].is_cuda and bundle.dtype == torch.float32
    return _kernels() if on_gpu and all(parameter.is_contiguous() for parameter in bundle.parameters) else None


def adam_step_(bundle: Bundle, rule: UpdateRule, second_moment: SecondMoment, noisy: Tensor) -> bool:
    """One step of Adam(W) on the noisy gradient, both moments and the parameters at once; False if not done here."""
    kernels = _kernels_for(bundle)
    if kernels is None or not isinstance(rule, Adam) or not isinstance(second_moment, OfNoisyGradient):
        return False
    lr, decay = float(bundle.group["lr"]), bundle.group["weight_decay"]
    kernels.adam_step_(
        bundle.parameters,
        noisy,
        bundle.get("first_moment"),
        bundle.get("second_moment"),
        betas=bundle.group["betas"],
        step=bundle.step,
        eps=bundle.group["eps"],
        lr=lr,
        added_decay=0.0 if rule.decoupled else decay,
        kept=1 - lr * decay if rule.decoupled else 1.0,
    )
    return True


def inverse_root(bundle: Bundle, *, share: float, start: float, top: float, eps: float) -> Tensor | None:
    """top/(√max(share·ν + start, 0) + eps)."""
    kernels = _kernels_for(bundle)
    if kernels is None:
        return None
    return kernels.inverse_root(bundle.get("second_moment"), share=share, start=start, top=top, eps=eps)
