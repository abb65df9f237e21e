"""Seals of checkpoints: whether a folder holds what the run itself wrote there.

A step that is repeated from other weights, another learning rate or another optimizer state has the same noise, and
the difference of the two releases has none. So what a checkpoint holds is sealed with the run's key, and checked before
anything in it is loaded.
"""

from __future__ import annotations

import hmac
import json
from hashlib import blake2b
from pathlib import Path

from dpoptim.noise import NoiseKey

SEAL = "seal.json"
_LOADED = (".bin", ".ckpt", ".json", ".pt", ".pth", ".safetensors")  # a file of these that was added might be loaded
_CHUNK = 1 << 20


def seal_folder(folder: str | Path, key: NoiseKey, *, name: str = "") -> None:
    """Write `seal.json`: a keyed digest of every file in a folder, and of all of them together.

        d_f = BLAKE2b(subkey, file f),  whole = BLAKE2b(subkey, name, f₁ d_f₁ f₂ d_f₂ …)

    `name` is what the folder is sealed as (its step, say). Guarantee: without the key nobody makes a seal, and a seal
    tells nothing of the key. It takes about a second for a gigabyte.

    >>> import tempfile
    >>> key = NoiseKey.from_bytes(bytes(32))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     _ = Path(place, "state.pt").write_bytes(b"weights")
    ...     seal_folder(place, key)
    ...     check_seal(place, key)
    ...     _ = Path(place, "state.pt").write_bytes(b"Weights")
    ...     check_seal(place, key)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: ...state.pt is not as the run saved it: ...
    """
    folder = Path(folder)
    secret = key.subkey("seal", "checkpoint")
    files = {path: _digest(folder / path, secret) for path in _files(folder)}
    sealed = {"key": key.fingerprint(), "files": files, "whole": _whole(files, name, secret)}
    temporary = folder / f".{SEAL}.tmp"
    temporary.write_text(json.dumps(sealed, indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / SEAL)


def check_seal(folder: str | Path, key: NoiseKey, *, name: str = "") -> None:
    """One ValueError line where the folder is not as it was sealed: a file changed, missing, or added.

    Edge cases: files that were added are refused if their kind might be loaded (.json, .pt, .safetensors, ...); a note
    in a text file does not matter.
    """
    folder = Path(folder)
    secret = key.subkey("seal", "checkpoint")
    mend = "the run's noise would cancel out against what it has released; put the file back, or take another"
    try:
        sealed = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        files, whole, sealed_by = dict(sealed["files"]), str(sealed["whole"]), str(sealed["key"])
    except FileNotFoundError:
        raise ValueError(f"checkpoint {folder} has no {SEAL}, so nobody knows whether it is the run's own") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{folder / SEAL} cannot be read; put the run's own back, or take another") from None
    if sealed_by != key.fingerprint():
        raise ValueError(
            f"checkpoint {folder} was made with another noise key ({sealed_by}, and this one is {key.fingerprint()}); "
            "put the run's own key back, or take another checkpoint"
        )
    if not hmac.compare_digest(whole, _whole(files, name, secret)):
        raise ValueError(f"{folder / SEAL} was not written by this run for this place; {mend} checkpoint")
    found = _files(folder)
    for path in (*files, *found):
        if path not in files and not path.endswith(_LOADED):
            continue
        if path not in found or path not in files or _digest(folder / path, secret) != files[path]:
            how = "is missing" if path not in found else "was added" if path not in files else ""
            said = f"{folder / path} {how}" if how else f"{folder / path} is not as the run saved it"
            raise ValueError(f"{said}: {mend} checkpoint")


def _files(folder: Path) -> list[str]:
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(path.as_posix() for path in found if path.name not in (SEAL, f".{SEAL}.tmp"))


def _digest(file: Path, secret: bytes) -> str:
    digest = blake2b(key=secret, digest_size=32, person=b"file")
    with file.open("rb") as opened:
        while part := opened.read(_CHUNK):
            digest.update(part)
    return digest.hexdigest()


def _whole(files: dict[str, str], name: str, secret: bytes) -> str:
    content = json.dumps([name, sorted(files.items())]).encode()
    return blake2b(content, key=secret, digest_size=32, person=b"folder").hexdigest()
