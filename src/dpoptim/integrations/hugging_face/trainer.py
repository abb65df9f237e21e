"""Hugging Face's Trainer, trained privately: the stock loop with a private loader, loss, optimizer and log."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from dpoptim.clipping import Released
from dpoptim.data import fingerprint_records, private_loader
from dpoptim.data.record_schema import RecordSchema
from dpoptim.data.rng_check import check_rng
from dpoptim.data.secret_randomness import seed_for_step, seed_generators
from dpoptim.integrations.hugging_face.arguments import PrivacyArguments, optimizer_for, plan_for
from dpoptim.integrations.hugging_face.batch_check import check_batches
from dpoptim.integrations.hugging_face.checkpoints import (
    RunSecrets,
    new_secrets,
    read_loader_state,
    secrets_of,
    write_loader_state,
)
from dpoptim.integrations.hugging_face.held_out import HeldOutCheck
from dpoptim.integrations.hugging_face.refusals import (
    check_accelerator,
    check_call,
    check_overrides,
    check_transformers,
    private_args,
    size_of,
)
from dpoptim.integrations.hugging_face.step_loader import Step, StepLoader
from dpoptim.integrations.losses.batch_losses import losses_for
from dpoptim.integrations.released_norms import released_norms
from dpoptim.integrations.run_identity import run_header, trainer_settings
from dpoptim.optim import PrivateOptimizer
from dpoptim.privacy import PrivacyPlan, StepLedger
from dpoptim.privacy.composition import EpsilonSpent

LossPerExample = Callable[[nn.Module, Mapping[str, Any]], Tensor]

_NOT_RELEASED = ("loss", "grad_norm", "train_loss", "total_flos")  # of training data, in the stock Trainer's logs

check_transformers()


class PrivateTrainer(transformers.Trainer):
    """`transformers.Trainer` under a privacy plan: same arguments, and `privacy=PrivacyArguments(epsilon=, delta=)`.

        trainer = PrivateTrainer(model=model, args=args, train_dataset=ds, data_collator=collator,
                                 privacy=PrivacyArguments(epsilon=8.0, delta=1e-6))
        trainer.train()
        print(trainer.plan.statement())

    Each step releases the sum of clipped per-example gradients with the plan's noise, over the EXPECTED batch size
    per_device_train_batch_size·gradient_accumulation_steps; at most per_device_train_batch_size examples are in memory
    at once. The loss of each example is made for masked and causal language models and classifiers, from what the
    collator gives; `loss_per_example(model, batch) -> [examples]` replaces it, and must not mix examples.
    A ready `plan=` takes the place of epsilon, batch size and steps; `optimizers=(optimizer, scheduler)` with an
    optimizer of dpoptim asks for the `plan=` that it was made with.

    Guarantee: what `trainer.plan.statement()` says of model, checkpoints, logs and `TrainOutput`. The log has ε so far
    (rounded up to the next twentieth of the run), learning rate and time; loss and gradient norms of training data are
    in no log, state or result, and `TrainOutput.training_loss` is NaN. With debug_loss=True the loss is logged as
    "not_private_loss", and no guarantee covers the log.
    Every run has a new key, in OUTPUT_DIR.secret (mode 0700) beside the folder, so that it is never uploaded with it.
    A resumed run repeats released steps exactly. It refuses different examples or settings before it computes anything,
    and a step with different gradients (changed code, another device) before it makes noise. For this, and to check
    that all examples have the same keys and types, every example is read once when training begins (30 s for a million
    short tokenised texts).
    Edge cases: an object trains once; to go on, make a new one and `train(resume_from_checkpoint=True)`. Evaluation
    leaves no trace in training. What the plan cannot cover is refused at once.
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
        loss_per_example: LossPerExample | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        **stock: Any,
    ) -> None:
        given = transformers.TrainingArguments(output_dir="tmp_trainer") if args is None else args
        check_overrides(type(self), PrivateTrainer)
        self.optimizer: Any
        self.privacy = PrivacyArguments() if privacy is None else privacy
        check_call(privacy, plan, model, given, optimizers[0], stock)
        super().__init__(model, private_args(given), data_collator, train_dataset, optimizers=optimizers, **stock)
        check_accelerator(self)
        self.loss_per_example = losses_for(model, self.privacy.task) if loss_per_example is None else loss_per_example
        self.private_optimizer: PrivateOptimizer | None = optimizers[0]
        check_rng(data_collator=self.data_collator, loss_per_example=self.loss_per_example, model=model)
        self._held_out: HeldOutCheck | None = None
        self._steps: StepLoader | None = None
        self._secrets: RunSecrets | None = None
        self._data_digest: str | None = None
        self._ledger: StepLedger | None = None
        self._released: dict[str, Tensor] = {}
        self._spent: EpsilonSpent | None = None
        self._plan = plan
        if plan is None and train_dataset is not None:
            self._plan = plan_for(self.privacy, given, examples=size_of(train_dataset), model=model)

    @property
    def plan(self) -> PrivacyPlan:
        """All that ε depends on; `plan.statement()` is for an auditor."""
        if self.private_optimizer is not None:
            return self.private_optimizer.plan
        if self._plan is None:
            raise ValueError("train_dataset=None: there is nothing to plan for; pass the examples to be trained on")
        return self._plan

    def epsilon_so_far(self) -> float:
        """ε of the steps taken, an upper bound; noise that is correlated spends the whole run's at the first step."""
        if self._spent is None:
            self._spent = EpsilonSpent(self.plan)
        return self._spent.at(self.state.global_step)

    # -- the data --------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> StepLoader:
        """One item a step of the plan, for all its steps; Accelerate does not shard, dispatch or reorder it."""
        plan = self._plan if self._plan is not None else self.plan
        collate = self.data_collator
        if not _has_columns(self.train_dataset):
            collate = self._get_collator_with_removed_columns(collate, description="training")
        dataset = self._used_columns(self.train_dataset, "training")
        self._check_held_out(self.eval_dataset)
        key = self._run_secrets().key
        schema = RecordSchema("train_dataset", columns=getattr(collate, "signature_columns", None))
        alone = self.args.per_device_train_batch_size == 1  # then no two records are collated together
        look = None if alone else schema.check
        self._data_digest = fingerprint_records(dataset, key, name="train_dataset", look=look).digest
        check_batches(self, self._losses, collate, dataset)
        loader = private_loader(
            dataset,
            plan,
            key=key,
            micro_batch_size=self.args.per_device_train_batch_size,
            collate_fn=collate,
            check_schema=False,  # checked above, for the columns in use
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            digest=self._data_digest,
        )
        self._steps = StepLoader(loader)
        return self._steps

    def _used_columns(self, dataset: Any, what: str) -> Any:
        return self._remove_unused_columns(dataset, description=what) if _has_columns(dataset) else dataset

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The stock one, but not of the training examples."""
        by_name = isinstance(eval_dataset, str) and isinstance(self.eval_dataset, dict)
        given = {eval_dataset: self.eval_dataset[eval_dataset]} if by_name else eval_dataset
        self._check_held_out(self.eval_dataset if given is None else given)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The stock one, but not of the training examples."""
        self._check_held_out(test_dataset)
        return super().get_test_dataloader(test_dataset)

    def _check_held_out(self, dataset: Any) -> None:
        if self._held_out is None:
            self._set_signature_columns_if_needed()
            columns = self._signature_columns if self.args.remove_unused_columns else None
            self._held_out = HeldOutCheck(self.train_dataset, columns=columns, debugging=self.privacy.debug_loss)
        self._held_out.check(dataset)

    def set_initial_training_values(
        self, args: Any, dataloader: Any
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """The plan's steps, in epochs of ⌈examples/batch⌉ steps that evaluation, saving and logging may follow."""
        plan = self.plan
        each = math.ceil(plan.num_examples / plan.batch_size)
        epochs, seen = math.ceil(plan.steps / each), plan.steps * plan.batch_size
        return epochs, each, plan.num_examples, seen, plan.batch_size, each, plan.steps

    def _run_epoch(self, model: Any, epoch: float, **rest: Any) -> None:
        """The stock epoch, from where the run stands: batches that were drawn before a restart are not drawn again."""
        each = rest["num_update_steps_per_epoch"]
        done = max(0, self.state.global_step - int(epoch) * each)
        if rest["epochs_trained"] == epoch:
            rest["epochs_trained"] = epoch + done / each
        rest["steps_trained_in_current_epoch"] = 0
        rest["num_update_steps_per_epoch"] = min(each - done, self.state.max_steps - self.state.global_step)
        super()._run_epoch(model=model, epoch=epoch + done / each, **rest)

    # -- the loss --------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Step, num_items_in_batch: Any = None) -> Tensor:
        """One backward of the summed losses for each part of the step; the loop then calls the optimizer.

        Returns 0 in place of the loss, which is not private, unless debug_loss asks for it.
        """
        assert self._steps is not None
        assert self.private_optimizer is not None
        model.train()
        seed_for_step(self.private_optimizer)
        shown, examples = torch.zeros((), device=self.args.device), 0
        for part in inputs:
            losses = self._losses(model, self._prepare_inputs(part))
            self.accelerator.backward(losses.sum())
            if self.privacy.debug_loss:
                shown, examples = shown + losses.detach().sum(), examples + len(losses)
            if not self._steps.loader.step_ends:
                self.optimizer.step()  # sums up the part; the last one is left to the loop
        seed_generators(self.args.seed)  # forget the secret one
        return shown / max(1, examples)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """In training the sum of the per-example losses; without gradients, in evaluation, the stock loss."""
        if torch.is_grad_enabled():
            return self._losses(model, inputs).sum()
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _losses(self, model: nn.Module, batch: Any) -> Tensor:
        with self.accelerator.autocast():
            losses = self.loss_per_example(model, batch)
        if losses.ndim != 1:
            raise ValueError(
                f"loss_per_example gave a tensor of shape {tuple(losses.shape)}; it must be one loss an example, "
                "[examples], without a mean or a sum over them"
            )
        return losses

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        if batch_samples and isinstance(batch_samples[0], Step):
            return None  # a count of targets over the batch would tie its examples together
        return super()._get_num_items_in_batch(batch_samples, device)

    def floating_point_ops(self, inputs: Any) -> int:
        """0: how many tokens a private batch has is not released."""
        return 0

    # -- the optimizer ---------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> Any:
        """The variant's optimizer, unless one was given; the model's layers are watched from here on."""
        if self.optimizer is None:
            self.private_optimizer = optimizer_for(
                self.privacy,
                self.args,
                self.plan,
                self.model,
                key=self._run_secrets().key,
                decayed=set(self.get_decay_parameter_names(self.model)),
            )
            self.optimizer = self.private_optimizer
        observers = self.private_optimizer.observers if self.private_optimizer is not None else []
        if self.privacy.log_norms and self._note_released not in observers:
            observers.append(self._note_released)
        return self.optimizer

    def _note_released(self, released: Released) -> None:
        """Norms of the noisy gradient and of the noise expected in it; read when they are logged."""
        assert self.private_optimizer is not None
        gradient, noise = released_norms(released, self.private_optimizer.mechanism.scale)
        self._released = {"released_gradient_norm": gradient, "expected_noise_norm": noise}

    def _clip_grad_norm(self, model: Any) -> None:
        """Nothing: each example is clipped by the plan, and parameters carry no gradient of their own."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """None: the norm of an un-noised gradient is not private."""

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train for the plan's steps, once, or go on from a checkpoint; the model is then its own again."""
        if self.private_optimizer is not None and self.private_optimizer.mechanism.step > 0:
            raise ValueError(
                "train() was called before, and its steps are spent; make a new PrivateTrainer: to go on from a "
                "checkpoint with train(resume_from_checkpoint=True), or for another run with a guarantee of its own"
            )
        ready = self.optimizer is not None
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or self.args.output_dir
        self._run_secrets(str(resume_from_checkpoint) if resume_from_checkpoint else None)
        try:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        finally:
            if self._steps is not None:
                self._steps.pause()
            if self._ledger is not None:
                self._ledger.close()
            if self.private_optimizer is not None:
                self.private_optimizer.detach()
                if not ready and self.private_optimizer.mechanism.step == 0:  # nothing is spent: it may be tried again
                    self.optimizer = self.private_optimizer = self._secrets = None

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "hyperparameter_search trains many times on the same private data, and each run spends its own epsilon; "
            "tune on public data, or account for all runs together"
        )

    # -- the log ---------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The stock log without what is not released, and with ε so far."""
        loss = logs.get("loss")
        for name in _NOT_RELEASED:
            logs.pop(name, None)
        if loss is not None:
            if self.plan.delta is not None:
                logs["epsilon"] = self.epsilon_so_far()
            logs.update({name: float(norm) for name, norm in self._released.items()})
            if self.privacy.debug_loss:
                logs["not_private_loss"] = loss
        super().log(logs, start_time)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> TrainOutput:
        output = super()._finalize_training(trial, num_train_samples, start_time)
        metrics = {name: value for name, value in output.metrics.items() if name not in _NOT_RELEASED}
        loss = output.training_loss if self.privacy.debug_loss else math.nan
        return TrainOutput(output.global_step, loss, metrics)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The stock loop; the random numbers that it draws are put back, so that it leaves no trace in training."""
        with torch.random.fork_rng():
            return super().evaluation_loop(*args, **kwargs)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _run_secrets(self, checkpoint: str | None = None) -> RunSecrets:
        """The key and ledger file of the run: those of a checkpoint, or new ones."""
        if checkpoint is not None:
            self._secrets = secrets_of(checkpoint, self.privacy, self.args, self.private_optimizer)
        elif self._secrets is None:
            self._secrets = new_secrets(self.privacy, self.args, self.private_optimizer)
        return self._secrets

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is None:
            self._open_ledger(step=None)
        return prepared

    def _open_ledger(self, *, step: int | None) -> None:
        """Record every step from here on before it is released; refuse a run that may not resume."""
        optimizer = self.private_optimizer
        assert optimizer is not None
        settings = trainer_settings(self.args, self.privacy)
        header = run_header(optimizer, settings=settings, data=self._data_digest)
        self._ledger = StepLedger.open(self._run_secrets().ledger_file, header, step=step)
        optimizer.mechanism.before_step = self._ledger.before_step

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._steps is not None:
            write_loader_state(output_dir, {**self._steps.loader.state_dict(), "run": self._run_secrets().name})
            self._steps.pause()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._steps is None:
            return
        super()._load_optimizer_and_scheduler(checkpoint)
        assert self.private_optimizer is not None
        self._open_ledger(step=self.private_optimizer.mechanism.step)
        self._steps.loader.load_state_dict(read_loader_state(checkpoint))


def _has_columns(dataset: Any) -> bool:
    """Whether it is a datasets.Dataset."""
    return hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns")
