"""Tests of Triton kernels without a GPU, by Triton's interpreter in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.interpreter import HAS_TRITON

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the device itself: pytest -m gpu")
@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        ("tests/kernels/test_triton.py", "softmax or outer or norm"),
        ("tests/kernels/test_triton.py", "not (softmax or outer or norm)"),
        ("tests/kernels/test_captured.py", "scaled or any_content or redrawn"),
        ("tests/kernels/test_adam_triton.py tests/kernels/test_normals_triton.py", ""),
        ("tests/optim/test_large_models.py", "kernels"),
    ],
    ids=["products", "sums", "graphs", "adam and noise", "steps"],
)
def test_kernels_compute_what_the_plain_functions_do(files, chosen):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-k", chosen]
    command += files.split()
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert " passed" in summary, summary
    assert "skipped" not in summary, summary
