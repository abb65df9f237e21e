"""The file of released steps: on the disk before them, and a guard of what may be repeated."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from dpoptim.noise import NoiseKey
from dpoptim.privacy import RunHeader, StepLedger
from dpoptim.privacy.step_ledger import released_count

KEY = NoiseKey.from_bytes(bytes(range(32)))


def identity(**changes: Any) -> RunHeader:
    values: dict[str, Any] = {
        "key": KEY, "settings": {"lr": 0.1, "betas": (0.9, 0.99), "the build": "abc"},
        "records": {"training": "t", "held-out": "h"},
    }  # fmt: skip
    return RunHeader(**{**values, **changes})


def content(step: int) -> bytes:
    return b"sums of step %d" % step


def released(path: Path, steps: int, **changes: Any) -> None:
    opened = StepLedger.begin(path, identity(**changes))
    for step in range(steps):
        opened.note(step, content(step))
        assert released_count(path) == step + 1, "on the disk before the step"
    opened.close()


def test_the_file_has_every_step_and_is_its_owners(tmp_path):
    path = tmp_path / "noise.steps"
    released(path, 40)
    assert released_count(path) == 40
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ValueError, match="has steps that were released with this noise key"):
        StepLedger.begin(path, identity())


def test_a_step_waits_for_the_disk_before_it_goes_on(tmp_path, monkeypatch):
    sizes: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda handle: sizes.append(os.fstat(handle).st_size), raising=False)
    opened = StepLedger.begin(tmp_path / "n", identity())
    before = (tmp_path / "n").stat().st_size
    for step in range(3):
        opened.note(step, content(step))
    assert sizes == [before + 33, before + 66, before + 99]
    opened.close()


def test_a_step_is_repeated_as_it_was_or_not_at_all(tmp_path):
    path = tmp_path / "n"
    released(path, 9)
    before = path.read_bytes()
    again = StepLedger.resume(path, identity(), step=2)
    again.note(2, content(2))
    again.note(3, content(3))
    for other in (content(3), content(5), b""):
        with pytest.raises(ValueError, match="step 5 was released before, and its gradients come out otherwise") as no:
            again.note(4, other)
        assert "\n" not in str(no.value)
    again.note(4, content(4))
    assert path.read_bytes() == before
    for step in range(5, 9):
        again.note(step, content(step))
    again.note(9, b"new")
    assert released_count(path) == 10
    with pytest.raises(ValueError, match="step 13 comes after step 10"):
        again.note(12, b"skipped")
    again.close()


def test_a_digest_needs_the_key(tmp_path):
    """Who can guess the sums still cannot tell from the file whether the guess is right."""
    for name, key in (("one", KEY), ("two", NoiseKey.from_bytes(bytes(32)))):
        released(tmp_path / name, 3, key=key)
    first, second = ((tmp_path / name).read_text().splitlines() for name in ("one", "two"))
    assert not set(first[1:]) & set(second[1:])
    assert len(set(first[2:])) == 3


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"key": NoiseKey.from_bytes(bytes(32))}, "another noise key"),
        ({"records": {"training": "x", "held-out": "h"}}, "the training records are not those"),
        ({"records": {"training": "t", "held-out": "x"}}, "the held-out records are not those"),
        ({"records": {}}, "the training records are not those"),
        ({"settings": {"lr": 0.2, "betas": (0.9, 0.99), "the build": "abc"}}, r"lr was 0\.1 and is 0\.2"),
        ({"settings": {"lr": 0.1, "betas": (0.9, 0.99), "the build": "x"}}, "the build has changed"),
        ({"settings": {"lr": 0.1, "betas": (0.9, 0.99)}}, "the build has changed"),
        ({"settings": {"lr": 0.1, "betas": (0.9, 0.99), "the build": "abc", "new": 1}}, "new was null and is 1"),
    ],
)
@pytest.mark.parametrize("step", [3, 5])
def test_a_run_goes_on_as_itself(changes, why, step, tmp_path):
    released(tmp_path / "n", 5)
    with pytest.raises(ValueError, match=why) as refused:
        StepLedger.resume(tmp_path / "n", identity(**changes), step=step)
    assert "\n" not in str(refused.value)
    StepLedger.resume(tmp_path / "n", identity(), step=step).close()


def test_held_out_records_may_be_left_out_or_added(tmp_path):
    released(tmp_path / "n", 5)
    StepLedger.resume(tmp_path / "n", identity(records={"training": "t"}), step=3).close()
    StepLedger.resume(tmp_path / "n", identity(records={"training": "t", "more": "m"}), step=3).close()


def test_what_is_missing_or_broken_is_told(tmp_path):
    path = tmp_path / "n"
    with pytest.raises(ValueError, match="is missing, so nobody knows"):
        StepLedger.resume(path, identity(), step=0)
    released(path, 5)
    with pytest.raises(ValueError, match=r"of step 6 and .* has 5 steps"):
        StepLedger.resume(path, identity(), step=6)
    for text in ("12\nnothing\nmore\n", "", "{}"):
        path.write_text(text)
        with pytest.raises(ValueError, match="cannot be read"):
            StepLedger.resume(path, identity(), step=5)


def test_a_line_that_a_crash_cut_off_is_written_again(tmp_path):
    path = tmp_path / "n"
    released(path, 5)
    with path.open("ab") as file:
        file.write(b"0123")
    assert released_count(path) == 5
    opened = StepLedger.resume(path, identity(), step=5)
    opened.note(5, content(5))
    opened.close()
    again = StepLedger.resume(path, identity(), step=5)
    assert again.count == 6
    again.note(5, content(5))
    again.close()


def test_a_full_disk_is_told_and_counts_nothing(tmp_path, monkeypatch):
    opened = StepLedger.begin(tmp_path / "n", identity())
    own = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda handle, data: own(handle, data[:7]))
        with pytest.raises(OSError, match="No space left") as full:
            opened.note(0, content(0))
    assert full.value.errno == errno.ENOSPC
    assert opened.count == released_count(tmp_path / "n") == 0
    opened.note(0, content(0))
    assert released_count(tmp_path / "n") == 1
    opened.close()


def test_one_process_at_a_time(tmp_path):
    pytest.importorskip("fcntl")
    opened = StepLedger.begin(tmp_path / "n", identity())
    with pytest.raises(ValueError, match="another process"):
        StepLedger.resume(tmp_path / "n", identity(), step=0)
    opened.close()
    with pytest.raises(ValueError, match="was closed"):
        opened.note(0, b"")


def test_an_edited_file_is_refused(tmp_path):
    path = tmp_path / "n"
    released(path, 5)
    before = path.read_bytes()
    lines = before.splitlines(keepends=True)
    for changed in (before.replace(b'"lr": 0.1', b'"lr": 0.2'), b"".join([lines[0], b"0" * 32 + b"\n", *lines[2:]])):
        assert changed != before
        path.write_bytes(changed)
        with pytest.raises(ValueError, match="was edited, so nobody knows what was released") as error:
            StepLedger.resume(path, identity(), step=5)
        assert "\n" not in str(error.value)
    path.write_bytes(b"".join([*lines[:4], *lines[5:]]))  # without the third step
    opened = StepLedger.resume(path, identity(), step=2)
    with pytest.raises(ValueError, match="step 3 was released before"):
        opened.note(2, content(2))
    opened.close()


def test_a_file_that_was_replaced_meanwhile_is_noticed(tmp_path):
    path = tmp_path / "n"
    opened = StepLedger.begin(path, identity())
    opened.note(0, content(0))
    (tmp_path / "copy").write_bytes(path.read_bytes())
    os.replace(tmp_path / "copy", path)
    with pytest.raises(ValueError, match="was moved or replaced while it was open"):
        opened.note(1, content(1))


def test_a_new_run_replaces_only_a_file_without_steps(tmp_path):
    path = tmp_path / "n"
    StepLedger.begin(path, identity()).close()
    StepLedger.begin(path, identity()).close()
    released(tmp_path / "n", 1)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="has steps that were released"):
        StepLedger.begin(path, identity())
    assert path.read_bytes() == before
