"""Each test run caches its strategies in a temporary directory."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator

import pytest

# The kernels cannot be imported without Triton.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["src/dpoptim/kernels/*_triton.py"]

pytest_plugins = ["tests.chance"]

# Set on import, because test files search for strategies during collection, before any fixture runs. Workers of
# pytest-xdist import this file too, so each gets a separate directory.
_CACHE = tempfile.TemporaryDirectory(prefix="dpoptim-tests-")
os.environ["DPOPTIM_CACHE_DIR"] = _CACHE.name


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_run() -> Iterator[str]:
    """Return the cache directory of this process, which starts empty and is removed at the end."""
    assert os.environ["DPOPTIM_CACHE_DIR"] == _CACHE.name
    yield _CACHE.name
    _CACHE.cleanup()
