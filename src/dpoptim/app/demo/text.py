"""Text that is on every machine: the documentation strings of Python and of installed libraries.

They are read from the source files with `ast`: nothing is imported and nothing is fetched.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

SHORTEST = 8  # words of a text
OTHERS_INSIDE = {"site-packages", "test", "tests", "_vendor", "idlelib", "lib2to3"}  # copies of others' code, and tests


def texts_of(library: str, limit: int) -> list[str]:
    """Up to `limit` distinct documentation strings of a library, blanks in one, each of a few words or more."""
    return list(islice(dict.fromkeys(_cleaned(library)), limit))


def _cleaned(library: str) -> Iterator[str]:
    for text in library_docstrings(library):
        words = re.sub(r"\s+", " ", text).strip()
        if words.count(" ") >= SHORTEST - 1:
            yield words[:300]  # more than is read of it


def library_docstrings(library: str) -> Iterator[str]:
    """The documentation strings of a library ("python" for Python's own), its files taken in a fixed mixed order.

    Edge cases: none where the library is not installed, or comes without its sources.
    """
    root = _root(library)
    if root is None:
        return
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    files = [path for path in files if not OTHERS_INSIDE.intersection(path.parts)]
    files.sort(key=lambda path: zlib.crc32(path.as_posix().encode()))
    for path in files:
        yield from docstrings(root / path)


def docstrings(path: Path) -> Iterator[str]:
    """The documentation strings of a source file; none where it cannot be read or parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escapes
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield text


def _root(library: str) -> Path | None:
    paths = sysconfig.get_paths()
    if library == "python":
        return Path(paths["stdlib"])
    found = (Path(paths[part], library) for part in ("purelib", "platlib"))
    return next((path for path in found if path.is_dir()), None)
