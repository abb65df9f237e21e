"""Ctrl-C and SIGTERM as a wish to stop at the end of a step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """Which signal asked for an end; None while none did."""

    signal: int | None = None


@contextlib.contextmanager
def stopping_between_steps() -> Iterator[StopRequest]:
    """The first signal is noted and a second one interrupts at once; outside the main thread nothing is caught.

    >>> with stopping_between_steps() as wish:
    ...     signal.raise_signal(signal.SIGINT)
    ...     wish.signal == signal.SIGINT
    True
    """
    wish = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return

    def note(number: int, frame: FrameType | None) -> None:
        if wish.signal is not None:
            raise KeyboardInterrupt
        wish.signal = number

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
