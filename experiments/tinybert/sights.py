"""What the figures show of a run: lengths of gradients, negative second moments, and how second moments are spread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from dpoptim.app.runs.metrics import Diagnostics
from dpoptim.clipping import Released
from dpoptim.optim import Adam, PrivateOptimizer

BINS = tuple(-22 + 0.25 * i for i in range(97))
"""Edges of the histogram of log10 ν̂."""
_HISTOGRAMS = ("noiseless", "non_private_adam")
_NEGATIVES = ("bias_correction", "independent_moments", "average_of_squares")


class RunMetrics:
    """Watches every hundredth part of a final run; a tuning run is not watched.

    `gradient_norms` of the rows "noiseless" are ‖g_t‖ without noise, which those rows make public; they are NOT
    private. `negative_fractions` reads released values alone.
    """

    def __init__(self, cell: Mapping[str, Any], optimizer: PrivateOptimizer) -> None:
        self._cell, self._optimizer = cell, optimizer
        final = cell["purpose"] == "final"
        self._every = max(cell["steps"] // 100, 1)
        self._norms: list[tuple[int, torch.Tensor]] = []
        self._fractions: list[tuple[int, float]] = []
        self._watch = Diagnostics(optimizer) if final and cell["row"] in _NEGATIVES else None
        self._histogram = final and cell["row"] in _HISTOGRAMS
        if final and cell["row"] == "noiseless":
            optimizer.observers.append(self._observe)

    def before(self, step: int) -> None:
        """Step number `step`, from 0, begins."""
        if self._watch is not None and step % self._every == 0:
            self._watch.before()

    def after(self, step: int) -> None:
        """It has ended."""
        if self._watch is not None and step % self._every == 0:
            fraction = self._watch.after()["negative_fraction"]
            self._fractions.append((step + 1, fraction))

    def seen(self) -> dict[str, Any]:
        """As plain values, at the end of the run."""
        found: dict[str, Any] = {}
        if self._norms:
            found["gradient_norms"] = [(step, float(norm)) for step, norm in self._norms]
        if self._fractions:
            found["negative_fractions"] = self._fractions
        if self._histogram:
            found["second_moments"] = self._spread()
        return found

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far."""
        return {"norms": [(step, float(norm)) for step, norm in self._norms], "fractions": list(self._fractions)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._norms = [(step, torch.tensor(norm)) for step, norm in state["norms"]]
        self._fractions = list(state["fractions"])

    def _observe(self, released: Released) -> None:
        if released.step % self._every == 0 and released.square is not None:
            total = torch.stack([square.sum() for square in released.square.values()]).sum()
            self._norms.append((released.step + 1, total.sqrt()))

    def _spread(self) -> dict[str, Any]:
        """Counts of log10 ν̂ between the edges of BINS; what is 0 or less counts as below."""
        rule = self._optimizer.rule
        assert isinstance(rule, Adam)
        parameters = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        states = [self._optimizer.state[parameter]["second_moment"] for parameter in parameters]
        moments = torch.cat([state.reshape(-1) for state in states]).double()
        moments = moments / (1 - rule.betas[1] ** self._optimizer.mechanism.step)
        logs = torch.where(moments > 0, moments.clamp(min=1e-300).log10(), -math.inf)
        edges = torch.tensor(BINS, dtype=torch.float64, device=logs.device)
        places = torch.bucketize(logs, edges)
        counts = torch.bincount(places, minlength=len(BINS) + 1).tolist()
        return {"first_edge": BINS[0], "bin": BINS[1] - BINS[0], "below": counts[0], "counts": counts[1:]}
