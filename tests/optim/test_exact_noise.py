"""Plans with `exact_noise`: every variant equals its slow version, and all that is released lies on the grid."""

from __future__ import annotations

import importlib
import itertools
import json
from dataclasses import replace

import pytest
import torch

import dpoptim
from tests.optim.table import RULES, VARIANTS, task
from tests.optim.test_against_reference import PLANS, RUN, rows_of, run_fast
from tests.optim.test_clipping_rules import CLIPPING

exact = importlib.import_module("dpoptim.noise.exact")
EXACT = {name: plan.replace(exact_noise=True) for name, plan in PLANS.items()}


def make(variant, plan, dtype=torch.float64, **run):
    made = task(plan, dtype)
    return made, VARIANTS[variant].make(made.model, plan, RULES["adam"][0], made, **{**RUN, **run})


@pytest.mark.parametrize(("variant", "plan"), list(zip(VARIANTS, itertools.cycle(EXACT), strict=False)))
def test_on_a_fine_grid_every_variant_equals_its_slow_version(variant, plan, monkeypatch):
    monkeypatch.setattr(exact, "GRID", 2.0**-30)
    made, optimizer = make(variant, EXACT[plan])
    noise = rows_of(PLANS[plan], torch.float64, "gradient")
    square_noise = rows_of(optimizer.plan.replace(exact_noise=False), torch.float64, "square")
    slow = VARIANTS[variant].reference(
        task(PLANS[plan], torch.float64), noise, square_noise, RULES["adam"][1], optimizer.plan
    )
    error = (run_fast(made, optimizer) - slow).norm(dim=1) / slow.norm(dim=1)
    assert 0 < float(error.max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variant", ["dp_sgd", "scale_then_privatize", "independent_moments"])
def test_releases_lie_on_the_grid(variant, dtype, monkeypatch):
    made, optimizer = make(variant, EXACT["banded noise, shuffled"], dtype)
    mechanism = optimizer.mechanism
    stddev = mechanism._stddevs["gradient"]
    seen = []
    for batch in made.batches[:5]:
        made.losses(made.model, batch).sum().backward()
        optimizer.mechanism.close_physical_batch()
        scale = mechanism.scale
        scale = {name: torch.ones_like(p) for name, p in made.model.named_parameters()} if scale is None else scale
        scale = {name: scale[name].double() for name in scale}
        released = mechanism.privatize()
        for name, gradient in released.gradient.items():
            multiples = gradient.double() * scale[name] * 4 / (2.0**-10 * 2.0 ** torch.tensor(stddev).log2().floor())
            precision = float((multiples.abs() * torch.finfo(dtype).eps).max()) * 4
            seen.append(float((multiples - multiples.round()).abs().max()) <= max(precision, 1e-9))
    assert all(seen)


@pytest.mark.parametrize("clipping", ["adaptive", "groups"])
def test_a_resumed_run_repeats_its_steps(clipping):
    plan = EXACT["banded noise, shuffled"].replace(clipping=CLIPPING[clipping])
    made, optimizer = make("scale_then_privatize", plan)
    whole = run_fast(made, optimizer)
    made, optimizer = make("scale_then_privatize", plan)
    run_fast(replace(made, batches=made.batches[:7]), optimizer)
    weights, state = made.model.state_dict(), optimizer.state_dict()
    again, resumed = make("scale_then_privatize", plan)
    again.model.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert torch.equal(run_fast(replace(again, batches=made.batches[7:]), resumed), whole[7:])


def test_a_run_with_exact_noise_is_not_resumed_without_it():
    made, optimizer = make("dp_sgd", EXACT["banded noise, shuffled"])
    run_fast(replace(made, batches=made.batches[:2]), optimizer)
    _, other = make("dp_sgd", PLANS["banded noise, shuffled"])
    with pytest.raises(ValueError, match="exact_noise was True, not None"):
        other.load_state_dict(optimizer.state_dict())


def test_a_plan_without_noise_runs():
    plan = EXACT["banded noise, shuffled"].replace(noise_multiplier=0.0, clipping=CLIPPING["adaptive"])
    made, optimizer = make("dp_sgd", plan)
    assert run_fast(replace(made, batches=made.batches[:3]), optimizer).isfinite().all()


def test_plans_say_so():
    plan = EXACT["banded noise, shuffled"].replace(delta=1e-3)
    assert dpoptim.PrivacyPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert "exact_noise" not in plan.replace(exact_noise=False).to_dict()
    text, ordinary = (" ".join(p.statement().split()) for p in (plan, plan.replace(exact_noise=False)))
    assert "real-valued noise, rounded to a grid" in text
    assert "clipped and summed in float64. What rounding reveals there or in the model is not covered" in text
    assert "what floating-point rounding reveals is not covered" in ordinary
    assert plan.epsilon() == plan.replace(exact_noise=False).epsilon()
    with pytest.raises(ValueError, match="exact_noise"):
        plan.replace(exact_noise="no")
    with pytest.raises(ValueError, match="Declare the columns"):
        plan.replace(counts=dpoptim.privacy.ColumnCounts(columns=1, releases=1, stddev=1.0, threshold=1.0))


def test_automatic_noise_counts_the_rows_that_exact_noise_makes_again():
    plan = dpoptim.PrivacyPlan(num_examples=1000, batch_size=50, steps=100)
    found = {
        is_exact: dpoptim.choose_noise(plan.replace(exact_noise=is_exact), epsilon=3.0, delta=1e-4, parameters=1000)
        for is_exact in (False, True)
    }
    kept = [one for one in found[True].candidates if one.plan.strategy.kept_rows]
    assert kept
    assert all(one.normal_rows == 50.5 and one.memory_bytes == 0 for one in kept)
    assert found[True].chosen.normal_rows <= 16


def test_examples_that_were_made_do_not_move_the_others(monkeypatch):
    """The clipped sums are in float64: in float32, the others would be rounded in the same direction."""
    width, many = 1024, 1024
    inputs = torch.full((2 * many, width), 32 / (many - 0.5))
    inputs[0] = 1.0
    inputs[many:] = 0.56 * 32 * 2.0**-23
    plan = dpoptim.PrivacyPlan(
        num_examples=2 * many, batch_size=2 * many, steps=1, noise_multiplier=1e-6, exact_noise=True
    )
    found, dtypes = [], []
    add_to = exact.ExactStream.add_to

    def watched(stream, sums, *args, **kwargs):
        dtypes.append(sums.dtype)
        add_to(stream, sums, *args, **kwargs)

    monkeypatch.setattr(exact.ExactStream, "add_to", watched)
    for rows in (inputs, inputs[1:]):
        optimizer = dpoptim.dp_sgd(torch.nn.Linear(width, 1, bias=False), plan, 0.1, external_batches=True)
        optimizer._model(rows).sum().backward()
        optimizer.mechanism.close_physical_batch()
        released = optimizer.mechanism.privatize().gradient["weight"]
        assert released.dtype == torch.float32
        found.append(released.double() * 2 * many)
    assert float((found[0] - found[1]).norm()) == pytest.approx(1, abs=1e-3)
    assert dtypes == [torch.float64] * 2
