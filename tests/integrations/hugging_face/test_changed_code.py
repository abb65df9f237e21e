"""PrivateTrainer: steps are not repeated by other code, and generators of one's own are refused."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.random import default_rng
from transformers import DataCollatorForLanguageModeling

from dpoptim.data.rng_check import check_generators
from dpoptim.integrations.hugging_face import PrivateTrainer
from dpoptim.integrations.hugging_face.collator_check import check_repeats
from dpoptim.noise import NoiseKey
from tests.app import tiny
from tests.integrations.hugging_face.cases import PRIVACY, TEXTS, WORDS, masked_model, training_args

ROWS = [WORDS(text) for text in TEXTS]
KEY = NoiseKey.from_bytes(bytes(32))


def stock(tokenizer: Any = WORDS, **options: Any) -> Any:
    return DataCollatorForLanguageModeling(tokenizer, **options)


def trainer(folder: Path, collator: Any, *, model: Any = None, loss: Any = None, **changes: Any) -> Any:
    return PrivateTrainer(
        model=masked_model() if model is None else model,
        args=training_args(folder, save_strategy="steps", save_steps=2, **changes),
        train_dataset=ROWS, data_collator=collator, processing_class=WORDS, privacy=PRIVACY, loss_per_example=loss,
    )  # fmt: skip


class Own:
    """A collator that maps tokens by a table."""

    def __init__(self, table: Any = None, **held: Any) -> None:
        self.inner, self.table = stock(), table
        self.__dict__.update(held)

    def __call__(self, rows: Any) -> Any:
        batch = self.inner(rows)
        if self.table is not None:
            batch["input_ids"] = self.table[batch["input_ids"]]
        return batch


# -- random numbers of one's own -----------------------------------------------------------------------------------


def test_a_seed_of_the_collator_is_refused_at_once(tmp_path):
    with pytest.raises(
        ValueError, match=r"seed=42: .* leave out seed=, masks are drawn from the run's secret key"
    ) as no:
        trainer(tmp_path, stock(seed=42))
    assert "\n" not in str(no.value)


GENERATORS: dict[str, Any] = {
    "numpy": lambda: np.random.default_rng(0), "numpy, old": lambda: np.random.RandomState(0),
    "python": lambda: random.Random(0), "torch": lambda: torch.Generator().manual_seed(0),
}  # fmt: skip


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_are_found_wherever_they_are(kind, tmp_path):
    generator = GENERATORS[kind]()

    def closed(rows: Any) -> Any:
        return generator, rows

    with pytest.raises(ValueError, match=r"data_collator\.g is a .*: what it draws comes from a public seed"):
        trainer(tmp_path, Own(g=generator))
    module = torch.nn.Dropout()
    module.own = generator
    holders = (closed, functools.partial(stock, closed), Own(parts=[{"a": generator}]), Own(inner=Own(g=generator)),
               torch.nn.Sequential(module), Own(g=generator).__call__)  # fmt: skip
    for holder in holders:
        with pytest.raises(ValueError, match="comes from a public seed"):
            check_generators(data_collator=holder)


def test_the_generators_that_are_seeded_are_no_ones_own():
    def draws(rows: Any) -> Any:
        return random.random(), np.random.rand(), torch.rand(1), rows

    check_generators(data_collator=draws, loss_per_example=functools.partial(random.random), model=masked_model(0.1))
    check_generators(data_collator=Own(draw=random.shuffle), loss_per_example=Own(g=torch.default_generator))


def test_a_collator_gives_the_same_under_the_same_seeds(tmp_path):
    calls: list[int] = []

    def counting(rows: Any) -> Any:
        calls.append(1)
        batch = stock()(rows)
        batch["input_ids"][0, 0] = len(calls)
        return batch

    with pytest.raises(ValueError, match="another batch of the same examples each time") as refused:
        trainer(tmp_path, counting).train()
    assert "\n" not in str(refused.value)
    state = torch.get_rng_state()
    check_repeats(stock(), ROWS, KEY)
    assert torch.equal(state, torch.get_rng_state())


GENERATOR = torch.Generator().manual_seed(0)


def drops(x: Any) -> Any:
    return x * torch.rand(x.shape, generator=GENERATOR)


class ReadsGlobal(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return drops(x)


class OfItsClass(torch.nn.Module):
    own = torch.Generator().manual_seed(0)

    def forward(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize("layer", [ReadsGlobal, OfItsClass])
def test_generators_of_a_layers_code_are_found(layer, tmp_path):
    model = masked_model()
    model.bert.embeddings.dropout = layer()
    with pytest.raises(ValueError, match=rf"model\.bert\.embeddings\.dropout\.{layer.__name__}.* public seed"):
        trainer(tmp_path, stock(), model=model)
    with pytest.raises(ValueError, match="public seed"):
        check_generators(data_collator=Own(inner=layer))


def seeds_and_puts_back(rows: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return stock()(rows)


def seeds_numpy(rows: Any) -> Any:
    transformers.set_seed(0)
    return stock()(rows)


def sets_a_state(rows: Any) -> Any:
    random.setstate(STATE)
    return stock()(rows)


def fresh(rows: Any) -> Any:
    return {**stock()(rows), "u": torch.from_numpy(default_rng(0).random(2))}


def fresh_of_torch(rows: Any) -> Any:
    return {**stock()(rows), "u": torch.rand(2, generator=torch.Generator())}


def fresh_of_python(rows: Any) -> Any:
    return {**stock()(rows), "u": torch.tensor(random.Random(0).random())}


STATE = random.getstate()
SEEDS = {
    "torch.manual_seed": seeds_and_puts_back, "random.seed": seeds_numpy, "random": sets_a_state,
    "numpy.random.default_rng": fresh, "torch.Generator": fresh_of_torch, "random.Random": fresh_of_python,
}  # fmt: skip


@pytest.mark.parametrize("name", SEEDS)
def test_public_seeds_inside_a_call_are_refused(name):
    state = random.getstate(), torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"data_collator makes or seeds a generator .* \({name}\)") as no:
        check_repeats(SEEDS[name], ROWS, KEY)
    assert "\n" not in str(no.value)
    assert state[0] == random.getstate()
    assert torch.equal(state[1], torch.get_rng_state())
    assert isinstance(np.random.default_rng(0), np.random.Generator)
    assert default_rng is np.random.default_rng, "put back where it was imported"


# -- other code ----------------------------------------------------------------------------------------------------


def weighted(weight: torch.Tensor) -> Any:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
        return (losses * weight[batch["labels"].clamp(min=0)]).sum(1)

    return loss


CALLS: list[int] = []


def annealed(model: Any, batch: Any) -> torch.Tensor:
    """Nothing in its code or its arguments tells where it stands."""
    CALLS.append(1)
    return weighted(ONES * len(CALLS))(model, batch)


def hooked() -> Any:
    model = masked_model()
    model.bert.embeddings.register_forward_hook(lambda module, args, output: output * 2)
    return model


def rescaled() -> Any:
    model = masked_model()
    model.bert.encoder.layer[0].attention.self.scaling = 5.0
    return model


def other_mask() -> Any:
    words = tiny.wordpiece()
    words.mask_token = "[UNK]"
    return words


ONES = torch.ones(len(WORDS))
TABLE = torch.arange(len(WORDS))
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor in the collator": ({"collator": Own(TABLE)}, {"collator": Own(TABLE.flip(0))}),
    "tokenizer": ({"collator": stock()}, {"collator": stock(other_mask())}),
    "option": ({"collator": stock()}, {"collator": stock(mlm_probability=0.4)}),
    "closure": ({"loss": weighted(ONES)}, {"loss": weighted(ONES * 1.001)}),
    "hook": ({}, {"model": hooked}),
    "attribute": ({}, {"model": rescaled}),
}


def made(folder: Path, parts: dict[str, Any]) -> Any:
    model = parts["model"]() if "model" in parts else None
    return trainer(folder, parts.get("collator") or stock(), model=model, loss=parts.get("loss"), max_steps=8)


@pytest.mark.parametrize("size", [1, 4])
def test_a_loss_that_counts_its_calls_is_refused(size, tmp_path):
    with pytest.raises(ValueError, match="gives other losses each time for the same batch under the same seeds") as no:
        trainer(tmp_path, stock(), loss=annealed, per_device_train_batch_size=size).train()
    assert "\n" not in str(no.value)


@pytest.mark.parametrize("what", CHANGES)
def test_other_code_does_not_repeat_a_step(what, tmp_path):
    first, second = CHANGES[what]
    made(tmp_path, first).train()
    with pytest.raises(ValueError, match=r"step [3-8] was released before, and its gradients come out otherwise") as no:
        made(tmp_path, second).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert "\n" not in str(no.value)
    if first != second:
        made(tmp_path, first).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


def test_a_collator_may_change_its_examples():
    rows = [{"input_ids": [1, 2]}, {"input_ids": [3, 4]}]
    check_repeats(lambda examples: [example.pop("input_ids") for example in examples], rows, KEY)
    assert rows == [{"input_ids": [1, 2]}, {"input_ids": [3, 4]}]
