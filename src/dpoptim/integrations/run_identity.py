"""The header of a run's step ledger: what must stay the same when a run is paused and resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dpoptim.optim import PrivateOptimizer
from dpoptim.privacy import RunHeader

_TRAINING_ARGUMENTS = (
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "seed", "bf16",
)  # fmt: skip
_IF_GIVEN = ("user_column", "records_per_user")
_MAY_CHANGE = (  # of PrivacyArguments and recipes
    "key_file", "log_norms", "debug_loss", "device", "log_every", "checkpoint_every", "evaluate_every",
    "micro_batch_size", "micro_batch_tokens", "report_to",
    "data", "validation_data", "model",  # files may move: the digest of the records is compared
)  # fmt: skip


def run_header(optimizer: PrivateOptimizer, *, settings: Mapping[str, Any], data: str | None) -> RunHeader:
    """Build the header for `StepLedger.open`, after `optimizer.load_state_dict` if a run is resumed.

    It leaves out model code and weights. If they change, a repeated step has different gradients and is refused.
    """
    mechanism = optimizer.mechanism
    return RunHeader(
        key=optimizer.key,
        run_id=mechanism.run_id,
        plan=optimizer.plan.to_dict(),
        strategy=mechanism.strategy_digest,
        settings=settings,
        data=data,
    )


def trainer_settings(args: Any, privacy: Any) -> dict[str, Any]:
    """The settings of a PrivateTrainer run, from its TrainingArguments and PrivacyArguments."""
    return {
        **{name: _plain(getattr(args, name, None)) for name in _TRAINING_ARGUMENTS},
        **{
            name: _plain(value)
            for name, value in vars(privacy).items()
            if name not in _MAY_CHANGE and not (name in _IF_GIVEN and value is None)
        },
    }


def recipe_settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a `dpoptim train` run, from its complete recipe."""
    return {name: value for name, value in recipe.items() if name not in _MAY_CHANGE}


def _plain(value: Any) -> Any:
    """The value as JSON has it; enum members by their value, other objects by their type."""
    return json.loads(json.dumps(value, default=lambda part: getattr(part, "value", type(part).__name__)))
