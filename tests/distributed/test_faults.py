"""A process that raises, is killed or hangs ends all of them in time, and the last checkpoint resumes the run."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dpoptim import app
from dpoptim.data.processes import exchange
from tests.distributed.jobs import weights
from tests.distributed.launch import ROOT, SECONDS, run_jobs, torchrun

pytestmark = pytest.mark.slow
GRACE = 40  # seconds, as in docs/distributed.md; torchrun needs 30 if a process does not end
TIMEOUT = 5  # seconds, where one is set: how long a process waits for the others


@pytest.fixture(scope="module")
def undisturbed(request, tmp_path_factory):
    """The weights and the ledger of a run without faults, and whether its model is sharded."""
    folder = tmp_path_factory.mktemp("undisturbed")
    sharded = request.param == "sharded"
    found = run_jobs(2, f"disturbed:{folder}", sharded=sharded)
    return found[0]["disturbed"], (folder / "ledger").read_bytes(), sharded


def seconds_since_fault(folder: Path) -> float:
    return time.time() - float((folder / "failed").read_text())


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("undisturbed", "what"),
    [
        *(("whole", what) for what in ("raises", "is killed", "hangs", "is killed before it saves")),
        *(("sharded", what) for what in ("hangs", "is killed before it saves")),
    ],
    indirect=["undisturbed"],
)
def test_a_fault_ends_all_processes_and_the_run_resumes(tmp_path, undisturbed, what):
    seconds = str(TIMEOUT) if what == "hangs" else ""
    final, ledger, sharded = undisturbed
    job = f"disturbed:{tmp_path}:{what}:{seconds}"
    done = torchrun("-m", "tests.distributed.jobs", str(tmp_path), job, SHARDED="yes" if sharded else "")
    assert seconds_since_fault(tmp_path) < GRACE + (TIMEOUT if what == "hangs" else 0)
    assert done.returncode != 0
    assert not any(is_running(int((tmp_path / f"{rank}.pid").read_text())) for rank in range(2))
    assert ("process 1 has no memory left" in done.stderr) == (what == "raises")
    if what == "hangs":  # otherwise torchrun may end the others before they print
        assert "another process failed, ended or did not answer in time" in done.stderr
    assert torch.load(tmp_path / "run.pt", weights_only=False)["loader"]["next_step"] == 2

    released = (tmp_path / "ledger").read_bytes()
    assert ledger.startswith(released)
    assert released.count(b"\n") - 1 == (3 if what == "is killed before it saves" else 2)
    for found in run_jobs(2, f"disturbed:{tmp_path}", sharded=sharded):
        assert torch.equal(found["disturbed"], final)
    assert (tmp_path / "ledger").read_bytes() == ledger  # each step has one content


def test_the_command_line_saves_the_steps_before_a_fault(tmp_path):
    """So a run without memory resumes with smaller micro-batches, which must not repeat a step."""
    job, whole, failed = (
        ["-m", "tests.distributed.trainer_jobs", str(tmp_path)],
        tmp_path / "whole",
        tmp_path / "failed",
    )
    whole.mkdir()
    failed.mkdir()
    done = torchrun(*job, f"stopped:{whole}:nothing")
    assert done.returncode == 0, done.stderr
    done = torchrun(*job, f"stopped:{failed}:raises")
    assert seconds_since_fault(failed) < GRACE
    assert done.returncode != 0
    assert "process 1: dpoptim: Out of memory" in done.stderr
    assert done.stderr.count("dpoptim: training stopped") == 1
    assert "step 2 is saved" in done.stderr
    assert "Error:" not in done.stderr.split("torch.distributed.elastic")[0]  # no traceback but torchrun's
    done = torchrun(*job, f"stopped:{failed}:nothing:--micro-batch-size:4")
    assert done.returncode == 0, done.stderr
    expected, found = (weights(app.load_trained(folder / "run")) for folder in (whole, failed))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_a_trainer_resumes_after_a_fault(tmp_path, sharded):
    """Process 1 has no memory in the third of four steps; the checkpoint of the second one resumes."""
    whole, failed = tmp_path / "whole", tmp_path / "failed"
    whole.mkdir()
    failed.mkdir()
    module = "trainer_jobs"
    expected = run_jobs(2, f"noisy:{whole}", module=module, sharded=sharded)
    job = f"noisy_until_fault:{failed}"
    done = torchrun("-m", f"tests.distributed.{module}", str(failed), job, SHARDED="yes" if sharded else "")
    assert seconds_since_fault(failed) < GRACE
    assert done.returncode != 0
    assert "process 1 has no memory left" in done.stderr
    for found, one in zip(run_jobs(2, f"resumed:{failed}", module=module, sharded=sharded), expected, strict=True):
        assert torch.equal(found["resumed"], one["noisy"]["weights"])


def test_an_error_of_all_processes_is_printed_once(tmp_path):
    done = torchrun("-m", "dpoptim", "train", "--model", "mlp", "--data", "missing.csv", "--epsilon", "8", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("data 'missing.csv' does not exist") == 1


def test_one_gpu_for_two_processes_is_an_error_of_its_own():
    """The words of NCCL 2.28, seen on one GPU."""

    def all_reduce():
        raise torch.distributed.DistBackendError(
            "invalid usage\nDuplicate GPU detected : rank 1 and rank 0 both on ..."
        )

    with pytest.raises(ValueError, match=r"two processes use the same GPU\. Call torch\.cuda\.set_device"):
        exchange(all_reduce)


def test_the_documented_command_for_two_machines(tmp_path):
    page = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^torchrun (--nnodes 2 .*) train.py$", page, re.MULTILINE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    flags = line.replace("--nproc-per-node 8", "--nproc-per-node 1").replace("HOST:29500", place).split()
    script = tmp_path / "train.py"
    script.write_text("import dpoptim.data.processes as found\nprint(found.Processes.current().gathered('here'))\n")
    command = [sys.executable, "-m", "torch.distributed.run", *flags, str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    machines = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        printed = [machine.communicate(timeout=SECONDS)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert printed == ["['here', 'here']\n"] * 2
