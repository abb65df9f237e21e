"""What has been kept of one physical batch, and where it came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.autograd import Variable

from dpoptim.clipping.layers.rule import Use
from dpoptim.clipping.norms import ParameterGradients


@dataclass
class PhysicalBatch:
    """The gradients of the examples that went through the model together, by parameter."""

    gradients: dict[str, ParameterGradients] = field(default_factory=dict)
    examples: int = 0
    extra_memory: int = 0  # that may still be spent on gradients larger than their factors
    calls: set[int] = field(default_factory=set)
    backwards: set[int] = field(default_factory=set)
    unfinished: set[int] = field(default_factory=set)  # of the backwards: those that run, or failed
    last: tuple[Use, int] | None = None  # what was kept last, and in which backward
    add_ready: Callable[[], None] | None = None  # adds what a graph has clipped and summed, in place of gradients

    @property
    def is_open(self) -> bool:
        """Whether examples have been differentiated."""
        return bool(self.gradients) or self.add_ready is not None

    def enter(self, use: Use, backward: int) -> None:
        """A use arrives in a backward, which is over once torch says so."""
        if backward not in self.backwards:
            self.unfinished.add(backward)
            Variable._execution_engine.queue_callback(partial(self.unfinished.discard, backward))
        self.backwards |= {backward} if use.recomputed_in is None else {backward, use.recomputed_in}
        self.last = (use, backward)

    def has_failed(self) -> bool:
        """Whether its backward failed, and the caller knows; ValueError where it was run again on what was left."""
        failed = self.unfinished if torch._C._current_graph_task_id() == -1 else set()
        if failed and failed != self.backwards:
            raise ValueError("a backward failed and another went through the same call; run the model again instead")
        return bool(failed)
