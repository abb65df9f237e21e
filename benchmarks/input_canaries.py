"""How much do canaries in input space prove? Records with random labels, with and without a unique token.

    python benchmarks/input_canaries.py
    python benchmarks/input_canaries.py --games 2 --write FILE

Each game trains a small model on synthetic records with `dp_sgd`. A coin decides whether each canary is in. Two attacks
then score the canaries. One sees every release: its score is the likelihood ratio of the releases along the canary's
clipped gradient. The other sees the final model: its score is how likely the model finds the canary's label. The last
row has the gradient canaries of `dpoptim.app.audit`. Bounds are `epsilon_bound`, as in an audit.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from options import add_commit, add_write, at_least, report
from record import heading, markdown_table, page, publish, setting
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.app.audit import audit_loop
from dpoptim.app.audit.statistics import contradicted_noise, guess
from dpoptim.privacy import accounting

RECORDS, CANARIES, BATCH, STEPS, DELTA, CONFIDENCE = 4000, 1000, 200, 200, 1e-5, 0.99
FEATURES, CLASSES, WORDS, LENGTH = 32, 10, 1000, 8
OWN_TOKENS = {  # in each canary; None has features instead of tokens
    "image features, random label": None,
    "text, random label": 0,
    "text with one unique token, random label": 1,
    "text of one unique token, random label": LENGTH,
}


class Bag(nn.Module):
    """Classify a text by the mean of its tokens' embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.classify = nn.Embedding(WORDS + CANARIES, 16), nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classify(torch.relu(self.embedding(tokens).mean(1)))  # type: ignore[no-any-return]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def records(own_tokens: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels; the first `CANARIES` records have random labels."""
    generator, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)
    labels = torch.randint(CLASSES, (RECORDS,), generator=generator)
    if own_tokens is None:
        centres = 0.8 * torch.randn(CLASSES, FEATURES, generator=fixed)
        inputs = centres[labels] + torch.randn(RECORDS, FEATURES, generator=generator)
    else:
        topics = torch.softmax(1.5 * torch.randn(CLASSES, WORDS, generator=fixed), 1)
        inputs = torch.multinomial(topics[labels], LENGTH, replacement=True, generator=generator)
        inputs[:CANARIES, :own_tokens] = WORDS + torch.arange(CANARIES)[:, None]
    labels[:CANARIES] = torch.randint(CLASSES, (CANARIES,), generator=generator)
    return inputs, labels


def play(own_tokens: int | None, plan: dpoptim.PrivacyPlan, seed: int) -> tuple[Any, Any, Any]:
    """Return the scores by releases, those by the final model, and which canaries were in."""
    torch.manual_seed(seed)
    make: Callable[[], nn.Module] = network if own_tokens is None else Bag
    model, twin, coins = make(), make(), np.random.default_rng(seed)  # the twin has no private optimizer
    inputs, labels = records(own_tokens, seed)
    included, order = coins.random(CANARIES) < 0.5, torch.from_numpy(coins.permutation(RECORDS))
    weights = torch.ones(RECORDS)
    weights[:CANARIES] = torch.from_numpy(included).float()
    loader = dpoptim.private_loader(list(range(RECORDS)), plan)
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.3 if own_tokens is None else 2.0, momentum=0.9)
    released: dict[str, Tensor] = {}
    optimizer.observers.append(lambda found: released.update({n: g.clone() for n, g in found.gradient.items()}))
    scores = np.zeros(CANARIES)

    def loss(parameters: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(functional_call(twin, parameters, (one[None],)), label[None])

    for batch in loader:
        rows = order[batch]
        canaries = rows[rows < CANARIES]
        parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
        gradients = vmap(grad(loss), (None, 0, 0))(parameters, inputs[canaries], labels[canaries])
        (cross_entropy(model(inputs[rows]), labels[rows], reduction="none") * weights[rows]).sum().backward()
        optimizer.step()
        norms = torch.stack([own.flatten(1).square().sum(1) for own in gradients.values()]).sum(0).sqrt()
        clipped = norms.clamp(min=1e-12).reciprocal().clamp(max=1.0)
        along = sum((own.flatten(1) * released[name].flatten()).sum(1) for name, own in gradients.items())
        scores[canaries.numpy()] += (clipped * along * BATCH - (clipped * norms).square() / 2).numpy()
    optimizer.detach()
    with torch.no_grad():
        chances = torch.log_softmax(model(inputs[:CANARIES]), 1)[torch.arange(CANARIES), labels[:CANARIES]]
    odds = (chances - torch.log1p(-chances.exp().clamp(max=1 - 1e-6))).numpy()
    return scores / plan.noise_stddevs().gradient_sum ** 2, odds - np.median(odds), included


def bound(plan: dpoptim.PrivacyPlan, scores: list[Any], included: list[Any]) -> float:
    """Return the ε that the guesses of all games prove, as in an audit."""
    guesses = [guess(own, was, only_in=False) for own, was in zip(scores, included, strict=True)]
    noise = contradicted_noise(
        plan.run, guesses, noise_multiplier=plan.noise_multiplier, confidence=1 - (1 - CONFIDENCE) / 3
    )
    return accounting.epsilon(plan.run, noise_multiplier=noise, delta=DELTA) if noise < math.inf else 0.0


def of_gradients(plan: dpoptim.PrivacyPlan, games: int) -> float:
    inputs, labels = records(None, 0)

    def train(game: Any) -> None:
        loader = game.private_loader(TensorDataset(inputs, labels))
        model = game.model(network())
        optimizer = game.optimizer(dpoptim.dp_sgd, model, lr=0.3, momentum=0.9)
        for rows, own in loader:
            game.insert(cross_entropy(model(rows), own, reduction="none")).sum().backward()
            optimizer.step()

    return audit_loop(plan, train, canaries=games * CANARIES, games=games, confidence=CONFIDENCE).epsilon_bound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=at_least(1), default=10, metavar="N", help="for each row (default: 10)")
    add_commit(parser)
    add_write(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[str]] = {}
    for epsilon in (4.0, 8.0):
        plan = dpoptim.PrivacyPlan(num_examples=RECORDS, batch_size=BATCH, steps=STEPS)
        plan = plan.calibrate(epsilon=epsilon, delta=DELTA)
        for name, own_tokens in OWN_TOKENS.items():
            played = [play(own_tokens, plan, seed) for seed in range(options.games)]
            for place, sees in enumerate(("every release", "the final model")):
                found = bound(plan, [one[place] for one in played], [one[2] for one in played])
                rows.setdefault(f"{name}; {sees}", []).append(f"{found:.2f}")
            report(f"epsilon {epsilon:g}, {name}: done")
        rows.setdefault("gradient; every release", []).append(f"{of_gradients(plan, options.games):.2f}")
    titles = ["canary; what the attack sees", "ε = 4", "ε = 8"]
    text = page(
        "Canaries in input space",
        f"{heading(setting('cpu', options.commit))}. By `python benchmarks/input_canaries.py`; its docstring explains "
        f"the rows. {options.games * CANARIES:,} canaries in {options.games} games, confidence {CONFIDENCE:g}.",
        markdown_table(titles, [[name, *own] for name, own in rows.items()]),
    )
    publish(options, text)


if __name__ == "__main__":
    main()
