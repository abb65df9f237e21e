"""What PrivateTrainer refuses when it is created."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import dpoptim
from dpoptim.integrations.hugging_face import PrivacyArguments, PrivateTrainer
from tests.integrations.hugging_face.cases import PRIVACY, WORDS, classifier, labelled, training_args


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("fp16", True, "changes clipping"),
        ("torch_compile", True, "torch_compile=True compiles"),
        ("_n_gpu", 2, "CUDA_VISIBLE_DEVICES"),
        ("deepspeed", {"stage": 2}, "deepspeed=.* a whole model"),
        ("use_liger_kernel", True, "use_liger_kernel"),
        ("train_sampling_strategy", "group_by_length", "changes how batches are drawn"),
        ("auto_find_batch_size", True, "auto_find_batch_size"),
        ("label_smoothing_factor", 0.1, "label_smoothing_factor"),
        ("neftune_noise_alpha", 5.0, "neftune_noise_alpha"),
        ("skip_memory_metrics", False, "skip_memory_metrics"),
        ("include_num_input_tokens_seen", "all", "private tokens"),
        ("optim", "adafactor", "variant="),
        ("optim_args", "a=1", "optim_args"),
        ("max_grad_norm", 0.0, "clip_norm"),
        ("per_device_train_batch_size", 100, "<= num_examples, got 300 > 24"),
    ],
)
def test_unsupported_training_arguments_are_refused(tmp_path, option, value, message):
    args = training_args(tmp_path)
    args._setup_devices  # noqa: B018  settles n_gpu
    setattr(args, option, value)
    with pytest.raises(ValueError, match=message) as refusal:
        PrivateTrainer(classifier(), args, None, labelled(), processing_class=WORDS, privacy=PRIVACY)
    assert "\n" not in str(refusal.value)


def test_contradictory_arguments_are_refused(tmp_path):
    model, data = classifier(), labelled()
    args = training_args(tmp_path)
    plan = dpoptim.PrivacyPlan(num_examples=24, batch_size=6, steps=4, noise_multiplier=1.0)

    def refused(message: str, **changes: Any) -> None:
        call: dict[str, Any] = {"model": model, "args": args, "train_dataset": data, "privacy": PRIVACY, **changes}
        with pytest.raises(ValueError, match=message):
            PrivateTrainer(processing_class=WORDS, **call)

    refused("privacy=None", privacy=None)
    refused(r"privacy is a dict\. Pass privacy=PrivacyArguments", privacy={"epsilon": 8.0})
    refused("exactly one of the two", privacy=PrivacyArguments())
    refused("exactly one of the two", privacy=PrivacyArguments(epsilon=1.0, noise_multiplier=1.0))
    refused("Give one of the two", plan=plan)
    refused("max_steps=4, but the plan has 5", plan=plan.replace(steps=5), privacy=None)
    refused("no noise_multiplier", plan=plan.replace(noise_multiplier=None), privacy=None)
    refused("loss_per_example=", compute_loss_func=lambda *found, **named: None)
    refused("Pass model=", model=None, model_init=classifier)
    refused("model=None", model=None)
    refused("Create the optimizer with dpoptim", optimizers=(torch.optim.SGD(model.parameters(), lr=1.0), None))
    refused("without a length", train_dataset=iter(data))
    refused("got 6 > 0", train_dataset=[])
    refused("Declare a public one", privacy=PrivacyArguments(epsilon=1.0, adjacency="add_remove"))
    refused("Expected epsilon > 0", privacy=PrivacyArguments(epsilon=-1.0))
    with pytest.raises(ValueError, match="train_dataset=None"):
        _ = PrivateTrainer(model, args, processing_class=WORDS, privacy=PRIVACY).plan


def test_subclasses_with_their_own_loss_or_step_are_refused(tmp_path):
    class Averaging(PrivateTrainer):
        def compute_loss(self, model: Any, inputs: Any, **rest: Any) -> Any:
            return model(**inputs).loss

    class Stepping(PrivateTrainer):
        def training_step(self, *args: Any, **rest: Any) -> Any:
            return super().training_step(*args, **rest)

    for kind, name in ((Averaging, "compute_loss"), (Stepping, "training_step")):
        with pytest.raises(ValueError, match=f"overrides {name}, which .* Pass loss_per_example= instead"):
            kind(classifier(), training_args(tmp_path), None, labelled(), processing_class=WORDS, privacy=PRIVACY)


@pytest.mark.slow
def test_transformers_is_imported_on_first_use_and_must_be_supported():
    program = (
        "import sys, types, dpoptim.integrations.hugging_face as hf; assert 'transformers' not in sys.modules\n"
        "for version, message in ((None, 'dpoptim[train]'), ('5.2.0', '>=5.3'), ('6.0.0', '<6')):\n"
        "    module = None if version is None else types.SimpleNamespace(__version__=version)\n"
        "    sys.modules['accelerate'] = sys.modules['transformers'] = module\n"
        "    try:\n        hf.PrivateTrainer\n"
        "    except ImportError as error:\n        assert message in str(error)\n"
        "    else:\n        raise AssertionError(version)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
