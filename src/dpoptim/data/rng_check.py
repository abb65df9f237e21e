"""Refusing random generators with a fixed seed.

Masks and dropout are drawn from torch, numpy and `random`, which are seeded from the secret key at every step. A
collator's own generator has a public seed: one more record would shift the draws of all others predictably.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

_GENERATORS = (np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random, torch.Generator)


def check_rng(**named: Any) -> None:
    """Refuse an object with its own seed or random generator among its attributes."""
    for name, value in named.items():
        seed = getattr(value, "seed", None)
        if isinstance(seed, int):
            raise ValueError(
                f"{name}.seed={seed} makes its draws public. Remove it: draws come from the run's secret key."
            )
        for attribute, part in getattr(value, "__dict__", {}).items():
            if isinstance(part, _GENERATORS) and part is not torch.default_generator:
                raise ValueError(
                    f"{name}.{attribute} is a random generator with a public seed. Draw from torch, numpy or random "
                    "instead, which are seeded from the run's secret key."
                )
