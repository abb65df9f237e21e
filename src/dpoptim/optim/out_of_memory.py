"""Advice on an out-of-memory error in a private step: which memory is in use, and which setting to change first.

The note uses settings and shapes. It never contains the number of examples in a batch, which is secret.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dpoptim.kernels.inverse_root import ComputedScale

if TYPE_CHECKING:
    from dpoptim.optim.optimizer import PrivateOptimizer

RUNNING = "running the model"
CLIPPING = "clipping"
UPDATING = "adding noise and updating parameters"

_BEGINNING = "Out of memory while "
_UNITS = {"micro_batch_size": "examples", "micro_batch_tokens": "tokens"}
_SMALLEST_TOKENS = 64
_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """Changes that save memory, in the words of the settings that the user has; "" where there is no such setting.

    Args:
        smaller_batches: How to compute fewer examples at once; None derives it from the `private_loader`.
        clipping: How to clip with less memory.
        noise: How to store less noise.
        fewer_parameters: How to train fewer parameters.
    """

    smaller_batches: str | None = None
    clipping: str = "create the optimizer with clipping_memory=0"
    noise: str = "create the optimizer with noise_memory=NoiseMemory(on_host=True, bits=16)"
    fewer_parameters: str = "train only LoRA factors"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that device or host memory is exhausted.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@contextlib.contextmanager
def advising(optimizer: PrivateOptimizer, doing: str) -> Iterator[None]:
    """Add advice to an out-of-memory error that leaves the block; its type and traceback stay."""
    try:
        yield
    except Exception as error:
        add_advice(error, optimizer, doing)
        raise


def add_advice(error: Exception, optimizer: PrivateOptimizer, doing: str) -> None:
    """Note on an out-of-memory error what used the memory and what to change, unless it has such a note."""
    if is_out_of_memory(error) and noted_advice(error) is None:
        error.add_note(advice(optimizer, doing))


def noted_advice(error: BaseException) -> str | None:
    """The advice that `add_advice` has added to an error, or None."""
    return next((note for note in getattr(error, "__notes__", ()) if note.startswith(_BEGINNING)), None)


def advice(optimizer: PrivateOptimizer, doing: str) -> str:
    """Describe what is known to use memory and which settings use less of it; one sentence or two per line."""
    remedies, memory = optimizer.remedies, known_memory(optimizer)
    clipping = remedies.clipping if optimizer.clipping_memory else ""
    is_on_host = optimizer.mechanism.noise_memory.on_host
    noise = remedies.noise if memory["noise"] and not is_on_host else ""
    smaller = _smaller_loader_batches(optimizer) if remedies.smaller_batches is None else remedies.smaller_batches
    clipping = clipping and f"{clipping} (saves up to {_format(optimizer.clipping_memory)}, clips more slowly)"
    noise = noise and f"{noise} (saves up to {_format(memory['noise'])})"
    batch, step = optimizer.plan.batch_size, optimizer.mechanism.step
    if doing == UPDATING:  # its memory does not depend on the batch
        changes = [noise, remedies.fewer_parameters]
        state = "The update is incomplete: resume from a checkpoint."
    else:
        stays = f"the guarantee and the expected batch of {batch} stay the same"
        changes = [smaller and f"{smaller} ({stays})", clipping, noise, remedies.fewer_parameters]
        state = f"Nothing of step {step + 1} has been released."
        if step and smaller:
            state += (
                " Smaller batches round differently and cannot repeat a released step, so resume from a checkpoint of "
                f"step {step}."
            )
    first, *others = [change for change in changes if change] or ["use a device with more memory"]
    used = ", ".join(f"{name} {_format(count)}" for name, count in memory.items() if count)
    lines = [
        f"{_BEGINNING}{doing}. Known use: {used}.",
        f"What to change first: {first}.",
        f"If that is not enough: {'; '.join(others)}." if others else "",
        state,
    ]
    return "\n".join(line for line in lines if line)


def known_memory(optimizer: PrivateOptimizer) -> dict[str, int]:
    """Bytes by use, from settings and shapes; gradient factors are those of the largest allowed physical batch."""
    mechanism = optimizer.mechanism
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained = sum(p.numel() * max(4, p.element_size()) for p in parameters if p.requires_grad)
    found = {
        "parameters": optimizer.parameter_bytes,
        "optimizer state": state_bytes(optimizer),
        "noise": mechanism.noise_memory_bytes,
        "clipped sums": trained,
    }
    name, limit = _part_limit(optimizer)
    found[f"gradient factors of {limit} {_UNITS[name]} about"] = _factor_bytes(optimizer, name, limit)
    return found


def state_bytes(optimizer: PrivateOptimizer) -> int:
    """Bytes of moments, rounding remainders and the scale, if it is stored."""
    kept = [value for state in optimizer.state.values() for value in state.values()]
    scale = optimizer.mechanism.scale
    stored = [] if scale is None or isinstance(scale, ComputedScale) else scale.values()
    return sum(value.nbytes for value in [*kept, *stored])


def _part_limit(optimizer: PrivateOptimizer) -> tuple[str, int]:
    """The setting that limits physical batches, and its value."""
    return optimizer.mechanism.part_limit or ("micro_batch_size", optimizer.plan.batch_size)


def _factor_bytes(optimizer: PrivateOptimizer, name: str, limit: int) -> int:
    """Memory of the gradient factors of a physical batch as large as the settings allow; 0 if unknown."""
    with contextlib.suppress(Exception):  # nothing was clipped yet; advice must not hide the error it is for
        last = optimizer.mechanism.explain()
        each = sum(own.held_bytes for own in last.parameters) / last.examples
        if name == "micro_batch_tokens":
            each /= max(1, *(own.positions for own in last.parameters))
        return round(each * limit)
    return 0


def _smaller_loader_batches(optimizer: PrivateOptimizer) -> str:
    """How to make the parts of a `private_loader` half as large; "" if they cannot be smaller."""
    name, limit = _part_limit(optimizer)
    smaller = halved(name, limit)
    return f"pass {name}={smaller} to private_loader" if smaller else ""


def halved(name: str, limit: int) -> int:
    """Half of a limit on micro-batches, or 0 if that is less than an example or than one bucket of tokens."""
    return 0 if name == "micro_batch_tokens" and limit < 2 * _SMALLEST_TOKENS else limit // 2


def _format(count: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
