"""Rewards of requests: kept for samples that are still to come, and summed up for what a reward is worth."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

MOST_PENDING = 1 << 16  # rewards kept for samples that have not come yet

MEMORY = 1024.0
"""Rewards after which the past is halved: the policy's rewards rise as it learns, and an old mean would give every new
rollout a large weight.
"""


class Rewards:
    """Pending rewards by request id, and mean and standard deviation of those that met their sample lately."""

    def __init__(self) -> None:
        self.pending: OrderedDict[str, float] = OrderedDict()
        self.count, self._sum, self._squares = 0.0, 0.0, 0.0

    def keep(self, request: str, value: float) -> None:
        """Keep a reward until its sample comes; the oldest goes where there are too many."""
        self.pending[request] = value
        while len(self.pending) > MOST_PENDING:
            self.pending.popitem(last=False)

    def add(self, value: float) -> None:
        """Count a reward that met its sample."""
        if self.count >= MEMORY:
            self.count, self._sum, self._squares = self.count / 2, self._sum / 2, self._squares / 2
        self.count += 1
        self._sum += value
        self._squares += value * value

    @property
    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation of the latest rewards that were counted."""
        if not self.count:
            return 0.0, 0.0
        mean = self._sum / self.count
        return mean, max(0.0, self._squares / self.count - mean * mean) ** 0.5

    def to_dict(self) -> dict[str, Any]:
        """As the index of a saved buffer has it."""
        return {"rewards": [self.count, self._sum, self._squares], "pending": dict(self.pending)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Rewards:
        """Inverse of `to_dict`."""
        rewards = cls()
        rewards.count, rewards._sum, rewards._squares = data["rewards"]
        rewards.pending.update(data["pending"])
        return rewards
