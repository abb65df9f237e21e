"""The step ledger: steps are on disk before they are released, and repeated with the same content or not at all."""

from __future__ import annotations

import copy
import dataclasses
import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dpoptim
from dpoptim.clipping import PrivateMechanism
from dpoptim.integrations.run_identity import run_header
from dpoptim.noise import MatrixStrategy, NoiseKey, ToeplitzStrategy
from dpoptim.privacy import RunHeader, StepLedger
from dpoptim.privacy.step_ledger import checksums, read_ledger, released_count, strategy_digest

KEY = NoiseKey.from_bytes(bytes(range(32)))
HEADER = RunHeader(
    key=KEY, run_id="run", plan={"steps": 9, "noise_multiplier": 1.0}, strategy="s", settings={"lr": 0.1}, data="d"
)


def header(**changes: Any) -> RunHeader:
    return dataclasses.replace(HEADER, **changes)


def content(step: int) -> bytes:
    return b"sums of step %d" % step


def release(path: Path, steps: int, **changes: Any) -> None:
    ledger = StepLedger.open(path, header(**changes))
    for step in range(steps):
        ledger.before_step(step, content(step))
        assert released_count(path) == step + 1, "on disk before the step"
    ledger.close()


# -- the file ------------------------------------------------------------------------------------------------------


def test_the_file_records_every_step_and_only_its_owner_can_read_it(tmp_path):
    path = tmp_path / "noise.steps"
    release(path, 40)
    found, _, digests = read_ledger(path)
    assert (found, len(digests)) == (HEADER.to_dict(), 40)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KEY.fingerprint() in path.read_text()


def test_a_step_waits_for_the_disk(tmp_path, monkeypatch):
    sizes: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda handle: sizes.append(os.fstat(handle).st_size), raising=False)
    ledger = StepLedger.open(tmp_path / "n", HEADER)
    before = (tmp_path / "n").stat().st_size
    for step in range(3):
        ledger.before_step(step, content(step))
    assert sizes == [before + 33, before + 66, before + 99]
    ledger.close()


def test_a_step_is_repeated_with_the_same_content_or_not_at_all(tmp_path):
    path = tmp_path / "n"
    release(path, 9)
    before = path.read_bytes()
    ledger = StepLedger.open(path, HEADER, step=2)
    ledger.before_step(2, content(2))
    for other in (content(2), content(4), b""):
        with pytest.raises(ValueError, match="step 4 was released before with different gradients"):
            ledger.before_step(3, other)
    for step in range(3, 9):
        ledger.before_step(step, content(step))
    assert path.read_bytes() == before
    ledger.before_step(9, b"new")
    assert released_count(path) == 10
    with pytest.raises(ValueError, match="step 13 cannot follow step 10"):
        ledger.before_step(12, b"skipped")
    ledger.close()


def test_digests_need_the_key(tmp_path):
    """Whoever guesses the sums cannot confirm the guess from the file."""
    for name, key in (("one", KEY), ("two", NoiseKey.from_bytes(bytes(32)))):
        release(tmp_path / name, 3, key=key)
    first, second = ((tmp_path / name).read_text().splitlines()[1:] for name in ("one", "two"))
    assert len({*first, *second}) == 6


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"key": NoiseKey.from_bytes(bytes(32)), "data": "x"}, "the noise key has changed"),
        ({"run_id": "other"}, 'run_id was "run" when the run started and is "other" now'),
        ({"plan": {"steps": 9, "noise_multiplier": 0.5}}, r"plan noise_multiplier was 1\.0 .* is 0\.5 now"),
        ({"strategy": "x"}, "the noise strategy has changed"),
        ({"settings": {"lr": 0.2}}, r"setting lr was 0\.1 when the run started and is 0\.2 now"),
        ({"settings": {"lr": 0.1, "new": 1}}, "setting new was null when the run started and is 1 now"),
        ({"data": "x"}, "the training data has changed"),
        ({"data": None}, "the training data has changed"),
    ],
)
def test_the_first_field_that_differs_is_named(changes, error, tmp_path):
    release(tmp_path / "n", 5)
    with pytest.raises(ValueError, match=f"{error}.* Undo the change, or start a new run"):
        StepLedger.open(tmp_path / "n", header(**changes), step=3)
    StepLedger.open(tmp_path / "n", HEADER, step=3).close()


def test_missing_old_and_broken_files_are_refused(tmp_path):
    path = tmp_path / "n"
    with pytest.raises(ValueError, match="is missing, so it is unknown which steps were released"):
        StepLedger.open(path, HEADER, step=0)
    release(path, 5)
    with pytest.raises(ValueError, match="records 5 steps, but the checkpoint is of step 6"):
        StepLedger.open(path, HEADER, step=6)
    for text, error in (
        ("12\nnothing\nmore\n", "cannot be read"),
        ("", "cannot be read"),
        ('{"key": "k", "settings": {}, "records": {}}\n' + "0" * 32 + "\n", "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=error):
            StepLedger.open(path, HEADER, step=5)


def test_a_line_cut_off_by_a_crash_is_overwritten(tmp_path):
    path = tmp_path / "n"
    release(path, 5)
    with path.open("ab") as file:
        file.write(b"0123")
    for _ in range(2):
        ledger = StepLedger.open(path, HEADER, step=5)
        ledger.before_step(5, content(5))
        assert ledger.count == released_count(path) == 6
        ledger.close()


def test_a_full_disk_is_an_error_and_records_nothing(tmp_path, monkeypatch):
    ledger = StepLedger.open(tmp_path / "n", HEADER)
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda handle, data: write(handle, data[:7]))
        with pytest.raises(OSError, match="No space left") as full:
            ledger.before_step(0, content(0))
    assert full.value.errno == errno.ENOSPC
    assert ledger.count == released_count(tmp_path / "n") == 0
    ledger.before_step(0, content(0))
    assert released_count(tmp_path / "n") == 1
    ledger.close()


def test_one_process_at_a_time(tmp_path):
    pytest.importorskip("fcntl")
    ledger = StepLedger.open(tmp_path / "n", HEADER)
    for step in (None, 0):
        with pytest.raises(ValueError, match="another process is training"):
            StepLedger.open(tmp_path / "n", HEADER, step=step)
    ledger.close()
    StepLedger.open(tmp_path / "n", HEADER, step=0).close()


def test_a_new_run_replaces_only_a_file_without_steps(tmp_path):
    path = tmp_path / "n"
    path.write_text('{"cut off by a cra')
    for run_id in ("a longer name", "run"):
        StepLedger.open(path, header(run_id=run_id)).close()
    release(path, 1)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="records 1 released steps, and a new run would release them again"):
        StepLedger.open(path, HEADER)
    assert path.read_bytes() == before


# -- what a step contains ------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9000), st.floats(0, 1, exclude_max=True), st.integers(0, 31),
    st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_one_bit_changes_the_checksums(size, where, bit, dtype):
    vector = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(size))
    other = vector.clone()
    words = other.view(torch.int32)
    words[int(where * len(words))] ^= (1 << bit) if bit < 31 else -(1 << 31)
    assert checksums([vector]) == checksums([vector.clone()])
    assert checksums([vector]) != checksums([other])
    assert size == 1 or checksums([vector]) != checksums([vector.roll(1)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_checksums_are_the_same_on_a_gpu():
    vector = torch.randn(300_001)
    assert checksums([vector]) == checksums([vector.cuda()])


def test_strategies_are_digested_bit_for_bit():
    one = ToeplitzStrategy(steps=4, strategy_coefs=(1.0, 0.5))
    found = [
        strategy_digest(streams, bits)
        for streams, bits in (
            ({"gradient": one}, 32),
            ({"gradient": one}, 16),
            ({"gradient": one, "square": one}, 32),
            ({"gradient": ToeplitzStrategy(steps=5, strategy_coefs=(1.0, 0.5))}, 32),
            ({"gradient": ToeplitzStrategy(steps=4, strategy_coefs=(1.0, 0.5 + 2**-50))}, 32),
            ({"gradient": MatrixStrategy.from_matrix(one.strategy_matrix())}, 32),
        )
    ]
    assert len(set(found)) == len(found)
    assert strategy_digest({"gradient": copy.deepcopy(one)}, 32) == found[0]


PLAN = dpoptim.PrivacyPlan(
    steps=2, batch_size=4, num_examples=40, clip_norm=1.0, noise_multiplier=1.0, sampling=dpoptim.Shuffled()
)


def run(ledger: Path, *, make: str, resume: bool, plan: dpoptim.PrivacyPlan = PLAN, shift: float = 0.0) -> None:
    """Train two steps under a ledger; `resume` repeats them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = getattr(dpoptim, make)(model, plan, lr=0.1, key=KEY, run_id="run", external_batches=True)
    opened = StepLedger.open(ledger, HEADER, step=0 if resume else None)
    optimizer.mechanism.before_step = opened.before_step
    try:
        for step in range(2):
            inputs = torch.linspace(-1, 1, 12).view(4, 3) + step
            inputs[2, 1] += shift
            model(inputs).square().sum(1).sum().backward()
            optimizer.step()
    finally:
        opened.close()


@pytest.mark.parametrize("make", ["post_processing", "independent_moments", "scale_then_privatize"])
def test_a_release_is_repeated_only_if_it_is_the_same(make, tmp_path, monkeypatch):
    run(tmp_path / "n", make=make, resume=False)
    run(tmp_path / "n", make=make, resume=True)
    made: list[int] = []
    monkeypatch.setattr(PrivateMechanism, "_add_noise", lambda self, *args: made.append(self.step))
    for changes in ({"shift": 1e-6}, {"plan": PLAN.replace(noise_multiplier=2.0)}):
        with pytest.raises(ValueError, match="step 1 was released before with different gradients"):
            run(tmp_path / "n", make=make, resume=True, **changes)
    assert made == [], "refused before any noise is made"


@pytest.mark.parametrize("stream", ["gradient", "square"])
def test_the_same_step_with_a_different_strategy_is_refused(stream, tmp_path, monkeypatch):
    """Equal sums and equal noise levels: only C differs, and the difference of the releases would reveal z."""
    run(tmp_path / "n", make="independent_moments", resume=False)
    set_strategies = PrivateMechanism._set_strategies

    def changed(self: PrivateMechanism, strategies: Any) -> None:
        other = ToeplitzStrategy(steps=2, strategy_coefs=(1.0, 1e-9))
        assert other.column_norm == strategies[stream].column_norm
        set_strategies(self, {**strategies, stream: other})

    monkeypatch.setattr(PrivateMechanism, "_set_strategies", changed)
    with pytest.raises(ValueError, match="step 1 was released before"):
        run(tmp_path / "n", make="independent_moments", resume=True)


def test_a_different_scale_is_a_different_release():
    """If nothing is clipped, the sums are the same but the noise is not."""
    plan = dpoptim.PrivacyPlan(steps=1, batch_size=4, num_examples=4, clip_norm=100.0, noise_multiplier=1.0)
    key, model = dpoptim.NoiseKey.from_bytes(bytes(32)), nn.Linear(3, 2)
    found: list[bytes] = []
    for factor in (1.0, 0.5):
        own = copy.deepcopy(model)
        optimizer = dpoptim.dp_sgd(own, plan, lr=0.1, key=key, run_id="run", external_batches=True)
        optimizer.mechanism.scale = {name: torch.full_like(p.detach(), factor) for name, p in own.named_parameters()}
        optimizer.mechanism.before_step = lambda step, content: found.append(content)
        own(torch.ones(4, 3)).sum(1).sum().backward()
        optimizer.step()
    assert found[0] != found[1]


def test_a_header_names_key_run_plan_and_strategy():
    optimizer = dpoptim.dp_sgd(nn.Linear(2, 1), PLAN, lr=0.1, key=KEY, run_id="run", external_batches=True)
    found = run_header(optimizer, settings={"lr": 0.1}, data="d").to_dict()
    assert (found["key"], found["run_id"], found["data"]) == (KEY.fingerprint(), "run", "d")
    assert found["plan"]["noise_multiplier"] == 1.0
    assert found["strategy"] == optimizer.mechanism.strategy_digest
    other = dpoptim.dp_sgd(nn.Linear(2, 1), PLAN.replace(noise=dpoptim.SquareRoot()), lr=0.1, external_batches=True)
    assert run_header(other, settings={}, data=None).strategy != found["strategy"]
