"""C loops give the same bits as their Python functions, which replace them if the machine has no compiler."""

from __future__ import annotations

import importlib
import shutil

import numpy as np
import pytest
import torch

from dpoptim.kernels import c_compiler
from dpoptim.kernels import normals as box_muller_module
from dpoptim.kernels.normals import compiled_box_muller
from dpoptim.noise import NoiseKey
from tests.noise.explicit import normals

normals_file = importlib.import_module("dpoptim.noise.normals")
KEY = NoiseKey.from_bytes(bytes(range(32)))
needs_compiler = pytest.mark.skipif(
    c_compiler.library("int one(void) { return 1; }") is None, reason="needs a compiler"
)


def in_numpy(words, dtype):
    out = np.empty(len(words), dtype)
    box_muller_module.box_muller(np, words, out, np.empty((box_muller_module.SCRATCH_ROWS, len(words) // 2)))
    return out


@needs_compiler
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [0, 2, 6, 10, 200_002])
def test_bits_are_those_of_numpy(dtype, count):
    fill = compiled_box_muller()
    assert fill is not None
    words = np.random.default_rng(count).integers(-(2**63), 2**63 - 1, count, dtype=np.int64)
    found = np.empty(count, dtype)
    fill(words, found)
    assert found.tobytes() == in_numpy(words, dtype).tobytes()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("start", [0, 1, 131_071])
def test_compiled_and_plain_normals_have_the_same_bits(dtype, start, monkeypatch):
    def made():
        return normals(KEY, stream="gradient", name="weight", step=5, start=start, count=300_001, dtype=dtype)

    compiled_box_muller()  # from now on it is used for any count
    by_c = made()
    monkeypatch.setattr(normals_file, "compiled_box_muller", NoCompiler())
    assert torch.equal(by_c, made())


class NoCompiler:
    """Stands for `compiled_box_muller` on a machine without a compiler."""

    cache_info = staticmethod(compiled_box_muller.cache_info)

    def __call__(self):
        return None


@needs_compiler
def test_a_loop_that_rounds_differently_is_not_used():
    """The last bit of one normal in thousands is enough."""

    def wrong(words, out):
        out[:] = in_numpy(words, out.dtype)
        out[-1] = np.nextafter(out[-1], np.array(10, out.dtype))

    right = compiled_box_muller()
    assert right is not None
    assert box_muller_module._same_bits(right)
    assert not box_muller_module._same_bits(wrong)
    contracted = c_compiler.library(box_muller_module.SOURCE, contract=True)
    if contracted is not None and _has_fused_multiply_add(contracted):
        assert box_muller_module._same_bits(_filling_by(contracted)) is False


def _filling_by(loops):
    def fill(words, out):
        loop = loops.fill_float if out.dtype == np.float32 else loops.fill_double
        loop.argtypes = loops.fill_float.argtypes = box_muller_module.ARGUMENTS
        loop(words.ctypes.data, len(words) // 2, out.ctypes.data)

    return fill


def _has_fused_multiply_add(loops):
    words = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1000, dtype=np.int64)
    found = np.empty(1000)
    _filling_by(loops)(words, found)
    return found.tobytes() != in_numpy(words, np.float64).tobytes()


def test_without_a_compiler(monkeypatch):
    source = "int two(void) { return 2; }"
    assert c_compiler.library.__wrapped__("no C at all") is None
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: None)
        assert c_compiler.library.__wrapped__(source) is None
    with monkeypatch.context() as patch:
        patch.setenv("DPOPTIM_COMPILE", "0")
        assert c_compiler.library.__wrapped__(source) is None
    monkeypatch.setattr(shutil, "which", lambda name: "/nowhere/cc")
    assert c_compiler.library.__wrapped__(source) is None
