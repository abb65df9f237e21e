"""Make randomness repeat in every test run, so that a test that passes today does not fail tomorrow.

Keys, run ids, the global generators and hypothesis depend only on `--seed` (default: 0) and the name of the test or
shared fixture, not on what ran before in the same process. Use other seeds to find tests that pass by luck:
`make test ARGS='--seed 1'`.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator

import hypothesis
import numpy
import pytest
import torch

_THIS_PROCESS = os.getpid()
_of_the_system: Callable[[int], bytes] = os.urandom


class _Chance:
    """Bytes that depend on the seed, the name of the test or fixture, and the number of earlier draws."""

    def __init__(self) -> None:
        self.seed = 0
        self.test = ""
        self.begin(self.test)

    def begin(self, name: str) -> None:
        self._start, self._draws = f"{self.seed} {name}", itertools.count()
        seed = int.from_bytes(self(4))
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)

    def __call__(self, count: int) -> bytes:
        return hashlib.shake_256(f"{self._start} {next(self._draws)}".encode()).digest(count)


_chance = _Chance()


def _urandom(count: int) -> bytes:
    """Return repeatable bytes to dpoptim in this process; forks and other callers get the system's."""
    caller = sys._getframe(1).f_globals.get("__name__", "")
    if os.getpid() != _THIS_PROCESS or caller.split(".")[0] != "dpoptim":
        return _of_the_system(count)
    return _chance(count)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="the seed of keys and generators (default: 0)")


def pytest_configure(config: pytest.Config) -> None:
    _chance.seed = config.getoption("--seed")
    os.urandom = _urandom
    hypothesis.settings.register_profile("same", derandomize=_chance.seed == 0)
    hypothesis.settings.load_profile("same")


def pytest_unconfigure() -> None:
    os.urandom = _of_the_system


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _chance.test = item.nodeid
    _chance.begin(_chance.test)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed a shared fixture by its own name, whichever test uses it first; then restart the test's randomness."""
    if fixturedef.scope == "function":
        return (yield)
    _chance.begin(f"{fixturedef.baseid} {fixturedef.argname} {getattr(request, 'param', '')}")
    try:
        return (yield)
    finally:
        _chance.begin(_chance.test)
