"""Compare the step times of two versions of dpoptim, which take turns in one process.

    git worktree add /tmp/old REVISION
    python benchmarks/versions.py /tmp/old                        # on the GPU if there is one, else on the CPU
    python benchmarks/versions.py /tmp/old --only gpt-2 --ways scaled --repeats 100

Use it to measure a change of the engine or of a kernel. Step times in two separate processes differ by more than such
a change. The old package is copied under the name dpoptim_old, and trains the same models with its own loss. The
script prints the median over the rounds of new time / old time, and the median times. The exit status is 1 if a ratio
is above the limit.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import re
import shutil
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import cases
import torch
from options import add_device, at_least, input_folder, missing_packages, report, require_packages
from steps import Step, first_words, private_steps
from timing import milliseconds

import dpoptim

WAYS = ("flat", "scaled", "captured")
WARM = 4


def copy_package(old: Path, folder: Path) -> None:
    """Copy the package and the benchmark cases of a checkout under different names."""
    shutil.copytree(old / "src" / "dpoptim", folder / "dpoptim_old", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(old / "benchmarks" / "cases.py", folder / "cases_old.py")
    for file in folder.rglob("*.py"):
        # The bytes in b"dpoptim ..." label secret streams, and their length is limited.
        file.write_text(re.sub(r'(?<!b")\bdpoptim\b', "dpoptim_old", file.read_text()))


def steps_of(package: Any, case: Any, way: str) -> Step:
    torch.manual_seed(0)
    model = case.model().to(case.device, case.dtype)
    return private_steps(package, case, model, case.batch(), way)


def compare(steps: dict[str, Step], repeats: int, device: str) -> dict[str, float]:
    """Time both versions in turns; each begins every other round."""
    for step in steps.values():
        for _ in range(WARM):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(repeats):
        for name in sorted(steps, reverse=bool(number % 2)):
            times[name].append(milliseconds(steps[name], device))
    ratios = [new / old for new, old in zip(times["new"], times["old"], strict=True)]
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {**medians, "ratio": statistics.median(ratios)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=input_folder, help="a checkout of the old version")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the cases whose name contains TEXT")
    parser.add_argument("--ways", metavar="A,B", help=f"only these of {', '.join(WAYS)}")
    parser.add_argument("--repeats", type=at_least(2), default=30, metavar="N", help="timed rounds (default: 30)")
    parser.add_argument("--limit", type=float, default=1.02, metavar="RATIO", help="accepted ratio (default: 1.02)")
    add_device(parser)
    options = parser.parse_args()
    if not (options.old / "src" / "dpoptim").is_dir():
        parser.error(f"{options.old} is not a checkout of dpoptim")
    ways = options.ways.split(",") if options.ways else list(WAYS if options.device == "cuda" else WAYS[:2])
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"unknown method {unknown[0]!r} in --ways; choose from {', '.join(WAYS)}")
    require_packages(parser, "transformers")
    warnings.simplefilter("ignore")
    slower = False
    with tempfile.TemporaryDirectory() as folder:
        copy_package(options.old, Path(folder))
        sys.path.append(folder)
        package, old_cases = importlib.import_module("dpoptim_old"), importlib.import_module("cases_old")
        old = {case.name: case for case in old_cases.cases(options.device)}
        shared = [case for case in cases.cases(options.device) if case.name in old and not missing_packages(case.needs)]
        chosen = [case for case in shared if options.only.lower() in case.name.lower()]
        if not chosen:
            parser.error(
                f"no case matches --only {options.only}; choose from {', '.join(case.name for case in shared)}"
            )
        for case in chosen:
            for way in ways:
                gc.collect()
                if options.device == "cuda":
                    torch.cuda.empty_cache()
                try:
                    steps = {
                        "old": steps_of(package, old[case.name], way),
                        "new": steps_of(dpoptim, case, way),
                    }
                    found = compare(steps, options.repeats, options.device)
                except Exception as error:
                    report(f"{case.name}, {way}: {first_words(error)}")
                    continue
                slower |= found["ratio"] > options.limit
                print(
                    f"{case.name}, {way}: {found['ratio']:.3f} (old {found['old']:.1f} ms, new {found['new']:.1f} ms)"
                )
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
