"""A private optimizer is a `torch.optim.Optimizer`: schedulers, groups, checkpoints, Accelerate."""

from __future__ import annotations

import copy
import io
import itertools
import json
import math
from typing import Any, cast

import pytest
import torch
from torch import nn

import dpoptim
from tests.optim.table import LR, RULES, VARIANTS, task

KEY = dpoptim.NoiseKey.from_bytes(bytes(range(32)))
RUN: Any = {"key": KEY, "run_id": "the run", "external_batches": True}


def plan(**changes) -> dpoptim.PrivacyPlan:
    settings = dict(num_examples=40, batch_size=4, steps=30, clip_norm=0.9, noise_multiplier=0.7)
    return dpoptim.PrivacyPlan(**{**settings, **changes})


def advance(made, optimizer, steps: range) -> None:
    for t in steps:
        made.losses(made.model, made.batches[t]).sum().backward()
        optimizer.step()


ROWS = [*zip(VARIANTS, itertools.cycle(RULES), strict=False), *(("scale_then_privatize", rule) for rule in RULES)]


@pytest.mark.parametrize(("variant", "rule"), ROWS)
def test_state_dict_resumes_bit_for_bit(variant, rule):
    the_plan = plan(noise=dpoptim.BandedToeplitz(bands=4), steps=20)
    unbroken = task(the_plan, torch.float32)
    optimizer = VARIANTS[variant].make(unbroken.model, the_plan, RULES[rule][0], unbroken, **RUN)
    advance(unbroken, optimizer, range(12))
    file = io.BytesIO()
    torch.save({"model": unbroken.model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    advance(unbroken, optimizer, range(12, 20))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = task(the_plan, torch.float32)
    resumed.model.load_state_dict(saved["model"])
    again = VARIANTS[variant].make(resumed.model, the_plan, RULES[rule][0], resumed, **RUN)
    again.load_state_dict(saved["optimizer"])
    advance(resumed, again, range(12, 20))
    assert torch.equal(resumed.theta(), unbroken.theta())


DECAYED = dpoptim.DecayedSums(beta=0.9)
NOISES = [
    dpoptim.Independent(),
    dpoptim.SquareRoot(),
    dpoptim.Dense(),
    dpoptim.BandedToeplitz(bands=4),
    dpoptim.BandedToeplitz(bands=4, workload=dpoptim.PrefixSums(momentum=0.9)),
    dpoptim.Banded(bands=4),
    dpoptim.BufferedToeplitz(buffers=2),
    dpoptim.BandedInverse(bands=4),
]
MEMORIES = [dpoptim.NoiseMemory(), dpoptim.NoiseMemory(bits=16), dpoptim.NoiseMemory(bits=16, on_host=True)]


@pytest.mark.parametrize(("noise", "memory"), list(zip(NOISES, itertools.cycle(MEMORIES), strict=False)), ids=repr)
def test_every_mechanism_resumes_bit_for_bit(noise, memory):
    the_plan = plan(noise=noise, steps=20)
    assert dpoptim.PrivacyPlan.from_dict(json.loads(json.dumps(the_plan.to_dict()))) == the_plan
    unbroken, resumed = task(the_plan, torch.float32), task(the_plan, torch.float32)
    run = {**RUN, "noise_memory": memory}
    optimizer = dpoptim.bias_correction(unbroken.model, the_plan, LR, **run)
    advance(unbroken, optimizer, range(9))
    resumed.model.load_state_dict(unbroken.model.state_dict())
    again = dpoptim.bias_correction(resumed.model, the_plan, LR, **run)
    again.load_state_dict(optimizer.state_dict())
    advance(unbroken, optimizer, range(9, 20))
    advance(resumed, again, range(9, 20))
    assert torch.equal(resumed.theta(), unbroken.theta())
    parameters = sum(p.numel() for p in unbroken.model.parameters())
    assert optimizer.mechanism.noise_memory_bytes == the_plan.strategy.memory_bytes(parameters, memory=memory)


def test_two_strategies_resume_bit_for_bit():
    noise = dpoptim.BandedToeplitz(bands=4)
    moments = dpoptim.IndependentMoments(square_noise=dpoptim.BufferedToeplitz(buffers=1, workload=DECAYED))
    the_plan = plan(noise=noise, steps=20, release=moments)
    unbroken, resumed = task(the_plan, torch.float32), task(the_plan, torch.float32)
    optimizer = dpoptim.independent_moments(unbroken.model, the_plan, LR, **RUN)
    advance(unbroken, optimizer, range(9))
    resumed.model.load_state_dict(unbroken.model.state_dict())
    again = dpoptim.independent_moments(resumed.model, the_plan, LR, **RUN)
    again.load_state_dict(optimizer.state_dict())
    advance(unbroken, optimizer, range(9, 20))
    advance(resumed, again, range(9, 20))
    assert torch.equal(resumed.theta(), unbroken.theta())


class TestStrategyInTheCheckpoint:
    def state(self, noise=NOISES[3], **run):
        made = task(plan(noise=noise), torch.float64)
        optimizer = dpoptim.dp_sgd(made.model, plan(noise=noise), LR, **RUN, **run)
        advance(made, optimizer, range(3))
        return copy.deepcopy(optimizer.state_dict())

    def resumed(self, state, noise=NOISES[3], **run):
        made = task(plan(noise=noise), torch.float64)
        optimizer = dpoptim.dp_sgd(made.model, plan(noise=noise), LR, **RUN, **run)
        optimizer.load_state_dict(state)
        return optimizer

    def test_is_used_after_resuming(self):
        """The last bits of an optimized C may differ between machines; a run keeps the one it started with."""
        state = self.state()
        coefs = state["privacy"]["strategies"]["gradient"]["strategy_coefs"]
        coefs[2] *= 1 - 1e-7
        ours = self.resumed(self.state()).mechanism.privatize().gradient["0.bias"]
        theirs = self.resumed(state).mechanism.privatize().gradient["0.bias"]
        assert 0 < float((ours - theirs).abs().max()) < 1e-5
        assert self.resumed(state).state_dict()["privacy"]["strategies"]["gradient"]["strategy_coefs"].equal(coefs)

    @pytest.mark.parametrize("factor", [0.9, 1.1, float("nan")])
    def test_must_match_the_plan_up_to_rounding(self, factor):
        state = self.state()
        state["privacy"]["strategies"]["gradient"]["strategy_coefs"][1] *= factor
        with pytest.raises(ValueError, match="differs from the plan's"):
            self.resumed(state)

    def test_must_not_be_more_sensitive_than_planned(self):
        overlapping = dpoptim.BufferedToeplitz(buffers=1)
        state = self.state(overlapping)
        state["privacy"]["strategies"]["gradient"]["weights"] *= 1 + 1e-4
        with pytest.raises(ValueError, match="a larger sensitivity than the plan accounts for"):
            self.resumed(state, overlapping)

    def test_bits_cannot_change(self):
        with pytest.raises(ValueError, match="bits=16, but the run started with bits=32"):
            self.resumed(self.state(), noise_memory=dpoptim.NoiseMemory(bits=16))

    def test_a_different_mechanism_is_a_different_plan(self):
        with pytest.raises(ValueError, match="different privacy plan"):
            self.resumed(self.state(), dpoptim.Banded(bands=4))


class TestStateDict:
    def test_holds_no_secret(self):
        made = task(plan(), torch.float32)
        optimizer = dpoptim.scale_then_privatize(made.model, plan(), LR, **RUN)
        advance(made, optimizer, range(3))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        assert bytes(range(32)) not in file.getvalue()
        assert KEY.subkey("run", "the run") not in file.getvalue()

    def test_a_sweep_with_one_key_never_repeats_noise(self):
        """Every optimizer starts its own run; only a restored one repeats the old noise."""
        made = task(plan(), torch.float64)
        starts = []
        for _ in range(2):
            optimizer = dpoptim.dp_sgd(made.model, plan(), 0.0, key=KEY)
            starts.append(optimizer.mechanism.privatize().gradient["0.weight"])
        assert float((starts[0] - starts[1]).abs().min()) > 0
        again = dpoptim.dp_sgd(made.model, plan(), 0.0, key=KEY)
        again.load_state_dict({**optimizer.state_dict(), "privacy": {**optimizer.state_dict()["privacy"], "step": 0}})
        assert torch.equal(again.mechanism.privatize().gradient["0.weight"], starts[1])

    def test_refuses_an_earlier_state(self):
        made = task(plan(), torch.float64)
        optimizer = dpoptim.post_processing(made.model, plan(), LR, **RUN)
        early = optimizer.state_dict()
        advance(made, optimizer, range(2))
        with pytest.raises(ValueError, match="is before step 2"):
            optimizer.load_state_dict(early)

    def test_loading_drops_accumulated_gradients(self):
        """A gradient clipped at one scale and noised at another would exceed its bound."""
        made = task(plan(), torch.float64)
        optimizer = dpoptim.scale_then_privatize(made.model, plan(), LR, **RUN)
        made.losses(made.model, made.batches[0]).sum().backward()
        optimizer.load_state_dict(optimizer.state_dict())
        noise = optimizer.mechanism.privatize().gradient["0.bias"]
        fresh = dpoptim.scale_then_privatize(task(plan(), torch.float64).model, plan(), LR, **RUN)
        assert torch.equal(noise, fresh.mechanism.privatize().gradient["0.bias"])

    def test_refuses_a_different_key_plan_or_optimizer(self):
        made = task(plan(), torch.float32)
        state = dpoptim.post_processing(made.model, plan(), LR, **RUN).state_dict()
        with pytest.raises(ValueError, match="different noise key"):
            dpoptim.post_processing(made.model, plan(), LR).load_state_dict(state)
        with pytest.raises(ValueError, match=r"different privacy plan: steps was \d+, not \d+\. Create"):
            dpoptim.post_processing(made.model, plan(steps=31), LR, **RUN).load_state_dict(state)
        with pytest.raises(ValueError, match="state_dict belongs to Adam with Flat with OfNoisyGradient"):
            dpoptim.scale_then_privatize(made.model, plan(), LR, key=KEY).load_state_dict(state)
        ordinary = torch.optim.Adam(made.model.parameters()).state_dict()
        with pytest.raises(ValueError, match="no 'privacy' entry"):
            dpoptim.post_processing(made.model, plan(), LR, **RUN).load_state_dict(ordinary)

    def test_the_state_of_bf16_parameters_keeps_its_precision(self):
        made = task(plan(), torch.bfloat16)
        optimizer = dpoptim.scale_then_privatize(made.model, plan(), LR, **RUN)
        advance(made, optimizer, range(3))
        again = dpoptim.scale_then_privatize(made.model, plan(), LR, **RUN)
        again.load_state_dict(optimizer.state_dict())
        for ours, theirs in zip(again.state.values(), optimizer.state.values(), strict=True):
            for name, value in theirs.items():
                expected = torch.int16 if name == "rounding" else torch.float32
                assert ours[name].dtype == value.dtype == expected
                assert torch.equal(ours[name], value)


class TestGroups:
    def groups(self, model: nn.Sequential):
        return [
            {"params": model[0].parameters(), "lr": 0.5},
            {"params": model[2].parameters(), "weight_decay": 0.3},
        ]

    def test_a_group_has_its_own_lr_and_decay(self):
        made = task(plan(), torch.float64)
        optimizer = dpoptim.post_processing(
            made.model, plan(), LR, rule=dpoptim.AdamW(), param_groups=self.groups(made.model), **RUN
        )
        assert [g["lr"] for g in optimizer.param_groups] == [0.5, LR]
        reference = task(plan(), torch.float64)
        plain = dpoptim.post_processing(reference.model, plan(), LR, rule=dpoptim.AdamW(), **RUN)
        start = reference.theta()
        advance(made, optimizer, range(1))
        advance(reference, plain, range(1))
        first = sum(p.numel() for p in made.model[0].parameters())
        decayed = start * (1 - LR * 0.01)
        step = reference.theta() - decayed
        expected_first = start[:first] * (1 - 0.5 * 0.01) + step[:first] * (0.5 / LR)
        expected_second = start[first:] * (1 - LR * 0.3) + step[first:]
        torch.testing.assert_close(made.theta(), torch.cat([expected_first, expected_second]))

    def test_a_frozen_group_does_not_move(self):
        made = task(plan(), torch.float64)
        made.model[0].requires_grad_(False)
        before = [p.detach().clone() for p in made.model[0].parameters()]
        groups = [{"params": made.model[0].parameters()}, {"params": made.model[2].parameters()}]
        optimizer = dpoptim.scale_then_privatize(made.model, plan(), LR, param_groups=groups)
        advance(made, optimizer, range(3))
        for p, old in zip(made.model[0].parameters(), before, strict=True):
            assert torch.equal(p, old)

    def test_missing_and_unknown_parameters_are_refused(self):
        made = task(plan(), torch.float64)
        with pytest.raises(ValueError, match=r"param_groups lacks the trainable parameter '2.weight'"):
            dpoptim.post_processing(made.model, plan(), LR, param_groups=[{"params": made.model[0].parameters()}])
        with pytest.raises(ValueError, match="not the model's"):
            dpoptim.post_processing(made.model, plan(), LR, param_groups=[{"params": [nn.Parameter(torch.ones(2))]}])

    def test_groups_cannot_be_added_later(self):
        made = task(plan(), torch.float64)
        optimizer = dpoptim.post_processing(made.model, plan(), LR)
        with pytest.raises(ValueError, match="param_group cannot be added"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


class TestSchedulers:
    def test_cosine(self):
        made = task(plan(), torch.float64)
        optimizer = dpoptim.dp_sgd(made.model, plan(), 1.0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        for t in range(10):
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * (1 + math.cos(math.pi * t / 10)))
            advance(made, optimizer, range(t, t + 1))
            scheduler.step()

    def test_one_cycle_changes_the_betas_too(self):
        made = task(plan(), torch.float64)
        optimizer = dpoptim.scale_then_privatize(made.model, plan(), LR)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12)
        betas = set()
        for t in range(10):
            betas.add(optimizer.param_groups[0]["betas"][0])
            advance(made, optimizer, range(t, t + 1))
            scheduler.step()
        assert len(betas) > 5
        assert made.theta().isfinite().all()


def test_gradients_are_never_left_on_parameters():
    made = task(plan(), torch.float64)
    optimizer = dpoptim.scale_then_privatize(made.model, plan(), LR)
    made.losses(made.model, made.batches[0]).sum().backward()
    assert all(p.grad is None for p in made.model.parameters())
    optimizer.step()
    assert all(p.grad is None for p in made.model.parameters())


def test_zero_grad_of_a_stock_loop_is_harmless():
    paths = []
    for stock in (False, True):
        made = task(plan(), torch.float64)
        optimizer = dpoptim.post_processing(made.model, plan(), LR, **RUN)
        for t in range(5):
            if stock:
                optimizer.zero_grad()
            advance(made, optimizer, range(t, t + 1))
        paths.append(made.theta())
    assert torch.equal(*paths)


def test_closure():
    made = task(plan(), torch.float64)
    optimizer = dpoptim.post_processing(made.model, plan(), LR, **RUN)

    def closure():
        loss = made.losses(made.model, made.batches[0]).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    reference = task(plan(), torch.float64)
    other = dpoptim.post_processing(reference.model, plan(), LR, **RUN)
    advance(reference, other, range(1))
    assert float(loss.detach()) > 0
    assert torch.equal(made.theta(), reference.theta())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: dpoptim.post_processing(m, plan(), -1.0), "lr=-1.0"),
        (lambda m: dpoptim.post_processing(m, plan(), cast(Any, "0.1")), "lr='0.1' must be a number"),
        (lambda m: dpoptim.post_processing(m.parameters(), plan()), r"not model.parameters\(\)"),
        (
            lambda m: dpoptim.scale_then_privatize(cast(Any, plan()), cast(Any, m)),
            "plan must be a PrivacyPlan",
        ),
        (lambda m: dpoptim.post_processing(m, plan(), rule=cast(Any, dpoptim.Adam)), "must be an instance"),
        (lambda m: dpoptim.post_processing(m, plan(), rule=cast(Any, "adam")), "must be an instance"),
        (lambda m: dpoptim.post_processing(m, plan(), key=cast(Any, "secret")), "key must be a NoiseKey"),
        (lambda m: dpoptim.bias_correction(m, plan(), rule=dpoptim.SGD()), "dp_sgd"),
        (lambda m: dpoptim.post_processing(m, plan(), rule=dpoptim.SGD()), "dp_sgd"),
        (lambda m: dpoptim.post_processing(m, plan(), loss_reduction=cast(Any, "none")), "loss_reduction='none'"),
        (lambda m: dpoptim.bias_correction(m, plan(), rule=dpoptim.Adam(eps=0.0)), "eps=0.0"),
        (lambda m: dpoptim.scale_then_privatize(m, plan(), eps_scale=0.0), "eps_scale > 0"),
        (lambda m: dpoptim.scale_then_privatize(m, plan(), exponent=-1.0), "exponent >= 0"),
        (lambda m: dpoptim.scale_then_privatize(m, plan(), start=-1.0), "start >= 0"),
        (lambda m: dpoptim.delayed_preconditioner(m, plan(), LR, plain_steps=0), "plain_steps to be"),
        (
            lambda m: dpoptim.delayed_preconditioner(m, plan(), LR, plain_steps=1, scaled_clip_norm=0.0),
            "scaled_clip_norm",
        ),
        (lambda m: dpoptim.adadps(m, plan(), LR, public_gradients=dict, renew_every=0), "renew_every to be"),
        (lambda m: dpoptim.noiseless_preconditioner(m, plan()), "NoiselessSquare"),
        (lambda m: dpoptim.post_processing(m, plan(noise_multiplier=None)), "calibrate"),
        (
            lambda m: dpoptim.post_processing(m, plan(), rule=dpoptim.Adam(betas=(0.9, 1.0))),
            r"betas\[1\] >= 0",
        ),
    ],
)
def test_bad_arguments_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make(nn.Linear(3, 2))


def test_the_non_private_baseline_is_labelled():
    quiet = plan().with_release(dpoptim.NoiselessSquare())
    with pytest.warns(UserWarning, match="NOT PRIVATE"):
        optimizer = dpoptim.noiseless_preconditioner(nn.Linear(3, 2), quiet)
    assert "NOT PRIVATE" in quiet.statement(delta=1e-6).splitlines()[0]
    assert "NOT PRIVATE" in optimizer.plan.statement(delta=1e-6)
    assert optimizer.plan.epsilon(delta=1e-6) == math.inf


def test_accelerate():
    from accelerate import Accelerator

    made = task(plan(), torch.float32)
    reference = task(plan(), torch.float32)
    accelerator = Accelerator(cpu=True)
    optimizer = dpoptim.scale_then_privatize(made.model, plan(), LR, **RUN)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, scheduler = accelerator.prepare(made.model, optimizer, scheduler)
    other = dpoptim.scale_then_privatize(reference.model, plan(), LR, **RUN)
    other_scheduler = torch.optim.lr_scheduler.LinearLR(other)
    for t in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(made.losses(model, made.batches[t]).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        advance(reference, other, range(t, t + 1))
        other_scheduler.step()
    assert torch.equal(made.theta(), reference.theta())


PUBLIC_VARIANTS = {
    "side_information": lambda model, gradients: dpoptim.side_information(
        model, plan(), LR, public_gradients=gradients, **RUN
    ),
    "adadps": lambda model, gradients: dpoptim.adadps(
        model, plan(), LR, public_gradients=gradients, renew_every=2, **RUN
    ),
}


@pytest.mark.parametrize(("variant", "graph"), [("side_information", False), ("adadps", True)])
def test_public_gradients_may_be_any_function(variant, graph):
    """Also a function that calls autograd itself, with or without a graph."""
    ends = []
    for by_function in (True, False):
        made = task(plan(), torch.float64)

        def gradients(made=made):
            named = dict(made.model.named_parameters())
            with dpoptim.public_data():
                loss = made.losses(made.model, made.public).mean()
                return dict(
                    zip(named, torch.autograd.grad(loss, list(named.values()), create_graph=graph), strict=True)
                )

        public = gradients if by_function else dpoptim.PublicGradients(made.model, made.losses, [made.public])
        optimizer = PUBLIC_VARIANTS[variant](made.model, public)
        advance(made, optimizer, range(5))
        assert not any(value.requires_grad for state in optimizer.state.values() for value in state.values())
        ends.append(made.theta())
    assert torch.equal(*ends)


def test_public_gradients_outside_public_data_are_refused():
    """There the engine takes the model's gradients, and the function gets None."""
    made = task(plan(), torch.float64)

    def gradients():
        named = dict(made.model.named_parameters())
        loss = made.losses(made.model, made.public).mean()
        return dict(zip(named, torch.autograd.grad(loss, list(named.values()), allow_unused=True), strict=True))

    with pytest.raises(ValueError, match=r"^public_gradients gave None for '.*public_data\(\)"):
        PUBLIC_VARIANTS["adadps"](made.model, gradients)
