"""Jobs of trainers in each process: python -m tests.distributed.trainer_jobs FOLDER NAME[:ARGUMENT] ..."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import accelerate
import peft
import safetensors.torch
import torch
import transformers
from accelerate.state import AcceleratorState
from torch import nn

import dpoptim
from dpoptim import app
from dpoptim.app.cli import main
from dpoptim.app.progress import ProgressReporter
from dpoptim.app.recipes.recipe import Recipe
from dpoptim.app.runs.run_log import read_log
from dpoptim.data.processes import Processes
from dpoptim.data.shards import is_sharded
from dpoptim.integrations.accelerate import prepare_accelerate, shard_for_accelerate
from dpoptim.integrations.hugging_face import PrivacyArguments, PrivateTrainer
from dpoptim.integrations.opacus import PrivacyEngine
from dpoptim.noise import NoiseKey
from dpoptim.optim import PrivateOptimizer
from tests.distributed import jobs
from tests.distributed.fsdp_on_cpu import allow_fsdp_on_cpu
from tests.integrations.hugging_face import cases

EXACT = PrivacyArguments(noise_multiplier=0.0, clip_norm=0.5, variant="dp_sgd", sampling="shuffled", delta=1e-3)
NOISY = PrivacyArguments(noise_multiplier=0.6, delta=1e-3, sampling="poisson")


def _trainer(folder: Path, privacy: PrivacyArguments, **changes: Any) -> PrivateTrainer:
    """Every step draws the whole dataset, so that without noise the result does not depend on the key."""
    records = cases.labelled()[:12]
    split = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2 // int(os.environ["WORLD_SIZE"])}
    split |= {"fsdp": True} if jobs.SHARDED else {}
    args = cases.training_args(folder, **{**split, **changes})
    return PrivateTrainer(
        model=cases.classifier(dropout=0.1 if privacy is NOISY else 0.0),
        args=args,
        train_dataset=records,
        eval_dataset=cases.unseen(16),
        processing_class=cases.WORDS,
        privacy=privacy,
    )


def exact(folder: str) -> Any:
    trainer = _trainer(Path(folder), EXACT)
    trainer.train()
    return jobs.weights(trainer.model)


def paused(folder: str) -> dict[str, Any]:
    """Train with noise and save after two of four steps; resume from there in a second trainer."""
    saving = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    first = _trainer(Path(folder), NOISY, **saving)
    first.train()
    second = _trainer(Path(folder), NOISY, **saving)
    second.train(resume_from_checkpoint=str(Path(folder, "out", "checkpoint-2")))
    return {
        "weights": jobs.weights(first.model),
        "again": jobs.weights(second.model),
        "batch size": first.plan.batch_size,
        "key": first.private_optimizer.key.fingerprint(),  # type: ignore[union-attr]
        "files": sorted(file.name for file in Path(folder, "out", "checkpoint-2").iterdir()),
        "secrets": sorted(file.suffix for file in Path(folder, "out.secret").iterdir()),
        "logged": sorted({name for entry in first.state.log_history for name in entry}),
    }


def loop() -> dict[str, Any]:
    """A loop under Accelerate, and a scheduler that must not be prepared."""
    accelerator = accelerate.Accelerator(cpu=True)
    plan = jobs.plan_of()
    model, optimizer, loader = jobs.started(plan)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    found = {"scheduler": "accepted"}
    try:
        prepare_accelerate(accelerator, model, optimizer, scheduler)
    except ValueError as error:
        found["scheduler"] = str(error)
    model, optimizer = prepare_accelerate(accelerator, model, optimizer)
    for x, y in loader:
        accelerator.backward(jobs.losses_of(model, x, y).sum())
        optimizer.step()
    return {**found, "weights": jobs.weights(model), "kind": type(model).__name__}


def sharded_loop() -> dict[str, Any]:
    """A loop under Accelerate with FSDP2, a model that was not sharded, and checkpoints that must not be used."""
    AcceleratorState._reset_state(True)  # that of the last trainer
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator, plan, found = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin), jobs.plan_of(), {}
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    whole = copy.deepcopy(model)
    try:
        prepare_accelerate(accelerator, whole, dpoptim.post_processing(whole, plan, 1e-2))
    except ValueError as error:
        found["whole"] = str(error)
    shard_for_accelerate(accelerator, model)
    loader = dpoptim.private_loader(jobs.records(), plan, key=jobs.KEY, run_id="a")
    made = dpoptim.scale_then_privatize(model, plan, 1e-2, key=jobs.KEY, run_id="a")
    prepared, optimizer = prepare_accelerate(accelerator, model, made)
    for x, y in loader:
        accelerator.backward(jobs.losses_of(prepared, x, y).sum())
        optimizer.step()
    try:
        accelerator.save_state(tempfile.mkdtemp())
    except ValueError as error:
        found["state"] = str(error)
    return {**found, "weights": jobs.weights(model), "is prepared": [prepared is model, optimizer is not made]}


def refused(folder: str) -> dict[str, str]:
    """The errors of PrivateTrainer for FSDP settings that it does not support."""
    changes: dict[str, dict[str, Any]] = {
        "FSDP1": {"fsdp_config": {"version": 1, "sync_module_states": False}},
        "activation checkpointing": {"fsdp_config": {"activation_checkpointing": True}},
        "offload": {"fsdp_config": {"cpu_offload": True}},
        "best model": {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps"},
    }
    return {name: _refusal(Path(folder), **change) for name, change in changes.items()}


def ignored(folder: str) -> str:
    """The error of PrivateTrainer if Accelerate ignores FSDP."""
    return _refusal(Path(folder), fsdp=True)


def _refusal(folder: Path, **changes: Any) -> str:
    try:
        _trainer(folder, EXACT, **changes)
    except ValueError as error:
        return str(error)
    return "accepted"


def own_loop() -> Any:
    """The same without Accelerate."""
    model, optimizer, loader = jobs.started(jobs.plan_of())
    jobs.train(model, optimizer, loader, jobs.STEPS)
    return jobs.weights(model)


class _StopsAfter(ProgressReporter):
    """Presses Ctrl-C in process 0 after a step."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self._last = last

    def step(self, *, step: int, epsilon: float, seconds: float) -> None:
        if step == self._last and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGINT)


SPLIT = PrivacyArguments(noise_multiplier=0.6, delta=1e-3, sampling="poisson", clip_norm=0.5)  # and no dropout
SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 1}


class _EndsAfter(transformers.TrainerCallback):
    def __init__(self, last: int) -> None:
        self._last = last

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self._last


def noisy(folder: str, last: str = "4", **changes: Any) -> dict[str, Any]:
    """Train with a fixed key until a step, evaluate and save on the way, and save the model."""
    _fix_keys()
    trainer = _trainer(Path(folder), SPLIT, **SAVING, per_device_train_batch_size=3, **changes)
    trainer.add_callback(_EndsAfter(int(last)))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    trainer.save_model()
    Processes.current().from_first(None)  # waits for the file
    saved = transformers.AutoModelForSequenceClassification.from_pretrained(Path(folder, "out"))
    return {
        "weights": jobs.weights(trainer.model),
        "saved": jobs.weights(saved),
        "gradients": [name for name, p in trainer.model.named_parameters() if p.grad is not None],
        "sharded": all(map(is_sharded, trainer.model.parameters())),
        "losses": [before] + [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "files": sorted(file.name for file in Path(folder, "out", "checkpoint-2").iterdir()),
        "logged": sorted({name for entry in trainer.state.log_history for name in entry}),
    }


def models(folder: str) -> dict[str, Any]:
    """The weights of other models, of LoRA, and with less memory, after training and in files."""
    _fix_keys()
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    small = {"gradient_checkpointing": True, "bf16": True}
    loaded_once = {"fsdp_config": {"cpu_ram_efficient_loading": True}} if jobs.SHARDED else {}
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "causal": (cases.causal_model(), {}),
        "lora": (peft.get_peft_model(cases.classifier(), lora), {}),
        "bf16": (cases.classifier(), small),
        "loaded by one process": (cases.classifier(), loaded_once),
    }
    found = {}
    for name, (model, changes) in kinds.items():
        split = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2 // int(os.environ["WORLD_SIZE"])}
        split |= {"fsdp": True} if jobs.SHARDED else {}
        words = cases.PIECES if name == "causal" else cases.WORDS
        data = [words(text) for text in cases.TEXTS[:12]] if name == "causal" else cases.labelled()[:12]
        trainer = PrivateTrainer(
            model=model,
            args=cases.training_args(Path(folder, name), **{**split, **changes, "max_steps": 2}),
            train_dataset=data,
            data_collator=transformers.DataCollatorForLanguageModeling(words, mlm=False) if name == "causal" else None,
            processing_class=words,
            privacy=EXACT,
        )
        trainer.train()
        trainer.save_model()
        Processes.current().from_first(None)  # waits for the file
        (file,) = Path(folder, name, "out").glob("*model.safetensors")
        found[name] = {"weights": jobs.weights(trainer.model), "saved": safetensors.torch.load_file(file)}
    return found


def resumed(folder: str) -> Any:
    """Continue the run of `noisy` after its second step."""
    trainer = _trainer(Path(folder), SPLIT, **SAVING, per_device_train_batch_size=3)
    trainer.train(resume_from_checkpoint=str(Path(folder, "out", "checkpoint-2")))
    return jobs.weights(trainer.model)


def _fix_keys() -> None:
    NoiseKey.generate = classmethod(lambda cls: cls.from_bytes(bytes(32)))  # type: ignore[method-assign, assignment]
    os.urandom = bytes


def _fail_in_third_step(what: str, folder: str) -> None:
    step = PrivateOptimizer.step

    def failing_step(self: PrivateOptimizer, *given: Any) -> Any:
        if what != "nothing" and self.mechanism.step == 2 and os.environ["RANK"] == "1":
            jobs.fail(what, folder)
        return step(self, *given)

    PrivateOptimizer.step = failing_step  # type: ignore[method-assign, assignment]


def noisy_until_fault(folder: str) -> None:
    """Train as `noisy` does; in step 3, process 1 has no memory."""
    _fail_in_third_step("raises", folder)
    noisy(folder)


COLUMNS = {"a": {"low": 0, "high": 6}, "b": {"low": 0, "high": 4}}


def _table(folder: str) -> str:
    """Write a file of 80 records in process 0."""
    data = Path(folder, "table.csv")
    if os.environ["RANK"] == "0":
        data.write_text("a,b,label\n" + "".join(f"{i % 7},{i % 5},{i % 2}\n" for i in range(80)))
    Processes.current().from_first(None)  # waits for the file
    return str(data)


def stopped(folder: str, what: str, *more: str) -> None:
    """`dpoptim train` with a fixed key, or with --resume; in step 3, process 1 fails."""
    _fix_keys()
    own = ["--model", "mlp", "--data", _table(folder), "--label-column", "label", "--epsilon", "50", "--steps", "6"]
    own += ["--batch-size", "16", "--device", "cpu", "--sampling", "poisson", "--checkpoint-every", "100"]
    own += ["--columns", "a=0:6", "b=0:4"]
    _fail_in_third_step(what, folder)
    run = str(Path(folder, "run"))
    status = main(["train", *(("--resume", run) if Path(run).exists() else (*own, "--run-dir", run)), *more])
    if status:
        sys.exit(status)


def in_one_process(folder: str) -> dict[str, str]:
    """The errors of what does not run in several processes."""
    recipe = ["--model", "mlp", "--data", _table(folder), "--label-column", "label", "--epsilon", "50"]
    recipe += ["--columns", "a=0:6", "b=0:4"]
    (file := Path(folder, f"{os.environ['RANK']}.toml")).write_text(
        f'model = "mlp"\ndata = "{_table(folder)}"\nlabel_column = "label"\nepsilon = 50.0\n'
        "[columns]\na = {low = 0, high = 6}\nb = {low = 0, high = 4}\n"
    )
    plan = ["--epsilon", "3", "--delta", "1e-5", "--steps", "10", "--batch-size", "10", "--num-examples", "100"]
    commands = {
        "--dry-run": ["train", *recipe, "--steps", "6", "--batch-size", "16", "--device", "cpu", "--dry-run"],
        "dpoptim compare": ["compare", str(file), "--run-dir", str(Path(folder, "compared"))],
        "dpoptim audit": ["audit", *plan],
        "the demonstration": ["train"],
    }
    found = {}
    for what, given in commands.items():
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            assert main(given) == 2
        found[what] = printed.getvalue()
    layer, data = nn.Linear(3, 1), torch.utils.data.TensorDataset(torch.ones(20, 3), torch.ones(20))
    try:
        PrivacyEngine().make_private(
            module=layer,
            optimizer=torch.optim.SGD(layer.parameters(), lr=0.1),
            data_loader=torch.utils.data.DataLoader(data, batch_size=5),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    except ValueError as error:
        found["the interface of Opacus"] = str(error)
    return found


def command(folder: str) -> dict[str, Any]:
    """`dpoptim train` without a pause, and stopped after three of six steps and resumed."""
    _fix_keys()
    recipe = Recipe(
        model="mlp", data=_table(folder), columns=COLUMNS, label_column="label", epsilon=50.0, steps=6,
        batch_size=16, device="cpu", sampling="poisson", noise="independent", checkpoint_every=100, micro_batch_size=4,
    )  # fmt: skip
    whole, paused = Path(folder, "whole"), Path(folder, "paused")
    first = app.train(recipe, whole)
    app.train(recipe, paused, progress=_StopsAfter(3))
    last = app.resume(paused)
    Processes.current().from_first(None)  # waits for the files
    return {
        "whole": jobs.weights(app.load_trained(whole)),
        "paused": jobs.weights(app.load_trained(paused)),
        "summaries": [found.get("reason") for found in (first, last)],
        "logged": [entry["step"] for entry in read_log(paused / "log.jsonl") if entry["kind"] == "step"],
    }


if __name__ == "__main__":
    if jobs.SHARDED:
        allow_fsdp_on_cpu()
    jobs.main(sys.argv[1], sys.argv[2:], globals())
