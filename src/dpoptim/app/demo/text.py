"""Text that is on every machine: documentation strings in the source files of Python and installed libraries."""

from __future__ import annotations

import ast
import importlib.util
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

SHORTEST = 8  # words in a text
SKIPPED = {"site-packages", "test", "tests", "_vendor", "_antlr", "idlelib", "lib2to3"}  # others' code, and tests


def texts_of(library: str, limit: int) -> list[str]:
    """Up to `limit` distinct documentation strings of a library, at least a few words each."""
    found: dict[str, None] = {}
    for text in library_docstrings(library):
        words = re.sub(r"\s+", " ", text).strip()
        if words.count(" ") >= SHORTEST - 1:
            found[words[:300]] = None
        if len(found) == limit:
            break
    return list(found)


def library_docstrings(library: str) -> Iterator[str]:
    """The documentation strings of a library ("python" for Python itself), its files in a fixed shuffled order."""
    spec = None if library == "python" else importlib.util.find_spec(library)  # which does not import it
    if spec is None and library != "python":
        return
    root = Path(sysconfig.get_path("stdlib")) if spec is None else Path(str(spec.origin)).parent
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    files = [path for path in files if not SKIPPED.intersection(path.parts)]
    files.sort(key=lambda path: zlib.crc32(path.as_posix().encode()))
    for path in files:
        yield from docstrings(root / path)


def docstrings(path: Path) -> Iterator[str]:
    """The documentation strings of a source file; none if it cannot be read or parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's code
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    nodes: list[ast.AST] = [tree]
    for node in nodes:  # statements only: most of a tree are expressions, which `ast.walk` would visit too
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield text
        for part in ("body", "handlers", "orelse", "finalbody"):
            found = getattr(node, part, None)
            nodes += found if isinstance(found, list) else []
