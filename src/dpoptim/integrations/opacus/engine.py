"""`PrivacyEngine`, `make_private` and `make_private_with_epsilon`: arguments as in Opacus, with a plan of dpoptim."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sized
from typing import IO, Any, Literal, NamedTuple, TypedDict, Unpack, cast

import torch
import torch.utils.data
from torch import nn

from dpoptim.arguments import check_choice, check_number, check_whole
from dpoptim.data import private_loader
from dpoptim.data.processes import check_alone
from dpoptim.integrations.opacus.loader import DPDataLoader, checked_loader
from dpoptim.integrations.opacus.models import ModuleValidator, split_own_loss
from dpoptim.integrations.opacus.optimizers import DPOptimizer, check_optimizer, private_optimizer
from dpoptim.noise import NoiseKey
from dpoptim.privacy import Adjacency, Poisson, PrivacyPlan, Shuffled

_MAX_STEPS = 1_000_000  # of a run without `epochs`: its noise is independent, so ε is that of the steps taken
_PARALLEL = ("DistributedDataParallel", "DifferentiallyPrivateDistributedDataParallel", "FSDPModule")

File = str | os.PathLike[str] | IO[bytes]


class Settings(TypedDict, total=False):
    """Further keyword arguments of `make_private` and `make_private_with_epsilon`.

    Arguments of Opacus, with its defaults:
    loss_reduction: "mean" (default) or "sum": how the loop reduces the losses of a batch.
    poisson_sampling: True (default), or False for shuffled batches. Their ε is not amplified.
    criterion: Checked for a reduction that contradicts `loss_reduction`; never wrapped.
    rand_on_empty: Accepted and ignored. An empty batch has one placeholder that does not count; its step is only noise.
    grad_sample_mode: Accepted and ignored, except that "ghost" is refused.
    clipping, batch_first, wrap_model, noise_generator: Only the default is supported.

    Arguments of dpoptim:
    variant: The private optimizer. Defaults to `dp_sgd` for SGD and to `post_processing` otherwise, as in Opacus.
    variant_options: Further keyword arguments of the variant, such as {"eps_scale": 1e-4}.
    key: A NoiseKey, to resume a run.
    exact_noise: Add noise without floating-point errors, which takes more time; `secure_mode` of the engine sets it.
    """

    criterion: Any
    batch_first: bool
    loss_reduction: Literal["mean", "sum"]
    poisson_sampling: bool
    clipping: str
    noise_generator: Any
    grad_sample_mode: str
    wrap_model: bool
    rand_on_empty: bool
    variant: str | None
    variant_options: Mapping[str, Any] | None
    key: NoiseKey | None
    exact_noise: bool


_SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {  # values that are supported, and what to do about others
    "clipping": (("flat",), "One norm over all parameters is clipped. Leave clipping out."),
    "batch_first": ((True,), "Give the model inputs with the examples on the first axis."),
    "noise_generator": ((None,), "Noise comes from a secret key. Leave it out, or pass key= to resume a run."),
    "wrap_model": ((True,), "Nothing is wrapped. Leave it out, and replace hooks.cleanup() by optimizer.detach()."),
    "grad_sample_mode": (
        ("hooks", "functorch", "ew"),
        "Leave it out, unpack (model, optimizer, data_loader) and call your own criterion.",
    ),
    "loss_reduction": (("mean", "sum"), "Use 'mean' or 'sum', as the loop reduces the losses."),
}
_OWN_OPTIONS = {  # names that variant_options must not have
    "model", "plan", "lr", "rule", "param_groups", "momentum", "weight_decay", "key", "loss_reduction", "run_id",
    "external_batches",
}  # fmt: skip


def check_settings(settings: Settings) -> None:
    """Refuse unsupported settings."""
    unknown = sorted(set(settings) - Settings.__annotations__.keys())
    if unknown:
        raise ValueError(f"{unknown[0]} is not an argument. Put arguments of a variant into variant_options={{...}}.")
    for name, (values, fix) in _SUPPORTED.items():
        value = settings.get(name, values[0])
        if value not in values:
            raise ValueError(f"{name}={value!r} is not supported. {fix}")
    for name in sorted(_OWN_OPTIONS & (settings.get("variant_options") or {}).keys()):
        raise ValueError(f"variant_options has {name!r}, which make_private sets from its own arguments. Leave it out.")
    criterion, reduction = settings.get("criterion"), settings.get("loss_reduction", "mean")
    own = getattr(criterion, "reduction", reduction)
    if own != reduction:
        raise ValueError(f"criterion has reduction={own!r}, but loss_reduction={reduction!r}. Make them agree.")
    ignored = getattr(criterion, "ignore_index", -100)
    has_weights = getattr(criterion, "weight", None) is not None
    if reduction == "mean" and (has_weights or ignored != -100):
        what = "class weights" if has_weights else f"ignore_index={ignored}"
        raise ValueError(
            f"criterion has {what}, so its mean depends on other examples. Use 'sum' here and for loss_reduction."
        )


class PrivateTraining(NamedTuple):
    """What training needs: `model, optimizer, data_loader = make_private(...)`."""

    module: nn.Module
    optimizer: DPOptimizer
    data_loader: DPDataLoader

    @property
    def steps_taken(self) -> int:
        """The number of steps so far."""
        return self.optimizer.mechanism.step

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on the ε of the steps so far; 0 before the first.

        The number of steps must be fixed in advance. A run that is stopped because of its results has the ε of the
        longest run that was possible.
        """
        if self.steps_taken == 0:
            return 0.0
        return self.optimizer.plan.replace(steps=self.steps_taken).epsilon(delta=delta)

    def statement(self, delta: float | None = None) -> str:
        """Return what is guaranteed, for an auditor: for the whole run if `epochs` was given, else for the steps taken.

        Raises:
            ValueError: `epochs` was not given, and no step has been taken.
        """
        plan = self.optimizer.plan
        if self.data_loader.is_open:
            if self.steps_taken == 0:
                raise ValueError("no step has been taken, and epochs was not given. Call this after training.")
            plan = plan.replace(steps=self.steps_taken)
        return plan.statement(delta)


def make_private(
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: torch.utils.data.DataLoader[Any] | DPDataLoader,
    noise_multiplier: float,
    max_grad_norm: float,
    epochs: int | None = None,
    **settings: Unpack[Settings],
) -> PrivateTraining:
    """Prepare a module, its optimizer and its data loader for private training, with the names and units of Opacus.

    Each step releases (1/B)·(Σ_j min(1, max_grad_norm/‖g_j‖)·g_j + N(0, (noise_multiplier·max_grad_norm)²)). Here g_j
    is the gradient of ONE example's loss (a mean over the batch is undone) and B = ⌊N/len(data_loader)⌋. Every example
    is drawn independently with probability 1/len(data_loader).

    Args:
        module: The module to train. It is returned without a wrapper.
        optimizer: A new SGD, Adam, AdamW, Adagrad or RMSprop of torch. Its rule, groups and settings are copied.
        data_loader: A DataLoader over an indexed dataset. The new loader yields one epoch per iteration.
        noise_multiplier: The standard deviation of the noise on the clipped sum, over `max_grad_norm`.
        max_grad_norm: The bound on the gradient of one example.
        epochs: Refuse a longer run. None allows a million steps.
        **settings: See `Settings`.

    Returns:
        The module, the private optimizer and the private loader.

    Raises:
        ValueError: Something has no private counterpart.

    Guarantee: `PrivateTraining.epsilon(delta)` under add-remove adjacency, as `PrivateTraining.statement` explains. The
    size of the dataset becomes a declared constant. With poisson_sampling=False, batches are shuffled and full, and ε
    holds for zero-out adjacency without amplification.

    >>> data = torch.utils.data.TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
    >>> model = nn.Linear(3, 2)
    >>> model, optimizer, loader = make_private(
    ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data_loader=torch.utils.data.DataLoader(data, batch_size=8), noise_multiplier=1.0, max_grad_norm=1.0)
    >>> for inputs, labels in loader:
    ...     nn.functional.cross_entropy(model(inputs), labels).backward()
    ...     optimizer.step()
    >>> len(loader), optimizer.mechanism.step, optimizer.expected_batch_size
    (5, 5, 8)
    """
    plan = _plan(data_loader, settings, max_grad_norm, epochs, noise_multiplier)
    return _assemble(module, optimizer, data_loader, settings, plan, is_open=epochs is None)


def make_private_with_epsilon(
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: torch.utils.data.DataLoader[Any] | DPDataLoader,
    target_epsilon: float,
    target_delta: float,
    epochs: int,
    max_grad_norm: float,
    **settings: Unpack[Settings],
) -> PrivateTraining:
    """Do the same as `make_private`, with the least noise that keeps a run within (target_epsilon, target_delta).

    The other arguments are the same as in `make_private`.

    Args:
        target_epsilon: The ε of the whole run.
        target_delta: The δ of (ε, δ).
        epochs: The length of the run. A longer run is refused.

    Returns:
        The module, the private optimizer and the private loader.

    Guarantee: The final ε is at most target_epsilon, and within 1e-4 of it.
    """
    check_whole("epochs", epochs)
    plan = _plan(data_loader, settings, max_grad_norm, epochs).calibrate(epsilon=target_epsilon, delta=target_delta)
    return _assemble(module, optimizer, data_loader, settings, plan)


def _plan(
    data_loader: object,
    settings: Settings,
    max_grad_norm: float,
    epochs: int | None,
    noise_multiplier: float | None = None,
) -> PrivacyPlan:
    """The plan, with num_examples // batch_size steps per epoch."""
    check_settings(settings)
    given = checked_loader(data_loader)
    if epochs is not None:
        check_whole("epochs", epochs)
    check_number("max_grad_norm", max_grad_norm, above=0.0, infinity=True, hint="Use √(Σ norm²) for norms per layer.")
    is_poisson = settings.get("poisson_sampling", True)
    num_examples = len(cast(Sized, given.dataset))
    if is_poisson:  # As in Opacus, the rate is 1/len(data_loader): num_examples is a declared constant that gives it.
        batch_size = num_examples // len(given)
        num_examples = len(given) * batch_size
    else:
        batch_size = min(cast(int, given.batch_size), num_examples)
        warnings.warn(
            "poisson_sampling=False: epsilon is not amplified, and larger than the value for Poisson samples that "
            "Opacus prints. Adjacency is zero-out, because removing an example would shift later batches.",
            stacklevel=5,
        )
    return PrivacyPlan(
        num_examples=num_examples,
        batch_size=batch_size,
        steps=_MAX_STEPS if epochs is None else epochs * (num_examples // batch_size),
        clip_norm=float(max_grad_norm),
        sampling=Poisson() if is_poisson else Shuffled(),
        adjacency=Adjacency.ADD_REMOVE if is_poisson else Adjacency.ZERO_OUT,
        noise_multiplier=noise_multiplier,
        exact_noise=settings.get("exact_noise", False),
    )


def _assemble(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: object,
    settings: Settings,
    plan: PrivacyPlan,
    *,
    is_open: bool = False,
) -> PrivateTraining:
    check_alone("the interface of Opacus")
    for kind in type(module).__mro__:
        if kind.__name__ == "GradSampleModule":
            raise ValueError("module is a GradSampleModule of Opacus. Pass the plain module inside it, module._module.")
        if kind.__name__ in _PARALLEL:
            raise ValueError(f"module is a {kind.__name__}: private training runs in one process. Pass a plain module.")
    check_optimizer(optimizer, module)
    reduction = settings.get("loss_reduction", "mean")
    if reduction == "sum":
        warnings.warn(
            f"loss_reduction='sum': steps use the average over the expected {plan.batch_size} examples, Opacus the "
            f"sum. For the same SGD step multiply lr by {plan.batch_size}.",
            stacklevel=5,
        )
    key = settings.get("key") or NoiseKey.generate()
    given = checked_loader(data_loader)
    private_batches = private_loader(
        given.dataset,
        plan,
        key=key,
        collate_fn=given.collate_fn,
        num_workers=given.num_workers,
        pin_memory=given.pin_memory,
    )
    with split_own_loss(module, wanted=hasattr(module, "config") and reduction == "mean"):
        private = private_optimizer(module, optimizer, plan, settings, key=key, steps_are_known=not is_open)
    loader = DPDataLoader(private_batches, private, original=given, is_open=is_open)
    return PrivateTraining(module, private, loader)


class Accountant:
    """What the run of an engine has spent, under the names of Opacus's accountants."""

    def __init__(self, engine: PrivacyEngine) -> None:
        self._engine = engine

    def __len__(self) -> int:
        """The number of steps so far."""
        return 0 if self._engine.private is None else self._engine.private.steps_taken

    def get_epsilon(self, delta: float) -> float:
        """Return the ε of the steps so far."""
        return self._engine.get_epsilon(delta)


class PrivacyEngine:
    """Make one training run private, and report what it has spent.

    Args:
        accountant: "prv", "rdp" or "gdp". ε always comes from dpoptim's accountant (privacy loss distributions), which
            agrees with "prv" and is smaller than "rdp".
        secure_mode: Whether noise is added without floating-point errors, as `exact_noise` of a plan.

    Guarantee: An engine reports the ε of one run. A second `make_private` is refused, because the ε of two runs on the
    same data must be added.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        check_choice("accountant", accountant, ("prv", "rdp", "gdp"))
        self._exact_noise = secure_mode
        self.private: PrivateTraining | None = None
        self.accountant = Accountant(self)

    def make_private(self, **arguments: Any) -> PrivateTraining:
        """Call `dpoptim.integrations.opacus.make_private` and keep the result."""
        return self._begin(make_private, arguments)

    def make_private_with_epsilon(self, **arguments: Any) -> PrivateTraining:
        """Call `dpoptim.integrations.opacus.make_private_with_epsilon` and keep the result."""
        return self._begin(make_private_with_epsilon, arguments)

    def _begin(self, make: Callable[..., PrivateTraining], arguments: dict[str, Any]) -> PrivateTraining:
        if self.private is not None:
            raise ValueError(
                "this engine already has a run. Create a new PrivacyEngine, and add their epsilons if they share data."
            )
        self.private = make(**{**arguments, "exact_noise": self._exact_noise or arguments.get("exact_noise", False)})
        return self.private

    def _run(self) -> PrivateTraining:
        if self.private is None:
            raise ValueError("nothing is private yet. Call make_private first.")
        return self.private

    def get_epsilon(self, delta: float) -> float:
        """Return the ε of the steps so far; see `PrivateTraining.epsilon`."""
        return self._run().epsilon(delta)

    def statement(self, delta: float | None = None) -> str:
        """Return what is guaranteed, for an auditor; see `PrivateTraining.statement`."""
        return self._run().statement(delta)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Return a copy without layers that cannot be trained privately; see `ModuleValidator.fix`."""
        return ModuleValidator.fix_and_validate(module)

    def save_checkpoint(
        self,
        *,
        path: File,
        module: nn.Module,
        optimizer: DPOptimizer | None = None,
        checkpoint_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Save the module, the optimizer and the loader's position.

        The key is not in the checkpoint. Save it in a different place with `optimizer.key.save(path)`.
        """
        run = self._run()
        state = {**(checkpoint_dict or {}), "module_state_dict": module.state_dict()}
        state["optimizer_state_dict"] = (run.optimizer if optimizer is None else optimizer).state_dict()
        state["data_loader_state_dict"] = run.data_loader.private_loader.state_dict()
        torch.save(state, path)

    def load_checkpoint(self, *, path: File, module: nn.Module, optimizer: DPOptimizer | None = None) -> dict[str, Any]:
        """Resume a run from a checkpoint, after `make_private` with the same numbers and the run's `key`.

        Resume a checkpoint only ONCE: two continuations share their noise, so their difference reveals the data.

        Raises:
            ValueError: The module or optimizer is a different one, the run has taken steps, or the checkpoint belongs
                to a different run.
        """
        run = self._run()
        if module is not run.module or optimizer not in (None, run.optimizer):
            raise ValueError("module or optimizer is not from this engine. Pass those that make_private returned.")
        state: dict[str, Any] = torch.load(path, weights_only=True)
        run.optimizer.load_state_dict(state["optimizer_state_dict"])  # first, because it refuses a different run
        run.data_loader.private_loader.load_state_dict(state["data_loader_state_dict"])
        module.load_state_dict(state["module_state_dict"])
        return state
