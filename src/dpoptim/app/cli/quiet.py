"""Other libraries kept quiet: their bars and retries would break ours, and an error is told once."""

from __future__ import annotations

import importlib
import logging
import os
import sys


def silence_libraries() -> None:
    """For the rest of the process: no loading bars of transformers, no line for each attempt to reach the hub."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # where it was imported, and reads no variable now
    if "transformers" in sys.modules:
        importlib.import_module("transformers.utils.logging").disable_progress_bar()
