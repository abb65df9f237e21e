"""Where the secrets of PrivateTrainer's runs lie: beside output_dir, since that is what people upload.

    OUTPUT_DIR.secret/            mode 0700
        3f9c0d….key               a run's noise key, mode 0600, named by its fingerprint
        3f9c0d….steps             how many of its steps were released, and of what

Every run has a key of its own; a checkpoint says which run it belongs to.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dpoptim.noise import NoiseKey
from dpoptim.privacy import ReleasedSteps, RunIdentity
from dpoptim.training.hugging_face.arguments import PrivacyArguments

LOADER_STATE = "private_loader.json"
_OLD_NAME = "noise.key"


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSecrets:
    """The key of a run and the file that counts its steps; `is_old` says that it was begun without such a file."""

    name: str
    key: NoiseKey
    steps_file: Path
    is_old: bool = False


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
        if steps_file.exists() and int(steps_file.read_bytes()[:20] or b"0"):
            raise ValueError(
                f"key_file={privacy.key_file!r} is the key of an earlier run, and every run has its own; choose "
                "another name, or go on with that run by train(resume_from_checkpoint=...)"
            )
        steps_file.unlink(missing_ok=True)
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
    """Of the run that a checkpoint belongs to.

    Edge cases: keys of earlier versions, in output_dir or beside it, are found and moved into the secret folder.
    """
    state = _loader_state(checkpoint)
    name = str(state.get("run", state["key_fingerprint"]))
    folder = secret_folder(args)
    steps_file = folder / f"{name}.steps"
    if key is not None:
        return RunSecrets(name=name, key=key, steps_file=steps_file, is_old="run" not in state)
    if privacy.key_file is not None:
        file = Path(privacy.key_file)
        return RunSecrets(name=name, key=_loaded(file, state), steps_file=_beside(file), is_old="run" not in state)
    if "run" not in state:
        take_keys_out(privacy, args)
    return RunSecrets(
        name=name, key=_loaded(folder / f"{name}.key", state), steps_file=steps_file, is_old="run" not in state
    )


def open_steps(secrets: RunSecrets, identity: RunIdentity, checkpoint: str | Path | None) -> ReleasedSteps:
    """The file that counts the steps of a run that begins, or goes on from a checkpoint; refused where it may not."""
    if checkpoint is None:
        secrets.steps_file.unlink(missing_ok=True)  # of an attempt that released nothing
        return ReleasedSteps.begin(secrets.steps_file, identity)
    state = torch.load(Path(checkpoint) / "optimizer.pt", map_location="cpu", weights_only=True)
    step = int(state["privacy"]["step"])
    if secrets.is_old and not secrets.steps_file.exists():
        warnings.warn(
            f"checkpoint {str(checkpoint)!r} is of an earlier version, which kept no count of released steps: nothing "
            "checks that it is the last one, nor that examples and settings are the run's; from here on they are",
            stacklevel=4,
        )
        ReleasedSteps.begin(secrets.steps_file, identity, count=step).close()
    return ReleasedSteps.resume(secrets.steps_file, identity, step=step)


def take_keys_out(privacy: PrivacyArguments, args: Any) -> None:
    """Move keys that earlier versions left in output_dir into the secret folder, before the folder is uploaded."""
    output = Path(args.output_dir).resolve()
    if privacy.key_file is not None and output in Path(privacy.key_file).resolve().parents:
        raise ValueError(f"key_file={privacy.key_file!r} lies in output_dir, which is uploaded; choose a place outside")
    for old in (output / _OLD_NAME, output.with_name(f"{output.name}.{_OLD_NAME}")):
        if old.exists():
            target = _made(secret_folder(args)) / f"{NoiseKey.load(old).fingerprint()}.key"
            old.rename(target)
            warnings.warn(f"the noise key {old} was moved to {target}, so that it is never uploaded", stacklevel=4)


def _loader_state(checkpoint: str | Path) -> dict[str, Any]:
    file = Path(checkpoint) / LOADER_STATE
    if not file.is_file():
        missing = "optimizer.pt" if not (Path(checkpoint) / "optimizer.pt").is_file() else LOADER_STATE
        raise ValueError(
            f"checkpoint {str(checkpoint)!r} has no {missing}, so the private run cannot go on from it: its noise and "
            "batches would be drawn anew; choose one that PrivateTrainer saved with save_only_model=False"
        )
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _loaded(file: Path, state: dict[str, Any]) -> NoiseKey:
    try:
        key = NoiseKey.load(file)
    except FileNotFoundError:
        raise ValueError(
            f"{file} is missing: the checkpoint was made with that noise key, and another noise key cannot go on with "
            "its run; put it back, or begin a new run"
        ) from None
    if key.fingerprint() != state["key_fingerprint"]:
        raise ValueError(
            f"{file} has key {key.fingerprint()}, and the checkpoint was made with another noise key, "
            f"{state['key_fingerprint']}; give PrivacyArguments(key_file=) that one"
        )
    return key


def _beside(key_file: Path) -> Path:
    return key_file.with_name(f"{key_file.stem}.steps")


def _made(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
