"""What PrivateTrainer refuses before it trains, each with one line that says why and what to do."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from dpoptim.app.recipes.defaults import refuse_weak_delta
from dpoptim.integrations.hugging_face.arguments import PrivacyArguments
from dpoptim.optim import PrivateOptimizer
from dpoptim.privacy import PrivacyPlan

_HOOKS = (  # what PrivateTrainer replaces in the stock loop: where one is missing, it would run without it
    "_clip_grad_norm", "_finalize_training", "_get_grad_norm", "_get_num_items_in_batch",
    "_load_optimizer_and_scheduler", "_prepare_for_training", "_push_from_checkpoint", "_run_epoch",
    "_save_checkpoint", "_save_optimizer_and_scheduler", "compute_loss", "create_optimizer", "evaluation_loop",
    "floating_point_ops", "get_eval_dataloader", "get_test_dataloader", "get_train_dataloader", "log",
    "set_initial_training_values", "train", "training_step",
)  # fmt: skip


def check_transformers() -> None:
    """ImportError where the stock Trainer has not what is replaced."""
    if missing := [name for name in _HOOKS if not hasattr(transformers.Trainer, name)]:
        raise ImportError(
            f"transformers {transformers.__version__} has no Trainer.{missing[0]}, which PrivateTrainer replaces; run: "
            "pip install 'transformers>=5.22'"
        )


def check_overrides(kind: type, stock: type) -> None:
    """Refuse a class of one's own that has another loss or step than `stock`: neither would be tried on a batch."""
    for name, why in (
        ("compute_loss", "but training does not call it"),
        ("training_step", "by which examples could be tied together unseen"),
    ):
        if getattr(kind, name) is not getattr(stock, name):
            raise ValueError(f"{name} is overridden, {why}; pass loss_per_example= instead")


def check_accelerator(trainer: Any) -> None:
    """Refuse what `accelerate launch` or its environment may have set beside the arguments."""
    state = trainer.accelerator
    if state.num_processes > 1 or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError("private training runs in one process; start it with python, not accelerate launch")
    if state.scaler is not None:
        raise ValueError("mixed_precision='fp16' of Accelerate scales the loss, which changes clipping; use bf16")


def private_args(args: Any) -> Any:
    """A copy of `args` for the trainer's own loop, after what cannot be kept to is refused.

    Accumulation becomes the micro-batches of the private loader, so the loop's own is 1; activation checkpoints are
    not reentrant.
    """
    for refused, why in _refusals(args):
        if refused:
            raise ValueError(why)
    args = copy.copy(args)
    args.gradient_accumulation_steps = 1
    if args.gradient_checkpointing:
        args.gradient_checkpointing_kwargs = {**(args.gradient_checkpointing_kwargs or {}), "use_reentrant": False}
    return args


def _refusals(args: Any) -> list[tuple[Any, str]]:
    """What is refused, each with the line that says why."""
    scales = "fp16=True scales the loss, which changes clipping; use bf16=True or full precision"
    one = "private training runs in one process on one device for now"
    checkpoints = args.gradient_checkpointing_kwargs or {}
    return [
        (args.fp16, scales),
        (args.torch_compile, "torch_compile=True would compile the layers that see each example; leave it out"),
        (args.n_gpu > 1, f"n_gpu={args.n_gpu} would use DataParallel: {one}; set CUDA_VISIBLE_DEVICES=0"),
        (args.world_size > 1, f"world_size={args.world_size}: {one}; start it without torchrun"),
        (args.deepspeed, f"deepspeed={args.deepspeed!r}: {one}; leave it out"),
        (args.fsdp, f"fsdp={args.fsdp!r}: {one}; leave it out"),
        (args.parallelism_config, f"parallelism_config: {one}; leave it out"),
        (args.use_liger_kernel, "use_liger_kernel=True replaces layers whose examples must be seen; leave it out"),
        (
            args.train_sampling_strategy != "random",
            f"train_sampling_strategy={args.train_sampling_strategy!r}: batches are drawn as the privacy plan says, "
            "whatever the examples' lengths; leave it out and set PrivacyArguments(sampling=)",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size=True begins a run again, which the guarantee counts once; set "
            "per_device_train_batch_size and gradient_accumulation_steps",
        ),
        (
            args.label_smoothing_factor,
            f"label_smoothing_factor={args.label_smoothing_factor}: the smoothed loss averages over the batch; leave "
            "it out, or pass loss_per_example=",
        ),
        (
            args.neftune_noise_alpha is not None,
            f"neftune_noise_alpha={args.neftune_noise_alpha}: its noise depends on the padded length of the batch, and "
            "so ties examples together; leave it out",
        ),
        (
            args.include_num_input_tokens_seen != "no",
            f"include_num_input_tokens_seen={args.include_num_input_tokens_seen!r} would log a count of private tokens;"
            " leave it out",
        ),
        (
            not args.skip_memory_metrics,
            "skip_memory_metrics=False would put peaks of memory into the metrics, which follow the secret sizes of "
            "batches; leave it out",
        ),
        (
            str(getattr(args.optim, "value", args.optim)) not in ("adamw_torch", "adamw_torch_fused"),
            f"optim={getattr(args.optim, 'value', args.optim)!r}: leave it out and choose PrivacyArguments(variant=), "
            "or make the optimizer by a function of dpoptim and pass optimizers=(optimizer, None) with its plan=",
        ),
        (
            args.optim_args,
            f"optim_args={args.optim_args!r} is for other optimizers; set betas and weight_decay in TrainingArguments",
        ),
        (
            checkpoints.get("use_reentrant"),
            "gradient_checkpointing_kwargs: use_reentrant=True hides whose example a gradient is; leave it out",
        ),
    ]  # fmt: skip


def check_call(
    privacy: PrivacyArguments | None,
    plan: PrivacyPlan | None,
    model: Any,
    args: Any,
    optimizer: Any,
    stock: Mapping[str, Any],
) -> None:
    if privacy is None and plan is None:
        raise ValueError("privacy=None: pass privacy=PrivacyArguments(epsilon=..., delta=...), or a calibrated plan=")
    if plan is not None:
        _check_plan(plan, privacy, args)
    if model is None:
        raise ValueError("model=None: pass the model itself; model_init would train anew, and spend epsilon anew")
    for name, mend in (
        ("compute_loss_func", "pass loss_per_example=, a function of (model, batch) that gives one loss an example"),
        ("model_init", "pass model="),
        ("optimizer_cls_and_kwargs", "choose PrivacyArguments(variant=)"),
    ):
        if stock.get(name) is not None:
            raise ValueError(f"{name} is not taken: {mend}")
    if optimizer is not None:
        if not isinstance(optimizer, PrivateOptimizer) or plan is None:
            raise ValueError(
                f"optimizers has a {type(optimizer).__name__}: it must be made by a function of dpoptim, such as "
                "dpoptim.scale_then_privatize(model, plan, lr=1e-3), and come with plan=, the same object"
            )
        if next(model.parameters()).device.type != args.device.type:
            raise ValueError(f"optimizers: move the model to {args.device} before its optimizer is made")
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if args.load_best_model_at_end or schedule in ("reduce_lr_on_plateau", "greedy"):
        warnings.warn(
            "the model or its learning rate is chosen by scores on eval_dataset, which the guarantee does not cover: "
            "fine for public data, otherwise it leaks what was evaluated on",
            stacklevel=3,
        )


def _check_plan(plan: PrivacyPlan, privacy: PrivacyArguments | None, args: Any) -> None:
    if not isinstance(plan, PrivacyPlan):
        raise ValueError(f"plan must be a PrivacyPlan, got {type(plan).__name__}")
    if plan.noise_multiplier is None:
        raise ValueError("plan has no noise_multiplier; call plan.calibrate(epsilon=..., delta=...)")
    if privacy is not None and (privacy.epsilon is not None or privacy.noise_multiplier is not None):
        raise ValueError(f"plan= and privacy with epsilon={privacy.epsilon}: the plan says it all; give one of the two")
    if plan.delta is not None and plan.is_private:
        refuse_weak_delta(plan.delta, plan.num_examples)
    if args.max_steps not in (-1, plan.steps):
        raise ValueError(f"max_steps={args.max_steps} and the plan has {plan.steps} steps; leave max_steps out")


def size_of(dataset: Any) -> int:
    if not hasattr(dataset, "__len__") or isinstance(dataset, torch.utils.data.IterableDataset):
        raise ValueError(
            f"train_dataset is a {type(dataset).__name__} without a length: examples are drawn by index; put a stream "
            "into a list or an indexed file first"
        )
    if len(dataset) == 0:
        raise ValueError("train_dataset is empty; there is nothing to train on")
    return len(dataset)
