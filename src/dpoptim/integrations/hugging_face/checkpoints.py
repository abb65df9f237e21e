"""Checkpoints of PrivateTrainer: the loader's state inside them, and the run's secrets beside output_dir.

    OUTPUT_DIR.secret/            mode 0700
        3f9c0d….key               the noise key of a run, mode 0600, named by its fingerprint
        3f9c0d….steps             the step ledger of the run

People upload output_dir, so no key may lie in it. Every run has its own key, and a checkpoint names its run.
"""

from __future__ import annotations

import json
import warnings
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dpoptim.data.processes import Processes
from dpoptim.integrations.hugging_face.arguments import PrivacyArguments
from dpoptim.integrations.optional import first_line
from dpoptim.noise import NoiseKey
from dpoptim.optim import PrivateOptimizer

LOADER_STATE = "private_loader.json"


class RunSecrets(NamedTuple):
    """The name of a run, its noise key, and the file of its step ledger."""

    name: str
    key: NoiseKey
    ledger_file: Path


def run_secrets(
    privacy: PrivacyArguments, args: Any, optimizer: PrivateOptimizer | None, checkpoint: str | None
) -> RunSecrets:
    """Find the secrets of a checkpoint's run, or create those of a new run; a given optimizer keeps its key.

    Process 0 reads and writes the files, and sends the secrets to the others.
    """
    processes = Processes.current()
    if processes.rank > 0:
        name, secret, ledger_file = processes.from_first(None)
        return RunSecrets(name=name, key=NoiseKey.from_bytes(secret), ledger_file=Path(ledger_file))
    output = Path(args.output_dir).resolve()
    folder = output.with_name(f"{output.name}.secret")
    file = None if privacy.key_file is None or optimizer is not None else Path(privacy.key_file)
    if privacy.key_file is not None and output in Path(privacy.key_file).resolve().parents:
        raise ValueError(f"key_file={privacy.key_file!r} is in output_dir, which people upload. Move it elsewhere.")
    if checkpoint is not None:
        name = str(read_loader_state(checkpoint)["run"])
        file = file or folder / f"{name}.key"
        if optimizer is None and not file.is_file():
            raise ValueError(f"{file} is missing, and checkpoint {checkpoint} needs this noise key. Restore the file.")
        key = NoiseKey.load(file) if optimizer is None else optimizer.key
    elif file is not None:
        key = NoiseKey.load_or_create(file)
        name = key.fingerprint()
    else:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = NoiseKey.generate() if optimizer is None else optimizer.key
        name = (key if optimizer is None else key.for_run(optimizer.mechanism.run_id)).fingerprint()
        file = folder / f"{name}.key"
        if optimizer is None:
            key.save(file)
    ledger_file = file.with_suffix(".steps")
    processes.from_first((name, key._secret, str(ledger_file)))
    return RunSecrets(name=name, key=key, ledger_file=ledger_file)


def read_loader_state(checkpoint: str | Path) -> dict[str, Any]:
    """Read the private loader's state; refuse a checkpoint that no private run can resume from."""
    names = ("optimizer.pt", "scheduler.pt", LOADER_STATE, "trainer_state.json")
    if not any((Path(checkpoint) / name).is_file() for name in names):
        raise ValueError(f"{str(checkpoint)!r} has no checkpoint. Leave out resume_from_checkpoint to begin a new run.")
    for name in names:
        if not (Path(checkpoint) / name).is_file():
            raise ValueError(
                f"checkpoint {str(checkpoint)!r} has no {name}. Use one that was saved with save_only_model=False."
            )
    state: dict[str, Any] = json.loads((Path(checkpoint) / LOADER_STATE).read_text(encoding="utf-8"))
    return state


def check_readable(checkpoint: Path) -> None:
    """Refuse a checkpoint with a file that is missing, or cut off by a crash or a full disk."""
    for file in sorted(checkpoint.glob("*.*")):
        try:
            if file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
            elif file.suffix == ".safetensors":
                with safe_open(file, "pt"):
                    pass
            elif file.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(file):  # as torch saves them
                raise ValueError("it is damaged")
        except Exception as error:  # safetensors raises errors of its own types
            raise ValueError(
                f"{file} cannot be read ({first_line(error)}). Restore it, or resume from an older checkpoint."
            ) from error
    read_loader_state(checkpoint)


def newest_checkpoint(output_dir: str) -> Path:
    """Return the newest checkpoint that can be read, and warn about newer ones; output_dir if it has no checkpoint."""
    found = sorted(Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=_step_of)
    while found:
        newest = found.pop()
        try:
            check_readable(newest)
        except ValueError as error:
            if not found:
                raise
            if Processes.current().rank == 0:
                warnings.warn(f"{error} Resuming from {found[-1].name} instead.", stacklevel=3)
        else:
            return newest
    return Path(output_dir)


def _step_of(checkpoint: Path) -> int:
    step = checkpoint.name.rpartition("-")[2]
    return int(step) if step.isdecimal() else -1
