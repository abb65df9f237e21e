"""How many parameters a model has: by number, by folder or by name, without loading a weight."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dpoptim.cli.units import count


def parameter_count(model: str) -> int:
    """Trained parameters of a model given as a number (4.4M), a folder with config.json, or a name on the hub.

    The class that the configuration names is built on the meta device, which takes neither memory nor weights; what is
    tied counts once. Edge cases: one ValueError line where transformers is missing, the hub cannot be reached, or there
    is no such model.

    >>> parameter_count("4.4M")
    4400000
    """
    try:
        number = count(model)
    except argparse.ArgumentTypeError:
        return _of_configuration(model)
    if number < 1:
        raise ValueError(f"MODEL {model!r} must be at least one parameter")
    return number


def is_number(model: str) -> bool:
    """Whether a model is given by its number of parameters alone.

    >>> is_number("124M"), is_number("gpt2")
    (True, False)
    """
    try:
        count(model)
    except argparse.ArgumentTypeError:
        return False
    return True


def _of_configuration(model: str) -> int:
    folder = Path(model).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"MODEL {model!r} is a folder without config.json; give one made by save_pretrained")
    if not folder.is_dir() and (folder.is_absolute() or model.startswith((".", "~"))):
        raise ValueError(f"MODEL {model!r} does not exist; give a folder, a hub name or a count such as 4.4M")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise ValueError(
            f"MODEL {model!r}: reading it needs transformers (pip install transformers); or give a count such as 4.4M"
        ) from None
    try:
        with _quiet_hub():
            config = transformers.AutoConfig.from_pretrained(str(folder) if folder.is_dir() else model)
    except Exception as error:  # of the hub, of the network, of the file: many types, all for people to read
        raise ValueError(
            f"MODEL {model!r} is no folder here and the Hugging Face hub did not give it ({_first_line(error)}); "
            "give a folder or a count such as 4.4M"
            if not folder.is_dir()
            else f"MODEL {model!r}: config.json cannot be read ({_first_line(error)})"
        ) from None
    named = next((name for name in config.architectures or () if hasattr(transformers, name)), None)
    try:
        with torch.device("meta"):
            made = transformers.AutoModel.from_config(config) if named is None else getattr(transformers, named)(config)
    except Exception as error:
        raise ValueError(f"MODEL {model!r} cannot be built from its configuration: {_first_line(error)}") from None
    return sum(p.numel() for p in made.parameters() if p.requires_grad)


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    """Without a line for each attempt to reach the hub: the last error is told, once."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:160] if lines else type(error).__name__
