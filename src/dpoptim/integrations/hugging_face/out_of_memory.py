"""What an out-of-memory error of PrivateTrainer recommends, in the words of TrainingArguments."""

from __future__ import annotations

from typing import Any

from dpoptim.optim.out_of_memory import Remedies
from dpoptim.privacy import PrivacyPlan


def trainer_remedies(args: Any, plan: PrivacyPlan) -> Remedies:
    """Recommend the next smaller micro-batch whose product with gradient_accumulation_steps is the expected batch.

    >>> from types import SimpleNamespace
    >>> plan = PrivacyPlan(num_examples=100, batch_size=60, steps=1)
    >>> trainer_remedies(SimpleNamespace(per_device_train_batch_size=15), plan).smaller_batches
    'set per_device_train_batch_size=6 and gradient_accumulation_steps=10'
    """
    most, batch = args.per_device_train_batch_size // 2, plan.batch_size
    size = next((size for size in range(min(most, batch), 0, -1) if batch % size == 0), 0)
    smaller = f"set per_device_train_batch_size={size} and gradient_accumulation_steps={batch // size}" if size else ""
    given = "and pass it with its plan: optimizers=(optimizer, None), plan=plan"
    return Remedies(
        smaller_batches=smaller,
        clipping=f"{Remedies.clipping} {given}",
        noise=f"{Remedies.noise} {given}",
        fewer_parameters="train only LoRA factors (peft)",
    )
