"""The other ways to add noise, each at the same (ε, δ), and what each would cost at the chosen one's error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpoptim.noise import Independent
from dpoptim.privacy import Adjacency, Poisson, PrivacyPlan, Shuffled
from dpoptim.privacy.accounting import describe_accountant
from dpoptim.theory.noise_choice import Candidate, Choice, choose_noise

Progress = Callable[[str], None]

_LEAST_MULTIPLIER = 0.05  # below, ε is in the thousands and privacy loss distributions take minutes


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A calibrated mechanism, and `epsilon_at_chosen_error`: the ε at which its mean RMSE equals the chosen one's.

    Error is proportional to the noise multiplier, so that is the accountant's ε of the same plan at the multiplier
    noise_multiplier·(RMSE of the chosen)/(RMSE of this one), at the same δ. None where that multiplier is below .05
    under secret sampling: ε is then so large that it says nothing.
    """

    candidate: Candidate
    chosen: bool
    epsilon_at_chosen_error: float | None

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def sampling(self) -> str:
        return repr(self.candidate.plan.sampling)

    @property
    def adjacency(self) -> Adjacency:
        return self.candidate.plan.adjacency

    @property
    def accountant(self) -> str:
        """Name and version of the accountant that stands for its ε."""
        return describe_accountant(self.candidate.plan.run)


def alternatives(
    choice: Choice,
    *,
    epsilon: float,
    delta: float,
    memory_budget: int | None = None,
    progress: Progress | None = None,
) -> tuple[tuple[Alternative, ...], str | None]:
    """All candidates of the choice's sampling; of the other sampling the chosen one, and independent noise.

    The other sampling is `Poisson()` (cyclic where noise is correlated) for `Shuffled()` and the reverse, at the same
    adjacency. Beside the rows comes why the other sampling is missing, where it is: it has no proof (`Shuffled()`
    under add/remove), or no noise multiplier is found for it.
    """
    tell = progress or (lambda name: None)
    candidates, missing = list(choice.candidates), None
    try:
        found = choose_noise(
            _other_sampling(choice.plan),
            epsilon=epsilon,
            delta=delta,
            parameters=choice.chosen.parameters,
            memory_budget=memory_budget,
            memory=choice.chosen.memory,
            progress=lambda name: tell(f"{name} under the other sampling"),
        )
        candidates += [c for c in found.candidates if c is found.chosen or c is found.independent]
    except ValueError as refused:
        missing = str(refused)
    rows = []
    for candidate in candidates:
        tell(f"{candidate.name}: epsilon at the same error")
        at_error = _epsilon_at(candidate, choice.chosen.rmse_mean, delta)
        rows.append(
            Alternative(candidate=candidate, chosen=candidate is choice.chosen, epsilon_at_chosen_error=at_error)
        )
    return tuple(rows), missing


def _epsilon_at(candidate: Candidate, error: float, delta: float) -> float | None:
    plan = candidate.plan
    if not plan.noise_multiplier or not candidate.rmse_mean:
        return None
    multiplier = plan.noise_multiplier * error / candidate.rmse_mean
    if plan.sampling.is_random and multiplier < _LEAST_MULTIPLIER:
        return None
    return plan.replace(noise_multiplier=multiplier).epsilon(delta=delta)


def _other_sampling(plan: PrivacyPlan) -> PrivacyPlan:
    other = Poisson() if isinstance(plan.sampling, Shuffled) else Shuffled()
    return plan.replace(sampling=other, noise=Independent(), noise_multiplier=None)
