"""Secret random draws: at every step, the dropout and masks of a model come from the run's key.

All examples of a batch share one stream of draws, so one more record, or a longer one, shifts the draws of the others.
With a public seed, one record could change every gradient of the batch. With secret, fresh draws, the draws of the
others have the same distribution for any such record, so the guarantee for each fixed draw holds overall.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from dpoptim.data.loader import PrivateLoader

_GENERATORS = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random, torch.Generator)


def secret_randomness(loader: PrivateLoader, optimizer: Any) -> Iterator[Any]:
    """Iterate over the loader's batches, with torch, numpy and `random` seeded from the run's secret key.

        for batch in dpoptim.secret_randomness(loader, optimizer):      # replaces: for batch in loader
            loss_per_example(model, batch).sum().backward()
            optimizer.step()

    The guarantee requires this if the model has dropout or the collator draws masks.

    Guarantee: the draws of step t are a function of (key, run, t) only, so a resumed run repeats them. They are seeded
    before the step's first batch is fetched; its micro-batches share one stream. When the step is released, the
    generators get their earlier state back, so saving them afterwards reveals nothing.
    """
    if not hasattr(optimizer, "mechanism"):
        optimizer = getattr(optimizer, "optimizer", optimizer)  # unwraps Accelerate's optimizer
    saved: list[Callable[[], None]] = []

    def put_back(released: Any = None) -> None:
        while saved:
            saved.pop()()

    batches, opens = iter(loader), True
    optimizer.observers.append(put_back)
    try:
        while True:
            if opens:
                put_back()
                saved.append(save_rng_states())
                seed_for_step(optimizer)
            try:
                batch = next(batches)
            except StopIteration:
                return
            opens = loader.step_ends
            yield batch
    finally:
        put_back()
        optimizer.observers.remove(put_back)


def seed_for_step(optimizer: Any) -> None:
    """Seed torch, numpy and `random` for the optimizer's current step, from (key, run, step) only."""
    mechanism = optimizer.mechanism
    rank = f" process {mechanism.processes.rank}" if mechanism.processes.rank else ""
    secret = optimizer.key.for_run(mechanism.run_id).subkey("randomness of the model", f"{mechanism.step}{rank}")
    seed_generators(int.from_bytes(secret[:8], "little"))


def seed_generators(seed: int) -> None:
    """Seed torch, numpy and `random`; with a public seed after a secret step, saved generators reveal nothing."""
    torch.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def generator_states() -> dict[str, bytes]:
    """The states of the seeded generators by name, to see which ones were used."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return host_generators() | {f"torch.cuda {number}": state.numpy().tobytes() for number, state in enumerate(gpus)}


def host_generators() -> dict[str, bytes]:
    """The states of the generators that need no accelerator."""
    of_numpy: Any = np.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy.random": of_numpy[1].tobytes() + repr(of_numpy[2:]).encode(),
        "random": repr(random.getstate()).encode(),
    }


def save_rng_states(*, host: bool = True) -> Callable[[], None]:
    """Save the generators' states, optionally without those of the host; calling the result restores them."""
    on_host = (torch.get_rng_state(), np.random.get_state(), random.getstate()) if host else None
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []

    def put_back() -> None:
        if on_host is not None:
            torch.set_rng_state(on_host[0])
            np.random.set_state(on_host[1])
            random.setstate(on_host[2])
        torch.cuda.set_rng_state_all(gpus)

    return put_back


def check_rng(**named: Any) -> None:
    """Refuse an object with its own seed or generator: with a public seed, one more record shifts all draws."""
    for name, value in named.items():
        seed = getattr(value, "seed", None)
        if isinstance(seed, int):
            raise ValueError(
                f"{name}.seed={seed} makes its draws public. Remove it: draws come from the run's secret key."
            )
        for attribute, part in getattr(value, "__dict__", {}).items():
            if isinstance(part, _GENERATORS) and part is not torch.default_generator:
                raise ValueError(
                    f"{name}.{attribute} is a random generator with a public seed. Draw from torch, numpy or random "
                    "instead, which are seeded from the run's secret key."
                )
