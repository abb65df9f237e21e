"""A sealed folder is as it was sealed, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpoptim.noise import NoiseKey
from dpoptim.privacy.seals import SEAL, check_seal, seal_folder

KEY = NoiseKey.from_bytes(bytes(range(32)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "state.pt").write_bytes(b"weights")
    (tmp_path / "sub" / "more.bin").write_bytes(b"more")
    seal_folder(tmp_path, KEY, name="step 3")
    return tmp_path


def refused(folder: Path, why: str, key: NoiseKey = KEY, name: str = "step 3") -> None:
    with pytest.raises(ValueError, match=why) as error:
        check_seal(folder, key, name=name)
    assert "\n" not in str(error.value)


def test_what_was_sealed_is_taken(folder):
    check_seal(folder, KEY, name="step 3")
    (folder / "README.md").write_text("a note")
    check_seal(folder, KEY, name="step 3")


def test_files_that_were_edited_removed_added_or_swapped_are_refused(folder):
    for path in ("state.pt", "sub/more.bin"):
        before = (folder / path).read_bytes()
        (folder / path).write_bytes(before[:-1] + b"S")
        refused(folder, f"{path} is not as the run saved it")
        (folder / path).unlink()
        refused(folder, f"{path} is missing")
        (folder / path).write_bytes(before)
    (folder / "adapter.safetensors").write_bytes(b"x")
    refused(folder, "adapter.safetensors was added")


def test_a_seal_is_made_with_the_key_for_its_name(folder):
    refused(folder, "was made with another noise key", key=NoiseKey.from_bytes(bytes(32)))
    refused(folder, "was not written by this run", name="step 4")
    sealed: dict[str, Any] = json.loads((folder / SEAL).read_text())
    (folder / "state.pt").write_bytes(b"other")
    del sealed["files"]["state.pt"]
    (folder / SEAL).write_text(json.dumps(sealed))
    refused(folder, "was not written by this run")
    (folder / SEAL).write_text("no json")
    refused(folder, "cannot be read")
    (folder / SEAL).unlink()
    refused(folder, f"has no {SEAL}")


def test_a_seal_is_no_plain_digest(folder):
    """Two keys have nothing in common, so that a seal tells nothing of what it seals."""
    one = json.loads((folder / SEAL).read_text())
    seal_folder(folder, NoiseKey.from_bytes(bytes(32)), name="step 3")
    other = json.loads((folder / SEAL).read_text())
    assert not {*one["files"].values(), one["whole"]} & {*other["files"].values(), other["whole"]}
