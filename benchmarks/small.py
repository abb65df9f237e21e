"""Is a private step still cheap? BERT-Tiny, 32 examples of 128 tokens, on two threads of this machine.

    make bench
    python benchmarks/small.py --repeats 50

The ways of steps.py take turns, and the ratios of their medians are held against limits: a private step may cost 1.2
times the one without privacy (flat) or 1.35 times (scaled), and Opacus, where it is installed, must take 1.3 times as
long as ours of the same geometry. Exits with 1 where one is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import warnings

import torch
from rich.console import Console
from rich.table import Table
from steps import PEERS, bert_tiny, fastest_peer, heading, measured, setting

# the ratio, its limit, and whether the limit is the most or the least that it may be
LIMITS = (("flat", "off", 1.2, "most"), ("scaled", "off", 1.35, "most"), ("opacus", "flat", 1.3, "least"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="rounds that are timed (20)")
    repeats = max(2, parser.parse_args().repeats)
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    with_peers = importlib.util.find_spec("opacus") is not None
    case = bert_tiny("cpu", 32, 128)
    found = measured(case, ("off", "flat", "scaled", *(PEERS if with_peers else ())), repeats)
    peer = fastest_peer(found) or "opacus"
    table = Table(title=f"{case.name}: ratios of step times, medians of {repeats} rounds")
    for title in ("ratio", "times, ms", "measured", "limit", ""):
        table.add_column(title, justify="left" if title == "ratio" else "right")
    missed = False
    for top, bottom, limit, bound in LIMITS:
        top = peer if top == "opacus" else top
        limited = f"at {bound} {limit}"
        above, below = found.get(top, {"error": "not installed"}), found[bottom]
        if "ms" in above and "ms" in below:
            ratio = above["ms"] / below["ms"]
            ok = ratio <= limit if bound == "most" else ratio >= limit
            times, measure = f"{above['ms']:.0f} / {below['ms']:.0f}", f"{ratio:.2f}"
        else:
            # Only a peer that is not installed may be absent; a way that fails is a miss.
            ok, times, measure = top in PEERS and not with_peers, "-", above.get("error") or below["error"]
        missed |= not ok
        verdict = "[red]MISSED" if not ok else "[green]ok" if "ms" in above else "not checked"
        table.add_row(f"{top}/{bottom}", times, measure, limited, verdict)
    console = Console()
    console.print(table)
    console.print(heading(setting("cpu")), highlight=False)
    if with_peers:
        console.print(f"Opacus trains an {case.note} twin of the same sizes; its faster mode counts.", highlight=False)
    else:
        console.print("Opacus is not installed, so it is not compared; pip install opacus", highlight=False)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
