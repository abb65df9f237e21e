"""Show what the noise-to-signal ratio of `plan.outlook` costs: the accuracy of two small tasks at several ratios.

    python benchmarks/outlook.py
    python benchmarks/outlook.py --write FILE    # also writes the table

Both tasks are made on the spot: two classes from the sign of a sum of two inputs, and ten noisy clusters. A network
with one hidden layer trains on them. Each figure is the best of three learning rates, on the training examples.
"""

from __future__ import annotations

import argparse
import math
import warnings

import torch
from options import add_write, report
from record import markdown_table, page, publish
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import dpoptim

RATIOS = (0.03, 0.1, 0.2, 0.5, 1.0, 2.0)
RATES = {dpoptim.scale_then_privatize: (3e-3, 1e-2, 3e-2), dpoptim.dp_sgd: (0.1, 0.5, 2.0)}


def tasks() -> dict[str, tuple[Tensor, Tensor, int, int]]:
    """Inputs, labels, hidden units and steps."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(5000, 20, generator=generator)
    centers, labels = torch.randn(10, 64, generator=generator), torch.arange(2000) % 10
    clusters = (centers[labels] + 1.5 * torch.randn(2000, 64, generator=generator)) / 4
    return {
        "two classes": (plain, (plain[:, 0] + plain[:, 1] > 0).long(), 64, 100),
        "ten clusters": (clusters, labels, 128, 200),
    }


def accuracy(inputs: Tensor, labels: Tensor, hidden: int, steps: int, ratio: float, make: object, lr: float) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs.shape[1], hidden), nn.ReLU(), nn.Linear(hidden, int(labels.max()) + 1))
    parameters, batch = sum(p.numel() for p in model.parameters()), 256
    multiplier = ratio * batch * math.sqrt(steps / parameters)
    plan = dpoptim.PrivacyPlan(
        num_examples=len(inputs),
        batch_size=batch,
        steps=steps,
        noise_multiplier=multiplier,
        sampling=dpoptim.Poisson(),
    )
    assert math.isclose(plan.outlook(parameters=parameters).noise_to_signal, ratio)
    loader = dpoptim.private_loader(TensorDataset(inputs, labels), plan)
    optimizer = make(model, plan, lr=lr)  # type: ignore[operator]
    for rows, targets in loader:
        cross_entropy(model(rows), targets, reduction="none").sum().backward()
        optimizer.step()
    return (model(inputs).argmax(1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    made = tasks()
    titles, rows = ["noise-to-signal ratio", *(f"{t}, {make.__name__}" for t in made for make in RATES)], []
    for ratio in RATIOS:
        best = [max(accuracy(*task, ratio, make, lr) for lr in RATES[make]) for task in made.values() for make in RATES]
        rows.append([f"{ratio:g}", *(f"{100 * found:.0f} %" for found in best)])
        report(f"noise-to-signal ratio {ratio:g}: done")
    about = "Accuracy of two small tasks, by `python benchmarks/outlook.py`; its docstring describes them."
    title = "What the noise-to-signal ratio of `plan.outlook` costs"
    publish(options, page(title, about, markdown_table(titles, rows)))


if __name__ == "__main__":
    main()
