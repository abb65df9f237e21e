"""Measure what noise costs per step: time and memory of one row of noise for all parameters of BERT-Tiny.

    python benchmarks/noise.py                             # on the GPU if there is one, else on the CPU
    python benchmarks/noise.py --parameters 124M --write FILE

A row is one float32 tensor from a ChaCha20 keystream, exactly as in an optimizer. Times are medians over steps after
the mechanism's bands are full.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

from options import add_commit, add_device, add_write, at_least, report
from record import heading, markdown_table, page, publish, setting
from timing import milliseconds

import dpoptim
from dpoptim.noise import StrategySpec, TensorPart
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
    """Return the median milliseconds per row, and the bytes kept between rows."""
    key = dpoptim.NoiseKey.from_bytes(bytes(32))  # known: nothing here is private
    parts = [TensorPart(name="all", numel=parameters)]
    stream = spec.optimize(steps=STEPS).stream(key, parts, stream="gradient", device=device)
    times = [milliseconds(partial(stream.row, step), device) for step in range(130 + repeats)]
    return statistics.median(times[-repeats:]), stream.memory_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument(
        "--parameters", type=at_least(1), default=4_416_698, metavar="N", help="(default: 4,416,698, BERT-Tiny)"
    )
    parser.add_argument("--repeats", type=at_least(1), default=30, metavar="N", help="timed rows (default: 30)")
    add_commit(parser)
    add_write(parser)
    options = parser.parse_args()
    about = (
        f"{heading(setting(options.device, options.commit))}. {options.parameters:,} parameters, {STEPS} steps; "
        f"medians of {options.repeats} rows, measured by `python benchmarks/noise.py`."
    )
    rows = []
    for spec in MECHANISMS:
        ms, kept = timed(spec, options.parameters, options.device, options.repeats)
        rows.append([f"`{spec!r}`", f"{ms:.2f}", format_bytes(kept)])
        report(f"{spec!r}: {ms:.2f} ms")
    table = markdown_table(["mechanism", "ms per step", "memory"], rows)
    publish(options, page("Time of one row of noise", about, table))


if __name__ == "__main__":
    main()
