"""PrivateTrainer: the training loop of Hugging Face's Trainer with a private loader, loss, optimizer and log."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.trainer_utils import TrainOutput

from dpoptim.clipping import Captured, Released, check_training_loss
from dpoptim.data import PrivateLoader, RecordFingerprint, fingerprint_records, private_loader
from dpoptim.data.lengths import part_multiple
from dpoptim.data.record_schema import RecordSchema
from dpoptim.data.secret_randomness import check_rng, seed_for_step, seed_generators
from dpoptim.data.shards import fsdp_modules, whole_state
from dpoptim.data.users import UserRecords, read_user_ids
from dpoptim.integrations.accelerate import (
    check_accelerator,
    keep_models,
    shard_for_accelerate,
    uses_fsdp2,
)
from dpoptim.integrations.hugging_face.arguments import PrivacyArguments, optimizer_for, plan_for, remedies_for
from dpoptim.integrations.hugging_face.batch_shapes import BatchShapes, has_rows, without_packing
from dpoptim.integrations.hugging_face.checkpoints import (
    LOADER_STATE,
    RunSecrets,
    check_readable,
    newest_checkpoint,
    read_loader_state,
    run_secrets,
)
from dpoptim.integrations.hugging_face.supported import check_call, check_sharding, check_subclass, private_arguments
from dpoptim.integrations.losses import losses_for
from dpoptim.integrations.padding_check import check_padding, state_restored
from dpoptim.integrations.released_norms import not_finite, released_norms
from dpoptim.integrations.run_identity import run_header, trainer_settings
from dpoptim.noise import NoiseKey
from dpoptim.optim import PrivateOptimizer
from dpoptim.optim.out_of_memory import RUNNING, advising, is_out_of_memory
from dpoptim.privacy import PrivacyPlan, StepLedger
from dpoptim.privacy.composition import EpsilonSpent
from dpoptim.validation.temporary_changes import replaced

_MIN_FACTOR_MEMORY = 1 << 30  # bytes; smaller micro-batches would save little
_NOT_RELEASED = ("loss", "grad_norm", "train_loss", "total_flos")  # in the logs of the stock Trainer


class PrivateTrainer(transformers.Trainer):
    """Train a Hugging Face model with differential privacy.

    It takes the arguments of `transformers.Trainer` and the argument `privacy`:

        trainer = PrivateTrainer(model=model, args=args, train_dataset=ds, data_collator=collator,
                                 privacy=PrivacyArguments(epsilon=8.0, delta=1e-6))
        trainer.train()
        print(trainer.plan.statement())

    Each step releases the noisy sum of clipped per-example gradients, divided by the EXPECTED batch size
    per_device_train_batch_size·gradient_accumulation_steps·processes. At most per_device_train_batch_size examples are
    in memory at once. With `PrivacyArguments(user_column=, records_per_user=)` the expected batch size counts users. A
    trainer trains once: to resume, create a new one and call `train(resume_from_checkpoint=True)`.

    Args:
        model: The model to train.
        args: `transformers.TrainingArguments`. Unsupported options are refused (see `supported.py`).
        data_collator: As in `transformers.Trainer`. It must not mix examples.
        train_dataset: The private examples, by index.
        privacy: The privacy settings.
        plan: A calibrated plan, instead of epsilon, batch size and steps.
        loss_per_example: `loss_per_example(model, batch)` returns one loss per example. Defaults to the loss of the
            model's class. On a GPU it runs as a CUDA graph, and as Python code only for new shapes. Anything else
            that it reads must be in tensors that are updated in place.
        optimizers: An optimizer of dpoptim that was created with `plan`, and a scheduler or None.
        **options: Further arguments of `transformers.Trainer`.

    Raises:
        ValueError: The plan cannot cover what was asked for.

    Guarantee: `trainer.plan.statement()` covers the model, checkpoints, logs and `TrainOutput`. Logs have the ε so far
    (rounded up to the next twentieth of the run), the learning rate and times, but no loss and no gradient norm of
    training data, and `TrainOutput.training_loss` is NaN. With debug_loss=True the loss is logged as
    "not_private_loss", and the guarantee does not cover the log. Evaluation does not affect training.
    Every run has a new key in OUTPUT_DIR.secret (mode 0700), which is never uploaded with OUTPUT_DIR.
    A resumed run repeats released steps exactly. Different examples, settings or gradients are refused before noise is
    made. To compare them, all examples are read once when training begins.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        *,
        privacy: PrivacyArguments | None = None,
        plan: PrivacyPlan | None = None,
        loss_per_example: Callable[[nn.Module, Mapping[str, Any]], Tensor] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        **options: Any,
    ) -> None:
        given = transformers.TrainingArguments(output_dir="tmp_trainer") if args is None else args
        check_subclass(type(self), PrivateTrainer)
        self.optimizer: Any
        self.privacy = PrivacyArguments() if privacy is None else privacy
        check_call(privacy, plan, model, given, optimizers[0], options)
        super().__init__(
            model, private_arguments(given), data_collator, train_dataset, optimizers=optimizers, **options
        )
        check_accelerator(self.accelerator)
        keep_models(self.accelerator)
        check_sharding(self.args, self.accelerator, model)
        self.loss_per_example = losses_for(model, self.privacy.task) if loss_per_example is None else loss_per_example
        self.private_optimizer: PrivateOptimizer | None = optimizers[0]
        check_rng(data_collator=self.data_collator, loss_per_example=self.loss_per_example, model=model)
        self._held_out: list[Any] = []  # datasets that have passed the check
        self._read: tuple[Any, NoiseKey, RecordFingerprint] | None = None  # the training examples
        self._steps: StepLoader | None = None
        self._shapes: Callable[[Any], Any] = lambda batch: batch
        self._all_have_rows = True  # False if the collator returns what all examples share (class weights)
        self._captured: Captured | None = None
        self._secrets: RunSecrets | None = None
        self._data_digest: str | None = None
        self._ledger: StepLedger | None = None
        self._released: dict[str, Tensor] = {}
        self._spent: EpsilonSpent | None = None
        self._plan = plan
        if plan is None and train_dataset is not None:
            if not hasattr(train_dataset, "__len__"):
                raise ValueError(f"train_dataset is a {type(train_dataset).__name__} without a length. Use a list.")
            users = self._user_ids()
            units = len(train_dataset) if users is None else len(UserRecords(users))
            self._plan = plan_for(self.privacy, given, examples=units, model=model)

    @property
    def plan(self) -> PrivacyPlan:
        """Everything that affects ε; `plan.statement()` is for an auditor."""
        if self.private_optimizer is not None:
            return self.private_optimizer.plan
        if self._plan is None:
            raise ValueError("train_dataset=None. Pass the training examples.")
        return self._plan

    def epsilon_so_far(self) -> float:
        """An upper bound on the ε of the steps so far; with correlated noise, that of the whole run."""
        if self._spent is None:
            self._spent = EpsilonSpent(self.plan)
        return self._spent.at(self.state.global_step)

    # -- the data --------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> StepLoader:
        """Return one item per step of the plan; Accelerate does not shard, dispatch or reorder it."""
        self._shard()  # before the model runs, because this also moves it to its device
        plan = self._plan if self._plan is not None else self.plan
        dataset, collate = self._used_columns(self.train_dataset), self.data_collator
        if dataset is self.train_dataset:  # it has no named columns
            collate = self._get_collator_with_removed_columns(collate, description="training")
        key, lengths = self._run_secrets().key, dict[int, int]()  # in tokens, of inputs and labels
        schema = RecordSchema("train_dataset", columns=getattr(collate, "signature_columns", None))

        users = self._user_ids()
        may_meet = self.args.per_device_train_batch_size > 1 or users is not None  # two records in one micro-batch

        def look(place: int, record: Any) -> None:
            if may_meet:
                schema.check(place, record)
            values = record.values() if isinstance(record, Mapping) else ()
            lengths[place] = sum(len(v) for v in values if hasattr(v, "__len__") and getattr(v, "ndim", 1) > 0)

        found = fingerprint_records(dataset, key, name="train_dataset", look=look)
        self._read, self._data_digest = (self.train_dataset, key, found), found.digest
        if users is not None:
            self._data_digest += UserRecords(users).digest(key)
        self._check_held_out(self.eval_dataset)
        by_length = sorted(lengths, key=lengths.__getitem__)
        try:
            factor_bytes = self._check_records(collate, dataset, by_length[:1] + by_length[-1:]) if may_meet else 0
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note(
                    "Out of memory before the first step, in a check on five records. Shorten the longest records, or "
                    "train only LoRA factors (peft)."
                )
            raise
        loader = private_loader(
            dataset,
            plan,
            users=users,
            key=key,
            micro_batch_size=self._micro_batch_size(factor_bytes),
            collate_fn=collate,
            check_schema=False,  # checked above, for the columns in use
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            digest=self._data_digest,
        )
        self._steps = StepLoader(loader)
        return self._steps

    def _micro_batch_size(self, factor_bytes: int) -> int:
        """Return the micro-batch size; gradient checkpointing lowers it, because gradient factors stay in memory."""
        size: int = self.args.per_device_train_batch_size
        is_checkpointed = self.args.gradient_checkpointing or getattr(self.model, "is_gradient_checkpointing", False)
        if not is_checkpointed or not factor_bytes:
            return size
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        share = self.args.world_size if uses_fsdp2(self.accelerator) else 1
        memory = max(_MIN_FACTOR_MEMORY, 2 * weights // share)
        return min(size, max(1, memory // factor_bytes))

    def _check_records(self, collate: Callable[[list[Any]], Any], dataset: Any, places: list[int]) -> int:
        """Check collator, padding and loss on the shortest, longest and other records; return their factor bytes."""
        size = min(5, max(2, self.args.per_device_train_batch_size), len(dataset))
        if size < 2:
            return 0
        records = [dataset[place] for place in list(dict.fromkeys([*places, *range(size)]))[:size]]
        check_padding(self.model, self.loss_per_example, lambda rows: self._prepare_inputs(collate(rows)), records)
        self.model.train()
        with state_restored(self.model):
            given = collate(copy.deepcopy(records))
            self._all_have_rows = has_rows(given) and has_rows(collate(copy.deepcopy(records[:1])))
            if self.args.device.type == "cuda":
                ids = given.get("input_ids") if isinstance(given, Mapping) else None
                longest = ids.shape[1] if isinstance(ids, Tensor) and ids.ndim == 2 else None
                self._shapes = BatchShapes(self.model, self.loss_per_example, longest)
            given = self._prepare_inputs(self._shapes(given))
            given = dict(given) if isinstance(given, Mapping) else given
            return check_training_loss(self.model, self._losses, given)

    def _user_ids(self) -> list[Any] | None:
        """The id of each training record's user, if users are protected."""
        column = self.privacy.user_column
        return None if column is None else read_user_ids(self.train_dataset, column)

    def _used_columns(self, dataset: Any) -> Any:
        if self.privacy.user_column in getattr(dataset, "column_names", ()) and hasattr(dataset, "remove_columns"):
            dataset = dataset.remove_columns(self.privacy.user_column)
        return self._remove_unused_columns(dataset) if hasattr(dataset, "remove_columns") else dataset

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the stock dataloader, but refuse the training examples."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        self._check_held_out(self.eval_dataset[chosen] if isinstance(chosen, str) else chosen)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the stock dataloader, but refuse the training examples."""
        self._check_held_out(test_dataset)
        return super().get_test_dataloader(test_dataset)

    def _check_held_out(self, held_out: Any) -> None:
        """Refuse evaluation on the training examples, and warn about those that are shared."""
        if isinstance(held_out, dict):
            for dataset in held_out.values():
                self._check_held_out(dataset)
            return
        if held_out is None or self.privacy.debug_loss or any(held_out is checked for checked in self._held_out):
            return
        if held_out is self.train_dataset:
            raise ValueError("eval_dataset is train_dataset, and scores on it are not private. Use other examples.")
        try:
            if self._read is None or self._read[0] is not self.train_dataset:
                key = NoiseKey.generate()
                read = fingerprint_records(self._used_columns(self.train_dataset), key)
                self._read = self.train_dataset, key, read
            _, key, training = self._read
            found = fingerprint_records(self._used_columns(held_out), key)
        except (ValueError, TypeError, RuntimeError):  # random or unsized examples cannot be compared
            self._held_out.append(held_out)
            return
        shared = found.shared_with(training)
        if shared == len(found.each) > 0 and training.mostly_distinct:
            raise ValueError(
                "all examples of eval_dataset are training examples, and scores on them are not private. Use others."
            )
        self._held_out.append(held_out)
        if shared:
            warnings.warn(
                f"{shared} of the {len(found.each)} examples of eval_dataset are training examples. The guarantee does "
                "not cover scores on them.",
                stacklevel=3,
            )

    def set_initial_training_values(
        self, args: Any, dataloader: Any
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """Return the plan's steps, in epochs of ⌈examples/batch⌉ steps for evaluation, saving and logging."""
        plan = self.plan
        each = math.ceil(plan.num_examples / plan.batch_size)
        epochs, seen = math.ceil(plan.steps / each), plan.steps * plan.batch_size
        return epochs, each, plan.num_examples, seen, plan.batch_size, each, plan.steps

    def _run_epoch(self, model: Any, epoch: float, **rest: Any) -> None:
        """Run the stock epoch from the current step: batches from before a restart are not drawn again."""
        each = rest["num_update_steps_per_epoch"]
        done = max(0, self.state.global_step - int(epoch) * each)
        if rest["epochs_trained"] == epoch:
            rest["epochs_trained"] = epoch + done / each
        rest["steps_trained_in_current_epoch"] = 0
        rest["num_update_steps_per_epoch"] = min(each - done, self.state.max_steps - self.state.global_step)
        super()._run_epoch(model=model, epoch=epoch + done / each, **rest)

    # -- the loss --------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run one backward of the summed losses per micro-batch; return 0, unless debug_loss asks for the loss."""
        assert self._steps is not None
        assert self.private_optimizer is not None
        model.train()
        seed_for_step(self.private_optimizer)
        shown, examples = torch.zeros((), device=self.args.device), 0
        with advising(self.private_optimizer, RUNNING):
            for part in inputs:
                losses = self._differentiate(model, self._shapes(part))
                if self.privacy.debug_loss:
                    shown, examples = shown + losses.sum(), examples + len(losses)
                if not self._steps.loader.step_ends:
                    self.optimizer.step()  # adds the micro-batch; the loop calls it for the last one
        seed_generators(self.args.seed)  # forget the secret seed
        return shown / max(1, examples)

    def _differentiate(self, model: nn.Module, batch: Any) -> Tensor:
        """Run the backward of a micro-batch, as a CUDA graph if possible; return its losses."""
        if not self._all_have_rows or not has_rows(batch):
            losses = self._losses(model, self._prepare_inputs(batch))
            self.accelerator.backward(losses.sum())
            return losses.detach()
        if self._captured is None:
            assert self.private_optimizer is not None
            rows = part_multiple(self.plan.batch_size)
            self._captured = self.private_optimizer.captured(partial(self._losses, model), pad_to_multiple=rows)
        return self._captured(dict(batch) if isinstance(batch, Mapping) else batch)

    def _losses(self, model: nn.Module, batch: Any) -> Tensor:
        with self.accelerator.autocast(), without_packing(batch):
            losses = self.loss_per_example(model, batch)
        if losses.ndim != 1:
            raise ValueError(
                f"loss_per_example returned a tensor of shape {tuple(losses.shape)}. Return one loss per example."
            )
        return losses

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> None:
        """Return None: dividing by the targets of the whole batch would mix examples."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: the number of tokens in a private batch is not released."""
        return 0

    # -- the optimizer ---------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the variant's optimizer, unless one was given, and attach it to the model."""
        if self.optimizer is None:
            key, decayed = self._run_secrets().key, set(self.get_decay_parameter_names(self.model))
            self.private_optimizer = optimizer_for(self.privacy, self.args, self.plan, self.model, key, decayed)
            self.optimizer = self.private_optimizer
        assert self.private_optimizer is not None
        used = None if self._steps is None else self._steps.loader.micro_batch_size
        size = used or self.args.per_device_train_batch_size
        self.private_optimizer.remedies = remedies_for(size, self.plan, self.args.world_size)
        observers = self.private_optimizer.observers
        if self.privacy.log_norms and self._note_released not in observers:
            observers.append(self._note_released)
        return self.optimizer

    def _shard(self) -> None:
        """Shard the model if Accelerate has FSDP2; the optimizer is created afterwards."""
        if uses_fsdp2(self.accelerator):
            shard_for_accelerate(self.accelerator, self.model)
            self.accelerator._models = [self.model]

    def _note_released(self, released: Released) -> None:
        """Keep the norms of the noisy gradient and of its noise for the next log."""
        assert self.private_optimizer is not None
        gradient, noise = released_norms(released, self.private_optimizer.mechanism.scale)
        self._released = {"released_gradient_norm": gradient, "expected_noise_norm": noise}

    def _clip_grad_norm(self, model: Any) -> None:
        """Do nothing: the plan clips each example."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Return None: the norm of an un-noised gradient is not private."""

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train for the steps of the plan, or resume from a checkpoint; then detach the optimizer from the model."""
        if self.private_optimizer is not None and self.private_optimizer.mechanism.step > 0:
            raise ValueError("train() has already taken this trainer's steps. Create a new PrivateTrainer.")
        ready = self.optimizer is not None
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(newest_checkpoint(self.args.output_dir))
        elif resume_from_checkpoint:
            check_readable(Path(resume_from_checkpoint))
        self._run_secrets(str(resume_from_checkpoint) if resume_from_checkpoint else None)
        if resume_from_checkpoint and uses_fsdp2(self.accelerator):
            self._load_before_sharding(str(resume_from_checkpoint))
        self._warn_of_noise()
        try:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        finally:
            if self._steps is not None:
                self._steps.pause()
            if self._ledger is not None:
                self._ledger.close()
            if self.private_optimizer is not None:
                self.private_optimizer.detach()
                if not ready and self.private_optimizer.mechanism.step == 0:  # train() may be called again
                    self.optimizer = self.private_optimizer = self._secrets = self._captured = None

    def _warn_of_noise(self) -> None:
        """Say before the first step if the noise leaves little to learn from."""
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        outlook = self.plan.outlook(parameters=trained)
        if outlook.verdict != "good" and self.is_world_process_zero():
            warnings.warn(f"outlook {outlook}", stacklevel=3)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: each trial would spend its own ε."""
        raise ValueError(
            "hyperparameter_search trains many times, and each run spends its own epsilon. Tune on public data."
        )

    # -- the log ---------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log ε so far, and drop what is not released."""
        loss = logs.get("loss")
        if loss is not None:
            self._check_finite()
        for name in _NOT_RELEASED:
            logs.pop(name, None)
        if loss is not None:
            if self.plan.delta is not None:
                logs["epsilon"] = self.epsilon_so_far()
            logs.update({name: float(norm) for name, norm in self._released.items()})
            if self.privacy.debug_loss:
                logs["not_private_loss"] = loss
        super().log(logs, start_time)

    def _check_finite(self) -> None:
        """Stop before parameters that are not finite are saved; they are released, so looking costs no privacy."""
        assert self.private_optimizer is not None
        found = not_finite(self.model)
        if self.args.world_size > 1:  # each process may hold other rows
            found = sorted(
                {name for names in self.private_optimizer.mechanism.processes.gathered(found) for name in names}
            )
        if found:
            raise ValueError(
                f"training diverged by step {self.state.global_step}: {len(found)} parameters (first: {found[0]!r}) "
                f"are not finite and are not saved. Train again with a learning_rate below {self.args.learning_rate:g} "
                "(its privacy loss adds to this one's)."
            )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._check_finite()
        super()._save_checkpoint(model, trial)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> TrainOutput:
        self._check_finite()
        output = super()._finalize_training(trial, num_train_samples, start_time)
        metrics = {name: value for name, value in output.metrics.items() if name not in _NOT_RELEASED}
        loss = output.training_loss if self.privacy.debug_loss else math.nan
        return TrainOutput(output.global_step, loss, metrics)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stock loop with the averaged weights, if any, and restore the random generators afterwards."""
        self._shard()
        with torch.random.fork_rng(), self._averaged_weights():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, with the averaged weights, if any; checkpoints have those of the last step, to resume."""
        is_checkpoint = _internal_call and output_dir is not None  # push_to_hub names no folder
        with contextlib.nullcontext() if is_checkpoint else self._averaged_weights():
            super().save_model(output_dir, _internal_call)

    def _averaged_weights(self) -> Any:
        return contextlib.nullcontext() if self.private_optimizer is None else self.private_optimizer.averaged_weights()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _run_secrets(self, checkpoint: str | None = None) -> RunSecrets:
        """The key and ledger file of the run: those of a checkpoint, or new ones."""
        if checkpoint is not None or self._secrets is None:
            self._secrets = run_secrets(self.privacy, self.args, self.private_optimizer, checkpoint)
        return self._secrets

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is None:
            self._open_ledger(step=None)
        return prepared

    def _open_ledger(self, *, step: int | None) -> None:
        """Record every step from here on before it is released, in process 0; refuse a run that may not resume."""
        optimizer = self.private_optimizer
        assert optimizer is not None
        settings = trainer_settings(self.args, self.privacy)
        optimizer.mechanism.processes.agree({"a setting": {**settings, "seed": None}})
        if self.args.process_index > 0:
            return
        header = run_header(optimizer, settings=settings, data=self._data_digest)
        self._ledger = StepLedger.open(self._run_secrets().ledger_file, header, step=step)
        optimizer.mechanism.before_step = self._ledger.before_step

    def _load_before_sharding(self, checkpoint: str) -> None:
        """Load the weights of a checkpoint into the whole model, as the stock trainer does."""
        if fsdp_modules(self.model):
            raise ValueError("the model is sharded already. To resume, create a new PrivateTrainer with a whole model.")
        with replaced(self, is_fsdp_enabled=False):
            super()._load_from_checkpoint(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not uses_fsdp2(self.accelerator):  # `_load_before_sharding` has loaded the weights of sharded models
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if uses_fsdp2(self.accelerator):  # the same files as for whole models
            state = whole_state(self.optimizer.state_dict(), to_save=True)
            if self.args.should_save:
                torch.save(state, Path(output_dir, "optimizer.pt"))
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))
        else:
            super()._save_optimizer_and_scheduler(output_dir)
        if self._steps is not None and self.args.should_save:
            state = {**self._steps.loader.state_dict(), "run": self._run_secrets().name}
            Path(output_dir, LOADER_STATE).write_text(json.dumps(state), encoding="utf-8")
        if self._steps is not None:
            self._steps.pause()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._steps is None:
            return
        if uses_fsdp2(self.accelerator):
            self.optimizer.load_state_dict(torch.load(Path(checkpoint, "optimizer.pt"), "cpu", weights_only=True))
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True))
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
        assert self.private_optimizer is not None
        self._open_ledger(step=self.private_optimizer.mechanism.step)
        self._steps.loader.load_state_dict(read_loader_state(checkpoint))


class StepLoader:
    """A private loader as the stock loop sees it: each item yields the micro-batches of one remaining step."""

    def __init__(self, loader: PrivateLoader) -> None:
        self.loader = loader
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Iterator[Any]]:
        while self.loader.next_step < self.loader.steps:
            yield self._micro_batches()

    def _micro_batches(self) -> Iterator[Any]:
        if self._batches is None:  # later steps and epochs continue where the last one stopped
            self._batches = iter(self.loader)
        for batch in self._batches:
            yield batch
            if self.loader.step_ends:
                return

    def pause(self) -> None:
        """Stop the workers and drop what they have fetched, so that a resumed run draws the same seeds for them."""
        if self._batches is not None:
            self._batches.close()  # type: ignore[attr-defined]
            self._batches = None
