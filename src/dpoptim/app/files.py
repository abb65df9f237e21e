"""Write files and folders that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

UNFINISHED = ".unfinished"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the name of a file to an error of the operating system that lacks it, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file under another name, flush it to the disk, and rename it."""
    temporary = path.with_name(f".{path.name}.tmp")
    with naming(path):
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        _flush(path.parent)


def make_folder(path: Path, fill: Callable[[Path], None], *, secret: bool = True) -> None:
    """Fill a folder (mode 0700 if secret, else by the umask), flush and rename it; a failure leaves nothing behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=UNFINISHED, dir=path.parent))
    mask = os.umask(0o077)
    os.umask(mask)
    with naming(path):
        try:
            fill(temporary)
            for folder, _, names in os.walk(temporary):
                for part, mode in [*((Path(folder, name), 0o666) for name in names), (Path(folder), 0o777)]:
                    if not secret:
                        part.chmod(mode & ~mask)
                    _flush(part)
            temporary.rename(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _flush(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Remove what `make_folder` left in a folder when its process was killed."""
    for left in folder.glob(f".*{UNFINISHED}"):
        shutil.rmtree(left, ignore_errors=True)


def check_target(name: str, path: Path, *suffixes: str) -> None:
    """Raise ValueError if an option names a file with a wrong ending, or one that cannot be written."""
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"{name} {path} must end in {' or '.join(suffixes)}")
    if path.is_dir():
        raise ValueError(f"{name} {path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise ValueError(f"{name} {path}: the folder {path.parent} does not exist; create it first")


def _flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
