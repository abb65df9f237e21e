"""Parameters that FSDP2 (`fully_shard`) divides: each process holds some rows of every parameter.

Moments, noise and sums are divided in the same way. A whole parameter, or a whole sum, exists only for a moment: while
its layer runs, while its norms are taken, and until it has been added up over the processes.

Guarantee: `added_up` returns this process's rows of the sum over all processes, so each element of a sum is in exactly
one process, which adds its noise once. All processes call `added_up` and `whole` for the same parameters in the same
order, whatever their batches are; otherwise they would wait for each other.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree

from dpoptim.data.processes import Processes, exchange
from dpoptim.kernels.norms import wide_dtype

BUCKET_ELEMENTS = 1 << 24  # of parameters that travel together


def is_sharded(tensor: Tensor | None) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "placements")


def fsdp_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that `fully_shard` was called with."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Divide parameters that an evaluation left whole."""
    for group in fsdp_modules(model):
        group.reshard()  # type: ignore[operator]


def own_part(tensor: Any, *, like: Tensor | None = None) -> Tensor:
    """Return the rows that this process holds: of a sharded tensor, or of a whole one `like` a sharded parameter."""
    own: Tensor = tensor.detach().to_local() if is_sharded(tensor) else tensor
    if is_sharded(like) and not is_sharded(tensor):
        rows, rank = -(-own.shape[0] // distributed.get_world_size()), distributed.get_rank()
        return own[rows * rank : rows * (rank + 1)]
    return own


def whole_state(state: Any, *, to_save: bool = False) -> Any:
    """Return a state_dict with whole tensors in place of sharded ones; all processes must call this.

    Any number of processes can load the result, with or without sharding. With `to_save`, only process 0 gets the whole
    tensors, on the CPU, and the others get None. No GPU then holds more than one whole tensor.
    """

    def whole(leaf: Any) -> Any:
        if not is_sharded(leaf):
            return leaf
        # No backend sends 16-bit integers, so they travel as bfloat16.
        is_short = leaf.dtype in (torch.int16, torch.uint16)
        sendable: Any = like_parameter(leaf.to_local().view(torch.bfloat16), leaf) if is_short else leaf
        found = sendable.full_tensor().view(leaf.dtype)
        return found if not to_save else found.cpu() if distributed.get_rank() == 0 else None

    return pytree.tree_map(whole, state)


def like_parameter(part: Tensor, parameter: Tensor) -> Tensor:
    """Return the rows of this process as a DTensor that is sharded like the parameter, for checkpoints."""
    if not is_sharded(parameter):
        return part
    from torch.distributed.tensor import DTensor

    given: Any = parameter
    return DTensor.from_local(
        part, given.device_mesh, given.placements, run_check=False, shape=given.shape, stride=given.stride()
    )


@dataclass(frozen=True)
class Shards:
    """The trained parameters of a model, by name, if they are sharded."""

    processes: Processes
    shapes: Mapping[str, torch.Size]  # of whole parameters
    dtype: torch.dtype  # of sums

    @classmethod
    def of(cls, model: nn.Module, processes: Processes) -> Shards | None:
        """Return the shards of a model, or None if its parameters are whole; refuse what is neither."""
        reshard(model)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
            raise ValueError("FSDP1 flattens parameters. Use FSDP2, torch.distributed.fsdp.fully_shard")
        if not any(map(is_sharded, trained.values())):
            return None
        for name, parameter in trained.items():
            given: Any = parameter
            is_by_rows = is_sharded(parameter) and [str(p) for p in given.placements] == ["S(0)"]
            if not is_by_rows or given.device_mesh.size() != processes.count:
                raise ValueError(
                    f"parameter '{name}' is not divided by rows among all processes. Call fully_shard(model) with its "
                    "default mesh, and no tensor parallelism"
                )
            if given.device.type != given.device_mesh.device_type:
                raise ValueError(f"parameter '{name}' is offloaded to the CPU; call fully_shard without offload_policy")
        dtypes = [wide_dtype(parameter.dtype) for parameter in trained.values()]
        shapes = {name: parameter.shape for name, parameter in trained.items()}
        return cls(processes, shapes, functools.reduce(torch.promote_types, dtypes))

    @cached_property
    def buckets(self) -> list[list[str]]:
        """The names of parameters that travel together, the same in all processes."""
        buckets: list[list[str]] = []
        filled = BUCKET_ELEMENTS
        for name, shape in self.shapes.items():
            if filled + shape.numel() > BUCKET_ELEMENTS:
                buckets.append([])
                filled = 0
            buckets[-1].append(name)
            filled += shape.numel()
        return buckets

    def start(self, name: str) -> int:
        """Return the first element of this process's rows."""
        return min(self.shapes[name].numel(), self._width(name) * self.processes.rank)

    def _width(self, name: str) -> int:
        """Return how many elements each process holds; the last ones may hold fewer, and are padded to travel."""
        shape = self.shapes[name]
        return -(-shape[0] // self.processes.count) * shape[1:].numel()

    def added_up(
        self, names: list[str], values: Mapping[str, Tensor], *, device: torch.device, double: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield this process's rows of the sums of whole tensors over all processes; a missing value is 0."""
        widths = [self._width(name) for name in names]
        dtype = torch.float64 if double else self.dtype
        packed = torch.zeros(self.processes.count, sum(widths), dtype=dtype, device=device)
        for name, width, place in zip(names, widths, packed.split(widths, 1), strict=True):
            if name in values:
                for process, part in enumerate(values[name].reshape(-1).split(width)):
                    place[process, : len(part)] = part
        own = packed.new_empty(packed.shape[1])
        exchange(distributed.reduce_scatter, own, list(packed))
        for name, part in zip(names, own.split(widths), strict=True):
            shape = self.shapes[name]
            yield name, part[: shape.numel() - self.start(name)].view(-1, *shape[1:])

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors from the rows that each process holds."""
        first = next(iter(parts.values()))
        widths = [self._width(name) for name in parts]
        packed = first.new_zeros(sum(widths), dtype=torch.promote_types(first.dtype, self.dtype))
        for part, place in zip(parts.values(), packed.split(widths), strict=True):
            place[: part.numel()] = part.reshape(-1)
        gathered = packed.new_empty(self.processes.count, len(packed))
        exchange(distributed.all_gather, list(gathered), packed)
        columns = gathered.split(widths, 1)
        return {
            name: column.reshape(-1)[: self.shapes[name].numel()].view(self.shapes[name])
            for name, column in zip(parts, columns, strict=True)
        }

    def calls_to_check(self, own: Any, needs_check: Callable[[], bool], *, device: torch.device) -> Iterator[Any]:
        """Yield calls of the model that all processes must check together, because layers wait for all processes.

        Each process has its `own` call, and one that needs a check is sent to all, once. A check that shows nothing,
        because its examples are equal, leaves its call unchecked, and the next process has its turn.
        """
        asked: set[int] = set()
        for _ in range(self.processes.count):
            needed = self.processes.gathered(needs_check())
            source = next((rank for rank, needs in enumerate(needed) if needs and rank not in asked), None)
            if source is None:
                return
            asked.add(source)
            held = [pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), own)]
            exchange(distributed.broadcast_object_list, held, src=source)
            yield pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), held[0])


def averaged_gradients(loss: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor | None, ...]:
    """Return the gradients of a public loss, which FSDP averages over all processes, and leave `.grad` empty."""
    for parameter in parameters:
        parameter.grad = None
    loss.backward()
    gradients = tuple(parameter.grad for parameter in parameters)
    for parameter in parameters:
        parameter.grad = None
    return gradients


class ParameterSlots:
    """The modules that hold the parameters of a sharded model; several hold a tied one."""

    def __init__(self, model: nn.Module, trained: Collection[str]) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._trained = trained
        self._found = [(names[id(parameter)], module, key) for module, key, parameter in _parameters_of(model)]
        self._sharded = [id(parameter) for _, _, parameter in _parameters_of(model)]

    def unsharded(self, *, check: bool) -> Iterator[tuple[nn.Parameter, str]]:
        """Yield trained parameters that FSDP holds whole, with their names; `check` refuses what was (un)frozen."""
        for name, module, key in self._found:
            parameter = module._parameters.get(key)
            if not isinstance(parameter, nn.Parameter) or is_sharded(parameter):
                continue
            if check and parameter.requires_grad != (name in self._trained):
                raise ValueError(
                    f"parameter '{name}' was frozen or unfrozen after the optimizer was created; create it last"
                )
            if name in self._trained:
                yield parameter, name

    def have_changed(self, model: nn.Module) -> bool:
        """Return whether a module or parameter was replaced, other than by FSDP, which makes parameters whole."""
        now = list(_parameters_of(model))
        if [(module, key) for module, key, _ in now] != [(module, key) for _, module, key in self._found]:
            return True
        are_sharded = all(is_sharded(parameter) for *_, parameter in now)
        return are_sharded and [id(parameter) for *_, parameter in now] != self._sharded


def _parameters_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield module, key, parameter
