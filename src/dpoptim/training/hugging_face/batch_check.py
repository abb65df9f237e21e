"""Does one record of a batch change the loss of another? Tried on a few training examples before the first step.

Clipping bounds what a record adds by its own loss. A model that pools over padding, positions that count padding on the
left, a batch axis in the wrong place, a collator that subtracts the batch's mean: there a record moves the losses of
the others too, and nothing bounds that.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpoptim.gradients import check_examples_do_not_mix
from dpoptim.privacy.own_generators import noted_generators, refuse_noted
from dpoptim.privacy.secret_randomness import generator_states, keep_states, seed_generators
from dpoptim.training.hugging_face.held_out import at_places
from dpoptim.training.models.padding_check import full_precision, same_losses
from dpoptim.training.support.modes import in_eval_mode

_LOOKED_AT = 64  # first examples, of which the shortest and the longest are taken
_ROWS = 4
_TRIES = 32  # seeds, until masks have targets in each row; one or two, but for very short texts
_COPIED = 500_000_000  # parameters of a model of 16 bits that is looked at in 32
_RUNS = "the model or loss_per_example"
_NOTHING_BOUNDS = "one record would change the losses of others and clipping would bound nothing"

Losses = Callable[[nn.Module, Any], Tensor]
Evaluated = Callable[[Any], Tensor]


def check_batches(trainer: Any, losses: Losses, collate: Callable[[list[Any]], Any], dataset: Any) -> None:
    """Refuse, in one line, a model, loss or collator by which a record changes the loss of another.

    The shortest and the longest of the first examples are collated (where all have one length, beside a copy that was
    cut). Then (a) one backward of the first loss must leave no gradient at the other examples; (b) in eval mode a row
    has the same loss alone, alone without the columns where its attention_mask is 0, and, for collators that draw
    nothing, collated by itself. Losses are compared and not told.

    Guarantee: nothing is left changed: modes, buffers, gradients, generators and an optimizer's count of batches.
    Edge cases: a loss that draws random numbers in eval mode is held to (a) alone, since it draws others for a row
    alone; one that keeps a count or a mean from call to call is refused. With per_device_train_batch_size=1 no two
    records meet in a batch, and
    that is not tried. Padding that is in the examples already, with a collator that adds none, is the same for all and
    is not looked at. What a collator that draws mixes of the examples (mixup) is not found.
    Cost: a dozen forwards of one to four examples and one backward.
    """
    size = min(_ROWS, trainer.args.per_device_train_batch_size, len(dataset))
    put_back = keep_states()
    try:
        trial = _Trial(trainer=trainer, collate=collate)
        if size < 2:
            with _unchanged(trainer.model):
                check_repeated(trainer.model, losses, trial.batch([dataset[0]], 0)[0])
            return
        examples = trial.chosen([dataset[place] for place in range(min(_LOOKED_AT, len(dataset)))], size)
        with _unchanged(trainer.model), full_precision():
            model, precise, dtype = _most_precise(trainer, losses, trial.batch(examples, 0)[0])
            evaluated = functools.partial(_evaluated, model, precise)
            seed = trial.seed_with_targets(examples, evaluated)
            check_repeated(trainer.model, losses, trial.batch(examples, seed)[0])
            check_gradients(trainer.model, losses, trial.batch(examples, seed)[0], len(examples))
            trial.check_losses(examples, seed, evaluated, dtype)
    finally:
        put_back()


def check_gradients(model: nn.Module, losses: Losses, batch: Any, examples: int) -> None:
    """Refuse a batch whose first loss has a gradient at other examples, in training mode, as the steps will be.

    A model or loss that makes or seeds generators while it runs is refused too.
    """
    model.train()

    def counted(model: nn.Module, _: Any) -> Tensor:
        found = losses(model, copy.deepcopy(batch))
        if len(found) != examples:
            raise ValueError(
                f"data_collator and loss_per_example give {len(found)} losses for {examples} examples: each example "
                "must have one, or a record would count more than once"
            )
        return found

    def tried(seed: int, run: Callable[[], Any]) -> dict[str, bytes]:
        seed_generators(seed)
        with noted_generators() as noted, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come again with the first step
            run()
        refuse_noted(_RUNS, noted)
        return generator_states()

    one = tried(0, lambda: check_examples_do_not_mix(model, counted, None))
    with torch.no_grad():
        other = tried(1, lambda: counted(model, None))
    refuse_noted(_RUNS, [name for name in one if one[name] == other[name]])


def check_repeated(model: nn.Module, losses: Losses, batch: Any) -> None:
    """Refuse a model or loss that remembers: in training mode the same batch has the same losses under one seed."""
    model.train()
    found = []
    for _ in range(2):
        seed_generators(0)
        with torch.no_grad():
            found.append(losses(model, copy.deepcopy(batch)).float())
    if not same_losses(found[0], found[1], torch.bfloat16 if found[0].is_cuda else torch.float32):
        raise ValueError(
            f"{_RUNS} gives other losses each time for the same batch under the same seeds: it keeps a count or a mean "
            "of its own, so that the records before would change them; make it a function of model and batch"
        )


@dataclass(frozen=True, kw_only=True)
class _Trial:
    trainer: Any
    collate: Callable[[list[Any]], Any]

    def batch(self, examples: list[Any], seed: int) -> tuple[Any, bool]:
        """The batch, on the trainer's device, and whether anything was drawn for it."""
        seed_generators(seed)
        before = generator_states()
        batch = self.collate(copy.deepcopy(examples))
        drawn = generator_states() != before
        return self.trainer._prepare_inputs(batch), drawn

    def chosen(self, examples: list[Any], size: int) -> list[Any]:
        """The longest example and the shortest ones; where all are of one length, with a copy that was cut."""
        mask = _mask_of(self.batch(examples, 0)[0], len(examples))
        if mask is None:
            return examples[:size]
        order = mask.sum(1).argsort(stable=True).tolist()
        chosen = [examples[place] for place in [order[-1], *order[: size - 1]]]
        if None in (lengths := {_length(example) for example in chosen}) or len(lengths) > 1:
            return chosen
        beside_a_copy = [*chosen[:-1], _shorter(chosen[-1])]
        try:
            self.batch(beside_a_copy, 0)
        except Exception:  # whatever the collator says to examples of other lengths: it never pads
            return chosen
        return beside_a_copy

    def seed_with_targets(self, examples: list[Any], evaluated: Evaluated) -> int:
        """The seed under which masks leave the fewest examples without a target, of a few that are tried."""
        best, most = 0, -1
        for seed in range(_TRIES):
            batch, draws = self.batch(examples, seed)
            found = int((evaluated(batch) != 0).sum())
            if found > most:
                best, most = seed, found
            if not draws or found == len(examples):
                break
        return best

    def check_losses(self, examples: list[Any], seed: int, evaluated: Evaluated, dtype: torch.dtype) -> None:
        """Each row in the batch, alone, without its padding, and collated by itself, in eval mode."""
        rows = len(examples)
        batch, draws = self.batch(examples, seed)
        together = evaluated(batch)
        if _draws(lambda: evaluated(batch)):
            return

        def same(row: int, other: Any) -> bool:
            return other is None or same_losses(together[row], evaluated(other)[0], dtype)

        mask = _mask_of(batch, rows)
        for row, example in enumerate(examples):
            if not same(row, _row(batch, row, rows)):
                raise ValueError(
                    f"an example has another loss in a batch than alone: {_NOTHING_BOUNDS}; look for sums or means "
                    "over the first axis in the model or loss_per_example"
                )
            by_itself, own = self.batch([example], seed)[0], _length(example)
            if mask is not None and (_width(by_itself) if own is None else own) < mask.shape[1]:
                real, padding = mask[row].nonzero().flatten(), (mask[row] == 0).nonzero().flatten()
                without = _row(batch, row, rows, columns=real)
                if len(real) and len(padding) and not same(row, without):
                    on_the_right = _row(batch, row, rows, columns=torch.cat([real, padding]))
                    is_left = same_losses(evaluated(on_the_right)[0], evaluated(without)[0], dtype)
                    raise ValueError(_padding_line(type(self.trainer.model).__name__, is_left=is_left))
            if not draws and not same(row, by_itself):
                raise ValueError(
                    f"an example that is collated by itself has another loss than in a batch: {_NOTHING_BOUNDS}; look "
                    "for padding that is counted, or for what data_collator computes over the batch"
                )


def _evaluated(model: nn.Module, losses: Losses, batch: Any) -> Tensor:
    seed_generators(0)
    with in_eval_mode(model):
        return losses(model, copy.deepcopy(batch))  # it may take labels out


def _draws(run: Callable[[], Any]) -> bool:
    """Whether running it draws random numbers, beside setting the seeds to 0."""
    seed_generators(0)
    before = generator_states()
    run()
    return generator_states() != before


def _padding_line(model: str, *, is_left: bool) -> str:
    if is_left:
        return (
            f"padding on the left changes the loss of an example under {model} (positions that count it, or a first "
            f'token that is predicted from it), so that {_NOTHING_BOUNDS}; set padding_side="right" in the tokenizer'
        )
    return (
        f"an example has another loss with padding than without it: {model}, or the loss, looks at padding, so that "
        f"{_NOTHING_BOUNDS}; give the model its attention_mask and divide by each example's own tokens, or use "
        "examples of one length and a collator that does not pad (default_data_collator)"
    )


def _most_precise(trainer: Any, losses: Losses, batch: Any) -> tuple[nn.Module, Losses, torch.dtype]:
    """Model and losses in 32 bits, without autocast, where they can be had, and what they are rounded in.

    A model of 16 bits is copied for that, unless it is large: rounding would hide what padding does.
    """
    model, dtypes = trainer.model, {parameter.dtype for parameter in trainer.model.parameters()}
    wide = dtypes <= {torch.float32, torch.float64}
    if wide and trainer.accelerator.mixed_precision == "no":
        return model, losses, torch.float32
    large = sum(parameter.numel() for parameter in model.parameters()) > _COPIED
    if wide or (not large and all(dtype.is_floating_point for dtype in dtypes)):
        with contextlib.suppress(RuntimeError, TypeError):  # layers that ask for 16 bits, or cannot be copied
            precise = model if wide else copy.deepcopy(model).float()
            with in_eval_mode(precise):
                trainer.loss_per_example(precise, copy.deepcopy(batch))
            return precise, trainer.loss_per_example, torch.float32
    return model, losses, torch.bfloat16


def _mask_of(batch: Any, rows: int) -> Tensor | None:
    """The attention mask, [rows, width]."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 and len(mask) == rows else None


def _width(batch: Any) -> int:
    mask = _mask_of(batch, 1)
    return 0 if mask is None else mask.shape[1]


def _row(batch: Any, row: int, rows: int, *, columns: Tensor | None = None) -> Any:
    """One row of a batch as a batch, at these columns of what is as wide as the attention mask; None where it cannot.

    >>> batch = {"input_ids": torch.tensor([[1, 2], [3, 0]]), "attention_mask": torch.tensor([[1, 1], [1, 0]]),
    ...          "labels": torch.tensor([0, 1])}
    >>> _row(batch, 1, 2, columns=torch.tensor([0]))
    {'input_ids': tensor([[3]]), 'attention_mask': tensor([[1]]), 'labels': tensor([1])}
    """
    named = isinstance(batch, Mapping)
    parts = dict(batch) if named else batch
    leaves = pytree.tree_leaves(parts)
    if any(isinstance(leaf, str) or (isinstance(leaf, Tensor) and leaf.shape[:1] != (rows,)) for leaf in leaves):
        return None
    parts = pytree.tree_map(lambda leaf: leaf[row : row + 1] if isinstance(leaf, Tensor) else leaf, parts)
    if columns is not None:
        shape = parts["attention_mask"].shape
        for name, value in parts.items():
            targets = name in ("label", "labels", "label_ids") and isinstance(value, Tensor)
            if isinstance(value, Tensor) and value.shape[:2] == shape and not (targets and value.is_floating_point()):
                parts[name] = value[:, columns]
    return type(batch)(parts) if named else parts


def _length(example: Any) -> int | None:
    """How many tokens an example has; None where it is not of tokens yet."""
    tokens: Any = example.get("input_ids") if isinstance(example, Mapping) else None
    return len(tokens) if hasattr(tokens, "__len__") else None


def _shorter(example: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without its padding, or, where it has none, the first half of it."""
    length = len(example["input_ids"])
    mask = example.get("attention_mask")
    real = [] if mask is None else [place for place in range(length) if mask[place]]
    places = real if 0 < len(real) < length else list(range(max(1, length // 2)))
    return at_places(example, places, of=length)


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Modes and buffers of all modules are put back."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    contents = {id(b): b.clone() for _, own in buffers for b in own.values() if b is not None}
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, own in buffers:
                module._buffers.update(own)
                for buffer in own.values():
                    if buffer is not None and not torch.equal(buffer, contents[id(buffer)]):
                        buffer.copy_(contents[id(buffer)])
