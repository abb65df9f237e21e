"""The count of released steps: before them on the disk, and a guard of what may be repeated."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from dpoptim.noise import NoiseKey
from dpoptim.privacy import ReleasedSteps, RunIdentity

KEY = NoiseKey.from_bytes(bytes(range(32)))


def identity(**changes: Any) -> RunIdentity:
    values: dict[str, Any] = {
        "key": KEY, "settings": {"lr": 0.1, "betas": (0.9, 0.99), "the loss": "abc"},
        "records": {"training": "t", "held-out": "h"}, "surroundings": {"device": "cpu"},
    }  # fmt: skip
    return RunIdentity(**{**values, **changes})


def count(path: Path) -> int:
    return int(path.read_text().splitlines()[0])


def released(path: Path, steps: int, **changes: Any) -> None:
    opened = ReleasedSteps.begin(path, identity(**changes))
    for step in range(steps):
        opened.note(step)
        assert step < count(path) <= step + 16, "on the disk before the step"
    opened.close()
    assert count(path) == steps


def test_the_file_counts_ahead_and_is_exact_in_the_end(tmp_path):
    path = tmp_path / "noise.steps"
    released(path, 40)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ValueError, match="counts steps that were released with this noise key"):
        ReleasedSteps.begin(path, identity())


def test_a_step_waits_for_the_disk_before_it_goes_on(tmp_path, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(os, "fdatasync", lambda handle: calls.append("synced"), raising=False)
    opened = ReleasedSteps.begin(tmp_path / "n", identity())
    opened.note(0)
    assert calls == ["synced"]
    for step in range(1, 16):
        opened.note(step)
    assert calls == ["synced"]
    opened.note(16)
    assert len(calls) == 2
    opened.close()


def test_a_crash_leaves_a_count_that_is_not_too_small(tmp_path):
    opened = ReleasedSteps.begin(tmp_path / "n", identity())
    for step in range(5):
        opened.note(step)
    assert 5 <= count(tmp_path / "n") <= 20  # and the process is gone
    os.close(opened._handle)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="may only be repeated as it was"):
        ReleasedSteps.resume(tmp_path / "n", identity(surroundings={"device": "cuda"}), step=5)
    ReleasedSteps.resume(tmp_path / "n", identity(), step=5).close()


def test_repeating_does_not_count_back(tmp_path):
    released(tmp_path / "n", 9)
    again = ReleasedSteps.resume(tmp_path / "n", identity(), step=2)
    for step in range(2, 5):
        again.note(step)
    again.close()
    assert count(tmp_path / "n") == 9


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"key": NoiseKey.from_bytes(bytes(32))}, "another noise key"),
        ({"records": {"training": "x", "held-out": "h"}}, "the training records are not those"),
        ({"records": {"training": "t", "held-out": "x"}}, "the held-out records are not those"),
        ({"records": {}}, "the training records are not those"),
        ({"settings": {"lr": 0.2, "betas": (0.9, 0.99), "the loss": "abc"}}, r"lr was 0\.1 and is 0\.2"),
        ({"settings": {"lr": 0.1, "betas": (0.9, 0.99), "the loss": "x"}}, "the loss has changed"),
        ({"settings": {"lr": 0.1, "betas": (0.9, 0.99)}}, "the loss has changed"),
        ({"settings": {"lr": 0.1, "betas": (0.9, 0.99), "the loss": "abc", "new": 1}}, "new was null and is 1"),
    ],
)
@pytest.mark.parametrize("step", [3, 5])
def test_a_run_goes_on_as_itself(changes, why, step, tmp_path):
    released(tmp_path / "n", 5)
    with pytest.raises(ValueError, match=why) as refused:
        ReleasedSteps.resume(tmp_path / "n", identity(**changes), step=step)
    assert "\n" not in str(refused.value)
    ReleasedSteps.resume(tmp_path / "n", identity(), step=step).close()


def test_held_out_records_may_be_left_out_or_added(tmp_path):
    released(tmp_path / "n", 5)
    ReleasedSteps.resume(tmp_path / "n", identity(records={"training": "t"}), step=3).close()
    ReleasedSteps.resume(tmp_path / "n", identity(records={"training": "t", "more": "m"}), step=3).close()


def test_surroundings_change_only_at_the_last_step(tmp_path):
    path, gpu = tmp_path / "n", identity(surroundings={"device": "cuda"})
    released(path, 5)
    with pytest.raises(ValueError, match=r'step 4 and the run has released 5: .*device was "cpu" and is "cuda"'):
        ReleasedSteps.resume(path, gpu, step=4)
    opened = ReleasedSteps.resume(path, gpu, step=5)
    for step in range(5, 8):
        opened.note(step)
    opened.close()
    assert count(path) == 8
    ReleasedSteps.resume(path, gpu, step=6).close()
    for wrong, step in ((identity(), 6), (gpu, 4), (identity(), 4)):
        with pytest.raises(ValueError, match="may only be repeated as it was"):
            ReleasedSteps.resume(path, wrong, step=step)


def test_what_is_missing_or_broken_is_told(tmp_path):
    path = tmp_path / "n"
    with pytest.raises(ValueError, match="is missing, so nobody knows"):
        ReleasedSteps.resume(path, identity(), step=0)
    released(path, 5)
    with pytest.raises(ValueError, match=r"of step 6 and .* counts 5 steps"):
        ReleasedSteps.resume(path, identity(), step=6)
    with path.open("a") as file:
        file.write('{"from": 5, "surr')  # a crash in the middle of a line
    ReleasedSteps.resume(path, identity(), step=5).close()
    path.write_text("12\nnothing\n")
    with pytest.raises(ValueError, match="cannot be read"):
        ReleasedSteps.resume(path, identity(), step=5)


def test_one_process_at_a_time(tmp_path):
    pytest.importorskip("fcntl")
    opened = ReleasedSteps.begin(tmp_path / "n", identity())
    with pytest.raises(ValueError, match="another process"):
        ReleasedSteps.resume(tmp_path / "n", identity(), step=0)
    opened.close()
    with pytest.raises(ValueError, match="was closed"):
        opened.note(3)


def test_an_edited_file_is_refused(tmp_path):
    path = tmp_path / "n"
    released(path, 5)
    ReleasedSteps.resume(path, identity(surroundings={"device": "cuda"}), step=5).close()
    before = path.read_bytes()
    lines = before.splitlines(keepends=True)
    for changed in (
        b"%020d" % 4 + before[20:],  # fewer steps
        before.replace(b'"lr": 0.1', b'"lr": 0.2'),
        before.replace(b'"cuda"', b'"cpu0"'),
        b"".join(lines[:-1]),  # without the change of device
        b"".join([lines[0], b"0" * 32 + b"\n", *lines[2:]]),
    ):
        assert changed != before
        path.write_bytes(changed)
        with pytest.raises(ValueError, match="was edited, so nobody knows what was released") as error:
            ReleasedSteps.resume(path, identity(surroundings={"device": "cuda"}), step=5)
        assert "\n" not in str(error.value)
    path.write_bytes(before)
    ReleasedSteps.resume(path, identity(surroundings={"device": "cuda"}), step=5).close()


def test_a_line_whose_digest_did_not_come_is_left_out(tmp_path):
    """A crash between the two writes: the line had no step behind it."""
    path = tmp_path / "n"
    released(path, 5)
    with path.open("ab") as file:
        file.write(b'{"from": 5, "surroundings": {"device": "cuda"}}\n')
    ReleasedSteps.resume(path, identity(), step=3).close()
    with pytest.raises(ValueError, match="may only be repeated"):
        ReleasedSteps.resume(path, identity(surroundings={"device": "cuda"}), step=3)


def test_a_file_that_was_replaced_meanwhile_is_noticed(tmp_path):
    path = tmp_path / "n"
    opened = ReleasedSteps.begin(path, identity())
    opened.note(0)
    (tmp_path / "copy").write_bytes(path.read_bytes())
    os.replace(tmp_path / "copy", path)
    with pytest.raises(ValueError, match="was moved or replaced while it was open"):
        opened.note(16)


def test_a_new_run_replaces_only_a_count_of_nothing(tmp_path):
    path = tmp_path / "n"
    ReleasedSteps.begin(path, identity()).close()
    ReleasedSteps.begin(path, identity()).close()
    opened = ReleasedSteps.begin(path, identity())
    opened.note(0)
    opened.close()
    before = path.read_bytes()
    with pytest.raises(ValueError, match="counts steps that were released"):
        ReleasedSteps.begin(path, identity())
    assert path.read_bytes() == before


def test_what_cannot_be_compared_is_never_repeated(tmp_path):
    name = "the collator holds a _thread.lock, which cannot be compared"
    released(tmp_path / "n", 5, surroundings={name: "one"})
    with pytest.raises(ValueError, match=f"may only be repeated as it was, and {name}; undo"):
        ReleasedSteps.resume(tmp_path / "n", identity(surroundings={name: "two"}), step=4)
    ReleasedSteps.resume(tmp_path / "n", identity(surroundings={name: "two"}), step=5).close()
