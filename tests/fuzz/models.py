"""Random small models with a loss and a batch: layers of many kinds, tied, parametrized, frozen, changed in place.

About one model in eight mixes examples on purpose, in a layer or in the loss.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from tests.clipping.models import Bias, Case
from tests.clipping.models import squares as squares_of
from tests.clipping.one_at_a_time import gradients_one_at_a_time

VOCABULARY, OUTPUTS = 19, 4


class Drawn(NamedTuple):
    case: Case
    examples: int
    mixes: str  # what mixes examples, if anything
    words: list[str]  # what was drawn


class Call(nn.Module):
    """Calls a function of layers and inputs, so that any expression can stand in a Sequential."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.function = nn.ModuleList(layers), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(*self.layers, x)


def add_in_place(inner: nn.Module, x: Tensor) -> Tensor:
    y = inner(x)
    y += x
    return y


def attend(layer: nn.Module, x: Tensor, *, causal: bool, first: bool) -> Tensor:
    x = x if first else x.transpose(0, 1)
    length = x.shape[1 if first else 0]
    mask = torch.ones(length, length).triu(1).bool() if causal else None
    y: Tensor = layer(x, x, x, attn_mask=mask, need_weights=False)[0]
    return y if first else y.transpose(0, 1)


def attend_by_hand(queries: nn.Module, keys: nn.Module, values: nn.Module, x: Tensor) -> Tensor:
    scores = queries(x) @ keys(x).transpose(1, 2)
    scores /= x.shape[-1] ** 0.5
    return scores.softmax(-1) @ values(x)


def add_positions(table: nn.Module, x: Tensor) -> Tensor:
    """Position ids with a batch axis of one."""
    return x + table(torch.arange(x.shape[1])[None])


MIXERS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch mean": lambda x: x - x.mean(0),
    "neighbours": lambda x: x + x.roll(1, 0),
    "batch norm of the values": lambda x: x / x.norm(),
    "weak mixing": lambda x: x + 0.01 * x.sum(0),
    "sort": lambda x: x.sort(0).values,
    "attention over examples": lambda x: (x.flatten(1) @ x.flatten(1).T).softmax(-1) @ x.flatten(1),
}
ACTIVATIONS: list[Callable[[bool], nn.Module]] = [
    lambda inplace: nn.ReLU(inplace), lambda inplace: nn.SiLU(inplace), lambda inplace: nn.ELU(inplace=inplace),
    lambda inplace: nn.LeakyReLU(inplace=inplace), lambda inplace: nn.Hardtanh(inplace=inplace),
    lambda inplace: nn.Mish(inplace), lambda _: nn.Tanh(), lambda _: nn.GELU(),
]  # fmt: skip


def squares(outputs: Tensor, batch: Any) -> Tensor:
    return squares_of(nn.Identity(), outputs)


def cross_entropy(outputs: Tensor, batch: Any) -> Tensor:
    labels = batch["label"][:, None].expand(outputs.shape[:2])
    return F.cross_entropy(outputs.transpose(1, 2), labels, reduction="none").mean(1)


Loss = Callable[[Tensor, Any], Tensor]  # of outputs [examples, positions, OUTPUTS]
LOSSES: dict[str, Loss] = {
    "squares": squares,
    "cross entropy": cross_entropy,
    "absolute values": lambda y, batch: y.abs().mean((1, 2)),
    "largest": lambda y, batch: y.flatten(1).amax(1),
    "log-sum-exp": lambda y, batch: y.flatten(1).logsumexp(1),
    "hinge": lambda y, batch: (1 - y * batch["weight"][:, None, None]).relu().sum((1, 2)),
    "first position": lambda y, batch: y[:, 0].square().sum(1),
    "weighted, some by zero": lambda y, batch: squares(y, batch) * batch["weight"],
    "some without gradient": lambda y, batch: torch.where(
        batch["weight"] > 0, squares(y, batch), squares(y.detach(), batch)
    ),
    "huge": lambda y, batch: 1e5 * squares(y, batch),
    "tiny": lambda y, batch: 1e-5 * squares(y, batch),
}
MIXING_LOSSES: dict[str, Loss] = {
    "divided by the batch's loss": lambda y, batch: squares(y, batch) / squares(y, batch).detach().abs().sum(),
    "other examples as negatives": lambda y, batch: F.cross_entropy(
        y.flatten(1) @ y.flatten(1).T, torch.arange(len(y)), reduction="none"
    ),
}


class Builder:
    """Adds layers one by one; a sample that runs through them shows the shapes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.layers, self.words = rng, list[nn.Module](), list[str]()
        self.linears: list[nn.Linear] = []
        self.table: nn.Embedding | None = None
        self.mixes = ""
        self.kind = rng.choice(["features", "positions", "positions", "ids", "ids", "signal", "image"])
        shapes = {"features": (6,), "positions": (5, 6), "ids": (5,), "signal": (4, 9), "image": (3, 7, 6)}
        examples = rng.randint(2, 6)
        shape = (examples, *shapes[self.kind])
        self.inputs = torch.randint(0, VOCABULARY, shape) if self.kind == "ids" else torch.randn(shape)
        self.sample = self.inputs.clone()

    def add(self, word: str, layer: nn.Module) -> None:
        with torch.no_grad():
            self.sample = layer(self.sample.clone())
        self.layers.append(layer)
        self.words.append(word)

    @property
    def width(self) -> int:
        return self.sample.shape[1 if self.kind in ("signal", "image") else -1]

    def enter(self) -> None:
        if self.kind == "ids":
            self.table = nn.Embedding(VOCABULARY, 6, padding_idx=self.rng.choice([None, 0]))
            self.add("embedding", self.table)
            self.kind = "positions"
            if self.rng.random() < 0.5:
                self.add("positions", Call(add_positions, nn.Embedding(7, 6)))
        else:
            self.add(*self.mapping())

    def mapping(self) -> tuple[str, nn.Module]:
        """A layer with a matrix: new, tied to an earlier one, or used a second time."""
        rng, width = self.rng, self.width
        if self.kind in ("signal", "image"):
            options: dict[str, Any] = {"bias": rng.random() < 0.7, "padding": rng.choice([0, 1]), "stride": 1}
            options["padding_mode"] = rng.choice(["zeros", "zeros", "circular"]) if options["padding"] else "zeros"
            options["groups"] = rng.choice([1, 1, width])
            options["stride"] = rng.choice([1, 1, 2])
            kernel = rng.choice([1, 2, 3])
            kind = nn.Conv1d if self.kind == "signal" else nn.Conv2d
            layer: nn.Module = kind(width, width * rng.choice([1, 2]), kernel, **options)
            return self.parametrized(f"{kind.__name__} of {kernel} {options}", layer)
        same = [linear for linear in self.linears if linear.in_features == width]
        if same and rng.random() < 0.4:
            earlier = rng.choice(same)
            if rng.random() < 0.5:
                return "the same Linear again", earlier
            tied = nn.Linear(width, earlier.out_features)
            tied.weight = earlier.weight
            return "a tied Linear", tied
        linear = nn.Linear(width, rng.choice([width, width, 8, 3]), bias=rng.random() < 0.7)
        word, layer = self.parametrized("Linear", linear)
        if layer is linear and word == "Linear":
            self.linears.append(linear)
        return word, layer

    def parametrized(self, word: str, layer: nn.Module) -> tuple[str, nn.Module]:
        if self.rng.random() > 0.15:
            return word, layer
        if self.rng.random() < 0.4:
            return f"weight-normed {word}", weight_norm(layer)
        if self.rng.random() < 0.5:
            return f"orthogonal {word}", orthogonal(layer)
        return f"spectral-normed {word}", spectral_norm(layer).train(self.rng.random() < 0.5)

    def block(self) -> tuple[str, nn.Module]:
        """A layer that fits the sample."""
        rng, width = self.rng, self.width
        makers: dict[str, Callable[[], nn.Module]] = {
            "activation": lambda: rng.choice(ACTIVATIONS)(False),
            "in-place activation": lambda: rng.choice(ACTIVATIONS[:-2])(True),
        }
        if self.kind in ("signal", "image"):
            # No batch norm in eval: torch 2.13 differentiates it wrongly for one example behind a transposition.
            makers |= {
                "group norm": lambda: nn.GroupNorm(rng.choice([1, width]), width, affine=rng.random() < 0.8),
                "max pool": lambda: (nn.MaxPool1d if self.kind == "signal" else nn.MaxPool2d)(2),
            }
        else:
            makers |= {
                "layer norm": lambda: nn.LayerNorm(width, bias=rng.random() < 0.7),
                "rms norm": lambda: nn.RMSNorm(width),
                "bare bias": lambda: Bias(width),
            }
        if self.kind == "positions":
            causal, first, heads = rng.random() < 0.5, rng.random() < 0.7, rng.choice([1, width])
            makers |= {
                "attention": lambda: Call(
                    lambda layer, x: attend(layer, x, causal=causal, first=first),
                    nn.MultiheadAttention(width, heads, batch_first=first),
                ),
                "attention by hand": lambda: Call(attend_by_hand, *(nn.Linear(width, width) for _ in range(3))),
                "transformer layer": lambda: nn.TransformerEncoderLayer(
                    width, 1, 7, dropout=0.0, batch_first=True, norm_first=causal
                ),
                "recurrent": lambda: Call(
                    lambda layer, x: layer(x)[0], rng.choice([nn.LSTM, nn.GRU, nn.RNN])(width, 5, batch_first=True)
                ),
            }
        name = rng.choice([*makers, "mapping", "mapping"])
        return self.mapping() if name == "mapping" else (name, makers[name]())

    def grow(self) -> None:
        """Add a block, alone, with a residual, or under an activation checkpoint."""
        word, layer = self.block()
        with torch.no_grad():
            keeps_shape = layer(self.sample.clone()).shape == self.sample.shape
        wrap = self.rng.random()
        if keeps_shape and wrap < 0.15:
            word, layer = f"residual of {word}", Call(lambda inner, x: x + inner(x), layer)
        elif keeps_shape and wrap < 0.25:
            word, layer = f"in-place residual of {word}", Call(add_in_place, layer)
        elif wrap < 0.3:
            checkpointed = Call(lambda inner, x: checkpoint(inner, x, use_reentrant=False), layer)
            word, layer = f"checkpointed {word}", checkpointed
        self.add(word, layer)

    def mix(self) -> None:
        if self.kind in ("signal", "image") and self.rng.random() < 0.5:
            self.mixes = "batch norm"
            self.add(self.mixes, (nn.BatchNorm1d if self.kind == "signal" else nn.BatchNorm2d)(self.width))
            return
        self.mixes = self.rng.choice(list(MIXERS))
        function = MIXERS[self.mixes]
        self.add(self.mixes, Call(lambda x: function(x).reshape(x.shape)))

    def change_kind(self) -> None:
        """Flatten to one vector per example, or make the channels the features of positions."""
        to_vectors = self.rng.random() < 0.5
        if self.kind in ("signal", "image"):
            self.add(*(
                ("flatten", nn.Flatten()) if to_vectors
                else ("channels as features", Call(lambda x: x.flatten(2).transpose(1, 2)))
            ))  # fmt: skip
        elif self.kind == "positions":
            self.add("mean over positions", Call(lambda x: x.mean(1)))
            to_vectors = True
        self.kind = "features" if to_vectors or self.sample.ndim == 2 else "positions"

    def leave(self) -> None:
        if self.kind in ("signal", "image"):
            self.change_kind()
        if self.table is not None and self.rng.random() < 0.5:
            self.add("projection", nn.Linear(self.width, 6))
            decoder = nn.Linear(6, VOCABULARY, bias=self.rng.random() < 0.5)
            decoder.weight = self.table.weight
            self.add("tied decoder", decoder)
        self.add("head", nn.Linear(self.width, OUTPUTS))


def draw(seed: int) -> Drawn:
    """Draw a model that plain PyTorch can train; the same seed draws the same."""
    for attempt in itertools.count():
        rng = random.Random(f"{seed} {attempt}")
        torch.manual_seed(rng.randrange(2**31))
        try:
            drawn = _draw(rng)
            reference, batch = drawn.case, drawn.case.batch
            if drawn.mixes:
                reference.loss_fn(reference.model, batch).sum().backward()
                reference.model.zero_grad(set_to_none=True)
                return drawn
            gradients = gradients_one_at_a_time(reference.model, reference.loss_fn, batch, drawn.examples)
        except (RuntimeError, ValueError, AssertionError, NotImplementedError):
            continue  # shapes do not fit, or autograd refuses what is changed in place
        if any(bool(own[name].any()) for own in gradients for name in own):
            return drawn
    raise AssertionError


def _draw(rng: random.Random) -> Drawn:
    builder = Builder(rng)
    builder.enter()
    count = rng.randint(1, 6)
    mixing_layer = rng.randrange(count) if rng.random() < 0.08 else None
    for number in range(count):
        builder.grow()
        if number == mixing_layer:
            builder.mix()
        if rng.random() < 0.15:
            builder.change_kind()
    builder.leave()
    model = nn.Sequential(*builder.layers)
    if rng.random() < 0.3:
        for parameter in model.parameters():
            parameter.requires_grad_(rng.random() < 0.6)
    loss_name = rng.choice(list(LOSSES))
    loss = LOSSES[loss_name]
    if not builder.mixes and rng.random() < 0.04:
        builder.mixes = loss_name = rng.choice(list(MIXING_LOSSES))
        loss = MIXING_LOSSES[loss_name]
    calls_twice = rng.random() < 0.08
    examples = len(builder.inputs)
    weight = torch.tensor([rng.choice([0.0, 1.0, -1.0, 0.5]) for _ in range(examples)])
    dtype = rng.choice([torch.float64, torch.float64, torch.float32, torch.bfloat16])
    batch = {"x": builder.inputs, "label": torch.randint(0, OUTPUTS, (examples,)), "weight": weight}
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch["x"])
        if calls_twice:
            outputs = outputs + model(batch["x"].flip(1))
        return loss(outputs.reshape(len(outputs), -1, outputs.shape[-1]), batch)

    words = [*builder.words, f"loss: {loss_name}", *(["called twice"] if calls_twice else []), str(dtype)]
    return Drawn(Case(model.to(dtype), loss_fn, batch), examples, builder.mixes, words)
