"""The check by value refuses every model that mixes examples, and no other; brute force decides which do."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpoptim
from dpoptim import ExampleMixingError, check_example_independence
from dpoptim.clipping import check_training_loss
from dpoptim.clipping.clipped_sums import ClippedSums
from dpoptim.validation.example_independence import _masks
from tests.clipping.models import case

B, CLIP = 24, 1e-3
Losses = Callable[[nn.Module, Any], Tensor]


class Mixed(nn.Module):
    """Layers with something between them."""

    def __init__(self, before: Any, mix: Callable[[Tensor], Any], after: Any) -> None:
        super().__init__()
        self.before, self.mix, self.after = before, mix, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.mix(self.before(x)))


class Positions(nn.Module):
    """Adds a row of positions that all examples share."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.leave, self.use = nn.Embedding(6, 1), nn.Linear(6, 6), use

    def forward(self, x: Tensor) -> Tensor:
        places = self.table(torch.arange(6)[None])[..., 0]
        return self.leave(x) + self.use(places)


def linear() -> nn.Module:
    return nn.Linear(6, 6)


def frozen() -> nn.Module:
    return nn.Linear(6, 6).requires_grad_(False)


def batch_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def batch_attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


def hooked(change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x * 1
    if x.requires_grad:
        x.register_hook(change)
    return x


def two_layers(mix: Callable[[Tensor], Tensor]) -> nn.Module:
    return Mixed(linear(), mix, linear())


LEAKS: dict[str, Callable[[], nn.Module]] = {
    "minus the mean": lambda: Mixed(nn.Identity(), lambda x: x - x.mean(0), linear()),
    "cumsum": lambda: Mixed(nn.Identity(), lambda x: x.cumsum(0), linear()),
    "over the maximum": lambda: Mixed(nn.Identity(), lambda x: x / x.abs().max(), linear()),
    "batch norm first": lambda: Mixed(nn.Identity(), batch_norm, linear()),
    "normalize": lambda: Mixed(nn.Identity(), partial(F.normalize, dim=0), linear()),
    "sorted": lambda: Mixed(nn.Identity(), lambda x: x[x[:, 0].argsort()], linear()),
    "batch norm behind a frozen layer": lambda: Mixed(frozen(), batch_norm, linear()),
    "attention behind a frozen layer": lambda: Mixed(frozen(), batch_attention, linear()),
    "batch norm in a frozen end": lambda: Mixed(linear(), batch_norm, frozen()),
    "attention in a frozen end": lambda: Mixed(linear(), batch_attention, frozen()),
    "batch norm between layers": lambda: two_layers(batch_norm),
    "the previous example": lambda: two_layers(lambda x: x + 9 * x.roll(1, 0)),
    "a gradient hook over the batch": lambda: two_layers(partial(hooked, lambda g: g / g.norm())),
    "a gradient hook in a frozen end": lambda: Mixed(linear(), partial(hooked, lambda g: g - g.mean(0)), frozen()),
    "the first of shared rows": lambda: Positions(lambda places: places[0]),
    "the mean of shared rows": lambda: Positions(lambda places: places.mean(0)),
}
SUMS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "a mean of losses": (lambda x: x.square().sum(1).mean().reshape(1), False),
    "the logarithm of a sum": (lambda x: x.exp().sum().log().reshape(1), True),
    "a mean of features": (lambda x: x.mean(0), True),
    "a number without a gradient": (lambda x: x.detach().sum().reshape(1), True),
}
SOUND: dict[str, Callable[[], nn.Module]] = {
    "two layers": lambda: two_layers(torch.tanh),
    "layer norm": lambda: two_layers(lambda x: F.layer_norm(x, (6,))),
    "a gradient hook per example": lambda: two_layers(
        partial(hooked, lambda g: g / g.norm(dim=1, keepdim=True).clamp(min=1e-9))
    ),
    "shared rows": lambda: Positions(lambda places: places),
    "a shared row, repeated": lambda: Positions(lambda places: places.expand(places.shape)),
}


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One linear loss per example, with the sign of its label."""
    x, y = batch
    return model(x).flatten(1).sum(1) * y


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return model(x).flatten(1).square().sum(1) * y


def attached(model: nn.Module, *, allow_mixing: bool = False, clip_norm: float = CLIP) -> ClippedSums:
    sums = ClippedSums(model, clip_norm=clip_norm, allow_mixing=allow_mixing)
    sums.engine.attach()
    return sums


def movement(model: nn.Module, losses: Losses, batches: list[Any]) -> float:
    """How far the clipped sum moves from the first batch to any other, in clip norms, with the check overridden."""
    sums, found = attached(model, allow_mixing=True), []
    for batch in batches:
        torch.manual_seed(1)
        losses(model, batch).sum().backward()
        found.append(torch.cat([total.flatten().double() for total in sums.take()[0].values()]))
    sums.engine.detach()
    return max(float((other - found[0]).norm()) for other in found[1:]) / CLIP


def worst_movement(model: nn.Module) -> float:
    """The largest change over two losses and a few labels, with one example replaced by extreme ones."""
    x, found = 1 + 0.5 * torch.randn(B, 6), []
    halves = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    for y in (torch.ones(B), torch.tensor([1.0, -1.0]).repeat(B // 2)):
        batches = [x]
        for row in (0, int(x[:, 0].argmin()), int(x[:, 0].argmax())):
            for other in (1e4 * torch.ones(6), -1e4 * torch.ones(6), 1e4 * halves, -1e4 * halves, torch.zeros(6)):
                batches.append(x.clone())
                batches[-1][row] = other
        found += [movement(model, loss_fn, [(each, y) for each in batches]) for loss_fn in (losses, squares)]
    return max(found)


@pytest.mark.parametrize("name", LEAKS)
def test_models_that_mix_examples_are_refused_and_break_the_bound(name):
    torch.manual_seed(0)
    model = LEAKS[name]()
    for examples in (2, 3, 4, 5, B):
        sums = attached(model)
        with pytest.raises(ValueError, match=r"examples mix|more than 1 value"):  # torch has its own word on batch norm
            model(torch.randn(examples, 6))
        sums.engine.detach()
    assert worst_movement(model) > 2


@pytest.mark.parametrize("name", SOUND)
def test_models_that_do_not_mix_examples_are_accepted_and_keep_the_bound(name):
    torch.manual_seed(0)
    model = SOUND[name]()
    for examples in (1, 2, 3, 4, 5, B):
        for x in (torch.randn(examples, 6), torch.ones(examples, 6)):
            sums = attached(model)
            losses(model, (x, torch.ones(examples))).sum().backward()
            assert sums.take()[0]
    assert worst_movement(model) <= 2.0001


@pytest.mark.parametrize("name", SUMS)
def test_outputs_without_one_row_per_example(name):
    reduce, mixes = SUMS[name]
    attached(model := Mixed(linear(), lambda x: (x, reduce(x)), nn.Identity()))
    if mixes:
        with pytest.raises(ExampleMixingError, match="examples mix"):
            model(torch.randn(B, 6))
    else:
        model(torch.randn(B, 6))[1].sum().backward()


def t5() -> tuple[nn.Module, Losses, Any]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0)

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"], decoder_input_ids=batch["labels"]).logits
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none").mean(1)

    ids = torch.randint(0, 61, (5, 14))
    return T5ForConditionalGeneration(config), loss_fn, {"input_ids": ids[:, :8], "labels": ids[:, 8:]}


STOCK = [
    "BertForMaskedLM", "OPTForCausalLM", "DebertaV2ForMaskedLM", "ViTForImageClassification", "T5", "LoRA on GPT-2",
    "lstm", "cnn", "tied", "shared positions", "reentrant checkpoints",
]  # fmt: skip


@pytest.mark.parametrize("name", STOCK)
def test_stock_models_are_accepted_with_dropout_and_keep_the_bound(name):
    torch.manual_seed(0)
    if name == "T5":
        model, loss_fn, batch = t5()
    else:
        made = case(name, torch.float32)
        model, loss_fn, batch = made.model, made.loss_fn, made.batch
    for module in model.train().modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    other = copy.deepcopy(batch)
    for tensor in other.values() if isinstance(other, dict) else [other]:
        tensor[1] = tensor[2]
    loss_fn(model, batch)  # what grows with the longest input grows here
    sums = attached(model)
    loss_fn(model, batch).sum().backward()
    assert sums.take()[0]
    sums.engine.detach()
    check_example_independence(model, loss_fn, batch)
    assert movement(model, loss_fn, [batch, other]) <= 2.0001


@pytest.mark.parametrize("how", ["bf16", "autocast"])
def test_sixteen_bits(how):
    torch.manual_seed(0)
    for model, mixes in ((two_layers(torch.tanh), False), (two_layers(batch_norm), True)):
        x = torch.randn(B, 6)
        if how == "bf16":
            model, x = model.bfloat16(), x.bfloat16()
        attached(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            if mixes:
                with pytest.raises(ExampleMixingError):
                    model(x)
            else:
                model(x).float().sum().backward()


def test_two_towers_and_shared_arguments():
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor, y: Tensor, *, weights: Tensor, temperature: Tensor, flag: bool) -> Any:
            return {"left": self.left(x), "right": (self.right(y) * weights / temperature, None, "text")}

    shared = {"weights": torch.randn(3), "temperature": torch.tensor(2.0), "flag": True}

    def in_batch_negatives(model: nn.Module, batch: Any) -> Tensor:
        found = model(*batch, **shared)
        return -(found["left"] @ found["right"][0].mT).log_softmax(1).diagonal()

    def pairs(model: nn.Module, batch: Any) -> Tensor:
        found = model(*batch, **shared)
        return (found["left"] * found["right"][0]).sum(1)

    model, batch = Towers(), (torch.randn(B, 4), torch.randn(B, 4))
    sums = attached(model)
    pairs(model, batch).sum().backward()
    assert sums.take()[0]
    check_example_independence(model, pairs, batch)
    with pytest.raises(ExampleMixingError, match="output 0 of loss_fn"):
        check_example_independence(model, in_batch_negatives, batch)


def test_two_calls_in_one_backward_need_a_checked_loss():
    def product(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x[:, :2]) * model(x[:, 2:])).sum(1)

    def against_prototypes(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x[:, :2]) @ model(torch.ones(len(x), 2)).mT).sum(1)

    model, x = nn.Linear(2, 2), torch.randn(B, 4)
    sums = attached(model)
    with pytest.raises(ExampleMixingError, match="two calls of Linear share one backward"):
        product(model, x).sum().backward()
    check_example_independence(model, product, x)
    product(model, x).sum().backward()
    assert any(total.any() for total in sums.take()[0].values())
    with pytest.raises(ExampleMixingError, match="examples mix"):
        check_example_independence(model, against_prototypes, x)
    with pytest.raises(ExampleMixingError, match="two calls"):
        product(model, x).sum().backward()


def test_ids_that_are_the_same_in_all_rows_leave_the_signature_unchecked():
    model = Mixed(nn.Embedding(9, 6), lambda x: x - x.mean(0), linear())
    attached(model)
    same = torch.full((B, 3), 4)
    for _ in range(2):
        model(same)
    with pytest.raises(ExampleMixingError):
        model(torch.randint(0, 9, (B, 3)))


def test_nothing_is_left_changed():
    class Everything(nn.Module):
        steps: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            self.steps += 1
            return self.drop(self.layer(x))

    model, x = Everything(), torch.randn(B, 4)
    given, state = x.clone(), torch.get_rng_state()
    model.layer.weight.grad = torch.ones(4, 4)
    with pytest.raises(ValueError, match="buffer 'steps' changes"):
        check_example_independence(model, lambda m, x: m(x).sum(1), x)
    assert torch.equal(x, given)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.layer.weight.grad, torch.ones(4, 4))
    assert model.layer.bias.grad is None
    assert model.training


def test_a_check_inside_an_open_batch_keeps_the_batch():
    model = nn.Linear(4, 2)
    sums = attached(model)
    model(torch.randn(3, 4)).sum().backward()
    model.eval()  # a new signature
    model(torch.randn(5, 4)).sum().backward()
    check_example_independence(model, lambda m, x: m(x).sum(1), torch.randn(7, 4))
    sums.engine.flush()
    assert [len(norms) for norms in sums.norms] == [3, 5]


def test_models_that_differ_between_identical_runs_are_refused():
    own = torch.Generator().manual_seed(0)
    model = two_layers(lambda x: x * torch.rand((), generator=own))
    attached(model)
    with pytest.raises(ExampleMixingError, match="when the same rows run twice"):
        model(torch.randn(B, 6))


def test_rows_without_an_example_are_refused():
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[x > 0]

    attached(model := Chosen())
    with pytest.raises(ExampleMixingError, match=r"examples (may )?mix"):
        model(torch.randn(B, 6))


@pytest.mark.parametrize("batch", [torch.randn(1, 6), None, [], torch.ones(4, 1, dtype=torch.long)])
def test_a_batch_that_cannot_show_mixing_is_refused(batch):
    with pytest.raises(ValueError, match="batch must hold"):
        check_example_independence(two_layers(torch.tanh), lambda m, x: m(x.float().expand(-1, 6)).sum(1), batch)


@pytest.mark.parametrize("count", range(2, 9))
def test_masks_separate_every_pair_of_rows(count):
    masks = list(_masks(count))
    assert all(any(mask[i] and not mask[j] for mask in masks) for i in range(count) for j in range(count) if i != j)


def test_the_override_is_printed_by_the_statement():
    plan = dpoptim.PrivacyPlan(num_examples=B, batch_size=B, steps=2).calibrate(epsilon=8.0, delta=1e-3)
    model = LEAKS["minus the mean"]()
    with pytest.warns(UserWarning, match="allow_mixing"):
        optimizer = dpoptim.post_processing(
            model, plan, external_batches=True, allow_mixing="the mean is public by contract"
        )
    losses(model, (torch.randn(B, 6), torch.ones(B))).sum().backward()
    optimizer.step()
    told = " ".join(optimizer.plan.statement().split())
    assert "NOT COVERED: examples may mix in the model" in told
    assert "the mean is public by contract" in told
    assert "NOT COVERED" not in plan.statement()
    assert dpoptim.PrivacyPlan.from_dict(optimizer.plan.to_dict()) == optimizer.plan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for reason in ("", " ", True):
            with pytest.raises(ValueError, match="allow_mixing must be a reason"):
                dpoptim.dp_sgd(model, plan, lr=0.1, allow_mixing=reason)  # type: ignore[arg-type]


def test_a_compiled_model_is_checked_eagerly():
    for mix, mixes in ((torch.tanh, False), (batch_norm, True)):
        torch.compiler.reset()
        model = two_layers(mix)
        sums = attached(model)
        compiled: Any = torch.compile(model, backend="eager")
        if mixes:
            with pytest.raises(ExampleMixingError):
                compiled(torch.randn(B, 6))
        else:
            compiled(torch.randn(B, 6)).sum().backward()
            assert any(total.any() for total in sums.take()[0].values())
    torch.compiler.reset()


class Counts(nn.Module):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.runs = nn.Linear(4, 2), 0

    def forward(self, x: Tensor, scale: Any = None) -> Tensor:
        self.runs += 1
        return self.layer(x)

    def runs_of(self, *args: Any) -> int:
        """How often the model runs for one call and its backward."""
        before = self.runs
        self(*args).sum().backward()
        return self.runs - before


def test_once_per_signature():
    attached(model := Counts())
    assert [model.runs_of(torch.randn(examples, 4)) for examples in (1, B, 2, 9, 1)] == [1, 8, 1, 1, 1]
    assert [model.runs_of(torch.randn(B, 4), scale) for scale in (True, False, True, None)] == [8, 8, 1, 8]
    assert model.runs_of(torch.randn(B, 3, 4)) == 8
    model.eval()
    assert [model.runs_of(torch.randn(B, 4)) for _ in range(2)] == [8, 1]


def test_calls_are_checked_even_if_the_loss_was_checked():
    """A term that is 0 in the checked batch, such as a second task, may use an output that mixes examples."""

    class TwoTasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.second(x - x.mean(0))

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        first, second = model(x)
        return first.sum(1) + 0.0 * second.sum(1)

    check_training_loss(model := TwoTasks(), losses, torch.randn(5, 4))
    attached(model)
    with pytest.raises(ExampleMixingError):
        model(torch.randn(B, 4))


def test_the_check_of_the_training_loss_returns_the_bytes_of_gradient_factors():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2, bias=False))
    found = check_training_loss(model, lambda model, x: model(x).sum((1, 2)), torch.randn(4, 5, 4))
    assert found == 4 * (5 * (4 + 6) + 6 + 5 * (6 + 2)), "float32: inputs and output gradients at 5 positions, one bias"


def test_a_checked_model_can_be_freed():
    model = nn.Linear(4, 2)
    check_example_independence(model, lambda model, x: model(x).sum(1), torch.randn(4, 4))
    attached(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_sparse_tensors_are_refused():
    attached(model := nn.Linear(3, 2))
    with pytest.raises(ValueError, match="sparse or nested"):
        model(torch.eye(3).to_sparse())
