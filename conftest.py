"""Every run of the tests keeps its searched strategies in a directory of its own."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator

import pytest

# Kernels can be imported only where Triton is.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["src/dpoptim/kernels/*_triton.py"]

pytest_plugins = ["tests.chance"]

# Set while this file is imported: test files search strategies while they are collected, before any fixture runs.
# Workers of pytest-xdist import it too, so each has a directory of its own.
_CACHE = tempfile.TemporaryDirectory(prefix="dpoptim-tests-")
os.environ["DPOPTIM_CACHE_DIR"] = _CACHE.name


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_run() -> Iterator[str]:
    """The directory of this process, which nothing before this run has written to; removed at the end."""
    assert os.environ["DPOPTIM_CACHE_DIR"] == _CACHE.name
    yield _CACHE.name
    _CACHE.cleanup()
