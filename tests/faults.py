"""Deliberate faults, and a script that shows that the tests find each one.

    python tests/faults.py                  # try all of them, one after the other
    python tests/faults.py --only NAME      # try one, and show pytest's output
    python tests/faults.py --check          # only check that each fault applies and has tests; one minute

A fault is one small edit of the package that breaks privacy or correctness. The script applies it to a temporary copy,
never to the work tree, and runs the tests that should find it. They must pass without the fault and fail with it.

If the named file does not hold the old text exactly once, the script searches the whole package and reports the new
file. Text that is missing or ambiguous is an error, so the list stays current. Test files that have moved are found by
their names. The exit status is 1 if a fault is missed or could not be applied.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import hypothesis  # noqa: F401, imported once for all forks
import pytest
import scipy.stats  # noqa: F401
import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src/dpoptim")
TIMEOUT = 300  # seconds for one run of pytest

# Each entry: name, description, file below src/dpoptim, arguments of pytest (files below tests), old and new text.
TABLE = r"""
# noise

noise-half: The noise has half the standard deviation that the plan asks for.
    in clipping/mechanism.py, found by clipping/test_mechanism.py -k Level
    - self._stddevs[stream] *= strategy.column_norm
    + self._stddevs[stream] *= strategy.column_norm / 2

noise-repeats: Every step adds the noise of the first step.
    in clipping/mechanism.py, found by clipping/test_mechanism.py -k Level
    - rows.add_to(vector, self.step,
    + rows.add_to(vector, 0,

noise-shared-by-parameters: All parameters get the same normals.
    in noise/normals.py, found by noise/test_streams.py -k independent
    - subkey = self.key.subkey(f"normals/{self.stream}", part.name)
    + subkey = self.key.subkey(f"normals/{self.stream}", "")

keystream-wraps: The keystream's block counter wraps at 2^16, so long tensors repeat their noise.
    in noise/normals.py, found by noise/test_normals.py
    - first_block.to_bytes(4, "little")
    + (first_block % 2**16).to_bytes(4, "little")

resume-loses-stream-state: A stream that resumes at a later step starts with empty buffers instead of replaying.
    in noise/streams.py, found by noise/test_streams.py -k every_path
    - for at in range(self._next, step + 1):
    + for at in range(step, step + 1):

exact-noise-trusts-float64: Exact noise rounds sums that float64 does not know well enough.
    in noise/exact.py, found by noise/test_exact.py -k middle
    - distance.ge_(0.5 - error)
    + distance.ge_(0.5)

exact-noise-cuts-the-tail: Exact noise trusts the first 64 bits of a radius in the tail.
    in noise/exact.py, found by noise/test_exact.py -k radii
    - .logical_or_(squared.gt(most))
    + .logical_or_(squared.gt(100.0))

exact-noise-is-not-added: A plan with exact noise gets ordinary noise.
    in clipping/mechanism.py, found by optim/test_exact_noise.py -k grid
    - exact = self.plan.exact_noise and self.plan.is_private
    + exact = False

exact-noise-on-float32-sums: A plan with exact noise clips and sums in float32.
    in clipping/mechanism.py, found by optim/test_exact_noise.py -k made
    - in_double=self.plan.exact_noise and self.plan.is_private
    + in_double=False

cancelling-parts-in-float64: Parts of a gradient in float64 may be so large that other examples are rounded to them.
    in clipping/parameter_gradients.py, found by clipping/test_in_double.py -k cancel
    - CANCELLATION = 1e3
    + CANCELLATION = 1e11

exact-noise-on-float32-shards: Sums in float64 travel between processes in float32.
    in clipping/clipped_sums.py, found by clipping/test_in_double.py -k those_of_float64
    - double=self.in_double
    + double=False

# sensitivity and sampling

sensitivity-of-one-participation: A Toeplitz strategy's sensitivity counts one participation only.
    in noise/strategies/toeplitz.py, found by noise/test_strategies.py -k random
    - count = fitting_participations(self.steps, max_participations, min_separation)
    + count = 1

sensitivity-ignores-separation: A banded strategy's sensitivity assumes that participations never overlap.
    in noise/strategies/matrix.py, found by noise/test_strategies.py -k random
    - _worst_pattern(np.abs(self._column_products), max_participations, min_separation)
    + _worst_pattern(np.abs(self._column_products), max_participations, self.bands)

sampling-from-numpy: Poisson batches come from numpy's global generator instead of the secret key.
    in privacy/sampling.py, found by privacy/test_sampling.py -k pure
    - words = uniform_words(key, domain=domain, step=step, count=count)
    + words = np.random.randint(0, 2**64, count, dtype=np.uint64)

# accounting

poisson-half-rate: Poisson sampling is accounted for at half its rate.
    in privacy/plan.py, found by privacy/test_plan.py
    - return PoissonRun(sampling_prob=self.sampling_prob,
    + return PoissonRun(sampling_prob=self.sampling_prob / 2,

calibration-overspends: Calibration accepts an epsilon slightly above the target.
    in privacy/calibration.py, found by privacy/test_calibration.py -k entry
    - return epsilon - tolerance(epsilon) <= achieved <= epsilon
    + return abs(achieved - epsilon) <= tolerance(epsilon)

replace-as-zero-out: Replacing an example is accounted for like zeroing one out.
    in privacy/adjacency.py, found by privacy/test_plan.py
    - return 2 if self is Adjacency.REPLACE else 1
    + return 1

composition-forgets-a-run: Of several Poisson runs of one kind, only the last counts.
    in privacy/composition.py, found by privacy/test_composition.py -k "poisson or repeated"
    - sampled[kind] = sampled.get(kind, 0) + run.steps
    + sampled[kind] = run.steps

statement-names-wrong-neighbours: The privacy statement always names zero-out neighbours.
    in privacy/statement.py, found by privacy/test_plan.py
    - plan.adjacency.describe()
    + type(plan.adjacency).ZERO_OUT.describe()

joint-square-for-free: Joint moments get no more noise than the gradient alone.
    in privacy/release_types.py, found by privacy/test_release_types.py -k joint
    - return adjacency.sensitivity_factor * clip_norm * math.sqrt(1.0 + weight)
    + return adjacency.sensitivity_factor * clip_norm

# tables

counts-half-noise: The noise on the counts of a table has half the accounted standard deviation.
    in data/noisy_counts.py, found by data/test_noisy_counts.py
    - count + self.counts.stddev * one
    + count + self.counts.stddev / 2 * one

counts-without-threshold: Values that only one record has are reported.
    in data/noisy_counts.py, found by data/test_noisy_counts.py
    - if count > self.counts.threshold}
    + if count > 0}

counts-are-free: Training forgets what the counts before it cost.
    in privacy/composition.py, found by privacy/test_column_counts.py
    - squared_shift += plan.counts.shift(plan.adjacency) ** 2
    + squared_shift += 0.0

counts-expose-for-free: Delta leaves out values that only one record has.
    in privacy/composition.py, found by privacy/test_column_counts.py
    - delta -= plan.counts.exposed_delta(plan.adjacency)
    + delta -= 0.0

counts-of-one-column: The counts of several columns cost as much as those of one.
    in privacy/column_counts.py, found by privacy/test_column_counts.py
    - return self.columns * self.releases * adjacency.sensitivity_factor
    + return self.releases * adjacency.sensitivity_factor

estimates-see-held-out-rows: Estimates also count the rows that are held out.
    in app/data/estimates.py, found by app/test_tables.py -k held_out
    - for place in places.tolist()] for name in names}
    + for place in range(everyone)] for name in names}

numbers-scaled-by-the-data: Columns are centred by their mean over all records.
    in app/data/tables.py, found by app/test_tables.py -k by_itself
    - found = scaled(column, numbers(name, values, locate))
    + found = scaled(column, numbers(name, values, locate) - float(np.nanmean(numbers(name, values, locate))))

estimator-scaled-by-the-data: The scikit-learn estimators center the columns by their mean.
    in integrations/sklearn.py, found by integrations/test_sklearn.py -k by_itself
    - scaled = np.clip((X - center)
    + scaled = np.clip((X - np.nanmean(X, axis=0))

# the mechanism

square-without-noise: Independent and joint moments release the square without noise.
    in clipping/mechanism.py, found by clipping/test_mechanism.py -k Level
    - self._add_noise("square", squares, None, 1)
    + pass

actual-batch-size: The sum is divided by the actual number of examples, not by the expected batch size.
    in clipping/mechanism.py, found by clipping/test_mechanism.py -k Level
    - self.scale, self.plan.batch_size)
    + self.scale, max(1, examples))

scale-divided-twice: The noise is divided by the square of the scale.
    in noise/streams.py, found by clipping/test_mechanism.py -k Level
    - divided_by = flatten(tensors, sums.dtype)
    + divided_by = flatten(tensors, sums.dtype) ** 2

empty-batch-skipped: A step whose sample is empty releases nothing, which shows that it was empty.
    in clipping/mechanism.py, found by optim/test_training.py -k empty
    - return ticket.closes_batch
    + return ticket.closes_batch and not ticket.is_placeholder

handshake-ignores-step: The optimizer takes a batch that the loader drew for a different step.
    in clipping/mechanism.py, found by optim/test_training.py -k Misuse
    - if ticket.step != self.step:
    + if False:

steps-beyond-the-plan: The mechanism releases more steps than the plan covers.
    in clipping/mechanism.py, found by clipping/test_mechanism.py -k spent
    - if self.step >= self.plan.steps:
    + if False:

resume-one-step-back: A checkpoint restores one step fewer than were released, so that noise repeats.
    in clipping/mechanism.py, found by optim/test_citizenship.py -k dp_sgd
    - self.step = step
    + self.step = max(step - 1, 0)

step-released-twice: A step that was released before is released again with different content and the same noise.
    in privacy/step_ledger.py, found by privacy/test_step_ledger.py -k "repeated or released"
    - if digest != self._digests[step]:
    + if False:

ledger-ignores-scale: The ledger of released steps does not notice a different scale.
    in clipping/mechanism.py, found by privacy/test_step_ledger.py -k "scale or repeated"
    - return [flatten([scale[name] for name in names], dtype) for names, dtype in found], []
    + return [], []

# clipping

clip-factor-above-one: Short gradients are stretched to the clip norm: c/n instead of min(1, c/n).
    in kernels/clip_weights.py, found by kernels/test_clip_weights.py
    - weights = (limit / norms).clamp_(max=1.0)
    + weights = limit / norms

norms-in-bf16: Norms and sums of a 16-bit model are taken in 16 bits.
    in kernels/norms.py, found by clipping/test_clipped_sum.py -k bf16_model
    - return torch.float64 if dtype == torch.float64 else torch.float32
    + return dtype

norm-of-repeated-ids: An embedding's norm treats look-ups of one row as if they were different rows.
    in kernels/norms.py, found by clipping/test_clipped_sum.py -k "embedding and at_a_time"
    - return total.index_add_(0, distinct // num_rows, self_products(sums)), bound
    + return each_squared.sum(1), bound

tied-cross-term: The norm of a tied weight lacks the cross term of its two uses.
    in kernels/clip_weights.py, found by clipping/test_clipped_sum.py -k "tied and at_a_time"
    - squares.add_(cross, alpha=2)
    + squares.add_(cross, alpha=0)

norm-without-biases: Gradients of biases are summed but do not count in the norm.
    in clipping/clipped_sums.py, found by clipping/test_clipped_sum.py -k "linear and at_a_time"
    - norms.many_squares(list(dense.values()), scales)
    + norms.many_squares([g * (g.ndim > 2) for g in dense.values()], scales)

norm-without-scale: Gradients are clipped by their plain norm, while the noise is divided by the scale.
    in clipping/clipped_sums.py, found by clipping/test_clipped_sum.py -k "linear and at_a_time"
    - self._clip(gradients, self.scale, factor, clip_norm)
    + self._clip(gradients, None, factor, clip_norm)

not-finite-counts: An example whose norm is not a number is not left out.
    in kernels/clip_weights.py, found by kernels/test_clip_weights.py
    - is_summed = weights >= torch.finfo(torch.float32).tiny
    + is_summed = ~(weights < torch.finfo(torch.float32).tiny)

graph-overwrites-a-release: A replay writes sums without noise into a gradient that an observer still holds.
    in clipping/captured.py, found by clipping/test_captured_large.py -k still_held
    - shape.run if shape.graph is None or memory.is_lent else
    + shape.run if shape.graph is None else

micro-batches-clipped-together: Example j of two micro-batches is clipped as one example.
    in clipping/engine.py, found by clipping/test_engine.py -k OneBatch
    - if batch.is_open and not (
    + if False and not (

layer-norm-weight: The per-example gradient of a layer norm's weight lacks the division by the deviation.
    in kernels/normalization.py, found by kernels/test_norms.py -k layer_norm
    - normalised = (wide(inputs) - mean).mul_(rstd)
    + normalised = wide(inputs) - mean

buffers-may-change: A buffer that stores private data is not refused.
    in validation/changed_state.py, found by validation/test_changed_state.py -k refused
    - self._refused = next(iter(
    + self._refused = None and next(iter(

batch-norm-allowed: Batch norm in training mode is not refused.
    in validation/refused_layers.py, found by clipping/test_engine.py -k batch_norm
    - if module.training or (module.running_mean
    + if False or (module.running_mean

# users

records-clipped-one-by-one: The records of a user are clipped one by one, so three of them move the sum three times.
    in clipping/clipped_sums.py, found by clipping/test_users.py -k "all_records and linear"
    - if self.by_user:
    + if self.by_user and False:

rows-of-others: A user's gradient has a row of the next user.
    in kernels/user_rows.py, found by clipping/test_users.py -k "one_user_at_a_time and linear"
    - self._first = self.counts.cumsum(0) - self.counts
    + self._first = self.counts.cumsum(0) - 1

positions-of-others: The positions of a user's rows run over into the next user.
    in kernels/user_rows.py, found by clipping/test_users.py -k "one_user_at_a_time and embedding"
    - places = torch.arange(self._most, device="cpu") < self.counts[:, None]
    + places = torch.arange(slots, device="cpu") < self.rows

sums-for-means: A user's gradient is the sum of the records' gradients, but is documented as their mean.
    in clipping/clipped_sums.py, found by clipping/test_users.py -k "one_user_at_a_time and linear"
    - return 1 / users.counts.to(
    + return 1 / torch.ones_like(users.counts).to(

rows-unchecked: A batch with other rows than the loader drew is attributed to its users all the same.
    in clipping/clipped_sums.py, found by clipping/test_users.py -k did_not_draw
    - if counts is None or sum(counts) != batch.examples:
    + if counts is None:

user-split: A user with more records than a part holds is split, and each half is clipped by itself.
    in data/loader.py, found by data/test_users.py -k plan_draws
    - [users.drawn(self._draws, step, user, most=most) for user in drawn.tolist()],
    + [own for user in drawn.tolist() for own in np.split(users.drawn(self._draws, step, user, most=most), [1])],

records-unlimited: A user adds all records to a step, whatever the plan says.
    in data/users.py, found by data/test_users.py -k plan_draws
    - if len(own) <= most:
    + if len(own) <= most or True:

order-unchecked: A collator that sorts gives a user the rows of others.
    in data/users.py, found by data/test_users.py -k moves_records
    - if not keeps and any(
    + if False and any(

count-without-noise: An adaptive clip norm follows the exact count of clipped examples.
    in clipping/mechanism.py, found by optim/test_clipping_rules.py -k "count_has_the_noise"
    - self._count_noise.add_to(share, self.step, stddev=self._stddevs["gradient"],
    + self._count_noise.add_to(share, self.step, stddev=0.0,

noisy-count-at-full-rate: An adaptive clip norm follows counts that are mostly noise as fast as others.
    in privacy/clipping_rules.py, found by optim/test_clipping_rules.py -k "one_percent"
    - rate = self.rate / max(1.0, self.rate * noise / _NOISE_PER_STEP)
    + rate = self.rate

count-noise-of-one-row: The level of a count's noise ignores the correlation of noise.
    in clipping/mechanism.py, found by optim/test_clipping_rules.py -k "slow_versions and banded and adaptive"
    - noise = self._stddevs["gradient"] * float(self._row_norms[self.step]) / divisor
    + noise = self._stddevs["gradient"] / divisor

clip-factor-not-in-noise: The noise does not grow with an adaptive clip norm.
    in clipping/mechanism.py, found by optim/test_clipping_rules.py -k "noise_of_an_adaptive_run"
    - stddev = self._stddevs[stream] * self.clip_factor
    + stddev = self._stddevs[stream]

clip-factor-not-in-ledger: A step may be repeated with the same sums and noise of a different level.
    in clipping/mechanism.py, found by optim/test_clipping_rules.py -k ledger
    - {settings} {self.clip_factor!r} "
    + {settings} "

groups-at-whole-norm: Each group of parameters is clipped to the whole clip norm.
    in privacy/clipping_rules.py, found by optim/test_clipping_rules.py -k "one_record and groups"
    - (found[prefix], math.sqrt(weight / total))
    + (found[prefix], 1.0)

normalized-without-norm: Normalized gradients are not divided by their norms.
    in kernels/clip_weights.py, found by optim/test_clipping_rules.py -k "one_record and normalized"
    - clip_norm / (norms * factor + stability)
    + clip_norm / (0 * norms + stability)

# optimizers

bias-added: Bias correction adds the noise's share to the second moment instead of subtracting it.
    in optim/second_moments.py, found by optim/test_against_reference.py -k "bias_correction and adagrad"
    - (nu_hat - bias)
    + (nu_hat + bias)

decay-coupled: AdamW adds its weight decay to the gradient as well.
    in optim/optimizer.py, found by optim/test_against_reference.py -k adamw
    - if decay and not self.rule.decoupled:
    + if decay:

# captured batches

captured-rows-by-batch-order: Rows that need recomputing are taken in the wrong order, so that others count twice.
    in clipping/captured.py, found by clipping/test_captured.py -k reorders
    - self._sums.clip_and_sum_rows(found.gradients, rows, 1,
    + self._sums.clip_and_sum_rows(found.gradients, [batch.examples - 1 - row for row in rows], 1,

captured-padding-counts: The copies of the first row that pad a captured batch count as examples.
    in clipping/captured.py, found by clipping/test_captured.py -k padding_rows_add_nothing
    - self.real[: batch.examples], self.real[batch.examples :] = True, False
    + self.real[:] = True

# around training

dropout-not-reseeded: Dropout draws from the public seed instead of the run's secret key.
    in data/secret_randomness.py, found by data/test_secret_randomness.py
    - seed_for_step(optimizer)
    -             try
    + pass
    +             try

loss-over-the-batch: A masked language model's losses are divided by the targets of the whole batch.
    in integrations/losses.py, found by integrations/test_token_losses.py
    - self.total / self.targets.clamp(min=1)
    + self.total / self.targets.sum().clamp(min=1)

audit-believes-the-claim: The audit passes a claim that its own lower bound refutes.
    in app/audit/plan_audit.py, found by app/audit/test_plan_audit.py -k "broken and least0"
    - passed = not contradicted and max(spent, as_gaussian or 0.0) <= claim
    + passed = True

audit-forgets-delta: The bound on right guesses ignores what a mechanism may reveal with probability delta.
    in app/audit/statistics.py, found by app/audit/test_statistics.py -k "allows_more"
    - expit(epsilons), only_more=True) + revealed
    + expit(epsilons), only_more=True) + 0 * revealed

audit-repeats-canaries: An audit inserts the canaries of the first batch into every batch of a loop.
    in app/audit/game.py, found by app/audit/test_own_loop.py -k "move_the_release"
    - self._part += 1
    + self._part += 0

audit-compares-only-clipped-gradients: Clipping hides that a loss is multiplied by a number that depends on the batch.
    in app/audit/plan_audit.py, found by app/audit/test_own_loop.py -k "depend_on"
    - plan.clip_norm * _UNCLIPPED
    + plan.clip_norm * 1.0

theory-bias-off-by-one: The predicted bias of the second moment is debiased by the power of the next step.
    in theory/second_moments.py, found by theory/test_second_moments.py -k trace
    - total / (1 - beta2**step)
    + total / (1 - beta2 ** (step + 1))

# several processes

whole-batch-in-each-process: Every process takes the whole batch, so each example counts several times.
    in data/processes.py, found by distributed/test_processes.py -k one_process
    - return [items[rank :: self.count] for rank in range(self.count)]
    + return [items for rank in range(self.count)]

sums-not-added-up: Each process releases its own share, with all of the noise.
    in data/processes.py, found by distributed/test_processes.py -k one_process
    - exchange(distributed.all_reduce, vector)
    + pass

noise-from-each-process: Each process makes different noise.
    in clipping/mechanism.py, found by distributed/test_processes.py -k bits
    - key, parameters = self.key.for_run(run_id),
    + key, parameters = self.key.for_run(f"{run_id} {self.processes.rank}"),

scales-differ: Processes that clip by different scales add up their sums.
    in clipping/mechanism.py, found by distributed/test_processes.py -k disagree
    - common = [self.step, int(self._run_fingerprint[:15], 16), self._scale_code()]
    + common = [self.step, int(self._run_fingerprint[:15], 16)]

noise-divided: The noise is divided by the square root of the number of processes.
    in clipping/mechanism.py, found by distributed/test_processes.py -k bits
    - stddev = self._stddevs[stream]
    + stddev = self._stddevs[stream] / self.processes.count**0.5

same-noise-in-each-shard: Every process adds the noise of the first rows to its own rows.
    in clipping/mechanism.py, found by distributed/test_sharded.py -k bits
    - start = self.shards.start if self.shards is not None else lambda name: 0
    + start = lambda name: 0

unguarded-shards: The gradient of a sharded layer that does not run itself is not refused.
    in clipping/engine.py, found by distributed/test_sharded.py -k mistakes
    - self._handles += [group.register_forward_pre_hook(guard_whole) for group in fsdp_modules(self.model)]
    + self._handles += [group.register_forward_pre_hook(guard_whole) for group in fsdp_modules(self.model)[:0]]

placeholder-counts: The example that stands in for an empty share of a sharded model is summed.
    in clipping/clipped_sums.py, found by distributed/test_sharded.py -k small_shares
    - weights = torch.zeros_like(clipped.weights) if self.skips_batch else clipped.weights
    + weights = clipped.weights

shards-clipped-without-scale: A sharded model takes norms without the scale, but divides the noise by it.
    in clipping/clipped_sums.py, found by distributed/test_sharded.py -k one_process
    - scale = None if self.scale is None else shards.whole({name: self.scale[name] for name in names})
    + scale = None
"""


@dataclass(frozen=True)
class Fault:
    name: str
    what: str
    file: str
    tests: str
    old: str
    new: str


@dataclass(frozen=True)
class Outcome:
    name: str
    result: str  # found, MISSED, ERROR, or ok after --check
    detail: str  # the test that found it, or what went wrong
    seconds: float


def read_table(table: str) -> list[Fault]:
    faults = []
    for block in table.strip().split("\n\n"):
        if block.startswith("#"):
            continue
        first, second, *edit = block.splitlines()
        name, what = first.split(": ", 1)
        file, tests = second.strip().removeprefix("in ").split(", found by ", 1)
        old, new = ("\n".join(line[6:] for line in edit if line[4] == sign) for sign in "-+")
        faults.append(Fault(name, what, file, tests, old, new))
    return faults


def find_text(fault: Fault, root: Path) -> tuple[Path | None, str]:
    """Return the one file that holds the old text, with a note if that is not the named file."""
    package = root / PACKAGE
    named = package / fault.file
    if named.is_file() and named.read_text().count(fault.old) == 1:
        return named, ""
    counts = {path: path.read_text().count(fault.old) for path in sorted(package.rglob("*.py"))}
    holders = [path for path, count in counts.items() if count]
    if sum(counts.values()) == 1:
        return holders[0], f"moved to {holders[0].relative_to(package)}"
    places = ", ".join(str(path.relative_to(package)) for path in holders) or "no file"
    return None, f"does not apply: old text found {sum(counts.values())} times, in {places}"


def find_tests(fault: Fault, root: Path) -> tuple[str, ...]:
    """Return pytest's arguments; a test file that has moved is found by its name."""
    arguments = []
    for argument in shlex.split(fault.tests):
        file, colons, node = argument.partition("::")
        if file.endswith(".py"):
            path = root / "tests" / file
            elsewhere = list((root / "tests").rglob(path.name))
            if not path.is_file() and len(elsewhere) == 1:
                path = elsewhere[0]
            argument = f"{path.relative_to(root)}{colons}{node}"
        arguments.append(argument)
    return tuple(arguments)


def run_tests(arguments: tuple[str, ...], root: Path, *, show: bool = False) -> tuple[int, str]:
    """Return pytest's exit status with the first failed test, or with its last line if none failed."""
    output = root / "output.txt"
    # A fork saves the time to import torch. The parent never imports dpoptim, so the child imports the copy.
    child = os.fork()
    if child == 0:
        signal.alarm(TIMEOUT)
        sys.dont_write_bytecode = True  # an edit within the same second would go unnoticed
        sys.path[:0] = [str(root / "src"), str(root)]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
        os.chdir(root)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments])
        sys.stdout.flush()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = output.read_text()
    if show:
        print(text)
    if status == -signal.SIGALRM:
        return status, f"pytest did not finish within {TIMEOUT} s"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    return status, failed[1] if failed else text.strip().rpartition("\n")[2]


def try_fault(fault: Fault, root: Path, clean: dict[tuple[str, ...], tuple[int, str]], *, show: bool) -> Outcome:
    """Apply the fault to the copy, run its tests, and undo it; `clean` remembers which tests pass without it."""
    began = time.monotonic()
    path, note = find_text(fault, root)
    result, detail = "ERROR", note
    if path is not None:
        arguments = find_tests(fault, root)
        if arguments not in clean:
            clean[arguments] = run_tests(arguments, root)
        status, detail = clean[arguments]
        if status == 0:
            original = path.read_text()
            path.write_text(original.replace(fault.old, fault.new))
            status, detail = run_tests(arguments, root, show=show)
            path.write_text(original)
            # Other statuses prove nothing: pytest collected no tests, or could not collect them.
            result = {0: "MISSED", 1: "found"}.get(status, "ERROR")
        else:
            detail = f"fails without the fault: {detail}"
        detail += f" [{note}]" if note else ""
    return Outcome(fault.name, result, detail, round(time.monotonic() - began, 1))


def check_fault(fault: Fault) -> Outcome:
    """Check in this process that the old text exists and that pytest collects a test; run nothing."""
    began = time.monotonic()
    path, note = find_text(fault, ROOT)
    result = "ERROR"
    if path is not None:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *find_tests(fault, ROOT)])
        result = "ok" if status == pytest.ExitCode.OK else "ERROR"
        note = f"{printed.getvalue().strip().rpartition(chr(10))[2]} {note}"
    return Outcome(fault.name, result, note, round(time.monotonic() - began, 1))


def main() -> int:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description="Show that the tests find each deliberate fault.")
    parser.add_argument("--only", metavar="NAME", action="append", help="try this fault only; may be repeated")
    parser.add_argument("--check", action="store_true", help="only check that each fault applies and has tests")
    options = parser.parse_args()
    faults = read_table(TABLE)
    if unknown := set(options.only or []) - {fault.name for fault in faults}:
        names = ", ".join(fault.name for fault in faults)
        parser.error(f"Unknown fault {', '.join(sorted(unknown))}. Choose from {names}.")
    faults = [fault for fault in faults if options.only is None or fault.name in options.only]
    began = time.monotonic()
    clean: dict[tuple[str, ...], tuple[int, str]] = {}
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        root = Path(folder)
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "conftest.py"):
            shutil.copy(ROOT / name, root)
        if options.check:
            os.chdir(ROOT)
        for number, fault in enumerate(faults, start=1):
            if options.check:
                outcome = check_fault(fault)
            else:
                outcome = try_fault(fault, root, clean, show=options.only is not None)
            outcomes.append(outcome)
            print(
                f"{number:2}/{len(faults)} {outcome.result:6} {outcome.name:32} {outcome.seconds:5.1f} s  "
                f"{outcome.detail}",
                flush=True,
            )
    bad = [outcome for outcome in outcomes if outcome.result not in ("found", "ok")]
    verb = "apply and have tests" if options.check else "found"
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} faults {verb}, in {time.monotonic() - began:.0f} s")
    for outcome in bad:
        print(f"{outcome.result}: {outcome.name}: {outcome.detail}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
