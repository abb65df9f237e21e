"""Other libraries kept quiet: their bars and retries would break ours, and an error is told once."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any


def quieten() -> None:
    """For the rest of the process: no loading bars of transformers, no line for each attempt to reach the hub."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # where it was imported, and reads no variable now
    if "transformers" in sys.modules:
        importlib.import_module("transformers.utils.logging").disable_progress_bar()


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Without bars for weights, and without a line for each attempt to reach the hub: the last error is told, once."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    bars: Any = None
    with contextlib.suppress(ImportError):
        bars = importlib.import_module("transformers.utils.logging")
    shown = bars is not None and bars.is_progress_bar_enabled()
    if shown:
        bars.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if shown:
            bars.enable_progress_bar()
