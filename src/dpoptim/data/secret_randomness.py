"""Random numbers of a model and its collator (dropout, masks), drawn anew at each step from the run's secret key.

They come from one stream for the whole batch, so that one record more, or a longer one, shifts those of the others.
With a public seed that would let one record change every gradient of the batch. Secret and fresh, what the others get
has the same law whatever the record is, and the guarantee of each fixed draw is the guarantee of all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from dpoptim.data.loader import PrivateLoader
from dpoptim.data.rng_check import check_generators
from dpoptim.noise import NoiseKey


class Mechanism(Protocol):
    run_id: str
    step: int


class Optimizer(Protocol):
    """What is read of a private optimizer: its key, where it stands, and whom it calls when a step is released."""

    observers: list[Callable[[Any], None]]

    @property
    def key(self) -> NoiseKey: ...
    @property
    def mechanism(self) -> Any: ...


def secret_randomness(loader: PrivateLoader, optimizer: Optimizer) -> Iterator[Any]:
    """The loader's batches; what torch, numpy and `random` draw for a step comes from the run's secret key.

        for batch in dpoptim.secret_randomness(loader, optimizer):      # in place of: for batch in loader
            loss_per_example(model, batch).sum().backward()
            optimizer.step()

    A loop over a model with dropout, or with a collator that draws masks, needs it for its guarantee: see the
    assumptions in `plan.statement()`. A model that draws nothing does not.
    Guarantee: the draws of step t are a function of (key, run, t) alone, so that a run that goes on meets the same
    dropout. They are set before the step's first batch is fetched. As the step is released the generators get back the
    state that they had before it, so a checkpoint of them, made after `optimizer.step()`, tells nothing.
    Edge cases: micro-batches of one step go on in its stream. Workers of the loader are seeded from it when they start.
    A collate_fn with a generator or a seed of its own is refused, in one line: what it draws would be public.

    >>> import dpoptim
    >>> plan = dpoptim.PrivacyPlan(num_examples=4, batch_size=2, steps=2, noise_multiplier=1.0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.5))
    >>> loader = dpoptim.private_loader([torch.ones(1)] * 4, plan)
    >>> optimizer = dpoptim.dp_sgd(model, plan, lr=0.1)
    >>> state = torch.get_rng_state()
    >>> for batch in secret_randomness(loader, optimizer):
    ...     model(batch).sum(1).sum().backward()
    ...     optimizer.step()
    >>> torch.equal(state, torch.get_rng_state())
    True
    """
    if not hasattr(optimizer, "release"):
        optimizer = getattr(optimizer, "optimizer", optimizer)  # out of Accelerate's wrapper
    check_generators(collate_fn=loader._loader_options["collate_fn"])
    saved: list[Callable[[], None]] = []

    def put_back(released: Any = None) -> None:
        while saved:
            saved.pop()()

    optimizer.observers.append(put_back)
    batches: Iterator[Any] | None = None
    opens = True
    try:
        while True:
            if opens:
                put_back()
                saved.append(save_rng_states())
                seed_for_step(optimizer)
            if batches is None:
                batches = iter(loader)
            try:
                batch = next(batches)
            except StopIteration:
                return
            opens = loader.step_ends
            yield batch
    finally:
        put_back()
        optimizer.observers.remove(put_back)


def seed_for_step(optimizer: Optimizer) -> None:
    """Seed torch, numpy and `random` for the optimizer's present step: a function of (key, run, step) alone."""
    mechanism: Mechanism = optimizer.mechanism
    secret = optimizer.key.for_run(mechanism.run_id).subkey("randomness of the model", str(mechanism.step))
    seed_generators(int.from_bytes(secret[:8], "little"))


def seed_generators(seed: int) -> None:
    """Seed torch, numpy and `random`.

    With a public seed, behind a step that was seeded secretly: nothing that saves the generators then saves what the
    step drew from.
    """
    torch.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def generator_states() -> dict[str, bytes]:
    """The states of the generators that are seeded, by name: to see whether one was drawn from, or seeded.

    >>> before = generator_states()
    >>> drawn = random.random()
    >>> [name for name, state in generator_states().items() if state != before[name]]
    ['random']
    """
    of_numpy: Any = np.random.get_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        **{f"torch.cuda {number}": state.numpy().tobytes() for number, state in enumerate(gpus)},
        "numpy.random": of_numpy[1].tobytes() + repr(of_numpy[2:]).encode(),
        "random": repr(random.getstate()).encode(),
    }


def save_rng_states() -> Callable[[], None]:
    """The generators as they stand; calling it puts them back."""
    cpu, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def put_back() -> None:
        torch.set_rng_state(cpu)
        np.random.set_state(of_numpy)
        random.setstate(of_python)
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)

    return put_back
