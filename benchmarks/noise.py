"""What noise costs a step: the time of one row of correlated noise for all parameters of BERT-Tiny, and its memory.

    python benchmarks/noise.py                             on the GPU where there is one, else on the CPU
    python benchmarks/noise.py --parameters 124M --write FILE

The rows are made as an optimizer makes them, one tensor end to end, in float32, from a ChaCha20 keystream; times are
medians over steps that come after the mechanism's bands are full.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from options import add_commit, add_device, whole, write_to
from record import heading, setting
from rich.console import Console

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
    add_device(parser)
    parser.add_argument("--parameters", type=whole(1), default=4_416_698, metavar="N", help="4,416,698: BERT-Tiny")
    parser.add_argument("--repeats", type=whole(1), default=30, metavar="N", help="rows that are timed (30)")
    add_commit(parser)
    parser.add_argument("--write", type=write_to(".md"), metavar="FILE", help="write the table as markdown")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False, markup=False)
    lines: list[str] = []

    def put(*more: str) -> None:
        """A line of the table, shown at once."""
        for line in more:
            console.print(line)
            lines.append(line)

    put(
        "# Time of one row of noise",
        "",
        f"{heading(setting(options.device, options.commit))}. {options.parameters:,} parameters, {STEPS} steps; "
        f"medians of {options.repeats} rows; made by `python benchmarks/noise.py`.",
        "",
        "| mechanism | ms a step | memory |",
        "|---|---|---|",
    )
    for spec in MECHANISMS:
        ms, kept = timed(spec, options.parameters, options.device, options.repeats)
        put(f"| `{spec!r}` | {ms:.2f} | {format_bytes(kept)} |")
    if options.write:
        options.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
