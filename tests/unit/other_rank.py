"""The first rank of two, of which a test plays the other."""

from __future__ import annotations

from vllm_like import like

from rollspec.head.ranks import Ranks


class Others(Ranks):
    """The first rank of two; what the other one gives is set by the test."""

    def __init__(self) -> None:
        super().__init__(group=like("vllm.distributed.parallel_state:GroupCoordinator", is_first_rank=True))
        self.other = 2

    def least(self, value: int) -> int:
        return min(value, self.other)
