"""Jobs of PrivateTrainer and Accelerate, in each process: python -m tests.distributed.trainer_jobs FOLDER NAME ..."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch

from dpoptim.integrations.accelerate import prepare_accelerate
from dpoptim.integrations.hugging_face import PrivacyArguments, PrivateTrainer
from tests.distributed import jobs
from tests.integrations.hugging_face import cases

EXACT = PrivacyArguments(noise_multiplier=0.0, clip_norm=0.5, variant="dp_sgd", sampling="shuffled", delta=1e-3)
NOISY = PrivacyArguments(noise_multiplier=0.6, delta=1e-3)


def _trainer(folder: Path, privacy: PrivacyArguments, **changes: Any) -> PrivateTrainer:
    """Every step draws the whole dataset, so that without noise the result does not depend on the key."""
    records = cases.labelled()[:12]
    split = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2 // int(os.environ["WORLD_SIZE"])}
    args = cases.training_args(folder, **split, **changes)
    return PrivateTrainer(
        model=cases.classifier(dropout=0.1 if privacy is NOISY else 0.0),
        args=args,
        train_dataset=records,
        processing_class=cases.WORDS,
        privacy=privacy,
    )


def exact(folder: str) -> Any:
    trainer = _trainer(Path(folder), EXACT)
    trainer.train()
    return jobs.weights(trainer.model)


def paused(folder: str) -> dict[str, Any]:
    """Train with noise and save after two of four steps; resume from there in a second trainer."""
    saving = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    first = _trainer(Path(folder), NOISY, **saving)
    first.train()
    second = _trainer(Path(folder), NOISY, **saving)
    second.train(resume_from_checkpoint=str(Path(folder, "out", "checkpoint-2")))
    return {
        "weights": jobs.weights(first.model),
        "again": jobs.weights(second.model),
        "batch size": first.plan.batch_size,
        "key": first.private_optimizer.key.fingerprint(),  # type: ignore[union-attr]
        "files": sorted(file.name for file in Path(folder, "out", "checkpoint-2").iterdir()),
        "secrets": sorted(file.suffix for file in Path(folder, "out.secret").iterdir()),
        "logged": sorted({name for entry in first.state.log_history for name in entry}),
    }


def loop() -> dict[str, Any]:
    """A loop under Accelerate, and a scheduler that must not be prepared."""
    accelerator = accelerate.Accelerator(cpu=True)
    plan = jobs.plan_of()
    model, optimizer, loader = jobs.started(plan)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    found = {"scheduler": "accepted"}
    try:
        prepare_accelerate(accelerator, model, optimizer, scheduler)
    except ValueError as error:
        found["scheduler"] = str(error)
    model, optimizer = prepare_accelerate(accelerator, model, optimizer)
    for x, y in loader:
        accelerator.backward(jobs.losses_of(model, x, y).sum())
        optimizer.step()
    return {**found, "weights": jobs.weights(model), "kind": type(model).__name__}


def own_loop() -> Any:
    """The same without Accelerate."""
    model, optimizer, loader = jobs.started(jobs.plan_of())
    jobs.train(model, optimizer, loader, jobs.STEPS)
    return jobs.weights(model)


if __name__ == "__main__":
    jobs.main(sys.argv[1], sys.argv[2:], globals())
