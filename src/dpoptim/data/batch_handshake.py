"""What the loader tells the optimizer about each physical batch, in order, without passing through user code.

A loop of the usual shape, `for batch in loader: loss.backward(); optimizer.step()`, does not say whether a
batch ends a step or is a placeholder. The loader issues one ticket for each batch that it yields, and the
optimizer takes one in each `step()`. The two meet at the plan object that both were given: plans are compared
by identity, since two runs may have equal plans.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """One physical batch: which step it belongs to, and what the optimizer has to do with it.

    `is_placeholder`: the step's sample is empty, and the one example in the batch must not be counted.
    `opens_batch`: first physical batch of its step; whatever was accumulated before belongs to an abandoned
    iteration and must be dropped, since otherwise an example could count twice in one step.
    `closes_batch`: last physical batch of its step; noise is added and the update is made.
    """

    step: int
    key_fingerprint: str
    physical_examples: int
    is_placeholder: bool
    opens_batch: bool
    closes_batch: bool


class Issuer(Protocol):
    """A loader: its generation rises with each new iteration, which makes the tickets of older ones void.

    `look_ahead` is how many batches a wrapper around it may fetch before the optimizer has stepped on them.
    """

    @property
    def generation(self) -> int: ...
    @property
    def look_ahead(self) -> int: ...


@dataclass(frozen=True)
class _Entry:
    ticket: Ticket
    issuer: weakref.ref[Issuer]
    generation: int

    @property
    def is_valid(self) -> bool:
        issuer = self.issuer()
        return issuer is not None and issuer.generation == self.generation


@dataclass
class _Channel:
    """What passes between the loader and the optimizer of one plan object."""

    plan: weakref.ref[object]
    entries: deque[_Entry] = field(default_factory=deque)
    consumer: weakref.ref[object] | None = None
    was_used: bool = False

    def live_consumer(self) -> object | None:
        return None if self.consumer is None else self.consumer()


_channels: dict[int, _Channel] = {}


def _channel(plan: object) -> _Channel:
    identity = id(plan)
    found = _channels.get(identity)
    if found is not None and found.plan() is plan:
        return found

    def drop(reference: weakref.ref[object]) -> None:
        # The identity may already belong to a newer plan.
        if identity in _channels and _channels[identity].plan is reference:
            del _channels[identity]

    _channels[identity] = _Channel(weakref.ref(plan, drop))
    return _channels[identity]


def issue(plan: object, loader: Issuer, ticket: Ticket) -> None:
    """Queue a ticket for whoever optimizes under this plan object.

    Refused where an optimizer is bound and has not stepped on an earlier batch: a skipped batch would shift all
    later ones.
    """
    channel = _channel(plan)
    waiting = [entry for entry in channel.entries if entry.is_valid]
    if channel.live_consumer() is not None and len(waiting) > loader.look_ahead:
        raise ValueError(
            "the loader was asked for another batch before optimizer.step() was called for the last one; call step() "
            "once for each batch, also for one you would rather skip (a wrapper that fetches ahead needs "
            "private_loader(..., look_ahead=1))"
        )
    channel.was_used = True
    channel.entries.append(_Entry(ticket, weakref.ref(loader), loader.generation))


def take(plan: object, consumer: object | None = None) -> Ticket | None:
    """The oldest ticket that is still valid, or None; void tickets before it are thrown away.

    First in, first out, so that a wrapper which fetches batches ahead still gets the right ticket for each. Refused
    to a `consumer` other than the one that was bound last: two optimizers under one plan would release twice what it
    covers.

    >>> class Loader: generation, look_ahead = 0, 0
    >>> class Plan: pass
    >>> plan, loader = Plan(), Loader()
    >>> ticket = Ticket(
    ...     step=0, key_fingerprint="", physical_examples=4, is_placeholder=False, opens_batch=True, closes_batch=True
    ... )
    >>> issue(plan, loader, ticket)
    >>> take(plan) == ticket, take(plan)
    (True, None)
    """
    channel = _channel(plan)
    if consumer is not None and channel.was_used and channel.live_consumer() is not consumer:
        raise ValueError(
            "another optimizer was made with this plan object since, and its loader feeds that one; make a plan object "
            "for each run (plan.replace() copies it)"
        )
    while channel.entries:
        entry = channel.entries.popleft()
        if entry.is_valid:
            return entry.ticket
    return None


def bind(plan: object, consumer: object) -> None:
    """From now on `consumer` takes the tickets of this plan object; those that wait are void."""
    channel = _channel(plan)
    channel.entries.clear()
    channel.consumer = weakref.ref(consumer)
    channel.was_used = False


def pending_elsewhere(plan: object) -> bool:
    """Whether a loader waits for an optimizer under another plan object that no optimizer was made with."""
    return any(
        channel.live_consumer() is None and any(entry.is_valid for entry in channel.entries)
        for channel in _channels.values()
        if channel.plan() is not plan
    )
