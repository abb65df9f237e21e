"""What private training has beside Hugging Face's TrainingArguments, and what it makes of those."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

import dpoptim.optim
from dpoptim.noise import Independent, NoiseKey
from dpoptim.optim import Adam, AdamW, PrivateOptimizer
from dpoptim.optim.variants import noise_level
from dpoptim.privacy import Adjacency, Gradient, IndependentMoments, JointMoments, PrivacyPlan, Release
from dpoptim.theory import choose_noise
from dpoptim.training.recipes.defaults import default_delta
from dpoptim.training.recipes.plans import noise_of, sampling_of
from dpoptim.training.recipes.recipe import VARIANTS

KEY_NAME = "noise.key"
STOCK_EPS = 1e-8
"""TrainingArguments' own adam_epsilon, which is taken as "not set": it is no floor for noisy second moments."""

_RELEASES: Mapping[str, Release] = {"independent_moments": IndependentMoments(), "joint_moments": JointMoments()}


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class PrivacyArguments:
    """The guarantee that is asked for; a dataclass of plain values, as `HfArgumentParser` takes them.

    Batch size, steps, learning rate, betas, weight decay and schedule are those of TrainingArguments: the expected
    batch is per_device_train_batch_size·gradient_accumulation_steps and the steps are max_steps, or
    ⌊num_train_epochs·examples/batch⌋ (at least one).

    >>> PrivacyArguments(epsilon=8.0, delta=1e-6).variant
    'scale_then_privatize'
    """

    epsilon: float | None = _option(None, "The privacy loss to keep to; this or noise_multiplier.")
    delta: float | None = _option(None, "The δ of (ε, δ); by default a power of ten at or below 1/(10·examples).")
    noise_multiplier: float | None = _option(None, "Noise on the clipped sum over clip_norm, in place of epsilon.")
    clip_norm: float | None = _option(None, "Bound on ONE example's gradient; by default max_grad_norm.")
    sampling: str = _option("poisson", "poisson, shuffled, cyclic or cyclic:GROUPS.")
    noise: str = _option("independent", "independent, auto, banded-toeplitz:BANDS, buffered-toeplitz:BUFFERS, ...")
    adjacency: str = _option("zero_out", "Which datasets are neighbours: zero_out, add_remove or replace.")
    num_examples: int | None = _option(None, "A public size of the data; needed under add_remove, else its length.")
    variant: str = _option("scale_then_privatize", f"One of {', '.join(VARIANTS)}.")
    eps: float | None = _option(None, "Adam's eps; by default adam_epsilon if changed, else the variant's own.")
    eps_scale: float | None = _option(None, "Of scale_then_privatize; by default twice the least stable value.")
    task: str | None = _option(None, "masked-lm, causal-lm, ...; by default found by the model's class.")
    key_file: str | None = _option(None, "Where the secret key lies; by default noise.key in output_dir.")
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

    Guarantee: batch size and steps follow from `args` and the (public) number of examples alone. Epochs are rounded
    down, so that no example takes part once more than there are epochs.
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
    clip_norm = args.max_grad_norm if privacy.clip_norm is None else privacy.clip_norm
    if not clip_norm:
        raise ValueError(f"clip_norm: max_grad_norm={args.max_grad_norm} is no bound; set PrivacyArguments(clip_norm=)")
    automatic = privacy.noise == "auto" and privacy.epsilon is not None
    noise = Independent() if privacy.noise == "auto" else noise_of(privacy.noise)
    delta = default_delta(size) if privacy.delta is None else privacy.delta
    plan = PrivacyPlan(
        num_examples=size,
        batch_size=batch_size,
        steps=args.max_steps if args.max_steps > 0 else max(1, _passes(args.num_train_epochs, size, batch_size)),
        clip_norm=float(clip_norm),
        sampling=sampling_of(privacy.sampling, noise, automatic=automatic),
        noise=noise,
        release=_RELEASES.get(privacy.variant, Gradient()),
        adjacency=adjacency,
        noise_multiplier=privacy.noise_multiplier,
        delta=delta,
    )
    if privacy.epsilon is None:
        return plan
    if automatic:
        return choose_noise(plan, epsilon=privacy.epsilon, delta=delta, parameters=model).plan
    return plan.calibrate(epsilon=privacy.epsilon, delta=delta)


def _passes(epochs: float, examples: int, batch_size: int) -> int:
    return math.floor(epochs * examples / batch_size + 1e-9)


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
    if privacy.eps_scale is not None and privacy.variant != "scale_then_privatize":
        raise ValueError(f"eps_scale={privacy.eps_scale} is for variant='scale_then_privatize' alone; leave it out")
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in trained if name in decayed], "weight_decay": args.weight_decay},
        {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0},
    ]
    common = {"key": key, "param_groups": [group for group in groups if group["params"]]}
    make: Callable[..., PrivateOptimizer] = getattr(dpoptim.optim, privacy.variant)
    if privacy.variant == "dp_sgd":
        return make(model, plan, args.learning_rate, momentum=args.adam_beta1, **common)
    rule = AdamW(betas=(args.adam_beta1, args.adam_beta2), eps=_eps(privacy, args, plan))
    options = {"eps_scale": privacy.eps_scale} if privacy.variant == "scale_then_privatize" else {}
    return make(model, plan, args.learning_rate, rule=rule, **options, **common)


def _eps(privacy: PrivacyArguments, args: Any, plan: PrivacyPlan) -> float:
    if privacy.eps is not None:
        return privacy.eps
    if args.adam_epsilon != STOCK_EPS:
        return float(args.adam_epsilon)
    floored = privacy.variant in ("bias_correction", "independent_moments", "joint_moments")
    return max(noise_level(plan, plan.release), Adam().eps) if floored else Adam().eps


def key_path(privacy: PrivacyArguments, args: Any) -> Path:
    """Where the key lies: never in a checkpoint's folder, and beside output_dir where that is uploaded."""
    if privacy.key_file is not None:
        return Path(privacy.key_file)
    beside = _key_beside(args.output_dir)
    return beside if args.push_to_hub or beside.exists() else Path(args.output_dir) / KEY_NAME


def take_key_out(privacy: PrivacyArguments, args: Any) -> None:
    """Move the key from output_dir to `OUTPUT_DIR.noise.key` beside it, before the folder is uploaded."""
    folder = Path(args.output_dir).resolve()
    if privacy.key_file is not None and folder in Path(privacy.key_file).resolve().parents:
        raise ValueError(f"key_file={privacy.key_file!r} lies in output_dir, which is uploaded; choose a place outside")
    inside, beside = folder / KEY_NAME, _key_beside(args.output_dir)
    if inside.exists():
        if beside.exists():
            raise ValueError(f"{inside} would be uploaded, and {beside} exists; move one of them away")
        inside.rename(beside)
        warnings.warn(f"the noise key was moved to {beside}, so that it is not uploaded", stacklevel=3)


def _key_beside(output_dir: str) -> Path:
    folder = Path(output_dir).resolve()
    return folder.with_name(f"{folder.name}.{KEY_NAME}")
