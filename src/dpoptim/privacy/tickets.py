"""What the loader tells the optimizer about each physical batch, in order, without passing through user code.

A loop of the usual shape, `for batch in loader: loss.backward(); optimizer.step()`, does not say whether a
batch ends a step or is a placeholder. The loader issues one ticket for each batch that it yields, and the
optimizer takes one in each `step()`. The two meet at the plan object that both were given: plans are compared
by identity, since two runs may have equal plans.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
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
    physical_examples: int
    is_placeholder: bool
    opens_batch: bool
    closes_batch: bool


class Issuer(Protocol):
    """A loader: its generation rises with each new iteration, which makes the tickets of older ones void."""

    @property
    def generation(self) -> int: ...


@dataclass(frozen=True)
class _Entry:
    ticket: Ticket
    issuer: weakref.ref[Issuer]
    generation: int


_queues: dict[int, tuple[weakref.ref[object], deque[_Entry]]] = {}


def _queue(plan: object, *, create: bool) -> deque[_Entry]:
    identity = id(plan)
    found = _queues.get(identity)
    if found is not None and found[0]() is plan:
        return found[1]
    queue: deque[_Entry] = deque()
    if create:

        def drop(reference: weakref.ref[object]) -> None:
            # The identity may already belong to a newer plan.
            if identity in _queues and _queues[identity][0] is reference:
                del _queues[identity]

        _queues[identity] = (weakref.ref(plan, drop), queue)
    return queue


def issue(plan: object, loader: Issuer, ticket: Ticket) -> None:
    """Queue a ticket for whoever optimizes under this plan object."""
    _queue(plan, create=True).append(_Entry(ticket, weakref.ref(loader), loader.generation))


def take(plan: object) -> Ticket | None:
    """The oldest ticket that is still valid, or None; void tickets before it are thrown away.

    First in, first out, so that a wrapper which fetches batches ahead still gets the right ticket for each.

    >>> class Loader: generation = 0
    >>> class Plan: pass
    >>> plan, loader = Plan(), Loader()
    >>> flags = dict(is_placeholder=False, opens_batch=True, closes_batch=True)
    >>> ticket = Ticket(step=0, physical_examples=4, **flags)
    >>> issue(plan, loader, ticket)
    >>> take(plan) == ticket, take(plan)
    (True, None)
    """
    queue = _queue(plan, create=False)
    while queue:
        entry = queue.popleft()
        issuer = entry.issuer()
        if issuer is not None and issuer.generation == entry.generation:
            return entry.ticket
    return None


def forget(plan: object) -> None:
    """Throw away all tickets of this plan object."""
    _queue(plan, create=False).clear()
