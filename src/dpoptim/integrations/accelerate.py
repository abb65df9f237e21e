"""A plain training loop under Hugging Face's Accelerate."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from dpoptim.data import PrivateLoader
from dpoptim.data.shards import fsdp_modules
from dpoptim.optim import PrivateOptimizer

__all__ = ["prepare_accelerate", "shard_for_accelerate"]


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
        ValueError: A setting of the accelerator would change clipping or sampling, or it uses FSDP2 and the model is
            not sharded yet.

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
    if uses_fsdp2(accelerator) and not fsdp_modules(model):
        raise ValueError(
            "the accelerator uses FSDP2, but the model is not sharded. Call shard_for_accelerate(accelerator, model) "
            "before creating the optimizer."
        )
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
    keep_models(accelerator)
    return tuple(accelerator.prepare(model, optimizer, *others))


def shard_for_accelerate(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard a model with Accelerate's FSDP2 settings, before you create its private optimizer.

        model = shard_for_accelerate(accelerator, model)
        optimizer = dpoptim.scale_then_privatize(model, plan, lr=1e-3)
        model, optimizer = prepare_accelerate(accelerator, model, optimizer)

    Args:
        accelerator: An `accelerate.Accelerator`. Without FSDP2 the model stays whole.
        model: A whole model. It is changed in place.

    Returns:
        The model.

    Raises:
        ValueError: A setting of the accelerator would change clipping or sampling.
    """
    check_accelerator(accelerator)
    if not uses_fsdp2(accelerator):
        return model
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin, embedding = accelerator.state.fsdp_plugin, getattr(model, "get_input_embeddings", lambda: None)()
    if plugin.transformer_cls_names_to_wrap is None and embedding is not None:
        # Accelerate shards the embedding by itself, and would fail if the default (BertEmbeddings) had sharded it.
        around = {type(module).__name__ for module in model.modules() if embedding in module.modules()}
        kinds = {type(module).__name__ for module in model.modules()} - around
        plugin.transformer_cls_names_to_wrap = sorted(kinds & set(getattr(model, "_no_split_modules", None) or ()))
    sharded: nn.Module = fsdp2_prepare_model(accelerator, model)
    return sharded


def uses_fsdp2(accelerator: Any) -> bool:
    """Whether an Accelerator shards models with FSDP2; on CPUs it ignores its FSDP plugin."""
    return bool(getattr(accelerator, "is_fsdp2", False))


def check_accelerator(accelerator: Any) -> None:
    """Refuse an Accelerator that scales the loss, or divides the model in any way but FSDP2."""
    backend = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if backend in ("DEEPSPEED", "MEGATRON_LM", "TP", "FSDP") and not uses_fsdp2(accelerator):
        raise ValueError(
            f"distributed_type={backend}: private training has a whole model in each process, or FSDP2 "
            "(fsdp_version=2). Choose one of them in `accelerate config`."
        )
    config = getattr(accelerator, "parallelism_config", None)
    if config is not None and set(config.active_mesh_dims) - {"dp_shard"}:
        raise ValueError(
            f"parallelism_config has {', '.join(config.active_mesh_dims)}: private training divides models by dp_shard "
            "alone. Leave it out."
        )
    plugin = accelerator.state.fsdp_plugin if uses_fsdp2(accelerator) else None
    if plugin is not None and plugin.activation_checkpointing:
        raise ValueError("activation_checkpointing of FSDP renames parameters. Use the model's gradient checkpointing.")
    if plugin is not None and type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        raise ValueError("cpu_offload of FSDP is not supported: parameters must stay on the GPU. Leave it out.")
    if accelerator.scaler is not None:
        raise ValueError("mixed_precision='fp16' scales the loss, which changes clipping. Use 'bf16'.")


def keep_models(accelerator: Any) -> None:
    """Make `accelerator.prepare` leave models unchanged, because the optimizer adds up the gradients of processes.

    For sharded models, also refuse `save_state` and `load_state`, which would lose the state of the private run.
    """
    accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)
    if uses_fsdp2(accelerator):
        accelerator._prepare_fsdp2 = partial(_prepare_sharded, accelerator)
        accelerator.register_save_state_pre_hook(_refuse_state)
        accelerator.register_load_state_pre_hook(_refuse_state)


def _prepare_sharded(accelerator: Any, *given: Any) -> list[Any]:
    """Do what `Accelerator.prepare` does, except for models, which are sharded already."""
    accelerator._models += [one for one in given if isinstance(one, nn.Module) and one not in accelerator._models]
    for is_first in (True, False):
        given = tuple(
            one if isinstance(one, nn.Module) else accelerator._prepare_one(one, first_pass=is_first) for one in given
        )
    return list(given)


def _refuse_state(*_: Any) -> None:
    raise ValueError(
        "Accelerate's checkpoints of FSDP2 lack the state of the private run. Save dpoptim.data.whole_state(...)."
    )
