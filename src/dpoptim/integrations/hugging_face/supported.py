"""What PrivateTrainer does not support, and why."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dpoptim.integrations import one_process
from dpoptim.integrations.hugging_face.arguments import PrivacyArguments
from dpoptim.integrations.named_settings import refuse_weak_delta
from dpoptim.optim import PrivateOptimizer
from dpoptim.privacy import PrivacyPlan


class _Unsupported(NamedTuple):
    option: str
    reason: str
    fix: str
    is_set: Callable[[Any], Any] = bool


_ARGUMENTS = [  # of TrainingArguments
    _Unsupported("fp16", "scales the loss, which changes clipping", "Use bf16=True or full precision"),
    _Unsupported("torch_compile", "compiles the layers that see each example", "Leave it out"),
    _Unsupported("use_liger_kernel", "replaces layers that must see each example", "Leave it out"),
    _Unsupported(
        "train_sampling_strategy",
        "would change how batches are drawn",
        "Leave it out and set PrivacyArguments(sampling=)",
        lambda value: value != "random",
    ),
    _Unsupported(
        "auto_find_batch_size",
        "restarts the run, but the guarantee covers one run",
        "Set per_device_train_batch_size and gradient_accumulation_steps",
    ),
    _Unsupported(
        "label_smoothing_factor", "averages the loss over the batch", "Leave it out, or pass loss_per_example="
    ),
    _Unsupported(
        "neftune_noise_alpha",
        "adds noise that depends on the padded length of the batch, which mixes examples",
        "Leave it out",
        lambda value: value is not None,
    ),
    _Unsupported(
        "include_num_input_tokens_seen",
        "logs a count of private tokens",
        "Leave it out",
        lambda value: value != "no",
    ),
    _Unsupported(
        "skip_memory_metrics",
        "logs memory peaks, which depend on the secret batch sizes",
        "Leave it out",
        lambda value: not value,
    ),
    _Unsupported(
        "optim",
        "is not a private optimizer",
        "Leave it out and set PrivacyArguments(variant=), or pass plan= and optimizers=(optimizer, None)",
        lambda value: str(getattr(value, "value", value)) not in ("adamw_torch", "adamw_torch_fused"),
    ),
    _Unsupported("optim_args", "is for other optimizers", "Set betas and weight_decay in TrainingArguments"),
    _Unsupported(
        "gradient_checkpointing_kwargs",
        "hides which example a gradient belongs to",
        "Leave use_reentrant out",
        lambda value: (value or {}).get("use_reentrant"),
    ),
]
_TRAINER_OPTIONS = [
    _Unsupported("compute_loss_func", "may average over the batch", "Pass loss_per_example="),
    _Unsupported("model_init", "would train again and spend epsilon again", "Pass model="),
    _Unsupported("optimizer_cls_and_kwargs", "is not a private optimizer", "Set PrivacyArguments(variant=)"),
]
_METHODS = {  # that a subclass must not override
    "compute_loss": "training does not call it",
    "training_step": "it could mix examples unnoticed",
}


def private_arguments(args: Any) -> Any:
    """Refuse unsupported TrainingArguments, and return a copy for the stock training loop.

    The private loader cuts steps into micro-batches, so the loop's own gradient accumulation is 1.
    """
    one_process.check_arguments(args)
    for row in _ARGUMENTS:
        value = getattr(args, row.option)
        if row.is_set(value):
            shown = getattr(value, "value", value)
            raise ValueError(f"{row.option}={shown!r} {row.reason}. {row.fix}.")
    args = copy.copy(args)
    args.gradient_accumulation_steps = 1
    if args.gradient_checkpointing:
        args.gradient_checkpointing_kwargs = {**(args.gradient_checkpointing_kwargs or {}), "use_reentrant": False}
    return args


def check_subclass(kind: type, base: type) -> None:
    """Refuse a subclass of PrivateTrainer with its own loss or training step."""
    for name, reason in _METHODS.items():
        if getattr(kind, name) is not getattr(base, name):
            raise ValueError(f"{kind.__name__} overrides {name}, but {reason}. Pass loss_per_example= instead.")


def check_call(
    privacy: PrivacyArguments | None,
    plan: PrivacyPlan | None,
    model: Any,
    args: Any,
    optimizer: Any,
    options: Mapping[str, Any],
) -> None:
    """Refuse a call of PrivateTrainer whose arguments do not fit together."""
    if privacy is None and plan is None:
        raise ValueError("privacy=None. Pass privacy=PrivacyArguments(epsilon=..., delta=...), or a calibrated plan=.")
    if plan is not None:
        _check_plan(plan, privacy, args)
    for row in _TRAINER_OPTIONS:
        if options.get(row.option) is not None:
            raise ValueError(f"{row.option} {row.reason}. {row.fix}.")
    if model is None:
        raise ValueError("model=None. Pass the model itself.")
    if optimizer is not None:
        if not isinstance(optimizer, PrivateOptimizer) or plan is None:
            raise ValueError(
                f"optimizers has a {type(optimizer).__name__} and plan={'given' if plan else None}. Create the "
                "optimizer with dpoptim, for example by scale_then_privatize(model, plan, lr=1e-3), and pass its plan=."
            )
        if next(model.parameters()).device.type != args.device.type:
            raise ValueError(f"the model is not on {args.device}. Move it there before creating its optimizer.")
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if args.load_best_model_at_end or schedule in ("reduce_lr_on_plateau", "greedy"):
        warnings.warn(
            "scores on eval_dataset choose the model or its learning rate, which the guarantee does not cover. Use "
            "public data for eval_dataset.",
            stacklevel=3,
        )


def _check_plan(plan: PrivacyPlan, privacy: PrivacyArguments | None, args: Any) -> None:
    if not isinstance(plan, PrivacyPlan):
        raise ValueError(f"plan must be a PrivacyPlan, got {type(plan).__name__}")
    if plan.noise_multiplier is None:
        raise ValueError("plan has no noise_multiplier. Call plan.calibrate(epsilon=..., delta=...).")
    if privacy is not None and (privacy.epsilon is not None or privacy.noise_multiplier is not None):
        raise ValueError("plan= and PrivacyArguments both set the privacy level. Give one of the two.")
    if plan.delta is not None and plan.is_private:
        refuse_weak_delta(plan.delta, plan.num_examples)
    if args.max_steps not in (-1, plan.steps):
        raise ValueError(f"max_steps={args.max_steps}, but the plan has {plan.steps} steps. Leave max_steps out.")
