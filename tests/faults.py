"""Forty deliberate faults, and a script that shows that the tests find each one.

    python tests/faults.py                  # try all of them, one after the other
    python tests/faults.py --only NAME      # try one, and print what pytest prints
    python tests/faults.py --list
    python tests/faults.py --json FILE      # also write the results

A fault is one small edit of the package that breaks privacy or correctness. The script applies it to a temporary copy,
never to the work tree, and runs the tests that should find it. They must pass without the fault and fail with it.

If the named file no longer holds the old text exactly once, the script looks for it in the whole package and reports
where it has moved. If it is nowhere, or in several places, that is an error, so that the list cannot rot. Test files
that have moved are found by their names. The exit status is 1 if a fault is missed or could not be tried.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src/dpoptim")
TIMEOUT = 300  # seconds for one run of pytest

# Each entry: name, description, file below src/dpoptim, arguments of pytest (files below tests), old and new text.
TABLE = r"""
# noise

noise-half: The noise has half the standard deviation that the plan asks for.
    in clipping/mechanism.py, found by clipping/test_mechanism.py
    - self._stddevs[stream] *= strategy.column_norm
    + self._stddevs[stream] *= strategy.column_norm / 2

noise-repeats: Every step adds the noise of the first step.
    in clipping/mechanism.py, found by clipping/test_mechanism.py
    - row = rows.row(self.step)
    + row = rows.row(0)

noise-shared-by-parameters: All parameters get the same normals.
    in noise/source.py, found by noise/test_stream.py -k independent
    - subkey = self.key.subkey(f"normals/{self.stream}", part.name)
    + subkey = self.key.subkey(f"normals/{self.stream}", "")

keystream-wraps: The keystream's block counter wraps at 2^16, so long tensors repeat their noise.
    in noise/normals.py, found by noise/test_normals.py
    - first_block.to_bytes(4, "little")
    + (first_block % 2**16).to_bytes(4, "little")

resume-loses-stream-state: A stream that resumes at a later step starts with empty buffers instead of replaying.
    in noise/stream.py, found by noise/test_buffered.py -k order
    - for at in range(self._next, step + 1):
    + for at in range(step, step + 1):

# sensitivity and sampling

sensitivity-of-one-participation: A Toeplitz strategy's sensitivity counts one participation only.
    in noise/toeplitz.py, found by noise/test_toeplitz.py
    - range(0, max_participations * min_separation, min_separation)
    + range(0, min_separation, min_separation)

sensitivity-ignores-separation: A banded strategy's sensitivity assumes that participations never overlap.
    in noise/matrix.py, found by noise/test_matrix.py -k sensitivity
    - _worst_pattern(np.abs(self._column_products), max_participations, min_separation)
    + _worst_pattern(np.abs(self._column_products), max_participations, self.bands)

sampling-from-numpy: Poisson batches come from numpy's global generator instead of the secret key.
    in privacy/sampling.py, found by privacy/test_sampling.py
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

replace-as-zero-out: Replacing an example is accounted for like blanking one.
    in privacy/adjacency.py, found by privacy/test_plan.py
    - return 2 if self is Adjacency.REPLACE else 1
    + return 1

composition-forgets-a-run: Of several Poisson runs of one kind, only the last counts.
    in privacy/repeated.py, found by privacy/test_repeated.py -k poisson
    - sampled[kind] = sampled.get(kind, 0) + run.steps
    + sampled[kind] = run.steps

statement-names-wrong-neighbours: The privacy statement always names zero-out neighbours.
    in privacy/statement.py, found by privacy/test_plan.py
    - plan.adjacency.describe()
    + type(plan.adjacency).ZERO_OUT.describe()

joint-square-for-free: Joint moments get no more noise than the gradient alone.
    in privacy/releases.py, found by privacy/test_releases.py -k joint
    - return clip_norm * math.sqrt(1.0 + weight)
    + return clip_norm

# the mechanism

square-without-noise: Independent and joint moments release the square without noise.
    in clipping/mechanism.py, found by clipping/test_mechanism.py
    - self._add_noise("square", squares, None)
    + pass

actual-batch-size: The sum is divided by the number of examples that came, not by the expected batch size.
    in clipping/mechanism.py, found by clipping/test_mechanism.py
    - vector /= self.plan.batch_size
    + vector /= max(1, examples)

scale-divided-twice: The noise is divided by the square of the scale.
    in clipping/mechanism.py, found by clipping/test_mechanism.py
    - vector.addcdiv_(row, flatten([scale[name] for name in names]
    + vector.addcdiv_(row, flatten([scale[name] ** 2 for name in names]

empty-batch-skipped: A step whose sample is empty releases nothing, which shows that it was empty.
    in clipping/mechanism.py, found by optim/test_training.py -k empty
    - return ticket.closes_batch
    + return ticket.closes_batch and not ticket.is_placeholder

handshake-ignores-step: The optimizer takes a batch that the loader drew for a different step.
    in clipping/mechanism.py, found by optim/test_training.py -k Misuse
    - if ticket.step != self.step:
    + if False:

steps-beyond-the-plan: The mechanism releases more steps than the plan covers.
    in clipping/mechanism.py, found by clipping/test_mechanism.py
    - if self.step >= self.plan.steps:
    + if False:

resume-one-step-back: A checkpoint restores one step fewer than were released, so that noise repeats.
    in clipping/mechanism.py, found by optim/test_citizenship.py -k dp_sgd
    - self.step = step
    + self.step = max(step - 1, 0)

step-released-twice: A step that was released before is released again with other content and the same noise.
    in privacy/released_steps.py, found by privacy/test_released_steps.py
    - if not hmac.compare_digest(digest, self._digests[step]):
    + if False:

ledger-ignores-scale: The ledger of released steps does not notice a different scale.
    in clipping/mechanism.py, found by privacy/test_step_ledger.py
    - if (scale := self.scale) is not None:
    + if (scale := None) is not None:

# clipping

clip-factor-above-one: Short gradients are stretched to the clip norm: c/n instead of min(1, c/n).
    in kernels/clip_weights.py, found by kernels/test_clip_weights.py
    - weights = (clip_norm / norms).clamp(max=1.0)
    + weights = clip_norm / norms

norms-in-bf16: Norms and sums of a 16-bit model are taken in 16 bits.
    in kernels/norms.py, found by clipping/test_clipped_sum.py -k bf16_model
    - return torch.float64 if dtype == torch.float64 else torch.float32
    + return dtype

norm-of-repeated-ids: An embedding's norm treats look-ups of one row as if they were different rows.
    in kernels/norms.py, found by clipping/test_clipped_sum.py -k "embedding and at_a_time"
    - return total.index_add_(0, distinct // num_rows, squares(sums, None)), bound
    + return each.square().sum((1, 2), dtype=torch.float64), bound

tied-cross-term: The norm of a tied weight lacks the cross term of its two uses.
    in kernels/clip_weights.py, found by clipping/test_clipped_sum.py -k "tied and at_a_time"
    - (d_squared + 2 * cross + e_squared)
    + (d_squared + e_squared)

norm-without-biases: Gradients of biases are summed but do not count in the norm.
    in clipping/clipped_sums.py, found by clipping/test_clipped_sum.py -k "linear and at_a_time"
    - norms.many_squares(list(dense.values()), scales)
    + norms.many_squares([g * (g.ndim > 2) for g in dense.values()], scales)

norm-without-scale: Gradients are clipped by their plain norm, while the noise is divided by the scale.
    in clipping/clipped_sums.py, found by clipping/test_clipped_sum.py -k "linear and at_a_time"
    - self._measured(batch.gradients, self.scale)
    + self._measured(batch.gradients, None)

not-finite-counts: An example whose norm is not a number is added with weight 1.
    in kernels/clip_weights.py, found by kernels/test_clip_weights.py
    - weights = torch.where(weights >= torch.finfo(torch.float32).tiny, weights, 0.0) * factor
    + weights = torch.where(weights.isnan(), 1.0, weights) * factor

micro-batches-clipped-together: Example j of two micro-batches is clipped as one example.
    in clipping/engine.py, found by clipping/test_engine.py::TestWhatIsOneBatch
    - if batch.is_open and not (call.model_call in batch.calls or
    + if False and not (call.model_call in batch.calls or

layer-norm-weight: The per-example gradient of a layer norm's weight lacks the division by the deviation.
    in kernels/normalization.py, found by kernels/test_norms.py
    - (wide(grad) * (wide(inputs) - mean) * rstd).sum(1)
    + (wide(grad) * (wide(inputs) - mean)).sum(1)

buffers-may-change: A buffer that takes in private data is not refused.
    in validation/changed_state.py, found by validation/test_changed_state.py -k refused
    - if self._refused is not None:
    -             kind
    + if False:
    +             kind

batch-norm-allowed: Batch norm in training mode is not refused.
    in validation/model_checks.py, found by clipping/test_engine.py -k batch_norm
    - if module.training or (module.running_mean is None and torch.is_grad_enabled()):
    + if module.running_mean is None and torch.is_grad_enabled():

# optimizers

bias-added: Bias correction adds the noise's share to the second moment instead of subtracting it.
    in optim/second_moments.py, found by optim/test_against_twins.py -k "bias_correction and adagrad"
    - (nu_hat - bias)
    + (nu_hat + bias)

decay-coupled: AdamW adds its weight decay to the gradient as well.
    in optim/optimizer.py, found by optim/test_against_twins.py -k "bias_correction and adamw"
    - if decay and not self.rule.decoupled:
    + if decay:

# around training

dropout-not-reseeded: Dropout draws from the public seed instead of the run's secret key.
    in privacy/secret_randomness.py, found by privacy/test_secret_randomness.py
    - saved.append(save_rng_states())
    -                 seed_for_step(optimizer)
    + saved.append(save_rng_states())

loss-over-the-batch: A masked language model's losses are divided by the targets of the whole batch.
    in training/losses/tasks.py, found by training/test_tasks.py -k losses
    - self.total / self.targets.clamp(min=1)
    + self.total / self.targets.sum().clamp(min=1)

audit-believes-the-claim: The audit passes a claim that its own lower bound refutes.
    in audit/plan_audit.py, found by audit/test_plan_audit.py -k "broken and least0"
    - passed=most <= claim
    + passed=True

theory-bias-off-by-one: The predicted bias of the second moment is debiased by the power of the next step.
    in theory/bias.py, found by theory/test_bias.py -k trace
    - total / (1 - beta2**step)
    + total / (1 - beta2 ** (step + 1))
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
    result: str  # found, MISSED or ERROR
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
    """Return pytest's exit status, and the first test that failed or else its last line."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root / "src"), str(root)])
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    # A cache of its own: a fault must not leave its strategies and calibrations in the user's.
    with tempfile.TemporaryDirectory(dir=root) as cache:
        environment["DPOPTIM_CACHE_DIR"] = cache
        try:
            run = subprocess.run(
                command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            return -1, f"pytest did not end within {TIMEOUT} s"
    if show:
        print(run.stdout, run.stderr)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
    return run.returncode, failed[1] if failed else run.stdout.strip().rpartition("\n")[2]


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
            write(path, original.replace(fault.old, fault.new))
            status, detail = run_tests(arguments, root, show=show)
            write(path, original)
            # Pytest's other statuses prove nothing: tests that cannot be collected, or none at all.
            result = {0: "MISSED", 1: "found"}.get(status, "ERROR")
        else:
            detail = f"fails without the fault: {detail}"
        detail += f" [{note}]" if note else ""
    return Outcome(fault.name, result, detail, round(time.monotonic() - began, 1))


def write(path: Path, text: str) -> None:
    path.write_text(text)
    # Python would not see an edit of the same length within the same second.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description="Show that the tests find each deliberate fault.")
    parser.add_argument("--only", metavar="NAME", action="append", help="try this fault only; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE")
    options = parser.parse_args()
    faults = read_table(TABLE)
    if unknown := set(options.only or []) - {fault.name for fault in faults}:
        parser.error(f"unknown fault {', '.join(sorted(unknown))}; --list prints the names")
    faults = [fault for fault in faults if options.only is None or fault.name in options.only]
    if options.list:
        for fault in faults:
            print(f"{fault.name}\n    {fault.what}\n    {fault.file}; {fault.tests}")
        return 0
    began = time.monotonic()
    clean: dict[tuple[str, ...], tuple[int, str]] = {}
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        root = Path(folder)
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        for number, fault in enumerate(faults, start=1):
            outcome = try_fault(fault, root, clean, show=options.only is not None)
            outcomes.append(outcome)
            print(
                f"{number:2}/{len(faults)} {outcome.result:6} {outcome.name:32} {outcome.seconds:5.1f} s  "
                f"{outcome.detail}",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    bad = [outcome for outcome in outcomes if outcome.result != "found"]
    cpu = sum(os.times()[2:4])  # of the processes that ran
    took = f"{time.monotonic() - began:.0f} s ({cpu:.0f} s of CPU time)"
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} faults found in {took}")
    for outcome in bad:
        print(f"{outcome.result}: {outcome.name}: {outcome.detail}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
