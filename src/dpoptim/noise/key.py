"""The secret behind all randomness of a run: one 32-byte key in its own file."""

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
    """Hold the 32 secret bytes that determine the noise and the sampling of a run.

        normals of step t, element i of parameter P  =  f(key, t, P, i)

    Copies and deep copies are the same object. Equality compares the secrets in constant time.

    Guarantee: the noise hides the data only from people who do not have the key. The key is never printed and
    never pickled, so `torch.save` cannot put it into a checkpoint. Its file has mode 0600. Two runs on the same data
    must not share a key, because the same noise twice cancels out.

    >>> key = NoiseKey.from_bytes(bytes(range(32)))
    >>> key
    NoiseKey(fingerprint='ec69a2cea946516c')
    >>> key == NoiseKey.from_bytes(bytes(range(32))), key == NoiseKey.generate()
    (True, False)
    """

    _secret: bytes = field()

    def __post_init__(self) -> None:
        if len(self._secret) != KEY_BYTES:
            raise ValueError(
                f"A noise key has {KEY_BYTES} bytes, got {len(self._secret)}. Use NoiseKey.generate() or a key file."
            )

    @classmethod
    def generate(cls) -> Self:
        """Return a new key from the operating system's generator."""
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def from_bytes(cls, secret: bytes) -> Self:
        """Return the key made of these 32 bytes. Use it for tests and for secrets from a vault, never for a seed."""
        return cls(bytes(secret))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a key file.

        Raises:
            ValueError: If group or others can access the file, or if it does not hold 32 bytes.
        """
        return cls(_read(path))

    @classmethod
    def load_or_create(cls, path: str | os.PathLike[str]) -> Self:
        """Read the key file, or create it and its folder if it does not exist.

        Several processes may call this at once: O_EXCL lets exactly one of them write, and the others wait.

        Raises:
            ValueError: As in `load`, or if the file stays empty.
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
                return cls(secret)
            time.sleep(0.02)  # Another process has created the file but has not written to it yet.
        raise ValueError(f"Key file {str(path)!r} is empty. Remove it so that a new key can be written.")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key to a new file of mode 0600.

        Raises:
            ValueError: If the file exists. It is never overwritten.
        """
        try:
            _write(path, self._secret)
        except FileExistsError as error:
            raise ValueError(
                f"Key file {str(path)!r} already exists. Load it with NoiseKey.load(path), or choose a different path."
            ) from error

    def for_run(self, run_id: str) -> NoiseKey:
        """Return the key of one run. Different public `run_id`s give independent noise.

        >>> key = NoiseKey.from_bytes(bytes(32))
        >>> key.for_run("a") == key.for_run("a"), key.for_run("a") == key.for_run("b")
        (True, False)
        """
        return NoiseKey.from_bytes(self.subkey("run", run_id))

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that identify the key without revealing it."""
        return blake2b(b"fingerprint", digest_size=8, key=self._secret, person=b"dpoptim/finger").hexdigest()

    def subkey(self, domain: str, name: str) -> bytes:
        """Return the 32-byte key of one purpose: keyed BLAKE2b of length-prefixed `domain` and `name`.

        Guarantee: different (domain, name) pairs have different encodings and therefore independent keys.

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

    def __copy__(self, memo: object = None) -> Self:
        return self

    __deepcopy__ = __copy__

    def __reduce__(self) -> NoReturn:
        raise TypeError("A NoiseKey is a secret and cannot be pickled. Save it with key.save(path).")


def _read(path: str | os.PathLike[str]) -> bytes:
    """Read at most one byte more than a key has; refuse a file that others may open."""
    with Path(path).open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if os.name == "posix" and mode & 0o077:
            raise ValueError(
                f"Other users can read key file {str(path)!r} (mode {mode:04o}). If nobody has, run: chmod 600 {path}"
            )
        return file.read(KEY_BYTES + 1)


def _write(path: str | os.PathLike[str], secret: bytes) -> None:
    """Create `path` with mode 0600 and these bytes; raise FileExistsError if it exists."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
