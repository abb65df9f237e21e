"""Jobs that run in each process of a distributed test: python -m tests.distributed.jobs FOLDER NAME[:ARGUMENT] ..."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils import _pytree as pytree

import dpoptim
from dpoptim.clipping.mechanism import PrivateMechanism
from dpoptim.data import processes, shards
from dpoptim.data.processes import Processes, exchange
from dpoptim.data.shards import own_part, whole_state
from dpoptim.integrations.run_identity import run_header
from dpoptim.privacy.step_ledger import RunHeader, StepLedger
from tests.optim import table

KEY = dpoptim.NoiseKey.from_bytes(bytes(range(32)))
STEPS = 20
NOISES: dict[str, Any] = {
    "independent": dpoptim.Independent(),
    "BandMF": dpoptim.Banded(bands=4),
    "BLT": dpoptim.BufferedToeplitz(buffers=2),
    "banded inverse": dpoptim.BandedInverse(bands=4),
}


def plan_of(noise: str = "independent", **settings: Any) -> dpoptim.PrivacyPlan:
    common = {"num_examples": 60, "batch_size": 12, "steps": STEPS, "clip_norm": 0.8, "noise_multiplier": 0.5}
    return dpoptim.PrivacyPlan(**{**common, **settings}, noise=NOISES[noise])


def records(count: int = 60) -> Any:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(3, generator=generator), torch.randn(2, generator=generator)) for _ in range(count)]


SHARDED = bool(os.environ.get("SHARDED"))


def model_of() -> nn.Sequential:
    """Make a different model in each process, so that the weights of process 0 must be copied; or one sharded model."""
    torch.manual_seed(5 if SHARDED else 5 + int(os.environ["RANK"]))
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return sharded(model, model[2]) if SHARDED else model


def sharded(model: Any, *parts: nn.Module) -> Any:
    if not distributed.is_initialized():
        distributed.init_process_group("gloo")
    for part in parts:
        fully_shard(part)
    return fully_shard(model)


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().sum(1)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in whole_state(list(model.parameters()))])


def train(model: nn.Module, optimizer: Any, loader: Any, steps: int, *, factor: float = 1.0) -> list[Tensor]:
    """Return what each step released."""
    released: list[Tensor] = []
    divided = optimizer.mechanism.shards

    def observe(found: Any) -> None:
        gradient = found.gradient if divided is None else divided.whole(found.gradient)
        released.append(torch.cat([part.flatten().clone() for part in gradient.values()]))

    optimizer.observers.append(observe)
    for x, y in loader:
        (factor * losses_of(model, x, y)).sum().backward()
        optimizer.step()
        if loader.step_ends and loader.next_step == steps:
            break
    return released


def started(
    plan: dpoptim.PrivacyPlan,
    data: Any = None,
    make: Any = dpoptim.scale_then_privatize,
    loss_reduction: str = "sum",
    **settings: Any,
) -> tuple[Any, Any, Any]:
    model = model_of()
    loader = dpoptim.private_loader(data or records(), plan, key=KEY, run_id="a", **settings)
    return model, make(model, plan, 1e-2, key=KEY, run_id="a", loss_reduction=loss_reduction), loader


def variants(which: str) -> dict[str, Tensor]:
    """The weights after each variant, with each noise or ("some") with one."""
    found = {}
    for place, (name, variant) in enumerate(table.VARIANTS.items()):
        for noise in NOISES if which == "all" else [list(NOISES)[place % len(NOISES)]]:
            plan = plan_of(noise)
            if name == "independent_moments, independent noise on squares" and noise == "independent":
                continue
            model, rule = model_of(), table.RULES["adam"][0] if variant.takes_rule else None
            inputs, targets = (torch.stack(part) for part in zip(*records(), strict=True))
            task = table.Task(model, inputs, targets, [], torch.arange(6))
            optimizer = variant.make(model, plan, rule, task, key=KEY, run_id="a")
            # The plan object of the optimizer may be a copy with a different release.
            loader = dpoptim.private_loader(records(), optimizer.mechanism._drawn_for, key=KEY, run_id="a")
            train(model, optimizer, loader, STEPS)
            found[f"{name}, {noise}"] = weights(model)
    rules = {"adaptive": dpoptim.AdaptiveClipNorm(rate=0.5), "normalized": dpoptim.NormalizedGradients()}
    for noise, (name, rule) in zip(NOISES, rules.items(), strict=False):
        model, optimizer, loader = started(plan_of(noise).replace(clipping=rule))
        train(model, optimizer, loader, STEPS)
        found[f"{name}, {noise}"] = weights(model)
    return found


def noise_alone() -> dict[str, Tensor]:
    """What is released if all gradients are 0."""
    found = {}
    for noise in NOISES:
        model, optimizer, loader = started(plan_of(noise), make=dpoptim.post_processing)
        found[noise] = torch.stack(train(model, optimizer, loader, STEPS, factor=0.0))
    return found


def noise_faults() -> dict[str, Tensor]:
    """What is released if gradients are 0, and noise is added in each process and summed, or divided by √count."""
    found, add_noise = {}, PrivateMechanism._add_noise
    for fault in ("summed", "divided"):
        model, optimizer, loader = started(plan_of(), make=dpoptim.post_processing)
        mechanism = optimizer.mechanism

        def add_wrongly(self: PrivateMechanism, stream: str, to: Any, *rest: Any) -> None:
            add_noise(self, stream, to, *rest)
            self.processes.add_up(to.vectors)

        if fault == "divided":
            mechanism._stddevs["gradient"] /= mechanism.processes.count**0.5
        with mock.patch.object(PrivateMechanism, "_add_noise", add_wrongly if fault == "summed" else add_noise):
            found[fault] = torch.stack(train(model, optimizer, loader, STEPS, factor=0.0))
    return found


def one_record() -> list[Tensor]:
    """The first release with all records, and with one whose gradient is 0."""
    released = []
    for loss in (1.0, 0.0):
        data, plan = records(), plan_of(batch_size=60, steps=2)
        x, y = data[17]
        start = model_of()
        Processes.current().copy_from_first(start.parameters())
        data[17] = (x, y if loss else start(x).detach())
        model, optimizer, loader = started(plan, data, make=dpoptim.post_processing)
        released += train(model, optimizer, loader, 1)
    return released


def small_shares() -> dict[str, Any]:
    """Train on Poisson batches that leave most shares empty, on uneven micro-batches, and with mean losses."""
    found = {}
    cases: dict[str, dict[str, Any]] = {"poisson": {}, "micro-batches": {"micro_batch_size": 2}}
    for name, settings in cases.items():
        plan = plan_of(batch_size=2 if name == "poisson" else 13, sampling=dpoptim.Poisson())
        model, optimizer, loader = started(plan, **settings)
        train(model, optimizer, loader, STEPS)
        found[name] = weights(model)
    model, optimizer, loader = started(plan_of(batch_size=13, sampling=dpoptim.Poisson()), loss_reduction="mean")
    for x, y in loader:
        losses_of(model, x, y).mean().backward()
        optimizer.step()
    return {**found, "means": weights(model)}


def users() -> dict[str, Tensor]:
    """The weights after training by user, with parts of at most five records; the first user has far more."""
    found, ids = {}, [0] * 12 + [number % 20 for number in range(48)]
    for sampling in (dpoptim.Shuffled(), dpoptim.Poisson()):
        settings: dict[str, Any] = {"num_examples": 20, "batch_size": 5, "unit": "user", "records_per_user": 7}
        plan = plan_of(sampling=sampling, **settings)
        model, optimizer, loader = started(plan, users=ids, micro_batch_size=5)
        train(model, optimizer, loader, STEPS)
        found[repr(sampling)] = weights(model)
    return found


def evaluated() -> dict[str, Tensor]:
    """The weights after steps with an evaluation between backward and step, which leaves parameters of FSDP whole."""
    model, optimizer, loader = started(plan_of(steps=4))
    for x, y in loader:
        losses_of(model, x, y).sum().backward()
        with torch.no_grad():
            model(x)
        optimizer.step()
    return {"weights": weights(model)}


def defaults() -> dict[str, Any]:
    """Train with dropout, without giving a key or run_id."""
    model = nn.Sequential(model_of(), nn.Dropout(0.5))
    plan = plan_of()
    loader = dpoptim.private_loader(records(), plan)
    optimizer = dpoptim.scale_then_privatize(model, plan, 1e-2)
    masks = []
    for x, y in dpoptim.secret_randomness(loader, optimizer):
        losses_of(model, x, y).sum().backward()
        masks.append(torch.rand(3))
        optimizer.step()
    return {"weights": weights(model), "masks": masks[0], "fingerprint": optimizer.key.fingerprint()}


def disagree() -> dict[str, str]:
    """Return the errors if process 1 differs from process 0 in one thing at a time."""
    found = {}
    differences = ["data", "order", "plan", "model", "key", "lr", "scale", "decay", "step", "moment"]
    differences += ["given key", "given run_id", "no loader", "version", "code", "script"]
    for what in (*differences, "wrapped", "external", "nothing"):
        found[what] = "no error"
        try:
            _differ_in(what if int(os.environ["RANK"]) == 1 or what in ("wrapped", "external") else "")
        except ValueError as error:
            found[what] = str(error)
    return found


def _differ_in(what: str) -> None:
    data, plan = records(), plan_of(noise_multiplier=0.6 if what == "plan" else 0.5)
    if what == "data":
        data[3] = (data[3][0] + 1, data[3][1])
    order = list(range(60))[:: -1 if what == "order" else 1]
    if what in ("version", "code", "script"):
        _refuse_different_code(what)
    if what != "no loader":
        own: dict[str, Any] = {"given key": {"key": KEY}, "given run_id": {"run_id": "a"}}
        dpoptim.private_loader(data, plan, **own.get(what, {}))
        dpoptim.private_loader(torch.utils.data.Subset(data, order), plan)
    model: nn.Module = nn.Linear(3, 5 if what == "model" else 4)
    if what == "wrapped":
        model = nn.parallel.DistributedDataParallel(model)
    key = dpoptim.NoiseKey.from_bytes(bytes([1 if what == "key" else 0] * 32))
    lr, external = 2e-2 if what == "lr" else 1e-2, what == "external"
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1 if what == "decay" else 0.0}]
    optimizer = dpoptim.scale_then_privatize(
        model,
        plan,
        lr,
        eps_scale=1e-4 if what == "scale" else 1e-3,
        param_groups=groups,
        key=key,
        external_batches=external,
    )
    optimizer.mechanism.step = int(what == "step")
    if what == "moment":
        optimizer.state[next(model.parameters())]["second_moment"] += 1
        optimizer._set_scale()
    optimizer.mechanism.privatize()


def _refuse_different_code(what: str) -> None:
    """Meet the other processes as if this one had a different version, one changed file, or a different script."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as changes:
        package = Path(shutil.copytree(Path(processes.__file__).parents[1], Path(folder, "dpoptim")))
        changed = package / ("optim/rules.py" if what == "code" else "program.py")
        with changed.open("a") as file:
            file.write("# changed")
        if what == "version":
            changes.enter_context(mock.patch.object(processes, "__version__", "0.0.0"))
        elif what == "code":
            changes.enter_context(mock.patch.object(processes, "__file__", str(package / "data/processes.py")))
        else:
            changes.enter_context(mock.patch.object(sys.modules["__main__"], "__file__", str(changed)))
        changes.callback(processes._code.cache_clear)
        processes._code.cache_clear()
        Processes.current().shared_run("private_loader", None, None)


def wrapped() -> dict[str, Tensor]:
    """The weights if DistributedDataParallel is around the model that the optimizer has, or around a layer."""
    found = {}
    for where in ("nowhere", "before", "after", "around a layer"):
        model: Any = model_of()
        plan = plan_of(noise_multiplier=0.0)  # noise depends on the names of parameters, and a wrapper changes them
        called = nn.parallel.DistributedDataParallel(model) if where == "before" else model
        if where == "around a layer":
            model[0] = nn.parallel.DistributedDataParallel(model[0])
        loader = dpoptim.private_loader(records(), plan, key=KEY, run_id="a")
        optimizer = dpoptim.scale_then_privatize(model, plan, 1e-2, key=KEY, run_id="a")
        if where == "after":
            called = nn.parallel.DistributedDataParallel(model)
        train(called, optimizer, loader, STEPS)
        found[where] = weights(model)
    return found


def load(file: str | Path, model: nn.Module, optimizer: Any, loader: Any) -> None:
    if Path(file).exists():
        state = torch.load(file, weights_only=False)
        set_model_state_dict(model, state["model"], options=StateDictOptions(full_state_dict=True))
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])


def state_of(model: nn.Module, optimizer: Any, loader: Any) -> Any:
    """Return whole tensors; all processes take part."""
    return whole_state(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
    )


AVERAGING = partial(dpoptim.scale_then_privatize, averaged=0.9)


def resume(file: str, until: str, with_ledger: str = "yes") -> Any:
    """Continue runs with three kinds of noise in FILE.NOISE until a step, and save them; process 0 writes.

    Return the weights and their averages.
    """
    found = []
    for noise in ("BandMF", "BLT", "banded inverse"):
        model, optimizer, loader = started(plan_of(noise), make=AVERAGING)
        load(f"{file}.{noise}", model, optimizer, loader)
        if int(os.environ["RANK"]) == 0 and with_ledger == "yes":
            step = optimizer.mechanism.step or None
            book = StepLedger.open(f"{file}.{noise}.steps", run_header(optimizer, settings={}, data=None), step=step)
            optimizer.mechanism.before_step = book.before_step
        try:
            train(model, optimizer, loader, int(until))
        except ValueError as error:
            return str(error)
        state = state_of(model, optimizer, loader)
        if int(os.environ["RANK"]) == 0:
            torch.save(state, f"{file}.{noise}")
        found.append(weights(model))
        with optimizer.averaged_weights():
            found.append(weights(model))
    return torch.cat(found)


def loaded_twice(file: str) -> str:
    """Load a state of a different number of processes, and then the optimizer's own, as Accelerate does."""
    model, optimizer, loader = started(plan_of("BandMF"), make=AVERAGING)
    optimizer.load_state_dict(torch.load(file, weights_only=False)["optimizer"])
    optimizer.load_state_dict(optimizer.state_dict())
    try:
        loader.load_state_dict(torch.load(file, weights_only=False)["loader"])
        train(model, optimizer, loader, 20)
    except ValueError as error:
        return str(error)
    return "released"


def public() -> Tensor:
    """Scale by gradients of public data that differ between processes."""
    model, plan = model_of(), plan_of()

    def gradients() -> dict[str, Tensor]:
        return {name: torch.full_like(p, 1.0 + int(os.environ["RANK"])) for name, p in model.named_parameters()}

    loader = dpoptim.private_loader(records(), plan, key=KEY, run_id="a")
    optimizer = dpoptim.adadps(model, plan, 1e-2, public_gradients=gradients, renew_every=1, key=KEY, run_id="a")
    train(model, optimizer, loader, 3)
    return weights(model)


def ledger() -> list[str]:
    """Release two steps with a ledger in process 0, once more with the same gradients, and then with different ones."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for factor in (1.0, 1.0, 1.5):
            plan = plan_of()
            model, optimizer, loader = started(plan)
            mechanism, file = optimizer.mechanism, Path(folder, "ledger")
            header = RunHeader(key=KEY, run_id="a", plan=plan.to_dict(), strategy=mechanism.strategy_digest)
            if int(os.environ["RANK"]) == 0:
                book = StepLedger.open(file, header, step=0 if file.exists() else None)
                mechanism.before_step = book.before_step
            try:
                train(model, optimizer, loader, 2, factor=factor)
                found.append("released")
            except ValueError as error:
                found.append(str(error))
            if int(os.environ["RANK"]) == 0:
                book.close()
    return found


def ledger_everywhere() -> str:
    """Open a step ledger in all processes."""
    _, optimizer, _ = started(plan_of())
    folder = Processes.current().from_first(tempfile.mkdtemp())
    try:
        book = StepLedger.open(Path(folder, "ledger"), run_header(optimizer, settings={}, data=None))
    except ValueError as error:
        book, found = None, str(error)
    else:
        found = "opened"
    Processes.current().gathered(found)  # nobody closes it before all have tried
    if book is not None:
        book.close()
    return found


class Tied(nn.Module):
    """A table that reads tokens and predicts them, with rows that do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(11, 4), nn.Linear(4, 4), nn.Linear(4, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.table(ids)).tanh())


def tied() -> dict[str, Tensor]:
    """The weights of a model with tied weights, clipped with and without a scale."""
    found = {}
    for make in (dpoptim.post_processing, dpoptim.scale_then_privatize):
        torch.manual_seed(5)
        model = sharded(Tied()) if SHARDED else Tied()
        plan, generator = plan_of("BLT", steps=6), torch.Generator().manual_seed(2)
        data: Any = [torch.randint(0, 11, (5,), generator=generator) for _ in range(60)]
        loader = dpoptim.private_loader(data, plan, key=KEY, run_id="a")
        optimizer = make(model, plan, 1e-2, key=KEY, run_id="a")
        for ids in loader:
            logits = model(ids)[:, :-1].flatten(0, 1)
            losses = nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
            losses.view(len(ids), -1).sum(1).sum().backward()
            optimizer.step()
        found[make.__name__] = weights(model)
    return found


def memory() -> dict[str, int]:
    """Bytes that a process holds between steps, by what they hold."""
    before = _bytes_of_tensors()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 256), nn.Tanh(), nn.Linear(256, 128), nn.Linear(128, 2))
    model = sharded(model, model[0], model[2]) if SHARDED else model
    plan = plan_of("BandMF")
    loader = dpoptim.private_loader(records(), plan, key=KEY, run_id="a")
    optimizer = dpoptim.scale_then_privatize(model, plan, 1e-2, key=KEY, run_id="a")
    for _, (x, y) in zip(range(2), loader, strict=False):
        losses_of(model, x, y).sum().backward()
        optimizer.step()
    return {
        "parameters": sum(own_part(p).nbytes for p in model.parameters()),
        "state": sum(own_part(t).nbytes for state in optimizer.state.values() for t in state.values()),
        "noise": optimizer.mechanism.noise_memory_bytes,
        "all tensors": _bytes_of_tensors() - before,
    }


def _bytes_of_tensors() -> int:
    """Bytes of all tensors that Python knows in this process."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [found for found in gc.get_objects() if isinstance(found, Tensor)]
    stores = [own_part(tensor).untyped_storage() for tensor in tensors]
    return sum({store.data_ptr(): store.nbytes() for store in stores}.values())


def sent() -> dict[str, float]:
    """Elements that dpoptim exchanges in a micro-batch, relative to those of the model."""
    model, optimizer, loader = started(plan_of())
    found: Counter[str] = Counter()

    def counting(collective: Any, *given: Any, **named: Any) -> None:
        found[collective.__name__] += sum(
            leaf.numel() for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)
        )
        exchange(collective, *given, **named)

    x, y = next(iter(loader))
    with mock.patch.object(shards, "exchange", counting):
        losses_of(model, x, y).sum().backward()
        optimizer.step()
    whole = sum(parameter.numel() for parameter in model.parameters())
    return {name: elements / whole / (1 + 1 / Processes.current().count) for name, elements in found.items()}


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x - x.mean(0))


def mixing() -> str:
    """Train a model that mixes examples; only the first process has more than one."""
    model: nn.Module = Centered()
    plan = plan_of(batch_size=Processes.current().count + 1)
    loader = dpoptim.private_loader(records(), plan, key=KEY, run_id="a")
    optimizer = dpoptim.dp_sgd(sharded(model), plan, 1e-2, key=KEY, run_id="a")
    try:
        train(model, optimizer, loader, 2)
    except ValueError as error:
        return str(error)
    return "no error"


def refused() -> dict[str, str]:
    """Shard a part of the model only, and clip the gradients of a sharded model without an optimizer."""
    model, layer = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), nn.Linear(3, 1)
    sharded(model[0])
    sharded(layer)
    calls = {
        "some parameters": lambda: dpoptim.dp_sgd(model, plan_of(), 1e-2),
        "clipped_sum": lambda: dpoptim.clipping.clipped_sum(layer, lambda m, x: m(x)[:, 0], torch.ones(2, 3)),
    }
    found = dict.fromkeys(calls, "no error")
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


class Bypassed(nn.Module):
    """A layer's weight is used, but the layer itself does not run (unless it is `called`)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.called = nn.Linear(3, 3), nn.Linear(3, 2, bias=False), False

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.unused(first) if self.called else nn.functional.linear(first, self.unused.weight)


class Scaled(nn.Module):
    """A module that needs the generic rule."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.map = nn.Parameter(torch.ones(2)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x) * self.factor


class Counting(nn.Module):
    """Writes sums of its inputs into a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.map: Any = nn.Linear(3, 2)
        self.map.seen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.map.seen += x.sum(0)
        return self.map(x)


def mistakes() -> dict[str, str]:
    """What happens to sharded models in unusual loops."""
    makers = {"bypassed": Bypassed, "counting": Counting, "replaced": Scaled, "generic alone": Scaled}
    found = {}
    makers |= {"checked before": Bypassed, "unfrozen": Scaled, "late": Scaled}
    for what, make in {**makers, "generic inside": Scaled, "evaluated first": Scaled}.items():
        model: Any = nn.Sequential(make())
        if what == "unfrozen":
            model[0].factor.requires_grad_(False)
        Processes.current()
        if what == "generic alone":
            fully_shard(model[0])
        fully_shard(model, ignored_params={model[0].map.seen} if what == "counting" else None)
        if what == "evaluated first":
            with torch.no_grad():
                model(torch.zeros(1, 3))
        plan = plan_of(steps=3)
        try:
            loader = dpoptim.private_loader(records(), plan, key=KEY, run_id="a")
            optimizer = dpoptim.dp_sgd(model, plan, 1e-2, key=KEY, run_id="a")
            if what == "replaced":
                model[0] = Scaled()
            if what == "late":
                model.register_parameter("late", nn.Parameter(torch.ones(2)))
            if what in ("unfrozen", "checked before"):
                model[0].called = True
                with torch.no_grad():
                    model(torch.zeros(1, 3))
                if what == "checked before":
                    x, y = (torch.stack(part) for part in zip(*records(4), strict=True))
                    dpoptim.check_example_independence(model, lambda own, given: losses_of(own, *given), (x, y))
                model[0].called = False
                model.requires_grad_(True)
            train(model, optimizer, loader, 3)
            found[what] = "released"
        except ValueError as error:
            found[what] = str(error)
    return found


def late_start() -> dict[str, str]:
    """torch.distributed starts between loader and optimizer, or after both."""
    group: dict[str, Any] = {"rank": int(os.environ.pop("RANK")), "world_size": int(os.environ.pop("WORLD_SIZE"))}
    found, data = {}, records()
    model = nn.Linear(3, 2)
    plans = [plan_of(sampling=dpoptim.Poisson()) for _ in range(3)]
    loaders = [dpoptim.private_loader(data, plan, key=KEY, run_id="a") for plan in plans[:2]]
    early = dpoptim.scale_then_privatize(model, plans[1], 1e-2, key=KEY, run_id="a")
    third = nn.Linear(3, 2)
    optimizer_first = dpoptim.scale_then_privatize(third, plans[2], 1e-2, key=KEY, run_id="a")
    distributed.init_process_group("gloo", **group)
    late = nn.Linear(3, 2)
    cases = {
        "loader first": (late, dpoptim.scale_then_privatize(late, plans[0], 1e-2, key=KEY, run_id="a"), loaders[0]),
        "both": (model, early, loaders[1]),
        "optimizer first": (third, optimizer_first, dpoptim.private_loader(data, plans[2], key=KEY, run_id="a")),
    }
    os.environ["RANK"] = str(group["rank"])
    for name, (own, optimizer, loader) in cases.items():
        try:
            train(own, optimizer, loader, 1)
            found[name] = "released"
        except ValueError as error:
            found[name] = str(error)
    return found


def _run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("process 1 has no memory left")


FAULTS = {
    "nothing": lambda: None,
    "raises": _run_out_of_memory,
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(3600),
}
FAULTS["is killed before it saves"] = FAULTS["is killed"]


def fail(what: str, folder: str) -> None:
    """Fail, and leave the time at which this happened in a file."""
    Path(folder, "failed").write_text(str(time.time()))
    FAULTS[what]()


def disturbed(folder: str, what: str = "nothing", seconds: str = "") -> Tensor:
    """Resume a run that process 0 saves after every step. In step 3, process 1 fails, or process 0 before it saves."""
    if seconds:
        distributed.init_process_group(timeout=datetime.timedelta(seconds=float(seconds)))
    rank, file = int(os.environ["RANK"]), Path(folder, "run.pt")
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    model, optimizer, loader = started(plan_of("BandMF"))
    load(file, model, optimizer, loader)
    if rank == 0:
        header = run_header(optimizer, settings={}, data=None)
        book = StepLedger.open(Path(folder, "ledger"), header, step=optimizer.mechanism.step or None)
        optimizer.mechanism.before_step = book.before_step
    fails_unsaved = what == "is killed before it saves"
    for x, y in loader:
        losses_of(model, x, y).sum().backward()
        if rank == 1 and optimizer.mechanism.step == 2 and not fails_unsaved:
            fail(what, folder)
        optimizer.step()
        if rank == 0 and optimizer.mechanism.step == 3 and fails_unsaved:
            fail(what, folder)
        state = state_of(model, optimizer, loader)
        if rank == 0:
            torch.save(state, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
    return weights(model)


def main(folder: str, names: list[str], defined: dict[str, Any]) -> None:
    """Run jobs and write what they return to FOLDER/RANK.pt."""
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        job, *given = name.split(":")
        found[job] = defined[job](*given)
    torch.save(found, Path(folder, f"{os.environ['RANK']}.pt"))
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:], globals())
