"""The key is a secret: how it is written, read, shown and copied."""

from __future__ import annotations

import copy
import os
import pickle
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dpoptim.noise import NoiseKey

SECRET = bytes(range(100, 132))


def test_generated_keys_differ() -> None:
    assert NoiseKey.generate() != NoiseKey.generate()


def test_repr_shows_only_the_fingerprint() -> None:
    key = NoiseKey.from_bytes(SECRET)
    for shown in (repr(key), str(key), f"{key}", repr([key])):
        assert key.fingerprint() in shown
        assert SECRET.hex() not in shown
        assert repr(SECRET)[2:-1] not in shown


def test_fingerprints_are_stable_and_differ() -> None:
    key = NoiseKey.from_bytes(SECRET)
    assert len(key.fingerprint()) == 16
    assert int(key.fingerprint(), 16).bit_length() <= 64
    assert key.fingerprint() == NoiseKey.from_bytes(SECRET).fingerprint()
    assert key.fingerprint() != NoiseKey.from_bytes(SECRET[::-1]).fingerprint()
    assert not key.subkey("", "").hex().startswith(key.fingerprint())


def test_equality_and_hash_compare_content() -> None:
    key, same, other = (
        NoiseKey.from_bytes(SECRET),
        NoiseKey.from_bytes(SECRET),
        NoiseKey.from_bytes(bytes(32)),
    )
    assert key == same
    assert hash(key) == hash(same)
    assert key != other
    assert key != SECRET


def test_pickling_is_refused() -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match=r"\.save\(path\)"):
            pickle.dumps(NoiseKey.from_bytes(SECRET), protocol=protocol)


def test_torch_save_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"\.save\(path\)"):
        torch.save({"state": NoiseKey.from_bytes(SECRET)}, tmp_path / "checkpoint.pt")


def test_copies_are_the_key_itself() -> None:
    key = NoiseKey.from_bytes(SECRET)
    assert copy.copy(key) is key
    assert copy.deepcopy({"key": [key]})["key"][0] is key


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_wrong_length_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"32 bytes, got {size}"):
        NoiseKey.from_bytes(bytes(size))


def test_save_then_load_with_mode_0600(tmp_path: Path) -> None:
    path, key = tmp_path / "noise.key", NoiseKey.from_bytes(SECRET)
    before = os.umask(0)
    try:
        key.save(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert NoiseKey.load(path) == key


def test_save_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "noise.key"
    NoiseKey.from_bytes(SECRET).save(path)
    with pytest.raises(ValueError, match="already exists"):
        NoiseKey.generate().save(path)
    assert NoiseKey.load(path) == NoiseKey.from_bytes(SECRET)


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_load_refuses_a_file_open_to_others(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "noise.key"
    NoiseKey.from_bytes(SECRET).save(path)
    path.chmod(mode)
    for read in (NoiseKey.load, NoiseKey.load_or_create):
        with pytest.raises(ValueError, match="chmod 600"):
            read(path)


@pytest.mark.parametrize("size", [0, 31, 33, 1000])
def test_load_refuses_the_wrong_length(tmp_path: Path, size: int) -> None:
    path = tmp_path / "noise.key"
    path.write_bytes(bytes(size))
    path.chmod(0o600)
    with pytest.raises(ValueError, match="32"):
        NoiseKey.load(path)


def test_load_of_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        NoiseKey.load(tmp_path / "none.key")


def test_load_or_create_keeps_the_first_key(tmp_path: Path) -> None:
    path = tmp_path / "noise.key"
    created = NoiseKey.load_or_create(path)
    assert NoiseKey.load_or_create(path) == created == NoiseKey.load(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_concurrent_load_or_create_gives_one_key(tmp_path: Path) -> None:
    path = tmp_path / "noise.key"
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(NoiseKey.load_or_create, [path] * 32))
    assert keys == {NoiseKey.load(path)}


def test_subkeys_are_unambiguous() -> None:
    key = NoiseKey.from_bytes(SECRET)
    pairs = [("", ""), ("a", ""), ("", "a"), ("ab", "c"), ("a", "bc"), ("a\0", "b"), ("a", "\0b"), ("é", "e")]
    subkeys = {key.subkey(*pair) for pair in pairs}
    assert len(subkeys) == len(pairs)
    assert {len(subkey) for subkey in subkeys} == {32}
    assert key.subkey("a", "b") != NoiseKey.from_bytes(bytes(32)).subkey("a", "b")
