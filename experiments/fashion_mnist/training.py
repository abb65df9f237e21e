"""One cell: train with dpoptim, Opacus or plain PyTorch, and score. All read the same batches from the device."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import dpoptim
from experiments.fashion_mnist.cells import DELTA, ROW, Cell
from experiments.fashion_mnist.data import Images, Rows, images_for
from experiments.fashion_mnist.models import MODELS
from experiments.framework import Outcome

WARM_UP = 0.2
"""The share of the steps that are not timed: graphs are captured in them."""
MOMENTUM = 0.9  # of SGD
Training = tuple[Iterator[None], dict[str, Any]]
"""Steps to take, and what they guarantee."""


def compute(cell: Cell, *, folder: str, device: str, modes: Mapping[tuple[str, str], str]) -> Outcome:
    """Train and score a cell. `modes` has Opacus's fastest mode by (model, row)."""
    cuda, final = device != "cpu", cell["purpose"] == "final"
    images = images_for(cell["model"], folder, device, num_examples=cell["num_examples"], test=final)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    torch.manual_seed(cell["seed"])
    model = MODELS[cell["model"]].make().to(device)
    result: dict[str, Any] = {}
    if ROW[cell["row"]].library == "Opacus":
        result["mode"] = cell.get("mode") or modes.get((cell["model"], cell["row"]), "hooks")
    try:
        train = {"dpoptim": _dpoptim, "Opacus": _opacus, "PyTorch": _pytorch}[ROW[cell["row"]].library]
        steps, guarantee = train({**cell, **result}, model, images)
        result["ms_per_step"] = round(1e3 * _seconds_per_step(steps, cell["steps"], cuda), 3)
    except Exception as error:
        if "mode" not in cell:
            raise
        return Outcome(result=result | {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:60]}"})
    if cuda:
        result["gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
    if cell["purpose"] != "speed":
        result |= scores(model, images)
    return Outcome(result=result, **{**guarantee, "plan": guarantee.get("plan") if final else None})


def scores(model: nn.Module, images: Images) -> dict[str, Any]:
    """The accuracy in percent and the mean loss, None if not finite, on the images to score."""
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(part) for part in images.scored.split(2000)]).double()
    loss = float(F.cross_entropy(logits, images.scored_labels))
    right = int((logits.argmax(1) == images.scored_labels).sum())
    return {"accuracy": round(100 * right / len(logits), 3), "loss": round(loss, 5) if math.isfinite(loss) else None}


def _seconds_per_step(steps: Iterator[None], count: int, cuda: bool) -> float:
    """Take all steps; returns the time of those after the warm-up."""
    warm, started = max(int(WARM_UP * count), 1), math.nan
    for done, _ in enumerate(steps, 1):
        if done in (warm, count) and cuda:
            torch.cuda.synchronize()
        if done == warm:
            started = time.perf_counter()
    return (time.perf_counter() - started) / (count - warm)


def _set_rate(optimizer: torch.optim.Optimizer, cell: Cell, step: int) -> None:
    """The learning rate falls linearly; it would reach 0 one step after the last."""
    for group in optimizer.param_groups:
        group["lr"] = cell["lr"] * (1 - step / cell["steps"])


@lru_cache
def plan_of(noise: str, epsilon: float, num_examples: int, batch_size: int, steps: int, parameters: int) -> Any:
    """The calibrated plan at clip norm 1.

    "Poisson" has independent noise and neighbours that differ by one example, as Opacus does. "default" is shuffled and
    "cyclic" sampled in secret; for both, `choose_noise` chooses correlated noise.
    """
    plan = dpoptim.PrivacyPlan(num_examples=num_examples, batch_size=batch_size, steps=steps)
    if noise == "Poisson":
        plan = plan.replace(sampling=dpoptim.Poisson(), adjacency=dpoptim.Adjacency.ADD_REMOVE)
        return plan.calibrate(epsilon=epsilon, delta=DELTA)
    if noise == "cyclic":
        plan = plan.replace(sampling=dpoptim.Poisson())
    return dpoptim.choose_noise(plan, epsilon=epsilon, delta=DELTA, parameters=parameters).plan


def _dpoptim(cell: Cell, model: nn.Module, images: Images) -> Training:
    row, parameters = ROW[cell["row"]], sum(parameter.numel() for parameter in model.parameters())
    setting = (cell[name] for name in ("epsilon", "num_examples", "batch_size", "steps"))
    plan = plan_of(row.noise, *setting, parameters).replace(clip_norm=cell["clip_norm"])
    key = dpoptim.NoiseKey.from_bytes(hashlib.sha256(f"fashion_mnist {cell['seed']}".encode()).digest())
    run: dict[str, Any] = {"key": key, "run_id": "fashion_mnist"}  # public images; a real run needs a secret key
    momentum = {"momentum": MOMENTUM} if row.method == "dp_sgd" else {}
    optimizer = getattr(dpoptim, row.method)(model, plan, lr=cell["lr"], **momentum, **run)
    loader = dpoptim.private_loader(Rows(plan.num_examples), plan, collate_fn=images.batch, **run)
    differentiate = optimizer.captured(lambda inputs, labels: F.cross_entropy(model(inputs), labels, reduction="none"))

    def steps() -> Iterator[None]:
        for step, (inputs, labels) in enumerate(loader):
            _set_rate(optimizer, cell, step)
            differentiate(inputs, labels)
            optimizer.step()
            yield

    return steps(), {"plan": plan.to_dict(), "epsilon": plan.epsilon(), "adjacency": plan.adjacency.value}


class _Tuples(Rows):
    """Opacus reads the first example to learn the shapes of an empty batch."""

    def __getitem__(self, row: int) -> Any:
        return (row,)


@lru_cache
def opacus_noise(epsilon: float, sample_rate: float, steps: int) -> tuple[float, float]:
    """The noise multiplier that `make_private_with_epsilon` finds, closer to ε, and its ε; kept for other runs."""
    from opacus.accountants import PRVAccountant
    from opacus.accountants.utils import get_noise_multiplier

    setting = {"target_epsilon": epsilon, "target_delta": DELTA, "sample_rate": sample_rate, "steps": steps}
    multiplier, accountant = get_noise_multiplier(**setting, accountant="prv", epsilon_tolerance=1e-3), PRVAccountant()
    accountant.history = [(multiplier, sample_rate, steps)]
    return multiplier, accountant.get_epsilon(DELTA)


def _opacus(cell: Cell, model: nn.Module, images: Images) -> Training:
    from opacus import PrivacyEngine

    warnings.simplefilter("ignore")
    examples, batch_size, seed = cell["num_examples"], cell["batch_size"], cell["seed"]
    multiplier, epsilon = opacus_noise(cell["epsilon"], batch_size / examples, cell["steps"])
    sampled = torch.utils.data.DataLoader(_Tuples(examples), batch_size=batch_size, collate_fn=images.batch,
                                          generator=torch.Generator().manual_seed(seed))  # fmt: skip
    private, optimizer, *criteria, loader = PrivacyEngine().make_private(
        module=model, optimizer=_optimizer(cell, model), criterion=nn.CrossEntropyLoss(), data_loader=sampled,
        noise_multiplier=multiplier, max_grad_norm=cell["clip_norm"], grad_sample_mode=cell["mode"],
        noise_generator=torch.Generator(images.train.device).manual_seed(seed),
    )  # fmt: skip
    if optimizer.expected_batch_size != batch_size:
        raise ValueError(f"Opacus expects batches of {optimizer.expected_batch_size}, not {batch_size}")
    criterion = criteria[0] if criteria else nn.CrossEntropyLoss()
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    plan = {"noise_multiplier": multiplier, "sampling": "Poisson", "accountant": "Opacus, prv"}
    return (
        _ordinary_steps(cell, private, optimizer, criterion, batches),
        {"plan": plan, "epsilon": epsilon, "adjacency": dpoptim.Adjacency.ADD_REMOVE.value},
    )


def _pytorch(cell: Cell, model: nn.Module, images: Images) -> Training:
    generator = torch.Generator().manual_seed(cell["seed"])
    shape = (cell["steps"], cell["batch_size"])
    batches = (images.batch(rows) for rows in torch.randint(cell["num_examples"], shape, generator=generator).tolist())
    steps = _ordinary_steps(cell, model, _optimizer(cell, model), nn.CrossEntropyLoss(), batches)
    return steps, {"note": "NOT private: no clipping, no noise"}


def _optimizer(cell: Cell, model: nn.Module) -> torch.optim.Optimizer:
    make = partial(torch.optim.SGD, momentum=MOMENTUM) if ROW[cell["row"]].method == "dp_sgd" else torch.optim.Adam
    return make(model.parameters(), lr=cell["lr"], fused=next(model.parameters()).is_cuda)


def _ordinary_steps(cell: Cell, model: Any, optimizer: Any, criterion: Any, batches: Iterator[Any]) -> Iterator[None]:
    for step, (inputs, labels) in enumerate(itertools.islice(batches, cell["steps"])):
        _set_rate(optimizer, cell, step)
        optimizer.zero_grad()
        criterion(model(inputs), labels).backward()
        optimizer.step()
        yield
