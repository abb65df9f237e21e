"""torch.compile leaves the engine alone, and compiled models get the same checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpoptim
from dpoptim.clipping import check_example_independence
from dpoptim.clipping.engine import Engine
from tests.clipping.test_calls import attached

pytestmark = pytest.mark.slow

B = 4
WAYS = ["torch.compile", "model.compile", "a compiled loss", "a compiled part", "a part that compiles itself"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)) * 2)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(model: Any, way: str, backend: str | Callable[..., Any] = "eager") -> Callable[[Tensor], Tensor]:
    """Return a function that gives the losses of a batch, with a compiled part."""
    if way == "torch.compile":
        run = cast(nn.Module, torch.compile(model, backend=backend))
        return lambda x: run(x).square().sum(1)
    if way == "model.compile":
        model.compile(backend=backend)
    elif way == "a part that compiles itself":
        model.body.compile(backend=backend)
    elif way == "a compiled part":
        body = cast(nn.Module, torch.compile(model.body, backend=backend))
        return lambda x: model.head(torch.relu(body(x)) * 2).square().sum(1)
    elif way == "a compiled loss":
        return torch.compile(lambda x: model(x).square().sum(1), backend=backend)
    return lambda x: model(x).square().sum(1)


@pytest.mark.parametrize("way", WAYS)
def test_the_engine_is_not_compiled(way, monkeypatch):
    """The engine runs outside the compiler, and the sums equal those of the uncompiled model."""
    asked: list[bool] = []
    for name in ("expand_to_batch", "recorder", "record", "flush", "recording"):
        own = vars(Engine)[name]
        function = own.fget if isinstance(own, property) else own

        def asks(*args: Any, _own: Any = function, **kwargs: Any) -> Any:
            asked.append(torch.compiler.is_compiling())
            return _own(*args, **kwargs)

        monkeypatch.setattr(Engine, name, property(asks) if isinstance(own, property) else asks)
    model, batches = Net(), [torch.randn(B, 4) for _ in range(3)]
    if way == "a compiled part":
        check_example_independence(model, lambda m, x: m(x).square().sum(1), batches[0])
    expected = attached(model)
    for x in batches:
        model(x).square().sum(1).sum().backward()
    wanted = expected.take()[0]
    sums, losses = attached(model), compiled(model, way)
    asked.clear()
    for x in batches:
        losses(x).sum().backward()
    for name, found in sums.take()[0].items():
        torch.testing.assert_close(found, wanted[name])
    assert len(asked) > 20
    assert not any(asked)


@pytest.mark.parametrize("way", WAYS)
def test_only_the_first_step_of_a_shape_compiles(way):
    graphs: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return graph

    model = Net()
    if way == "a compiled part":
        check_example_independence(model, lambda m, x: m(x).square().sum(1), torch.randn(B, 4))
    plan = dpoptim.PrivacyPlan(num_examples=80, batch_size=B, steps=20, noise_multiplier=1.0)
    optimizer = dpoptim.dp_sgd(model, plan, lr=0.1, external_batches=True)
    losses = compiled(model, way, backend=count)
    losses(torch.randn(B, 4)).sum().backward()
    optimizer.step()
    compiled_graphs = len(graphs)
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(19):
            losses(torch.randn(B, 4)).sum().backward()
            optimizer.step()
    assert len(graphs) == compiled_graphs


@pytest.mark.parametrize("way", ["torch.compile", "model.compile"])
@pytest.mark.parametrize("changed", ["a buffer", "a loss", "a parameter outside its layer"])
def test_later_changes_are_refused(way, changed):
    class Later(Net):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))
            self.on = False

        def forward(self, x: Tensor) -> Tensor:
            if self.on and changed == "a buffer":
                self.seen.add_(x.sum(0))
            if self.on and changed == "a parameter outside its layer":
                return F.linear(self.body(x), self.head.weight)
            y = super().forward(x)
            return y.mean() if self.on and changed == "a loss" else y

    model = Later()
    sums, losses = attached(model), compiled(model, way)

    def step() -> None:
        losses(torch.randn(B, 4)).sum().backward()
        sums.take()

    step()
    step()
    model.on = True
    messages = {
        "a buffer": "buffer 'seen' changes",
        "a loss": "Later returned a scalar",
        "a parameter outside its layer": "parameter 'head.weight' was used outside",
    }
    with pytest.raises(ValueError, match=messages[changed]):
        step()
