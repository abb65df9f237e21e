"""What the pictures show of a run: gradient norms, negative second moments, and how second moments are distributed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from dpoptim.clipping import Released
from dpoptim.optim import Adam, PrivateOptimizer

BINS = tuple(-22 + 0.25 * i for i in range(97))
"""Edges of the histogram of log10 ν̂."""
_HISTOGRAMS = ("noiseless", "non_private_adam")
_NEGATIVES = ("bias_correction", "independent_moments", "average_of_squares", "joint_moments")


class RunMetrics:
    """Observes every hundredth part of a final run; tuning runs are not observed.

    `gradient_norms` of the rows "noiseless" are ‖g_t‖ without noise, which those rows make public. They are NOT
    private. `negative_fractions` reads only released values.
    """

    def __init__(self, cell: Mapping[str, Any], optimizer: PrivateOptimizer) -> None:
        self._optimizer = optimizer
        final = cell["purpose"] == "final"
        self._every = max(cell["steps"] // 100, 1)
        self._norms: list[tuple[int, torch.Tensor]] = []
        self._fractions: list[tuple[int, float]] = []
        self._negatives = final and cell["row"] in _NEGATIVES
        self._histogram = final and cell["row"] in _HISTOGRAMS
        if final and cell["row"] == "noiseless":
            optimizer.observers.append(self._observe)

    def after(self, step: int) -> None:
        """Step number `step`, from 0, has ended."""
        if self._negatives and step % self._every == 0:
            self._fractions.append((step + 1, self._negative_fraction()))

    def seen(self) -> dict[str, Any]:
        """The metrics as plain values, at the end of the run."""
        found: dict[str, Any] = {}
        if self._norms:
            found["gradient_norms"] = [(step, float(norm)) for step, norm in self._norms]
        if self._fractions:
            found["negative_fractions"] = self._fractions
        if self._histogram:
            found["second_moments"] = self._distribution()
        return found

    def state_dict(self) -> dict[str, Any]:
        """The metrics so far."""
        return {"norms": [(step, float(norm)) for step, norm in self._norms], "fractions": list(self._fractions)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from there."""
        self._norms = [(step, torch.tensor(norm)) for step, norm in state["norms"]]
        self._fractions = list(state["fractions"])

    def _observe(self, released: Released) -> None:
        if released.step % self._every == 0 and released.square is not None:
            total = torch.stack([square.sum() for square in released.square.values()]).sum()
            self._norms.append((released.step + 1, total.sqrt()))

    def _negative_fraction(self) -> float:
        """The share of coordinates whose second moment, minus the noise's known part, is negative."""
        states = self._states()
        negative = sum(int((state["second_moment"] < state.get("noise_moment", 0.0)).sum()) for state in states)
        return negative / sum(state["second_moment"].numel() for state in states)

    def _distribution(self) -> dict[str, Any]:
        """Counts of log10 ν̂ between the edges of BINS; values of 0 or less count as below."""
        rule = self._optimizer.rule
        assert isinstance(rule, Adam)
        moments = torch.cat([state["second_moment"].reshape(-1) for state in self._states()]).double()
        moments = moments / (1 - rule.betas[1] ** self._optimizer.mechanism.step)
        logs = torch.where(moments > 0, moments.clamp(min=1e-300).log10(), -math.inf)
        edges = torch.tensor(BINS, dtype=torch.float64, device=logs.device)
        counts = torch.bincount(torch.bucketize(logs, edges), minlength=len(BINS) + 1).tolist()
        return {"first_edge": BINS[0], "bin": BINS[1] - BINS[0], "below": counts[0], "counts": counts[1:]}

    def _states(self) -> list[dict[str, Any]]:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        return [self._optimizer.state[parameter] for parameter in parameters]
