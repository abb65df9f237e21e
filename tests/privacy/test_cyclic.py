"""Cyclic Poisson sampling: who is drawn when, and that its ε covers the joint law of the releases."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.stats import chisquare, norm

import dpoptim
from dpoptim import disk_cache
from dpoptim.data import private_loader
from dpoptim.noise import (
    Banded,
    BandedInverse,
    BandedToeplitz,
    BufferedToeplitz,
    Dense,
    Independent,
    NoiseKey,
    SquareRoot,
    TensorPart,
)
from dpoptim.privacy import (
    Adjacency,
    CyclicPoisson,
    IndependentMoments,
    JointMoments,
    Poisson,
    PrivacyPlan,
    gaussian_epsilon,
    square_sensitivity,
)
from dpoptim.privacy.accounting import GaussianRun, PoissonRun, epsilon
from dpoptim.privacy.release_types import joint_sensitivity, noise_stddevs

KEY = NoiseKey.from_bytes(bytes(range(32)))


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("DPOPTIM_CACHE_DIR", str(tmp_path))


def make(**changes):
    settings = {"num_examples": 1000, "batch_size": 10, "steps": 100, "sampling": CyclicPoisson(bands=7)}
    return PrivacyPlan(**{**settings, **changes})


class TestSampler:
    @pytest.mark.parametrize(("count", "size", "bands"), [(23, 2, 5), (12, 3, 4), (9, 4, 1)])
    def test_groups_are_disjoint_and_examples_keep_to_their_turns(self, count, size, bands):
        sampling, steps = CyclicPoisson(bands=bands), 40 * bands
        turns: dict[int, set[int]] = {i: set() for i in range(count)}
        times: dict[int, list[int]] = {i: [] for i in range(count)}
        for step in range(steps):
            batch = sampling.indices(KEY, step, num_examples=count, batch_size=size).tolist()
            assert batch == sorted(set(batch))
            for i in batch:
                turns[i].add(step % bands)
                times[i].append(step)
        assert all(len(found) == 1 for found in turns.values())
        sizes = np.bincount([next(iter(found)) for found in turns.values()], minlength=bands)
        assert sizes.max() - sizes.min() <= 1
        numbers = {"num_examples": count, "batch_size": size, "steps": steps}
        assert max(map(len, times.values())) <= sampling.max_participations(**numbers) == 40
        gaps = [b - a for found in times.values() for a, b in itertools.pairwise(found)]
        assert min(gaps) >= sampling.min_separation(**numbers) == bands

    def test_participations_with_an_incomplete_last_round(self):
        sampling = CyclicPoisson(bands=4)
        for steps, most in ((4, 1), (5, 2), (8, 2), (10, 3)):
            assert sampling.max_participations(num_examples=40, batch_size=10, steps=steps) == most
            batches = [sampling.indices(KEY, t, num_examples=40, batch_size=10) for t in range(steps)]  # q = 1
            assert np.bincount(np.concatenate(batches)).max() == most

    def test_rate_and_its_rejection_of_wrong_rates(self):
        """A band of 4.5 standard deviations around the rate: a false alarm has probability 7e-6."""
        count, size, bands, rounds = 2000, 40, 8, 100
        member = np.zeros((rounds, count), dtype=bool)
        for t in range(rounds * bands):
            member[t // bands, CyclicPoisson(bands=bands).indices(KEY, t, num_examples=count, batch_size=size)] = True
        trials, rate = rounds * count, bands * size / count

        def fits(observed, trials, rate):
            return abs(observed - trials * rate) <= 4.5 * math.sqrt(trials * rate * (1 - rate))

        assert fits(member.sum(), trials, rate)
        assert not fits(member.sum(), trials, 0.95 * rate)
        assert not fits(member.sum(), trials, 1.05 * rate)
        assert not fits(member.sum(), trials, size / count)
        # An example's turns are independent of each other, and examples are alike.
        assert fits((member[1:] & member[:-1]).sum(), (rounds - 1) * count, rate**2)
        assert chisquare(member.sum(axis=0)).statistic / (count * (1 - rate)) == pytest.approx(1.0, abs=0.15)

    def test_order_of_groups_is_uniform(self):
        pairs = dict.fromkeys(itertools.combinations(range(4), 2), 0)
        for seed in range(1200):
            key = NoiseKey.from_bytes(seed.to_bytes(32, "little"))
            group = CyclicPoisson(bands=2).indices(key, 0, num_examples=4, batch_size=2)
            pairs[tuple(group.tolist())] += 1
        assert chisquare(list(pairs.values())).pvalue > 1e-3

    def test_one_band_is_poisson_in_law(self):
        sizes = [len(CyclicPoisson(bands=1).indices(KEY, t, num_examples=100, batch_size=10)) for t in range(2000)]
        assert abs(np.mean(sizes) - 10) < 4.5 * 3 / math.sqrt(2000)
        assert abs(np.var(sizes) - 9) < 4.5 * 9 * math.sqrt(2 / 2000)

    def test_bad_numbers_are_refused(self):
        for bands in (0, -1, True, 2.0, "3", None):
            with pytest.raises(ValueError, match="bands to be a whole number"):
                CyclicPoisson(bands=bands)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"110 > 100\. Use at most 10 bands"):
            CyclicPoisson(bands=11).indices(KEY, 0, num_examples=100, batch_size=10)
        with pytest.raises(ValueError, match="dataset_size == num_examples, got 99 != 100"):
            CyclicPoisson(bands=2).indices(KEY, 0, num_examples=100, batch_size=10, dataset_size=99)


class TestPlan:
    def test_rate_and_rounds(self):
        plan = make(noise=BandedToeplitz(bands=7))
        assert (plan.max_participations, plan.min_separation, plan.sampling_prob) == (15, 7, 0.07)
        assert plan.run == PoissonRun(sampling_prob=0.07, steps=15, adjacency=Adjacency.ZERO_OUT)

    @pytest.mark.parametrize(
        ("adjacency", "bands", "steps", "rounds"),
        [(Adjacency.ZERO_OUT, 7, 100, 15), (Adjacency.REPLACE, 5, 100, 20), (Adjacency.ZERO_OUT, 100, 100, 1)],
    )
    def test_epsilon_is_that_of_as_many_sampled_gaussians(self, adjacency, bands, steps, rounds):
        plan = make(sampling=CyclicPoisson(bands=bands), steps=steps, adjacency=adjacency, noise_multiplier=1.3)
        relation = {
            Adjacency.ZERO_OUT: NeighboringRelation.REPLACE_SPECIAL,
            Adjacency.REPLACE: NeighboringRelation.REPLACE_ONE,
        }[adjacency]
        event = PoissonSampledDpEvent(bands * 10 / 1000, GaussianDpEvent(1.3)) if bands < 100 else GaussianDpEvent(1.3)
        accountant = PLDAccountant(relation, 1e-3)
        theirs = accountant.compose(event, rounds).get_epsilon(1e-6)
        assert plan.epsilon(delta=1e-6) == pytest.approx(theirs, rel=2e-3)

    @pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE])
    def test_one_band_costs_exactly_what_poisson_costs(self, adjacency):
        cyclic, plain = (
            make(sampling=s, adjacency=adjacency, noise_multiplier=0.9) for s in (CyclicPoisson(bands=1), Poisson())
        )
        assert cyclic.run == plain.run
        assert cyclic.epsilon(delta=1e-6) == plain.epsilon(delta=1e-6)

    def test_full_groups_use_the_closed_form(self):
        plan = make(sampling=CyclicPoisson(bands=100), noise=BandedToeplitz(bands=3), steps=200, noise_multiplier=2.0)
        assert plan.sampling_prob == 1.0
        assert isinstance(plan.run, GaussianRun)
        assert plan.run.sensitivity == pytest.approx(math.sqrt(2))
        assert plan.epsilon(delta=1e-6) == pytest.approx(gaussian_epsilon(2.0 / math.sqrt(2), 1e-6), rel=1e-9)

    def test_the_kind_of_band_does_not_matter_and_correlated_noise_is_amplified(self):
        noises = [Independent(), BandedToeplitz(bands=3), BandedToeplitz(bands=7), Banded(bands=7)]
        values = {make(noise=noise, noise_multiplier=1.0).epsilon(delta=1e-6) for noise in noises}
        assert len(values) == 1
        shuffled = make(sampling=dpoptim.Shuffled(), noise=BandedToeplitz(bands=7), noise_multiplier=1.0)
        assert shuffled.max_participations == 1
        assert max(values) < 0.75 * shuffled.epsilon(delta=1e-6)

    @pytest.mark.parametrize("noise", [Independent(), BandedToeplitz(bands=7), Banded(bands=6)])
    def test_optimized_strategies_keep_to_the_bands_of_their_specification(self, noise):
        matrix = make(noise=noise, steps=30).strategy.strategy_matrix()
        assert not np.tril(matrix, -7).any()
        assert not np.triu(matrix, 1).any()

    @pytest.mark.parametrize(
        "noise",
        [
            BandedToeplitz(bands=8),
            Banded(bands=8),
            SquareRoot(),
            Dense(),
            BufferedToeplitz(buffers=2),
            BandedInverse(bands=2),
        ],
    )
    def test_other_noise_is_refused(self, noise):
        for changes in ({"noise": noise}, {"release": IndependentMoments(square_noise=noise)}):
            with pytest.raises(
                ValueError, match=r"at most 7 diagonals.*(CyclicPoisson\(bands=8\)|Shuffled\(\))"
            ) as refusal:
                make(**changes)
            assert repr(noise) in str(refusal.value)

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"sampling": CyclicPoisson(bands=101), "steps": 200}, "Use at most 100 bands"),
            ({"sampling": CyclicPoisson(bands=50), "steps": 49}, "<= steps, got 50 > 49"),
            ({"sampling": Poisson(), "release": IndependentMoments(square_noise=Banded(bands=4))}, "square_noise"),
            ({"sampling": CyclicPoisson}, "CyclicPoisson"),
        ],
    )
    def test_combinations_without_a_proof_are_refused(self, changes, match):
        with pytest.raises(ValueError, match=match):
            make(**changes)

    def test_calibrates_and_survives_json(self):
        plan = make(noise=BandedToeplitz(bands=7), release=JointMoments()).calibrate(epsilon=2.0, delta=1e-6)
        assert 2.0 - 1e-4 <= plan.epsilon() <= 2.0
        assert PrivacyPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan

    def test_statement(self):
        plan = make(noise=BandedToeplitz(bands=7), noise_multiplier=1.0, delta=1e-6)
        text = " ".join(plan.statement().split())
        for words in (
            "at step t each member of group t mod 7",
            "7*batch_size/num_examples = 0.07",
            "at most 15 of the 100 steps, every 7 steps",
            "with probability 0.07 each",
            "membership of batches and the sampling key must stay secret",
            "membership of groups need not",
            "Nobody learns which examples were in which batch",
            "BandedToeplitz(bands=7",
            "Rényi",
        ):
            assert words in text, words

    @pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE])
    def test_squares_have_the_bounds_of_random_batches(self, adjacency):
        """A batch may be larger than expected, and a replaced example is accounted for on both sides."""
        cyclic, plain = CyclicPoisson(bands=3), Poisson()
        for squares in ("of_average", "average_of"):
            common = {"squares": squares, "adjacency": adjacency, "clip_norm": 0.7, "batch_size": 4}
            assert square_sensitivity(sampling=cyclic, **common) == square_sensitivity(sampling=plain, **common)
        weight = {"square_weight": 2.0, "adjacency": adjacency, "clip_norm": 0.7}
        assert joint_sensitivity(sampling=cyclic, **weight) == joint_sensitivity(sampling=plain, **weight)
        for release in (IndependentMoments(), IndependentMoments(balance="mse", squares="average_of"), JointMoments()):
            common = {"adjacency": adjacency, "clip_norm": 0.7, "batch_size": 4, "noise_multiplier": 1.0}
            assert noise_stddevs(release, sampling=cyclic, **common) == noise_stddevs(release, sampling=plain, **common)


def law_of(matrix, times, rate, std, sign):
    """ln density of outputs y [samples, steps] of Cx + std·z, and a sampler of them.

    The example takes part at each of `times` with chance `rate`, with a gradient of ±`sign` that depends on what was
    released before; so does what the others add.
    """
    steps = len(matrix)
    patterns = list(itertools.product([0, 1], repeat=len(times)))

    def move(y, t):
        return np.where(y[:, t - 1] > 0, 1.0, -1.0) if t else np.ones(len(y))

    def others(y, t):
        return np.tanh(2 * y[:, t - 1]) if t else np.zeros(len(y))

    def means(y, coins):
        """Row t of Cx for each sample; coins is {time: 0 or 1, or an array of them}."""
        x = np.stack([others(y, t) + sign * coins.get(t, 0) * move(y, t) for t in range(steps)], axis=1)
        return x @ matrix.T

    def log_density(y):
        terms = []
        for pattern in patterns:
            weight = math.prod(rate if coin else 1 - rate for coin in pattern)
            centre = means(y, dict(zip(times, pattern, strict=True)))
            terms.append(math.log(weight) + norm.logpdf(y, centre, std).sum(axis=1))
        return np.logaddexp.reduce(terms, axis=0)

    def sample(rng, count):
        y = np.zeros((count, steps))
        coins = {t: (rng.random(count) < rate).astype(float) for t in times}
        for t in range(steps):  # row t of Cx depends on rows before t alone, through x
            y[:, t] = means(y, coins)[:, t] + std * rng.normal(size=count)
        return y

    return log_density, sample


def hockey_stick_of(first, second, level, *, count=300_000):
    """δ at ε = level by Monte Carlo, with its standard error."""
    y = first[1](np.random.default_rng(5), count)
    values = np.maximum(0.0, -np.expm1(level + second[0](y) - first[0](y)))
    return values.mean(), values.std() / math.sqrt(count)


class TestTheorem:
    """The accountant against the joint law of all outputs, with the plan's own C, κ and noise."""

    @pytest.mark.parametrize("adjacency", [Adjacency.ZERO_OUT, Adjacency.REPLACE])
    def test_four_steps_two_bands_by_integration(self, adjacency):
        """On a grid of 36⁴ points; halving the spacing moves the integral by less than 1e-3 of it, for either group."""
        plan = make(
            num_examples=8, batch_size=2, steps=4, sampling=CyclicPoisson(bands=2), noise=BandedToeplitz(bands=2),
            noise_multiplier=1.2, adjacency=adjacency,
        )  # fmt: skip
        matrix, std, rate = plan.strategy.strategy_matrix(), plan.noise_stddevs().gradient_sum, plan.sampling_prob
        std *= plan.strategy.column_norm
        grid = np.linspace(-1 - 5.5 * std, 1 + 5.5 * std, 36)
        cell = (grid[1] - grid[0]) ** 4

        def density(sign, times):
            total = np.zeros((36,) * 4)
            for pattern in itertools.product([0, 1], repeat=2):
                x = np.zeros(4)
                x[list(times)] = sign * np.array(pattern)
                rows = [norm.pdf(grid, centre, std) for centre in matrix @ x]
                total += np.prod([rate if coin else 1 - rate for coin in pattern]) * np.einsum("a,b,c,d", *rows)
            return total

        other = 0.0 if adjacency is Adjacency.ZERO_OUT else -1.0
        for times, least in (((0, 2), 0.999), ((1, 3), 0.6)):  # the last column of group 1 is cut off
            pair = density(1.0, times), density(other, times)
            for delta in (1e-1, 1e-2, 1e-3):
                factor = math.exp(plan.epsilon(delta=delta))
                exact = [np.maximum(a - factor * b, 0).sum() * cell for a, b in (pair, pair[::-1])]
                assert max(exact) <= delta * (1 + 1e-3)
                assert max(exact) >= least * delta

    @pytest.mark.parametrize(("steps", "bands", "adjacency"), [(5, 2, Adjacency.ZERO_OUT), (4, 2, Adjacency.REPLACE)])
    def test_adaptive_gradients_do_not_exceed_the_bound(self, steps, bands, adjacency):
        plan = make(
            num_examples=4 * bands, batch_size=2, steps=steps, sampling=CyclicPoisson(bands=bands),
            noise=Banded(bands=bands), noise_multiplier=1.1, adjacency=adjacency,
        )  # fmt: skip
        matrix, std = plan.strategy.strategy_matrix(), plan.noise_stddevs().gradient_sum * plan.strategy.column_norm
        other = 0.0 if adjacency is Adjacency.ZERO_OUT else -1.0
        level, largest = plan.epsilon(delta=0.02), 0.0
        for group in range(bands):
            times = range(group, steps, bands)
            pair = [law_of(matrix, times, plan.sampling_prob, std, sign) for sign in (1.0, other)]
            for first, second in (pair, pair[::-1]):
                found, error = hockey_stick_of(first, second, level, count=100_000)
                assert found <= 0.02 + 4 * error
                largest = max(largest, found + 4 * error)
        assert largest >= 0.02 * 0.98

    def test_one_band_too_many_would_exceed_epsilon(self):
        strategy = BandedToeplitz(bands=3).optimize(steps=4)
        run = PoissonRun(sampling_prob=0.5, steps=2, adjacency=Adjacency.ZERO_OUT)
        level = epsilon(run, noise_multiplier=1.1, delta=0.02)
        std = 1.1 * strategy.column_norm
        pair = [law_of(strategy.strategy_matrix(), (0, 2), 0.5, std, sign) for sign in (1.0, 0.0)]
        found, error = hockey_stick_of(pair[0], pair[1], level)
        assert found > 0.02 + 10 * error


class TestTraining:
    def test_loader_and_optimizer_work_through_empty_batches(self):
        plan = make(
            num_examples=50, batch_size=1, steps=60, sampling=CyclicPoisson(bands=4), noise=BandedToeplitz(bands=4),
            noise_multiplier=1.0,
        )  # fmt: skip
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1, bias=False)
        loader = private_loader(torch.utils.data.TensorDataset(torch.randn(50, 3)), plan, key=KEY, run_id="")
        optimizer = dpoptim.dp_sgd(model, plan, lr=1.0, key=KEY, run_id="")
        noise = plan.strategy.stream(KEY.for_run(""), [TensorPart(name="weight", numel=3)], stream="gradient")
        empty = 0
        for step, (inputs,) in enumerate(loader):
            drawn = plan.sampling.indices(KEY.for_run("loader "), step, num_examples=50, batch_size=1)
            before = model.weight.detach().clone()
            model(inputs).square().sum(1).sum().backward()
            optimizer.step()
            if len(drawn) == 0:
                empty += 1
                moved = (before - model.weight.detach())[0]
                torch.testing.assert_close(moved, noise.row(step) * plan.strategy.column_norm)
        assert step == 59
        assert 5 < empty < 50
        assert optimizer.mechanism.step == 60

    def test_length_and_size_of_the_dataset(self):
        plan = make(num_examples=50, batch_size=2, steps=10, sampling=CyclicPoisson(bands=4))
        data = torch.utils.data.TensorDataset(torch.arange(50))
        with pytest.raises(TypeError, match="micro-batches is unknown"):
            len(private_loader(data, plan, micro_batch_size=2))
        with pytest.raises(ValueError, match="num_examples=50"):
            private_loader(torch.utils.data.TensorDataset(torch.arange(49)), plan)


class TestWhatTheProofRestsOn:
    """The plan counts the diagonals of the strategy itself and does not trust its specification."""

    def plan(self, noise):
        return PrivacyPlan(
            num_examples=400,
            batch_size=10,
            steps=24,
            sampling=CyclicPoisson(bands=4),
            noise=noise,
            noise_multiplier=1.0,
        )

    def test_a_specification_with_too_many_bands(self):
        class Wide(BandedToeplitz):
            def optimize(self, **pattern):
                return SquareRoot().optimize(**pattern)

        with pytest.raises(ValueError, match="a strategy of 24 bands, which CyclicPoisson"):
            _ = self.plan(Wide(bands=4)).strategy
        with pytest.raises(ValueError, match="a strategy of 24 bands"):
            self.plan(Wide(bands=4)).epsilon(delta=1e-6)

    @pytest.mark.parametrize("spec", [BandedToeplitz(bands=4), Banded(bands=4)], ids=repr)
    def test_a_forged_cache(self, spec, tmp_path, monkeypatch):
        monkeypatch.setenv("DPOPTIM_CACHE_DIR", str(tmp_path))
        honest = spec.optimize(steps=23)  # writes entries whose names and inputs we forge for 24 steps
        assert honest.bands == 4
        forged = np.ones(24) if isinstance(spec, BandedToeplitz) else np.ones((12, 24))
        monkeypatch.setattr(disk_cache, "load", lambda kind, inputs: forged)
        with pytest.raises(ValueError, match=r"bands|diagonals"):
            self.plan(spec).epsilon(delta=1e-6)
