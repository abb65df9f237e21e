"""Checkpoints are loaded as the run saved them, or not at all: in `dpoptim train` and in PrivateTrainer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dpoptim
from dpoptim.app import resume, train
from dpoptim.clipping import PrivateMechanism
from dpoptim.integrations.hugging_face import PrivateTrainer
from dpoptim.noise import NoiseKey
from dpoptim.privacy.seals import seal_folder
from tests.app.runs import CrashAfter, rows_recipe
from tests.integrations.hugging_face.cases import WORDS, class_trainer, classifier, labelled, training_args

SAVING: dict[str, Any] = dict(save_strategy="steps", save_steps=2)


def scale(state: dict[str, Any]) -> None:
    for value in state["model"].values():
        value.mul_(1.5)


def in_state(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        state = torch.load(folder / "step-000006" / "state.pt", weights_only=True)
        change(state)
        torch.save(state, folder / "step-000006" / "state.pt")

    return edit


def at_step_3(state: dict[str, Any]) -> None:
    state["optimizer"]["privacy"]["step"] = state["loader"]["next_step"] = 3


def swap(folder: Path) -> None:
    shutil.copy(folder / "step-000003" / "state.pt", folder / "step-000006" / "state.pt")


def swap_with_seal(folder: Path) -> None:
    shutil.copytree(folder / "step-000003", folder / "step-000006", dirs_exist_ok=True)


def rename(folder: Path) -> None:
    shutil.rmtree(folder / "step-000006")
    (folder / "step-000003").rename(folder / "step-000007")


EDITS: dict[str, Callable[[Path], None]] = {
    "weights": in_state(scale),
    "weight decay": in_state(lambda state: state["optimizer"]["param_groups"][0].update(weight_decay=0.9)),
    "moments": in_state(lambda state: next(iter(state["optimizer"]["state"].values()))["second_moment"].mul_(2)),
    "run_id": in_state(lambda state: state["optimizer"]["privacy"].update(run_id="other")),
    "steps": in_state(at_step_3),
    "renamed": rename,
    "swapped": swap,
    "swapped with its seal": swap_with_seal,
}  # fmt: skip


@pytest.mark.parametrize("how", EDITS)
def test_an_edited_checkpoint_of_a_run_is_refused(how, tmp_path, monkeypatch):
    recipe = rows_recipe(tmp_path, steps=9, checkpoint_every=3, evaluate_every=9)
    with pytest.raises(RuntimeError, match="the power went"):
        train(recipe, tmp_path / "run", progress=CrashAfter(7))
    EDITS[how](tmp_path / "run" / "checkpoints")
    log = (tmp_path / "run" / "log.jsonl").read_bytes()
    released: list[int] = []
    monkeypatch.setattr(PrivateMechanism, "_add_noise", lambda self, *args: released.append(self.step))
    with pytest.raises(ValueError, match=r"is not as the run saved it|was not written by this run") as refused:
        resume(tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == log
    assert released == []


def test_name_and_content_of_a_checkpoint_agree(tmp_path):
    """Even under a seal of the run itself."""
    recipe = rows_recipe(tmp_path, steps=9, checkpoint_every=3, evaluate_every=9)
    with pytest.raises(RuntimeError, match="the power went"):
        train(recipe, tmp_path / "run", progress=CrashAfter(7))
    key, folder = NoiseKey.load(tmp_path / "run" / "noise.key"), tmp_path / "run" / "checkpoints" / "step-000006"
    shutil.copy(folder.with_name("step-000003") / "state.pt", folder / "state.pt")
    seal_folder(folder, key, name="step 6")
    with pytest.raises(ValueError, match="is of step 6 by its name, 3 by its state, 3 by its loader"):
        resume(tmp_path / "run")


# -- PrivateTrainer ------------------------------------------------------------------------------------------------


def with_torch(name: str, change: Callable[[Any], None]) -> Callable[[Path], None]:
    def edit(out: Path) -> None:
        file = out / "checkpoint-2" / name
        state = torch.load(file, weights_only=False)
        change(state)
        torch.save(state, file)

    return edit


def from_later(name: str) -> Callable[[Path], None]:
    def copy(out: Path) -> None:
        shutil.copy(out / "checkpoint-4" / name, out / "checkpoint-2" / name)

    return copy


def add_weights(out: Path) -> None:
    (out / "checkpoint-2" / "pytorch_model.bin").write_bytes(b"x")


def scaled_weights(out: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = out / "checkpoint-2" / "model.safetensors"
    save_file({name: value * 1.3 for name, value in load_file(file).items()}, file, metadata={"format": "pt"})


HF_EDITS: dict[str, Callable[[Path], None]] = {
    "weights": scaled_weights,
    "later weights": from_later("model.safetensors"),
    "later optimizer": from_later("optimizer.pt"),
    "later loader": from_later("private_loader.json"),
    "later state": from_later("trainer_state.json"),
    "learning rate": with_torch("optimizer.pt", lambda state: state["param_groups"][0].update(lr=1.0)),
    "schedule": with_torch("scheduler.pt", lambda state: state.update(base_lrs=[1.0] * len(state["base_lrs"]))),
    "added weights": add_weights,
    "no seal": lambda out: (out / "checkpoint-2" / "seal.json").unlink(),
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    place: Path = tmp_path_factory.mktemp("trainer")
    class_trainer(place, **SAVING).train()
    return place


@pytest.mark.parametrize("how", HF_EDITS)
def test_an_edited_checkpoint_of_a_trainer_is_refused(how, finished, tmp_path):
    for name in ("out", "out.secret"):
        shutil.copytree(finished / name, tmp_path / name)
    HF_EDITS[how](tmp_path / "out")
    trainer = class_trainer(tmp_path, **SAVING)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(ValueError, match=r"is not as the run saved it|was added|has no seal\.json") as refused:
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert "\n" not in str(refused.value)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items()), "not loaded"


def test_the_name_of_a_trainers_checkpoint_is_not_believed(finished, tmp_path):
    for name in ("out", "out.secret"):
        shutil.copytree(finished / name, tmp_path / name)
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    (tmp_path / "out" / "checkpoint-2").rename(tmp_path / "out" / "checkpoint-4")
    with pytest.raises(ValueError, match="of step 2 by its state, 2 by its loader, 2 by its optimizer, 4 by its name"):
        class_trainer(tmp_path, **SAVING).train(resume_from_checkpoint=True)
    state = tmp_path / "out" / "checkpoint-4" / "private_loader.json"
    state.write_text(json.dumps({name: v for name, v in json.loads(state.read_text()).items() if name != "run"}))
    with pytest.raises(ValueError, match=r"private_loader\.json has no run"):
        class_trainer(tmp_path, **SAVING).train(resume_from_checkpoint=True)


def test_a_run_id_is_begun_once(tmp_path):
    """An optimizer with a key and a run_id of its own would have the same noise over other examples."""
    key = NoiseKey.generate()

    def trained(rows: list[dict[str, Any]], run_id: str) -> None:
        model = classifier()
        plan = dpoptim.PrivacyPlan(
            num_examples=len(rows), batch_size=6, steps=4, noise_multiplier=0.6, delta=1e-3, clip_norm=0.1
        )
        optimizer = dpoptim.dp_sgd(model, plan, lr=1e-2, key=key, run_id=run_id)
        PrivateTrainer(
            model=model, args=training_args(tmp_path), train_dataset=rows, processing_class=WORDS, plan=plan,
            optimizers=(optimizer, None),
        ).train()  # fmt: skip

    trained(labelled(), "one")
    with pytest.raises(ValueError, match="has steps that were released with this noise key and run_id"):
        trained([{**row, "labels": 1 - row["labels"]} for row in labelled()], "one")
    trained(labelled(), "two")
