"""BERT with its masked-token head, which is applied to the masked places only; its losses, and its optimizers."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpoptim import optim
from dpoptim.clipping import linear_cross_entropy
from dpoptim.noise import NoiseKey
from dpoptim.optim import Adam, PrivateOptimizer
from dpoptim.optim.variants import noise_level
from dpoptim.privacy import Gradient, PrivacyPlan
from experiments.tinybert.candidates import rows_scaled
from experiments.tinybert.data import Part, Texts, make_part
from experiments.tinybert.grid import EXPONENTS


class MaskedLM(nn.Module):
    """One loss per example: the mean over its masked tokens."""

    def __init__(self, bert: Any) -> None:
        super().__init__()
        self.bert = bert

    def token_losses(self, part: Part) -> Tensor:
        """The loss at every masked place, [examples, places]; 0 where an example has fewer."""
        head = self.bert.cls.predictions
        hidden = self.bert.bert(part.ids, attention_mask=part.attends).last_hidden_state
        chosen = hidden.gather(1, part.places[..., None].expand(-1, -1, hidden.shape[-1]))
        return linear_cross_entropy(head.decoder, head.transform(chosen), part.labels)

    def forward(self, part: Part) -> Tensor:
        return self.token_losses(part).sum(1) / part.masked.clamp(min=1)


def load(model: str | Path, *, dtype: torch.dtype = torch.float32) -> MaskedLM:
    """Load a model from a folder or by name, without dropout, so that losses have no other noise."""
    from transformers import BertForMaskedLM

    bert = BertForMaskedLM.from_pretrained(
        model, dtype=dtype, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return MaskedLM(bert)


def synthetic(*, vocabulary: int, seed: int = 0) -> MaskedLM:
    """A very small BERT with random weights, for tests."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=vocabulary, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MaskedLM(BertForMaskedLM(config))


def fingerprint(model: nn.Module) -> str:
    """Twelve hexadecimal digits of the weights' digest, which identify the model of a line of results."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


_TOGETHER = 256


@torch.no_grad()
def mean_losses(
    model: MaskedLM,
    texts: Texts,
    *,
    examples: int | None = None,
    longest: int = 512,
    bucket: int = 64,
) -> dict[str, float]:
    """{"tokens": mean over masked tokens, "examples": mean of the examples' means}, for the first `examples`.

    The same texts are always masked in the same way.
    """
    device = texts.tokens.device
    generator = torch.Generator(device).manual_seed(0)
    count = min(len(texts), examples or len(texts))
    order = np.argsort(texts.lengths[:count], kind="stable")
    total, mean, masked = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(3))
    vocabulary = model.bert.config.vocab_size
    model.eval()
    for first in range(0, count, _TOGETHER):
        indices, width, most, _ = texts.part(order[first : first + _TOGETHER], bucket=bucket, longest=longest)
        part = make_part(texts, indices, width, most, vocabulary, generator)
        losses = model.token_losses(part).double().sum(1)
        total, masked = total + losses.sum(), masked + part.masked.sum()
        mean = mean + (losses / part.masked.clamp(min=1)).sum()
    model.train()
    return {"tokens": float(total / masked), "examples": float(mean / count)}


PLAIN_ADAM = Adam()


def optimizer_of(
    cell: Mapping[str, Any], model: nn.Module, plan: PrivacyPlan, *, key: NoiseKey, run_id: str
) -> PrivateOptimizer:
    """The optimizer of the cell's row, with the cell's settings; β = (.9, .999) for Adam.

    A second moment without noise is nearly 0 for rare tokens, and Adam's usual ε = 1e-8 would let their noise explode.
    So that row has its own ε, or with scaling that of the scale.
    """
    common: dict[str, Any] = {"key": key, "run_id": run_id}
    rate = cell["lr"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a row that is not private has a note
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
            case "joint_moments":
                return optim.joint_moments(model, plan, rate, rule=Adam(eps=cell["eps"]), **common)
            case "bias_correction":
                return optim.bias_correction(model, plan, rate, rule=Adam(eps=cell["eps"]), **common)
            case "scale_then_privatize" | "exponent_quarter" | "exponent_third" as name:
                eps_scale = eps_scale_of(cell, plan) ** (2 * EXPONENTS[name])
                return optim.scale_then_privatize(
                    model, plan, rate, rule=PLAIN_ADAM, eps_scale=eps_scale, exponent=EXPONENTS[name], **common
                )
            case "rows_scaled" | "filtered_rows_scaled" as name:
                filtered = name == "filtered_rows_scaled"
                return rows_scaled(model, plan, rate, eps_scale=eps_scale_of(cell, plan), filtered=filtered, **common)
            case "delayed":
                return optim.delayed_preconditioner(
                    model, plan, rate, plain_steps=int(cell["period"]), eps=cell["eps"], **common
                )
            case other:
                raise ValueError(f"row={other!r} has no optimizer")


def eps_scale_of(cell: Mapping[str, Any], plan: PrivacyPlan) -> float:
    """ε of the scale ε/(√ν̂ + ε), from its multiple of the noise's standard deviation."""
    return cell["eps_over_noise"] * noise_level(plan, Gradient())
