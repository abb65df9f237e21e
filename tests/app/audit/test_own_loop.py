"""An audit plays its game with a loop of one's own: for every optimizer, and finds what is wrong with the loop."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import dpoptim
from dpoptim import (
    Adjacency,
    BandedToeplitz,
    BufferedToeplitz,
    CyclicPoisson,
    Independent,
    IndependentMoments,
    JointMoments,
    Poisson,
    PrivacyPlan,
    Shuffled,
)
from dpoptim.app.audit import Game, PlanAudit, audit_loop
from tests.app.audit.test_plan_audit import failures, weaker
from tests.pages import blocks

EXAMPLES = 400
MODEL = "gradients of the model"


def dataset(examples: int = EXAMPLES) -> TensorDataset:
    inputs = torch.randn(examples, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


DATA = dataset()


def network(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 2))


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def loop(
    *,
    make: Any = dpoptim.dp_sgd,
    net: Callable[[], nn.Module] = network,
    losses: Callable[[nn.Module, Any], Tensor] = losses_of,
    reduce: Callable[[Tensor], Tensor] = torch.sum,
    damage: Callable[[Any], None] = lambda optimizer: None,
    secret: bool = False,
    data: Any = DATA,
    loading: Any = None,
    **settings: Any,
) -> Callable[[Game], None]:
    def train(game: Game) -> None:
        loader = game.private_loader(data, **(loading or {}))
        model = game.model(net())
        optimizer = game.optimizer(make, model, lr=0.1, **settings)
        damage(optimizer)
        for batch in dpoptim.secret_randomness(loader, optimizer) if secret else loader:
            reduce(game.insert(losses(model, batch))).backward()
            optimizer.step()

    return train


def plan_of(*, epsilon: float = 8.0, **changes: Any) -> PrivacyPlan:
    values: dict[str, Any] = {"num_examples": EXAMPLES, "batch_size": 80, "steps": 10}
    return PrivacyPlan(**{**values, **changes}).calibrate(epsilon=epsilon, delta=1e-4)


def audit(train: Callable[[Game], Any], *, games: int = 1, **changes: Any) -> PlanAudit:
    return audit_loop(plan_of(**changes), train, games=games)


def compared(found: PlanAudit) -> bool | None:
    return {check.name: check.passed for check in found.checks}[MODEL]


def test_a_correct_loop_passes():
    found = audit(loop(make=dpoptim.scale_then_privatize), games=10)
    assert found.passed, failures(found)
    assert found.canaries == 2000  # half of the examples in ten games
    assert 1.0 < found.delta_bound < found.epsilon_bound < found.epsilon
    assert compared(found)


QUIET: dict[str, Any] = {"num_examples": EXAMPLES, "batch_size": 80, "steps": 10, "noise_multiplier": 1e-6}
MICRO = {"micro_batch_size": 30}
BY_LENGTH = {"lengths": range(1, EXAMPLES + 1), "micro_batch_tokens": 8000}
USERS = {"users": [place // 2 for place in range(EXAMPLES)], "micro_batch_size": 30}
LOOPS: list[tuple[Callable[[Game], None], dict[str, Any]]] = [
    (loop(loading=MICRO), {}),
    (loop(loading=BY_LENGTH), {"noise": BandedToeplitz(bands=2)}),
    (loop(reduce=torch.mean, loss_reduction="mean"), {}),
    (loop(make=dpoptim.scale_then_privatize, loading=MICRO), {"adjacency": Adjacency.REPLACE}),
    (loop(loading=MICRO), {"sampling": Poisson(), "adjacency": Adjacency.ADD_REMOVE}),
    (loop(loading={"micro_batch_size": 1}), {"sampling": Poisson(), "batch_size": 1}),
    (loop(loading=USERS), {"num_examples": 200, "batch_size": 40, "unit": "user", "records_per_user": 2}),
]


@pytest.mark.parametrize(("train", "changes"), LOOPS)
def test_canaries_that_are_drawn_move_the_release_by_the_clip_norm(train, changes):
    plan = PrivacyPlan(**{**QUIET, **changes})
    game = Game(plan, canaries=plan.num_examples // 2, seed=0).play(train)
    assert game.drawn.any()
    assert (min(map(len, game.batches)) == 0) == (plan.batch_size == 1)  # the seed draws an empty batch
    assert game.gradient == pytest.approx(game.drawn * game.directions, abs=1e-3)


@pytest.mark.parametrize("loading", [MICRO, BY_LENGTH])
def test_parts_of_batches_are_compared(loading):
    found = audit(loop(loading=loading))
    assert found.passed, failures(found)
    assert compared(found)


def test_groups_of_parameters_and_evaluation_pass():
    def train(game: Game) -> None:
        net, loader = network(), game.private_loader(DATA)
        model = game.model(net)
        groups = [{"params": net[0].parameters(), "lr": 0.2}, {"params": net[3].parameters()}]
        optimizer = game.optimizer(dpoptim.dp_sgd, model, 0.1, param_groups=groups)
        for batch in loader:
            with torch.no_grad():
                model(DATA.tensors[0][:3])
            game.insert(losses_of(model, batch)).sum().backward()
            optimizer.step()

    found = audit(train)
    assert found.passed, failures(found)


def test_one_model_for_all_games_passes():
    net = network()
    found = audit(loop(net=lambda: net), games=2)
    assert found.passed, failures(found)
    assert compared(found)


@pytest.mark.parametrize("train", [loop(net=partial(network, 0.5)), loop(net=partial(network, 0.5), secret=True)])
def test_random_losses_are_not_compared(train):
    found = audit(train)
    assert found.passed, failures(found)
    assert compared(found) is None


def weighed_by_the_batch(model: nn.Module, batch: Any) -> Tensor:
    found = losses_of(model, batch)
    return found * found.mean().detach()


def divided_by_the_batch(model: nn.Module, batch: Any) -> Tensor:
    return losses_of(model, batch) / len(batch[1])


def long_and_weighed(model: nn.Module, batch: Any) -> Tensor:
    return 30 * weighed_by_the_batch(model, batch)  # all gradients are clipped


@pytest.mark.parametrize("losses", [weighed_by_the_batch, divided_by_the_batch, long_and_weighed])
def test_losses_that_depend_on_the_batch_are_found(losses):
    assert failures(audit(loop(losses=losses))) == {MODEL}


@pytest.mark.parametrize("clipping", [dpoptim.AdaptiveClipNorm(), dpoptim.NormalizedGradients()])
def test_no_clipping_hides_that_losses_depend_on_the_batch(clipping):
    assert compared(audit(loop(losses=long_and_weighed), clipping=clipping)) is False


def reduced(losses: Callable[[nn.Module, Any], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: losses(model, batch).mean()


def mistaken(mistake: str) -> Callable[[Game], None]:
    """A loop with one mistake."""

    def train(game: Game) -> None:
        loader, net = game.private_loader(DATA), network()
        model = game.model(net)
        if mistake == "own optimizer":
            optimizer = dpoptim.dp_sgd(model, game.plan, lr=0.1)
        else:
            optimizer = game.optimizer(dpoptim.dp_sgd, model, lr=0.1)
        own_loader = DataLoader(DATA, batch_size=80, shuffle=True)
        for step, batch in enumerate(own_loader if mistake == "own loader" else loader):
            if mistake == "three steps" and step == 3:
                break
            part = [rows[:50] for rows in batch] if mistake == "part of a batch" else batch
            losses = losses_of(net if mistake == "own model" else model, part)
            (losses if mistake == "no canaries" else game.insert(losses)).sum().backward()
            optimizer.step()

    return train


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (mistaken("own optimizer"), "optimizer does not belong to the game. Make it with game.optimizer"),
        (mistaken("own model"), "game.insert was called without the model. Call what game.model returned"),
        (mistaken("own loader"), "not from the game's loader. Loop over what game.private_loader returned"),
        (mistaken("part of a batch"), "batch has 80 examples, but the model was called with 50"),
        (mistaken("no canaries"), r"a batch has no canaries. Differentiate game.insert\(losses\)"),
        (mistaken("three steps"), "Expected 10 steps of training, got 3. Loop over the whole loader"),
        (lambda game: None, "Expected 10 steps of training, got 0"),
        (lambda game: game.optimizer(dpoptim.dp_sgd, network(), 0.1), "what game.model returned, got Sequential"),
        (lambda game: game.optimizer(dpoptim.dp_sgd, game.model(network()), 0.1), "before game.private_loader"),
        (loop(losses=reduced(losses_of)), r"one value per example, \[80\], got \[\]"),
        (loop(data=dataset(399)), "dataset has 399 examples, but the plan has num_examples=400"),
        (loop(make=dpoptim.independent_moments), r"plan.with_release\(IndependentMoments\("),
    ],
)
def test_mistakes_are_refused(train, words):
    with pytest.raises(ValueError, match=words):
        audit(train)


PAGE = Path(__file__).parents[3] / "docs" / "audit.md"


def test_the_example_on_the_page_runs(capsys):
    (text,) = [part for part in blocks(PAGE, "python") if "def train" in part]
    given = {"dataset": DATA, "make_model": network, "plan": plan_of(), "cross_entropy": cross_entropy}
    exec(compile(text, str(PAGE), "exec"), given)
    assert re.fullmatch(
        r"at least \d\.\d\d is spent, with confidence 0.99; claimed 8.00\n\[\]\n", capsys.readouterr().out
    )


# -- every variant, noise and sampling ---------------------------------------------------------------------------------


def with_public_data(make: Any, **settings: Any) -> Any:
    def build(model: nn.Module, plan: PrivacyPlan, **options: Any) -> Any:
        public = dpoptim.PublicGradients(model, losses_of, [dataset(5)[:]])
        return make(model, plan, public_gradients=public, **settings, **options)

    return build


VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dp_sgd": (dpoptim.dp_sgd, {}),
    "post_processing": (dpoptim.post_processing, {}),
    "bias_correction": (dpoptim.bias_correction, {}),
    "scale_then_privatize": (dpoptim.scale_then_privatize, {}),
    "independent_moments": (dpoptim.independent_moments, {"release": IndependentMoments()}),
    "joint_moments": (dpoptim.joint_moments, {"release": JointMoments()}),
    "side_information": (with_public_data(dpoptim.side_information), {}),
    "adadps": (with_public_data(dpoptim.adadps, renew_every=2), {}),
    "delayed_preconditioner": (partial(dpoptim.delayed_preconditioner, plain_steps=2), {}),
}
NOISE = (Independent(), BandedToeplitz(bands=2), BufferedToeplitz(buffers=2))
SAMPLING = (Shuffled(), Poisson(), CyclicPoisson(bands=2))
REFUSED = [
    (BandedToeplitz(bands=2), Poisson()),
    (BufferedToeplitz(buffers=2), Poisson()),
    (BufferedToeplitz(buffers=2), CyclicPoisson(bands=2)),
]


def test_every_variant_is_covered():
    private = {name for name in dpoptim.optim.variants.__dict__ if name in dpoptim.__all__ and name.islower()}
    assert set(VARIANTS) == private - {"noiseless_preconditioner"}


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLING, ids=repr)
@pytest.mark.parametrize("noise", NOISE, ids=repr)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_combination_plays_the_game(variant, noise, sampling):
    make, changes = VARIANTS[variant]
    changes = {**changes, "noise": noise, "sampling": sampling, "steps": 6, "epsilon": 1.0}
    if (noise, sampling) in REFUSED:
        with pytest.raises(ValueError, match="amplification"):
            plan_of(**changes)
        return
    found = audit(loop(make=make), **changes)
    assert found.passed, failures(found)
    assert max(found.epsilon_bound, found.gaussian_bound or 0.0) <= found.epsilon
    broken = audit(loop(make=make, damage=weaker(0.05)), **changes)
    assert failures(broken) >= {"the claim stands", "noise level"}
    assert broken.epsilon_bound > broken.epsilon
