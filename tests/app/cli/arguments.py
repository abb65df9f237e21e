"""Command lines with some flags in place of others: a flag is given once."""

from __future__ import annotations

from collections.abc import Sequence


def changed(base: Sequence[str], change: Sequence[str]) -> list[str]:
    """`base` without the flags (each of one value) that `change` has too, and then `change`."""
    new = {text for text in change if text.startswith("--")}
    kept = [
        text
        for before, text in zip(["", *base], base, strict=False)
        if text not in new and not (before in new and not text.startswith("--"))
    ]
    return [*kept, *change]
