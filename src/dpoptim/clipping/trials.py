"""Whether some call is being tried: run besides the real one, with gradients, for what these show; nothing is kept.

One flag for all engines and threads: a backward may pass through layers that another engine watches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_running = False


def is_trying() -> bool:
    return _running


@contextlib.contextmanager
def trying() -> Iterator[None]:
    """Inside, engines keep no gradient, and nothing that is compared once counts as compared."""
    global _running
    _running = True
    try:
        yield
    finally:
        _running = False
