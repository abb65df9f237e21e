"""PrivateTrainer with CUDA graphs: the same training, and a resumed run repeats its steps. Tapes replace graphs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding

from dpoptim.integrations.hugging_face import PrivacyArguments, PrivateTrainer, trainer
from dpoptim.integrations.hugging_face.batch_shapes import BatchShapes
from dpoptim.privacy.step_ledger import released_count
from tests.app.runs import fixed_keys
from tests.clipping.tape import never_capture, tape_graphs
from tests.integrations.hugging_face.cases import (
    PIECES,
    PRIVACY,
    TEXTS,
    WORDS,
    assert_equal_weights,
    causal_model,
    classifier,
    labelled,
    masked_model,
    training_args,
    weights,
)

LONGEST = max(len(WORDS(text)["input_ids"]) for text in TEXTS)
MASKING, NEXT = DataCollatorForLanguageModeling(WORDS), DataCollatorForLanguageModeling(PIECES, mlm=False)
DP_SGD = PrivacyArguments(noise_multiplier=0.6, delta=1e-3, variant="dp_sgd")
CASES: dict[str, Any] = {
    "masked-lm": lambda: (masked_model(dropout=0.1), [WORDS(text) for text in TEXTS], MASKING),
    "causal-lm": lambda: (causal_model(), [PIECES(text) for text in TEXTS], NEXT),
    "classes": lambda: (classifier(dropout=0.1), labelled(), DataCollatorWithPadding(WORDS)),
}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch) -> None:
    """Pad widths and rows, which a CPU does not need."""
    prepare = PrivateTrainer._check_records

    def check(self: Any, *args: Any) -> None:
        prepare(self, *args)
        self._shapes = BatchShapes(self.model, self.loss_per_example, LONGEST)

    monkeypatch.setattr(PrivateTrainer, "_check_records", check)
    monkeypatch.setattr(trainer, "part_multiple", lambda batch_size: 4)


def trained(
    folder: Path, kind: str, *, at: int | None = None, collator: Any = None, loss_per_example: Any = None,
    privacy: Any = PRIVACY, **changes: Any,
) -> Any:  # fmt: skip
    model, rows, own = CASES[kind]()
    model.get_input_embeddings().requires_grad_(False)  # on a CPU the gradient of a table waits for the tokens
    args = training_args(
        folder, per_device_train_batch_size=3, gradient_accumulation_steps=3, max_steps=6, save_strategy="steps",
        save_steps=3, lr_scheduler_type="linear", **changes,
    )  # fmt: skip
    found = PrivateTrainer(model, args, collator or own, rows, privacy=privacy, loss_per_example=loss_per_example)
    found.train(resume_from_checkpoint=None if at is None else str(folder / "out" / f"checkpoint-{at}"))
    return found


@pytest.mark.parametrize("kind", CASES)
def test_a_run_with_graphs_resumes_without_them(kind, tmp_path):
    """Bit for bit: the ledger refuses a step that differs."""
    ends = []
    for at, patch in ((None, tape_graphs), (3, never_capture)):
        with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings(record=True) as warned:
            replays = patch(patched)
            ends.append(weights(trained(tmp_path, kind, at=at).model))
        assert replays is None or sum(replays) >= 6
        assert any("later shapes run without graphs" in str(w.message) for w in warned) == (at == 3)
    assert_equal_weights(*ends)
    (ledger,) = (tmp_path / "out.secret").glob("*.steps")
    assert released_count(ledger) == 6


def test_graphs_train_as_a_plain_backward_does(tmp_path, monkeypatch):
    """Up to rounding: the plain backward has no padding rows."""
    fixed_keys(monkeypatch)
    plain = trained(tmp_path / "plain", "causal-lm", privacy=DP_SGD, learning_rate=1.0)
    assert plain._captured.graphs == 0
    replays = tape_graphs(monkeypatch)
    found = trained(tmp_path / "graphs", "causal-lm", privacy=DP_SGD, learning_rate=1.0)
    assert found._captured.graphs == len(replays)
    assert sum(replays) >= 6
    expected = weights(plain.model)
    for name, value in weights(found.model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("extra", [torch.tensor(2.0), torch.ones(2)], ids=["a scalar", "class weights"])
def test_a_batch_with_shared_values_runs_without_a_graph(extra, tmp_path, monkeypatch):
    replays = tape_graphs(monkeypatch)

    def collate(rows: list[Any]) -> dict[str, Any]:
        return {**DataCollatorWithPadding(WORDS)(rows), "factor": extra.clone()}

    def losses(model: Any, batch: Any) -> Tensor:
        labels, factor = batch.pop("labels"), batch.pop("factor")
        each = torch.nn.functional.cross_entropy(model(**batch).logits, labels, reduction="none")
        return each * (factor[labels] if factor.ndim else factor)

    found = trained(tmp_path, "classes", collator=collate, loss_per_example=losses)
    assert found.state.global_step == 6
    assert found._captured is None
    assert replays == []
