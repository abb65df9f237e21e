"""The secret behind all randomness of a run: one 32-byte key, kept in its own file."""

from __future__ import annotations

import hmac
import os
import stat
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import NoReturn, Self

KEY_BYTES = 32


@dataclass(frozen=True, eq=False, repr=False)
class NoiseKey:
    """Thirty-two secret bytes from which the normals and the sampling draws of a run are made.

        normals of step t, element i of parameter P  =  f(key, t, P, i)

    Guarantee: the noise hides the data only from those who do not have the key. So the key is never
    printed, never pickled (hence never in a checkpoint that `torch.save` writes), and its file has mode
    0600. Two runs on the same data must not share a key: the same noise twice cancels out.

    Edge cases: copies and deep copies are the key itself; equality compares the secrets in constant time.

    >>> key = NoiseKey.from_bytes(bytes(range(32)))
    >>> key
    NoiseKey(fingerprint='ec69a2cea946516c')
    >>> key == NoiseKey.from_bytes(bytes(range(32))), key == NoiseKey.generate()
    (True, False)
    """

    _secret: bytes = field()

    def __post_init__(self) -> None:
        if not isinstance(self._secret, bytes) or len(self._secret) != KEY_BYTES:
            found = f"{len(self._secret)} bytes" if isinstance(self._secret, bytes) else type(self._secret).__name__
            raise ValueError(f"a noise key is made of {KEY_BYTES} bytes, found {found}; use NoiseKey.generate()")

    @classmethod
    def generate(cls) -> Self:
        """A new key from the operating system's generator."""
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def from_bytes(cls, secret: bytes) -> Self:
        """The key made of these 32 bytes; for tests and for secrets kept in a vault, never for a seed."""
        return cls(bytes(secret))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a key file, refusing one that is open to group or others, or that does not hold 32 bytes."""
        return cls(_checked(_read(path), path))

    @classmethod
    def load_or_create(cls, path: str | os.PathLike[str]) -> Self:
        """Read the key file, or write a new one where there is none; safe when many ranks call it at once.

        The file is created with O_EXCL, so exactly one caller writes it; the others wait for its bytes. Its folder is
        made where there is none.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        for _ in range(100):
            try:
                secret = _read(path)
            except FileNotFoundError:
                key = cls.generate()
                try:
                    _write(path, key._secret)
                except FileExistsError:
                    continue
                return key
            if secret:
                return cls(_checked(secret, path))
            time.sleep(0.02)  # Another process has created the file and not yet written to it.
        raise ValueError(f"path={str(path)!r} stays an empty file; remove it so that a new key can be written")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key to a new file of mode 0600; an existing file is never overwritten."""
        try:
            _write(path, self._secret)
        except FileExistsError as error:
            raise ValueError(
                f"path={str(path)!r} already exists; load it with NoiseKey.load(path), or choose another path"
            ) from error

    def for_run(self, run_id: str) -> NoiseKey:
        """The key of one run: distinct public `run_id`s give independent noise, though they share this key.

        >>> key = NoiseKey.from_bytes(bytes(32))
        >>> key.for_run("a") == key.for_run("a"), key.for_run("a") == key.for_run("b")
        (True, False)
        """
        return NoiseKey.from_bytes(self.subkey("run", run_id))

    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that name the key and do not reveal it; may stand in checkpoints."""
        return blake2b(b"fingerprint", digest_size=8, key=self._secret, person=b"dpoptim/finger").hexdigest()

    def subkey(self, domain: str, name: str) -> bytes:
        """The 32-byte key of one purpose: keyed BLAKE2b of length-prefixed `domain` and `name`.

        Guarantee: distinct (domain, name) give independent keys; no two pairs have the same encoding.

        >>> key = NoiseKey.from_bytes(bytes(32))
        >>> key.subkey("ab", "c") == key.subkey("a", "bc")
        False
        """
        message = b"".join(len(part).to_bytes(8, "little") + part for part in (domain.encode(), name.encode()))
        return blake2b(message, digest_size=KEY_BYTES, key=self._secret, person=b"dpoptim/subkey").digest()

    def __repr__(self) -> str:
        return f"NoiseKey(fingerprint={self.fingerprint()!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NoiseKey):
            return NotImplemented
        return hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a NoiseKey is a secret and is never pickled; save it with .save(path)")


def _read(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a key file (at most one more than a key has), refusing a file that others may open."""
    with Path(path).open("rb") as file:
        status = os.fstat(file.fileno())
        if os.name == "posix" and stat.S_IMODE(status.st_mode) & 0o077:
            raise ValueError(
                f"path={str(path)!r} has mode {stat.S_IMODE(status.st_mode):04o}, so others can read the "
                f"noise key; if nobody has, run: chmod 600 {path}"
            )
        return file.read(KEY_BYTES + 1)


def _checked(secret: bytes, path: str | os.PathLike[str]) -> bytes:
    if len(secret) != KEY_BYTES:
        size = "more" if len(secret) > KEY_BYTES else str(len(secret))
        raise ValueError(f"path={str(path)!r} holds {size} bytes and a noise key has {KEY_BYTES}; give a key file")
    return secret


def _write(path: str | os.PathLike[str], secret: bytes) -> None:
    """Create `path` with mode 0600 and these bytes; FileExistsError where it is there already."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
