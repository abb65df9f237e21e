"""The optimizer of a cell."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from dpoptim import optim
from dpoptim.noise import NoiseKey
from dpoptim.optim import Adam, PrivateOptimizer
from dpoptim.optim.variants import noise_level
from dpoptim.privacy import Gradient, PrivacyPlan
from experiments.tinybert.table_of_cells import EXPONENTS

PLAIN_ADAM = Adam()


def optimizer_of(
    cell: Mapping[str, Any], model: nn.Module, plan: PrivacyPlan, *, key: NoiseKey, run_id: str
) -> PrivateOptimizer:
    """As the cell's row says, with the cell's settings; β = (.9, .999) wherever there is Adam.

    Where un-noised squares are the second moment, it is next to 0 for tokens that hardly occur, and Adam's usual
    ε = 1e-8 would let their noise explode: so that row has an ε of its own, and with scaling that of the scale.
    """
    common: dict[str, Any] = {"key": key, "run_id": run_id}
    rate = cell["lr"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a row is not private is in its note
        match cell["row"]:
            case "non_private_sgd" | "dp_sgd":
                return optim.dp_sgd(model, plan, rate, momentum=cell["momentum"], **common)
            case "non_private_adam" | "post_processing":
                return optim.post_processing(model, plan, rate, rule=PLAIN_ADAM, **common)
            case "post_processing_eps":
                return optim.post_processing(model, plan, rate, rule=Adam(eps=cell["eps"]), **common)
            case "noiseless":
                return optim.noiseless_preconditioner(model, plan, rate, rule=Adam(eps=cell["eps"]), **common)
            case "noiseless_scaled":
                eps_scale = eps_scale_of(cell, plan)
                return optim.noiseless_preconditioner(
                    model, plan, rate, rule=Adam(eps=eps_scale), scaled=True, eps_scale=eps_scale, **common
                )
            case "independent_moments" | "average_of_squares":
                return optim.independent_moments(model, plan, rate, rule=Adam(eps=cell["eps"]), **common)
            case "bias_correction":
                return optim.bias_correction(model, plan, rate, rule=Adam(eps=cell["eps"]), **common)
            case "scale_then_privatize" | "exponent_quarter" | "exponent_third" as name:
                eps_scale = eps_scale_of(cell, plan) ** (2 * EXPONENTS[name])
                return optim.scale_then_privatize(
                    model, plan, rate, rule=PLAIN_ADAM, eps_scale=eps_scale, exponent=EXPONENTS[name], **common
                )
            case "delayed":
                return optim.delayed_preconditioner(
                    model, plan, rate, plain_steps=int(cell["period"]), eps=cell["eps"], **common
                )
            case other:
                raise ValueError(f"row={other!r} has no optimizer")


def eps_scale_of(cell: Mapping[str, Any], plan: PrivacyPlan) -> float:
    """ε of the scale ε/(√ν̂ + ε): so many times the noise's standard deviation."""
    return cell["eps_over_noise"] * noise_level(plan, Gradient())
