"""Argument checks that all subpackages share. Each raises a `ValueError` that names the argument and its value."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection


def check_whole(name: str, value: object, *, low: int = 1, hint: str = "") -> int:
    """Return `value` as an int of at least `low`. numpy integers are accepted, bools are not.

    >>> check_whole("steps", 0)
    Traceback (most recent call last):
    ValueError: Expected steps to be a whole number >= 1, got 0.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < low:
        raise ValueError(f"Expected {name} to be a whole number >= {low}, got {_shown(value)}. {hint}".rstrip())
    return int(value)


def set_whole(owner: object, name: str, *, low: int = 1, hint: str = "") -> None:
    """Check a field of a frozen dataclass and store it as an int, so that its repr and JSON are those of an int."""
    object.__setattr__(owner, name, check_whole(name, getattr(owner, name), low=low, hint=hint))


def check_number(
    name: str,
    value: object,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    infinity: bool = False,
    hint: str = "",
) -> None:
    """Check that `value` is a finite real number with low <= value <= high and above < value < below.

    >>> check_number("momentum", 1.0, low=0, below=1)
    Traceback (most recent call last):
    ValueError: Expected momentum >= 0 and < 1, got 1.0.
    """
    limits = [(">=", low), (">", above), ("<=", high), ("<", below)]
    number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    fits = (math.isfinite(number) or (infinity and number == math.inf)) and all(
        limit is None or {">=": number >= limit, ">": number > limit, "<=": number <= limit, "<": number < limit}[sign]
        for sign, limit in limits
    )
    if not fits:
        wanted = " and ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None) or "to be finite"
        raise ValueError(
            f"Expected {name} {wanted}{' or inf' if infinity else ''}, got {_shown(value)}. {hint}".rstrip()
        )


def _shown(value: object) -> str:
    """The value in one line: a number in quotes is marked as text, and long values are named by their type."""
    text = repr(value)
    if len(text) > 100 or "\n" in text:
        return f"a {type(value).__name__}"
    return f"{text}, which is text" if isinstance(value, str) and any(map(str.isdigit, value)) else text


def check_clip_norm(value: object) -> None:
    """Check that a clip norm is positive, and so large that float32 measures the norms near it.

    Squares of elements below 1e-19 vanish in float32. Gradients with 1e9 elements are clipped to 1e-12 with an error of
    about 1e-5 (estimated); at 1e-24, gradients of a few elements exceed the clip norm 25 times (measured).

    >>> check_clip_norm(1e-20)
    Traceback (most recent call last):
    ValueError: Expected clip_norm >= 1e-12 or inf, got 1e-20. Multiply losses by a constant if gradients are so small.
    """
    hint = "Multiply losses by a constant if gradients are so small."
    check_number("clip_norm", value, low=1e-12, infinity=True, hint=hint)


def check_at_most(name: str, value: int, limit_name: str, limit: int, *, hint: str = "") -> None:
    """Check that one argument does not exceed another.

    >>> check_at_most("batch_size", 512, "num_examples", 100, hint="Use a smaller batch_size.")
    Traceback (most recent call last):
    ValueError: Expected batch_size <= num_examples, got 512 > 100. Use a smaller batch_size.
    """
    if value > limit:
        raise ValueError(f"Expected {name} <= {limit_name}, got {value} > {limit}. {hint}".rstrip())


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Check that `value` is one of `choices`.

    >>> check_choice("objective", "min", ("mean", "max"))
    Traceback (most recent call last):
    ValueError: Expected objective to be one of 'mean', 'max', got 'min'.
    """
    if value not in choices:
        raise ValueError(f"Expected {name} to be one of {', '.join(map(repr, choices))}, got {value!r}.")


def default_delta(num_examples: int) -> float:
    """The largest power of ten up to 1/(10·n). δ must be well below 1/n, or one record could be published in full."""
    return float(f"1e-{math.ceil(math.log10(10 * num_examples) - 1e-9)}")


def check_delta(delta: float | None, num_examples: int | None = None, *, optional: bool = False) -> None:
    """Check that δ lies strictly between 0 and 1, and is below 1/num_examples if that is given."""
    if delta is None and optional:
        return
    check_number("delta", delta, above=0.0, below=1.0, hint="Use less than 1/num_examples.")
    if num_examples is not None and float(delta or 0) >= 1 / num_examples:
        raise ValueError(
            f"delta={delta:g} is not below 1/{num_examples}, one over the number of training records or users. Use "
            f"less, such as {default_delta(num_examples):g}."
        )
