"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file under another name, make sure that it is on the disk, and rename it."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder under another name, make sure that it is on the disk, and rename it; a failure leaves none.

    Edge cases: OSError where `path` is there and not empty.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        fill(temporary)
        for folder, _, names in os.walk(temporary):
            for name in names:
                with Path(folder, name).open("rb") as file:
                    os.fsync(file.fileno())
            sync_folder(Path(folder))
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make sure that the names in a folder are on the disk, where the system lets one."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
