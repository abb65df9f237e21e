"""Count the values of a table's columns with noise. This is the only code that looks at values of several records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from dpoptim.noise import NoiseKey, NormalSource
from dpoptim.privacy import ColumnCounts

Value = TypeVar("Value", str, int)


@dataclass(kw_only=True, eq=False)
class NoisyCounter:
    """Releases the noisy counts that `counts` accounts for, each column once per release.

    Guarantee: everything it returns together satisfies `counts`, if an example gives at most one value per column and
    release. A later release may use what earlier ones returned. Counts beyond those accounted for are refused.
    """

    counts: ColumnCounts
    key: NoiseKey = field(default_factory=NoiseKey.generate)
    _done: dict[int, set[Hashable]] = field(default_factory=dict)

    def frequent(self, values: Sequence[Value], *, column: str, release: int) -> dict[Value, float]:
        """Return the values whose noisy count exceeds the threshold, in order, with these counts.

        Guarantee: values that one example alone has are hidden except with the probability in δ.
        """
        found = self._noisy(Counter(values), column, release)
        return {value: count for value, count in found.items() if count > self.counts.threshold}

    def histogram(self, places: Sequence[int], *, size: int, column: str, release: int) -> list[float]:
        """Return the noisy count of every place in range(size). `size` must not depend on unreleased values."""
        known = Counter(places)
        return list(self._noisy({place: known[place] for place in range(size)}, column, release).values())

    def _noisy(self, exact: dict[Value, int], column: str, release: int) -> dict[Value, float]:
        seen = self._done.setdefault(release, set())
        if column in seen or len(seen) == self.counts.columns or not 0 <= release < self.counts.releases:
            raise ValueError(f"Column {column!r} in release {release} is not covered by {self.counts}.")
        seen.add(column)
        source = NormalSource.of_tensor(self.key, column, numel=len(exact), stream="counts")
        noise = source.normals(release, dtype=torch.float64).tolist()
        # Sorted, so that the order of the records decides nothing.
        pairs = zip(sorted(exact.items()), noise, strict=True)
        return {value: count + self.counts.stddev * one for (value, count), one in pairs}
