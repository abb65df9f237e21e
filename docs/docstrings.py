"""A Griffe extension: show doctests in docstrings as code, and set off guarantees."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^(?P<indent>[ \t]*)>>> .*\n?(?:^(?P=indent)\S.*\n?)*", re.MULTILINE)


class ShowDoctests(griffe.Extension):
    """Wrap doctests in fences; without them, Markdown takes `>>>` for a quotation."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is None:
            return
        text = DOCTEST.sub(_fence, obj.docstring.value)
        obj.docstring.value = re.sub(r"^Guarantee: ", "**Guarantee:** ", text, flags=re.MULTILINE)


def _fence(match: re.Match[str]) -> str:
    indent = match["indent"]
    return f"{indent}```pycon\n{match[0].rstrip()}\n{indent}```\n"
