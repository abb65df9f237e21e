"""Checkpoints of PrivateTrainer, and where its key goes."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch

import dpoptim
from dpoptim.integrations.hugging_face import PrivacyArguments, PrivateTrainer
from dpoptim.integrations.hugging_face.checkpoints import newest_checkpoint
from dpoptim.noise import NoiseKey
from dpoptim.privacy.step_ledger import released_count
from tests.integrations.hugging_face.cases import (
    WORDS,
    assert_equal_weights,
    class_trainer,
    classifier,
    labelled,
    masked_model,
    masked_trainer,
    training_args,
    weights,
)

# -- checkpoints and the key ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kept", "workers"), [pytest.param(4, 1, marks=pytest.mark.slow), (3, 0)])
def test_a_resumed_run_is_bitwise_equal(tmp_path, kept, workers):
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
    assert resumed.state.global_step == resumed.private_optimizer.mechanism.step == 8
    assert resumed.state.epoch == straight.state.epoch
    logged = [(entry["step"], entry["epoch"]) for entry in resumed.state.log_history]
    assert logged == [(entry["step"], entry["epoch"]) for entry in straight.state.log_history]


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    def trainer() -> Any:
        return class_trainer(tmp_path, save_strategy="steps", save_steps=2)

    straight = trainer()
    straight.train()
    newest = tmp_path / "out" / "checkpoint-4"
    for name, left in (("optimizer.pt", 100), ("model.safetensors", 100), ("trainer_state.json", 20)):
        whole = (newest / name).read_bytes()
        (newest / name).write_bytes(whole[:left])
        with pytest.raises(ValueError, match=rf"checkpoint-4/{name} cannot be read") as error:
            trainer().train(resume_from_checkpoint=str(newest))
        assert "\n" not in str(error.value)
        if name != "trainer_state.json":
            (newest / name).write_bytes(whole)
    resumed = trainer()
    with pytest.warns(UserWarning, match=r"trainer_state\.json cannot be read .* Resuming from checkpoint-2 instead"):
        resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert_equal_weights(weights(straight.model), weights(resumed.model))
    (newest / "trainer_state.json").unlink()
    with pytest.warns(UserWarning, match=r"has no trainer_state\.json.* Resuming from checkpoint-2 instead"):
        assert newest_checkpoint(str(tmp_path / "out")).name == "checkpoint-2"
    (tmp_path / "out" / "checkpoint-2" / "optimizer.pt").write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="instead"),
        pytest.raises(ValueError, match=r"checkpoint-2/optimizer\.pt cannot be read"),
    ):
        trainer().train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_resume_from_the_last_checkpoint_of_a_finished_run_does_nothing(tmp_path):
    trainer = class_trainer(tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    again = class_trainer(tmp_path, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == again.private_optimizer.mechanism.step == 4
    assert_equal_weights(weights(trainer.model), weights(again.model))


def test_runs_that_cannot_be_resumed_are_refused(tmp_path):
    class_trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=2).train()
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    other = PrivacyArguments(noise_multiplier=0.5, delta=1e-3)
    with pytest.raises(ValueError, match=r"a different privacy plan: .*noise_multiplier was 0\.6, not 0\.5"):
        class_trainer(tmp_path, privacy=other, max_steps=2).train(resume_from_checkpoint=checkpoint)
    secret = key_of(tmp_path)
    secret.rename(tmp_path / "kept")
    with pytest.raises(ValueError, match=r"\.key is missing, and checkpoint .* needs this noise key"):
        class_trainer(tmp_path).train(resume_from_checkpoint=checkpoint)
    NoiseKey.generate().save(secret)
    with pytest.raises(ValueError, match="a different noise key"):
        class_trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=checkpoint)
    (tmp_path / "out" / "checkpoint-2" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match=r"has no optimizer\.pt"):
        class_trainer(tmp_path).train(resume_from_checkpoint=checkpoint)
    for named in (True, str(tmp_path / "absent")):
        with pytest.raises(ValueError, match=r"has no checkpoint\. Leave out resume_from_checkpoint"):
            class_trainer(tmp_path / "new").train(resume_from_checkpoint=named)


def key_of(folder: Path) -> Path:
    """The newest key next to the output folder."""
    return max((folder / "out.secret").glob("*.key"), key=lambda path: path.stat().st_mtime_ns)


def test_secrets_are_next_to_the_output_folder(tmp_path):
    class_trainer(tmp_path, save_strategy="steps", save_steps=2).train()
    key, steps = sorted((tmp_path / "out.secret").iterdir())
    assert (key.suffix, steps.suffix, key.stem) == (".key", ".steps", NoiseKey.load(key).fingerprint())
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out.secret", key, steps)]
    assert modes == [0o700, 0o600, 0o600]
    assert released_count(steps) == 4
    secret = key.read_bytes()
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {"optimizer.pt", "private_loader.json", "training_args.bin"} <= {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        assert secret not in content, path
        assert secret.hex().encode() not in content, path
    state = torch.load(tmp_path / "out" / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert state["privacy"]["step"] == 2


@pytest.mark.slow
def test_every_run_has_its_own_key(tmp_path):
    """Two runs share an output folder; a checkpoint of the first still finds its own key."""
    options: dict[str, Any] = dict(save_strategy="steps", save_steps=2)
    class_trainer(tmp_path, **options).train()
    (tmp_path / "out" / "checkpoint-2").rename(tmp_path / "first")
    first = key_of(tmp_path)
    class_trainer(tmp_path, **options).train()
    assert key_of(tmp_path) != first
    assert key_of(tmp_path).read_bytes() != first.read_bytes()
    again = class_trainer(tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "first"))
    assert again.private_optimizer.key == NoiseKey.load(first)


@pytest.mark.slow
def test_a_key_file_serves_one_run(tmp_path):
    file = tmp_path / "vault" / "mine.key"
    privacy = PrivacyArguments(noise_multiplier=0.6, delta=1e-3, key_file=str(file))
    options: dict[str, Any] = dict(privacy=privacy, save_strategy="steps", save_steps=2)
    class_trainer(tmp_path, **options).train()
    assert sorted(path.name for path in file.parent.iterdir()) == ["mine.key", "mine.steps"]
    with pytest.raises(ValueError, match="records 4 released steps, and a new run would release them again"):
        class_trainer(tmp_path, **options).train()
    class_trainer(tmp_path, **options).train(resume_from_checkpoint=True)
    (tmp_path / "vault" / "mine.steps").unlink()
    with pytest.raises(ValueError, match=r"mine\.steps is missing"):
        class_trainer(tmp_path, **options).train(resume_from_checkpoint=True)


class FakeHub:
    """Records what would be uploaded."""

    def __init__(self) -> None:
        self.uploaded: list[str] = []

    def create_repo(self, name: str, **kwargs: Any) -> Any:
        return type("Repo", (), {"repo_id": name})()

    def upload_folder(self, folder_path: str, **kwargs: Any) -> Any:
        self.uploaded += [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*")]
        return type("Job", (), {"is_done": lambda self: True, "done": lambda self: True, "result": lambda self: None})()


def test_the_key_is_never_uploaded(tmp_path, monkeypatch):
    hub = FakeHub()
    fakes = {"hf_api": lambda: hub, "create_repo": hub.create_repo, "upload_folder": hub.upload_folder}
    for name, fake in fakes.items():  # older versions of transformers call the last two, newer ones hf_api
        monkeypatch.setattr(f"transformers.trainer.{name}", fake, raising=False)
    class_trainer(tmp_path, save_strategy="steps", save_steps=2, push_to_hub=True).train()
    assert "model.safetensors" in hub.uploaded
    assert not any(name.endswith((".key", ".steps")) for name in hub.uploaded)
    assert len(list((tmp_path / "out.secret").glob("*.key"))) == 1


def test_a_key_in_output_dir_is_refused(tmp_path):
    privacy = PrivacyArguments(noise_multiplier=0.6, delta=1e-3, key_file=str(tmp_path / "out" / "own.key"))
    with pytest.raises(ValueError, match="is in output_dir, which people upload"):
        class_trainer(tmp_path, privacy=privacy).train()


@pytest.mark.slow
def test_a_run_id_cannot_be_reused(tmp_path):
    """A second run with the same key and run_id would have the same noise over different examples."""
    key = NoiseKey.generate()

    def train(rows: list[dict[str, Any]], run_id: str) -> None:
        model = classifier()
        plan = dpoptim.PrivacyPlan(
            num_examples=len(rows), batch_size=6, steps=4, noise_multiplier=0.6, delta=1e-3, clip_norm=0.1
        )
        optimizer = dpoptim.dp_sgd(model, plan, lr=1e-2, key=key, run_id=run_id)
        PrivateTrainer(
            model=model, args=training_args(tmp_path), train_dataset=rows, processing_class=WORDS, plan=plan,
            optimizers=(optimizer, None),
        ).train()  # fmt: skip

    train(labelled(), "one")
    with pytest.raises(ValueError, match="a new run would release them again with the same noise"):
        train([{**row, "labels": 1 - row["labels"]} for row in labelled()], "one")
    train(labelled(), "two")
