"""Look for broken promises with random cases: python -m tests.fuzz [--parts NAME ...] [--cases N] [--seed N]."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from experiments.markdown import table
from experiments.provenance import setting, this_commit
from tests.fuzz.parts import count

PARTS = {
    "sensitivity": "Clipped sums of random models, against one example at a time in float64",
    "kills": "`dpoptim train` killed with SIGKILL, one process; the result compared with an undisturbed run",
    "kills-of-two": "The same with two processes",
    "files": "A file of a run truncated, emptied, removed, swapped, or with flipped bits; then resumed",
    "strings": "Hostile column names, labels and run names in the report, in Chromium",
}
BEGIN, END = "<!-- begin reliability -->", "<!-- end reliability -->"


def run(part: str, cases: int | None, seed: int, folder: Path) -> dict[str, Any]:
    """Run the cases of a part, or its usual number of cases."""
    module = importlib.import_module(f"tests.fuzz.{part.partition('-')[0]}")
    planned, began = cases or module.CASES, time.perf_counter()
    this_commit()  # remembers what is about to run
    processes = {"processes": 2} if part == "kills-of-two" else {}
    found = count(part, module.outcomes(seed, planned, folder, **processes), planned)
    made = setting(began)
    del made["versions"]
    outcomes = dict(found.outcomes.most_common())
    return {
        **made,
        "seed": seed,
        "planned": planned,
        "outcomes": outcomes,
        "failures": found.failures,
        "note": found.note,
    }


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """One table of all parts, and one of the outcomes of each."""
    rows, sections = [], []
    for name, what in PARTS.items():
        if (found := results.get(name)) is None:
            rows.append([name, what, "not run", "", "", ""])
            continue
        cases = sum(found["outcomes"].values()) + len(found["failures"])
        ran = f"{cases:,}" + (f" of {found['planned']:,}" if cases < found["planned"] else "")
        when = f"{found['made'][:10]}, {found['commit']}, {found['machine']}"
        rows.append([name, what, ran, f"{len(found['failures']):,}", f"{found['seconds'] / 60:.0f} min", when])
        counted = sorted(found["outcomes"].items(), key=lambda item: (-item[1], item[0]))
        lines = [["failed: " + failure.partition("[")[0], "1"] for failure in found["failures"]]
        lines += [[outcome, f"{number:,}"] for outcome, number in counted]
        note = f"\nNot all cases ran: {found['note']}.\n" if found["note"] else ""
        sections.append(f"## {name}\n{note}\n{table(['outcome', 'cases'], lines)}\n\nFirst seed: {found['seed']}.")
    titles = ["part", "what", "cases", "failed", "time", "made"]
    return "\n\n".join([table(titles, rows, left=2), *sections])


def write_page(page: Path, results: dict[str, dict[str, Any]]) -> None:
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{markdown(results)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--cases", type=int, help="of each part; by default, each has a number of its own")
    parser.add_argument("--seed", type=int, default=date.today().toordinal() * 10_000, help="of the first case")
    parser.add_argument("--json", type=Path, help="add the counts to this file, in place of earlier ones of a part")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write all counts of the file into this page")
    options = parser.parse_args()
    if len(options.parts) > 1:  # each in a new process, because those that fork must not have run a backward
        given = [word for word in sys.argv[1:] if word not in (*PARTS, "--parts")]
        command = [sys.executable, "-m", "tests.fuzz", *given, "--parts"]
        return max([subprocess.run([*command, part], check=False).returncode for part in options.parts])
    (part,) = options.parts
    torch.set_num_threads(1)
    there = options.json is not None and options.json.exists()
    results = json.loads(options.json.read_text()) if there else {}
    with tempfile.TemporaryDirectory(prefix="dpoptim-fuzz-") as folder:
        results[part] = run(part, options.cases, options.seed, Path(folder))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.write is not None:
        write_page(options.write, results)
    print(markdown({part: results[part]}))
    return 1 if results[part]["failures"] or results[part]["note"] else 0


if __name__ == "__main__":
    sys.exit(main())
