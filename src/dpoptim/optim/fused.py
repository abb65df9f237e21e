"""The most common updates in one pass over memory: torch's fused Adam on a CPU, a Triton kernel on a GPU.

Where no fused version applies, the slots compute the same up to the rounding of the state's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dpoptim import kernels
from dpoptim.kernels import choose
from dpoptim.optim.bundle import ParameterBundle
from dpoptim.optim.rules import Adam, UpdateRule
from dpoptim.optim.second_moments import OfNoisyGradient, SecondMoment


def adam_step_(
    bundle: ParameterBundle, rule: UpdateRule, second_moment: SecondMoment, noisy: Mapping[str, Tensor]
) -> bool:
    """Take one step of Adam(W) on the noisy gradient, or return False if the slots must do it."""
    if not isinstance(rule, Adam) or not isinstance(second_moment, OfNoisyGradient):
        return False
    gradients = [noisy[name] for name in bundle.names]
    if _runs_on_cpu(bundle):
        _cpu_adam_step_(bundle, rule, gradients)
        return True
    if not _runs_on_gpu(bundle):
        return False
    lr, decay = float(bundle.group["lr"]), bundle.group["weight_decay"]
    kernels.adam_triton.adam_step_(
        bundle.parameters,
        gradients,
        bundle.get("first_moment"),
        bundle.get("second_moment"),
        bundle.get("rounding") if bundle.rounds else None,
        betas=bundle.group["betas"],
        step=bundle.step,
        eps=bundle.group["eps"],
        lr=lr,
        added_decay=0.0 if rule.decoupled else decay,
        kept=1 - lr * decay if rule.decoupled else 1.0,
    )
    return True


def _runs_on_gpu(bundle: ParameterBundle) -> bool:
    on_gpu = choose.available(bundle.parameters[0].device) and bundle.dtype == torch.float32
    return on_gpu and all(parameter.is_contiguous() for parameter in bundle.parameters)


def _runs_on_cpu(bundle: ParameterBundle) -> bool:
    """Whether torch's fused Adam applies: parameters in the precision of the state, and no division by 0."""
    whole = all(p.device.type == "cpu" and p.dtype == bundle.dtype and p.is_contiguous() for p in bundle.parameters)
    return whole and bundle.group["eps"] > 0


def _cpu_adam_step_(bundle: ParameterBundle, rule: Adam, gradients: list[Tensor]) -> None:
    beta1, beta2 = bundle.group["betas"]
    step = torch._fused_adamw_ if rule.decoupled else torch._fused_adam_
    step(
        bundle.parameters,
        gradients,
        bundle.split(bundle.get("first_moment")),
        bundle.split(bundle.get("second_moment")),
        [],
        [torch.tensor(float(bundle.step))] * len(bundle.parameters),
        amsgrad=False,
        lr=float(bundle.group["lr"]),
        beta1=beta1,
        beta2=beta2,
        weight_decay=bundle.group["weight_decay"],
        eps=bundle.group["eps"],
        maximize=False,
    )
