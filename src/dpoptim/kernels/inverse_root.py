"""The scale of scale-then-privatize: elementwise arithmetic on vectors as long as the model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpoptim import kernels
from dpoptim.kernels import choose, elementwise_c
from dpoptim.kernels.flat import unflatten


def inverse_root(moment: Tensor, *, exponent: float, factor: float | Tensor, floor: float | Tensor) -> Tensor:
    """Return 1 / (factor·max(moment, 0)^exponent + floor), such as 0.1 for 16 with exponent ½, factor 2 and floor 2."""
    if exponent == 0.5 and choose.on_gpu(moment):
        return kernels.adam_triton.inverse_root(moment, factor, floor)
    if exponent == 0.5 and not isinstance(factor, Tensor):
        found = elementwise_c.inverse_root(moment, factor=factor, floor=float(floor))
        if found is not None:
            return found
    root = moment.clamp(min=0).pow_(exponent)
    if isinstance(factor, Tensor):
        return root.mul_(factor).add_(floor).reciprocal_()
    lowest = torch.tensor(floor, dtype=root.dtype, device="cpu")
    return torch.add(lowest, root, alpha=factor, out=root).reciprocal_()


SMALL = 1 << 16  # elements; the scale of a smaller parameter is computed alone


@dataclass(frozen=True)
class LazyInverseRoot:
    """`inverse_root` of moment + start, not computed yet."""

    moment: Tensor
    exponent: float
    factor: float | Tensor  # a tensor if a graph reads it
    floor: float | Tensor
    start: float = 0.0

    def tensor(self) -> Tensor:
        moment = self.moment + self.start if self.start else self.moment
        return inverse_root(moment, exponent=self.exponent, factor=self.factor, floor=self.floor)

    @property
    def settings(self) -> tuple[float | Tensor, ...]:
        return self.exponent, self.factor, self.floor, self.start


class ComputedScale(Mapping[str, Tensor]):
    """The scale of each parameter, computed from the second moment at every read, so that it takes no memory.

    Each of `parts` is the scale of several parameters, and the part of its moment that belongs to each parameter. The
    optimizer changes the moments only after it has released the sums, and then sets a new scale. Any other change is
    refused.
    """

    def __init__(self, parts: Sequence[tuple[LazyInverseRoot, Mapping[str, Tensor]]]) -> None:
        self.wholes = [whole for whole, _ in parts]
        self._parts = [moments for _, moments in parts]
        self._part_of = {name: number for number, moments in enumerate(self._parts) for name in moments}
        self._versions = [whole.moment._version for whole in self.wholes]

    @property
    def layout(self) -> Hashable:
        """What a graph that computes the scale repeats at every run."""
        return tuple((whole.moment.data_ptr(), whole.exponent, whole.start) for whole in self.wholes)

    @property
    def identity(self) -> Hashable:
        """A value that changes whenever the scale changes."""
        return tuple((whole.moment.data_ptr(), whole.moment._version, whole.settings) for whole in self.wholes)

    def numbers(self) -> Tensor:
        """[parts, 2]: factor and floor of each part, on the host."""
        found = [(whole.factor, whole.floor) for whole in self.wholes]
        is_cuda = self.wholes[0].moment.is_cuda
        return torch.tensor(found, dtype=self.wholes[0].moment.dtype, device="cpu", pin_memory=is_cuda)

    def reading(self, numbers: Tensor) -> ComputedScale:
        """Return the same scale for a graph, which reads `numbers()` at a fixed address at every run."""
        self._check_moments()
        pairs = zip(self.wholes, numbers, self._parts, strict=True)
        return ComputedScale([(replace(whole, factor=two[0], floor=two[1]), moments) for whole, two, moments in pairs])

    def lazy(self, name: str) -> LazyInverseRoot:
        """Return the scale of a parameter, not computed yet."""
        self._check_moments()
        number = self._part_of[name]
        return replace(self.wholes[number], moment=self._parts[number][name])

    def _check_moments(self) -> None:
        if self._versions != [whole.moment._version for whole in self.wholes]:
            raise ValueError(
                "the second moment, which sets the scale, was changed between two steps. Use load_state_dict() instead"
            )

    def reader(self) -> Callable[[str], Tensor]:
        """Return a function that reads scales and computes a part at once, for reads in the order of the parts."""
        held: tuple[int, dict[str, Tensor]] = -1, {}

        def read(name: str) -> Tensor:
            nonlocal held
            number, lazy = self._part_of[name], self.lazy(name)
            if lazy.moment.numel() < SMALL:
                return lazy.tensor()
            if held[0] != number:
                held, moments = (-1, {}), self._parts[number]  # frees memory first
                views = unflatten(self.wholes[number].tensor(), list(moments.values()))
                held = number, dict(zip(moments, views, strict=True))
            return held[1][name]

        return read

    def __getitem__(self, name: str) -> Tensor:
        return self.lazy(name).tensor()

    def __iter__(self) -> Iterator[str]:
        return iter(self._part_of)

    def __len__(self) -> int:
        return len(self._part_of)


def uncomputed(scale: Mapping[str, Tensor], names: Sequence[str]) -> list[Tensor | LazyInverseRoot]:
    """Return the scales of `names`, without computing those of a `ComputedScale`."""
    return [scale.lazy(name) if isinstance(scale, ComputedScale) else scale[name] for name in names]
