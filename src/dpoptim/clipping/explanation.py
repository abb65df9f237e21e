"""A readable description of how the norms of a physical batch were computed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from dpoptim.clipping.norms import NormMethod, ParameterGradients


@dataclass(frozen=True, kw_only=True)
class ParameterNormMethod:
    """The norm method of one parameter, and the memory it holds until the batch is clipped."""

    name: str
    shape: torch.Size
    positions: int  # per example; 0 if gradients themselves are held
    norm_method: NormMethod
    held_bytes: int
    extra_bytes: int  # that forming the gradients would take in addition


@dataclass(frozen=True)
class Explanation:
    """The norm methods of all parameters of a physical batch; `str` prints a table.

    >>> from dpoptim.clipping.gradient_factors import Materialized, OuterProduct
    >>> weight, bias = ParameterGradients(torch.Size([9, 9])), ParameterGradients(torch.Size([9]))
    >>> weight.add(OuterProduct(torch.ones(4, 2, 9), torch.ones(4, 2, 9)))
    >>> bias.add(Materialized(torch.ones(4, 9)))
    >>> print(explain({"0.weight": weight, "1.weight": weight, "0.bias": bias}, scaled=False))
    a physical batch of 4 examples
      2 x *.weight [9, 9]: products of the positions among themselves (2 positions, 1.2 kB held)
      0.bias [9]: gradients formed once, measured and summed (144 B held)
    clipping_memory=1440 (1.4 kB more per physical batch) would form all gradients
    """

    examples: int
    parameters: tuple[ParameterNormMethod, ...]

    def __str__(self) -> str:
        lines = [f"a physical batch of {self.examples} examples"]
        lines += [f"  {line}" for line in self._rows()]
        extra = sum(parameter.extra_bytes for parameter in self.parameters)
        if extra:
            lines.append(f"clipping_memory={extra} ({_bytes(extra)} more per physical batch) would form all gradients")
        return "\n".join(lines)

    def _rows(self) -> Iterator[str]:
        alike: dict[tuple[str, torch.Size, int, NormMethod], list[ParameterNormMethod]] = {}
        for parameter in self.parameters:
            pattern = re.sub(r"\d+", "*", parameter.name)
            alike.setdefault((pattern, parameter.shape, parameter.positions, parameter.norm_method), []).append(
                parameter
            )
        for (pattern, shape, positions, method), members in alike.items():
            name = f"{len(members)} x {pattern}" if len(members) > 1 else members[0].name
            held = _bytes(sum(member.held_bytes for member in members))
            where = f"{positions} positions, " if positions else ""
            yield f"{name} {list(shape)}: {method.value} ({where}{held} held)"


def explain(gradients: Mapping[str, ParameterGradients], *, scaled: bool) -> Explanation:
    return Explanation(
        next(iter(gradients.values())).examples,
        tuple(
            ParameterNormMethod(
                name=name,
                shape=own.shape,
                positions=own.positions,
                norm_method=own.norm_method(scaled=scaled),
                held_bytes=own.held_bytes(),
                extra_bytes=sum(max(0, use.extra_bytes) for use in own.outers if use.can_be_formed),
            )
            for name, own in gradients.items()
        ),
    )


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
