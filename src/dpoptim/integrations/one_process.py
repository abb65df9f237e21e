"""Private training runs in one process on one device. Settings that ask for more are refused here."""

from __future__ import annotations

from typing import Any

from torch import nn

_ARGUMENTS = {  # of TrainingArguments, and how to avoid them
    "n_gpu": "Set CUDA_VISIBLE_DEVICES=0.",
    "world_size": "Start the script with python, not torchrun.",
    "deepspeed": "Leave it out.",
    "fsdp": "Leave it out.",
    "parallelism_config": "Leave it out.",
}
_BACKENDS = ("DEEPSPEED", "FSDP", "MEGATRON_LM")  # distributed_type of an Accelerator
_WRAPPERS = ("DistributedDataParallel", "DifferentiallyPrivateDistributedDataParallel", "FSDPModule")


def check_arguments(args: Any) -> None:
    """Refuse TrainingArguments for several processes or devices."""
    for name, fix in _ARGUMENTS.items():
        value = getattr(args, name, None)
        if value and value != 1:
            raise ValueError(f"{name}={value!r}: private training runs in one process on one device. {fix}")


def check_accelerator(accelerator: Any) -> None:
    """Refuse an Accelerator with several processes or a distributed backend, or one that scales the loss."""
    backend = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if accelerator.num_processes > 1 or backend in _BACKENDS:
        raise ValueError(
            f"num_processes={accelerator.num_processes}, distributed_type={backend}: private training runs in one "
            "process. Start the script with python."
        )
    if accelerator.scaler is not None:
        raise ValueError("mixed_precision='fp16' scales the loss, which changes clipping. Use 'bf16'.")


def check_module(module: nn.Module) -> None:
    """Refuse a module in a wrapper for distributed training."""
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPERS:
            raise ValueError(f"module is a {kind.__name__}: private training runs in one process. Pass a plain module.")
