"""Recipes: what they refuse, their defaults, their files, their flags."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from dpoptim import arguments
from dpoptim.app import Recipe, read_recipe
from dpoptim.app.recipes import columns as columns_module
from dpoptim.app.recipes import recipe as recipe_module
from dpoptim.app.recipes.defaults import learning_rate_at, plan_of, with_defaults
from dpoptim.app.recipes.recipe import ADJACENCIES, TASKS, VARIANTS, flags
from dpoptim.integrations import named_settings
from dpoptim.integrations.losses import Task
from dpoptim.integrations.named_settings import CLIP_NORM, name_of_noise, noise_of, noise_words, sampling_of
from dpoptim.noise import BandedToeplitz, BufferedToeplitz, Independent
from dpoptim.privacy import Adjacency, CyclicPoisson, Poisson, Shuffled

LEAST = {"model": "mlp", "data": "rows.csv", "epsilon": 2.0}


def made(**changes) -> Recipe:
    return Recipe(**{**LEAST, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"epsilon": 0.0}, "Expected epsilon > 0, got 0.0"),
        ({"epsilon": -1}, "Expected epsilon > 0, got -1"),
        ({"epsilon": float("nan")}, "Expected epsilon > 0, got nan"),
        ({"epsilon": float("inf")}, "Expected epsilon > 0, got inf"),
        ({"epsilon": None}, "epsilon is missing"),
        ({"noise_multiplier": 1.0}, "epsilon=2.0 and noise_multiplier=1.0 were both given"),
        ({"delta": 1.0}, "Expected delta > 0 and < 1, got 1.0"),
        ({"delta": 0}, "Expected delta > 0 and < 1, got 0"),
        ({"task": "translation"}, "got 'translation'"),
        ({"variant": "adam"}, "Expected variant to be one of 'scale_then_privatize'"),
        ({"batch_size": 0}, "Expected batch_size to be a whole number >= 1, got 0"),
        ({"batch_size": 2.5}, "Expected batch_size to be a whole number >= 1, got 2.5"),
        ({"steps": True}, "Expected steps to be a whole number >= 1, got True"),
        ({"steps": 2**63}, "Expected steps < 9.22337e+18"),
        ({"steps": 5, "epochs": 2}, "steps=5 and epochs=2"),
        ({"validation_fraction": 1.0}, "Expected validation_fraction >= 0 and < 1, got 1.0"),
        ({"validation_fraction": 0.1, "validation_data": "v.csv"}, "validation_data='v.csv'"),
        ({"betas": [0.9]}, "betas=[0.9]"),
        ({"betas": [0.9, 1.0]}, "Expected betas[1] >= 0 and < 1, got 1.0"),
        ({"debug": "yes"}, "debug='yes'"),
        ({"dtype": "fp16"}, "Expected dtype to be one of 'fp32', 'bf16', got 'fp16'"),
        ({"schedule": "cyclic"}, "got 'cyclic'"),
        ({"model": ""}, "model=''"),
        ({"seed": -1}, "Expected seed to be a whole number >= 0, got -1"),
        ({"adjacency": "add_remove"}, "num_examples is missing"),
        ({"adjacency": "add_remove", "num_examples": 9, "validation_fraction": 0.1}, "validation_fraction=0.1"),
    ],
)
def test_bad_values_are_refused_in_one_line(changes, named):
    with pytest.raises(ValueError, match=re.escape(named)) as refused:
        made(**changes)
    assert "\n" not in str(refused.value)


def test_an_unknown_setting_is_refused_with_the_nearest_name(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text('model = "mlp"\ndata = "rows.csv"\nepsilon = 1\nbatchsize = 3\n')
    with pytest.raises(ValueError, match="batchsize=3 is not a setting of a recipe; did you mean batch_size"):
        read_recipe(file)


def test_bad_recipe_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_recipe(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("model = ")
    with pytest.raises(ValueError, match="is not a TOML file"):
        read_recipe(broken)
    with pytest.raises(ValueError, match="cannot be read"):
        read_recipe(tmp_path)
    broken.write_text('model = "mlp"\ndata = "d.csv"\nepsilon = "8"')
    with pytest.raises(ValueError, match="Expected epsilon > 0, got '8', which is text"):
        read_recipe(broken)
    broken.write_text("epsilon = 1.0")
    with pytest.raises(ValueError, match="model is missing"):
        read_recipe(broken)
    broken.write_text('data = "d.csv"\n[columns]\nage = ["a"]\nmodel = "mlp"')
    with pytest.raises(ValueError, match=r"model is under \[columns\]; move it above that line"):
        read_recipe(broken)


def test_overrides_replace_their_rivals(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_text('model = "mlp"\ndata = "rows.csv"\nnoise_multiplier = 1.0\nepochs = 3\nseed = 4\n')
    recipe = read_recipe(file, epsilon=3.0, steps=7, learning_rate=None)
    assert (recipe.epsilon, recipe.noise_multiplier, recipe.steps, recipe.epochs, recipe.seed) == (
        3.0,
        None,
        7,
        None,
        4,
    )


@pytest.mark.parametrize("text", ["plain", 'with "quotes" and \\ and \n', "ünïcode \x7f \x01"])
def test_toml_round_trip(text):
    recipe = made(data=text, label_names=("a", text), betas=(0.5, 0.75), learning_rate=1e-05, debug=True)
    assert Recipe.from_dict(tomllib.loads(recipe.to_toml())) == recipe


def test_defaults_fill_every_size():
    found = with_defaults(made(), task=Task.TABULAR_CLASSIFICATION, num_examples=1000, device=torch.device("cpu"))
    assert (found.batch_size, found.steps, found.delta, found.clip_norm) == (64, 313, 1e-4, 3.0)
    assert (found.evaluate_every, found.checkpoint_every, found.validation_fraction) == (32, 32, 0.05)
    assert (found.dtype, found.micro_batch_size, found.micro_batch_tokens) == ("fp32", 1024, None)
    text = with_defaults(made(), task=Task.MASKED_LM, num_examples=1000, device=torch.device("cpu"))
    assert (text.micro_batch_size, text.micro_batch_tokens) == (None, 2**13)
    two = with_defaults(made(epochs=2.0), task=Task.MASKED_LM, num_examples=1000, device=torch.device("cpu"))
    assert two.steps == 32, "rounded up"
    own = made(batch_size=10, steps=3, delta=1e-9, learning_rate=0.0, evaluate_every=1)
    again = with_defaults(own, task=Task.MASKED_LM, num_examples=1000, device=torch.device("cpu"))
    assert (again.batch_size, again.steps, again.delta, again.learning_rate, again.evaluate_every) == (
        10,
        3,
        1e-9,
        0,
        1,
    )


def test_defaults_of_tables_follow_the_model():
    found = [
        with_defaults(made(model=model), task=Task.TABULAR_REGRESSION, num_examples=1000, device=torch.device("cpu"))
        for model in ("mlp", "linear")
    ]
    assert [(one.learning_rate, one.clip_norm) for one in found] == [(0.1, 3.0), (0.1, 1.0)]
    starts = [
        with_defaults(made(model=model, clipping="adaptive"), task=task, num_examples=1000, device=torch.device("cpu"))
        for model in ("mlp", "linear")
        for task in (Task.TABULAR_CLASSIFICATION, Task.TABULAR_REGRESSION)
    ]
    assert [one.clip_norm for one in starts] == [2.0, 0.1, 1.0, 0.1]
    for other in ({"noise": "independent"}, {"sampling": "auto"}, {"epsilon": None, "noise_multiplier": 1.0}):
        recipe = made(model="mlp").replace(**other)
        one = with_defaults(recipe, task=Task.TABULAR_REGRESSION, num_examples=1000, device=torch.device("cpu"))
        assert one.learning_rate == 0.03
    text = with_defaults(made(model="gpt2"), task=Task.CAUSAL_LM, num_examples=1000, device=torch.device("cpu"))
    assert (text.learning_rate, text.clip_norm, text.steps) == (2e-3, 0.1, 157)


def test_defaults_are_idempotent():
    once = with_defaults(made(), task=Task.MASKED_LM, num_examples=777, device=torch.device("cpu"))
    assert with_defaults(once, task=Task.MASKED_LM, num_examples=777, device=torch.device("cpu")) == once


def test_default_delta_is_at_most_a_tenth_of_one_over_n():
    for count in (8, 9, 10, 11, 999, 1000, 1001, 123_456):
        delta = with_defaults(made(), task=Task.MASKED_LM, num_examples=count, device=torch.device("cpu")).delta
        assert delta is not None
        assert 0.01 / count < delta * (1 + 1e-9)
        assert delta <= 0.1 / count * (1 + 1e-9)


def test_names_of_noise_and_sampling():
    assert noise_of("independent") == Independent()
    assert noise_of("banded-toeplitz:4") == BandedToeplitz(bands=4)
    for name in ("independent", "square-root", "banded-toeplitz:4", "buffered-toeplitz:2", "banded-inverse:8"):
        assert name_of_noise(noise_of(name)) == name
    assert sampling_of("cyclic", BandedToeplitz(bands=4)) == CyclicPoisson(bands=4)
    assert sampling_of("cyclic:6", BandedToeplitz(bands=4)) == CyclicPoisson(bands=6)
    assert sampling_of("poisson", Independent()) == Poisson()
    assert sampling_of("shuffled", BufferedToeplitz(buffers=2)) == Shuffled()
    for bad in (
        "banded",
        "banded-toeplitz",
        "banded-toeplitz:0",
        "banded-toeplitz:x",
        "independent:3",
        "buffered-toeplitz:-1",
    ):
        with pytest.raises(ValueError, match="noise="):
            noise_of(bad)
    for bad in ("uniform", "cyclic:0", "poisson:3"):
        with pytest.raises(ValueError, match="sampling="):
            sampling_of(bad, Independent())


def plan_for(**changes):
    recipe = with_defaults(made(**changes), task=Task.MASKED_LM, num_examples=400, device=torch.device("cpu"))
    return plan_of(recipe, parameters=1000)


def test_plan_follows_the_recipe():
    plan = plan_for(noise="independent", batch_size=20, steps=30, delta=1e-6, adjacency="replace")
    assert (plan.batch_size, plan.steps, plan.delta, plan.clip_norm) == (20, 30, 1e-6, 3.0)
    assert plan.adjacency.value == "replace"
    assert plan.epsilon() == pytest.approx(2.0, abs=1e-3)
    assert plan.epsilon() <= 2.0
    given = plan_for(epsilon=None, noise_multiplier=1.5, batch_size=20, steps=30)
    assert given.noise_multiplier == 1.5
    assert given.noise == Independent()


@pytest.mark.slow
def test_automatic_noise_is_proved_for_the_sampling():
    plan = plan_for(epsilon=8.0, batch_size=20, steps=60, sampling="auto")
    assert isinstance(plan.sampling, (Poisson, CyclicPoisson))
    assert plan.epsilon() <= 8.0
    sizes = {"batch_size": 20, "steps": 30}
    assert isinstance(plan_for(sampling="auto", noise="buffered-toeplitz:2", **sizes).sampling, Shuffled)
    assert plan_for(sampling="auto", noise="banded-toeplitz:4", **sizes).sampling == CyclicPoisson(bands=4)
    for noise in ("auto", "banded-toeplitz:4", "independent"):
        assert plan_for(noise=noise, **sizes).sampling == Shuffled()


def test_shuffled_add_remove_is_refused():
    with pytest.raises(ValueError, match="sampling='shuffled' with adjacency='add_remove' has no proof") as refused:
        plan_for(adjacency="add_remove", num_examples=400, batch_size=20, steps=30)
    assert "CyclicPoisson" not in str(refused.value), "in the words of a recipe"


@pytest.mark.slow
def test_named_sampling_is_kept():
    sizes = {"epsilon": 8.0, "batch_size": 20, "steps": 60}
    free = plan_for(sampling="auto", **sizes)
    assert isinstance(free.sampling, CyclicPoisson), "what auto takes here, so that poisson is something else"
    plan = plan_for(sampling="poisson", **sizes)
    assert (plan.sampling, plan.noise) == (Poisson(), Independent())
    assert plan_for(sampling="cyclic", **sizes).sampling == free.sampling
    four = plan_for(sampling="cyclic:4", **sizes)
    assert (four.sampling, four.noise) == (CyclicPoisson(bands=4), BandedToeplitz(bands=4))
    assert plan_for(sampling="cyclic:1", **sizes).sampling == CyclicPoisson(bands=1)


def test_sampling_without_a_proof_is_refused():
    for noise in ("banded-toeplitz:4", "buffered-toeplitz:2"):
        with pytest.raises(ValueError, match=f"noise='{noise}' with sampling='poisson' has no proof") as refused:
            plan_for(sampling="poisson", noise=noise, batch_size=20, steps=30)
        assert "\n" not in str(refused.value)
        assert "CyclicPoisson" not in str(refused.value), "in the words of a recipe"


def test_weak_delta_is_refused():
    for delta in (1 / 400, 0.01, 0.5):
        with pytest.raises(ValueError, match="is not below 1/400"):
            plan_for(delta=delta, noise="independent", batch_size=20, steps=30)
    assert plan_for(delta=0.0024, noise="independent", batch_size=20, steps=30).delta == 0.0024


def test_too_few_records_are_refused():
    few: dict[str, Any] = {"task": Task.MASKED_LM, "device": torch.device("cpu")}
    with pytest.raises(ValueError, match=r"data='rows\.csv' has 7 training records; at least 8 are needed"):
        with_defaults(made(), num_examples=7, **few)
    assert with_defaults(made(), num_examples=8, **few).batch_size == 1


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match="batch_size <= num_examples"):
        plan_for(batch_size=500, steps=10, noise="independent")


@pytest.mark.parametrize(
    ("task", "model", "schedule", "rate"),
    [
        (Task.CAUSAL_LM, "gpt2", "wsd", 2e-3),
        (Task.IMAGE_CLASSIFICATION, "small-cnn", "wsd", 0.04),
        (Task.TABULAR_REGRESSION, "mlp", "linear", 0.1),
    ],
)
def test_schedule_and_rate_follow_the_kind_of_model_and_of_noise(task, model, schedule, rate):
    shared: dict[str, Any] = {"task": task, "num_examples": 400, "device": torch.device("cpu")}
    filled = with_defaults(made(model=model), **shared)
    assert (filled.schedule, filled.learning_rate) == (schedule, rate)
    independent = with_defaults(made(model=model, noise="independent"), **shared)
    assert independent.learning_rate == pytest.approx(0.03 if task.is_tabular else rate / 4)
    assert with_defaults(made(model=model, schedule="cosine"), **shared).schedule == "cosine"


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "wsd"])
def test_learning_rates_rise_and_fall(schedule):
    recipe = made(steps=100, learning_rate=2.0, warmup=0.1, schedule=schedule)
    rates = [learning_rate_at(recipe, step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * i for i in range(1, 11)])
    assert rates[10] == 2.0
    assert all(rate > 0 for rate in rates)
    if schedule == "constant":
        assert set(rates[10:]) == {2.0}
    else:
        assert rates[10:] == sorted(rates[10:], reverse=True)
        assert rates[85 if schedule == "wsd" else 55] == pytest.approx(1.0)
        assert (rates[69] == 2.0) == (schedule == "wsd")
        assert rates[-1] < 0.1


def test_names_agree_with_the_library():
    """The recipe lists names itself, because it must not import torch."""
    assert {task.value for task in Task} >= set(TASKS)
    assert named_settings.VARIANTS == VARIANTS
    assert {kind.value.replace("_", "-") for kind in Adjacency} == set(ADJACENCIES)
    assert all(word in flags()["--noise"].metadata["help"] for word in noise_words())
    assert f"default: {CLIP_NORM:g}" in flags()["--clip-norm"].metadata["help"]
    assert made(adjacency="add-remove", num_examples=9).adjacency == "add_remove"


def test_every_setting_has_a_flag_with_help():
    found = flags()
    assert {part.name for part in found.values()} == {part.name for part in dataclasses.fields(Recipe)} - {
        "label_names"
    }
    for part in found.values():
        assert part.metadata["group"] in ("model and data", "privacy", "optimizer", "the run")
        assert part.metadata["help"]
        assert part.metadata["type"] in (str, int, float, bool)
    assert found["--variant"].metadata["choices"] == VARIANTS


OWN = {"dpoptim.arguments", "dpoptim.app.recipes"}


def test_recipe_and_its_checks_import_the_standard_library_only():
    """`dpoptim train --help` reads the flags, and must not wait for torch."""
    for module in (recipe_module, columns_module, arguments):
        nodes = list(ast.walk(ast.parse(Path(str(module.__file__)).read_text())))
        names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)} - OWN
        names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
