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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dpoptim.app.models.padding_check import full_precision, same_losses
from dpoptim.clipping import check_example_independence, public_data
from dpoptim.data.secret_randomness import generator_states, save_rng_states, seed_generators
from dpoptim.integrations.hugging_face.replaced_check import NOTHING_BOUNDS, all_of_one, check_replaced, half_of_them
from dpoptim.integrations.hugging_face.trial_batches import (
    Evaluated,
    TrialBatches,
    len_of_target,
    length_of,
    mask_of,
    row_of,
    target_without_padding,
    width_of,
)
from dpoptim.integrations.modes import in_eval_mode

_LOOKED_AT = 64  # first examples, of which the shortest and the longest are taken
_ROWS = 4
_COPIED = 500_000_000  # parameters of a model of 16 bits that is looked at in 32
_RUNS = "the model or loss_per_example"

Losses = Callable[[nn.Module, Any], Tensor]
_Precise = tuple[nn.Module, Losses, torch.dtype]


def check_batches(trainer: Any, losses: Losses, collate: Callable[[list[Any]], Any], dataset: Any) -> None:
    """Refuse, in one line, a model, loss or collator by which a record changes the loss of another.

    The shortest and the longest of the first examples are collated (where all have one length, or targets of one
    length, beside a copy that was cut). Then (a) one backward of the first loss must leave no gradient at the other
    examples; (b) in eval mode, and in training mode without dropout, a row has the same loss alone, alone without the
    columns where its attention_mask is 0, without those by which its target was padded, and, for collators that draw
    nothing, collated by itself; (c) in training mode and under the same draws it has the same loss beside copies of
    itself, and, in a batch as large as those of the steps, where half of that are copies of one. Losses are compared
    and not told.

    Guarantee: nothing is left changed: modes, buffers, gradients, generators and an optimizer's count of batches.
    Edge cases: a loss that draws random numbers in one of the modes of (b) is not held to that, since it draws others
    for a row alone: what padding does to it there is not seen. One that keeps a count or a mean from call to call is
    refused. With per_device_train_batch_size=1 no two records meet in a batch, and that is not tried. Padding that is
    in the examples already, with a collator that adds none, is the same for all and is not looked at.
    Cost: four dozen forwards of one to four examples, nine of a whole batch, and one backward.
    """
    size = min(_ROWS, trainer.args.per_device_train_batch_size, len(dataset))
    put_back = save_rng_states()
    try:
        trial = TrialBatches(trainer=trainer, collate=collate)
        if size < 2:
            with _unchanged(trainer.model):
                check_repeated(trainer.model, losses, trial.batch([dataset[0]], 0)[0])
            return
        looked_at = [dataset[place] for place in range(min(_LOOKED_AT, len(dataset)))]
        with _unchanged(trainer.model), full_precision():
            examples = trial.chosen(looked_at, size, functools.partial(_evaluated, trainer.model, losses))
            model, precise, dtype = _most_precise(trainer, losses, trial.batch(examples, 0)[0])
            evaluated = functools.partial(_evaluated, model, precise)
            seed = trial.seed_with_targets(examples, evaluated)
            check_repeated(trainer.model, losses, trial.batch(examples, seed)[0])
            check_gradients(trainer.model, losses, trial.batch(examples, seed)[0], len(examples))
            for run in (evaluated, functools.partial(_trained, model, precise, dropout=False)):
                check_losses(trial, examples, seed, run, dtype)
            many = [dataset[place] for place in range(min(trainer.args.per_device_train_batch_size, len(dataset)))]
            check_trained(trial, examples, seed, losses, (model, precise, dtype), many)
    finally:
        put_back()


def check_gradients(model: nn.Module, losses: Losses, batch: Any, examples: int) -> None:
    """Refuse a batch whose first loss has a gradient at other examples, in training mode, as the steps will be."""
    model.train()

    def counted(model: nn.Module, _: Any) -> Tensor:
        found = losses(model, copy.deepcopy(batch))
        if len(found) != examples:
            raise ValueError(
                f"data_collator and loss_per_example give {len(found)} losses for {examples} examples: each example "
                "must have one, or a record would count more than once"
            )
        return found

    seed_generators(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come again with the first step
        check_example_independence(model, counted, None)


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


def check_losses(trial: TrialBatches, examples: list[Any], seed: int, evaluated: Evaluated, dtype: torch.dtype) -> None:
    """Refuse rows with other losses in the batch than alone, without padding, or collated by itself."""
    rows = len(examples)
    batch, draws = trial.batch(examples, seed)
    together = evaluated(batch)
    if _draws(lambda: evaluated(batch)):
        return

    def same(row: int, other: Any) -> bool:
        return other is None or same_losses(together[row], evaluated(other)[0], dtype)

    mask, model, decodes = mask_of(batch, rows), trial.trainer.model, trial.decodes
    for row, example in enumerate(examples):
        if not same(row, row_of(batch, row, rows)):
            raise ValueError(
                f"an example has another loss in a batch than alone: {NOTHING_BOUNDS}; look for sums or means "
                "over the first axis in the model or loss_per_example"
            )
        by_itself, own = trial.batch([example], seed)[0], length_of(example)
        if mask is not None and (width_of(by_itself) if own is None else own) < mask.shape[1]:
            real, padding = mask[row].nonzero().flatten(), (mask[row] == 0).nonzero().flatten()
            without = row_of(batch, row, rows, columns=real, decodes=decodes)
            if len(real) and len(padding) and not same(row, without):
                on_the_right = row_of(batch, row, rows, columns=torch.cat([real, padding]), decodes=decodes)
                is_left = same_losses(evaluated(on_the_right)[0], evaluated(without)[0], dtype)
                raise ValueError(_padding_line(type(model).__name__, is_left=is_left))
        target = len_of_target(example, decodes=decodes) and target_without_padding(batch, example, row, rows)
        if target and not same(row, target[0]):
            raise ValueError(_target_line(type(model).__name__, is_left=target[1]))
        if not draws and not same(row, by_itself):
            raise ValueError(
                f"an example that is collated by itself has another loss than in a batch: {NOTHING_BOUNDS}; look "
                "for padding that is counted, or for what data_collator computes over the batch"
            )


def check_trained(
    trial: TrialBatches, examples: list[Any], seed: int, losses: Losses, most_precise: _Precise, many: list[Any]
) -> None:
    """Refuse rows with other losses in training mode where others are replaced: of a few examples, each beside copies
    of itself, as the steps will run and as precisely as can be; of as many as a step may have at once, half of them.
    """
    model, precise, dtype = most_precise
    copies, rounded = all_of_one(len(examples)), dtype if precise is losses else torch.bfloat16
    trained = functools.partial(_trained, trial.trainer.model, losses)
    check_replaced(trial, examples, seed, copies, functools.partial(trained, gradients=True), rounded)
    if precise is not losses:
        check_replaced(trial, examples, seed, copies, functools.partial(_trained, model, precise), dtype)
    if len(many) > len(examples):
        check_replaced(trial, many, 0, half_of_them(len(many)), trained, rounded)


def _trained(model: nn.Module, losses: Losses, batch: Any, *, gradients: bool = False, dropout: bool = True) -> Tensor:
    """In training mode; with `gradients` as before a backward, but unseen by an optimizer's engine."""
    seed_generators(0)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and not dropout:
            module.eval()
    with public_data(), torch.set_grad_enabled(gradients):
        return losses(model, copy.deepcopy(batch))  # it may take labels out


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
            f'token that is predicted from it), so that {NOTHING_BOUNDS}; set padding_side="right" in the tokenizer'
        )
    return (
        f"an example has another loss with padding than without it: {model}, or the loss, looks at padding, so that "
        f"{NOTHING_BOUNDS}; give the model its attention_mask and divide by each example's own tokens, or use "
        "examples of one length and a collator that does not pad (default_data_collator)"
    )


def _target_line(model: str, *, is_left: bool) -> str:
    mend = (
        'set padding_side="right" in the tokenizer'
        if is_left
        else "leave labels of −100 out of the loss and divide by each example's own"
    )
    return (
        f"labels that are padded on the {'left' if is_left else 'right'} change the loss of an example under {model}, "
        f"so that {NOTHING_BOUNDS}; {mend}"
    )


def _most_precise(trainer: Any, losses: Losses, batch: Any) -> _Precise:
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
