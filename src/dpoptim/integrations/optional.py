"""Optional packages, imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

_EXTRAS = {"transformers": "train", "peft": "train", "matplotlib": "plots"}
_EXTRAS |= dict.fromkeys(("datasets", "pyarrow", "pillow"), "data") | {"scikit-learn": "sklearn"}
_PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn"}  # whose module has a different name


def require(module: str, purpose: str) -> Any:
    """Import a module, or raise a ValueError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        package = _PACKAGES.get(package, package)
        source = f"'dpoptim[{_EXTRAS[package]}]'" if package in _EXTRAS else package
        raise ValueError(f"{purpose} needs the package {package}; run: pip install {source}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut to 200 characters; the error's type if the message is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"
