"""Write files and folders that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

UNFINISHED = ".unfinished"


def write_text(path: Path, text: str) -> None:
    """Write a file under another name, flush it to the disk, and rename it."""
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


def make_folder(path: Path, fill: Callable[[Path], None], *, secret: bool = True) -> None:
    """Fill a folder under another name, flush it to the disk, and rename it; a failure leaves nothing.

    A secret folder has mode 0700; otherwise the umask applies to it and to its files.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=UNFINISHED, dir=path.parent))
    try:
        fill(temporary)
        for folder, _, names in os.walk(temporary):
            for name in names:
                if not secret:
                    Path(folder, name).chmod(0o666 & ~_umask())
                with Path(folder, name).open("rb") as file:
                    os.fsync(file.fileno())
            if not secret:
                Path(folder).chmod(0o777 & ~_umask())
            sync_folder(Path(folder))
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Remove what `make_folder` left in a folder when its process was killed."""
    for left in folder.glob(f".*{UNFINISHED}"):
        shutil.rmtree(left, ignore_errors=True)


def _umask() -> int:
    found = os.umask(0o077)
    os.umask(found)
    return found


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
