"""`PrivacyEngine`: the object of Opacus's tutorials, which remembers the run that it made private."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import IO, Any

import torch
from torch import nn

from dpoptim.integrations.opacus.modules import ModuleValidator
from dpoptim.integrations.opacus.optimizers import DPOptimizer
from dpoptim.integrations.opacus.private import Private, make_private, make_private_with_epsilon

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

    Guarantee: an engine stands for one run, and a second `make_private` is refused: two runs' ε must be added, and an
    engine tells that of one.
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

    def make_private(self, **arguments: Any) -> Private:
        """The arguments of `dpoptim.integrations.opacus.make_private`."""
        self._check_fresh()
        self.private = make_private(**arguments)
        return self.private

    def make_private_with_epsilon(self, **arguments: Any) -> Private:
        """The arguments of `dpoptim.integrations.opacus.make_private_with_epsilon`."""
        self._check_fresh()
        self.private = make_private_with_epsilon(**arguments)
        return self.private

    def _check_fresh(self) -> None:
        if self.private is not None:
            raise ValueError(
                "this engine has made a run private already, and tells the epsilon of one run; make a new "
                "PrivacyEngine for another, and add the two where both saw the same data"
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
        state["data_loader_state_dict"] = run.data_loader.private_loader.state_dict()
        torch.save(state, path)

    def load_checkpoint(
        self,
        *,
        path: str | os.PathLike[str] | IO[bytes],
        module: nn.Module,
        optimizer: DPOptimizer | None = None,
    ) -> dict[str, Any]:
        """Continue the run of a checkpoint, after a `make_private` with the run's own numbers and `key`.

        Refused once this engine's run has taken steps: they would be forgotten. Continue a checkpoint ONCE: two
        continuations share their noise, so that what both release differs by the data alone, and no ε covers the pair.
        """
        run = self._run()
        if module is not run.module or optimizer not in (None, run.optimizer):
            raise ValueError("module and optimizer must be those of make_private, which the checkpoint is to go into")
        state: dict[str, Any] = torch.load(path, weights_only=True)
        run.optimizer.load_state_dict(state["optimizer_state_dict"])  # first, since it refuses what does not fit
        run.data_loader.private_loader.load_state_dict(state["data_loader_state_dict"])
        module.load_state_dict(state["module_state_dict"])
        return state
