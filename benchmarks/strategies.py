"""Measure time, memory and error of the strategy searches, and of jax-privacy's if it is installed.

    python benchmarks/strategies.py                 # without jax-privacy's longest search (Banded: ten minutes, 4.5 GB)
    python benchmarks/strategies.py --all
    python benchmarks/strategies.py --write FILE    # also write a markdown table

Each search runs in a new process with an empty cache. Times exclude imports, but include jax's compilation, which every
new problem repeats. dpoptim recomputes the errors of both from the coefficients: mean and max RMSE of prefix sums,
times sensitivity.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

ONE = {"max_participations": 1, "min_separation": 1}
THREE = {"max_participations": 3, "min_separation": 128}

# name, dpoptim's search, steps, participations, jax-privacy's search
CASES: list[tuple[str, str, int, dict[str, int], str | None]] = [
    ("banded Toeplitz n=2000 b=128", "BandedToeplitz(bands=128)", 2000, ONE, "banded_toeplitz"),
    (
        "BLT 2 buffers n=2000, 3 at 128, max",
        'BufferedToeplitz(buffers=2, objective="max")',
        2000,
        THREE,
        "blt_max",
    ),
    ("BLT 2 buffers n=2000, 3 at 128, mean", "BufferedToeplitz(buffers=2)", 2000, THREE, "blt_mean"),
    ("BLT 4 buffers n=2000, 3 at 128, mean", "BufferedToeplitz(buffers=4)", 2000, THREE, "blt4_mean"),
    ("banded inverse n=2000 b=128, 3 at 128", "BandedInverse(bands=128)", 2000, THREE, None),
    ("dense n=1000", "Dense()", 1000, ONE, "dense"),
    ("banded n=2000 b=128", "Banded(bands=128)", 2000, ONE, "banded"),
    ("banded Toeplitz n=100,000 b=64", "BandedToeplitz(bands=64)", 100_000, ONE, None),
    ("banded inverse n=100,000 b=64", "BandedInverse(bands=64)", 100_000, ONE, None),
    ("BLT 4 buffers n=100,000", "BufferedToeplitz(buffers=4)", 100_000, ONE, None),
]
LONG = {"banded"}


def measured(search: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    wall, cpu = time.perf_counter(), time.process_time()
    found = search()
    cost = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    return found, cost


def errors(strategy: Any, pattern: dict[str, int]) -> dict[str, float]:
    sensitivity = strategy.sensitivity(**pattern)
    return {"mean": strategy.mean_error() * sensitivity, "max": strategy.max_error() * sensitivity}


def ours(spec: str, steps: int, pattern: dict[str, int]) -> dict[str, float]:
    import dpoptim.noise

    kind = eval(spec, vars(dpoptim.noise))
    strategy, cost = measured(lambda: kind.optimize(steps=steps, **pattern))
    return {**cost, **errors(strategy, pattern)}


def theirs(kind: str, steps: int, pattern: dict[str, int]) -> dict[str, float]:
    import jax
    import numpy as np

    jax.config.update("jax_enable_x64", True)
    from jax_privacy.matrix_factorization import banded, buffered_toeplitz, dense, toeplitz

    from dpoptim.noise import MatrixStrategy, ToeplitzStrategy

    def blt(buffers: int, error: str) -> Any:
        found = buffered_toeplitz.optimize(
            n=steps,
            min_sep=pattern["min_separation"],
            max_participations=pattern["max_participations"],
            error=error,
            min_buffers=buffers,
            max_buffers=buffers,
        )
        return np.asarray(found.toeplitz_coefs(steps))

    searches: dict[str, Callable[[], Any]] = {
        "banded_toeplitz": lambda: np.asarray(toeplitz.optimize_banded_toeplitz(steps, 128)),
        "blt_max": lambda: blt(2, "max"),
        "blt_mean": lambda: blt(2, "mean"),
        "blt4_mean": lambda: blt(4, "mean"),
        "dense": lambda: np.asarray(dense.optimize(steps)),
        "banded": lambda: np.asarray(banded.optimize(steps, bands=128).materialize()),
    }
    found, cost = measured(searches[kind])
    if found.ndim == 1:
        strategy: Any = ToeplitzStrategy(steps=steps, strategy_coefs=tuple(found.tolist()))
    else:
        strategy = MatrixStrategy.from_matrix(np.tril(found))
    return {**cost, **errors(strategy, pattern)}


def in_new_process(side: str, what: str, steps: int, pattern: dict[str, int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        job = json.dumps([side, what, steps, pattern])
        done = subprocess.run(
            [sys.executable, __file__, "--job", job],
            capture_output=True,
            text=True,
            env={**os.environ, "DPOPTIM_CACHE_DIR": cache},
            check=False,
        )
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:100]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def run_job(job: str) -> None:
    side, what, steps, pattern = json.loads(job)
    result = (ours if side == "ours" else theirs)(what, steps, pattern)
    result["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps(result))


def cells(result: dict[str, Any] | None) -> list[str]:
    if result is None:
        return ["-"] * 5
    if "error" in result:
        return [result["error"], *["-"] * 4]
    return [
        f"{result[key]:.{digits}f}"
        for key, digits in (("wall", 2), ("cpu", 2), ("peak_gb", 2), ("mean", 5), ("max", 5))
    ]


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        run_job(sys.argv[2])
        return
    # Imported late, because they would add to the memory of a job.
    from options import add_write, report
    from record import heading, markdown_table, page, publish, setting

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="include jax-privacy's longest search")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the searches whose name contains TEXT")
    add_write(parser)
    options = parser.parse_args()
    chosen = [case for case in CASES if options.only.lower() in case[0].lower()]
    if not chosen:
        parser.error(f"no search matches --only {options.only}; choose from {'; '.join(name for name, *_ in CASES)}")
    has_jax = importlib.util.find_spec("jax_privacy") is not None
    titles = ["search", "wall, s", "CPU, s", "peak, GB", "mean", "max"]
    titles += [f"jax-privacy {title}" for title in titles[1:]] if has_jax else []
    rows = []
    for name, spec, steps, pattern, peer in chosen:
        report(f"{name}: dpoptim{' and jax-privacy' if has_jax else ''}")
        rows.append([name, *cells(in_new_process("ours", spec, steps, pattern))])
        if has_jax:
            skipped = peer is None or (peer in LONG and not options.all)
            rows[-1] += cells(None if skipped else in_new_process("theirs", str(peer), steps, pattern))
    record = setting("cpu", packages=("numpy", "scipy", "torch", "jax", "jax-privacy"))
    about = f"{heading(record)}. Measured by `python benchmarks/strategies.py`; its docstring explains the columns."
    publish(options, page("Searches for strategies", about, markdown_table(titles, rows)))


if __name__ == "__main__":
    main()
