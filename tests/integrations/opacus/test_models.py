"""Layers are replaced as in Opacus, and a classifier's own loss is split while it trains privately."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

from dpoptim.integrations.opacus import (
    ModuleValidator,
    PrivacyEngine,
    PrivateTraining,
    make_private,
)
from tests.integrations.opacus.cases import EXPECTED_WARNINGS

pytestmark = EXPECTED_WARNINGS


def test_layers_are_replaced_as_in_opacus():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False)),
        nn.InstanceNorm2d(48, affine=True, track_running_stats=True),
    )  # fmt: skip
    assert [str(e).split("'")[1] for e in ModuleValidator.validate(model)] == ["1", "2.1", "3"]
    with pytest.raises(ValueError, match="layer '1' \\(BatchNorm2d\\) normalises over the batch"):
        ModuleValidator.validate(model, strict=True)
    fix: Any = ModuleValidator.fix
    fixed = fix(model)
    assert ModuleValidator.is_valid(fixed)
    assert not ModuleValidator.is_valid(model)  # fix returns a copy
    assert [type(part) for part in (fixed[1], fixed[2][1], fixed[3])] == [
        nn.GroupNorm, nn.GroupNorm, nn.InstanceNorm2d
    ]  # fmt: skip
    assert (fixed[1].num_groups, fix(model[:2], num_groups=4)[1].num_groups) == (16, 4)
    assert type(fix(model, replace_bn_with_in=True)[1]) is nn.InstanceNorm2d
    frozen = nn.Sequential(nn.BatchNorm2d(4)).eval().requires_grad_(False)
    assert ModuleValidator.is_valid(frozen)
    assert PrivacyEngine.get_compatible_module(nn.BatchNorm1d(6)).num_groups == 2
    theirs = pytest.importorskip("opacus.validators").ModuleValidator.fix(nn.Sequential(nn.BatchNorm2d(48)))
    assert str(theirs[0]) == str(fixed[1])


def tiny_bert(kind: Any = BertForSequenceClassification) -> Any:
    torch.manual_seed(0)
    return kind(
        BertConfig(
            vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=12, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            initializer_range=0.2,  # so that logits differ
        )
    )  # fmt: skip


def texts(labels: torch.Tensor | None = None) -> TensorDataset:
    ids = torch.randint(0, 30, (6, 7), generator=torch.Generator().manual_seed(1))
    return TensorDataset(ids, torch.tensor([0, 1, 2, 2, 1, 1]) if labels is None else labels)


def made_private(model: Any, *, labels: torch.Tensor | None = None, **arguments: Any) -> PrivateTraining:
    return make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=0.3,
        data_loader=DataLoader(texts(labels), batch_size=6), **{"noise_multiplier": 1.0, **arguments},
    )  # fmt: skip


def own_loss(model: Any) -> torch.Tensor:
    ids, labels = texts().tensors
    return model(ids, labels=labels).loss


def test_a_models_own_loss_is_clipped_per_example():
    """All parameters, embeddings included: more than Opacus can train here."""
    steps = []
    for own in (True, False):
        model = tiny_bert()
        before = [p.detach().clone() for p in model.parameters()]
        _, optimizer, loader = made_private(model, noise_multiplier=0.0)
        for batch, target in loader:
            loss = model(batch, labels=target).loss if own else F.cross_entropy(model(batch).logits, target)
            loss.backward()
            optimizer.step()
        steps.append([b - p for b, p in zip(before, model.parameters(), strict=True)])
    for of_own, plain in zip(*steps, strict=True):
        torch.testing.assert_close(of_own, plain)
    assert any(bool(step.abs().max() > 1e-3) for step in steps[0])


def test_a_models_own_loss_is_split_in_bfloat16():
    model = tiny_bert().to(torch.bfloat16)
    made_private(model)
    assert own_loss(model).shape == (1,)


class Smoothed(BertForSequenceClassification):
    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, labels=labels, **kwargs)
        output["loss"] = F.cross_entropy(output.logits, labels, label_smoothing=0.05)
        return output


class Regularised(BertForSequenceClassification):
    """Adds half a percent of the loss, by a term that mixes examples."""

    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, labels=labels, **kwargs)
        centre = output.logits.mean(0).square().sum()
        output["loss"] = output.loss + 0.005 * output.loss.detach() * centre / centre.detach()
        return output


@pytest.mark.parametrize(
    ("kind", "labels", "reduction"),
    [
        (BertForTokenClassification, torch.zeros(6, 7).long(), "mean"),
        (BertForSequenceClassification, torch.tensor([0, 1, 2, 0, -100, 1]), "mean"),
        (BertForSequenceClassification, torch.zeros(6).long(), "sum"),
        (Smoothed, None, "mean"),
        (Regularised, None, "mean"),
    ],
    ids=["over tokens", "over some examples", "a mean where a sum was announced", "smoothed labels", "regularised"],
)
def test_a_different_loss_is_refused(kind, labels, reduction):
    model = tiny_bert(kind)
    made_private(model, labels=labels, loss_reduction=reduction)
    ids, target = texts(labels).tensors
    with pytest.raises(ValueError, match="mixes examples"):
        model(ids, labels=target)


def test_detached_models_and_copies_return_their_own_loss():
    model = tiny_bert()
    private = made_private(model)
    assert own_loss(model).shape == (1,)
    assert own_loss(copy.deepcopy(model)).shape == ()
    private.optimizer.detach()
    assert own_loss(model).shape == ()
    assert not model._forward_hooks


def test_a_refused_make_private_leaves_the_module_unchanged():
    model = tiny_bert()
    refused: dict[str, Any] = {"variant_options": {"clipping_memory": -1}}  # by the optimizer, after the hook is added
    with pytest.raises(ValueError, match="Expected clipping_memory"):
        made_private(model, **refused)
    assert not model._forward_hooks
    assert own_loss(model).shape == ()
    made_private(model)
    with pytest.raises(ValueError, match="Expected clipping_memory"):
        made_private(model, **refused)
    assert own_loss(model).shape == (1,)  # the earlier run continues


def test_a_later_run_with_summed_losses_does_not_split_the_loss():
    model = tiny_bert()
    made_private(model)
    made_private(model, loss_reduction="sum")
    with pytest.raises(ValueError, match="mixes examples"):
        own_loss(model)
