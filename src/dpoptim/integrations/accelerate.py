"""A plain loop under Hugging Face's Accelerate; what would change clipping or sampling is refused before it begins."""

from __future__ import annotations

from typing import Any

from torch import nn

from dpoptim.data import PrivateLoader
from dpoptim.optim import PrivateOptimizer


def prepare_accelerate(
    accelerator: Any, model: nn.Module, optimizer: PrivateOptimizer, *others: Any
) -> tuple[Any, ...]:
    """`accelerator.prepare(model, optimizer, *others)` for a private optimizer; schedulers may be among the others.

        model, optimizer = prepare_accelerate(accelerator, model, optimizer)
        for batch in loader:                                        # the private loader itself, not prepared
            with accelerator.autocast():
                losses = loss_per_example(model, move(batch, accelerator.device))
            accelerator.backward(losses.sum())
            optimizer.step()

    Guarantee: `accelerator.backward` leaves the loss as it is, and every `optimizer.step()` reaches the optimizer.
    Edge cases: gradient_accumulation_steps > 1 divides the loss, so that examples would be clipped at another norm
    than the plan's; private_loader(micro_batch_size=...) takes its place. fp16 scales the loss, with the same
    effect. More than one process, DeepSpeed and FSDP are refused, and so is a loader that Accelerate would shard.
    No batch and no loss is at hand here, so that nothing is tried on them, as PrivateTrainer does when it begins: run
    dpoptim.check_example_independence on a batch, and pad on the right.
    """
    if not isinstance(optimizer, PrivateOptimizer):
        raise ValueError(
            f"optimizer must be made by a function of dpoptim, got {type(optimizer).__name__}; make it before it is "
            "prepared, by dpoptim.scale_then_privatize(model, plan, lr=1e-3), say"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps} divides the loss, which changes "
            "clipping; leave it out and use private_loader(..., micro_batch_size=...)"
        )
    if accelerator.scaler is not None:
        raise ValueError("mixed_precision='fp16' scales the loss, which changes clipping; use 'bf16'")
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if accelerator.num_processes > 1 or kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        raise ValueError(
            f"num_processes={accelerator.num_processes}, {kind}: private training runs in one process for now"
        )
    for other in others:
        if isinstance(other, PrivateLoader) or hasattr(other, "batch_sampler"):
            raise ValueError(
                f"a {type(other).__name__} is not prepared: iterate over the private loader itself and move its "
                "batches to accelerator.device; other loaders go through accelerator.prepare on their own"
            )
    return tuple(accelerator.prepare(model, optimizer, *others))
