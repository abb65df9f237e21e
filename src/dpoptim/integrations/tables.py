"""Models and default settings for tables, shared by `dpoptim train` and the scikit-learn estimators.

benchmarks/tables.py measures the defaults. The clip norm matters most. If it is below most gradient norms, every row
pushes equally hard, however well it is predicted. Then probabilities become too extreme, and the loss rises again.
"""

from __future__ import annotations

import math

from torch import nn

WIDTH = 32
CLIP_NORMS = {"mlp": 3.0, "linear": 1.0}
MODELS = ("mlp", "linear")
EPOCHS = 20.0
SGD_LEARNING_RATE = 0.1  # of dp_sgd, whose steps are as long as the gradient
WARMUP = 0.05
MOST_BATCH = 2048  # larger batches have less noise per example, but a step costs more


def table_model(name: str, *, columns: int, outputs: int, width: int | None = None) -> nn.Module:
    """The built-in model "linear", or "mlp" with one hidden layer, with new weights; it takes [examples, columns]."""
    if name == "linear":
        return nn.Linear(columns, outputs)
    width = width or WIDTH
    return nn.Sequential(nn.Linear(columns, width), nn.ReLU(), nn.Linear(width, outputs))


def learning_rate_for(*, is_correlated: bool) -> float:
    """0.1 with strongly correlated noise, otherwise 0.03."""
    return 0.1 if is_correlated else 0.03


def batch_size_for(num_examples: int) -> int:
    """The power of two in (n/16, n/8], at most 2048: large batches reduce noise, but an epoch should have eight."""
    return min(MOST_BATCH, 2 ** int(math.log2(num_examples / 8)))


def schedule_factor(step: int, *, steps: int, warmup: float, schedule: str) -> float:
    """The learning rate of step `step` (from 0), relative to the largest, a pure function of the step.

    min(1, (step + 1)/warm) · decay,  x = (step − warm)/(steps − warm),
    decay = 1 (constant), 1 − x (linear), (1 + cos πx)/2 (cosine) or min(1, (steps − step)/(0.3·steps)) (wsd)
    """
    warm = int(warmup * steps)
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    decays = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": (1.0 + math.cos(math.pi * done)) / 2,
        "wsd": min(1.0, (steps - step) / (0.3 * steps)),
    }
    return decays[schedule]
