"""The handshake of loader and optimizer: one ticket per physical batch, without passing through user code.

A loop such as `for batch in loader: loss.backward(); optimizer.step()` does not show whether a batch ends a step or
is a placeholder. So the loader issues a ticket with each batch, and the optimizer takes one in each `step()`. They find
each other by the plan object that both were given. Plans are compared by identity: two runs may have equal plans.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dpoptim.data.processes import Processes


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """One physical batch: its step, and what the optimizer does with it."""

    loader: weakref.ref[Any]
    generation: int  # each new iteration of the loader raises it, which voids older tickets
    step: int
    key_fingerprint: str
    processes: Processes  # of the loader
    physical_examples: int  # or users
    is_placeholder: bool  # this process has no more examples in the step; the one in the batch must not count
    opens_batch: bool  # the first of its step; sums of an abandoned iteration are dropped
    closes_batch: bool  # the last of its step; noise is added and the update is made
    part_limit: tuple[str, int] | None = None  # the loader's setting that bounds a part, and its value
    rows_of_users: tuple[int, ...] | None = None  # how many rows each user has; the rows are in the order of the users

    @property
    def is_valid(self) -> bool:
        loader = self.loader()
        return loader is not None and loader.generation == self.generation


@dataclass(eq=False)
class _Channel:
    """The tickets between the loader and the optimizer of one plan object."""

    plan: weakref.ref[object]
    tickets: deque[Ticket] = field(default_factory=deque)
    consumer: Callable[[], object | None] = lambda: None  # a weak reference to the optimizer
    was_used: bool = False
    has_warned: bool = False


_channels: list[_Channel] = []


def _channel(plan: object) -> _Channel:
    for found in _channels:
        if found.plan() is plan:
            return found
    _channels[:] = [found for found in _channels if found.plan() is not None]  # forget plans that are gone
    _channels.append(_Channel(weakref.ref(plan)))
    return _channels[-1]


def issue(plan: object, ticket: Ticket) -> None:
    """Queue a ticket for the optimizer of this plan object.

    It is refused while an earlier batch waits for its step: a skipped batch would shift all later ones. Without an
    optimizer, a second step draws a warning: a loop that only reads batches is fine, one that trains is not.
    """
    channel = _channel(plan)
    last = channel.tickets[-1] if channel.tickets and channel.consumer() is None else None
    is_next_step = last is not None and last.loader == ticket.loader and last.is_valid and last.step < ticket.step
    if is_next_step and not channel.has_warned:
        channel.has_warned = True
        warnings.warn(
            "no private optimizer took the previous step of this private_loader, and other optimizers add no noise. To "
            "train, create an optimizer of dpoptim with the same plan object, as in dp_sgd(model, plan, lr=0.1).",
            stacklevel=3,
        )
    if channel.consumer() is not None and any(waiting.is_valid for waiting in channel.tickets):
        raise ValueError(
            "a new batch was requested before optimizer.step() was called for the last one. Call step() "
            "once for each batch, and do not wrap the loader in one that fetches ahead."
        )
    channel.was_used = True
    channel.tickets.append(ticket)


def take(plan: object, consumer: object) -> Ticket | None:
    """Take the oldest valid ticket, or None.

    Only the `consumer` that was bound last gets one: two optimizers would release twice what the plan covers.
    """
    channel = _channel(plan)
    if channel.was_used and channel.consumer() is not consumer:
        raise ValueError(
            "a newer optimizer was created with this plan object, and the loader feeds that one. Create a plan for "
            "each run; plan.replace() copies it."
        )
    while channel.tickets:
        ticket = channel.tickets.popleft()
        if ticket.is_valid:
            return ticket
    return None


def bind(plan: object, consumer: object) -> None:
    """Make `consumer` the one that takes the tickets of this plan object; waiting tickets are void."""
    channel = _channel(plan)
    channel.tickets.clear()
    channel.consumer = weakref.ref(consumer)
    channel.was_used = False


def pending_elsewhere(plan: object) -> bool:
    """Whether a loader waits under a different plan object, for which no optimizer was created."""
    return any(
        channel.consumer() is None and any(ticket.is_valid for ticket in channel.tickets)
        for channel in _channels
        if channel.plan() is not plan
    )
