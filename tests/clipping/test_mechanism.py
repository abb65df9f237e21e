"""Releases have noise of the right level in the right place, and second releases keep to their bounds."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import dpoptim
from dpoptim.clipping import PrivateMechanism
from dpoptim.privacy import square_sensitivity

KEY = dpoptim.NoiseKey.from_bytes(bytes(range(32)))


class Vector(nn.Module):
    """Its gradient for an input is the input itself, so a batch can be given gradient by gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 1, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[:, 0]


def plan(**changes) -> dpoptim.PrivacyPlan:
    settings = dict(num_examples=100, batch_size=4, steps=10, clip_norm=1.0, noise_multiplier=1.0)
    return dpoptim.PrivacyPlan(**{**settings, **changes})


def release_of(gradients: Tensor, the_plan: dpoptim.PrivacyPlan, what: dpoptim.privacy.Release, key=KEY):
    """Return the first release for a batch whose examples have these gradients."""
    model = Vector(gradients.shape[1])
    source = PrivateMechanism(model, the_plan, what, key=key, run_id="", external_batches=True)
    if len(gradients):
        model(gradients).sum().backward()
    assert source.close_physical_batch()
    return source.privatize()


def test_models_that_combine_gradients_themselves_are_refused():
    with pytest.raises(ValueError, match=r"Pass and call model\.module"):
        PrivateMechanism(nn.DataParallel(Vector(2)), plan(), dpoptim.privacy.Gradient(), external_batches=True)
    sharded = Vector(2)
    next(sharded.parameters()).placements = ()  # type: ignore[attr-defined]  # as DTensor has
    with pytest.raises(ValueError, match="not divided by rows"):
        PrivateMechanism(sharded, plan(), dpoptim.privacy.Gradient(), external_batches=True)


class TestLevel:
    """Chi-square intervals: n = 20,000 normals put the estimated level within 2.5 % with overwhelming probability."""

    WIDTH = 20_000

    def level(self, released: Tensor) -> float:
        return float(released.square().mean().sqrt())

    def assert_level(self, found: float, expected: float) -> None:
        assert found == pytest.approx(expected, rel=0.025)
        for wrong in (0.9, 1.1):
            assert found != pytest.approx(wrong * expected, rel=0.025)

    @pytest.mark.parametrize("sampling", [dpoptim.Shuffled(), dpoptim.Poisson()], ids=["shuffled", "poisson"])
    def test_gradient(self, sampling):
        the_plan = plan(clip_norm=0.3, noise_multiplier=1.7, sampling=sampling)
        released = release_of(torch.zeros(0, self.WIDTH, dtype=torch.float64), the_plan, dpoptim.Gradient())
        self.assert_level(self.level(released.gradient["inner.weight"]), 0.3 * 1.7 / 4)

    def test_an_empty_batch_is_noise_alone(self):
        released = release_of(torch.zeros(0, self.WIDTH, dtype=torch.float64), plan(), dpoptim.Gradient())
        source = dpoptim.noise.NormalSource.of_tensor(KEY.for_run(""), "inner.weight", numel=self.WIDTH)
        assert torch.equal(released.gradient["inner.weight"][0], source.normals(0, dtype=torch.float64) / 4)

    def test_correlated_noise_has_the_level_of_its_row(self):
        the_plan = plan(noise=dpoptim.BandedToeplitz(bands=4), steps=10, num_examples=40)
        model = Vector(self.WIDTH)
        source = PrivateMechanism(model, the_plan, dpoptim.Gradient(), key=KEY)
        strategy = the_plan.strategy
        for norm in strategy.row_norms():
            self.assert_level(
                self.level(source.privatize().gradient["inner.weight"]), float(norm) * strategy.column_norm / 4
            )

    def test_squares_have_the_level_of_their_own_strategy(self):
        what = dpoptim.IndependentMoments(square_noise=dpoptim.SquareRoot())
        the_plan = plan(noise=dpoptim.Independent(), clip_norm=0.6, release=what)
        source = PrivateMechanism(Vector(self.WIDTH), the_plan, what, key=KEY)
        delta2 = (2 * 4 - 1) * 0.6**2 / 4**2
        first, second = the_plan.strategy, dpoptim.SquareRoot().optimize(steps=10)
        levels = []
        for norm, square_norm in zip(first.row_norms(), second.row_norms(), strict=True):
            released = source.privatize()
            level = math.sqrt(2) * 0.6 / 4 * float(norm) * first.column_norm
            self.assert_level(self.level(released.gradient["inner.weight"]), level)
            assert released.noise_variance == pytest.approx(level**2)
            levels.append(math.sqrt(2) * delta2 * float(square_norm) * second.column_norm)
            assert released.square is not None
            self.assert_level(self.level(released.square["inner.weight"]), levels[-1])
        assert levels[-1] > 1.05 * levels[0]

    def test_noise_is_divided_by_the_scale(self):
        model = Vector(self.WIDTH)
        source = PrivateMechanism(model, plan(), dpoptim.Gradient(), key=KEY)
        scale = torch.linspace(0.1, 1.0, self.WIDTH, dtype=torch.float64)[None]
        source.scale = {"inner.weight": scale}
        self.assert_level(self.level(source.privatize().gradient["inner.weight"] * scale), 1 / 4)

    @pytest.mark.parametrize("squares", ["of_average", "average_of"])
    @pytest.mark.parametrize("sampling", [dpoptim.Shuffled(), dpoptim.Poisson()], ids=["shuffled", "poisson"])
    def test_independent_moments(self, squares, sampling):
        the_plan = plan(clip_norm=0.3, noise_multiplier=1.7, sampling=sampling)
        what = dpoptim.IndependentMoments(squares=squares)
        released = release_of(torch.zeros(0, self.WIDTH, dtype=torch.float64), the_plan, what)
        delta2 = square_sensitivity(
            squares=squares, sampling=sampling, adjacency=the_plan.adjacency, clip_norm=0.3, batch_size=4
        )
        self.assert_level(self.level(released.gradient["inner.weight"]), math.sqrt(2) * 0.3 * 1.7 / 4)
        self.assert_level(self.level(released.square["inner.weight"]), math.sqrt(2) * delta2 * 1.7)

    def test_joint_moments(self):
        released = release_of(torch.zeros(0, self.WIDTH, dtype=torch.float64), plan(), dpoptim.JointMoments())
        sensitivity = math.sqrt(1 + 0.5)  # zero-out, λ = 1/2
        self.assert_level(self.level(released.gradient["inner.weight"]), sensitivity / 4)
        self.assert_level(self.level(released.square["inner.weight"]), sensitivity / math.sqrt(0.5) / 4)

    def test_streams_are_independent(self):
        released = release_of(torch.zeros(0, self.WIDTH, dtype=torch.float64), plan(), dpoptim.IndependentMoments())
        pair = torch.stack([released.gradient["inner.weight"][0], released.square["inner.weight"][0]])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / math.sqrt(self.WIDTH)


def changes(with_it: Tensor, without: Tensor, the_plan, what) -> tuple[float, float]:
    """Return the distances between the releases of two neighbouring batches with the same noise."""
    one, other = release_of(with_it, the_plan, what), release_of(without, the_plan, what)
    return (
        float((one.gradient["inner.weight"] - other.gradient["inner.weight"]).norm()),
        float((one.square["inner.weight"] - other.square["inner.weight"]).norm()),
    )


class TestBoundOfSecondRelease:
    """The worst neighbours attain the bound and do not exceed it."""

    def test_independent_moments_with_exact_batches(self):
        what, the_plan = dpoptim.IndependentMoments(), plan()
        equal = torch.zeros(4, 6, dtype=torch.float64)
        equal[:, 0] = 5.0  # clipped to 1
        gradient, square = changes(equal, equal[1:], the_plan, what)
        assert gradient == pytest.approx(1 / 4)
        assert square == pytest.approx((2 * 4 - 1) / 16)

    def test_a_batch_larger_than_planned_is_refused(self):
        with pytest.raises(ValueError, match="5 examples arrived where the plan's sampling draws at most 4"):
            release_of(torch.ones(5, 3, dtype=torch.float64), plan(), dpoptim.IndependentMoments())
        limited = plan(sampling=dpoptim.Poisson(max_batch_size=6))
        with pytest.raises(ValueError, match="7 examples"):
            release_of(torch.ones(7, 3, dtype=torch.float64), limited, dpoptim.Gradient())

    @pytest.mark.parametrize("extra", [1, 2, 3])
    def test_independent_moments_under_poisson_are_projected(self, extra):
        """With 3B examples the square of the plain average would change by 1.44, but only 2ζ²/B = 0.5 is allowed."""
        what, the_plan = dpoptim.IndependentMoments(), plan(sampling=dpoptim.Poisson())
        many = torch.zeros(4 * extra, 6, dtype=torch.float64)
        many[:, 0] = 1.0
        _, square = changes(many, many[1:], the_plan, what)
        assert square <= 2 / 4 + 1e-12
        bare = (many.sum(0) / 4).square() - (many[1:].sum(0) / 4).square()
        assert (float(bare.norm()) > 2 / 4) == (extra > 1)

    def test_projection_bound_over_random_batches(self):
        torch.manual_seed(0)
        what, the_plan = dpoptim.IndependentMoments(), plan(sampling=dpoptim.Poisson())
        worst = 0.0
        for _ in range(60):
            examples = int(torch.randint(1, 14, ()))
            direction = torch.zeros(5, dtype=torch.float64)
            direction[0] = 1.0
            batch = direction + 0.2 * torch.randn(examples, 5, dtype=torch.float64)
            batch[0] = 3 * torch.randn(5, dtype=torch.float64)
            worst = max(worst, changes(batch, batch[1:], the_plan, what)[1])
        assert 0.1 < worst <= 2 / 4

    @pytest.mark.parametrize("sampling", [dpoptim.Shuffled(), dpoptim.Poisson()], ids=["shuffled", "poisson"])
    def test_average_of_squares(self, sampling):
        what = dpoptim.IndependentMoments(squares="average_of")
        batch = torch.zeros(3, 6, dtype=torch.float64)
        batch[:, 1] = -2.0
        _, square = changes(batch, batch[1:], plan(sampling=sampling), what)
        assert square == pytest.approx(1 / 4)

    def test_joint_moments(self):
        what, weight = dpoptim.JointMoments(), 0.5
        batch = torch.zeros(3, 6, dtype=torch.float64)
        batch[0, 2] = 7.0
        gradient, square = changes(batch, batch[1:], plan(), what)
        assert math.hypot(gradient, math.sqrt(weight) * square) == pytest.approx(math.sqrt(1.5) / 4)

    def test_joint_moments_under_replace(self):
        the_plan = plan(adjacency=dpoptim.Adjacency.REPLACE)
        batch = torch.zeros(3, 6, dtype=torch.float64)
        other = batch.clone()
        batch[0, 2], other[0, 2] = 7.0, -7.0
        gradient, square = changes(batch, other, the_plan, dpoptim.JointMoments())
        assert math.hypot(gradient, math.sqrt(0.5) * square) == pytest.approx(2 / 4)
        torch.manual_seed(1)
        for _ in range(40):
            batch[0], other[0] = torch.randn(6), torch.randn(6)
            gradient, square = changes(batch, other, the_plan, dpoptim.JointMoments())
            assert math.hypot(gradient, math.sqrt(0.5) * square) <= 2 / 4 + 1e-12


class TestRefusals:
    def test_uncalibrated_plan(self):
        with pytest.raises(ValueError, match="calibrate"):
            PrivateMechanism(Vector(3), plan(noise_multiplier=None), dpoptim.Gradient())

    def test_a_spent_plan_refuses_further_steps(self):
        source = PrivateMechanism(Vector(3), plan(steps=2), dpoptim.Gradient())
        source.privatize()
        source.privatize()
        with pytest.raises(ValueError, match="all 2 steps of the plan have been released"):
            source.privatize()

    def test_noiseless_squares_need_a_plan_that_requests_them(self):
        with pytest.raises(ValueError, match="not private"):
            PrivateMechanism(Vector(3), plan(release=dpoptim.NoiselessSquare()), dpoptim.Gradient())
        with pytest.raises(ValueError, match="not private"):
            PrivateMechanism(Vector(3), plan(), dpoptim.NoiselessSquare())

    @pytest.mark.parametrize("what", [dpoptim.IndependentMoments(), dpoptim.JointMoments()])
    def test_second_releases_are_not_scaled(self, what):
        source = PrivateMechanism(Vector(3), plan(), what)
        with pytest.raises(ValueError, match="no proof for scaled clipping"):
            source.scale = {"inner.weight": torch.full((1, 3), 0.1, dtype=torch.float64)}

    def test_two_optimizers_for_one_model(self):
        model = Vector(3)
        first = PrivateMechanism(model, plan(), dpoptim.Gradient())
        PrivateMechanism(model, plan(), dpoptim.Gradient())
        with pytest.raises(ValueError, match="Create only one optimizer per model"):
            first.privatize()


def test_a_nonfinite_example_is_left_out_and_reported_only_without_noise():
    batch = torch.randn(4, 3, dtype=torch.float64)
    batch[1, 2] = math.nan
    with pytest.warns(RuntimeWarning, match=r"not finite and was left out"):
        release_of(batch, plan(noise_multiplier=0.0), dpoptim.Gradient())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning would reveal one bit of the data
        released = release_of(batch, plan(), dpoptim.Gradient())
        expected = release_of(batch[[0, 2, 3]], plan(), dpoptim.Gradient())
    torch.testing.assert_close(released.gradient["inner.weight"], expected.gradient["inner.weight"])


def test_noise_does_not_depend_on_the_other_parameters():
    """The noise of a parameter depends on the key, the step and the parameter's name, not on the order."""
    first = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 2)}).double()
    second = nn.ModuleDict({"b": nn.Linear(2, 2), "c": nn.Linear(5, 5), "a": nn.Linear(3, 2)}).double()
    one, other = (
        PrivateMechanism(m, plan(), dpoptim.Gradient(), key=KEY, run_id="").privatize() for m in (first, second)
    )
    for name, noise in one.gradient.items():
        assert torch.equal(noise, other.gradient[name])


def test_runs_with_one_key_do_not_share_noise():
    one, other = (PrivateMechanism(Vector(3), plan(), dpoptim.Gradient(), key=KEY).privatize() for _ in range(2))
    assert (one.gradient["inner.weight"] != other.gradient["inner.weight"]).all()


def test_a_mechanism_that_needs_its_loader_refuses_other_batches():
    model = Vector(3)
    source = PrivateMechanism(model, plan(), dpoptim.Gradient(), key=KEY)
    source.needs_loader = True
    model(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
    with pytest.raises(ValueError, match="Loop over that loader"):
        source.close_physical_batch()


def test_the_state_of_a_different_run_is_refused_after_a_release():
    model = Vector(3)
    source = PrivateMechanism(model, plan(), dpoptim.Gradient(), key=KEY, external_batches=True)
    other = PrivateMechanism(Vector(3), plan(), dpoptim.Gradient(), key=KEY, external_batches=True).state()
    source.privatize()
    with pytest.raises(ValueError, match="belongs to a different run"):
        source.resume(other)
    assert source.step == 1
