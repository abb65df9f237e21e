"""Train a LightningModule privately, with automatic optimization, on rows of numbers with one label each.

    pip install dpoptim lightning
    python examples/lightning_module.py --train_file measurements.csv --labels no yes --epsilon 3 --delta 1e-6

The last column is the label. Three things differ from an ordinary module:

- The loss is the SUM of per-example losses, and is not logged.
- The optimizer is dpoptim's.
- The loader is dpoptim's. One epoch holds all steps.

Do not set Trainer's gradient_clip_val or accumulate_grad_batches: the latter divides the loss, which changes clipping.
Use precision="bf16-mixed", not "16-mixed".
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpoptim


class PrivateClassifier(lightning.LightningModule):
    """A small network with its privacy plan."""

    def __init__(self, plan: dpoptim.PrivacyPlan, *, columns: int, labels: int, lr: float) -> None:
        super().__init__()
        self.plan, self.lr = plan, lr
        self.layers = nn.Sequential(nn.Linear(columns, 64), nn.ReLU(), nn.Linear(64, labels))

    def forward(self, rows: Tensor) -> Any:
        return self.layers(rows)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        rows, labels = batch
        return nn.functional.cross_entropy(self(rows), labels, reduction="none").sum()

    def configure_optimizers(self) -> Any:
        optimizer = dpoptim.scale_then_privatize(self, self.plan, lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.plan.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def read(path: str, label_names: list[str]) -> TensorDataset:
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    features = torch.tensor([[float(value) for value in row[:-1]] for row in rows])
    return TensorDataset(features, torch.tensor([label_names.index(row[-1]) for row in rows]))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--train_file", required=True, help="private rows: .csv with a header, label last")
    parser.add_argument("--labels", nargs="+", required=True, help="the labels, in order")
    parser.add_argument("--epsilon", type=float, required=True)
    parser.add_argument("--delta", type=float, required=True)
    parser.add_argument("--batch_size", type=int, default=256, help="expected per step (default: %(default)s)")
    parser.add_argument("--max_steps", type=int, default=200)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--output_file", default="classifier.pt")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    data = read(options.train_file, options.labels)
    plan = dpoptim.PrivacyPlan(
        num_examples=len(data), batch_size=options.batch_size, steps=options.max_steps, sampling=dpoptim.Poisson()
    ).calibrate(epsilon=options.epsilon, delta=options.delta)
    module = PrivateClassifier(
        plan, columns=data.tensors[0].shape[1], labels=len(options.labels), lr=options.learning_rate
    )
    trainer = lightning.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, devices=1)
    trainer.fit(module, train_dataloaders=dpoptim.private_loader(data, plan))
    torch.save(module.layers.state_dict(), options.output_file)
    print(plan.statement())


if __name__ == "__main__":
    main()
