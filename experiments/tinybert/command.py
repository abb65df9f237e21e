"""The command that a page says its lines were made by, as far as the lines tell."""

from __future__ import annotations

from collections.abc import Sequence

from experiments import provenance
from experiments.result_files import Line


def command(names: str, lines: Sequence[Line]) -> str:
    """How many workers there were is not recorded and not told.

    >>> command("tinybert", [{"scale": "paper", "setting": {"machine": "NVIDIA H200"}}])
    'python -m experiments tinybert --scale paper --data DIR --model DIR --device cuda'
    """
    scale = lines[0]["scale"]
    given = "" if scale == "smoke" else " --data DIR --model DIR"
    on_gpu = any(provenance.is_gpu(line["setting"]["machine"]) for line in lines)
    return f"python -m experiments {names} --scale {scale}{given}{' --device cuda' if on_gpu else ''}"
