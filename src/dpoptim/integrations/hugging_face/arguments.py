"""What private training has beside Hugging Face's TrainingArguments, and what it makes of those."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dpoptim.app.recipes.defaults import CLIP_NORM, default_delta, refuse_weak_delta, steps_of
from dpoptim.app.recipes.recipe import VARIANTS
from dpoptim.integrations.named_settings import make_optimizer, make_plan, release_of
from dpoptim.noise import NoiseKey
from dpoptim.optim import PrivateOptimizer
from dpoptim.privacy import Adjacency, PrivacyPlan

STOCK_EPS = 1e-8
"""TrainingArguments' own adam_epsilon, which is taken as "not set": it is no floor for noisy second moments."""

STOCK_GRAD_NORM = 1.0
"""TrainingArguments' own max_grad_norm, which is taken as "not set": it bounds a batch, and not one example."""


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class PrivacyArguments:
    """The guarantee that is asked for; a dataclass of plain values, as `HfArgumentParser` takes them.

    Batch size, steps, learning rate, betas, weight decay and schedule are those of TrainingArguments: the expected
    batch is per_device_train_batch_size·gradient_accumulation_steps and the steps are max_steps, or
    ⌈num_train_epochs·examples/batch⌉.

    >>> PrivacyArguments(epsilon=8.0, delta=1e-6).variant
    'scale_then_privatize'
    """

    epsilon: float | None = _option(None, "The privacy loss to keep to; this or noise_multiplier.")
    delta: float | None = _option(None, "The δ of (ε, δ); by default a power of ten at or below 1/(10·examples).")
    noise_multiplier: float | None = _option(None, "Noise on the clipped sum over clip_norm, in place of epsilon.")
    clip_norm: float | None = _option(
        None, f"Bound on ONE example's gradient; by default max_grad_norm if changed, else {CLIP_NORM}."
    )
    sampling: str = _option("auto", "auto (secret where that is proved for the noise), poisson, shuffled, cyclic, ...")
    noise: str = _option("independent", "independent, auto, banded-toeplitz:BANDS, buffered-toeplitz:BUFFERS, ...")
    adjacency: str = _option("zero_out", "Which datasets are neighbours: zero_out, add_remove or replace.")
    num_examples: int | None = _option(None, "A public size of the data; needed under add_remove, else its length.")
    variant: str = _option("scale_then_privatize", f"One of {', '.join(VARIANTS)}.")
    eps: float | None = _option(None, "Adam's eps; by default adam_epsilon if changed, else the variant's own.")
    eps_scale: float | None = _option(None, "Of scale_then_privatize; by default twice the least stable value.")
    task: str | None = _option(None, "masked-lm, causal-lm, seq2seq-lm, ...; by default found by the model's class.")
    key_file: str | None = _option(None, "Where the secret key lies; by default a new one in OUTPUT_DIR.secret.")
    log_norms: bool = _option(False, "Log the norm of the released gradient and of the noise in it.")
    debug_loss: bool = _option(False, "Log the training loss, which is NOT PRIVATE, as not_private_loss.")

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant={self.variant!r} must be one of {', '.join(VARIANTS)}")
        kinds = [kind.value for kind in Adjacency]
        if self.adjacency not in kinds:
            raise ValueError(f"adjacency={self.adjacency!r} must be one of {', '.join(kinds)}")


def plan_for(privacy: PrivacyArguments, args: Any, *, examples: int, model: nn.Module) -> PrivacyPlan:
    """The calibrated plan of a run over `examples` examples.

    Guarantee: batch size and steps follow from `args` and the (public) number of examples alone. Defaults are those
    of a recipe: epochs are rounded up to whole steps, and max_grad_norm=1.0, Trainer's own, is taken as "not set".
    Edge cases: a δ of 1/examples or more is refused.
    """
    if (privacy.epsilon is None) == (privacy.noise_multiplier is None):
        raise ValueError(
            f"epsilon={privacy.epsilon} and noise_multiplier={privacy.noise_multiplier}: give PrivacyArguments one of "
            "the two, not both and not none"
        )
    adjacency = Adjacency(privacy.adjacency)
    if privacy.num_examples is None and not adjacency.dataset_size_is_public:
        raise ValueError(
            f"num_examples=None: under adjacency={privacy.adjacency!r} the size of the data is private; declare one"
        )
    size = privacy.num_examples or examples
    batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if batch_size > size:
        raise ValueError(
            f"per_device_train_batch_size·gradient_accumulation_steps = {batch_size} exceeds the {size} examples of "
            "train_dataset; make either smaller"
        )
    clip_norm = _clip_norm(privacy, args)
    delta = default_delta(size) if privacy.delta is None else privacy.delta
    if privacy.noise_multiplier != 0:
        refuse_weak_delta(delta, size)
    return make_plan(
        num_examples=size,
        batch_size=batch_size,
        steps=args.max_steps if args.max_steps > 0 else steps_of(args.num_train_epochs, size, batch_size),
        clip_norm=clip_norm,
        sampling=privacy.sampling,
        noise=privacy.noise,
        release=release_of(privacy.variant),
        adjacency=adjacency,
        epsilon=privacy.epsilon,
        noise_multiplier=privacy.noise_multiplier,
        delta=delta,
        parameters=model,
    )


def _clip_norm(privacy: PrivacyArguments, args: Any) -> float:
    if privacy.clip_norm is not None:
        return privacy.clip_norm
    if not args.max_grad_norm:
        raise ValueError(f"clip_norm: max_grad_norm={args.max_grad_norm} is no bound; set PrivacyArguments(clip_norm=)")
    return CLIP_NORM if args.max_grad_norm == STOCK_GRAD_NORM else float(args.max_grad_norm)


def optimizer_for(
    privacy: PrivacyArguments,
    args: Any,
    plan: PrivacyPlan,
    model: nn.Module,
    *,
    key: NoiseKey,
    decayed: set[str],  # names of parameters that weight decay applies to
) -> PrivateOptimizer:
    """The variant's optimizer with AdamW's settings as `args` has them; in dp_sgd the momentum is adam_beta1."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in trained if name in decayed], "weight_decay": args.weight_decay},
        {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0},
    ]
    stock = privacy.eps is None and args.adam_epsilon != STOCK_EPS
    return make_optimizer(
        privacy.variant,
        model,
        plan,
        learning_rate=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=float(args.adam_epsilon) if stock else privacy.eps,
        eps_scale=privacy.eps_scale,
        weight_decay=0.0,
        key=key,
        param_groups=[group for group in groups if group["params"]],
    )
