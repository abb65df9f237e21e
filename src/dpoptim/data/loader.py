"""Batches drawn exactly as the plan says, through the machinery of `torch.utils.data.DataLoader`."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, cast

import torch.utils.data
from numpy.typing import NDArray
from torch import Tensor

from dpoptim.data import batch_handshake as tickets
from dpoptim.data.batch_handshake import Ticket
from dpoptim.data.lengths import Integers, checked_lengths, cut_by_length, cut_together
from dpoptim.data.record_fingerprint import digest_in_memory
from dpoptim.data.record_schema import check_all_forms, collate_one_form, is_in_memory
from dpoptim.noise import NoiseKey
from dpoptim.privacy.plan import PrivacyPlan


class PrivateLoader:
    """The steps of a plan, each as one or more collated batches; made by `private_loader`.

    Guarantee: the batches of step t are a pure function of (key, run_id, t) and of the plan's numbers. Each step is
    drawn once: an iteration that is left early is taken up by the next one at the first step that was not
    yielded whole, and after the last step a new iteration is refused, since more steps are not covered by the
    plan.
    Edge cases: an empty Poisson sample yields a placeholder of one example, which its ticket tells the
    optimizer to leave out: the step is then noise alone.
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[Any],
        plan: PrivacyPlan,
        *,
        key: NoiseKey,
        run_id: str,
        micro_batch_size: int | None,
        lengths: Integers | None,
        micro_batch_tokens: int | None,
        bucket: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        num_workers: int,
        pin_memory: bool,
        start_step: int,
        look_ahead: int,
        digest: str | None,
        compare_batches: bool,
    ) -> None:
        self.dataset = dataset
        self.plan = plan
        self.key = key
        self.micro_batch_size = micro_batch_size
        self.lengths = lengths
        self.micro_batch_tokens = micro_batch_tokens
        self.bucket = bucket
        self.generation = 0
        self.look_ahead = look_ahead
        self.step_ends = False
        self._begin_run(run_id)
        self._dataset_size = len(cast(Sized, dataset))
        self._next_step = start_step
        self._digest, self._digest_is_known = digest, digest is not None
        self._compare_batches = compare_batches
        self._loader_options: dict[str, Any] = {
            "collate_fn": collate_fn,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
        }

    def _begin_run(self, run_id: str) -> None:
        """Batches are a function of (key, run_id, step): two runs that shared their draws would not compose."""
        self.run_id = run_id
        self._draws = self.key.for_run(f"loader {run_id}")
        self._fingerprint = self._draws.fingerprint()

    @property
    def steps(self) -> int:
        """How many steps the plan has in all."""
        return self.plan.steps

    @property
    def next_step(self) -> int:
        """The first step that has not been yielded whole."""
        return self._next_step

    def __len__(self) -> int:
        """How many physical batches are still to come, where the plan alone determines it."""
        remaining = self.steps - self._next_step
        if self.lengths is None:
            if self.micro_batch_size is None:
                return remaining
            if not self.plan.sampling.is_random:
                return remaining * -(-self.plan.batch_size // self.micro_batch_size)
        raise TypeError(
            "the number of micro-batches of a random sample, or of one cut by length, is not known before it is drawn; "
            "use .steps for the number of steps"
        )

    def __iter__(self) -> Iterator[Any]:
        if self._next_step >= self.steps:
            raise ValueError(
                f"all {self.steps} steps of the plan have been drawn, and more are not covered by its guarantee; for a "
                "longer run, calibrate a plan with more steps"
            )
        self.generation += 1
        return self._iterate(self.generation)

    def _workers_generator(self) -> torch.Generator:
        """What workers are seeded from. Torch would draw from the global generator when the first batch is fetched, and
        dropout of that step would be another in a run that goes on there than in one that came by.
        """
        secret = self._draws.subkey("workers", str(self._next_step))
        return torch.Generator().manual_seed(int.from_bytes(secret[:8], "little") % 2**63)

    def _iterate(self, generation: int) -> Iterator[Any]:
        pending: deque[Ticket] = deque()
        options = dict(self._loader_options)
        if self._compare_batches:
            collate = options["collate_fn"] or torch.utils.data.default_collate
            options["collate_fn"] = functools.partial(collate_one_form, collate)
        # The batch sampler runs in this process, ahead of the workers, and batches come back in its order.
        loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            _OneByOne(self.dataset) if _is_transformed(self.dataset) else self.dataset,
            batch_sampler=_PhysicalBatches(self, pending),
            generator=self._workers_generator(),
            **options,
        )
        for batch in loader:
            if generation != self.generation:
                raise RuntimeError("this iteration was abandoned when a newer one began; use the newer one")
            ticket = pending.popleft()
            tickets.issue(self.plan, self, ticket)
            self.step_ends = ticket.closes_batch
            if ticket.closes_batch:
                self._next_step = ticket.step + 1
            yield batch

    def physical_batches(self, step: int) -> Iterator[tuple[list[int], Ticket]]:
        """The index lists of one step, each with its ticket."""
        plan = self.plan
        indices = plan.sampling.indices(
            self._draws,
            step,
            num_examples=plan.num_examples,
            batch_size=plan.batch_size,
            dataset_size=self._dataset_size,
        )
        parts = self._parts(indices)
        for number, part in enumerate(parts or [[0]]):
            yield (
                part,
                Ticket(
                    step=step,
                    key_fingerprint=self._fingerprint,
                    physical_examples=len(part),
                    is_placeholder=not parts,
                    opens_batch=number == 0,
                    closes_batch=number >= len(parts) - 1,
                ),
            )

    def _parts(self, indices: Integers) -> list[list[int]]:
        """The examples of one step, divided; none for an empty sample."""
        if self.lengths is None or self.micro_batch_tokens is None:
            size = self.micro_batch_size or len(indices) or 1
            return [indices[start : start + size].tolist() for start in range(0, len(indices), size)]
        positions = cut_by_length(
            self.lengths[indices],
            max_tokens=self.micro_batch_tokens,
            max_examples=self.micro_batch_size,
            bucket=self.bucket,
            together=cut_together(self.plan.batch_size),
        )
        return [indices[part].tolist() for part in positions]

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, for its checkpoint; holds the key's fingerprint and never the key."""
        return {
            "next_step": self._next_step,
            "run_id": self.run_id,
            "key_fingerprint": self.key.fingerprint(),
            "dataset": self._dataset_fingerprint(),
            "records": self._records_digest(),
        }

    def _dataset_fingerprint(self) -> str:
        """The size, hidden by the key: under add-remove adjacency it is itself private."""
        return self.key.subkey("dataset size", str(self._dataset_size)).hex()[:16]

    def _records_digest(self) -> str | None:
        """The digest that was given, hidden by the key; else that of a dataset in memory, taken once; else None."""
        if not self._digest_is_known:
            self._digest, self._digest_is_known = digest_in_memory(self.dataset, self.key), True
        return None if self._digest is None else self.key.subkey("dataset digest", self._digest).hex()[:32]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`; refuses another key, another number of examples, and other examples where they
        are known: see `digest` in `private_loader`.
        """
        if state["key_fingerprint"] != self.key.fingerprint():
            raise ValueError(
                f"the state was saved with key {state['key_fingerprint']} and this loader has key "
                f"{self.key.fingerprint()}; pass the run's own key to private_loader(key=...)"
            )
        if state["dataset"] != self._dataset_fingerprint():
            raise ValueError(
                f"the state was saved with a dataset of another size than this one's {self._dataset_size}; load the "
                "dataset of the original run"
            )
        if state.get("records") not in (None, self._records_digest()):
            raise ValueError(
                "the state was saved over other examples than this dataset's (edited, moved or replaced), and over "
                "others the run's noise would cancel out; load the dataset of the original run"
            )
        next_step = state["next_step"]
        _check_step("next_step", next_step, self.steps)
        self.generation += 1
        self._begin_run(str(state["run_id"]))
        self._next_step = next_step


class _PhysicalBatches:
    """The batch sampler handed to DataLoader; notes down the ticket of every index list that it gives out."""

    def __init__(self, loader: PrivateLoader, pending: deque[Ticket]) -> None:
        self._loader = loader
        self._pending = pending

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._loader.next_step, self._loader.steps):
            for indices, ticket in self._loader.physical_batches(step):
                self._pending.append(ticket)
                yield indices


class _OneByOne(torch.utils.data.Dataset[Any]):
    """A dataset whose records are read one by one: without `__getitems__`."""

    def __init__(self, dataset: torch.utils.data.Dataset[Any]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(cast(Sized, self._dataset))

    def __getitem__(self, place: int) -> Any:
        return self._dataset[place]


def _is_transformed(dataset: Any) -> bool:
    """Whether it is a `datasets.Dataset` that makes something of a whole batch: by a transform, or by a format such as
    "torch", which makes fractions of all numbers where one is missing.
    """
    while isinstance(dataset, torch.utils.data.Subset):
        dataset = dataset.dataset
    form = getattr(dataset, "format", None)
    return hasattr(dataset, "column_names") and isinstance(form, Mapping) and form.get("type") not in (None, "python")


def private_loader(
    dataset: torch.utils.data.Dataset[Any],
    plan: PrivacyPlan,
    *,
    key: NoiseKey | None = None,
    run_id: str | None = None,
    micro_batch_size: int | None = None,
    lengths: Sequence[int] | NDArray[Any] | Tensor | None = None,
    micro_batch_tokens: int | None = None,
    bucket: int = 64,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    start_step: int = 0,
    look_ahead: int = 0,
    digest: str | None = None,
    check_schema: bool = True,
) -> PrivateLoader:
    """A loader that draws each step's examples as `plan.sampling` says, for all `plan.steps` steps.

    The loader is the whole training: all steps of the plan, with no loop over epochs around it.
    With `micro_batch_size`, a step's batch is yielded in parts of at most that many examples, and the
    optimizer makes one update per step; the user's loop does not change, but a scheduler is advanced only
    `if loader.step_ends`, which is true after the last part of a step.
    With `lengths` (one an example, tokens say) and `micro_batch_tokens`, the parts of a step are of like length:
    examples × longest, rounded up to a multiple of `bucket`, is at most `micro_batch_tokens` in each, and as little
    is padded as the launch of each part is worth (`cut_by_length`). `micro_batch_size` bounds them as well.

    Guarantee: under `ZERO_OUT` and `REPLACE` the dataset must have exactly `plan.num_examples` examples;
    under `ADD_REMOVE` that number is a declared constant, and sampling goes over the data at hand at the
    plan's rate. How a step is cut changes no sum and no guarantee, provided that an example's loss does not depend on
    its padding; times and shapes of the parts depend on the data, as those of any padded batch do.
    Edge cases: without a `key` a new one is made. The public `run_id` is new for every loader, so that runs with
    one key draw on their own; to resume, load the loader's state, or give `key`, `run_id` and `start_step`.
    An example that alone exceeds `micro_batch_tokens` is a part of its own.
    `look_ahead` is how many batches a wrapper may fetch before the optimizer has stepped on them; by default none.
    `digest` names the examples, so that `load_state_dict` refuses others: a step that is taken again over other data
    has the same noise. Lists, arrays, tensors and TensorDatasets are read for it when a state is taken (5 s for a
    million short texts). For a dataset on the disk give it: a version, or
    `dpoptim.privacy.digest_records(dataset, key).whole`, which reads every example once; without it only the number
    of examples is checked.
    Examples of a `datasets.Dataset` with a transform or a format ("torch") are read one by one: they are given a whole
    batch, and may mix it; without them reading is faster. A `__getitems__` or `collate_fn` of your own is given one
    too: see that each example is made of itself alone.
    Examples must have one form (the same keys, and numbers, texts or arrays of one type at each): collators take the
    form of a whole batch from its first example, so that one would change the others. Lists and tuples, and Subsets and
    ConcatDatasets of them, are compared at once (2 s for a million short texts), other datasets batch by batch as they
    are fetched. Either refusal tells that there is an example of another form, which no guarantee covers; the later one
    tells in which step it was drawn beside others too, and what was released before it is spent. To know it beforehand,
    read all of a dataset once: `dpoptim.data.record_schema.check_all_forms(dataset)`. `check_schema=False` is for a
    `collate_fn` that makes something of each example by itself.

    >>> plan = PrivacyPlan(num_examples=6, batch_size=2, steps=3)
    >>> loader = private_loader(list(range(6)), plan)
    >>> sorted(int(i) for batch in loader for i in batch)
    [0, 1, 2, 3, 4, 5]
    """
    size = _checked_size(dataset, plan)
    if micro_batch_size is not None and not _is_whole(micro_batch_size, least=1):
        raise ValueError(f"micro_batch_size must be a whole number ≥ 1 or None, got {micro_batch_size!r}")
    _check_start(start_step, plan.steps, has_own_draws=key is not None and run_id is not None)
    if not _is_whole(look_ahead, least=0):
        raise ValueError(f"look_ahead must be a whole number ≥ 0, got {look_ahead!r}")
    if digest is not None and not isinstance(digest, str):
        raise ValueError(f"digest must be a string that names the examples, got {type(digest).__name__}")
    if key is not None and not isinstance(key, NoiseKey):
        raise ValueError(f"key must be a NoiseKey, got {type(key).__name__}; use NoiseKey.generate()")
    compare = check_schema and micro_batch_size != 1
    if compare and is_in_memory(dataset):
        check_all_forms(dataset)
    return PrivateLoader(
        dataset,
        plan,
        key=key if key is not None else NoiseKey.generate(),
        run_id=os.urandom(16).hex() if run_id is None else run_id,
        micro_batch_size=micro_batch_size,
        lengths=checked_lengths(lengths, micro_batch_tokens, bucket, examples=size),
        micro_batch_tokens=micro_batch_tokens,
        bucket=bucket,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pin_memory,
        start_step=start_step,
        look_ahead=look_ahead,
        digest=digest,
        compare_batches=compare and not is_in_memory(dataset),
    )


def _checked_size(dataset: torch.utils.data.Dataset[Any], plan: PrivacyPlan) -> int:
    """How many examples the dataset has, which must be those that the plan counts wherever that number is public."""
    if isinstance(dataset, torch.utils.data.IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise ValueError(
            f"dataset must be map-style (__getitem__ and __len__), got {type(dataset).__name__}: examples are drawn by "
            "index; put a stream into a list or an indexed file first"
        )
    size = len(cast(Sized, dataset))
    if size == 0:
        raise ValueError("dataset is empty; there is nothing to train on")
    if plan.adjacency.dataset_size_is_public and size != plan.num_examples:
        raise ValueError(
            f"dataset has {size} examples and the plan says num_examples={plan.num_examples}; make the plan with "
            f"num_examples={size}"
        )
    return size


def _check_start(start_step: int, steps: int, *, has_own_draws: bool) -> None:
    """A run goes on at one of its steps, and, behind the first, with the key and run_id that drew the others."""
    _check_step("start_step", start_step, steps)
    if start_step > 0 and not has_own_draws:
        raise ValueError(
            f"start_step={start_step} continues a run, which needs the run's own key and run_id: others would draw "
            "other batches; pass key=NoiseKey.load(path) and run_id=loader.run_id, or load the loader's state_dict"
        )


def _check_step(name: str, step: Any, steps: int) -> None:
    if not _is_whole(step, least=0) or step > steps:
        raise ValueError(f"{name} must be a whole number from 0 to {steps}, got {step!r}")


def _is_whole(value: Any, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
