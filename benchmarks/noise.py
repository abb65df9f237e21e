"""What noise costs a step: the time of one row of correlated noise for all parameters of BERT-Tiny, and its memory.

    python benchmarks/noise.py                             on the GPU where there is one, else on the CPU
    python benchmarks/noise.py --parameters 124e6 --write FILE

The rows are made as an optimizer makes them, one tensor end to end, in float32, from a ChaCha20 keystream; times are
medians over steps that come after the mechanism's bands are full.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from steps import heading, setting

import dpoptim
from dpoptim.noise import StrategySpec
from dpoptim.theory import format_bytes

STEPS = 2000
MECHANISMS: tuple[StrategySpec, ...] = (
    dpoptim.Independent(),
    dpoptim.BandedToeplitz(bands=128),
    dpoptim.BandedInverse(bands=16),
    dpoptim.BandedInverse(bands=128),
    dpoptim.BufferedToeplitz(buffers=3),
)


def timed(spec: StrategySpec, parameters: int, device: str, repeats: int) -> tuple[float, int]:
    """(median milliseconds of a row, bytes kept between rows)."""
    key = dpoptim.NoiseKey.from_bytes(bytes(32))  # a known key: nothing here is private
    stream = spec.optimize(steps=STEPS).stream(key, stream="gradient", name="all", numel=parameters, device=device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for step in range(130 + repeats):
        wait()
        start = time.perf_counter()
        stream.row(step)
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[-repeats:]), stream.memory_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parameters", type=float, default=4_416_698, metavar="N", help="4,416,698: BERT-Tiny")
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="rows that are timed (30)")
    parser.add_argument("--commit", metavar="TEXT", help="the commit to name where there is no repository")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table as markdown")
    options = parser.parse_args()
    parameters, rows = int(options.parameters), []
    for spec in MECHANISMS:
        ms, kept = timed(spec, parameters, options.device, options.repeats)
        rows.append(f"| `{spec!r}` | {ms:.2f} | {format_bytes(kept)} |")
    lines = [
        "# Time of one row of noise",
        "",
        f"{heading(setting(options.device, options.commit))}. {parameters:,} parameters, {STEPS} steps; medians of "
        f"{options.repeats} rows; made by `python benchmarks/noise.py`.",
        "",
        "| mechanism | ms a step | memory |",
        "|---|---|---|",
        *rows,
    ]
    Console().print("\n".join(lines), highlight=False, markup=False)
    if options.write:
        options.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
