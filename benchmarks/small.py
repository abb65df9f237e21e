"""Check that a private step is still cheap: BERT-Tiny, 32 examples of 128 tokens, on two CPU threads.

    make bench
    python benchmarks/small.py --repeats 50
    python benchmarks/small.py --separate --json FILE --write FILE    # also time each method in a separate process
    python benchmarks/small.py --from FILE --write FILE               # redo the table of earlier results

The methods of steps.py take turns in one process, and the ratios of their medians must keep to limits. A private step
may take 1.2 times (flat) or 1.35 times (scaled) as long as a step without privacy. Opacus, if installed, must take at
least 1.3 times as long as flat. The exit status is 1 if a limit is missed. With --separate, each method is also timed
in a separate process, where memory left by the other methods has no effect; the limits do not apply there.

Allocators return freed memory to the system, and whichever method runs next pays for new pages. So the process keeps
it: on ARM by MIMALLOC_PURGE_DELAY, unless it is already set, and with glibc by `keep_freed_memory`, as `dpoptim train`
does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from typing import Any

os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")  # before torch is loaded

import torch
from cases import bert_tiny
from options import add_json, add_write, at_least, missing_packages, one_line_errors, report, require_packages
from record import (
    PEERS,
    Found,
    bullets,
    fastest_peer,
    heading,
    markdown_table,
    page,
    publish,
    ratios,
    read,
    save,
    setting,
    spelled,
)
from steps import measured

from dpoptim.kernels.freed_memory import keep_freed_memory

THREADS = 2
# numerator, denominator, limit, and whether the ratio may be at most or at least that
LIMITS = (("flat", "off", 1.2, "most"), ("scaled", "off", 1.35, "most"), ("opacus", "flat", 1.3, "least"))
TITLES = ["ratio", "times, ms", "measured", "limit", "verdict"]


def in_new_process(way: str, repeats: int) -> dict[str, Any]:
    """Measure one method in a new process."""
    command = [sys.executable, __file__, "--repeats", str(repeats), "--job", way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"error": f"exit status {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compared(found: Found, top: str, bottom: str) -> tuple[str, float | str]:
    """Return both times and their ratio, or the reason why there is none."""
    above, below = found.get(top, {"error": "not installed"}), found[bottom]
    if "ms" in above and "ms" in below:
        return f"{above['ms']:.0f} / {below['ms']:.0f}", above["ms"] / below["ms"]
    return "-", above.get("error") or below["error"]


def rows_of(record: dict[str, Any]) -> list[list[str]]:
    """Return one row per limit. A method that failed misses its limit, unless Opacus is not installed."""
    case, rows = record["cases"][0], []
    peer = fastest_peer(case["ways"]) or "opacus"
    for named, bottom, limit, bound in LIMITS:
        top = peer if named == "opacus" else named
        times, ratio = compared(case["ways"], top, bottom)
        if isinstance(ratio, str):
            verdict = "not checked" if top in PEERS and top not in case["ways"] else "MISSED"
        else:
            verdict = "ok" if (ratio <= limit if bound == "most" else ratio >= limit) else "MISSED"
        row = [f"{top}/{bottom}", times, shown(ratio), f"at {bound} {limit}", verdict]
        if "apart" in case:
            times, ratio = compared(case["apart"], top, bottom)
            row += [times, shown(ratio)]
        rows.append(row)
    return rows


def shown(ratio: float | str) -> str:
    return ratio if isinstance(ratio, str) else f"{ratio:.2f}"


def titles_of(record: dict[str, Any]) -> list[str]:
    return TITLES + (["separate: times, ms", "separate: measured"] if "apart" in record["cases"][0] else [])


def notes(record: dict[str, Any]) -> list[str]:
    case, lines = record["cases"][0], []
    if "purge_delay" in record:
        delay = record["purge_delay"]
        lines.append(f"The process keeps freed memory, for all methods (on ARM by MIMALLOC_PURGE_DELAY={delay}).")
    if "apart" in case:
        lines.append('The methods took turns in one process. "separate": one process per method; no limits apply.')
    if fastest_peer(case["ways"]):
        lines.append(f"Opacus trains an {case['note']} model of the same sizes; its faster mode counts.")
    else:
        lines.append("Opacus is not installed; `pip install opacus` adds it.")
    return lines


def measure(repeats: int, commit: str | None, separate: bool) -> dict[str, Any]:
    """Return a record of one case, in the format of steps.py."""
    case = bert_tiny("cpu", 32, 128)
    ways = ("off", "flat", "scaled", *(() if missing_packages(["opacus"]) else PEERS))
    found = measured(case, ways, repeats, report)
    about = {key: getattr(case, key) for key in ("name", "note", "together", "compiled_micro_batch")}
    done = {**about, "ways": found, "ratios": ratios(found)}
    if separate:
        done["apart"] = {way: in_new_process(way, repeats) for way in ways}
    kept = {"purge_delay": os.environ["MIMALLOC_PURGE_DELAY"]}
    return setting("cpu", commit) | {"repeats": repeats, **kept, "cases": [done]}


def markdown(record: dict[str, Any]) -> str:
    name = spelled(record["cases"][0]["name"])
    made = (
        f"{name}, medians of {record['repeats']} rounds, measured by `python benchmarks/small.py`; "
        "its docstring explains the rows."
    )
    table = markdown_table(titles_of(record), rows_of(record))
    return page("A small step on the CPU", f"{heading(record)}. {made}", table, bullets(notes(record)))


def main() -> int:
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=at_least(2), default=20, metavar="N", help="timed rounds (default: 20)")
    parser.add_argument("--separate", action="store_true", help="also time each method in a separate process")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    add_json(parser)
    add_write(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(THREADS)
    if options.earlier:
        with one_line_errors(parser):
            record = read(options.earlier)
        if not record["cases"] or not {"off", "flat"} <= record["cases"][0]["ways"].keys():
            parser.error(f"{options.earlier} was not written by small.py --json")
    else:
        require_packages(parser, "transformers")
        if options.job:
            case = bert_tiny("cpu", 32, 128)
            found = measured(case, (options.job,), options.repeats, lambda line: report(f"separate: {line}"))
            print(json.dumps(found[options.job]))
            return 0
        record = measure(options.repeats, options.commit, options.separate)
    if options.json:
        save(record, options.json)
    publish(options, markdown(record))
    return int(any("MISSED" in row for row in rows_of(record)))


if __name__ == "__main__":
    sys.exit(main())
