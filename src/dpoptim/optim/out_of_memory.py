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
_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """Changes that save memory, as settings of the interface in use; "" where there is no such setting."""

    smaller_batches: str | None = None  # None halves the parts of the `private_loader`
    clipping: str = "create the optimizer with clipping_memory=0"
    noise: str = "create the optimizer with noise_memory=NoiseMemory(on_host=True, bits=16)"
    fewer_parameters: str = "train only LoRA factors"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that device or host memory is exhausted."""
    has_sign = isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
    return has_sign or isinstance(error, MemoryError | torch.OutOfMemoryError)


@contextlib.contextmanager
def advising(optimizer: PrivateOptimizer, doing: str) -> Iterator[None]:
    """Add advice to an out-of-memory error that leaves the block; its type and traceback stay."""
    try:
        yield
    except Exception as error:
        add_advice(error, optimizer, doing)
        raise


def add_advice(error: Exception, optimizer: PrivateOptimizer, doing: str) -> None:
    """Note on an out-of-memory error what used the memory and what to change, unless it already has such a note."""
    if is_out_of_memory(error) and not has_advice(error):
        error.add_note(_advice(optimizer, doing))


def has_advice(error: BaseException) -> bool:
    """Whether `add_advice` has added its note to an error."""
    return any(note.startswith(_BEGINNING) for note in getattr(error, "__notes__", ()))


def _advice(optimizer: PrivateOptimizer, doing: str) -> str:
    remedies, mechanism, batch = optimizer.remedies, optimizer.mechanism, optimizer.plan.batch_size
    setting, limit = mechanism.part_limit or ("micro_batch_size", batch)
    if setting == "micro_batch_size":
        limit = min(limit, batch * (optimizer.plan.records_per_user or 1))
    half, smaller = halved(setting, limit), remedies.smaller_batches
    if smaller is None:
        smaller = f"pass {setting}={half} to private_loader" if half else ""
    changes = []
    if doing == UPDATING:  # its memory does not depend on the batch
        state = "The update is incomplete: resume from a checkpoint."
    else:
        state = f"Step {mechanism.step + 1} has released nothing."
        if smaller:
            changes.append(f"{smaller} (the guarantee and the expected batch of {batch} stay the same)")
        if smaller and mechanism.step:
            state += (
                " Smaller batches round differently and cannot repeat a released step, so resume from a checkpoint of "
                f"step {mechanism.step}."
            )
        if remedies.clipping and optimizer.clipping_memory:
            saved = format_bytes(optimizer.clipping_memory)
            changes.append(f"{remedies.clipping} (saves up to {saved}, clips more slowly)")
    if remedies.noise and mechanism.noise_memory_bytes and not mechanism.noise_memory.on_host:
        changes.append(f"{remedies.noise} (saves up to {format_bytes(mechanism.noise_memory_bytes)})")
    if remedies.fewer_parameters:
        changes.append(remedies.fewer_parameters)
    first, *others = changes or ["use a device with more memory"]
    more = f"If that is not enough: {'; '.join(others)}.\n" if others else ""
    used = _known_use(optimizer, setting, limit)
    return f"{_BEGINNING}{doing}. Known use: {used}.\nWhat to change first: {first}.\n{more}{state}"


def _known_use(optimizer: PrivateOptimizer, setting: str, limit: int) -> str:
    """Memory from settings and shapes; gradient factors are those of the largest physical batch that `limit` allows."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    summed = 8 if optimizer.plan.exact_noise else 4
    found = {
        "parameters": optimizer.parameter_bytes,
        "optimizer state": state_bytes(optimizer),
        "noise": optimizer.mechanism.noise_memory_bytes,
        "clipped sums": sum(p.numel() * max(summed, p.element_size()) for p in trained),
    }
    with contextlib.suppress(Exception):  # nothing may have been clipped yet, and advice must not hide the error
        last, by_token = optimizer.mechanism.explain(), setting == "micro_batch_tokens"
        of_one = sum(own.held_bytes for own in last.parameters) / last.examples
        of_one /= max(1, *(own.positions for own in last.parameters)) if by_token else 1
        found[f"gradient factors of {limit} {'tokens' if by_token else 'examples'} about"] = round(of_one * limit)
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in found.items() if count)


def state_bytes(optimizer: PrivateOptimizer) -> int:
    """Bytes of moments, rounding remainders and the scale, if it is stored."""
    kept = [value for state in optimizer.state.values() for value in state.values()]
    scale = optimizer.mechanism.scale
    stored = [] if scale is None or isinstance(scale, ComputedScale) else scale.values()
    return sum(value.nbytes for value in [*kept, *stored])


def halved(setting: str, limit: int) -> int:
    """Half of a limit on micro-batches, or 0 if that is less than an example or than one bucket of 64 tokens."""
    return 0 if setting == "micro_batch_tokens" and limit < 128 else limit // 2


def format_bytes(count: int) -> str:
    """Format a number of bytes in decimal units, with three significant digits.

    >>> format_bytes(0), format_bytes(2_228_047_360)
    ('no memory', '2.23 GB')
    """
    if count == 0:
        return "no memory"
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
