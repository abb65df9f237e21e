"""Numbers as people type them."""

from __future__ import annotations

import argparse

_COUNTS = {"k": 10**3, "m": 10**6, "b": 10**9}
_BYTES = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def count(text: str) -> int:
    """A whole number, with k, M or B for thousands, millions and billions.

    >>> count("4.4M"), count("1_000"), count("1e6")
    (4400000, 1000, 1000000)
    """
    return _parsed(text, _COUNTS, "a whole number such as 2000, 4.4M or 1e6")


def size(text: str) -> int:
    """A number of bytes, with kB, MB, GB, TB, KiB, MiB, GiB or TiB.

    >>> size("4GB"), size("2 GiB"), size("100")
    (4000000000, 2147483648, 100)
    """
    return _parsed(text, _BYTES, "bytes such as 500MB, 4GB or 2GiB")


def _parsed(text: str, units: dict[str, int], wanted: str) -> int:
    plain = text.strip().lower().replace("_", "").replace(",", "")
    unit = max((name for name in units if plain.endswith(name)), key=len, default="")
    try:
        value = float(plain[: len(plain) - len(unit)]) * units.get(unit, 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 2**63 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return int(value)
