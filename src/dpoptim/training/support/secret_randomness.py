"""Random numbers of a model and its collator (dropout, masks), drawn anew at each step from the run's secret key.

They come from one stream for the whole batch, so that one record more, or a longer one, shifts those of the others.
With a public seed that would let one record change every gradient of the batch. Secret and fresh, what the others get
has the same law whatever the record is, and the guarantee of each fixed draw is the guarantee of all.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from dpoptim.optim import PrivateOptimizer


def seed_secretly(optimizer: PrivateOptimizer) -> None:
    """Seed torch, numpy and `random` for the optimizer's present step: a function of (key, run, step) alone."""
    release = optimizer.release
    secret = optimizer.key.for_run(release.run_id).subkey("randomness of the model", str(release.step))
    _seed(int.from_bytes(secret[:8], "little"))


def forget_seed(public: int) -> None:
    """Put a public seed in its place, so that nothing that saves the generators saves what the step drew from."""
    _seed(public)


def _seed(seed: int) -> None:
    torch.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)
