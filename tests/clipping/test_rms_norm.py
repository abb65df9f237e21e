"""RMS norms of transformers are recognized by what they compute, and their clipped sums are exact."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpoptim.clipping import clipped_sum
from dpoptim.clipping.layers import choose_rules
from dpoptim.clipping.layers.generic import generic
from dpoptim.clipping.layers.norm_layers import rms_norm, rms_norm_kind
from tests.clipping.one_at_a_time import clipped_sum_one_at_a_time

NORMS = {
    "llama": ("LlamaRMSNorm", 0.0, True),
    "qwen3": ("Qwen3RMSNorm", 0.0, True),
    "gemma": ("GemmaRMSNorm", 1.0, False),
    "olmo2": ("Olmo2RMSNorm", 0.0, False),
    "t5": ("T5LayerNorm", 0.0, True),
}


def norm_of(model: str, width: int = 6) -> Any:
    kind = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), NORMS[model][0])
    norm = kind(width)
    nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("model", NORMS)
def test_clipped_sums_and_outputs_are_those_of_the_module(model):
    torch.manual_seed(0)
    norm, x = norm_of(model), torch.randn(5, 3, 2, 6)
    kind = rms_norm_kind(norm)
    assert kind is not None
    assert kind[:2] == NORMS[model][1:]
    network = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 2))
    assert choose_rules(network)[norm].rule is rms_norm

    def losses(network: nn.Module, x: Tensor) -> Tensor:
        return network(x).square().sum((1, 2, 3))

    expected, norms = clipped_sum_one_at_a_time(network, losses, x, 5, 1.0, None)
    found, own = clipped_sum(network, losses, x, clip_norm=1.0)
    torch.testing.assert_close(own, norms, rtol=1e-5, atol=1e-6)
    for name, total in expected.items():
        torch.testing.assert_close(found[name], total, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", NORMS)
def test_the_output_has_the_dtype_of_the_module(model):
    norm, x = norm_of(model), torch.randn(3, 4, 6)
    for weight, inputs in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)):
        norm.to(weight)
        given, found = x.to(inputs), list[Tensor]()
        with torch.no_grad():
            expected = norm(given)

        def losses(network: nn.Module, x: Tensor, found: list[Tensor] = found) -> Tensor:
            found.append(network(x))
            return found[-1].float().sum((1, 2))

        clipped_sum(nn.Sequential(norm), losses, given)
        assert found[-1].dtype == expected.dtype
        torch.testing.assert_close(found[-1], expected, rtol=2e-2, atol=2e-2)


def test_each_module_is_recognized_by_itself():
    class AnyRMSNorm(nn.Module):
        def __init__(self, offset: float, is_biased: bool = False) -> None:
            super().__init__()
            self.weight, self.eps, self.offset = nn.Parameter(torch.randn(6)), 1e-6, offset
            self.bias = nn.Parameter(torch.randn(6)) if is_biased else None

        def forward(self, x: Tensor) -> Tensor:
            y = (self.weight + self.offset) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
            return y if self.bias is None else y + self.bias

    torch.manual_seed(0)
    kinds = [rms_norm_kind(AnyRMSNorm(0.0)), rms_norm_kind(AnyRMSNorm(1.0)), rms_norm_kind(AnyRMSNorm(0.0, True))]
    assert [None if kind is None else kind.offset for kind in kinds] == [0.0, 1.0, None]


def test_something_else_with_that_name_gets_the_generic_rule():
    class SquaredRMSNorm(nn.Module):
        """The same while its weight is 1."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(6)), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return self.weight.square() * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    network = nn.Sequential(SquaredRMSNorm())
    assert rms_norm_kind(network[0]) is None
    assert choose_rules(network)[network[0]].rule is generic
