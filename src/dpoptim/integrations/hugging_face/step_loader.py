"""A private loader as a trainer's loop sees it: one item a step of the plan, whatever the number of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dpoptim.data import PrivateLoader


class StepLoader:
    """Yields one `Step` for each step that is still to come; nothing is drawn before the step is iterated over.

    Guarantee: an iteration goes on where the last one ended, so that loops over epochs never begin the plan again.
    Edge cases: an empty Poisson sample is a step of one part, the placeholder; after the last step there are no items.

    >>> from dpoptim.privacy import PrivacyPlan, private_loader
    >>> loader = StepLoader(private_loader(range(6), PrivacyPlan(num_examples=6, batch_size=3, steps=2),
    ...                                    micro_batch_size=2, collate_fn=len))
    >>> [list(step) for step in loader], len(loader)
    ([[2, 1], [2, 1]], 0)
    """

    def __init__(self, loader: PrivateLoader) -> None:
        self.loader = loader
        self._batches: Iterator[Any] | None = None

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    def __len__(self) -> int:
        """How many steps are still to come."""
        return self.loader.steps - self.loader.next_step

    def __iter__(self) -> Iterator[Step]:
        while len(self):
            yield Step(self)

    def next_part(self) -> Any:
        """The next physical batch; `loader.step_ends` says whether it closes its step."""
        if self._batches is None:
            self._batches = iter(self.loader)
        return next(self._batches)

    def pause(self) -> None:
        """Let go of workers and of what they have fetched ahead.

        The next part is then fetched by an iteration that is new, as it is in a run that is continued: both draw
        torch's seeds for the workers at the same moment, and go on alike.
        """
        if self._batches is not None:
            self._batches.close()  # type: ignore[attr-defined]
            self._batches = None


class Step:
    """The physical batches of one step, in order; each must be stepped on before the next is asked for."""

    def __init__(self, steps: StepLoader) -> None:
        self._steps = steps

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._steps.next_part()
            if self._steps.loader.step_ends:
                return
