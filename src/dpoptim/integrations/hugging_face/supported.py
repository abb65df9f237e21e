"""What PrivateTrainer does not support, and why."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

from dpoptim.arguments import check_delta
from dpoptim.data.shards import is_sharded
from dpoptim.integrations.accelerate import uses_fsdp2
from dpoptim.integrations.hugging_face.arguments import PrivacyArguments
from dpoptim.optim import PrivateOptimizer
from dpoptim.privacy import PrivacyPlan

_SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {  # TrainingArguments: supported values, and why others are not
    "fp16": ((False,), "scales the loss, which changes clipping. Use bf16=True or full precision."),
    "torch_compile": ((False,), "compiles the layers that see each example. Leave it out."),
    "use_liger_kernel": ((False,), "replaces layers that must see each example. Leave it out."),
    "train_sampling_strategy": (("random",), "changes how batches are drawn. Set PrivacyArguments(sampling=) instead."),
    "auto_find_batch_size": ((False,), "restarts the run and spends epsilon again. Set per_device_train_batch_size."),
    "label_smoothing_factor": ((0.0,), "averages the loss over the batch. Leave it out, or pass loss_per_example=."),
    "neftune_noise_alpha": ((None,), "adds noise that depends on the padded length of the batch. Leave it out."),
    "include_num_input_tokens_seen": (("no", False), "logs a count of private tokens. Leave it out."),
    "skip_memory_metrics": ((True,), "logs memory peaks, which depend on the secret batch sizes. Leave it out."),
    "optim": (
        ("adamw_torch", "adamw_torch_fused"),
        "is not private. Leave it out and set PrivacyArguments(variant=), or pass optimizers= and plan=.",
    ),
    "optim_args": ((None,), "is for other optimizers. Set betas and weight_decay in TrainingArguments."),
}
_WHOLE_MODEL = {  # TrainingArguments that split a model or its batches, and how to avoid them
    "n_gpu": "Start the script with torchrun, or set CUDA_VISIBLE_DEVICES=0.",
    "deepspeed": "Leave it out.",
    "parallelism_config": "Leave it out.",
}
_TRAINER_OPTIONS = {
    "compute_loss_func": "may average over the batch. Pass loss_per_example=.",
    "model_init": "would train again and spend epsilon again. Pass model=.",
    "optimizer_cls_and_kwargs": "is not a private optimizer. Set PrivacyArguments(variant=).",
}


def private_arguments(args: Any) -> Any:
    """Refuse unsupported TrainingArguments, and return a copy for the stock training loop."""
    for option, fix in _WHOLE_MODEL.items():
        value = getattr(args, option, None)
        if value and value != 1:
            raise ValueError(f"{option}={value!r}: private training has a whole model on one device per process. {fix}")
    for option, (supported, why) in _SUPPORTED.items():
        value = getattr(args, option)
        value = getattr(value, "value", value)
        if value not in supported:
            raise ValueError(f"{option}={value!r} {why}")
    args = copy.copy(args)
    args.gradient_accumulation_steps = 1  # the private loader cuts steps into micro-batches
    if args.gradient_checkpointing:
        args.gradient_checkpointing_kwargs = {"use_reentrant": False, **(args.gradient_checkpointing_kwargs or {})}
    return args


def check_subclass(kind: type, base: type) -> None:
    """Refuse a subclass of PrivateTrainer with its own loss or training step."""
    for name in ("compute_loss", "training_step"):
        if getattr(kind, name) is not getattr(base, name):
            raise ValueError(
                f"{kind.__name__} overrides {name}, which may mix examples. Pass loss_per_example= instead."
            )


def check_sharding(args: Any, accelerator: Any, model: Any) -> None:
    """Refuse a model that is sharded already, and settings that FSDP2 does not support; let it save whole models."""
    if any(map(is_sharded, model.parameters())):
        raise ValueError("the model is sharded already. Pass a whole model and TrainingArguments(fsdp=True).")
    if not uses_fsdp2(accelerator):
        if args.fsdp:
            raise ValueError(f"fsdp={args.fsdp!r}: Accelerate does not shard models on the CPU. Leave it out.")
        return
    if args.load_best_model_at_end:
        raise ValueError(
            "load_best_model_at_end=True cannot load whole weights into a sharded model. Load the best checkpoint "
            "with from_pretrained after training."
        )
    accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")


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
    if privacy is not None and not isinstance(privacy, PrivacyArguments):
        raise ValueError(
            f"privacy is a {type(privacy).__name__}. Pass privacy=PrivacyArguments(epsilon=..., delta=...)."
        )
    if plan is not None:
        if getattr(plan, "noise_multiplier", None) is None:
            raise ValueError("plan has no noise_multiplier. Pass PrivacyPlan(...).calibrate(epsilon=..., delta=...).")
        if privacy is not None and (privacy.epsilon is not None or privacy.noise_multiplier is not None):
            raise ValueError("plan= and PrivacyArguments both set the privacy level. Give one of the two.")
        check_delta(plan.delta, plan.num_examples if plan.is_private else None, optional=True)
        column, most = (None, None) if privacy is None else (privacy.user_column, privacy.records_per_user)
        if (plan.unit == "user") != (column is not None) or most not in (None, plan.records_per_user):
            raise ValueError(
                f"the plan has unit={plan.unit!r}, records_per_user={plan.records_per_user}, but PrivacyArguments has "
                f"user_column={column!r}, records_per_user={most}. To protect users, give a plan for them and the "
                "user_column."
            )
        if args.max_steps not in (-1, plan.steps):
            raise ValueError(f"max_steps={args.max_steps}, but the plan has {plan.steps} steps. Leave max_steps out.")
    for option, why in _TRAINER_OPTIONS.items():
        if options.get(option) is not None:
            raise ValueError(f"{option} {why}")
    if model is None:
        raise ValueError("model=None. Pass the model itself.")
    if optimizer is not None:
        if not isinstance(optimizer, PrivateOptimizer) or plan is None:
            raise ValueError(
                f"optimizers has a {type(optimizer).__name__}. Create the optimizer with dpoptim, and pass its plan=."
            )
        if next(model.parameters()).device.type != args.device.type:
            raise ValueError(f"the model is not on {args.device}. Move it there before creating its optimizer.")
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if args.load_best_model_at_end or schedule in ("reduce_lr_on_plateau", "greedy"):
        warnings.warn(
            "scores on eval_dataset choose the model or its learning rate, which the guarantee does not cover. Use "
            "public data for it.",
            stacklevel=3,
        )
