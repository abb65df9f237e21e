"""PrivacyArguments, and the plan and optimizer that follow from them and from TrainingArguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dpoptim.arguments import check_at_most, check_choice, check_delta, default_delta
from dpoptim.integrations.named_settings import (
    CLIP_NORM,
    CLIPPING,
    VARIANTS,
    make_optimizer,
    make_plan,
    release_of,
    steps_of,
)
from dpoptim.noise import NoiseKey
from dpoptim.optim import PrivateOptimizer
from dpoptim.optim.out_of_memory import Remedies
from dpoptim.privacy import Adjacency, PrivacyPlan

# Defaults of TrainingArguments count as "not set".
STOCK_EPS = 1e-8  # of adam_epsilon: too small for noisy second moments
STOCK_GRAD_NORM = 1.0  # of max_grad_norm: meant for batches, not for examples


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class PrivacyArguments:
    """The privacy settings of a `PrivateTrainer`; `HfArgumentParser` can parse them.

    Everything else comes from TrainingArguments. The expected batch size is
    per_device_train_batch_size·gradient_accumulation_steps·processes. Steps are max_steps, or
    ⌈num_train_epochs·examples/batch⌉.

    Args:
        epsilon: The ε to calibrate the noise to. Give this or `noise_multiplier`.
        delta: The δ of (ε, δ). Defaults to a power of ten of at most 1/(10·examples).
        noise_multiplier: The standard deviation of the noise on the clipped sum, over `clip_norm`.
        clip_norm: The bound on the gradient of one example. Defaults to max_grad_norm if that was changed.
        clipping: fixed, adaptive (the bound follows the 0.9 quantile of norms, with slightly more noise) or normalized.
        sampling: shuffled, auto, poisson, cyclic or cyclic:GROUPS.
        noise: auto, independent, banded-toeplitz:BANDS, buffered-toeplitz:BUFFERS and others.
        adjacency: zero_out, add_remove or replace.
        num_examples: A public size of the dataset. Required under add_remove.
        user_column: To protect users: the column of the training data that names the user of each record.
        records_per_user: The most records of one user that are used in a step. Batch sizes then count users, except
            that per_device_train_batch_size is also the most records in memory at once.
        variant: The private optimizer.
        eps: The eps of Adam. Defaults to adam_epsilon if that was changed, otherwise to the variant's default.
        eps_scale: For scale_then_privatize. Defaults to twice the smallest stable value.
        averaged: The decay of a moving average of the weights, such as 0.99. `evaluate`, `predict` and `save_model`
            use the average.
        task: The kind of loss. Defaults to that of the model's class.
        key_file: The file of the secret key. By default a new key is saved in OUTPUT_DIR.secret.
        log_norms: Log the norms of the released gradient and of its noise.
        debug_loss: Log the training loss, which is NOT PRIVATE.

    >>> PrivacyArguments(epsilon=8.0, delta=1e-6).variant
    'scale_then_privatize'
    """

    epsilon: float | None = _option(None, "The ε to calibrate the noise to; this or noise_multiplier.")
    delta: float | None = _option(None, "The δ of (ε, δ); defaults to a power of ten of at most 1/(10·examples).")
    noise_multiplier: float | None = _option(None, "Noise on the clipped sum, over clip_norm; instead of epsilon.")
    clip_norm: float | None = _option(None, "Bound on ONE example's gradient; defaults to max_grad_norm if changed.")
    clipping: str = _option("fixed", f"How gradients are bounded: {', '.join(CLIPPING)}.")
    sampling: str = _option("shuffled", "shuffled, auto, poisson, cyclic or cyclic:GROUPS.")
    noise: str = _option("auto", "auto, independent, banded-toeplitz:BANDS, buffered-toeplitz:BUFFERS, ...")
    exact_noise: bool = _option(False, "Add noise without floating-point errors, which takes more time.")
    adjacency: str = _option("zero_out", "Which datasets are neighbours: zero_out, add_remove or replace.")
    num_examples: int | None = _option(None, "A public size of the dataset; required under add_remove.")
    user_column: str | None = _option(None, "The column that names the user of each record, to protect users.")
    records_per_user: int | None = _option(None, "The most records of one user that are used in a step.")
    variant: str = _option("scale_then_privatize", f"One of {', '.join(VARIANTS)}.")
    eps: float | None = _option(None, "The eps of Adam; defaults to adam_epsilon if changed, else the variant's own.")
    eps_scale: float | None = _option(None, "For scale_then_privatize; defaults to twice the smallest stable value.")
    averaged: float | None = _option(None, "Decay of a moving average of the weights, to evaluate and save.")
    task: str | None = _option(None, "masked-lm, causal-lm, seq2seq-lm, ...; defaults to that of the model's class.")
    key_file: str | None = _option(None, "The file of the secret key; defaults to a new one in OUTPUT_DIR.secret.")
    log_norms: bool = _option(False, "Log the norms of the released gradient and of its noise.")
    debug_loss: bool = _option(False, "Log the training loss, which is NOT PRIVATE, as not_private_loss.")

    def __post_init__(self) -> None:
        check_choice("variant", self.variant, VARIANTS)
        check_choice("adjacency", self.adjacency, [kind.value for kind in Adjacency])
        check_choice("clipping", self.clipping, tuple(CLIPPING))


def plan_for(privacy: PrivacyArguments, args: Any, *, examples: int, model: nn.Module) -> PrivacyPlan:
    """Build the calibrated plan of a run over `examples` examples, or users.

    Guarantee: Batch size and steps depend only on `args` and the public number of examples.
    """
    if (privacy.epsilon is None) == (privacy.noise_multiplier is None):
        raise ValueError(
            f"epsilon={privacy.epsilon}, noise_multiplier={privacy.noise_multiplier}. Give exactly one of the two."
        )
    if (privacy.user_column is None) != (privacy.records_per_user is None):
        given = f"user_column={privacy.user_column!r}, records_per_user={privacy.records_per_user}"
        raise ValueError(f"{given}. To protect users, give both.")
    adjacency = Adjacency(privacy.adjacency)
    if privacy.num_examples is None and not adjacency.dataset_size_is_public:
        raise ValueError(
            f"num_examples=None, but {privacy.adjacency} makes the real size private. Declare a public one."
        )
    size = privacy.num_examples or examples
    batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    check_at_most("per_device_train_batch_size·gradient_accumulation_steps·processes", batch_size, "num_examples", size,
                   hint="Use a smaller per_device_train_batch_size or gradient_accumulation_steps.")  # fmt: skip
    clip_norm = privacy.clip_norm
    if clip_norm is None:
        if not args.max_grad_norm:
            raise ValueError(f"max_grad_norm={args.max_grad_norm} is not a bound. Set PrivacyArguments(clip_norm=).")
        clip_norm = CLIP_NORM if args.max_grad_norm == STOCK_GRAD_NORM else float(args.max_grad_norm)
    delta = default_delta(size) if privacy.delta is None else privacy.delta
    if privacy.noise_multiplier != 0:
        check_delta(delta, size)
    return make_plan(
        num_examples=size,
        batch_size=batch_size,
        steps=args.max_steps if args.max_steps > 0 else steps_of(args.num_train_epochs, size, batch_size),
        clip_norm=clip_norm,
        clipping=privacy.clipping,
        exact_noise=privacy.exact_noise,
        sampling=privacy.sampling,
        noise=privacy.noise,
        release=release_of(privacy.variant),
        adjacency=adjacency,
        epsilon=privacy.epsilon,
        noise_multiplier=privacy.noise_multiplier,
        delta=delta,
        parameters=model,
        records_per_user=privacy.records_per_user,
    )


def optimizer_for(
    privacy: PrivacyArguments,
    args: Any,
    plan: PrivacyPlan,
    model: nn.Module,
    key: NoiseKey,
    decayed: set[str],  # names of the parameters with weight decay
) -> PrivateOptimizer:
    """Create the variant's optimizer with the settings of AdamW in `args`; the momentum of dp_sgd is adam_beta1."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in trained if name in decayed], "weight_decay": args.weight_decay},
        {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0},
    ]
    is_set = privacy.eps is None and args.adam_epsilon != STOCK_EPS
    return make_optimizer(
        privacy.variant,
        model,
        plan,
        learning_rate=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=float(args.adam_epsilon) if is_set else privacy.eps,
        eps_scale=privacy.eps_scale,
        averaged=privacy.averaged,
        weight_decay=0.0,
        key=key,
        param_groups=[group for group in groups if group["params"]],
    )


def remedies_for(micro_batch_size: int, plan: PrivacyPlan, processes: int) -> Remedies:
    """What saves memory: the next smaller micro-batch that divides the expected batch, or a different optimizer."""
    most, batch = micro_batch_size // 2, plan.batch_size // processes
    size = next((size for size in range(min(most, batch), 0, -1) if batch % size == 0), 0)
    smaller = f"set per_device_train_batch_size={size} and gradient_accumulation_steps={batch // size}" if size else ""
    given = "and pass it with its plan: optimizers=(optimizer, None), plan=plan"
    return Remedies(
        smaller_batches=smaller,
        clipping=f"{Remedies.clipping} {given}",
        noise='in a new run, use PrivacyArguments(noise="banded-inverse:8")',
        fewer_parameters="train only LoRA factors (peft)",
    )
