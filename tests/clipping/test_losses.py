"""The fused cross-entropy: the same losses and the same clipped sums as through stored logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpoptim
from dpoptim.clipping import clipped_sum, linear_cross_entropy
from tests.clipping.one_at_a_time import clipped_sum_one_at_a_time

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
VOCABULARY, WIDTH = 70, 12


class LanguageModel(nn.Module):
    """Token and position embeddings, a layer norm, and a projection that may be tied to the tokens."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(9, WIDTH)
        self.mix, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, VOCABULARY)
        if tied:
            self.project.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        return self.norm(self.mix(self.tokens(ids) + self.positions(places)).tanh())


def made(tied, device="cpu", dtype=torch.float64, examples=5):
    torch.manual_seed(0)
    model = LanguageModel(tied).to(device, dtype)
    ids = torch.randint(0, VOCABULARY, (examples, 9)).to(device)
    labels = torch.randint(0, VOCABULARY, (examples, 9)).to(device)
    labels[0, :4] = labels[2, :] = -100
    return model, (ids, labels)


def fused(model, batch):
    ids, labels = batch
    return linear_cross_entropy(model.project, model(ids), labels).sum(1)


def stored(model, batch):
    ids, labels = batch
    logits = model.project(model(ids))
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100).sum(1)


def scales(model, scaled):
    generator = torch.Generator().manual_seed(1)
    made = {name: torch.rand(p.shape, generator=generator).to(p) + 0.1 for name, p in model.named_parameters()}
    return made if scaled else None


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_clipped_sums_equal_one_example_at_a_time(tied, scaled):
    model, batch = made(tied)
    scale = scales(model, scaled)
    sums, norms = clipped_sum(model, fused, batch, clip_norm=0.7, scale=scale)
    expected, expected_norms = clipped_sum_one_at_a_time(model, stored, batch, 5, 0.7, scale)
    torch.testing.assert_close(norms, expected_norms, rtol=1e-9, atol=1e-12)
    for name, total in expected.items():
        torch.testing.assert_close(sums[name], total, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("tied", [False, True])
def test_ordinary_gradients_without_an_engine(tied):
    model, batch = made(tied)
    for reduction in (torch.sum, torch.mean):
        gradients = []
        for loss in (fused, stored):
            model.zero_grad()
            reduction(loss(model, batch)).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_kernels_agree_with_float64(tied, scaled, dtype, tolerance):
    """In bfloat16, forward and backward have 8 bits."""
    model, batch = made(tied, "cuda", dtype, examples=33)
    exact, _ = made(tied, "cuda", examples=33)
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    scale = scales(model, scaled)
    wide = None if scale is None else {name: value.double() for name, value in scale.items()}
    narrow = None if scale is None else {name: value.float() for name, value in scale.items()}
    sums, norms = clipped_sum(model, fused, batch, clip_norm=0.7, scale=narrow)
    expected, expected_norms = clipped_sum(exact, stored, batch, clip_norm=0.7, scale=wide)
    torch.testing.assert_close(norms.double(), expected_norms, rtol=tolerance, atol=tolerance)
    difference = torch.cat([(sums[name].double() - total).flatten() for name, total in expected.items()])
    size = torch.cat([total.flatten() for total in expected.values()])
    assert float(difference.norm() / size.norm()) < tolerance


@pytest.mark.parametrize(
    ("inputs", "labels", "words"),
    [((2, 3), (2, 3), "inputs must be"), ((2, 3, WIDTH), (2, 4), "labels")],
)
def test_bad_shapes_are_named(inputs, labels, words):
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(nn.Linear(WIDTH, 4), torch.zeros(inputs), torch.zeros(labels, dtype=torch.long))


def test_a_model_learns_with_the_fused_loss():
    model, (ids, labels) = made(tied=True, dtype=torch.float32, examples=8)
    plan = dpoptim.PrivacyPlan(num_examples=8, batch_size=8, steps=30, clip_norm=5.0, noise_multiplier=1e-3)
    optimizer = dpoptim.post_processing(model, plan, lr=3e-2, external_batches=True)
    losses = []
    for _ in range(30):
        loss = fused(model, (ids, labels)).sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
