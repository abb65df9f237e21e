"""Several processes that train one model, each on its own share of every batch.

torchrun starts them, and torch.distributed connects them. All processes have the same key, so each one draws the same
batch and makes the same noise without communication. In every step they add up their clipped sums, and each process
then adds the noise once and makes the same update.

Guarantee: the shares of a batch are disjoint and together they are the batch, so a step releases the same sum as one
process would, up to rounding. Clipped sums without noise, and the key, travel between the processes: trust the network.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from dpoptim.noise import NoiseKey
from dpoptim.version import __version__


@dataclass(frozen=True)
class Processes:
    """This process (`rank`, from 0) among `count`; alone by default."""

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> Processes:
        """Return the processes of torch.distributed, which is started here if torchrun started this process."""
        if not (distributed.is_available() and distributed.is_initialized()):
            if _started() == 1:
                return cls()
            distributed.init_process_group(timeout=timedelta(minutes=30))
        return cls(distributed.get_rank(), distributed.get_world_size())

    def shares(self, items: Any) -> list[Any]:
        """Return the share of each process, which may be empty.

        >>> Processes(count=3).shares([0, 1, 2, 3])
        [[0, 3], [1], [2]]
        """
        return [items[rank :: self.count] for rank in range(self.count)]

    def from_first(self, value: Any) -> Any:
        """Return the value of process 0."""
        held = [value]
        if self.count > 1:
            exchange(distributed.broadcast_object_list, held, src=0)
        return held[0]

    def shared_run(self, caller: str, key: NoiseKey | None, run_id: str | None) -> tuple[NoiseKey, str]:
        """Return the given key and run_id, or new ones that all processes share.

        Each `caller` begins with this. It refuses processes that are in different calls or have different code, because
        later they would wait for each other.
        """
        if key is not None and not isinstance(key, NoiseKey):
            raise ValueError(f"key must be a NoiseKey, got {type(key).__name__}. Use NoiseKey.load or .generate.")
        given = {"key= (given or not)": key is None, "run_id= (given or not)": run_id is None}
        if self.count > 1:
            self.agree({"the next call (private_loader or optimizer)": caller, **_code(), **given})
        secret, name = self.from_first((NoiseKey.generate()._secret if key is None else None, os.urandom(16).hex()))
        return NoiseKey.from_bytes(secret) if key is None else key, name if run_id is None else run_id

    def begin(self, model: nn.Module, values: Mapping[str, Any]) -> None:
        """Refuse processes that differ in values or models; all start with the weights of process 0."""
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ValueError(f"{type(model).__name__} combines gradients itself. Pass and call model.module instead")
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        shapes = [(name, *tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors.items()]
        self.agree({**values, "the model": shapes})
        self.copy_from_first(tensors.values())

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of process 0, except DTensors, of which each process has its own part."""
        if self.count > 1:
            for tensor in tensors:
                if not hasattr(tensor, "placements"):
                    exchange(distributed.broadcast, tensor.detach(), src=0)

    def agree(self, values: Mapping[str, Any]) -> None:
        """Refuse values that differ between processes. They are compared by digest, in one collective."""
        if self.count == 1:
            return
        digests = {
            name: hashlib.sha256(json.dumps(value, default=str, sort_keys=True).encode()).hexdigest()
            for name, value in values.items()
        }
        found = self.gathered(digests)
        for name in values:
            others = [rank for rank in range(self.count) if found[rank].get(name) != found[0].get(name)]
            if others:
                raise ValueError(
                    f"{name} of process {others[0]} differs from process 0. Give all processes the same code, the same "
                    "arguments, and the same records in the same order"
                )

    def total(self, own: int, common: Sequence[int], device: torch.device) -> int | None:
        """Return the sum of all processes' numbers, or None if what they should have in common differs."""
        if self.count == 1:
            return own
        numbers = torch.tensor([own, *common], dtype=torch.int64, device=device)
        gathered = [torch.empty_like(numbers) for _ in range(self.count)]
        exchange(distributed.all_gather, gathered, numbers)
        found = torch.stack(gathered).tolist()
        return sum(one[0] for one in found) if all(one[1:] == [*common] for one in found) else None

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all processes."""
        found: list[Any] = [None] * self.count
        exchange(distributed.all_gather_object, found, value)
        return found

    def add_up(self, vectors: Iterable[Tensor]) -> None:
        """Replace each vector with its sum over all processes, with the same bits everywhere."""
        if self.count > 1:
            for vector in vectors:
                exchange(distributed.all_reduce, vector)

    def only_first(self, check: Callable[[], None], device: torch.device) -> None:
        """Run a check in process 0; if it fails, all processes raise an error."""
        error: Exception | None = None
        if self.rank == 0:
            try:
                check()
            except Exception as found:
                error = found
        if self.count > 1:
            failed = torch.tensor(error is not None, device=device)
            exchange(distributed.broadcast, failed, src=0)
            if bool(failed) and self.rank > 0:
                raise ValueError("process 0 refused the step; see its error message")
        if error is not None:
            raise error


def exchange(collective: Callable[..., Any], *values: Any, **named: Any) -> None:
    """Run a collective of torch.distributed; a process that has lost the others raises a ConnectionError."""
    try:
        collective(*values, **named)
    except RuntimeError as error:
        if "Duplicate GPU" in str(error):
            fix = "Call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) first, and move the model to that GPU"
            raise ValueError(f"two processes use the same GPU. {fix}") from error
        if isinstance(error, distributed.DistError) or "gloo" in str(error):
            raise ConnectionError("another process failed, ended or did not answer in time; see its message") from error
        raise


@functools.cache
def _code() -> dict[str, str]:
    """Return versions, and digests of dpoptim's files and of the program: two copies may have the same version."""
    package, program = Path(__file__).parents[1], getattr(sys.modules["__main__"], "__file__", None)
    files = {
        "the code of dpoptim": sorted(package.rglob("*.py")),
        "the script": [Path(program)] if program is not None and Path(program).is_file() else [],
    }
    digests = {
        what: hashlib.sha256(b"".join(f"{path.name} ".encode() + path.read_bytes() for path in paths)).hexdigest()
        for what, paths in files.items()
    }
    return {"the version of dpoptim": __version__, "the version of torch": torch.__version__, **digests}


def _started() -> int:
    """Return how many processes torchrun, or a launcher like it, has started."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1 and "RANK" not in os.environ:
        raise ValueError(f"WORLD_SIZE={count} without RANK. Use torchrun, or call init_process_group() first")
    return count


def check_alone(what: str) -> None:
    """Refuse what supports only one process."""
    if _started() > 1 or Processes.current().count > 1:
        raise ValueError(f"{what} runs in one process for now. Start it without torchrun or accelerate launch")
