"""A strategy as plain values for a checkpoint, so that a run goes on with the very C that it began with.

The search for a C may end in other last bits on another machine; noise must not change in the middle of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from dpoptim.noise.strategies.base import Strategy


def strategy_state(strategy: Strategy) -> dict[str, Any]:
    """What the strategy is made of, as numbers and float64 tensors.

    >>> from dpoptim.noise import ToeplitzStrategy
    >>> strategy_state(ToeplitzStrategy(steps=3, strategy_coefs=(1.0, 0.5)))
    {'kind': 'ToeplitzStrategy', 'steps': 3, 'strategy_coefs': tensor([1.0000, 0.5000], dtype=torch.float64)}
    """
    state: dict[str, Any] = {"kind": type(strategy).__name__}
    for part in fields(strategy):  # type: ignore[arg-type]
        if part.init:
            value = getattr(strategy, part.name)
            state[part.name] = value if isinstance(value, int) else torch.tensor(value, dtype=torch.float64)
    return state


def saved_strategy(state: Mapping[str, Any], *, like: Strategy) -> Strategy:
    """The strategy of a state, which must be `like` up to rounding.

    >>> from dpoptim.noise import ToeplitzStrategy
    >>> strategy = ToeplitzStrategy(steps=3, strategy_coefs=(1.0, 0.5))
    >>> saved_strategy(strategy_state(strategy), like=strategy) == strategy
    True
    """
    expected = strategy_state(like)
    same = state.keys() == expected.keys() and all(
        _close(state[name], value) if isinstance(value, torch.Tensor) else state[name] == value
        for name, value in expected.items()
    )
    if not same:
        raise ValueError(
            f"the state's strategy ({state.get('kind')}) is not the plan's ({type(like).__name__}) up to rounding: it "
            "was optimized otherwise; continue the run with the version that began it"
        )
    values = {name: value for name, value in state.items() if name != "kind"}
    return type(like)(**{name: v.cpu().numpy() if isinstance(v, torch.Tensor) else v for name, v in values.items()})


def _close(saved: torch.Tensor, now: torch.Tensor) -> bool:
    return saved.shape == now.shape and bool(torch.allclose(saved.cpu(), now, rtol=1e-3, atol=1e-5))
