"""PrivateTrainer on tiny models: what it computes, logs, evaluates and refuses."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding

import dpoptim
from dpoptim.app import add_lora
from dpoptim.integrations.hugging_face import PrivacyArguments, PrivateTrainer
from dpoptim.integrations.losses import BatchLosses, Task
from tests.app import tiny
from tests.integrations.hugging_face.cases import (
    CALIBRATED,
    EXACT,
    LABELS,
    PIECES,
    PRIVACY,
    TEXTS,
    WORDS,
    assert_equal_weights,
    causal_model,
    class_trainer,
    classifier,
    labelled,
    masked_model,
    masked_trainer,
    t5,
    tagger,
    training_args,
    unseen,
    weights,
)

# -- what is computed -------------------------------------------------------------------------------------------------


def one_step_by_hand(model: Any, batches: list[dict[str, Any]], lr: float) -> dict[str, Tensor]:
    """SGD on the mean of the losses that transformers computes for each example separately."""
    for batch in batches:
        (model(**batch).loss / len(batches)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= lr * parameter.grad
    return weights(model)


def fixed_masks() -> list[dict[str, Any]]:
    """Masked examples with different lengths and numbers of targets, one of them without targets."""
    collator = DataCollatorForLanguageModeling(WORDS, mlm_probability=0.4, seed=3)
    found = []
    for text in TEXTS[:6]:
        row = collator([WORDS(text)])
        found.append({name: values[0].tolist() for name, values in row.items()})
    found[3]["labels"] = [-100] * len(found[3]["labels"])
    return found


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "attention_mask": 0, "token_type_ids": 0, "labels": -100}
    return {
        name: torch.tensor([row[name] + [fill[name]] * (width - len(row[name])) for row in rows]) for name in rows[0]
    }


def exact_case(kind: str) -> tuple[Any, list[Any], Any, list[dict[str, Any]]]:
    """A model, its examples and collator, and one batch with labels per example."""
    if kind == "masked-lm":
        rows = fixed_masks()
        alone = [padded([row]) for row in rows if any(label != -100 for label in row["labels"])]
        return masked_model(), rows, padded, alone
    if kind == "causal-lm":
        rows = [PIECES(text) for text in TEXTS[:6]]
        collator = DataCollatorForLanguageModeling(PIECES, mlm=False)
        return causal_model(), rows, collator, [dict(collator([row])) for row in rows]
    rows = labelled()[:6]
    collator = DataCollatorWithPadding(WORDS)
    return classifier(), rows, collator, [dict(collator([dict(row)])) for row in rows]


@pytest.mark.parametrize(("kind", "parts"), [("masked-lm", 3), ("causal-lm", 1), ("classification", 3)])
def test_one_step_averages_the_gradients_of_single_examples(tmp_path, kind, parts):
    """Without noise and clipping, with any micro-batch size. A mean over the batch's tokens would differ."""
    model, rows, collator, alone = exact_case(kind)
    twin = copy.deepcopy(model)
    lr = 0.1 * len(alone) / len(rows)  # an example without targets counts in the divisor, with a gradient of 0
    args = training_args(
        tmp_path, per_device_train_batch_size=6 // parts, gradient_accumulation_steps=parts, max_steps=1,
        learning_rate=0.1, adam_beta1=0.0,
    )  # fmt: skip
    trainer: Any = PrivateTrainer(model, args, collator, rows, privacy=EXACT)
    sizes: list[int] = []
    own = trainer.loss_per_example

    def spied(model: nn.Module, batch: Any) -> Tensor:
        sizes.append(len(batch["input_ids"]))
        return own(model, batch)

    trainer.loss_per_example = spied
    trainer.train()
    assert sizes[-parts:] == [6 // parts] * parts
    assert max(sizes) <= 6 // parts, "the checks before the first step need no more memory"
    expected = one_step_by_hand(twin, alone, lr)
    for name, value in weights(model).items():
        assert torch.allclose(value, expected[name], atol=2e-6), name


def test_clipping_does_not_depend_on_micro_batches(tmp_path):
    lengths = []
    for parts in (1, 3):
        model, rows, collator, _ = exact_case("classification")
        rows = [{**row, "labels": 0} for row in rows]  # gradients that point the same way
        before = weights(model)
        args = training_args(
            tmp_path, per_device_train_batch_size=6 // parts, gradient_accumulation_steps=parts, max_steps=1,
            learning_rate=1.0, adam_beta1=0.0, max_grad_norm=1e-3,
        )  # fmt: skip
        privacy = PrivacyArguments(noise_multiplier=0.0, variant="dp_sgd", sampling="shuffled")
        trainer: Any = PrivateTrainer(model, args, collator, rows, privacy=privacy)
        trainer.train()
        counts = trainer.private_optimizer.mechanism.counts_not_private
        assert (counts.examples, counts.clipped) == (6, 6)
        lengths.append(torch.cat([(value - before[name]).flatten() for name, value in weights(model).items()]).norm())
    assert torch.allclose(lengths[0], lengths[1], rtol=1e-4)
    assert 0.5e-3 < float(lengths[0]) <= 1e-3 * (1 + 1e-5)


# -- the loop and the log ---------------------------------------------------------------------------------------------


class Spy(transformers.TrainerCallback):
    """Records everything that callbacks such as TensorBoard receive."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logged.append(dict(logs))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A finished run of 2.5 epochs of four steps, with evaluation, checkpoints and a linear schedule."""
    folder, spy, steps = tmp_path_factory.mktemp("finished"), Spy(), []
    trainer = class_trainer(
        folder, privacy=CALIBRATED, callbacks=[spy], max_steps=-1, num_train_epochs=2.5, eval_strategy="epoch",
        eval_dataset=unseen(4), logging_steps=1, save_strategy="steps", save_steps=5, lr_scheduler_type="linear",
        learning_rate=0.1,
    )  # fmt: skip
    trainer.create_optimizer().observers.append(lambda released: steps.append(released.step))
    return {"trainer": trainer, "folder": folder, "spy": spy, "steps": steps, "output": trainer.train()}


def test_every_release_belongs_to_a_step_of_the_plan(finished):
    trainer = finished["trainer"]
    assert trainer.plan.steps == 10
    assert finished["steps"] == list(range(10))
    assert finished["output"].global_step == trainer.private_optimizer.mechanism.step == 10
    assert trainer.state.epoch == pytest.approx(2.5)
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [4, 8, 10]
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert len(set(rates)) == 10, "schedules advance once per step"
    with pytest.raises(ValueError, match="Create a new PrivateTrainer"):
        trainer.train()
    with pytest.raises(ValueError, match="spends its own epsilon"):
        trainer.hyperparameter_search()


def test_the_training_loss_is_not_logged(finished):
    trainer = finished["trainer"]
    saved = json.loads((finished["folder"] / "out" / "checkpoint-10" / "trainer_state.json").read_text())
    for logged in (finished["spy"].logged, trainer.state.log_history, saved["log_history"]):
        assert len(logged) >= 4
        for entry in logged:
            assert not {"loss", "grad_norm", "train_loss", "total_flos", "not_private_loss"} & entry.keys()
    assert math.isnan(finished["output"].training_loss)
    assert "train_loss" not in finished["output"].metrics
    assert trainer.state.total_flos == 0
    assert float(trainer._tr_loss) == 0.0
    assert trainer._total_loss_scalar == 0.0


def test_logged_epsilon_rises_to_the_epsilon_of_the_plan(finished):
    trainer = finished["trainer"]
    spent = [entry["epsilon"] for entry in trainer.state.log_history if "epsilon" in entry]
    assert len(spent) == 10
    assert all(one < other for one, other in itertools.pairwise(spent))
    assert spent[-1] == pytest.approx(trainer.plan.epsilon())
    assert spent[1] == pytest.approx(trainer.plan.replace(steps=2).epsilon())


def test_correlated_noise_spends_all_epsilon_at_the_first_step(tmp_path):
    correlated = PrivacyArguments(epsilon=8.0, delta=1e-3, sampling="shuffled", noise="buffered-toeplitz:1")
    trainer = class_trainer(tmp_path, privacy=correlated, max_steps=2, logging_steps=1)
    trainer.train()
    assert [e["epsilon"] for e in trainer.state.log_history if "epsilon" in e] == [trainer.plan.epsilon()] * 2


def test_the_model_is_detached_after_training(finished):
    model = copy.deepcopy(finished["trainer"].model)
    model(**DataCollatorWithPadding(WORDS)(labelled()[:3])).loss.backward()
    assert model.classifier.weight.grad is not None


def test_log_norms_and_debug_loss(tmp_path):
    privacy = PrivacyArguments(noise_multiplier=0.6, delta=1e-3, log_norms=True, debug_loss=True)
    trainer = class_trainer(tmp_path, privacy=privacy, logging_steps=1, max_steps=2)
    output = trainer.train()
    steps = [entry for entry in trainer.state.log_history if "epsilon" in entry]
    elements = sum(parameter.numel() for parameter in trainer.model.parameters())
    level = trainer.plan.noise_multiplier * trainer.plan.clip_norm / trainer.plan.batch_size * math.sqrt(elements)
    assert steps[0]["expected_noise_norm"] == pytest.approx(level)  # the scale of the first step is 1
    for entry in steps:
        assert 0.9 < entry["released_gradient_norm"] / entry["expected_noise_norm"] < 1.1
        assert 0.3 < entry["not_private_loss"] < 3.0
        assert not {"loss", "grad_norm"} & entry.keys()
    assert 0.3 < output.training_loss < 3.0


@pytest.mark.slow
def test_empty_poisson_batches_are_steps_of_noise(tmp_path):
    """One expected example of 24 per batch: some of 40 batches are empty, and their placeholder is not counted."""
    seen: list[int] = []

    def spied(model: nn.Module, batch: Any) -> Tensor:
        losses = BatchLosses(task="text-classification")(model, batch)
        seen.append(len(losses))
        return losses

    args = training_args(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=1, max_steps=40)
    trainer: Any = PrivateTrainer(
        classifier(), args, None, labelled(), processing_class=WORDS, privacy=PRIVACY, loss_per_example=spied
    )
    trainer.train()
    assert trainer.private_optimizer.mechanism.step == 40
    assert 0 < trainer.private_optimizer.mechanism.counts_not_private.examples < sum(seen)


def test_a_failure_before_the_first_release_can_be_retried(tmp_path):
    trainer = class_trainer(tmp_path, max_steps=1)
    own = trainer.loss_per_example

    def broken(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("out of memory")

    trainer.loss_per_example = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    trainer.loss_per_example = own
    trainer.train()
    assert trainer.private_optimizer.mechanism.step == 1


def test_a_given_plan_and_optimizer(tmp_path):
    plan = dpoptim.PrivacyPlan(num_examples=24, batch_size=8, steps=2, noise_multiplier=1.0, delta=1e-3)
    model = classifier()
    optimizer = dpoptim.joint_moments(model, plan, 1e-3)
    args = training_args(tmp_path, max_steps=-1)
    trainer: Any = PrivateTrainer(
        model, args, None, labelled(), processing_class=WORDS, plan=plan, optimizers=(optimizer, None)
    )
    trainer.train()
    assert optimizer.mechanism.step == 2
    assert isinstance(trainer.plan.release, dpoptim.JointMoments)


@pytest.mark.slow
@pytest.mark.parametrize(("multiplier", "verdict"), [(30.0, "hopeless"), (1e-3, None)])
def test_a_hopeless_run_says_so_before_it_starts(tmp_path, multiplier, verdict):
    trainer = class_trainer(tmp_path, privacy=PrivacyArguments(noise_multiplier=multiplier, delta=1e-3), max_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    found = [str(w.message) for w in caught if str(w.message).startswith("outlook")]
    assert [line.split(":")[0] for line in found] == ([f"outlook {verdict}"] if verdict else [])


@pytest.mark.parametrize("logging", [{"logging_steps": 2}, {"save_strategy": "steps", "save_steps": 2}, {}])
def test_weights_that_are_not_finite_end_the_run_before_they_are_saved(tmp_path, logging):
    settings = {"max_steps": 4, "learning_rate": 1e38, "logging_strategy": "steps", "logging_steps": 100, **logging}
    with pytest.raises(ValueError, match=f"diverged by step {2 if logging else 4}: .* below 1e[+]38"):
        class_trainer(tmp_path, **settings).train()
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_a_given_plan(tmp_path):
    plan = dpoptim.PrivacyPlan(num_examples=24, batch_size=8, steps=3, noise_multiplier=1.0, delta=1e-3)
    args = training_args(tmp_path, max_steps=-1)
    trainer: Any = PrivateTrainer(classifier(), args, None, labelled(), processing_class=WORDS, plan=plan)
    trainer.train()
    assert trainer.plan is plan
    assert trainer.private_optimizer.mechanism.step == 3


@pytest.mark.slow
def test_other_columns_and_workers(tmp_path):
    rows = datasets.Dataset.from_list([{**row, "text": "unused", "number": 1.5} for row in labelled()])
    args = training_args(tmp_path, max_steps=2, dataloader_num_workers=1)
    trainer: Any = PrivateTrainer(classifier(), args, None, rows, processing_class=WORDS, privacy=PRIVACY)
    trainer.train()
    assert trainer.private_optimizer.mechanism.step == 2


# -- evaluation -------------------------------------------------------------------------------------------------------


def accuracy(predictions: Any) -> dict[str, float]:
    return {"accuracy": float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}


def test_evaluation_equals_the_stock_one_and_does_not_affect_training(tmp_path):
    held_out = unseen(7)
    trainer = class_trainer(tmp_path, eval_dataset=held_out, compute_metrics=accuracy, eval_steps=1, max_steps=3)
    trainer.create_optimizer()
    trainer.model.eval()
    with torch.enable_grad():
        found = trainer.evaluate()
        predicted = trainer.predict(held_out)
    assert trainer.private_optimizer.mechanism.counts_not_private.examples == 0
    args = training_args(tmp_path)
    stock = transformers.Trainer(
        classifier(), args, eval_dataset=held_out, processing_class=WORDS, compute_metrics=accuracy
    )
    for name, value in stock.evaluate().items():
        if name in ("eval_loss", "eval_accuracy", "epoch"):
            assert found[name] == pytest.approx(value), name
    assert (predicted.predictions == stock.predict(held_out).predictions).all()


def test_evaluation_restores_the_generators(tmp_path):
    trainer = masked_trainer(tmp_path)
    trainer.eval_dataset = [WORDS("the fox " * number) for number in (2, 3)]
    before = torch.get_rng_state()
    trainer.evaluate()  # draws masks
    assert torch.equal(torch.get_rng_state(), before)


def distinct() -> list[dict[str, Any]]:
    texts = list(dict.fromkeys(TEXTS))
    return [{**WORDS(text), "labels": LABELS[number]} for number, text in enumerate(texts)]


def test_evaluation_on_training_examples_is_refused(tmp_path):
    rows = distinct()
    for held_out, message in (
        (rows, "eval_dataset is train_dataset"),
        ({"a": unseen(1), "b": rows}, "eval_dataset is train_dataset"),
        (distinct()[::-1], "all examples of eval_dataset are training examples"),
        (datasets.Dataset.from_list(distinct()[1:]), "all examples of eval_dataset are training examples"),
    ):
        args = training_args(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=1)
        trainer = PrivateTrainer(
            model=classifier(), args=args, train_dataset=rows, eval_dataset=held_out, processing_class=WORDS,
            privacy=PRIVACY,
        )  # fmt: skip
        for call in (trainer.train, trainer.evaluate):
            with pytest.raises(ValueError, match=message):
                call()
    with pytest.raises(ValueError, match="eval_dataset is train_dataset"):
        trainer.predict(rows)


def test_shared_examples_are_reported_once(tmp_path):
    trainer = class_trainer(tmp_path)
    mixed = [*labelled()[:3], *unseen(2)]
    with pytest.warns(UserWarning, match="3 of the 5 examples of eval_dataset"):
        trainer.get_eval_dataloader(mixed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.get_eval_dataloader(mixed)
        trainer.get_eval_dataloader(unseen(2))
        debugging = PrivacyArguments(noise_multiplier=0.6, delta=1e-3, debug_loss=True)
        debugged = class_trainer(tmp_path, privacy=debugging)
        debugged.get_eval_dataloader(debugged.train_dataset)


def test_training_examples_are_read_once_to_compare_them(tmp_path):
    class Rows(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.rows, self.reads = labelled(), 0

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, place: int) -> Any:
            self.reads += 1
            return self.rows[place]

    rows = Rows()
    trainer = PrivateTrainer(
        model=classifier(), args=training_args(tmp_path), train_dataset=rows, processing_class=WORDS, privacy=PRIVACY,
        eval_dataset={"one": unseen(2), "other": unseen(3)},
    )  # fmt: skip
    trainer.get_train_dataloader()
    reads = rows.reads
    assert len(rows) <= reads < 2 * len(rows)
    trainer.get_eval_dataloader(unseen(4))
    assert rows.reads == reads
    trainer.train_dataset = [*unseen(4), *labelled()]
    with pytest.warns(UserWarning, match="3 of the 3 examples of eval_dataset"):  # the new ones are read
        trainer.get_eval_dataloader(unseen(3))


@pytest.mark.slow
def test_selection_by_scores_warns(tmp_path):
    with pytest.warns(UserWarning, match="the guarantee does not cover"):
        trainer = class_trainer(
            tmp_path, eval_dataset=unseen(4), eval_strategy="steps", eval_steps=2, save_strategy="steps",
            save_steps=2, load_best_model_at_end=True,
        )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None


# -- mixing and state -------------------------------------------------------------------------------------------------


def test_losses_that_mix_examples_are_refused(tmp_path):
    def stock(model: nn.Module, batch: Any) -> Tensor:
        return model(**batch).loss[None]

    def averaged(model: nn.Module, batch: Any) -> Tensor:
        labels = batch.pop("labels")
        return nn.functional.cross_entropy(model(**batch).logits, labels)

    def normalised(model: nn.Module, batch: Any) -> Tensor:
        losses = BatchLosses(task="text-classification")(model, batch)
        return losses / losses.detach().sum()

    for loss, message in ((stock, r"shape \(1,\)"), (averaged, r"shape \(\)"), (normalised, "changes with")):
        trainer = PrivateTrainer(
            classifier(), training_args(tmp_path), None, labelled(), processing_class=WORDS, privacy=PRIVACY,
            loss_per_example=loss,
        )  # fmt: skip
        with pytest.raises(ValueError, match=message):
            trainer.train()
    unlabelled = [WORDS(text) for text in TEXTS]
    trainer = PrivateTrainer(
        classifier(), training_args(tmp_path), None, unlabelled, processing_class=WORDS, privacy=PRIVACY
    )
    with pytest.raises(ValueError, match="has no labels"):
        trainer.train()


class Counting(nn.Module):
    """Counts tokens of private batches in a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(len(WORDS), 8, padding_idx=0), nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(len(WORDS)))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        self.seen.index_add_(0, input_ids.flatten(), torch.ones(input_ids.numel()))
        return self.out(self.table(input_ids).sum(1))


def test_statistics_of_private_batches_are_refused(tmp_path):
    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        return nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"], reduction="none")

    model = Counting()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = PrivateTrainer(
        model=model, args=training_args(tmp_path, max_steps=3, save_strategy="steps", save_steps=1),
        train_dataset=labelled(), processing_class=WORDS, privacy=PRIVACY, loss_per_example=loss,
    )  # fmt: skip
    with pytest.raises(ValueError, match="buffer 'seen'"):
        trainer.train()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert not list(tmp_path.rglob("model.safetensors"))


# -- precision, memory, adapters, models ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("make", [masked_trainer, class_trainer])
def test_bf16_runs_under_autocast_and_keeps_full_weights(tmp_path, make):
    trainer = make(tmp_path, bf16=True, max_steps=2)
    before = weights(trainer.model)
    trainer.train()
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    after = weights(trainer.model)
    assert all(torch.isfinite(value).all() for value in after.values())
    assert any(not torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.slow
def test_a_model_in_bf16_keeps_its_weights_and_full_moments(tmp_path):
    trainer = class_trainer(tmp_path, model=classifier().to(torch.bfloat16), max_steps=2, save_strategy="steps")
    before = weights(trainer.model)
    trainer.train()
    assert all(parameter.dtype == torch.bfloat16 for parameter in trainer.model.parameters())
    assert any(not torch.equal(value, before[name]) for name, value in weights(trainer.model).items())
    moments = trainer.private_optimizer.state_dict()["state"][0]["second_moment"]
    assert moments.dtype == torch.float32


@pytest.mark.slow
def test_bf16_is_close_to_full_precision(tmp_path):
    steps = []
    for bf16 in (False, True):
        model, rows, collator, _ = exact_case("causal-lm")
        before = weights(model)
        args = training_args(tmp_path, max_steps=1, learning_rate=0.1, adam_beta1=0.0, bf16=bf16)
        PrivateTrainer(model, args, collator, rows, privacy=EXACT).train()
        steps.append(torch.cat([(value - before[name]).flatten() for name, value in weights(model).items()]))
    assert 0 < float((steps[0] - steps[1]).norm()) < 0.03 * float(steps[0].norm())


@pytest.mark.slow
def test_gradient_checkpointing_gives_the_same_step(tmp_path):
    found = []
    for checkpointing in (False, True):
        model, rows, collator, _ = exact_case("masked-lm")
        args = training_args(tmp_path, max_steps=1, gradient_checkpointing=checkpointing, adam_beta1=0.0)
        PrivateTrainer(model, args, collator, rows, privacy=EXACT).train()
        found.append(weights(model))
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], atol=1e-6), name


def test_checkpointed_micro_batches_have_bounded_gradient_factors(tmp_path):
    trainers = [
        class_trainer(tmp_path, per_device_train_batch_size=6, gradient_checkpointing=on) for on in (True, False)
    ]
    memory = 1 << 30  # the parameters of a tiny model take less
    for factor_bytes, sizes in ((0, (6, 6)), (memory // 7, (6, 6)), (memory // 3, (3, 6)), (2 * memory, (1, 6))):
        assert tuple(trainer._micro_batch_size(factor_bytes) for trainer in trainers) == sizes


def test_the_loader_uses_the_bounded_micro_batch(tmp_path, monkeypatch):
    seen = []

    def always_two(self: PrivateTrainer, factor_bytes: int) -> int:
        seen.append(factor_bytes)
        return 2

    monkeypatch.setattr(PrivateTrainer, "_micro_batch_size", always_two)
    trainer = class_trainer(tmp_path, per_device_train_batch_size=6, max_steps=1)
    trainer.train()
    assert trainer._steps.loader.micro_batch_size == 2
    assert 1_000 < seen[0] < 1_000_000


@pytest.mark.slow
def test_lora_trains_only_its_adapters_and_resumes_bitwise(tmp_path):
    def model() -> Any:
        return add_lora(classifier(dropout=0.1), Task.TEXT_CLASSIFICATION, rank=2)

    first = model()
    before = weights(first)
    class_trainer(tmp_path, model=first, max_steps=4, save_strategy="steps", save_steps=2).train()
    straight = weights(first)
    changed = {name for name, value in straight.items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name or "classifier" in name for name in changed)
    second = model()
    trainer = class_trainer(tmp_path, model=second, max_steps=4, save_strategy="steps", save_steps=2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    for name in changed:
        assert torch.equal(weights(second)[name], straight[name]), name


@pytest.mark.slow
def test_lora_of_a_decoder_in_bf16_with_activation_checkpoints(tmp_path):
    model = add_lora(tiny.causal_models(len(PIECES))["Llama"], Task.CAUSAL_LM, rank=2)
    args = training_args(tmp_path, max_steps=2, bf16=True, gradient_checkpointing=True)
    collator = DataCollatorForLanguageModeling(PIECES, mlm=False)
    trainer: Any = PrivateTrainer(model, args, collator, [PIECES(text) for text in TEXTS], privacy=PRIVACY)
    assert trainer.loss_per_example == BatchLosses(task="causal-lm", targets_only=True)
    trainer.train()
    assert trainer.private_optimizer.mechanism.step == 2
    assert all(value.abs().sum() > 0 for name, value in model.named_parameters() if "lora_B" in name)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "classes"), [(tagger, 4), (t5, 50)])
def test_taggers_and_encoder_decoders_train(make, classes, tmp_path: Path):
    generator = torch.Generator().manual_seed(1)
    rows = [
        {"input_ids": torch.randint(3, 50, (6,), generator=generator), "attention_mask": torch.ones(6).long(),
         "labels": torch.randint(1, classes, (6,), generator=generator)}
        for _ in range(40)
    ]  # fmt: skip
    model = make()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    args = training_args(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=1, max_steps=2)
    PrivateTrainer(model, args, train_dataset=rows, privacy=PRIVACY).train()
    assert all(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_averaged_weights_are_scored_and_saved(tmp_path):
    """Checkpoints have the weights of the last step, so that the run resumes."""
    privacy = dataclasses.replace(PRIVACY, averaged=0.9)
    trainer = class_trainer(
        tmp_path, privacy=privacy, eval_dataset=unseen(6), max_steps=4, save_steps=4, save_strategy="steps"
    )
    trainer.train()
    last = weights(trainer.model)
    trainer.save_model(str(tmp_path / "model"))
    saved = type(trainer.model).from_pretrained(tmp_path / "model")
    with trainer.private_optimizer.averaged_weights():
        assert_equal_weights(weights(saved), weights(trainer.model))
        expected = weights(trainer.model)
    assert_equal_weights(weights(trainer.model), last)
    assert any(not torch.equal(expected[name], last[name]) for name in last)
    assert_equal_weights(weights(type(saved).from_pretrained(Path(trainer.args.output_dir, "checkpoint-4"))), last)

    scores = trainer.evaluate()
    trainer.model.load_state_dict(expected)
    trainer.private_optimizer.averaged = None
    assert scores["eval_loss"] == trainer.evaluate()["eval_loss"]
