"""Tests draw the same random numbers in every run; other callers and processes do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = """
import os, random, multiprocessing
import numpy, pytest, torch
from hypothesis import given, strategies as st
from dpoptim import NoiseKey

def say(*what):
    print("DREW", *what)

def drawn():
    return NoiseKey.generate().fingerprint(), random.random(), numpy.random.rand(), float(torch.rand(()))

@pytest.fixture(scope="module")
def shared():
    return drawn()

def test_first(shared):
    say("first", *shared, *drawn(), *drawn())

def test_second(shared):
    say("second", *shared, *drawn())

@given(st.integers())
def test_given(number):
    say("given", number)

def test_others():
    say("others", os.urandom(8).hex())

def test_forks():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        say("others", pool.apply(drawn)[0])
"""


RUNS = """
import sys, pytest
for arguments in ([], ["-k", "not first"], ["--seed", "1"]):
    print("RUN")
    if pytest.main(["-q", "-s", "-p", "tests.chance", "-p", "no:cacheprovider", *arguments]):
        sys.exit(1)
"""


def runs(folder: Path) -> list[list[str]]:
    """Return the draws of a whole run, a partial run, and a run with a different seed, all in one process."""
    (folder / "test_draws.py").write_text(TESTS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-c", RUNS], cwd=folder, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    return [
        [line[line.index("DREW") :] for line in part.splitlines() if "DREW" in line]
        for part in found.stdout.split("RUN\n")[1:]
    ]


def of(lines: list[str], *names: str) -> list[str]:
    return [line for line in lines if line.split()[1] in names]


def test_draws_depend_only_on_the_seed_and_the_name(tmp_path):
    whole, part, other = runs(tmp_path)
    assert of(whole, "second", "given") == of(part, "second", "given"), "earlier tests must not matter"
    for name in ("first", "second"):
        assert of(whole, name) != of(other, name)
    values = of(whole, "first")[0].split()[2:]
    assert len(set(values)) == len(values) == 12, "one test must not draw the same value twice"
    assert len(of(whole, "others")) == 2
    assert not set(of(whole, "others")) & set(of(part, "others")), "forks and other callers must get the system's bytes"
