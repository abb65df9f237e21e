"""The plan and the optimizer follow from PrivacyArguments and TrainingArguments."""

from __future__ import annotations

import dataclasses
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import TrainingArguments

import dpoptim
from dpoptim.integrations.hugging_face import PrivacyArguments
from dpoptim.integrations.hugging_face.arguments import optimizer_for, plan_for
from dpoptim.integrations.named_settings import CLIP_NORM
from tests.integrations.hugging_face.cases import TEXTS, WORDS, classifier, masked_model, training_args
from tests.pages import blocks

PAGE = Path(__file__).parents[3] / "docs" / "hugging-face.md"


def test_the_plan_follows_from_the_arguments(tmp_path):
    model = classifier()

    def plan(examples: int = 100, privacy: PrivacyArguments | None = None, **changes: Any) -> dpoptim.PrivacyPlan:
        privacy = privacy or PrivacyArguments(epsilon=8.0, delta=1e-3)
        return plan_for(privacy, training_args(tmp_path, **changes), examples=examples, model=model)

    calibrated = plan()
    assert (calibrated.num_examples, calibrated.batch_size, calibrated.steps) == (100, 6, 4)
    assert calibrated.clip_norm == CLIP_NORM
    assert calibrated.epsilon(delta=1e-3) == pytest.approx(8.0, abs=1e-3)
    assert calibrated.sampling == dpoptim.Shuffled()
    assert calibrated.noise != dpoptim.Independent(), "the noise with the least error"
    quick = PrivacyArguments(noise_multiplier=1.0, delta=1e-3)
    assert plan(privacy=quick, max_grad_norm=0.5).clip_norm == 0.5
    assert plan(privacy=quick, max_steps=-1, num_train_epochs=3).steps == 50
    for examples in (65, 66):  # rounded up, as in `dpoptim train`
        assert plan(examples, quick, max_steps=-1, num_train_epochs=3).steps == math.ceil(3 * examples / 6) == 33
    with pytest.raises(ValueError, match="is not below 1/100, one over the number of training"):
        plan(privacy=PrivacyArguments(epsilon=8.0, delta=0.01))
    cyclic = PrivacyArguments(noise_multiplier=1.0, delta=1e-3, sampling="cyclic", noise="banded-toeplitz:2")
    assert plan(privacy=cyclic).sampling == dpoptim.CyclicPoisson(bands=2)
    moments = PrivacyArguments(noise_multiplier=1.0, delta=1e-3, variant="joint_moments", sampling="shuffled")
    assert isinstance(plan(privacy=moments).release, dpoptim.JointMoments)
    assert plan(privacy=PrivacyArguments(noise_multiplier=1.0)).delta == 1e-3
    declared = PrivacyArguments(
        noise_multiplier=1.0, delta=1e-3, adjacency="add_remove", num_examples=50, sampling="poisson"
    )
    assert plan(99, declared).num_examples == 50


def test_the_optimizer_follows_from_the_arguments(tmp_path):
    def optimizer(privacy: PrivacyArguments, **changes: Any) -> Any:
        model, args = classifier(), training_args(tmp_path, **changes)
        plan = plan_for(privacy, args, examples=24, model=model)
        decayed = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
        return optimizer_for(privacy, args, plan, model, key=dpoptim.NoiseKey.generate(), decayed=decayed)

    stock = PrivacyArguments(noise_multiplier=0.6, delta=1e-3)
    made = optimizer(stock, adam_beta1=0.8, adam_beta2=0.99, weight_decay=0.1, learning_rate=3e-3)
    decayed, plain = made.param_groups
    assert (decayed["lr"], decayed["betas"], decayed["weight_decay"]) == (3e-3, (0.8, 0.99), 0.1)
    assert plain["weight_decay"] == 0.0
    assert all(parameter.ndim == 1 for parameter in plain["params"])
    assert made.rule.decoupled
    assert made.rule.eps == 1e-8
    assert type(made.geometry).__name__ == "InverseRoot"
    corrected = PrivacyArguments(noise_multiplier=0.6, delta=1e-3, variant="bias_correction")
    made = optimizer(corrected)
    assert made.rule.eps == pytest.approx(0.6 * made.plan.clip_norm / made.plan.batch_size)
    assert optimizer(corrected, adam_epsilon=1e-3).rule.eps == 1e-3


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="Expected variant to be one of"):
        PrivacyArguments(variant="magic")
    with pytest.raises(ValueError, match="Expected adjacency to be one of"):
        PrivacyArguments(adjacency="near")


def test_hf_argument_parser_reads_privacy_arguments():
    parser = transformers.HfArgumentParser((TrainingArguments, PrivacyArguments))
    args, privacy = parser.parse_args_into_dataclasses(
        ["--output_dir", "out", "--epsilon", "8", "--delta", "1e-6", "--variant", "post_processing", "--use_cpu"]
    )
    assert privacy == PrivacyArguments(epsilon=8.0, delta=1e-6, variant="post_processing")
    assert args.output_dir == "out"
    assert "--noise_multiplier" in parser.format_help()


@pytest.mark.slow
def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [WORDS(text) for text in TEXTS]
    names: dict[str, Any] = {"model": masked_model(), "tokenizer": WORDS, "dataset": rows}
    names["held_out"] = [WORDS("the fox " * number) for number in (2, 3)]
    programs = blocks(PAGE, "python")
    assert len(programs) == 5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for program in programs:
            exec(program, names)
    assert names["plan"].steps == 4
    assert len(list((tmp_path / "out.secret").glob("*.key"))) == 1
    assert not list((tmp_path / "out").rglob("*.key"))


def test_the_page_names_every_setting():
    page = PAGE.read_text()
    for part in dataclasses.fields(PrivacyArguments):
        assert f"`{part.name}`" in page, part.name
