"""Jobs that run in each process of a distributed test: python -m tests.distributed.jobs FOLDER NAME[:ARGUMENT] ..."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import dpoptim
from dpoptim.data.processes import Processes
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


def model_of() -> nn.Sequential:
    """A different model in each process, so that the first one's weights must be copied."""
    torch.manual_seed(5 + int(os.environ["RANK"]))
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().sum(1)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def train(model: nn.Module, optimizer: Any, loader: Any, steps: int, *, factor: float = 1.0) -> list[Tensor]:
    """Return what each step released."""
    released: list[Tensor] = []
    optimizer.observers.append(
        lambda found: released.append(torch.cat([part.flatten().clone() for part in found.gradient.values()]))
    )
    for x, y in loader:
        (factor * losses_of(model, x, y)).sum().backward()
        optimizer.step()
        if loader.step_ends and loader.next_step == steps:
            break
    return released


def started(
    plan: dpoptim.PrivacyPlan, data: Any = None, make: Any = dpoptim.scale_then_privatize, **settings: Any
) -> tuple[Any, Any, Any]:
    model = model_of()
    loader = dpoptim.private_loader(data or records(), plan, key=KEY, run_id="a", **settings)
    return model, make(model, plan, 1e-2, key=KEY, run_id="a"), loader


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
    return found


def noise_alone() -> dict[str, Tensor]:
    """What is released if all gradients are 0."""
    found = {}
    for noise in NOISES:
        model, optimizer, loader = started(plan_of(noise), make=dpoptim.post_processing)
        found[noise] = torch.stack(train(model, optimizer, loader, STEPS, factor=0.0))
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
    """Poisson batches of two examples on average: most processes have none. And micro-batches of uneven number."""
    found = {}
    for name, settings in {"poisson": {}, "micro-batches": {"micro_batch_size": 2}}.items():
        plan = plan_of(batch_size=2 if name == "poisson" else 13, sampling=dpoptim.Poisson())
        model, optimizer, loader = started(plan, **settings)
        train(model, optimizer, loader, STEPS)
        found[name] = weights(model)
    return found


def defaults() -> dict[str, Any]:
    """Keys and run_ids of their own, and dropout."""
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
    """Process 1 differs in one thing after the other; return the errors."""
    found = {}
    differences = "data", "order", "plan", "model", "key", "lr", "scale", "decay", "step", "moment"
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
    dpoptim.private_loader(data, plan)
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


def resume(file: str, until: str, with_ledger: str = "yes") -> Any:
    """Continue the run in `file` until a step, and save it there; process 0 writes."""
    plan = plan_of("BandMF")
    model, optimizer, loader = started(plan)
    if Path(file).exists():
        state = torch.load(file, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    if int(os.environ["RANK"]) == 0 and with_ledger == "yes":
        step = optimizer.mechanism.step or None
        book = StepLedger.open(f"{file}.steps", run_header(optimizer, settings={}, data=None), step=step)
        optimizer.mechanism.before_step = book.before_step
    try:
        train(model, optimizer, loader, int(until))
    except ValueError as error:
        return str(error)
    if int(os.environ["RANK"]) == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
        torch.save(state, file)
    return weights(model)


def loaded_twice(file: str) -> str:
    """Load a state of a different number of processes, and then the optimizer's own, as Accelerate does."""
    model, optimizer, loader = started(plan_of("BandMF"))
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
    if file.exists():
        state = torch.load(file, weights_only=False)
        for part, owner in {"model": model, "optimizer": optimizer, "loader": loader}.items():
            owner.load_state_dict(state[part])
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
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
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
