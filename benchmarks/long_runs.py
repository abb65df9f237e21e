"""Do 100,000 steps with correlated noise keep their memory, their speed and their noise?

    python benchmarks/long_runs.py
    python benchmarks/long_runs.py --steps 10000 --json FILE --write FILE
    python benchmarks/long_runs.py --from FILE --write FILE    # redo the table of earlier results

A linear layer trains with scale-then-privatize, the loader and the optimizer that train models. Its inputs are 0, so
that every release is noise alone. At the end the releases are multiplied by C and compared with the normals z that the
key determines: the largest difference over the whole run is shown. The last steps take turns with the first steps of a
second run, so that both are timed on the same machine; times are medians of the processor time of a step. Memory is
that of the whole process, before the second run.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
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
EXAMPLES, BATCH, WIDTH, PARTS, TURNS = 400, 4, 6, 10, 50


def resident() -> float:
    """Return the memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


class Run:
    """A run that continues step by step, and its releases."""

    def __init__(self, noise: Any, steps: int, name: str):
        self.plan = dpoptim.PrivacyPlan(
            num_examples=EXAMPLES, batch_size=BATCH, steps=steps, noise_multiplier=1.0, clip_norm=1.0, noise=noise
        )
        key, model = NoiseKey.from_bytes(bytes(range(32))), nn.Linear(WIDTH, 1, bias=False)
        optimizer = dpoptim.scale_then_privatize(model, self.plan, lr=1e-6, key=key, run_id=name)
        data = TensorDataset(torch.zeros(EXAMPLES, WIDTH))
        self.releases = np.zeros((steps, WIDTH))
        self._loader = iter(dpoptim.private_loader(data, self.plan, key=key, run_id=name))
        self._model, self._optimizer = model, optimizer
        self._source = NormalSource.of_tensor(key.for_run(name), "weight", numel=WIDTH)
        optimizer.observers.append(self._observe)

    def _observe(self, released: Released) -> None:
        scale = self._optimizer.mechanism.scale
        noisy = released.gradient["weight"].double() * (1.0 if scale is None else scale["weight"].double())
        self.releases[released.step] = noisy.view(-1).numpy()

    def advance(self, steps: int) -> float:
        """Take steps; return the milliseconds of processor time of one."""
        started = time.process_time()
        for (inputs,) in islice(self._loader, steps):
            self._model(inputs).sum(1).sum().backward()
            self._optimizer.step()
        return 1e3 * (time.process_time() - started) / steps

    def error(self) -> float:
        """The largest difference between C · noise and the key's normals."""
        strategy = self.plan.strategy
        noise_alone = self.releases * BATCH / (self.plan.noise_stddevs().gradient_sum * strategy.column_norm)
        found = fftconvolve(noise_alone, np.asarray(strategy.strategy_coefs)[:, None], axes=0)[: self.plan.steps]
        z = np.stack([self._source.normals(step, dtype=torch.float64).numpy() for step in range(self.plan.steps)])
        return float(np.abs(found - z).max())


def long_run(noise: Any, steps: int) -> dict[str, Any]:
    run, memory = Run(noise, steps, "long run"), []
    for _ in range(PARTS - 1):
        run.advance(steps // PARTS)
        memory.append(resident())
    rest = steps - (PARTS - 1) * (steps // PARTS)
    second, turn = Run(noise, steps, "second run"), max(1, rest // TURNS)
    times = []
    for place in range(0, rest, turn):
        size = min(turn, rest - place)
        times.append((second.advance(size), run.advance(size)))
    first, last = np.median(times, axis=0)
    return {"error": run.error(), "first_ms": float(first), "last_ms": float(last), "mib": memory}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    record = {**setting("cpu", options.commit), "steps": options.steps, "noises": {}}
    for name, noise in NOISES.items():
        report(f"{name}: {options.steps:,} steps")
        record["noises"][name] = long_run(noise, options.steps)
    return record


def markdown(record: dict[str, Any]) -> str:
    rows = [
        [name, f"{found['error']:.1e}", f"{found['first_ms']:.2f}", f"{found['last_ms']:.2f}",
         f"{found['last_ms'] / found['first_ms']:.2f}", *(f"{found['mib'][place]:.0f}" for place in (0, 1, -1))]
        for name, found in record["noises"].items()
    ]  # fmt: skip
    titles = ["noise", "largest error of C·noise", "ms of first steps", "of last steps", "ratio",
              *(f"MiB after the {part} tenth" for part in ("1st", "2nd", "9th"))]  # fmt: skip
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
