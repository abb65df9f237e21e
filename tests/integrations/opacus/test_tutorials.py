"""Loops like those of Opacus's tutorials run with the import changed, and so does the code of docs/from-opacus.md."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from tests.integrations.opacus.cases import EXPECTED_WARNINGS
from tests.pages import blocks

pytestmark = EXPECTED_WARNINGS


OURS = dict.fromkeys(("engine", "memory", "validators", "layers"), "dpoptim.integrations.opacus")
OPACUS = {
    "engine": "opacus",
    "memory": "opacus.utils.batch_memory_manager",
    "validators": "opacus.validators",
    "layers": "opacus.layers",
}


IMAGES = """
from {engine} import PrivacyEngine
from {memory} import BatchMemoryManager
from {validators} import ModuleValidator

model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(32, 3)
)
model = ModuleValidator.fix(model)
errors = ModuleValidator.validate(model, strict=False)
assert not errors
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
train_loader = DataLoader(TensorDataset(torch.randn(100, 1, 8, 8), torch.randint(0, 3, (100,))), batch_size=24)
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=train_loader, epochs=2, target_epsilon=5.0, target_delta=1e-5,
    max_grad_norm=1.2,
)
sigma = optimizer.noise_multiplier
losses, sizes = [], []
for epoch in range(2):
    model.train()
    with BatchMemoryManager(
        data_loader=train_loader, max_physical_batch_size=16, optimizer=optimizer
    ) as memory_safe_data_loader:
        for i, (images, target) in enumerate(memory_safe_data_loader):
            optimizer.zero_grad()
            output = model(images)
            loss = criterion(output, target)
            losses.append(loss.item())
            sizes.append(len(images))
            loss.backward()
            optimizer.step()
    epsilon = privacy_engine.get_epsilon(1e-5)
"""

NAMES = """
from {engine} import PrivacyEngine
from {layers} import DPLSTM

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.lstm = DPLSTM(8, 12, num_layers=1, batch_first=True)
        self.out_layer = nn.Linear(12, 4)

    def forward(self, x, hidden=None):
        x = self.embedding(x)
        x, _ = self.lstm(x, hidden)
        return self.out_layer(x[:, -1, :])

def padded_collate(batch):
    x = nn.utils.rnn.pad_sequence([name for name, _ in batch], batch_first=True)
    return x, torch.stack([label for _, label in batch])

names = [(torch.randint(1, 30, (3 + i % 4,)), torch.tensor(i % 4)) for i in range(61)]
train_loader = DataLoader(names, batch_size=20, collate_fn=padded_collate)
model, criterion = Classifier(), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_loader = privacy_engine.make_private(
    module=model, optimizer=optimizer, data_loader=train_loader, noise_multiplier=1.1, max_grad_norm=1.5,
    poisson_sampling=True,
)
losses = []
for epoch in range(3):
    model.train()
    for x, y in train_loader:
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    epsilon = privacy_engine.accountant.get_epsilon(delta=1e-5)
    model.eval()
    with torch.no_grad():
        model(torch.randint(1, 30, (5, 4)))
steps = len(privacy_engine.accountant)
"""

TEXTS = """
from {engine} import PrivacyEngine
from {memory} import BatchMemoryManager

model = BertForSequenceClassification(BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
))
trainable_layers = [model.bert.encoder.layer[-1], model.bert.pooler, model.classifier]
for p in model.parameters():
    p.requires_grad = False
for layer in trainable_layers:
    for p in layer.parameters():
        p.requires_grad = True
data = TensorDataset(torch.randint(0, 50, (64, 10)), torch.ones(64, 10).long(), torch.randint(0, 3, (64,)))
train_dataloader = DataLoader(data, batch_size=16)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, eps=1e-8)
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_dataloader = privacy_engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=train_dataloader, target_delta=1e-5, target_epsilon=7.5, epochs=2,
    max_grad_norm=0.1,
)
losses = []
for epoch in range(2):
    with BatchMemoryManager(
        data_loader=train_dataloader, max_physical_batch_size=8, optimizer=optimizer
    ) as memory_safe_data_loader:
        for step, batch in enumerate(memory_safe_data_loader):
            optimizer.zero_grad()
            inputs = {{"input_ids": batch[0], "attention_mask": batch[1], "labels": batch[2]}}
            outputs = model(**inputs)
            loss = outputs[0]
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-5)
"""


def run_loop(loop: str, modules: dict[str, str]) -> SimpleNamespace:
    torch.manual_seed(1)
    names: dict[str, Any] = {
        "torch": torch, "nn": nn, "DataLoader": DataLoader, "TensorDataset": TensorDataset, "BertConfig": BertConfig,
        "BertForSequenceClassification": BertForSequenceClassification,
    }  # fmt: skip
    exec(loop.format(**modules), names)
    return SimpleNamespace(**names)


@pytest.mark.slow
def test_the_image_loop_runs_with_the_import_changed():
    ours = run_loop(IMAGES, OURS)
    assert isinstance(ours.model[1], nn.GroupNorm)
    assert np.isfinite(ours.losses).all()
    assert max(ours.sizes) <= 16
    assert ours.optimizer.mechanism.step == 2 * len(ours.train_loader) == 10
    assert 5.0 - 1e-3 < ours.epsilon <= 5.0
    pytest.importorskip("opacus")
    theirs = run_loop(IMAGES, OPACUS)
    assert len(theirs.train_loader) == len(ours.train_loader)
    assert 0.8 * theirs.sigma < ours.sigma < theirs.sigma  # Opacus uses Rényi divergences


@pytest.mark.slow
def test_the_name_loop_runs_with_the_import_changed():
    ours = run_loop(NAMES, OURS)
    assert type(ours.model.lstm) is nn.LSTM
    assert np.isfinite(ours.losses).all()
    assert ours.steps == 3 * 4
    pytest.importorskip("opacus")
    theirs = run_loop(NAMES, OPACUS)
    assert len(theirs.losses) == len(ours.losses) == 12
    assert 0 < ours.epsilon < theirs.epsilon  # Opacus uses Rényi divergences


def test_the_text_loop_runs_with_the_import_changed():
    ours = run_loop(TEXTS, OURS)
    assert np.isfinite(ours.losses).all()
    assert ours.optimizer.mechanism.step == 8
    assert ours.epsilon <= 7.5


@pytest.mark.slow
def test_the_text_loop_needs_no_more_noise_than_opacus():
    pytest.importorskip("opacus")
    ours, theirs = run_loop(TEXTS, OURS), run_loop(TEXTS, OPACUS)
    assert 0.8 * theirs.optimizer.noise_multiplier < ours.optimizer.noise_multiplier < theirs.optimizer.noise_multiplier


PAGE = Path(__file__).parents[3] / "docs" / "from-opacus.md"


@pytest.mark.slow
def test_the_code_of_the_page_runs():
    programs = blocks(PAGE, "python")
    assert len(programs) >= 4
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for program in programs:
            if "import opacus" not in program or importlib.util.find_spec("opacus"):
                exec(program, names)
    assert names["epsilon"] > 0


def test_the_page_names_everything_public():
    import dpoptim.integrations.opacus as compat
    from dpoptim.integrations.opacus.engine import Settings

    page = PAGE.read_text()
    for name in [*compat.__all__, *Settings.__annotations__]:
        assert name in page, name
