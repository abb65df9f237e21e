"""One file of a run is damaged; then the run is refused in one sentence, or ends like one that was never damaged."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dpoptim.app import RunDirectory
from dpoptim.app.runs.run_directory import checkpoints
from tests.app.runs import copy_run
from tests.fuzz.commands import run
from tests.fuzz.kills import SETTINGS, killed_in_time, last_line, moment, same_file, whole_run
from tests.fuzz.parts import Failure, Outcome, each

CASES = 200
LOGS = {"log.jsonl", "summary.json"}  # hold times, and are written again
DAMAGES = [
    "truncated",
    "emptied",
    "one bit flipped",
    "bits flipped",
    "removed",
    "of a different run",
    "a different file",
]


def outcomes(seed: int, cases: int, folder: Path) -> Iterator[tuple[int, Outcome]]:
    """Damage copies of a finished run, of one killed after a release, and of one killed after a checkpoint."""
    whole, seconds = whole_run(folder / "whole", SETTINGS[0])
    other, _ = whole_run(folder / "other", {**SETTINGS[1], "learning_rate": 0.02}, one_key=False)
    rng = random.Random(seed)
    bases = {"finished": whole}
    for name, last in (("killed after a release", "release"), ("killed after a checkpoint", "right after")):
        bases[name] = place = RunDirectory(folder / last.replace(" ", "-"))
        command = ["train", str(folder / "whole/recipe.toml"), "--run-dir", str(place.path)]
        while not (place.path.exists() and last in moment(place) and len(checkpoints(place.checkpoints)) == 2):
            for part in (place.path, place.secret_folder):
                shutil.rmtree(part, ignore_errors=True)
            killed_in_time(command, folder / "printed", rng, seconds)
    if run(["predict", str(whole.path), "--data", str(folder / "whole/rows.csv")], folder / "predictions"):
        raise Failure("a whole model does not predict")
    yield from each(partial(_case, bases, other, folder), range(seed, seed + cases))


def _case(bases: dict[str, RunDirectory], other: RunDirectory, folder: Path, seed: int) -> str:
    kind = random.Random(seed).choice(sorted(bases))
    whole, base, predictions = bases["finished"], bases[kind], (folder / "predictions").read_text()
    rng = random.Random(seed)
    shutil.rmtree(folder / "case", ignore_errors=True)
    (folder / "case").mkdir()
    place, printed = copy_run(base.path, folder / "case" / "run"), folder / "case" / "printed"
    before = _contents(place)
    damaged = rng.choice(sorted(before))
    how = rng.choice(DAMAGES)
    _damage(damaged, how, rng, before, _contents(other))
    after = _contents(place)
    name = str(damaged.relative_to(folder / "case"))
    try:
        _same_or_refused(["report", str(place.path), "-o", str(folder / "case" / "page.html")], printed)
        if damaged.parent == place.model:
            predict = ["predict", str(place.path), "--data", str(folder / "whole/rows.csv")]
            if not _same_or_refused(predict, printed) and printed.read_text() != predictions:
                if how == "of a different run":  # no file is signed
                    return "model.pt: a model of a different run is used"
                raise Failure("a damaged model is used")
        resume = ["train", "--resume", str(place.path)]
        refused = _same_or_refused(resume, printed)
        if refused:
            now = _contents(place)  # the log may have an entry about the attempt
            changed = [path.name for path in now.keys() | after.keys() if now.get(path) != after.get(path)]
            if set(changed) - LOGS:
                raise Failure(f"refused, but {changed} changed")
            damaged.write_bytes(before[damaged])
            damaged.chmod(0o600)
            if _same_or_refused(resume, printed):
                raise Failure(f"refused even after the file was restored: {last_line(printed)}")
        _check_result(whole, place, set() if refused else {damaged})
    except Failure as failure:
        raise Failure(f"{name} {how} (run {kind}): {failure}") from failure
    file = name.replace("step-000012", "NEWEST") if base is whole else name
    return (
        f"{Path(file).name}: {'refused, and resumed after it was restored' if refused else 'no effect on the result'}"
    )


def _damage(file: Path, how: str, rng: random.Random, own: dict[Path, bytes], others: dict[Path, bytes]) -> None:
    content = bytearray(own[file])
    if how == "removed":
        file.unlink()
        return
    if how == "of a different run":
        content = bytearray(next(found for path, found in others.items() if path.name == file.name))
    elif how == "a different file":
        content = bytearray(own[rng.choice(sorted(own.keys() - {file}))])
    elif how in ("truncated", "emptied"):
        del content[rng.randrange(max(len(content), 1)) if how == "truncated" else 0 :]
    elif content:
        for _ in range(1 if how.startswith("one") else rng.randint(2, 30)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def _contents(place: RunDirectory) -> dict[Path, bytes]:
    folders = (place.path, place.secret_folder)
    return {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


def _same_or_refused(command: list[str], printed: Path) -> bool:
    """Run a command; True if it refuses in one sentence, and a Failure if it ends in any other way than 0."""
    status, text = run(command, printed), printed.read_text(errors="replace")
    if status and (status != 2 or not last_line(printed).startswith("dpoptim: ") or "Traceback" in text):
        raise Failure(f"dpoptim {command[0]} ends with status {status}: {last_line(printed)}")
    return status == 2


def _check_result(whole: RunDirectory, place: RunDirectory, damaged: set[Path]) -> None:
    """Raise a Failure if the run did not end like the whole one; what was damaged may still be."""
    for one, other in ((whole.path, place.path), (whole.secret_folder, place.secret_folder)):
        for path in (path for path in one.rglob("*") if path.is_file() and path.name not in LOGS):
            found = other / path.relative_to(one)
            if found not in damaged and not (found.exists() and same_file(path, found)):
                raise Failure(f"resumed, but {path.relative_to(one)} is not that of a run that was not damaged")
