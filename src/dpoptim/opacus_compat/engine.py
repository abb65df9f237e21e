"""`PrivacyEngine`: the object of Opacus's tutorials, which remembers the run that it made private."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import IO, Any, Unpack

import torch
import torch.utils.data
from torch import nn

from dpoptim.opacus_compat.loader import DPDataLoader
from dpoptim.opacus_compat.modules import ModuleValidator
from dpoptim.opacus_compat.optimizers import DPOptimizer
from dpoptim.opacus_compat.private import Private, make_private, make_private_with_epsilon
from dpoptim.opacus_compat.settings import Settings

_ACCOUNTANTS = ("prv", "rdp", "gdp")


class Accountant:
    """What an engine's run has spent, under the names of Opacus's accountants."""

    def __init__(self, engine: PrivacyEngine, name: str) -> None:
        self._engine, self._name = engine, name

    def __len__(self) -> int:
        """How many steps have been taken."""
        return 0 if self._engine.private is None else self._engine.private.steps_taken

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """[(noise multiplier, sampling rate, steps)], as Opacus keeps it."""
        private = self._engine.private
        if private is None or len(self) == 0:
            return []
        return [(private.optimizer.noise_multiplier, private.data_loader.sample_rate, len(self))]

    def get_epsilon(self, delta: float) -> float:
        """ε of the steps taken so far."""
        return self._engine.get_epsilon(delta)

    def mechanism(self) -> str:
        """The name that the engine was made with; ε does not depend on it."""
        return self._name


class PrivacyEngine:
    """Makes one training private and tells what it has spent.

    `accountant` may be any of Opacus's names: ε always comes from dpoptim's accountant (privacy loss distributions),
    which agrees with "prv" and lies below "rdp".

    Guarantee: an engine stands for one run. A second `make_private` after steps have been taken is refused, since
    their ε must be added.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        if accountant not in _ACCOUNTANTS:
            raise ValueError(f"accountant={accountant!r} must be one of {', '.join(_ACCOUNTANTS)}")
        if secure_mode:
            raise ValueError(
                "secure_mode=True is half there: noise and batches always come of a cryptographic key, but noise is "
                "not hardened against floating-point attacks; leave secure_mode out to go on with that"
            )
        self.secure_mode = False
        self.private: Private | None = None
        self.accountant = Accountant(self, accountant)

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: torch.utils.data.DataLoader[Any] | DPDataLoader,
        noise_multiplier: float,
        max_grad_norm: float,
        epochs: int | None = None,
        **settings: Unpack[Settings],
    ) -> Private:
        """See `dpoptim.opacus_compat.make_private`."""
        self._check_fresh()
        self.private = make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            epochs=epochs,
            **settings,
        )
        return self.private

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: torch.utils.data.DataLoader[Any] | DPDataLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float,
        **settings: Unpack[Settings],
    ) -> Private:
        """See `dpoptim.opacus_compat.make_private_with_epsilon`."""
        self._check_fresh()
        self.private = make_private_with_epsilon(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            epochs=epochs,
            max_grad_norm=max_grad_norm,
            **settings,
        )
        return self.private

    def _check_fresh(self) -> None:
        if len(self.accountant) > 0:
            raise ValueError(
                f"this engine's run has taken {len(self.accountant)} steps, whose epsilon must be added to any "
                "other's; make a new PrivacyEngine for a new run"
            )

    def _run(self) -> Private:
        if self.private is None:
            raise ValueError("nothing has been made private yet; call make_private first")
        return self.private

    def get_epsilon(self, delta: float) -> float:
        """ε of the steps taken so far; see `Private.epsilon`."""
        return self._run().epsilon(delta)

    def statement(self, delta: float | None = None) -> str:
        """What is guaranteed, for an auditor; see `Private.statement`."""
        return self._run().statement(delta)

    def is_compatible(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> bool:
        return ModuleValidator.is_valid(module)

    def validate(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> None:
        ModuleValidator.validate(module, strict=True)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        return ModuleValidator.fix_and_validate(module)

    def save_checkpoint(
        self,
        *,
        path: str | os.PathLike[str] | IO[bytes],
        module: nn.Module,
        optimizer: DPOptimizer | None = None,
        checkpoint_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Module, optimizer and the loader's place, without the key: keep that apart, `optimizer.key.save(path)`."""
        run = self._run()
        state = {**(checkpoint_dict or {}), "module_state_dict": module.state_dict()}
        state["optimizer_state_dict"] = (run.optimizer if optimizer is None else optimizer).state_dict()
        state["data_loader_state_dict"] = run.data_loader.run.state_dict()
        torch.save(state, path)

    def load_checkpoint(
        self,
        *,
        path: str | os.PathLike[str] | IO[bytes],
        module: nn.Module,
        optimizer: DPOptimizer | None = None,
    ) -> dict[str, Any]:
        """Continue the run of a checkpoint, after a `make_private` with the run's own numbers and `key`."""
        run = self._run()
        state: dict[str, Any] = torch.load(path, weights_only=True)
        module.load_state_dict(state["module_state_dict"])
        (run.optimizer if optimizer is None else optimizer).load_state_dict(state["optimizer_state_dict"])
        run.data_loader.run.load_state_dict(state["data_loader_state_dict"])
        return state
