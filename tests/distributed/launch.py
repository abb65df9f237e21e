"""Run jobs of `jobs` in several processes, and return what each process found; start commands with torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
SECONDS = 1200  # for machines with other work; a job that waits for another process would take longer


def run_jobs(count: int, *jobs: str, module: str = "jobs", sharded: bool = False) -> list[dict[str, Any]]:
    """Run jobs of a module one after the other, and return the results of each process by job."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        group["SHARDED"] = "yes" if sharded else ""
        common = {**os.environ, **group, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
        command = [sys.executable, "-m", f"tests.distributed.{module}", folder, *jobs]
        started = [
            subprocess.Popen(
                command,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        try:
            errors = [process.communicate(timeout=SECONDS)[1] for process in started]
        finally:
            for process in started:
                process.kill()
        assert not any(process.returncode for process in started), "\n".join(errors)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(count)]


def torchrun(*command: str, count: int = 2, cwd: Path = ROOT, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a script or `-m MODULE` in several processes with more variables; its errors are in the result."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    launcher += ["--monitor-interval", "2"]  # leaves processes time to print their errors before torchrun ends them
    return _launched([*launcher, *command], cwd, more)


def accelerate_launch(*command: str, sharded: bool, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the same in two processes with `accelerate launch`, which starts several on a CPU only if asked for GPUs."""
    fsdp = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]
    launcher = ["accelerate.commands.launch", "--num_processes", "2", "--main_process_port", "0"]
    return _launched([*launcher, *(fsdp if sharded else ["--multi_gpu"]), *command], cwd, {})


def _launched(command: list[str], cwd: Path, more: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", **more}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
