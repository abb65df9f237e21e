"""Do 100,000 steps with correlated noise keep their memory, their speed and their noise?

    python benchmarks/long_runs.py
    python benchmarks/long_runs.py --steps 10000 --json FILE --write FILE
    python benchmarks/long_runs.py --from FILE --write FILE    # redo the table of earlier results

A linear layer trains with scale-then-privatize, the loader and the optimizer that train models. Its inputs are 0, so
that every release is noise alone. At the end the releases are multiplied by C and compared with the normals z that the
key determines: the largest difference over the whole run is shown. Time is the processor time of a step in a tenth of
the run, memory that of the whole process.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from options import add_json, add_write, at_least, report
from record import heading, markdown_table, measure_or_read, page, setting
from scipy.signal import fftconvolve
from torch import nn
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.clipping import Released
from dpoptim.noise import BandedInverse, BandedToeplitz, BufferedToeplitz, NoiseKey, NormalSource

NOISES = {
    "BandMF, 64 bands": BandedToeplitz(bands=64),
    "BLT, 4 buffers": BufferedToeplitz(buffers=4),
    "banded inverse, 8 bands": BandedInverse(bands=8),
}
RUN, EXAMPLES, BATCH, WIDTH, PARTS = "long run", 400, 4, 6, 10


def resident() -> float:
    """Return the memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def long_run(noise: Any, steps: int) -> dict[str, Any]:
    plan = dpoptim.PrivacyPlan(
        num_examples=EXAMPLES, batch_size=BATCH, steps=steps, noise_multiplier=1.0, clip_norm=1.0, noise=noise
    )
    key, model = NoiseKey.from_bytes(bytes(range(32))), nn.Linear(WIDTH, 1, bias=False)
    optimizer = dpoptim.scale_then_privatize(model, plan, lr=1e-6, key=key, run_id=RUN)
    loader = dpoptim.private_loader(TensorDataset(torch.zeros(EXAMPLES, WIDTH)), plan, key=key, run_id=RUN)
    releases, ends, memory = np.zeros((steps, WIDTH)), [time.process_time()], []

    def observe(released: Released) -> None:
        scale = optimizer.mechanism.scale
        noisy = released.gradient["weight"].double() * (1.0 if scale is None else scale["weight"].double())
        releases[released.step] = noisy.view(-1).numpy()

    optimizer.observers.append(observe)
    for step, (inputs,) in enumerate(loader, 1):
        model(inputs).sum(1).sum().backward()
        optimizer.step()
        if step % (steps // PARTS) == 0:
            ends.append(time.process_time())
            memory.append(resident())
    strategy = plan.strategy
    noise_alone = releases * BATCH / (plan.noise_stddevs().gradient_sum * strategy.column_norm)
    found = fftconvolve(noise_alone, np.asarray(strategy.strategy_coefs)[:, None], axes=0)[:steps]
    source = NormalSource.of_tensor(key.for_run(RUN), "weight", numel=WIDTH)
    z = np.stack([source.normals(step, dtype=torch.float64).numpy() for step in range(steps)])
    times = 1e3 * np.diff(ends) / (steps // PARTS)
    return {"error": float(np.abs(found - z).max()), "ms": times.tolist(), "mib": memory}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    record = {**setting("cpu", options.commit), "steps": options.steps, "noises": {}}
    for name, noise in NOISES.items():
        report(f"{name}: {options.steps:,} steps")
        record["noises"][name] = long_run(noise, options.steps)
    return record


def markdown(record: dict[str, Any]) -> str:
    rows = [
        [name, f"{found['error']:.1e}", *(f"{found['ms'][place]:.2f}" for place in (0, 1, -1)),
         *(f"{found['mib'][place]:.0f}" for place in (0, 1, -1))]
        for name, found in record["noises"].items()
    ]  # fmt: skip
    parts = ("1st tenth", "2nd", "last")
    titles = ["noise", "largest error of C·noise", *(f"CPU ms per step, {part}" for part in parts),
              *(f"MiB after the {part}" for part in parts)]  # fmt: skip
    about = f"{heading(record)}. By `python benchmarks/long_runs.py`; its docstring explains the columns."
    sizes = f"{record['steps']:,} steps of {BATCH} examples and {WIDTH} parameters."
    return page("Long runs", about, sizes, markdown_table(titles, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=at_least(100), default=100_000, metavar="N", help="(default: 100,000)")
    add_json(parser)
    add_write(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure_or_read(parser, options, lambda: measure(options), markdown, "steps", "noises")


if __name__ == "__main__":
    main()
