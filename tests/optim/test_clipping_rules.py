"""Rules that bound gradients otherwise than by one fixed clip norm, in whole runs, against their slow versions."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import statistics
from typing import Any

import pytest
import torch

import dpoptim
from dpoptim.app.audit.plan_audit import audit_plan
from dpoptim.noise import TensorPart
from dpoptim.optim import reference
from tests.clipping import captured_loops
from tests.clipping.tape import tape_graphs
from tests.optim.table import EPS_SCALE, LR, RULES, task
from tests.optim.test_against_reference import KEY, PLANS, RUN, STEPS, rows_of, run_fast

GROUPS = dpoptim.GroupClipNorms(groups=(("", 1.0), ("2.", 3.0)))
CLIPPING = {
    "adaptive": dpoptim.AdaptiveClipNorm(quantile=0.9, rate=0.4, count_weight=5.0),
    "normalized": dpoptim.NormalizedGradients(stability=0.2),
    "groups": GROUPS,
    "layers": dpoptim.GroupClipNorms.per_layer(["0.weight", "0.bias", "2.weight", "2.bias"]),
}
OPTIMIZERS = {
    "dp_sgd": (
        lambda model, plan, rule, **run: dpoptim.dp_sgd(model, plan, LR, momentum=0.9, **run),
        lambda run, rule: reference.dp_sgd(run, rule=reference.SGD(lr=LR, momentum=0.9)),
    ),
    "post_processing": (
        lambda model, plan, rule, **run: dpoptim.post_processing(model, plan, LR, rule=rule, **run),
        lambda run, rule: reference.post_processing(run, rule=rule),
    ),
    "scale_then_privatize": (
        lambda model, plan, rule, **run: dpoptim.scale_then_privatize(
            model, plan, LR, rule=rule, eps_scale=EPS_SCALE, **run
        ),
        lambda run, rule: reference.scale_then_privatize(run, rule=rule, eps_scale=EPS_SCALE, normalised=True),
    ),
}


def slow_run(made, plan, dtype):
    rule = plan.clipping
    shape: Any = {"clip_norm": plan.clip_norm, "batch_size": plan.batch_size}
    shape["noise_stddev"] = plan.noise_stddevs().gradient_sum
    inputs: Any = (
        made.theta(),
        lambda theta, step: made.gradients(theta, made.batches[step]),
        rows_of(plan, dtype, "gradient"),
    )
    if isinstance(rule, dpoptim.AdaptiveClipNorm):
        part = [TensorPart(name="count", numel=1)]
        stream = plan.strategy.stream(KEY.for_run("the run"), part, stream="count", dtype=torch.float64)
        counts = torch.cat([stream.row(t).clone() for t in range(plan.steps)]) * plan.strategy.column_norm
        own: Any = {"quantile": rule.quantile, "rate": rule.rate, "count_weight": rule.count_weight}
        theta, gradients, noise = inputs
        own["count_levels"] = torch.from_numpy(plan.strategy.row_norms() * plan.strategy.column_norm)
        return reference.AdaptiveRun(theta, gradients, noise, count_noise=counts, **shape, **own)
    if isinstance(rule, dpoptim.NormalizedGradients):
        return reference.Run(*inputs, **shape, bound=functools.partial(reference.normalize, stability=rule.stability))
    places, start = {}, 0
    for name, p in made.model.named_parameters():
        places[name] = torch.arange(start, start := start + p.numel())
    groups = [(torch.cat([places[n] for n in names]), share) for names, share in rule.groups_of(places)]
    return reference.Run(*inputs, **shape, bound=functools.partial(reference.clip_groups, groups=groups))


@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("variant", OPTIMIZERS)
@pytest.mark.parametrize("noise", PLANS)
def test_rules_equal_their_slow_versions(clipping, variant, noise):
    plan, dtype = PLANS[noise].replace(clipping=CLIPPING[clipping]), torch.float64
    made, (make, slow) = task(plan, dtype), OPTIMIZERS[variant]
    optimizer = make(made.model, plan, RULES["adam"][0], **RUN)
    expected_run = slow_run(task(plan, dtype), plan, dtype)
    expected, found = slow(expected_run, RULES["adam"][1]), run_fast(made, optimizer)
    if clipping == "adaptive":
        assert max(expected_run.factors) > 1.5 or min(expected_run.factors) < 0.7, "the clip norm does not move"
        assert optimizer.mechanism.clip_factor == pytest.approx(expected_run.factors[-1], rel=1e-9)
    assert float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max()) <= 1e-10


def adaptive_run(steps, *, saved=None, noise_multiplier=0.7):
    """A run with adaptive clipping, resumed from what an earlier call returned; (optimizer, task)."""
    plan = PLANS["banded noise, shuffled"].replace(clipping=CLIPPING["adaptive"], noise_multiplier=noise_multiplier)
    made = task(plan, torch.float64)
    optimizer = dpoptim.scale_then_privatize(made.model, plan, LR, eps_scale=EPS_SCALE, **RUN)
    start = 0
    if saved is not None:
        made.model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        start = optimizer.mechanism.step
    for batch in made.batches[start:steps]:
        made.losses(made.model, batch).sum().backward()
        optimizer.step()
    return made, optimizer


def test_an_adaptive_run_resumes_exactly():
    made, optimizer = adaptive_run(17)
    saved = copy.deepcopy((made.model.state_dict(), optimizer.state_dict()))
    resumed, again = adaptive_run(STEPS, saved=saved)
    whole, other = adaptive_run(STEPS)
    assert torch.equal(resumed.theta(), whole.theta())
    assert again.mechanism.clip_factor == other.mechanism.clip_factor != 1.0


def test_the_ledger_tells_clip_norms_apart():
    """Equal sums with noise of two levels would reveal the noise."""
    contents = []
    for factor in (1.0, 1.5):
        made = task(PLANS["banded noise, shuffled"], torch.float64)
        plan = PLANS["banded noise, shuffled"].replace(clipping=CLIPPING["adaptive"])
        optimizer = dpoptim.dp_sgd(made.model, plan, LR, **RUN)
        optimizer.mechanism.before_step = lambda step, content: contents.append(content)
        optimizer.mechanism._set_clip_factor(factor)
        (0 * made.losses(made.model, made.batches[0])).sum().backward()
        optimizer.step()
    assert contents[0] != contents[1]


def test_an_adaptive_clip_norm_finds_the_quantile():
    """Without noise, the clip norm ends near the norm that the chosen share of gradients does not exceed."""
    plan = dpoptim.PrivacyPlan(
        num_examples=200, batch_size=200, steps=150, clip_norm=50.0, noise_multiplier=0.0,
        clipping=dpoptim.AdaptiveClipNorm(quantile=0.8, rate=0.3),
    )  # fmt: skip
    model = torch.nn.Linear(1, 1, bias=False).double()
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.0, external_batches=True)
    norms = torch.linspace(0.01, 2.0, 200, dtype=torch.float64)
    for _ in range(plan.steps):
        model(norms[:, None]).sum().backward()
        optimizer.step()
    assert optimizer.mechanism.clip_factor * 50.0 == pytest.approx(1.6, rel=0.03)


def test_the_noise_of_an_adaptive_run_follows_its_clip_norm():
    """On the gradient it is clip_factor·clip_norm·σ·√(1 + a²), as `noise_variance` says."""
    plan = dpoptim.PrivacyPlan(
        num_examples=4, batch_size=4, steps=60, clip_norm=0.5, noise_multiplier=1.5,
        clipping=dpoptim.AdaptiveClipNorm(quantile=0.5, rate=0.05, count_weight=0.7),
    )  # fmt: skip
    model = torch.nn.Linear(4000, 1, bias=False).double()
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.0, external_batches=True)
    released: list[Any] = []
    factors = [1.0]
    optimizer.observers.append(released.append)
    for _ in range(plan.steps):
        (model(torch.zeros(4, 4000, dtype=torch.float64)) * 0).sum().backward()
        optimizer.step()
        factors.append(optimizer.mechanism.clip_factor)
    assert len(set(factors)) == plan.steps + 1
    for one, factor in zip(released, factors, strict=False):
        expected = 0.5 * factor * 1.5 * math.sqrt(1 + 0.7**2) / 4
        assert math.sqrt(one.noise_variance) == pytest.approx(expected)
        assert float(one.gradient["weight"].std()) == pytest.approx(expected, rel=0.06)


def test_the_count_has_the_noise_of_the_proof():
    """Its noise is ζ·√(1 + a²)·σ in units in which one example moves it by aζ; half or twice of it would be seen."""
    plan = dpoptim.PrivacyPlan(
        num_examples=4, batch_size=4, steps=400, clip_norm=0.5, noise_multiplier=1.5,
        clipping=dpoptim.AdaptiveClipNorm(quantile=0.5, rate=1e-6, count_weight=0.3),
    )  # fmt: skip
    model = torch.nn.Linear(1, 1, bias=False).double()
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.0, external_batches=True)
    moves, before = [], 0.0
    for _ in range(plan.steps):
        model(torch.zeros(4, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()
        after = math.log(optimizer.mechanism.clip_factor)
        moves.append((after - before) / 1e-6 + 0.5)  # the noisy share of clipped examples, which is 0
        before = after
    expected = 0.5 * math.sqrt(1 + 0.3**2) * 1.5 / (0.3 * 0.5 * 4)
    assert statistics.stdev(moves) == pytest.approx(expected, rel=0.15)
    assert abs(statistics.mean(moves)) < 5 * expected / math.sqrt(plan.steps)


def test_noise_moves_an_adaptive_clip_norm_by_one_percent():
    """Whatever its level: small batches and correlated noise slow the rule down."""
    plan = dpoptim.PrivacyPlan(
        num_examples=40, batch_size=4, steps=400, clip_norm=0.5, noise_multiplier=1.5,
        sampling=dpoptim.Shuffled(), noise=dpoptim.BandedToeplitz(bands=5), clipping=dpoptim.AdaptiveClipNorm(),
    )  # fmt: skip
    model = torch.nn.Linear(1, 1, bias=False).double()
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.0, **RUN)
    path = [0.0]
    for _ in range(plan.steps):
        model(torch.zeros(4, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()
        path.append(math.log(optimizer.mechanism.clip_factor))
    assert statistics.stdev(b - a for a, b in itertools.pairwise(path)) == pytest.approx(0.01, rel=0.15)


@pytest.mark.parametrize("clipping", CLIPPING)
def test_one_record_moves_a_step_within_the_bound(clipping):
    """Of what the noise covers: the gradient over the clip factor, and the count."""
    plan = PLANS["banded noise, shuffled"].replace(clipping=CLIPPING[clipping], noise_multiplier=0.0)
    rule = plan.clipping
    for place in range(plan.batch_size):
        found = []
        for is_there in (True, False):
            made = task(plan, torch.float64)
            optimizer = dpoptim.scale_then_privatize(made.model, plan, LR, eps_scale=EPS_SCALE, **RUN)
            for batch in made.batches[:3]:
                made.losses(made.model, batch).sum().backward()
                optimizer.step()
            factor, scale = optimizer.mechanism.clip_factor, optimizer.mechanism.scale
            assert scale is not None
            weights = torch.ones(plan.batch_size, dtype=torch.float64)
            weights[place] = float(is_there) * 1e3  # a blank has no gradient
            (made.losses(made.model, made.batches[3]) * weights).sum().backward()
            released: list[Any] = []
            optimizer.observers.append(released.append)
            optimizer.step()
            own = torch.cat([(g * scale[n]).flatten() for n, g in released[0].gradient.items()]) * plan.batch_size
            count = torch.zeros(1, dtype=torch.float64)
            if isinstance(rule, dpoptim.AdaptiveClipNorm):
                share = math.log(optimizer.mechanism.clip_factor / factor) / rule.rate
                count += rule.count_weight * plan.clip_norm * share * plan.batch_size
            found.append(torch.cat([own / factor, count]))
        moved = float((found[0] - found[1]).norm())
        assert 0.5 * plan.clip_norm < moved <= plan.clip_norm * rule.noise_factor * (1 + 1e-9)


def test_captured_losses_may_reorder_their_rows(monkeypatch):
    """Then a batch's first rows are not its examples, but the count is still theirs."""
    tape_graphs(monkeypatch)
    plan = captured_loops.plan_of(batch_size=8).replace(
        clipping=dpoptim.AdaptiveClipNorm(quantile=0.5, rate=1.0), clip_norm=1e-6, noise_multiplier=0.0
    )
    factors = []
    for examples in (8, 7):
        model = captured_loops.model_of()
        optimizer = dpoptim.dp_sgd(model, plan, lr=0.0, **RUN)
        losses = captured_loops.losses_of(model)
        run = optimizer.captured(lambda x, y, losses=losses: losses(x.flip(0), y.flip(0)), pad_to_multiple=8)
        ((x, y),) = captured_loops.batches_of((8, 2))
        for _ in range(3):
            run(x[:examples], y[:examples])
            optimizer.step()
        factors.append(math.log(optimizer.mechanism.clip_factor) / 3)
    assert factors == pytest.approx([0.5, 7 / 8 - 0.5])  # all examples are clipped


def test_rounding_at_the_clip_norm_does_not_move_the_count():
    """As harmful records could: many equal gradients of the length of the clip norm."""
    plan = dpoptim.PrivacyPlan(
        num_examples=500, batch_size=500, steps=1, clip_norm=1.0, noise_multiplier=0.0,
        clipping=dpoptim.AdaptiveClipNorm(rate=1.0),
    )  # fmt: skip
    found = []
    for length in (1 - 1e-6, 1 + 1e-6):
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = dpoptim.dp_sgd(model, plan, lr=0.0, **RUN)
        model(torch.full((500, 1), length)).sum().backward()
        optimizer.step()
        found.append(500 * math.log(optimizer.mechanism.clip_factor))
    assert abs(found[0] - found[1]) < 0.05


def test_adaptive_batches_run_as_graphs(monkeypatch):
    """A replay reads the clip norm of its own step."""
    tape_graphs(monkeypatch)
    plan = captured_loops.plan_of().replace(clipping=dpoptim.AdaptiveClipNorm(rate=1.0), clip_norm=0.3)
    paths = []
    for is_captured in (False, True):
        model = captured_loops.model_of()
        optimizer = dpoptim.post_processing(model, plan, lr=0.1, **RUN)
        losses = captured_loops.losses_of(model)
        run = optimizer.captured(losses, pad_to_multiple=8)
        factors = []
        for x, y in captured_loops.batches_of(*[(8, 2)] * 5):
            if is_captured:
                run(x, y)
            else:
                losses(x, y).sum().backward()
            optimizer.step()
            factors.append(optimizer.mechanism.clip_factor)
        paths.append(factors)
        assert run.graphs == int(is_captured)
    assert len(set(paths[0])) == 5
    assert paths[0] == pytest.approx(paths[1], rel=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dpoptim.AdaptiveClipNorm(quantile=1.0), "quantile"),
        (lambda: dpoptim.NormalizedGradients(stability=0.0), "stability"),
        (lambda: dpoptim.GroupClipNorms(groups=(("a", 1.0), ("a", 2.0))), "pairs of different prefixes"),
        (lambda: dpoptim.GroupClipNorms(groups=(("a", -1.0),)), "weight of group 'a'"),
        (lambda: dpoptim.GroupClipNorms(groups=(("a", 1.0),)).groups_of(["b"]), "'b' is in no group"),
        (lambda: dpoptim.GroupClipNorms(groups=(("", 1.0), ("a", 1.0))).groups_of(["b"]), "'a' has no trained"),
        (lambda: PLANS["banded noise, shuffled"].replace(clipping="adaptive"), "Expected clipping such as"),
        (
            lambda: PLANS["banded noise, shuffled"].replace(clipping=type("Own", (dpoptim.FixedClipNorm,), {})()),
            "Expected",
        ),
        (
            lambda: PLANS["banded noise, shuffled"].replace(
                clipping=dpoptim.AdaptiveClipNorm(), release=dpoptim.JointMoments()
            ),
            "has no proof",
        ),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("clipping", CLIPPING)
def test_plans_with_rules_are_saved_and_stated(clipping):
    plan = PLANS["banded noise, shuffled"].replace(clipping=CLIPPING[clipping], delta=1e-3)
    assert dpoptim.PrivacyPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert plan.clipping.describe(0.9)[:40] in " ".join(plan.statement().split())
    fixed = plan.replace(clipping=dpoptim.FixedClipNorm())
    assert plan.epsilon() == fixed.epsilon()
    assert plan.noise_stddevs().gradient_sum == fixed.noise_stddevs().gradient_sum * plan.clipping.noise_factor


@pytest.mark.parametrize("clipping", ["adaptive", "normalized", "groups"])
def test_the_audit_attacks_plans_with_rules(clipping):
    plan = dpoptim.PrivacyPlan(
        num_examples=600, batch_size=100, steps=30, clip_norm=0.5, delta=1e-5, noise_multiplier=3.0,
        clipping=dpoptim.AdaptiveClipNorm() if clipping == "adaptive" else CLIPPING[clipping],
    )  # fmt: skip

    def make(model, plan, **run):
        return dpoptim.dp_sgd(model, plan, 0.1, **run)

    def noise_too_small(model, plan, **run):
        optimizer = make(model, plan, **run)
        optimizer.mechanism._stddevs["gradient"] *= 0.7
        return optimizer

    assert audit_plan(plan, make, canaries=1000).passed
    assert not audit_plan(plan, noise_too_small, canaries=1000).passed
