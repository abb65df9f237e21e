"""The disk cache: the next program finds results again; broken, foreign or forged entries do no harm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from dpoptim.disk_cache import Array, cache_dir, cached_on_disk, load, store
from dpoptim.noise import BandedToeplitz, PrefixSums
from dpoptim.noise.search.banded import optimized_bands
from dpoptim.noise.search.objective import SearchObjective


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test its own cache."""
    monkeypatch.setenv("DPOPTIM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Counted:
    """A search that counts its calls. Each `program()` starts with nothing in memory."""

    def __init__(self, kind: str = "squares", values: Callable[[int], Array] | None = None) -> None:
        self.calls = 0
        self._kind = kind
        self._values = values or (lambda count: np.arange(count, dtype=np.float64) ** 2)

    def program(self, version: int = 1) -> Callable[..., Array]:
        def search(count: int, *, shift: int = 0) -> Array:
            self.calls += 1
            return self._values(count) + shift

        return cached_on_disk(self._kind, version=version)(search)


def only_entry(cache: Path) -> Path:
    (entry,) = cache.iterdir()
    return entry


def test_one_program_searches_once(cache: Path) -> None:
    counted = Counted()
    search = counted.program()
    assert search(4) is search(4)
    assert counted.calls == 1
    assert only_entry(cache).name.startswith("squares-")


def test_the_next_program_reads_the_results_of_the_first() -> None:
    counted = Counted()
    first = counted.program()(4)
    second = counted.program()(4)
    assert counted.calls == 1
    assert second is not first
    assert second.tolist() == first.tolist() == [0.0, 1.0, 4.0, 9.0]


def test_a_second_process_does_not_search_again() -> None:
    """Every search calls scipy's minimize, which fails there."""
    program = (
        "from scipy import optimize\n"
        "from dpoptim.noise import BandedToeplitz, PrefixSums\n"
        "def refuse(*args, **kwargs): raise AssertionError('searched again')\n"
        "optimize.minimize = refuse\n"
        "print(BandedToeplitz(bands=4, workload=PrefixSums(momentum=0.25)).optimize(steps=17).strategy_coefs)"
    )
    here = BandedToeplitz(bands=4, workload=PrefixSums(momentum=0.25)).optimize(steps=17)
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == str(here.strategy_coefs)


def test_arrays_are_read_only(cache: Path) -> None:
    counted = Counted()
    for search in (counted.program(), counted.program()):
        with pytest.raises(ValueError, match="read-only"):
            search(3)[0] = 7.0
    assert counted.calls == 1


def damage_by_cutting(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes()[:40])


def damage_in_the_middle(entry: Path) -> None:
    content = bytearray(entry.read_bytes())
    content[len(content) // 2 - 20 : len(content) // 2 + 20] = bytes(40)
    entry.write_bytes(bytes(content))


def replace_by_nothing(entry: Path) -> None:
    entry.write_bytes(b"")


def replace_by_text(entry: Path) -> None:
    entry.write_text("not an archive")


def replace_by_a_directory(entry: Path) -> None:
    entry.unlink()
    entry.mkdir()


def replace_by_a_plain_array(entry: Path) -> None:
    with entry.open("wb") as file:
        np.save(file, np.ones(3))


def replace_by_objects(entry: Path) -> None:
    with np.load(entry) as content:
        inputs = content["inputs"]
    np.savez(entry, inputs=inputs, values=np.array([print, None], dtype=object), allow_pickle=True)


def replace_values(values: object) -> Callable[[Path], None]:
    def replace(entry: Path) -> None:
        with np.load(entry) as content:
            inputs = content["inputs"]
        np.savez(entry, inputs=inputs, values=np.asarray(values))

    return replace


def take_the_inputs_away(entry: Path) -> None:
    np.savez(entry, values=np.array([5.0, 5.0, 5.0]))


def give_it_other_inputs(entry: Path) -> None:
    np.savez(entry, inputs=np.array('{"version": 1, "args": ["4"], "kwargs": "[]"}'), values=np.array([5.0, 5.0, 5.0]))


DAMAGES = {
    "cut": damage_by_cutting,
    "overwritten": damage_in_the_middle,
    "empty": replace_by_nothing,
    "text": replace_by_text,
    "a directory": replace_by_a_directory,
    "a plain array": replace_by_a_plain_array,
    "objects": replace_by_objects,
    "not a number": replace_values([0.0, np.nan, 4.0]),
    "infinite": replace_values([0.0, np.inf, 4.0]),
    "integers": replace_values([0, 1, 4]),
    "strings": replace_values(["0", "1", "4"]),
    "without inputs": take_the_inputs_away,
    "of other inputs": give_it_other_inputs,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_broken_or_foreign_entry_is_ignored(damage: Callable[[Path], None], cache: Path) -> None:
    counted = Counted()
    counted.program()(3)
    damage(only_entry(cache))
    assert counted.program()(3).tolist() == [0.0, 1.0, 4.0]
    assert counted.calls == 2
    assert [path.name for path in cache.iterdir() if path.suffix == ".tmp"] == []


def test_a_broken_entry_is_replaced(cache: Path) -> None:
    counted = Counted()
    counted.program()(3)
    replace_by_text(only_entry(cache))
    for _ in range(2):
        counted.program()(3)
    assert counted.calls == 2


def test_a_directory_that_cannot_be_written_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    counted = Counted()
    for place in (file, file / "below", Path("/proc/dpoptim")):
        monkeypatch.setenv("DPOPTIM_CACHE_DIR", str(place))
        before = counted.calls
        for _ in range(2):
            assert counted.program()(3).tolist() == [0.0, 1.0, 4.0]
        assert counted.calls == before + 2
    assert file.read_text() == ""


def test_a_full_disk_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert Counted().program()(3).tolist() == [0.0, 1.0, 4.0]
    assert list(cache.iterdir()) == []


def test_values_that_are_not_finite_are_never_read() -> None:
    counted = Counted(values=lambda count: np.full(count, np.nan))
    for _ in range(2):
        assert np.isnan(counted.program()(3)).all()
    assert counted.calls == 2


def test_versions_kinds_and_inputs_do_not_collide(cache: Path) -> None:
    made = [Counted(), Counted(kind="cubes", values=lambda count: np.arange(count, dtype=np.float64) ** 3)]
    for counted in made:
        for version in (1, 2):
            search = counted.program(version)
            for count in (3, 4):
                for shift in (0, 1):
                    power = 2 if counted is made[0] else 3
                    expected = [float(i**power + shift) for i in range(count)]
                    assert search(count, shift=shift).tolist() == expected
    assert [counted.calls for counted in made] == [8, 8]
    assert len(list(cache.iterdir())) == 16


def test_different_objectives_do_not_collide(cache: Path) -> None:
    inputs = [
        {"search": repr(search)}
        for search in (
            SearchObjective(steps=4),
            SearchObjective(steps=5),
            SearchObjective(steps=4, max_participations=2),
        )
    ]
    for index, given in enumerate(inputs):
        store("search", given, np.full(2, float(index)))
    for index, given in enumerate(inputs):
        found = load("search", given)
        assert found is not None
        assert found.tolist() == [index, index]
    assert load("other", inputs[0]) is None


def test_cached_coefficients_are_not_trusted(cache: Path) -> None:
    """Forged coefficients get their true sensitivity, or none."""
    strategy = BandedToeplitz(bands=3).optimize(steps=19)
    assert strategy.sensitivity_is_exact
    replace_values([1.0, 0.2, 0.9])(only_entry(cache))
    cast(Any, optimized_bands).cache_clear()
    try:
        poisoned = BandedToeplitz(bands=3).optimize(steps=19)
        assert poisoned.strategy_coefs == (1.0, 0.2, 0.9)
        with pytest.raises(ValueError, match="strategy_coefs"):
            poisoned.sensitivity(max_participations=1, min_separation=1)
    finally:
        cast(Any, optimized_bands).cache_clear()


def test_the_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPOPTIM_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_dir() == Path("/somewhere")
    monkeypatch.delenv("DPOPTIM_CACHE_DIR")
    assert cache_dir() == Path("/elsewhere/dpoptim")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_dir() == Path("/home/somebody/.cache/dpoptim")
