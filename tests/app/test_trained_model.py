"""The model of a finished run loads with the scores it had, LoRA factors included, and can be trained further."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dpoptim.app import (
    Recipe,
    evaluate,
    load_tokenizer,
    load_trained,
    prepare,
    prepare_run,
    read_records,
    train,
)
from dpoptim.app.models.loading import task_of_model
from dpoptim.integrations.losses import Task
from tests.app import tiny
from tests.app.runs import copy_run, log_of, write_bert, write_texts

FEW: dict[str, Any] = {
    "epsilon": 8.0, "noise": "independent", "sampling": "shuffled", "steps": 3, "batch_size": 8, "learning_rate": 0.5,
}  # fmt: skip


def write_gpt2(folder: Path) -> str:
    tokenizer = tiny.bytepair()
    torch.manual_seed(0)
    return tiny.saved(folder, transformers.GPT2LMHeadModel(tiny.gpt2_config(len(tokenizer))), tokenizer)


def write_labelled(path: Path) -> str:
    texts = [json.loads(line)["text"] for line in Path(write_texts(path)).read_text().splitlines()]
    rows = ({"text": text, "label": "abc"[place % 3]} for place, text in enumerate(texts))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def others(path: str) -> str:
    """Each text longer by a few words: none is a training record."""
    file = Path(path)
    file.write_text(file.read_text().replace('{"text": "', '{"text": "noise over the lazy dog '))
    return path


CASES: dict[str, tuple[Callable[[Path], str], Callable[[Path], str], dict[str, Any]]] = {
    "lora-classification": (write_bert, write_labelled, {"lora_rank": 2, "task": "text-classification"}),
    "lora-causal": (write_gpt2, write_texts, {"lora_rank": 2}),
    "lora-masked": (write_bert, write_texts, {"lora_rank": 2}),
    "whole-classification": (write_bert, write_labelled, {"task": "text-classification"}),
}


@pytest.mark.parametrize(
    "case", [case if case == "lora-classification" else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_loaded_model_reproduces_the_scores_of_the_run(tmp_path, case):
    write_model, write_data, settings = CASES[case]
    recipe = Recipe(
        model=write_model(tmp_path / "base"),
        data=write_data(tmp_path / "data.jsonl"),
        validation_data=others(write_data(tmp_path / "other.jsonl")),
        **{**FEW, **settings},
    )
    train(recipe, tmp_path / "run")
    scored = [entry["loss"] for entry in log_of(tmp_path / "run") if entry["kind"] == "evaluation"]

    model = load_trained(tmp_path / "run")
    assert not model.training
    trained, start = dict(model.named_parameters()), prepare_run(recipe).model.named_parameters()
    before = {name.removeprefix("base_model.model.").replace(".base_layer", ""): weight for name, weight in start}
    moves = [float((trained[name] - before[name]).detach().abs().max()) for name in trained.keys() & before]
    assert max(moves) > 0.05, "training moved the model"
    task = Task(recipe.task) if recipe.task else task_of_model(recipe.model)
    tokenizer = load_tokenizer(tmp_path / "run" / "model")
    records = read_records(recipe.validation_data or "")
    again = evaluate(prepare(task=task, model=model, tokenizer=tokenizer, records=records))
    assert again.loss == pytest.approx(scored[-1], rel=1e-5)

    further = recipe.replace(model=str(tmp_path / "run" / "model"), task=None)
    setup = prepare_run(further)
    assert setup.recipe.task == task.value, "the folder names its task"
    if recipe.lora_rank is None:
        assert all(parameter.requires_grad for parameter in setup.model.parameters())


def test_built_in_model_is_loaded_with_its_sizes(trained_run):
    model = load_trained(trained_run)
    assert model(torch.zeros(5, 6)).shape == (5, 2)
    saved = torch.load(trained_run / "model" / "model.pt", weights_only=True)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


FOREIGN = (b"hello\n", b"age,ward\n30,a\n", pickle.dumps(print, protocol=4))


@pytest.mark.filterwarnings("error")
def test_broken_model_is_named(trained_run, tmp_path):
    copy = copy_run(trained_run, tmp_path / "run")
    file = copy.model / "model.pt"
    whole = file.read_bytes()
    for content in (b"", whole[:100], pickle.dumps(print, protocol=2), pickle.dumps([1], protocol=2), *FOREIGN):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.pt cannot be read \(.+\)\. Restore the original\.$") as error:
            load_trained(copy.path)
        assert "\n" not in str(error.value)
        assert "weights_only" not in str(error.value), "torch's advice would run the code in the file"


def test_missing_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a run directory"):
        load_trained(tmp_path)
    (tmp_path / "recipe.toml").write_text('model = "mlp"\ndata = "a.csv"\nepsilon = 1\n')
    with pytest.raises(ValueError, match="has no model yet; finish the run with: dpoptim train --resume"):
        load_trained(tmp_path)


def test_lora_with_new_weights_is_refused():
    with pytest.raises(ValueError, match="from_scratch=true and lora_rank=2"):
        Recipe(model="m", data="d", epsilon=1.0, lora_rank=2, from_scratch=True)
