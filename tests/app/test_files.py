"""Folders appear complete or not at all, and are closed to others unless they are made to be shared."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dpoptim.app.files import UNFINISHED, make_folder, remove_unfinished


def fill(folder: Path) -> None:
    (folder / "deep").mkdir(mode=0o700)
    for file in (folder / "model.safetensors", folder / "deep" / "more"):
        file.touch(mode=0o600)  # as some writers make them


def modes(folder: Path) -> list[int]:
    found = [folder, *sorted(folder.rglob("*"))]
    return [stat.S_IMODE(path.stat().st_mode) for path in found]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_shared_folder_follows_the_umask(mask, tmp_path):
    before = os.umask(mask)
    try:
        make_folder(tmp_path / "model", fill, secret=False)
        make_folder(tmp_path / "run", fill)
    finally:
        os.umask(before)
    assert modes(tmp_path / "model") == [mode & ~mask for mode in (0o777, 0o777, 0o666, 0o666)]
    assert modes(tmp_path / "run") == [0o700, 0o700, 0o600, 0o600]


def test_second_process_cannot_replace_a_folder(tmp_path):
    """Each fills its own folder; the second one finds the first already there."""

    def slow(folder: Path) -> None:
        fill(folder)
        make_folder(tmp_path / "run", fill)

    with pytest.raises(OSError, match=r"not empty|exists"):
        make_folder(tmp_path / "run", slow)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / f".step-000010.abc{UNFINISHED}").mkdir()
    (tmp_path / "step-000010").mkdir()
    remove_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]
