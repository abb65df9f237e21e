"""Where the secrets of PrivateTrainer's runs lie: beside output_dir, since that is what people upload.

    OUTPUT_DIR.secret/            mode 0700
        3f9c0d….key               a run's noise key, mode 0600, named by its fingerprint
        3f9c0d….steps             how many of its steps were released, and of what

Every run has a key of its own; a checkpoint says which run it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpoptim.integrations.hugging_face.arguments import PrivacyArguments
from dpoptim.integrations.hugging_face.checkpoint_files import check_checkpoint, read_loader_state
from dpoptim.noise import NoiseKey
from dpoptim.privacy import RunHeader, StepLedger
from dpoptim.privacy.step_ledger import released_count


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSecrets:
    """The key of a run, the file of its released steps, and the step of the checkpoint that it goes on from."""

    name: str
    key: NoiseKey
    steps_file: Path
    step: int | None = None


def secret_folder(args: Any) -> Path:
    """The folder beside output_dir."""
    folder = Path(args.output_dir).resolve()
    return folder.with_name(f"{folder.name}.secret")


def new_secrets(privacy: PrivacyArguments, args: Any, *, key: NoiseKey | None, run_id: str) -> RunSecrets:
    """Of a run that begins: a new key, on the disk; or the `key` of an optimizer that was given, which has its own.

    Edge cases: a key_file that is there is taken if no run has released a step with it, and refused otherwise.
    """
    if privacy.key_file is not None and key is None:
        file = Path(privacy.key_file)
        steps_file = _beside(file)
        if released_count(steps_file):
            raise ValueError(
                f"key_file={privacy.key_file!r} is the key of an earlier run, and every run has its own; choose "
                "another name, or go on with that run by train(resume_from_checkpoint=...)"
            )
        key = NoiseKey.load_or_create(file)
        return RunSecrets(name=key.fingerprint(), key=key, steps_file=steps_file)
    folder = _made(secret_folder(args))
    if key is not None:
        name = key.for_run(run_id).fingerprint()
        return RunSecrets(name=name, key=key, steps_file=folder / f"{name}.steps")
    key = NoiseKey.generate()
    key.save(folder / f"{key.fingerprint()}.key")
    return RunSecrets(name=key.fingerprint(), key=key, steps_file=folder / f"{key.fingerprint()}.steps")


def secrets_of(checkpoint: str | Path, privacy: PrivacyArguments, args: Any, *, key: NoiseKey | None) -> RunSecrets:
    """Of the run that a checkpoint belongs to; refused where the checkpoint is not as the run saved it."""
    state = read_loader_state(checkpoint)
    name = str(state["run"])
    folder = secret_folder(args)
    file = folder / f"{name}.key" if privacy.key_file is None or key is not None else Path(privacy.key_file)
    steps_file = _beside(file)
    key = _loaded(file) if key is None else key
    if key.fingerprint() != state["key_fingerprint"]:
        raise ValueError(
            f"{file} has key {key.fingerprint()}, and the checkpoint was made with another noise key, "
            f"{state['key_fingerprint']}; give PrivacyArguments(key_file=) that one"
        )
    return RunSecrets(name=name, key=key, steps_file=steps_file, step=check_checkpoint(checkpoint, key))


def open_steps(secrets: RunSecrets, identity: RunHeader) -> StepLedger:
    """The released steps of a run that begins, or goes on from a checkpoint; refused where it may not."""
    if secrets.step is None:
        return StepLedger.begin(secrets.steps_file, identity)
    return StepLedger.resume(secrets.steps_file, identity, step=secrets.step)


def check_key_file(privacy: PrivacyArguments, args: Any) -> None:
    """Refuse a key_file in output_dir, before the folder is uploaded."""
    output = Path(args.output_dir).resolve()
    if privacy.key_file is not None and output in Path(privacy.key_file).resolve().parents:
        raise ValueError(f"key_file={privacy.key_file!r} lies in output_dir, which is uploaded; choose a place outside")


def _loaded(file: Path) -> NoiseKey:
    try:
        return NoiseKey.load(file)
    except FileNotFoundError:
        raise ValueError(
            f"{file} is missing: the checkpoint was made with that noise key, and another noise key cannot go on with "
            "its run; put it back, or begin a new run"
        ) from None


def _beside(key_file: Path) -> Path:
    return key_file.with_name(f"{key_file.stem}.steps")


def _made(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
