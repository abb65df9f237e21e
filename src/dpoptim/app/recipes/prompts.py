"""Prompt templates such as "A {label} review:", whose fields are columns of the data."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any


def parts(template: str) -> list[tuple[str, str | None]]:
    """The texts of a template, each with the field that follows it; None after the last.

    >>> parts("A {label} review:")
    [('A ', 'label'), (' review:', None)]
    """
    try:
        found = list(string.Formatter().parse(template))
    except ValueError:  # a brace without its partner
        found = [("", "", "", None)]
    if any(field is not None and (not field.strip() or spec or conversion) for _, field, spec, conversion in found):
        raise ValueError(f"prompt_template={template!r} must name columns as {{name}}, and braces as {{{{ and }}}}")
    return [(text, field) for text, field, _, _ in found]


def fields(template: str) -> list[str]:
    """The columns that a template names, each once."""
    return list(dict.fromkeys(field for _, field in parts(template) if field is not None))


def filled(template: str, values: Mapping[str, Any]) -> str:
    """The prompt of a record.

    >>> filled("A {label} review:", {"label": "good"})
    'A good review:'
    """
    return "".join(text + ("" if field is None else str(values[field])) for text, field in parts(template))


def check_template(name: str, value: Any) -> str:
    """Check a setting that is a template."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name}={value!r} must be a text such as 'A {{label}} review:'")
    parts(value)
    return value
