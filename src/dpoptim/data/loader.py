"""The private loader: batches drawn exactly as the plan says, fetched by torch's DataLoader."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch.utils.data
from numpy.typing import NDArray
from torch import Tensor

from dpoptim.arguments import check_at_most, check_whole
from dpoptim.data import batch_handshake as tickets
from dpoptim.data.batch_handshake import Ticket
from dpoptim.data.lengths import Integers, checked_lengths, cut_by_length, part_multiple
from dpoptim.data.processes import Processes
from dpoptim.data.record_fingerprint import fingerprint_few, fingerprint_in_memory
from dpoptim.data.record_schema import check_records, collate_checked, is_in_memory
from dpoptim.data.secret_randomness import check_rng
from dpoptim.data.users import OrderedCollate, UserRecords, cut_by_user, read_user_ids
from dpoptim.noise import NoiseKey
from dpoptim.privacy.plan import PrivacyPlan

Part = tuple[list[int], tuple[int, ...]]
"""The records of a physical batch, and how many each user has if the plan protects users."""


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateLoader:
    """The steps of a plan, each as one or more collated batches; made by `private_loader`.

    If the plan protects users, each batch has the records of several users, grouped by user.

    Guarantee: the batches of step t are a function of (key, run_id, t) and the plan only, and each step is drawn once.
    A new iteration continues at the first step that was not yielded completely; after the last step it is refused.
    An empty Poisson sample yields one example as a placeholder, which the optimizer leaves out: the step is pure noise.
    With several processes, each one yields its own share of every step, in the same number of parts.
    """

    dataset: torch.utils.data.Dataset[Any]
    plan: PrivacyPlan
    key: NoiseKey
    run_id: str
    micro_batch_size: int | None
    lengths: Integers | None
    micro_batch_tokens: int | None
    bucket: int
    next_step: int  # the first that has not been yielded completely
    digest: str | None
    fetching: dict[str, Any]  # collate_fn and workers, for torch's DataLoader
    processes: Processes
    users: UserRecords | None = None
    generation: int = field(default=0, init=False)
    step_ends: bool = field(default=False, init=False)  # whether the last batch was the last of its step

    def __post_init__(self) -> None:
        self._begin_run(self.run_id)
        self._dataset_size = len(cast(Sized, self.dataset))
        self._units = self._dataset_size if self.users is None else len(self.users)

    def _begin_run(self, run_id: str) -> None:
        """Draw from (key, run_id, step): the privacy losses of two runs add up only if their draws are independent."""
        self.run_id = run_id
        self._draws = self.key.for_run(f"loader {run_id}")
        self._fingerprint = self._draws.fingerprint()

    @property
    def steps(self) -> int:
        """How many steps the plan has."""
        return self.plan.steps

    def __len__(self) -> int:
        """How many physical batches remain, if the plan determines it."""
        remaining = self.steps - self.next_step
        if self.lengths is None:
            if self.micro_batch_size is None:
                return remaining
            if self.users is None and not self.plan.sampling.is_random:
                largest = self.processes.shares(range(self.plan.batch_size))[0]
                return remaining * -(-len(largest) // self.micro_batch_size)
        raise TypeError("the number of micro-batches is unknown before a batch is drawn and split. Use .steps instead.")

    def __iter__(self) -> Iterator[Any]:
        if self.next_step >= self.steps:
            raise ValueError(
                f"all {self.steps} steps of the plan have been drawn. To train longer, calibrate a new plan."
            )
        self.generation += 1
        return self._iterate(self.generation)

    def _iterate(self, generation: int) -> Iterator[Any]:
        pending: deque[Ticket] = deque()
        # By default torch seeds workers from the global generator, which changes the dropout of a resumed run.
        rank = f" process {self.processes.rank}" if self.processes.rank else ""
        secret = self._draws.subkey("workers", f"{self.next_step}{rank}")
        seed = torch.Generator().manual_seed(int.from_bytes(secret[:8], "little") % 2**63)
        # The batch sampler runs in this process, ahead of the workers; batches come back in its order.
        loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            cast(Any, _OneByOne(self.dataset)) if _is_transformed(self.dataset) else self.dataset,
            batch_sampler=self._index_lists(pending),
            generator=seed,
            **self.fetching,
        )
        for batch in loader:
            if generation != self.generation:
                raise RuntimeError("this iteration was abandoned when a newer one began. Use the newer one.")
            ticket = pending.popleft()
            tickets.issue(self.plan, ticket)
            self.step_ends = ticket.closes_batch
            if ticket.closes_batch:
                self.next_step = ticket.step + 1
            yield batch

    def _index_lists(self, pending: deque[Ticket]) -> Iterator[list[int]]:
        """The batch sampler of the DataLoader; it queues the ticket of every index list that it yields."""
        for step in range(self.next_step, self.steps):
            for indices, ticket in self.physical_batches(step):
                pending.append(ticket)
                yield indices

    def physical_batches(self, step: int) -> Iterator[tuple[list[int], Ticket]]:
        """The index lists of one step, each with its ticket."""
        plan = self.plan
        indices = plan.sampling.indices(
            self._draws,
            step,
            num_examples=plan.num_examples,
            batch_size=plan.batch_size,
            dataset_size=self._units,
        )
        divide = self._parts if self.users is None else functools.partial(self._parts_of_users, self.users, step)
        of_processes = [divide(share) for share in self.processes.shares(indices)]
        parts = of_processes[self.processes.rank]
        number_of_parts = max(1, *map(len, of_processes))  # layers of sharded models wait for all processes
        settings = (("micro_batch_tokens", self.micro_batch_tokens), ("micro_batch_size", self.micro_batch_size))
        limits = [(name, limit) for name, limit in settings if limit is not None]
        for number in range(number_of_parts):
            is_placeholder = number >= len(parts)
            part, rows_of_users = ([0], (1,)) if is_placeholder else parts[number]
            ticket = Ticket(
                loader=weakref.ref(self),
                generation=self.generation,
                step=step,
                key_fingerprint=self._fingerprint,
                processes=self.processes,
                physical_examples=len(part) if self.users is None else len(rows_of_users),
                rows_of_users=None if self.users is None else rows_of_users,
                is_placeholder=is_placeholder,
                opens_batch=number == 0,
                closes_batch=number == number_of_parts - 1,
                part_limit=next(iter(limits), None),
            )
            yield part, ticket

    def _parts_of_users(self, users: UserRecords, step: int, drawn: Integers) -> list[Part]:
        """The records of the users of one step in parts."""
        most = cast(int, self.plan.records_per_user)
        parts = cut_by_user(
            [users.drawn(self._draws, step, user, most=most) for user in drawn.tolist()],
            lengths=self.lengths,
            max_records=self.micro_batch_size,
            max_tokens=self.micro_batch_tokens,
            bucket=self.bucket,
        )
        return [(np.concatenate(part).tolist(), tuple(map(len, part))) for part in parts]

    def _parts(self, indices: Integers) -> list[Part]:
        """The examples of one step in parts; no part for an empty sample."""
        if self.lengths is None or self.micro_batch_tokens is None:
            if self.micro_batch_size is None or not len(indices):
                return [(indices.tolist(), ())] if len(indices) else []
            parts = -(-len(indices) // self.micro_batch_size)
            return [(part.tolist(), ()) for part in np.array_split(indices, parts)]  # equal parts have few shapes
        positions = cut_by_length(
            self.lengths[indices],
            max_tokens=self.micro_batch_tokens,
            max_examples=self.micro_batch_size,
            bucket=self.bucket,
            multiple=part_multiple(self.plan.batch_size),
        )
        return [(indices[part].tolist(), ()) for part in positions]

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint. It contains the key's fingerprint, never the key."""
        return {
            "next_step": self.next_step,
            "run_id": self.run_id,
            "key_fingerprint": self.key.fingerprint(),
            "dataset": self.key.subkey("dataset size", str(self._dataset_size)).hex()[:16],  # the size may be private
            "records": self._records_digest,
        }

    @functools.cached_property
    def _records_digest(self) -> str | None:
        """A keyed digest of the given digest, or of a dataset in memory, and of whose records they are; or None."""
        digest = fingerprint_in_memory(self.dataset, self.key) if self.digest is None else self.digest
        whose = None if self.users is None else self.users.digest(self.key)
        known = [part for part in (digest, whose) if part is not None]
        return self.key.subkey("dataset digest", " ".join(known)).hex()[:32] if known else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict` with the same key and examples; see `digest` in `private_loader`."""
        own = self.state_dict()
        if state["key_fingerprint"] != own["key_fingerprint"]:
            raise ValueError(
                f"the state was saved with key {state['key_fingerprint']}, but this loader has key "
                f"{own['key_fingerprint']}. Pass the run's key to private_loader(key=...)."
            )
        if state["dataset"] != own["dataset"] or state.get("records") not in (None, own["records"]):
            raise ValueError(
                "the state was saved with different examples or user ids, or in a different order. Load the run's "
                "original dataset."
            )
        next_step = _checked_step("next_step", state["next_step"], self.steps)
        self.generation += 1
        self._begin_run(str(state["run_id"]))
        self.next_step = next_step


@dataclass
class _OneByOne:
    """A dataset without `__getitems__`, so that records are read one by one."""

    dataset: torch.utils.data.Dataset[Any]

    def __getitem__(self, place: int) -> Any:
        return self.dataset[place]


def _is_transformed(dataset: Any) -> bool:
    """Whether it is a `datasets.Dataset` with a transform or a format, which would see, and may mix, a whole batch."""
    while isinstance(dataset, torch.utils.data.Subset):
        dataset = dataset.dataset
    form = getattr(dataset, "format", None)
    return hasattr(dataset, "column_names") and isinstance(form, Mapping) and form.get("type") not in (None, "python")


def private_loader(
    dataset: torch.utils.data.Dataset[Any],
    plan: PrivacyPlan,
    *,
    users: Sequence[Any] | NDArray[Any] | Tensor | str | None = None,
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
    digest: str | None = None,
    check_schema: bool = True,
) -> PrivateLoader:
    """Make a loader that draws the examples of every step as `plan.sampling` prescribes.

    One iteration is the whole training: all steps of the plan, without a loop over epochs. A step that is yielded in
    parts gets one update; advance a scheduler only `if loader.step_ends`.

    Args:
        dataset: A map-style dataset. All examples must have the same keys and types. Lists and tuples are checked now,
            other datasets batch by batch. The guarantee covers neither a later refusal nor the step of that refusal.
        plan: The same plan object that the optimizer gets.
        users: If the plan protects users: one user id per record, or the name of the column that holds them.
        key: The secret key of the draws; a new one by default.
        run_id: Public; loaders with different run_ids draw independently. A new one by default.
        micro_batch_size: The largest number of examples in a part, or of records if the plan protects users. A user
            is never split: one with more records is a part by itself.
        lengths: One length per example, such as its number of tokens. Each part then has examples of similar length.
        micro_batch_tokens: With `lengths`, the bound on examples × longest (rounded up to `bucket`) in a part.
        bucket: Padded widths are multiples of this.
        collate_fn: As in torch's DataLoader. It must not mix examples, nor have its own seed or random generator.
        num_workers: As in torch's DataLoader.
        pin_memory: As in torch's DataLoader.
        start_step: Resume here, with the run's own `key` and `run_id`.
        digest: A name for the examples and their order, which `load_state_dict` compares: a version, or
            `fingerprint_records(dataset, key).digest`. By default, only data in memory is fingerprinted.
        check_schema: Pass False for a `collate_fn` that treats each example separately.

    Guarantee: under `ZERO_OUT` and `REPLACE` the dataset has exactly `plan.num_examples` examples, or users; under
    `ADD_REMOVE` that number is a declared constant, and they are drawn at the plan's rate. How a step is cut into parts
    changes no sum, provided that an example's loss does not depend on its padding. A user's rows are next to each
    other, in one part; the loop must keep the rows in order.

    >>> plan = PrivacyPlan(num_examples=6, batch_size=2, steps=3)
    >>> loader = private_loader(list(range(6)), plan)
    >>> sorted(int(i) for batch in loader for i in batch)
    [0, 1, 2, 3, 4, 5]
    """
    whose = _checked_users(dataset, plan, users)
    size = _checked_size(dataset, plan, whose)
    if micro_batch_size is not None:
        micro_batch_size = check_whole("micro_batch_size", micro_batch_size)
    start_step = _checked_step("start_step", start_step, plan.steps)
    if start_step > 0 and (key is None or run_id is None):
        raise ValueError(
            f"start_step={start_step} needs the run's own key and run_id. Pass key=NoiseKey.load(path) and "
            "run_id=loader.run_id, or load the loader's state_dict."
        )
    if digest is not None and not isinstance(digest, str):
        raise ValueError(f"Expected a string digest that names the examples, got {type(digest).__name__}.")
    check_rng(collate_fn=collate_fn)
    if whose is not None and collate_fn is not None:
        collate_fn = OrderedCollate(collate_fn)
    if check_schema and (micro_batch_size != 1 or whose is not None):
        if is_in_memory(dataset):
            check_records("dataset", dataset)
        else:
            collate_fn = functools.partial(collate_checked, collate_fn or torch.utils.data.default_collate)
    processes = Processes.current()
    key, run_id = processes.shared_run("private_loader", key, run_id)
    loader = PrivateLoader(
        dataset=dataset,
        plan=plan,
        key=key,
        run_id=run_id,
        micro_batch_size=micro_batch_size,
        lengths=checked_lengths(lengths, micro_batch_tokens, bucket, examples=size),
        micro_batch_tokens=micro_batch_tokens,
        bucket=bucket,
        next_step=start_step,
        digest=digest,
        fetching={"collate_fn": collate_fn, "num_workers": num_workers, "pin_memory": pin_memory},
        processes=processes,
        users=whose,
    )
    if processes.count > 1:
        records = fingerprint_in_memory(dataset, loader.key) or fingerprint_few(dataset, loader.key)
        own = {"the plan": plan.to_dict(), "the dataset": records, "the size or key of the loader": loader.state_dict()}
        processes.agree({**own, "the size of micro-batches": [micro_batch_size, micro_batch_tokens, bucket]})
    return loader


def _checked_users(dataset: Any, plan: PrivacyPlan, users: Any) -> UserRecords | None:
    """Return whose record is whose if the plan protects users."""
    if (plan.unit == "user") != (users is not None):
        given = "None" if users is None else "given"
        raise ValueError(
            f"users is {given}, but the plan has unit={plan.unit!r}. To protect users, give both: "
            "PrivacyPlan(unit='user', records_per_user=...) and one user id per record."
        )
    if users is None:
        return None
    _check_map_style(dataset)
    ids = read_user_ids(dataset, users)
    if len(ids) != len(dataset):
        raise ValueError(f"Expected one user id per record, got {len(ids)} ids for {len(dataset)} records.")
    return UserRecords(ids)


def _check_map_style(dataset: Any) -> None:
    if isinstance(dataset, torch.utils.data.IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        raise ValueError(
            f"Expected a map-style dataset (__getitem__ and __len__), got {type(dataset).__name__}. Put a stream into "
            "a list first."
        )


def _checked_size(dataset: torch.utils.data.Dataset[Any], plan: PrivacyPlan, users: UserRecords | None) -> int:
    """Return the size of the dataset; the number of examples or users must be the plan's, if it is public."""
    _check_map_style(dataset)
    size = len(cast(Sized, dataset))
    if size == 0:
        raise ValueError("Expected at least one example, but dataset is empty.")
    units = size if users is None else len(users)
    if plan.adjacency.dataset_size_is_public and units != plan.num_examples:
        raise ValueError(
            f"dataset has {units} {plan.unit}s, but the plan has num_examples={plan.num_examples}. Create the plan "
            f"with num_examples={units}."
        )
    return size


def _checked_step(name: str, step: object, steps: int) -> int:
    step = check_whole(name, step, low=0)
    check_at_most(name, step, "the plan's steps", steps)
    return step
