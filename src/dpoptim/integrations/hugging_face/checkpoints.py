"""Checkpoints of PrivateTrainer: the loader's state inside them, and the run's secrets beside output_dir.

    OUTPUT_DIR.secret/            mode 0700
        3f9c0d….key               the noise key of a run, mode 0600, named by its fingerprint
        3f9c0d….steps             the step ledger of the run

People upload output_dir, so no key may lie in it. Every run has its own key, and a checkpoint names its run.
Limit: if key, ledger and checkpoint are restored together from a backup, nobody notices that later steps were released.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpoptim.integrations.hugging_face.arguments import PrivacyArguments
from dpoptim.noise import NoiseKey
from dpoptim.optim import PrivateOptimizer

LOADER_STATE = "private_loader.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSecrets:
    """The name of a run, its noise key, and the file of its step ledger."""

    name: str
    key: NoiseKey
    ledger_file: Path


def new_secrets(privacy: PrivacyArguments, args: Any, optimizer: PrivateOptimizer | None) -> RunSecrets:
    """Create the secrets of a new run.

    The key is new and saved at once, unless `key_file` names a file or `optimizer`, made by the user, has its own key.
    """
    check_key_file(privacy, args)
    if privacy.key_file is not None and optimizer is None:
        key = NoiseKey.load_or_create(privacy.key_file)
        return RunSecrets(name=key.fingerprint(), key=key, ledger_file=Path(privacy.key_file).with_suffix(".steps"))
    folder = secret_folder(args)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if optimizer is not None:
        key, name = optimizer.key, optimizer.key.for_run(optimizer.mechanism.run_id).fingerprint()
    else:
        key = NoiseKey.generate()
        name = key.fingerprint()
        key.save(folder / f"{name}.key")
    return RunSecrets(name=name, key=key, ledger_file=folder / f"{name}.steps")


def secrets_of(
    checkpoint: str | Path, privacy: PrivacyArguments, args: Any, optimizer: PrivateOptimizer | None
) -> RunSecrets:
    """Find the secrets of the run that a checkpoint belongs to."""
    check_key_file(privacy, args)
    name = str(read_loader_state(checkpoint)["run"])
    file = secret_folder(args) / f"{name}.key"
    if privacy.key_file is not None and optimizer is None:
        file = Path(privacy.key_file)
    if optimizer is not None:
        key = optimizer.key
    elif file.is_file():
        key = NoiseKey.load(file)
    else:
        raise ValueError(f"{file} is missing, and checkpoint {checkpoint} needs this noise key. Restore the file.")
    return RunSecrets(name=name, key=key, ledger_file=file.with_suffix(".steps"))


def secret_folder(args: Any) -> Path:
    """The folder beside output_dir."""
    folder = Path(args.output_dir).resolve()
    return folder.with_name(f"{folder.name}.secret")


def check_key_file(privacy: PrivacyArguments, args: Any) -> None:
    """Refuse a key_file in output_dir."""
    output = Path(args.output_dir).resolve()
    if privacy.key_file is not None and output in Path(privacy.key_file).resolve().parents:
        raise ValueError(f"key_file={privacy.key_file!r} is in output_dir, which people upload. Choose another place.")


def write_loader_state(checkpoint: str | Path, state: dict[str, Any]) -> None:
    """Add the private loader's state to a checkpoint."""
    (Path(checkpoint) / LOADER_STATE).write_text(json.dumps(state), encoding="utf-8")


def read_loader_state(checkpoint: str | Path) -> dict[str, Any]:
    """Read the private loader's state; refuse a checkpoint that no private run can resume from."""
    for name in ("optimizer.pt", "scheduler.pt", LOADER_STATE):
        if not (Path(checkpoint) / name).is_file():
            raise ValueError(
                f"checkpoint {str(checkpoint)!r} has no {name}, so the private run cannot resume from it. Use one that "
                "PrivateTrainer saved with save_only_model=False."
            )
    state: dict[str, Any] = json.loads((Path(checkpoint) / LOADER_STATE).read_text(encoding="utf-8"))
    return state
