"""Several records of one user: turn what is known for each record into what is known for each user."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpoptim.kernels.norms import wide


class UserRows:
    """Which rows of a batch belong to whom: the first counts[0] rows to user 0, the next counts[1] to user 1, ..."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = torch.tensor(counts, dtype=torch.int64, device="cpu")
        self.rows, self._most = sum(counts), max(counts)
        self._first = self.counts.cumsum(0) - self.counts

    def side_by_side(self, values: Tensor) -> Tensor:
        """[rows, positions, ...] → [users, most rows · positions, ...]: a user's rows one after the other, then zeros.

        >>> UserRows([1, 2]).side_by_side(torch.tensor([[1, 2], [3, 4], [5, 6]]))
        tensor([[1, 2, 0, 0],
                [3, 4, 5, 6]])
        """
        slots = len(self.counts) * self._most
        if slots > self.rows:
            places = torch.arange(self._most, device="cpu") < self.counts[:, None]
            held = values.new_zeros(slots, *values.shape[1:])
            held[places.flatten().nonzero().flatten().to(values.device)] = values
            values = held
        return values.reshape(len(self.counts), self._most * values.shape[1], *values.shape[2:])

    def summed(self, values: Tensor) -> Tensor:
        """[rows, ...] → [users, ...], the sums of each user's rows, in at least float32 and always in the same order.

        >>> UserRows([1, 2]).summed(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
        tensor([[ 1.,  2.],
                [ 8., 10.]])
        """
        if self._most == 1:
            return values
        total = wide(values[self._first.to(values.device)])
        for number in range(1, self._most):
            users = (self.counts > number).nonzero().flatten()
            total[users.to(values.device)] += wide(values[(self._first[users] + number).to(values.device)])
        return total
