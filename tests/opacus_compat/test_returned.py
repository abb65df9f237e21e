"""What make_private returns, and what it does about layers and losses."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

import dpoptim
from dpoptim.opacus_compat import (
    DPDataLoader,
    DPOptimizer,
    ModuleValidator,
    PrivacyEngine,
    Private,
    make_private,
)
from tests.opacus_compat.small import convolutions, images, of_linear, one_epoch

pytestmark = pytest.mark.filterwarnings(
    "ignore:Secure RNG turned off", "ignore:Using a non-full backward hook", "ignore:Full backward hook is firing",
    "ignore:Optimal order is the largest alpha", "ignore:poisson_sampling=False", "ignore:loss_reduction='sum'",
)  # fmt: skip


def test_one_return_type_and_no_wrapper():
    model = convolutions()
    keys = list(model.state_dict())
    for mode in ("hooks", "functorch", "ew"):
        private = make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(images(), batch_size=4), noise_multiplier=1.0, max_grad_norm=1.0,
            grad_sample_mode=mode, rand_on_empty=True,
        )  # fmt: skip
        assert type(private) is Private
        assert private._fields == ("module", "optimizer", "data_loader")
        assert private.module is model
        assert isinstance(private.optimizer, DPOptimizer)
        assert isinstance(private.data_loader, DPDataLoader)
    assert list(model.state_dict()) == keys
    assert (private.optimizer.noise_multiplier, private.optimizer.max_grad_norm) == (1.0, 1.0)
    assert len(cast(Sized, private.data_loader.dataset)) == 12


def test_groups_schedulers_and_state_are_those_of_an_optimizer():
    model = convolutions()
    groups: list[dict[str, Any]] = [
        {"params": model.conv.parameters(), "lr": 0.5, "weight_decay": 0.0},
        {"params": [*model.norm.parameters(), *model.out.parameters()]},
    ]
    given = torch.optim.AdamW(groups, lr=0.25, betas=(0.7, 0.8))
    _, optimizer, loader = make_private(
        module=model, optimizer=given, data_loader=DataLoader(images(), batch_size=4), noise_multiplier=1.0,
        max_grad_norm=1.0, epochs=2,
    )  # fmt: skip
    assert [(g["lr"], g["betas"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (0.5, (0.7, 0.8), 0.0), (0.25, (0.7, 0.8), 0.01),
    ]  # fmt: skip
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    one_epoch(model, optimizer, loader)
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.05, 0.025])
    assert [g["lr"] for g in given.param_groups] == [0.5, 0.25]
    assert not given.state


@pytest.mark.parametrize("variant", ["post_processing", "bias_correction", "scale_then_privatize"])
def test_another_variant_is_one_argument(variant):
    options = {"eps_scale": 0.5} if variant == "scale_then_privatize" else {}
    private = of_linear(variant=variant, variant_options=options, optimizer=torch.optim.Adam)
    kind = {"post_processing": "Flat", "bias_correction": "Flat", "scale_then_privatize": "InverseRoot"}
    assert type(private.optimizer.geometry).__name__ == kind[variant]
    one_epoch(*private)


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    data, key = images(), dpoptim.NoiseKey.generate()

    def begun(model: nn.Module) -> PrivacyEngine:
        engine = PrivacyEngine()
        engine.make_private(
            module=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01), max_grad_norm=1.0,
            data_loader=DataLoader(data, batch_size=4), noise_multiplier=1.0, key=key,
        )  # fmt: skip
        return engine

    whole = convolutions()
    engine = begun(whole)
    assert engine.private is not None
    one_epoch(*engine.private)
    engine.save_checkpoint(path=tmp_path / "last.pt", module=whole, checkpoint_dict={"epoch": 1})
    assert key.fingerprint() in str(torch.load(tmp_path / "last.pt"))  # and the key itself is not
    one_epoch(*engine.private)

    again = convolutions()
    engine = begun(again)
    assert engine.load_checkpoint(path=tmp_path / "last.pt", module=again)["epoch"] == 1
    assert engine.private is not None
    assert engine.private.steps_taken == 3
    one_epoch(*engine.private)
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_layers_are_mended_as_by_opacus():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False)),
        nn.InstanceNorm2d(48, affine=True, track_running_stats=True),
    )  # fmt: skip
    assert [str(e).split("'")[1] for e in ModuleValidator.validate(model)] == ["1", "2.1", "3"]
    with pytest.raises(ValueError, match="layer '1' \\(BatchNorm2d\\) normalises over the batch"):
        ModuleValidator.validate(model, strict=True)
    fix: Any = ModuleValidator.fix
    mended = fix(model)
    assert ModuleValidator.is_valid(mended)
    assert not ModuleValidator.is_valid(model)  # a copy was mended
    assert [type(part) for part in (mended[1], mended[2][1], mended[3])] == [
        nn.GroupNorm, nn.GroupNorm, nn.InstanceNorm2d
    ]  # fmt: skip
    assert (mended[1].num_groups, fix(model[:2], num_groups=4)[1].num_groups) == (16, 4)
    assert type(fix(model, replace_bn_with_in=True)[1]) is nn.InstanceNorm2d
    frozen = nn.Sequential(nn.BatchNorm2d(4)).eval().requires_grad_(False)
    assert ModuleValidator.is_valid(frozen)
    assert PrivacyEngine.get_compatible_module(nn.BatchNorm1d(6)).num_groups == 2
    theirs = pytest.importorskip("opacus.validators").ModuleValidator.fix(nn.Sequential(nn.BatchNorm2d(48)))
    assert str(theirs[0]) == str(mended[1])


def tiny_bert(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(
        BertConfig(
            vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=12, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            **options,
        )
    )  # fmt: skip


def test_a_classifiers_own_loss_is_clipped_example_by_example():
    """All parameters, embeddings included: more than Opacus can train here."""
    ids, labels = torch.randint(0, 30, (6, 7)), torch.randint(0, 3, (6,))
    steps = []
    for own in (True, False):
        model = tiny_bert(BertForSequenceClassification)
        before = [p.detach().clone() for p in model.parameters()]
        _, optimizer, loader = make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=0.0,
            max_grad_norm=0.3, data_loader=DataLoader(TensorDataset(ids, labels), batch_size=6),
        )  # fmt: skip
        for batch, target in loader:
            loss = model(batch, labels=target).loss if own else F.cross_entropy(model(batch).logits, target)
            loss.backward()
            optimizer.step()
        steps.append([b - p for b, p in zip(before, model.parameters(), strict=True)])
    for own_loss, plain in zip(*steps, strict=True):
        torch.testing.assert_close(own_loss, plain)
    assert any(bool(step.abs().max() > 1e-3) for step in steps[0])


@pytest.mark.parametrize(
    ("kind", "labels", "reduction"),
    [
        (BertForTokenClassification, torch.zeros(6, 7).long(), "mean"),
        (BertForSequenceClassification, torch.tensor([0, 1, 2, 0, -100, 1]), "mean"),
        (BertForSequenceClassification, torch.zeros(6).long(), "sum"),
    ],
    ids=["over tokens", "over some examples", "a mean where a sum was announced"],
)
def test_a_loss_that_mixes_examples_is_refused(kind, labels, reduction):
    model = tiny_bert(kind)
    _, _, loader = make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=1.0, max_grad_norm=0.3,
        data_loader=DataLoader(TensorDataset(torch.zeros(6, 7).long(), labels), batch_size=6), loss_reduction=reduction,
    )  # fmt: skip
    for batch, target in loader:
        with pytest.raises(ValueError, match="mixes examples"):
            model(batch, labels=target)
        break
