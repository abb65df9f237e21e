"""What make_private returns, and what it does about layers and losses."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import dpoptim
from dpoptim.integrations.opacus import (
    DPDataLoader,
    DPOptimizer,
    ModuleValidator,
    PrivacyEngine,
    PrivateTraining,
    make_private,
)
from tests.integrations.opacus.small import convolutions, images, of_linear, one_epoch

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
        assert type(private) is PrivateTraining
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
