"""The one optimizer: a `torch.optim.Optimizer` whose slots (geometry, second moment, rule) see only noisy values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from dpoptim.arguments import check_number
from dpoptim.clipping import Captured, PrivateMechanism, Released
from dpoptim.data.shards import like_parameter, own_part, reshard
from dpoptim.kernels import choose
from dpoptim.kernels.flat import group_parameters
from dpoptim.kernels.inverse_root import ComputedScale
from dpoptim.noise import NoiseKey, NoiseMemory
from dpoptim.optim import fused
from dpoptim.optim.bundle import SCALARS, ParameterBundle
from dpoptim.optim.geometries import Flat, Geometry
from dpoptim.optim.out_of_memory import CLIPPING, UPDATING, Remedies, advising
from dpoptim.optim.rules import UpdateRule
from dpoptim.optim.second_moments import SecondMoment
from dpoptim.privacy import Gradient, PrivacyPlan, Release
from dpoptim.validation.temporary_changes import update_spectral_norms

MAX_STORED_SCALE = 1 << 29  # parameters; on a GPU, larger models compute their scale when it is read


class PrivateOptimizer(torch.optim.Optimizer):
    """Train a model under a privacy plan: call `loss_per_example.sum().backward()`, then `step()`.

    The named variants (`dpoptim.scale_then_privatize` and so on) create it. Every `step()` that closes a batch makes
    one release, even if the batch is empty. `p.grad` is never set or read.

    `state_dict()` contains neither the noise key nor the noise. To resume a run, save the key in its own file
    (`NoiseKey.save`) and pass it as `key=`; the noise of every step is recomputed from it.

    Guarantee:
        Nothing in this class sees a gradient without noise. Clipping and noise are in `dpoptim.clipping`.

    Args:
        model: The model to train.
        plan: A calibrated plan.
        lr: The learning rate.
        rule: The update rule.
        second_moment: What the update divides by.
        release: What each step releases.
        geometry: The scale of gradients before clipping.
        param_groups: Dicts as for `torch.optim`; None puts all trainable parameters into one group.
        loss_reduction: "sum" or "mean": how the loop reduces the losses before backward.
        key: The noise key of a run to resume; None creates one.
        run_id: Public name of the run; None creates one. `load_state_dict` restores it. Pass it only to recompute the
            same noise.
        external_batches: True if the caller draws batches as the plan says, without a `private_loader`.
        noise_memory: How correlated noise stores its past, for example NoiseMemory(bits=16, on_host=True).
        clipping_memory: Extra bytes that a physical batch may use to clip faster; see `explain()`.
        averaged: The decay of a moving average of the weights, such as 0.99; see `averaged_weights()`. 1 averages all.
        allow_mixing: A reason to train even though examples mix in the model. The guarantee does not cover that, and
            `plan.statement()` prints the reason.

    Attributes:
        observers: Functions called in every step with what was released, before the parameters change. They must
            not modify it. At that point `mechanism.scale` is still the scale of the step.
        remedies: What an out-of-memory error in `step()` recommends.

    Raises:
        ValueError: If an argument has the wrong type or is out of range, or if a trainable parameter is in no group.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: PrivacyPlan,
        *,
        lr: float,
        rule: UpdateRule,
        second_moment: SecondMoment,
        release: Release = Gradient(),  # noqa: B008
        geometry: Geometry = Flat(),  # noqa: B008
        param_groups: Iterable[dict[str, Any]] | None = None,
        loss_reduction: str = "sum",
        key: NoiseKey | None = None,
        run_id: str | None = None,
        external_batches: bool = False,
        noise_memory: NoiseMemory = NoiseMemory(),  # noqa: B008
        clipping_memory: int = 1 << 26,
        averaged: float | None = None,
        allow_mixing: str | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"model must be an nn.Module, got {type(model).__name__}. Pass the model, not model.parameters()."
            )
        check_plan(plan)
        given: Any = lr
        if not isinstance(given, (Real, Tensor)) or not float(given) >= 0:
            raise ValueError(f"lr={lr!r} must be a number of 0 or more")
        if loss_reduction not in ("sum", "mean"):
            raise ValueError(
                f"loss_reduction={loss_reduction!r} must be 'sum' (losses.sum().backward()) or 'mean' "
                "(losses.mean().backward())"
            )
        if averaged is not None:
            check_number("averaged", averaged, above=0, high=1)
        self._model, self.averaged = model, averaged
        self._has_parametrizations = any(map(is_parametrized, model.modules()))
        reshard(model)
        names = {p: name for name, p in model.named_parameters()}
        groups = _checked_groups(names, param_groups)
        super().__init__(groups, {"lr": lr, **rule.defaults()})
        self.mechanism = PrivateMechanism(
            model,
            plan,
            release,
            key=key,
            run_id=run_id,
            mean_loss=loss_reduction == "mean",
            external_batches=external_batches,
            noise_memory=noise_memory,
            clipping_memory=clipping_memory,
            allow_mixing=allow_mixing,
        )
        if external_batches and self.mechanism.processes.count > 1:
            raise ValueError("external_batches=True runs in one process for now. Use private_loader")
        self.rule, self.geometry, self.second_moment = rule, geometry, second_moment
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]
        variant = [_settings_of(part) for part in (rule, geometry, second_moment)] + [{"averaged": averaged}]
        self.mechanism.processes.agree({"the variant": variant, "lr or another setting": groups})
        self.observers: list[Callable[[Released], None]] = []
        self.remedies = Remedies()
        self.clipping_memory, self.parameter_bytes = clipping_memory, sum(p.nbytes for p in model.parameters())
        self._names = {p: name for p, name in names.items() if p.requires_grad}
        self._numel = sum(parameter.numel() for parameter in self._names)
        self._members = self._bundle_members()
        for bundle in self._bundles():
            geometry.begin(bundle)
        self._set_scale()

    @property
    def plan(self) -> PrivacyPlan:
        """The plan, with what this optimizer releases."""
        return self.mechanism.plan

    @property
    def key(self) -> NoiseKey:
        """The secret key of the noise. Save it with `key.save(path)` to be able to resume this run."""
        return self.mechanism.key

    def explain(self) -> str:
        """Describe how the last physical batch was clipped: the method and the memory of each parameter."""
        return str(self.mechanism.explain())

    def captured(self, losses: Callable[..., Tensor], *, pad_to_multiple: int | None = None) -> Captured:
        """Capture the losses and their backward as CUDA graphs, so that small batches do not wait for the host.

        Args:
            losses: Returns one loss per example, from tensors with the examples on their first axis. This code
                and the model run as Python only when a shape is new. So whatever else they read must keep its place in
                memory, and they must not branch on values.
            pad_to_multiple: Batches are padded to a multiple of this many rows, to keep the number of shapes small.
                Padding does not count. None pads by at most an eighth.

        Returns:
            A function of a batch that replaces `losses(*batch).sum().backward()` and returns the losses. On a GPU it
            runs one CUDA graph per shape, on a CPU the functions themselves.

        >>> import dpoptim
        >>> model = nn.Linear(3, 1)
        >>> plan = dpoptim.PrivacyPlan(num_examples=8, batch_size=4, steps=2, noise_multiplier=1.0)
        >>> optimizer = dpoptim.dp_sgd(model, plan, lr=0.1)
        >>> differentiate = optimizer.captured(lambda x, y: (model(x)[:, 0] - y) ** 2)
        >>> for x, y in dpoptim.private_loader([(torch.ones(3), 1.0)] * 8, plan):
        ...     shape = differentiate(x, y).shape
        ...     optimizer.step()
        >>> shape
        torch.Size([4])
        """
        return Captured(self.mechanism, losses, pad_to_multiple=pad_to_multiple)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Close the batch: release it with noise, then update the parameters. Return what `closure` returns.

        If memory runs out, the batch is dropped, and a note on the error recommends what to change.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with advising(self, CLIPPING):
            if not self.mechanism.close_physical_batch():
                return loss
        with advising(self, UPDATING):
            self._release_and_update()
        return loss

    def _release_and_update(self) -> None:
        if self.mechanism.shards is not None:
            reshard(self._model)  # otherwise FSDP would keep using whole parameters from before the update
        released = self.mechanism.privatize()
        for observer in self.observers:
            observer(released)
        for bundle in self._bundles():
            if fused.adam_step_(bundle, self.rule, self.second_moment, released.gradient):
                continue
            lr, decay = bundle.group["lr"], bundle.group["weight_decay"]
            gradient = bundle.flat(released.gradient)
            if decay and not self.rule.decoupled:
                gradient = gradient.add(bundle.values(), alpha=decay)
            denominator = self.second_moment.denominator(bundle, self.rule, gradient, released)
            direction = self.rule.direction(gradient, denominator, bundle)
            bundle.move_(direction, kept=1 - lr * decay if self.rule.decoupled else 1.0, lr=lr)
        for bundle in self._bundles():
            self.geometry.observe(bundle, released.gradient)
            if self.averaged is not None:
                bundle.average_(self.averaged)
        self._set_scale()
        if self._has_parametrizations:
            update_spectral_norms(self._model)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Put the averaged weights into the model until the block ends, to evaluate or save it. Do not train in it.

        Without `averaged`, or before the first step, the model does not change. `state_dict()` holds the average too.
        """
        if self.averaged is None or self.mechanism.step == 0:
            yield
            return
        bundles = list(self._bundles())
        kept = [[parameter.detach().clone() for parameter in bundle.parameters] for bundle in bundles]
        try:
            self._set_weights([bundle.split(bundle.get("average")) for bundle in bundles])
            yield
        finally:
            self._set_weights(kept)

    @torch.no_grad()
    def _set_weights(self, values: list[list[Tensor]]) -> None:
        if self.mechanism.shards is not None:
            reshard(self._model)
        for bundle, own in zip(self._bundles(), values, strict=True):
            for parameter, value in zip(bundle.parameters, own, strict=True):
                parameter.copy_(value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse further groups: the guarantee covers a fixed set of parameters."""
        if hasattr(self, "mechanism"):
            raise ValueError("param_group cannot be added to a private optimizer. Create a new one with all groups.")
        super().add_param_group(param_group)

    def detach(self) -> None:
        """Restore the model's own forward. The optimizer cannot be used afterwards."""
        self.mechanism.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return moments, settings, the plan and the number of steps taken, as plain values without secrets."""
        state = super().state_dict()
        state["privacy"] = {
            **self.mechanism.state(),
            "plan": self.plan.to_dict(),
            "variant": self._variant(),
            "key_fingerprint": self.key.fingerprint(),
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume a run from what `state_dict()` returned; plan, key and variant must be those of the run."""
        privacy = state_dict.get("privacy")
        if privacy is None:
            raise ValueError("state_dict has no 'privacy' entry: it is not the state of a private optimizer")
        if PrivacyPlan.from_dict(saved := privacy["plan"]) != self.plan:
            now = self.plan.to_dict()  # without settings at their defaults
            changed = [name for name in now | saved if saved.get(name) != now.get(name)]
            other = [f"{name} was {saved.get(name)}, not {now.get(name)}" for name in changed]
            raise ValueError(
                f"state_dict belongs to a different privacy plan: {'; '.join(other)}. Create the optimizer with the "
                "plan of the run."
            )
        if privacy["key_fingerprint"] != self.key.fingerprint():
            raise ValueError(
                "state_dict was made with a different noise key. Load the run's key with NoiseKey.load(path) and pass "
                "it as key=."
            )
        if privacy["variant"] != self._variant():
            raise ValueError(
                f"state_dict belongs to {' with '.join(privacy['variant'])} and this optimizer is "
                f"{' with '.join(self._variant())}. Create the optimizer with the same call as in the run."
            )
        self.mechanism.resume(privacy)
        # torch would cast the state to the parameter's dtype, but moments of bf16 parameters must stay fp32.
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._gather_state(state_dict)
        self._set_scale()

    def _variant(self) -> list[str]:
        average = [] if self.averaged is None else ["averaged weights"]
        return [type(part).__name__ for part in (self.rule, self.geometry, self.second_moment)] + average

    def _bundle_members(self) -> list[tuple[int, list[nn.Parameter], dict[str, Tensor], dict[str, Tensor]]]:
        """The index of each bundle's group, its trained parameters, and its state, which is empty at first."""
        vectors = group_parameters({name: own_part(parameter) for parameter, name in self._names.items()})
        vector_of = {name: place for place, names in enumerate(vectors) for name in names}
        found: dict[tuple[int, int], list[nn.Parameter]] = {}
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter in self._names:
                    found.setdefault((index, vector_of[self._names[parameter]]), []).append(parameter)
        return [(index, parameters, {}, {}) for (index, _), parameters in found.items()]

    def _bundles(self) -> Iterator[ParameterBundle]:
        """Yield each bundle, then create the per-parameter views of its new state."""
        for index, parameters, state, transient in self._members:
            names, group = [self._names[parameter] for parameter in parameters], self.param_groups[index]
            parts = [own_part(parameter) for parameter in parameters]
            mechanism = self.mechanism
            bundle = ParameterBundle(names, parts, state, transient, group, mechanism.step, mechanism.clip_factor)
            yield bundle
            for key, vector in state.items():
                if key in self.state[parameters[0]]:
                    continue
                views = [vector] * len(parameters) if key in SCALARS else bundle.split(vector)
                for parameter, view in zip(parameters, views, strict=True):
                    self.state[parameter][key] = view if key in SCALARS else like_parameter(view, parameter)

    def _gather_state(self, state_dict: dict[str, Any]) -> None:
        """Rebuild the bundles' vectors from what was saved for each parameter."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        saved = {p: state_dict["state"].get(index, {}) for p, index in zip(parameters, indices, strict=True)}
        for bundle, (_, members, _, _) in zip(self._bundles(), self._members, strict=True):
            loaded = [saved[parameter] for parameter in members]
            bundle.state.clear()
            bundle.transient.clear()
            for key in dict.fromkeys(key for state in loaded for key in state):
                if key == "rounding":
                    found = {state[key].dtype if key in state else None for state in loaded}
                    if not bundle.rounds or found != {bundle.state_dtype(key)}:
                        continue  # saved by a run in a different precision
                if key in SCALARS:
                    bundle.state[key] = loaded[0][key].clone()
                else:
                    like: dict[str, Any] = {"dtype": bundle.state_dtype(key), "device": bundle.parameters[0].device}
                    parts = [own_part(state[key], like=p) for state, p in zip(loaded, members, strict=True)]
                    bundle.state[key] = torch.cat([part.reshape(-1).to(**like) for part in parts])

    def _computes_scale(self) -> bool:
        """Whether to compute the scale at every read: that takes time on the host, but no memory."""
        is_whole = self.mechanism.shards is None
        return is_whole and self._numel > MAX_STORED_SCALE and choose.on_gpu(*self._names)

    @torch.no_grad()
    def _set_scale(self) -> None:
        if self._computes_scale():
            lazy = [
                (whole, dict(zip(bundle.names, bundle.split(whole.moment), strict=True)))
                for bundle in self._bundles()
                if (whole := self.geometry.lazy_scale(bundle, self.rule)) is not None
            ]
            if lazy:
                self.mechanism.scale = ComputedScale(lazy)
                return
        scale: dict[str, Tensor] = {}
        for bundle in self._bundles():
            vector = self.geometry.scale(bundle, self.rule)
            if vector is not None:
                scale.update(zip(bundle.names, bundle.split(vector), strict=True))
        self.mechanism.scale = scale or None


def _checked_groups(names: dict[nn.Parameter, str], groups: Iterable[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if groups is None:
        return [{"params": [p for p in names if p.requires_grad]}]
    groups = [{**group, "params": list(group["params"])} for group in groups]
    given = [p for group in groups for p in group["params"]]
    for parameter in given:
        if parameter not in names:
            raise ValueError(f"param_groups has a parameter of shape {tuple(parameter.shape)} that is not the model's.")
    missing = [name for p, name in names.items() if p.requires_grad and p not in set(given)]
    if missing:
        raise ValueError(
            f"param_groups lacks the trainable parameter '{missing[0]}'. Add it, or freeze it with "
            "requires_grad_(False)."
        )
    return groups


def _settings_of(part: object) -> dict[str, object]:
    """The class of a part and its numbers, to compare them between processes."""
    numbers = {name: value for name, value in vars(part).items() if isinstance(value, int | float | str | None)}
    return {"class": type(part).__name__, **numbers}


def check_plan(plan: object) -> None:
    """Refuse anything but a plan, which usually means that arguments are in the wrong order."""
    if not isinstance(plan, PrivacyPlan):
        raise ValueError(f"plan must be a PrivacyPlan, got {type(plan).__name__}. The order is (model, plan, lr).")
