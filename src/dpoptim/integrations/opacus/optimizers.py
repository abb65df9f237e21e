"""From an optimizer of `torch.optim` to the private one with the same update; settings are copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dpoptim.arguments import check_choice
from dpoptim.integrations.named_settings import ADAPTIVE
from dpoptim.integrations.opacus.models import restore_own_loss
from dpoptim.noise import NoiseKey
from dpoptim.optim import SGD, AdaGrad, Adam, AdamW, PrivateOptimizer, RMSProp, dp_sgd, side_information
from dpoptim.optim.rules import UpdateRule
from dpoptim.privacy import PrivacyPlan


class DPOptimizer(PrivateOptimizer):
    """A private optimizer with Opacus's names for the numbers of its plan.

    It refuses a step on a batch that its loader did not draw.
    """

    def __init__(self, module: nn.Module, plan: PrivacyPlan, **slots: Any) -> None:
        super().__init__(module, plan, **slots)
        self.mechanism.needs_loader = True
        self._module = module

    @property
    def noise_multiplier(self) -> float:
        """The standard deviation of the noise on the clipped sum, over max_grad_norm."""
        assert self.plan.noise_multiplier is not None
        return float(self.plan.noise_multiplier)

    @property
    def max_grad_norm(self) -> float:
        """The bound on the gradient of one example."""
        return float(self.plan.clip_norm)

    @property
    def expected_batch_size(self) -> int:
        """The divisor of the noisy sum."""
        return self.plan.batch_size

    def detach(self) -> None:
        """Restore the model's own forward and loss; the optimizer cannot be used afterwards."""
        super().detach()
        restore_own_loss(self._module)


# By class of torch.optim: the private rule, the settings to copy, and those with one supported value.
_KINDS: dict[type, tuple[Callable[..., UpdateRule], tuple[str, ...], dict[str, Any]]] = {
    torch.optim.SGD: (SGD, ("momentum", "weight_decay"), {"dampening": 0, "nesterov": False}),
    torch.optim.Adam: (Adam, ("betas", "eps", "weight_decay"), {"amsgrad": False}),
    torch.optim.AdamW: (AdamW, ("betas", "eps", "weight_decay"), {"amsgrad": False}),
    torch.optim.Adagrad: (AdaGrad, ("eps", "weight_decay"), {"lr_decay": 0, "initial_accumulator_value": 0}),
    torch.optim.RMSprop: (RMSProp, ("alpha", "momentum", "eps", "weight_decay"), {"centered": False}),
}
_ADAPTIVE = {**ADAPTIVE, "side_information": side_information}


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Refuse an optimizer without a private counterpart, and state or schedulers that would be lost."""
    if type(optimizer) not in _KINDS:
        known = ", ".join(known.__name__ for known in _KINDS)
        raise ValueError(f"optimizer is a {type(optimizer).__name__}, which has no private version. Use {known}.")
    _, _, fixed = _KINDS[type(optimizer)]
    own, given = set(module.parameters()), {p for group in optimizer.param_groups for p in group["params"]}
    if not given <= own:
        raise ValueError("optimizer has parameters that the module does not have. Create it after ModuleValidator.fix.")
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):  # Adagrad has state from the start
        raise ValueError("optimizer has taken steps, and its state would be lost. Create a new one.")
    for group in optimizer.param_groups:
        for name, value in {**fixed, "maximize": False}.items():
            if group.get(name, value) != value:
                raise ValueError(
                    f"optimizer has {name}={group[name]!r}, which has no private counterpart. Use {name}={value!r}."
                )
        if "initial_lr" in group:
            raise ValueError("optimizer has a learning-rate scheduler. Create the scheduler after make_private.")


def private_optimizer(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: PrivacyPlan,
    settings: Mapping[str, Any],
    *,
    key: NoiseKey,
    steps_are_known: bool,
) -> DPOptimizer:
    """Create the private optimizer with the update rule, learning rates and parameter groups of `optimizer`."""
    make_rule, copied, _ = _KINDS[type(optimizer)]
    variant, options = settings.get("variant"), settings.get("variant_options") or {}
    names = ("lr", *copied)
    groups = [{"params": g["params"], **{name: _plain(g[name]) for name in names}} for g in optimizer.param_groups]
    first = {name: groups[0][name] for name in copied}
    lr = groups[0]["lr"]
    common = {"param_groups": groups, "loss_reduction": settings.get("loss_reduction", "mean"), "key": key}
    made: PrivateOptimizer
    if make_rule is SGD:
        if variant not in (None, "dp_sgd"):
            raise ValueError(f"variant={variant!r} needs a second moment, but optimizer is SGD. Use Adam.")
        made = dp_sgd(module, plan, lr, **first, **common, **options)
    else:
        name = variant or "post_processing"
        check_choice("variant", name, _ADAPTIVE)
        decoupled = {bool(group.get("decoupled_weight_decay", False)) for group in optimizer.param_groups}
        if len(decoupled) > 1:
            raise ValueError("optimizer mixes decoupled_weight_decay=True and False. Use one for all groups.")
        rule = AdamW(**first) if make_rule is Adam and True in decoupled else make_rule(**first)
        scales_by_length = name == "scale_then_privatize" and make_rule is AdaGrad
        if scales_by_length and not steps_are_known and "eps_scale" not in options:
            raise ValueError("scale_then_privatize with Adagrad needs epochs= or variant_options={'eps_scale': ...}.")
        made = _ADAPTIVE[name](module, plan, lr, rule=rule, **common, **options)
    memory = {name: options[name] for name in ("noise_memory", "clipping_memory") if name in options}
    return DPOptimizer(  # with the slots of the variant; this detaches `made`
        module,
        plan,
        release=made.plan.release,
        lr=lr,
        rule=made.rule,
        geometry=made.geometry,
        second_moment=made.second_moment,
        **common,
        **memory,
    )


def _plain(setting: Any) -> Any:
    """A setting of a group as numbers, without tensors."""
    return tuple(map(float, setting)) if isinstance(setting, tuple | list) else float(setting)
