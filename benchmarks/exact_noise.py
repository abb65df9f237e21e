"""Measure what exact noise costs, and what it hides.

    python benchmarks/exact_noise.py                       # on the GPU if there is one, else on the CPU
    python benchmarks/exact_noise.py --parameters 1M --write FILE

Time: adding one step's noise to clipped sums, with floating-point and with exact noise, in turns; medians.

What it hides: a coordinate of the clipped sum is 0 or 1, and the noise has a standard deviation of 1. A float32 sum of
1 and noise is a multiple of 2^-24. So a release that is no such multiple shows that the sum was 0.

Clipped sums are rounded too, before the noise, and with exact noise in float64. The last table shows how much further
than the clip norm the sum of a batch moves when an example is left out: for random examples and a small network, and
for examples that were made, and put in order, so that the others are rounded differently without it. It also has the
time of a forward, backward and clipping of a network with 1.6 million parameters.
"""

from __future__ import annotations

import argparse
import math
import statistics
from functools import partial

import torch
from options import add_commit, add_device, add_write, at_least
from record import heading, markdown_table, page, publish, setting
from timing import milliseconds
from torch import nn

import dpoptim
from dpoptim.clipping.clipped_sums import ClippedSums
from dpoptim.noise import NoiseKey, NoiseStream, StrategySpec, TensorPart

KEY = NoiseKey.from_bytes(bytes(32))  # known: nothing here is private
STEPS = 200
NOISE: tuple[StrategySpec, ...] = (
    dpoptim.Independent(),
    dpoptim.BandedInverse(bands=16),
    dpoptim.BufferedToeplitz(buffers=3),
)


def stream(spec: StrategySpec, numel: int, device: str, *, exact: bool) -> NoiseStream:
    part = [TensorPart(name="all", numel=numel)]
    return spec.optimize(steps=STEPS).stream(KEY, part, stream="gradient", device=device, exact=exact)


def times(spec: StrategySpec, numel: int, device: str, repeats: int) -> tuple[float, float]:
    """Return the median milliseconds of a step in the middle of the run: floating-point, exact."""
    sums = torch.zeros(numel, device=device)
    kinds = [stream(spec, numel, device, exact=exact) for exact in (False, True)]
    found: list[list[float]] = []
    for step in range(STEPS // 2, STEPS // 2 + repeats + 1):
        works = [partial(kind.add_to, sums, step, stddev=1.0, scale=None, divisor=1) for kind in kinds]
        found.append([milliseconds(work, device) for work in works])
    plain, exact = (statistics.median(times[1:]) for times in zip(*found, strict=True))
    return plain, exact


def given_away(*, exact: bool) -> float:
    """Return the share of coordinates with a sum of 0 whose release cannot come from a sum of 1."""
    sums = torch.zeros(1_000_000)
    stream(dpoptim.Independent(), len(sums), "cpu", exact=exact).add_to(sums, 0, stddev=1.0, scale=None, divisor=1)
    return float(((sums.double() * 2**24).frac() != 0).double().mean())


def excess(model: nn.Module, inputs: torch.Tensor, *, exact: bool) -> float:
    """Return the relative excess over the clip norm when the first example is left out of a batch."""
    sums = []
    for rows in (inputs, inputs[1:]):
        clipped = ClippedSums(model, clip_norm=1.0, in_double=exact)
        clipped.engine.attach()
        model(rows).sum().backward()
        clipped.engine.flush()
        sums.append(torch.cat([one.double().flatten() for one in clipped.take()[0].values()]))
        clipped.engine.detach()
    return float((sums[0] - sums[1]).norm()) - 1.0


def clipping_ms(batch_size: int, device: str, *, exact: bool, repeats: int) -> float:
    """Return the median milliseconds of the forward, backward and clipping of a network of 1.6 million parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 784)).to(device)
    inputs = torch.randn(batch_size, 784, device=device)
    clipped = ClippedSums(model, clip_norm=1.0, in_double=exact)
    clipped.engine.attach()

    def step() -> None:
        model(inputs).square().sum().backward()
        clipped.engine.flush()
        clipped.take()

    return statistics.median([milliseconds(step, device) for _ in range(repeats + 1)][1:])


def of_random_examples(batch_size: int, *, exact: bool, trials: int = 20) -> float:
    found = []
    for trial in range(trials):
        torch.manual_seed(trial)
        model = nn.Sequential(nn.Linear(100, 200), nn.Tanh(), nn.Linear(200, 10))
        found.append(excess(model, torch.randn(batch_size, 100) * 30, exact=exact))  # every gradient is clipped
    return max(found)


def of_made_examples(batch_size: int, *, exact: bool, numel: int = 1024) -> float:
    """Half of the examples bring the sum close to a power of two; the others are about half of its last bit."""
    many = batch_size // 2
    power = 2.0 ** math.floor(math.log2(many / numel**0.5))
    found = []
    for more in (0.52, 0.54, 0.56, 0.58, 0.6):
        inputs = torch.full((batch_size, numel), power / (many - 0.5))
        inputs[0] = 1.0  # clipped to numel^-1/2
        inputs[many:] = more * power * 2.0**-23
        found.append(excess(nn.Linear(numel, 1, bias=False), inputs, exact=exact))
    return max(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument("--parameters", type=at_least(1), default=4_416_698, metavar="N", help="(default: 4,416,698)")
    parser.add_argument("--repeats", type=at_least(1), default=9, metavar="N", help="timed steps (default: 9)")
    add_commit(parser)
    add_write(parser)
    options = parser.parse_args()
    rows = []
    for spec in NOISE:
        plain, exact = times(spec, options.parameters, options.device, options.repeats)
        rows.append([f"`{spec!r}`", f"{plain:.1f}", f"{exact:.1f}", f"{exact / plain:.1f}"])
    text = page(
        "Exact noise",
        f"{heading(setting(options.device, options.commit))}. By `python benchmarks/exact_noise.py`; its docstring "
        f"explains the tables. {options.parameters:,} parameters, step {STEPS // 2} of {STEPS}.",
        markdown_table(["noise", "floating point, ms", "exact, ms", "ratio"], rows),
        markdown_table(
            ["noise", "coordinates that give a sum of 0 away"],
            [[name, f"{given_away(exact=exact):.1%}"] for name, exact in (("floating point", False), ("exact", True))],
        ),
        markdown_table(
            [
                "clipping",
                "batch size",
                "distance between neighbouring sums over the clip norm: random examples",
                "made examples",
                "ms of a step",
            ],
            [
                [
                    name,
                    f"{size:,}",
                    f"1 + {of_random_examples(size, exact=exact):.1e}",
                    f"1 + {of_made_examples(size, exact=exact):.1e}",
                    f"{clipping_ms(size, options.device, exact=exact, repeats=options.repeats):.1f}",
                ]
                for name, exact in (("float32", False), ("float64, with exact noise", True))
                for size in (256, 2048, 8192)
            ],
        ),
    )
    publish(options, text)


if __name__ == "__main__":
    main()
