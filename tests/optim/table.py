"""One table of variants: how to create each on the fast path, and how to run its reference implementation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import dpoptim
from dpoptim.optim import PrivateOptimizer, reference

LR = 0.02
EPS_SCALE = 1.0
# The stability constants are large (eps = .1) so that runs are well-conditioned. At eps = 1e-3 bias correction, IME and
# JME divide by numbers near 0. There a reference run that starts one ulp away diverges from itself by more than the
# tolerance, so a comparison over a hundred steps could not distinguish a bug from rounding.

RULES: dict[str, tuple[Any, Any]] = {
    "adam": (dpoptim.Adam(eps=0.1), reference.Adam(lr=LR, eps=0.1)),
    "adam with decay": (
        dpoptim.Adam(eps=0.1, weight_decay=0.1),
        reference.Adam(lr=LR, eps=0.1, weight_decay=0.1),
    ),
    "adamw": (dpoptim.AdamW(eps=0.1, weight_decay=0.1), reference.AdamW(lr=LR, eps=0.1, weight_decay=0.1)),
    "adagrad": (dpoptim.AdaGrad(eps=0.1), reference.AdaGrad(lr=LR, eps=0.1)),
    "rmsprop": (dpoptim.RMSProp(eps=0.1), reference.RMSProp(lr=LR, eps=0.1)),
    "rmsprop with momentum": (
        dpoptim.RMSProp(eps=0.1, momentum=0.8),
        reference.RMSProp(lr=LR, eps=0.1, momentum=0.8),
    ),
}


@dataclass(frozen=True)
class Task:
    """A small regression with batches that are fixed in advance; some are empty."""

    model: nn.Sequential
    inputs: Tensor  # [pool, 3]
    targets: Tensor  # [pool, 2]
    batches: list[Tensor]  # indices into the pool
    public: Tensor

    def losses(self, model: nn.Module, batch: Tensor) -> Tensor:
        return (model(self.inputs[batch]) - self.targets[batch]).square().sum(1)

    def theta(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def gradients(self, theta: Tensor, indices: Tensor) -> Tensor:
        """[examples, coordinates], one gradient per example."""

        def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return (functional_call(self.model, parameters, (x[None],))[0] - y).square().sum()

        if len(indices) == 0:
            return theta.new_zeros(0, len(theta))
        named, start = {}, 0
        for name, p in self.model.named_parameters():
            named[name] = theta[start : start + p.numel()].view_as(p)
            start += p.numel()
        found = vmap(grad(loss), in_dims=(None, 0, 0))(named, self.inputs[indices], self.targets[indices])
        return torch.cat([found[name].flatten(1) for name in named], dim=1)

    def public_gradient(self, theta: Tensor) -> Tensor:
        return self.gradients(theta, self.public).mean(0)


def task(plan: dpoptim.PrivacyPlan, dtype: torch.dtype) -> Task:
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    inputs = torch.randn(plan.num_examples, 3, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randn(plan.num_examples, 2, generator=generator, dtype=torch.float64).to(dtype)
    key = dpoptim.NoiseKey.from_bytes(bytes(range(32)))
    batches = [
        torch.from_numpy(
            plan.sampling.indices(key, t, num_examples=plan.num_examples, batch_size=plan.batch_size).copy()
        )
        for t in range(plan.steps)
    ]
    return Task(model, inputs, targets, batches, torch.arange(6))


@dataclass(frozen=True)
class Variant:
    make: Callable[..., PrivateOptimizer]  # (model, plan, rule, task, **common)
    reference: Callable[..., Tensor]  # (task, noise, square_noise, rule, plan of the optimizer)
    takes_rule: bool = True


def _run(t: Task, noise: Tensor, plan: dpoptim.PrivacyPlan) -> reference.Run:
    return reference.Run(
        t.theta(),
        lambda theta, step: t.gradients(theta, t.batches[step]),
        noise,
        clip_norm=plan.clip_norm,
        noise_stddev=plan.noise_stddevs().gradient_sum,
        batch_size=plan.batch_size,
    )


def _public(t: Task) -> Callable[[], dict[str, Tensor]]:
    return dpoptim.PublicGradients(t.model, t.losses, [t.public])


def _post_processing(t, noise, square_noise, rule, plan):
    return reference.post_processing(_run(t, noise, plan), rule=rule)


def _bias_correction(t, noise, square_noise, rule, plan):
    norms = torch.as_tensor(plan.strategy.row_norms()) ** 2 * plan.strategy.column_norm**2
    return reference.bias_correction(_run(t, noise, plan), rule=rule, row_norms_squared=norms)


def _independent(average_of_squares):
    def run(t, noise, square_noise, rule, plan):
        return reference.independent_moments(
            _run(t, noise, plan),
            square_noise,
            rule=rule,
            square_noise_stddev=plan.noise_stddevs().square,
            average_of_squares=average_of_squares,
            project=True,
        )

    return run


def _joint(t, noise, square_noise, rule, plan):
    weight = 0.5 / plan.clip_norm**2
    return reference.joint_moments(_run(t, noise, plan), square_noise, rule=rule, square_weight=weight)


def _scale(normalised: bool = True, **options: Any):
    def run(t, noise, square_noise, rule, plan):
        return reference.scale_then_privatize(
            _run(t, noise, plan), rule=rule, eps_scale=EPS_SCALE, normalised=normalised, **options
        )

    return run


def _side(t, noise, square_noise, rule, plan):
    public = lambda theta, step: t.public_gradient(theta)  # noqa: E731
    return reference.side_information(_run(t, noise, plan), public, rule=rule)


def _noiseless(t, noise, square_noise, rule, plan):
    return reference.post_processing(_run(t, noise, plan), rule=rule, noiseless=True)


def _noiseless_scaled(t, noise, square_noise, rule, plan):
    return reference.scale_then_privatize(
        _run(t, noise, plan), rule=rule, eps_scale=EPS_SCALE, normalised=True, noiseless=True
    )


def _make_noiseless(scaled):
    def make(model, plan, rule, t, **common):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return dpoptim.noiseless_preconditioner(
                model, plan.with_release(dpoptim.NoiselessSquare()), LR, rule=rule,
                scaled=scaled, eps_scale=EPS_SCALE, **common,
            )  # fmt: skip

    return make


def _make_scale(**options):
    return lambda model, plan, rule, t, **common: dpoptim.scale_then_privatize(
        model, plan, LR, rule=rule, eps_scale=EPS_SCALE, **options, **common
    )


def _delayed(decay):
    def run(t, noise, square_noise, rule, plan):
        return reference.delayed_preconditioner(
            _run(t, noise, plan),
            lr=LR,
            scaled_clip_norm=0.8,
            scaled_noise_stddev=0.8 * plan.noise_multiplier,
            plain_steps=7,
            scaled_steps=4,
            eps=0.1,
            decay=decay,
        )

    return run


def _make_delayed(decay):
    return lambda model, plan, rule, t, **common: dpoptim.delayed_preconditioner(
        model, plan, LR, plain_steps=7, scaled_steps=4, decay=decay, eps=0.1, scaled_clip_norm=0.8, **common
    )


def _adadps(t, noise, square_noise, rule, plan):
    public = lambda theta, step: t.public_gradient(theta)  # noqa: E731
    return reference.adadps(_run(t, noise, plan), public, lr=LR, renew_every=9, eps=0.01, decay=0.3)


def _sgd(t, noise, square_noise, rule, plan):
    rule = reference.SGD(lr=LR, momentum=0.9, weight_decay=0.01)
    return reference.dp_sgd(_run(t, noise, plan), rule=rule)


def _ime(squares, balance, square_noise=None):
    return lambda model, plan, rule, t, **common: dpoptim.independent_moments(
        model, plan, LR, rule=rule, squares=squares, balance=balance, square_noise=square_noise, **common
    )


VARIANTS: dict[str, Variant] = {
    "dp_sgd": Variant(
        lambda model, plan, rule, t, **common: dpoptim.dp_sgd(
            model, plan, LR, momentum=0.9, weight_decay=0.01, **common
        ),
        _sgd,
        takes_rule=False,
    ),
    "post_processing": Variant(
        lambda model, plan, rule, t, **common: dpoptim.post_processing(model, plan, LR, rule=rule, **common),
        _post_processing,
    ),
    "bias_correction": Variant(
        lambda model, plan, rule, t, **common: dpoptim.bias_correction(model, plan, LR, rule=rule, **common),
        _bias_correction,
    ),
    "independent_moments": Variant(_ime("of_average", "equal"), _independent(False)),
    "independent_moments, average of squares": Variant(_ime("average_of", "mse"), _independent(True)),
    "independent_moments, independent noise on squares": Variant(
        _ime("of_average", "equal", dpoptim.Independent()), _independent(False)
    ),
    "joint_moments": Variant(
        lambda model, plan, rule, t, **common: dpoptim.joint_moments(model, plan, LR, rule=rule, **common),
        _joint,
    ),
    "scale_then_privatize": Variant(_make_scale(), _scale()),
    "scale_then_privatize, exponent 1/4": Variant(_make_scale(exponent=0.25), _scale(exponent=0.25)),
    "scale_then_privatize, as printed": Variant(_make_scale(normalise=False), _scale(normalised=False)),
    "scale_then_privatize, start": Variant(_make_scale(start=0.01), _scale(start=0.01)),
    "side_information": Variant(
        lambda model, plan, rule, t, **common: dpoptim.side_information(
            model, plan, LR, rule=rule, public_gradients=_public(t), **common
        ),
        _side,
    ),
    "noiseless_preconditioner": Variant(_make_noiseless(False), _noiseless),
    "noiseless_preconditioner, scaled": Variant(_make_noiseless(True), _noiseless_scaled),
    "delayed_preconditioner": Variant(_make_delayed(0.6), _delayed(0.6), takes_rule=False),
    "delayed_preconditioner, sum": Variant(_make_delayed(None), _delayed(None), takes_rule=False),
    "adadps": Variant(
        lambda model, plan, rule, t, **common: dpoptim.adadps(
            model, plan, LR, public_gradients=_public(t), renew_every=9, decay=0.3, eps=0.01, **common
        ),
        _adadps,
        takes_rule=False,
    ),
}

ROWS: list[tuple[str, str]] = []
"""(variant, rule): every variant with Adam and three other rules, so that every rule runs with most variants."""
_OTHERS = [name for name in RULES if name != "adam"]
for _index, (_name, _variant) in enumerate(VARIANTS.items()):
    ROWS.append((_name, "adam"))
    if _variant.takes_rule:
        ROWS += [(_name, _OTHERS[(_index + shift) % len(_OTHERS)]) for shift in (0, 1, 3)]
