"""Checkpoints of PrivateTrainer, and where its key goes."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from dpoptim.training import PrivacyArguments
from dpoptim.training.hugging_face.arguments import key_path
from tests.training.hugging_face_cases import (
    PRIVACY,
    assert_equal_weights,
    class_trainer,
    masked_model,
    masked_trainer,
    training_args,
    weights,
)

# -- checkpoints and the key ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kept", "workers"), [(4, 0), (3, 0), (4, 1)])
def test_a_resumed_run_goes_on_bitwise(tmp_path, kept, workers):
    """With dropout, and with masks that the stock collator draws; at the end of an epoch (4 steps) and within one."""
    options: dict[str, Any] = dict(
        max_steps=8,
        logging_steps=2,
        save_strategy="steps",
        save_steps=kept,
        lr_scheduler_type="linear",
        dataloader_num_workers=workers,
    )
    straight = masked_trainer(tmp_path, model=masked_model(dropout=0.2), **options)
    straight.train()
    resumed = masked_trainer(tmp_path, model=masked_model(dropout=0.2), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{kept}"))
    assert_equal_weights(weights(straight.model), weights(resumed.model))
    assert resumed.state.global_step == resumed.private_optimizer.release.step == 8
    assert resumed.state.epoch == straight.state.epoch
    logged = [(entry["step"], entry["epoch"]) for entry in resumed.state.log_history]
    assert logged == [(entry["step"], entry["epoch"]) for entry in straight.state.log_history]


def test_resume_from_the_last_checkpoint_of_a_finished_run_does_nothing(tmp_path):
    trainer = class_trainer(tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    again = class_trainer(tmp_path, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == again.private_optimizer.release.step == 4
    assert_equal_weights(weights(trainer.model), weights(again.model))


def test_what_cannot_be_resumed_is_refused(tmp_path):
    class_trainer(tmp_path, save_strategy="steps", save_steps=2, save_only_model=True).train()
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    with pytest.raises(ValueError, match=r"has no optimizer\.pt"):
        class_trainer(tmp_path).train(resume_from_checkpoint=checkpoint)
    class_trainer(tmp_path, save_strategy="steps", save_steps=2).train()
    other = PrivacyArguments(noise_multiplier=0.5, delta=1e-3)
    with pytest.raises(ValueError, match="another privacy plan"):
        class_trainer(tmp_path, privacy=other).train(resume_from_checkpoint=checkpoint)
    (tmp_path / "out" / "noise.key").unlink()
    with pytest.raises(ValueError, match="another noise key"):
        class_trainer(tmp_path).train(resume_from_checkpoint=checkpoint)


def test_the_key_is_a_file_of_its_own(tmp_path):
    class_trainer(tmp_path, save_strategy="steps", save_steps=2).train()
    key = tmp_path / "out" / "noise.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    secret = key.read_bytes()
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file() and path != key]
    assert {"optimizer.pt", "private_loader.json", "training_args.bin"} <= {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        assert secret not in content, path
        assert secret.hex().encode() not in content, path
    state = torch.load(tmp_path / "out" / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert state["privacy"]["step"] == 2


class FakeHub:
    """Takes note of what would be uploaded."""

    def __init__(self) -> None:
        self.uploaded: list[str] = []

    def create_repo(self, name: str, **kwargs: Any) -> Any:
        return type("Repo", (), {"repo_id": name})()

    def upload_folder(self, folder_path: str, **kwargs: Any) -> Any:
        self.uploaded += [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*")]
        return type("Job", (), {"is_done": lambda self: True, "done": lambda self: True, "result": lambda self: None})()


def test_the_key_is_never_uploaded(tmp_path, monkeypatch):
    hub = FakeHub()
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    class_trainer(tmp_path, save_strategy="steps", save_steps=2).train()  # leaves its key in the folder
    secret = (tmp_path / "out" / "noise.key").read_bytes()
    with pytest.warns(UserWarning, match="moved to"):
        class_trainer(tmp_path, save_strategy="steps", save_steps=2, push_to_hub=True).train()
    assert "model.safetensors" in hub.uploaded
    assert not any("key" in name for name in hub.uploaded)
    assert (tmp_path / "out.noise.key").read_bytes() == secret
    # Whoever pushes without having said so in the arguments: the key is taken out first.
    trainer = class_trainer(tmp_path / "second")
    trainer.train()
    assert (tmp_path / "second" / "out" / "noise.key").exists()
    with pytest.warns(UserWarning, match="moved to"):
        trainer.push_to_hub()
    assert not any("key" in name for name in hub.uploaded)
    assert (tmp_path / "second" / "out.noise.key").exists()


def test_a_key_inside_an_uploaded_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.trainer.hf_api", FakeHub)
    privacy = PrivacyArguments(noise_multiplier=0.6, delta=1e-3, key_file=str(tmp_path / "out" / "own.key"))
    args = training_args(tmp_path, push_to_hub=True)
    assert key_path(PRIVACY, args) == tmp_path / "out.noise.key"
    with pytest.raises(ValueError, match="lies in output_dir"):
        class_trainer(tmp_path, privacy=privacy, push_to_hub=True).train()
