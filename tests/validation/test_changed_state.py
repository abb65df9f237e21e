"""Buffers that change on private data are refused before anything is released; other changes are allowed."""

from __future__ import annotations

import copy
import io
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import dpoptim
from dpoptim.clipping import check_example_independence, clipped_sum
from dpoptim.validation import changed_state as buffers
from tests.clipping.models import case

DATA = [torch.tensor([float(i), i * i / 4, 1.0]) for i in range(8)]


class Net(nn.Module):
    """A model of three numbers per example; each case overrides `keep`, which gets what the forward sees."""

    seen: Tensor
    inner: nn.Module

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(3), persistent=persistent)
        self.initialised = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.keep(x.detach())
        return self.layer(x)

    def keep(self, x: Tensor) -> None:
        self.seen += x.sum(0)


class AnotherTensor(Net):
    def keep(self, x: Tensor) -> None:
        self.seen = self.seen + x.sum(0)


class ThroughData(Net):
    def keep(self, x: Tensor) -> None:
        self.seen.data.mul_(0.9).add_(x.mean(0))


class ByNumpy(Net):
    def keep(self, x: Tensor) -> None:
        self.seen.numpy()[:] += x.sum(0).numpy()


class OnlyOnce(Net):
    """Like a layer that stores the mean of its first batch."""

    def keep(self, x: Tensor) -> None:
        if not self.initialised:
            self.seen.copy_(x.mean(0))
            self.initialised = True


class NewBuffer(Net):
    def keep(self, x: Tensor) -> None:
        if not self.initialised:
            self.register_buffer("first", x.mean(0))
            self.initialised = True


class Observer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.observer = torch.ao.quantization.MinMaxObserver()

    def keep(self, x: Tensor) -> None:
        self.observer(x)


class TokensSeen(Net):
    def keep(self, x: Tensor) -> None:
        self.seen.index_add_(0, x[:, 0].long() % 3, torch.ones(len(x)))


class ExamplesSeen(Net):
    """The size of a Poisson batch is secret."""

    def keep(self, x: Tensor) -> None:
        self.seen += len(x)


class FromAHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_hook(self.look)

    def look(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen += output.detach().mean()

    def keep(self, x: Tensor) -> None:
        pass


class InBackward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_full_backward_hook(self.look)

    def look(self, module: nn.Module, own: Any, gradients: Any) -> None:
        self.seen += gradients[0].sum()

    def keep(self, x: Tensor) -> None:
        pass


class Frozen(Net):
    """The buffer belongs to a module that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net().requires_grad_(False)

    def keep(self, x: Tensor) -> None:
        self.inner(x)


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class AfterTheFirst(Net):
    """A statistic that begins at the third step; the first runs the model twice more, for the batch axis."""

    calls = 0

    def keep(self, x: Tensor) -> None:
        self.calls += 1
        if self.calls > 4:
            self.seen += x.sum(0)


class GrowingTable(Net):
    """A table for the longest sequence so far, whose length is private too."""

    def keep(self, x: Tensor) -> None:
        if x.shape[1] + 8 > len(self.seen):
            self.seen = torch.arange(x.shape[1] + 8) / 10.0


class CallsSeen(Net):
    def keep(self, x: Tensor) -> None:
        self.seen += 1


class Codebook(Net):
    """A frozen parameter that the forward overwrites with its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3), requires_grad=False)

    def keep(self, x: Tensor) -> None:
        with torch.no_grad():
            self.table.add_(x.sum(0))


class TrainedBias(Net):
    def keep(self, x: Tensor) -> None:
        with torch.no_grad():
            self.layer.bias.copy_(x.sum(0)[:1])


TAKES_IN = [
    Net, AnotherTensor, ThroughData, ByNumpy, OnlyOnce, NewBuffer, Observer, TokensSeen, ExamplesSeen, FromAHook,
    InBackward, Frozen, Checkpointed, AfterTheFirst, GrowingTable, CallsSeen, Codebook, TrainedBias,
]  # fmt: skip


def trained(model: nn.Module, *, between: Any = lambda model: None, steps: int = 4) -> None:
    plan = dpoptim.PrivacyPlan(num_examples=8, batch_size=4, steps=steps, noise_multiplier=1.0)
    loader = dpoptim.private_loader(cast(Dataset[Tensor], DATA), plan)
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.1)
    for batch in loader:
        model(batch).square().sum().backward()
        optimizer.step()
        between(model)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("kind", TAKES_IN)
def test_a_buffer_that_changes_is_refused(kind, persistent):
    model = kind() if persistent else not_saved(kind)
    start = weights(model)
    with pytest.raises(ValueError, match=r"^[a-z]* '[a-z_.]*' changes .*neither clipped nor noised") as refusal:
        trained(model)
    assert len(str(refusal.value).splitlines()) == 1
    if kind not in (AfterTheFirst, TrainedBias, Codebook):
        assert all(map(torch.equal, start, weights(model)))  # nothing was released


def not_saved(kind: type[Net]) -> Net:
    """Later examples see what it stores, although it is not in the state."""
    model = kind()
    model._non_persistent_buffers_set.add("seen")
    return model


def test_state_initialised_from_private_data_is_refused():
    """A layer that stores the mean of its first batch, in a forward without a backward."""
    model = OnlyOnce()
    plan = dpoptim.PrivacyPlan(num_examples=8, batch_size=4, steps=4, noise_multiplier=1.0)
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.1, external_batches=True)
    x = torch.stack(DATA[:4])
    model(x)
    model(x).square().sum().backward()
    with pytest.raises(ValueError, match="buffer 'seen' changes"):
        optimizer.step()


def test_table_built_before_training_is_allowed():
    model = GrowingTable()
    with torch.no_grad():
        model(torch.zeros(1, 3))
    trained(model)


def test_after_a_refusal_nothing_is_released_through_the_optimizer():
    model = ThroughData()
    plan = dpoptim.PrivacyPlan(num_examples=8, batch_size=4, steps=4, noise_multiplier=1.0)
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.1, external_batches=True)
    start = weights(model)
    for _ in range(3):
        model(torch.stack(DATA[:4])).square().sum().backward()
        with pytest.raises(ValueError, match="buffer 'seen'"):
            optimizer.step()
    assert all(map(torch.equal, start, weights(model)))


def test_modules_called_directly_by_the_loop():
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

    def loss(model: Any, x: Tensor) -> Tensor:
        return model.inner(x)[:, 0]

    x = torch.stack(DATA)
    clipped_sum(Outer(Net().eval()), loss, x)
    with pytest.raises(ValueError, match=r"buffer 'inner\.seen' changes"):
        clipped_sum(Outer(FromAHook()), loss, x)


def test_the_check_of_a_model_before_training_finds_it():
    with pytest.raises(ValueError, match="buffer 'seen' changes"):
        check_example_independence(Net(), lambda model, x: model(x)[:, 0], torch.stack(DATA))


def _load(model: Net) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def _move(model: Net) -> None:
    model.inner.to(torch.float64).to(torch.float32)


def _evaluate(model: Net) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.stack(DATA))
    model.train()


def _anneal(model: Net) -> None:
    model.seen += 1


def _public(model: Net) -> None:
    with dpoptim.public_data():
        model.inner.train()
        model(torch.stack(DATA))
        model.inner.eval()


@pytest.mark.parametrize("between", [_load, _move, _evaluate, _anneal, _public])
def test_changes_between_steps_are_allowed(between):
    class Still(Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.BatchNorm1d(3).eval().requires_grad_(False)

        def train(self, mode: bool = True) -> Still:
            super().train(mode)
            self.inner.eval()
            return self

        def keep(self, x: Tensor) -> None:
            self.inner(x)

    if between is _public:

        class Still(Frozen):  # type: ignore[no-redef]
            def __init__(self) -> None:
                super().__init__()
                self.inner.eval()

            def keep(self, x: Tensor) -> None:
                self.inner(x)

    trained(Still(), between=between)


def test_forward_with_gradients_whose_output_is_only_read():
    """An evaluation without no_grad, after which the best weights are loaded."""

    def look_and_load(model: Net) -> None:
        model.eval()(torch.stack(DATA))
        model.train()
        _load(model)

    model = Net()
    model.keep = lambda x: None  # type: ignore[method-assign]
    trained(model, between=look_and_load)


@pytest.mark.parametrize(
    "name",
    [
        "BertForMaskedLM", "ViTForImageClassification", "ViT, positions interpolated", "GPT2LMHeadModel",
        "LoRA on GPT-2", "batch norm in eval", "reentrant checkpoints",
    ],
)  # fmt: skip
def test_stock_models_are_allowed(name):
    found = case(name)
    clipped_sum(found.model, found.loss_fn, found.batch)


@pytest.mark.parametrize("scaling", ["default", "dynamic", "longrope"])
@pytest.mark.parametrize("length", [6, 20])
def test_rotary_angles(scaling, length):
    """Two of these change the angles for texts longer than 8, so one text's length changes the losses of others."""
    transformers = pytest.importorskip("transformers")
    settings: dict[str, dict[str, Any]] = {
        "default": {},
        "dynamic": {"factor": 2.0},
        "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 8},
    }
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
            max_position_embeddings=8, rope_parameters={"rope_type": scaling, "rope_theta": 1e4, **settings[scaling]},
        )
    )  # fmt: skip
    ids = torch.randint(0, 32, (4, length))

    def norms() -> Tensor:
        return clipped_sum(model, lambda model, ids: model(ids, use_cache=False).logits.square().mean((1, 2)), ids)[1]

    if scaling == "default" or length == 6:
        assert bool((norms() > 0).all())
    else:
        with pytest.raises(ValueError, match=r"buffer 'model\.rotary_emb\.inv_freq' changes"):
            norms()


def test_copies_and_pickles_are_not_watched():
    model = Net()
    plan = dpoptim.PrivacyPlan(num_examples=8, batch_size=4, steps=4, noise_multiplier=1.0)
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.1, external_batches=True)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    others: list[Net] = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    for other in others:
        other(torch.stack(DATA))
        assert other.seen[0] == 28
    optimizer.step()


@pytest.mark.slow
def test_a_compiled_model():
    model = Net()
    plan = dpoptim.PrivacyPlan(num_examples=8, batch_size=4, steps=4, noise_multiplier=1.0)
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.1, external_batches=True)
    torch.compile(model, backend="eager")(torch.stack(DATA[:4])).square().sum().backward()
    with pytest.raises(ValueError, match="buffer 'seen'"):
        optimizer.step()


def test_only_the_first_step_copies(monkeypatch):
    model = Net().eval()
    plan = dpoptim.PrivacyPlan(num_examples=8, batch_size=4, steps=8, noise_multiplier=1.0)
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.1, external_batches=True)
    compared: list[Tensor] = []
    bits = buffers._bits
    monkeypatch.setattr(buffers, "_bits", lambda tensor: (compared.append(tensor), bits(tensor))[1])  # type: ignore[func-returns-value]
    for step in range(4):
        model(torch.stack(DATA[:4])).square().sum().backward()
        optimizer.step()
        assert len(compared) == 4, step  # at the end of the first call, and before its release
