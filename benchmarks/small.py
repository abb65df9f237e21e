"""Is a private step still cheap? BERT-Tiny, 32 examples of 128 tokens, on two threads of this machine.

    make bench
    python benchmarks/small.py --repeats 50
    python benchmarks/small.py --apart --json FILE --write FILE    also each way in a process of its own; dated
    python benchmarks/small.py --from FILE --write FILE            the table of an earlier --json, without measuring

The ways of steps.py take turns in one process, and the ratios of their medians are held against limits: a private step
may cost 1.2 times the one without privacy (flat) or 1.35 times (scaled), and Opacus, where it is installed, must take
1.3 times as long as ours of the same geometry. Exits with 1 where one is missed. With --apart every way is timed once
more in a process of its own, where a step meets the memory that it left itself and not that of the other ways; limits
do not apply to these ratios.

Torch's allocator on ARM gives freed memory back to the system after 10 ms, and the next step pays for new pages; with
ways in turns that falls on one or the other by chance. So it is asked to keep it, for all ways alike, unless
MIMALLOC_PURGE_DELAY says otherwise; elsewhere that changes nothing.
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
from options import absent, add_files, need_packages, say, told_in_one_line, whole
from record import PEERS, Found, fastest_peer, heading, markdown_table, ratios, read, save, setting, spelled
from rich.console import Console
from rich.table import Table
from steps import bert_tiny, measured

THREADS = 2
# the ratio, its limit, and whether the limit is the most or the least that it may be
LIMITS = (("flat", "off", 1.2, "most"), ("scaled", "off", 1.35, "most"), ("opacus", "flat", 1.3, "least"))
TITLES = ["ratio", "times, ms", "measured", "limit", "verdict"]


def in_new_process(way: str, repeats: int) -> dict[str, Any]:
    """What `measured` finds for this way alone, in a process that makes nothing else."""
    command = [sys.executable, __file__, "--repeats", str(repeats), "--job", way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"error": f"ended with status {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compared(found: Found, top: str, bottom: str) -> tuple[str, float | str]:
    """(both times, their ratio), or why there is none."""
    above, below = found.get(top, {"error": "not installed"}), found[bottom]
    if "ms" in above and "ms" in below:
        return f"{above['ms']:.0f} / {below['ms']:.0f}", above["ms"] / below["ms"]
    return "-", above.get("error") or below["error"]


def rows_of(record: dict[str, Any]) -> list[list[str]]:
    """A row for each limit; the verdict is "MISSED" where a way failed, unless it is Opacus and not installed."""
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
    return TITLES + (["apart: times, ms", "apart: measured"] if "apart" in record["cases"][0] else [])


def notes(record: dict[str, Any]) -> list[str]:
    case, lines = record["cases"][0], []
    if "purge_delay" in record:
        lines.append(f"MIMALLOC_PURGE_DELAY={record['purge_delay']} for all ways: freed memory stays with the process.")
    if "apart" in case:
        lines.append("The ways took turns in one process; apart: each in a process of its own, where no limit applies.")
    if fastest_peer(case["ways"]):
        lines.append(f"Opacus trains an {case['note']} twin of the same sizes; its faster mode counts.")
    else:
        lines.append("Opacus is not compared; where it is installed (pip install opacus) it is.")
    return lines


def measure(repeats: int, commit: str | None, apart: bool) -> dict[str, Any]:
    """A record as steps.py writes it, of one case."""
    case = bert_tiny("cpu", 32, 128)
    ways = ("off", "flat", "scaled", *(() if absent(["opacus"]) else PEERS))
    found = measured(case, ways, repeats, say)
    about = {key: getattr(case, key) for key in ("name", "note", "together", "compiled_micro_batch")}
    done = {**about, "ways": found, "ratios": ratios(found)}
    if apart:
        done["apart"] = {way: in_new_process(way, repeats) for way in ways}
    kept = {"purge_delay": os.environ["MIMALLOC_PURGE_DELAY"]}
    return setting("cpu", commit) | {"repeats": repeats, **kept, "cases": [done]}


def markdown(record: dict[str, Any]) -> str:
    name = spelled(record["cases"][0]["name"])
    made = (
        f"{name}, medians of {record['repeats']} rounds; made by `python benchmarks/small.py`, which says what is run."
    )
    lines = [
        "# A small step on the CPU",
        "",
        f"{heading(record)}. {made}",
        "",
        *markdown_table(titles_of(record), rows_of(record)),
        "",
        *(f"- {line}" for line in notes(record)),
    ]
    return "\n".join(lines) + "\n"


def show(record: dict[str, Any], console: Console) -> None:
    case = record["cases"][0]
    table = Table(title=f"{case['name']}: ratios of step times, medians of {record['repeats']} rounds")
    for title in titles_of(record):
        table.add_column(title, justify="left" if title == "ratio" else "right", no_wrap=title == "ratio")
    colours = {"MISSED": "[red]MISSED", "ok": "[green]ok"}
    for row in rows_of(record):
        table.add_row(*(colours.get(cell, cell) for cell in row))
    console.print(table)
    for line in (heading(record), *notes(record)):
        console.print(line, highlight=False, markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=whole(2), default=20, metavar="N", help="rounds that are timed (20)")
    parser.add_argument("--apart", action="store_true", help="time each way in a process of its own besides")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    add_files(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(THREADS)
    if options.files:
        with told_in_one_line(parser):
            record = read(options.files)
        if not record["cases"] or not {"off", "flat"} <= record["cases"][0]["ways"].keys():
            parser.error(f'{options.files[0]} has no times of "off" and "flat"; give what small.py --json wrote')
    else:
        need_packages(parser, "transformers")
        if options.job:
            case = bert_tiny("cpu", 32, 128)
            print(
                json.dumps(
                    measured(case, (options.job,), options.repeats, lambda line: say(f"apart: {line}"))[options.job]
                )
            )
            return 0
        record = measure(options.repeats, options.commit, options.apart)
    show(record, Console())
    if options.json:
        save(record, options.json)
    if options.write:
        options.write.write_text(markdown(record))
    return int(any("MISSED" in row for row in rows_of(record)))


if __name__ == "__main__":
    sys.exit(main())
