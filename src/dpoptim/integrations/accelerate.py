"""A plain training loop under Hugging Face's Accelerate."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from dpoptim.data import PrivateLoader
from dpoptim.optim import PrivateOptimizer

__all__ = ["prepare_accelerate"]


def prepare_accelerate(
    accelerator: Any, model: nn.Module, optimizer: PrivateOptimizer, *others: Any
) -> tuple[Any, ...]:
    """Prepare a model and its private optimizer for a loop under Accelerate.

        model, optimizer = prepare_accelerate(accelerator, model, optimizer)
        for batch in loader:                                        # the private loader itself, not prepared
            with accelerator.autocast():
                losses = loss_per_example(model, move(batch, accelerator.device))
            accelerator.backward(losses.sum())
            optimizer.step()

    The loss is not known here, so run `dpoptim.check_example_independence` on a batch before training, and pad on the
    right.

    Args:
        accelerator: An `accelerate.Accelerator`, in full precision or bf16.
        model: The model that the optimizer was created for.
        optimizer: An optimizer of dpoptim.
        others: Schedulers and other objects to prepare, but no loaders.

    Returns:
        What `accelerator.prepare(model, optimizer, *others)` returns.

    Raises:
        ValueError: A setting of the accelerator would change clipping or sampling.

    Guarantee: `accelerator.backward` does not scale the loss, and every `optimizer.step()` reaches the optimizer.
    """
    if not isinstance(optimizer, PrivateOptimizer):
        raise ValueError(f"optimizer is a {type(optimizer).__name__}. Create it with dpoptim before preparing it.")
    steps = accelerator.gradient_accumulation_steps
    if steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={steps} scales the loss, which changes clipping. Leave it out, and use "
            "private_loader(..., micro_batch_size=...)."
        )
    check_accelerator(accelerator)
    for other in others:
        if isinstance(other, LRScheduler) and accelerator.num_processes > 1:
            raise ValueError(
                "a scheduler that Accelerate prepares takes one step per process. Do not prepare it: call its step() "
                "after optimizer.step()."
            )
        if isinstance(other, PrivateLoader) or hasattr(other, "batch_sampler"):
            raise ValueError(
                f"a {type(other).__name__} must not be prepared here. Iterate over the private loader itself."
            )
    keep_whole_models(accelerator)
    return tuple(accelerator.prepare(model, optimizer, *others))


def check_accelerator(accelerator: Any) -> None:
    """Refuse an Accelerator that splits the model or scales the loss."""
    backend = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if backend in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "TP"):
        raise ValueError(
            f"distributed_type={backend}: private training has a whole model in each process. Choose multi-GPU or "
            "multi-CPU in `accelerate config`."
        )
    if accelerator.scaler is not None:
        raise ValueError("mixed_precision='fp16' scales the loss, which changes clipping. Use 'bf16'.")


def keep_whole_models(accelerator: Any) -> None:
    """Let `accelerator.prepare` leave models unwrapped, because the optimizer adds up the gradients of processes."""
    accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)
