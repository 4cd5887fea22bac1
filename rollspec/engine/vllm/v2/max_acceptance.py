"""Measures the largest acceptance rate that a one-hot drafter could have: the mean of max p over emitted tokens.

A one-hot draft x is accepted with probability p(x), at most max p. Once in `EVERY` steps the rows of a few requests are
read before they are sampled, by the processed logits that they are sampled from, and counted where they became tokens.
Nothing is changed; batches that are cut by top-k or top-p after this are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger("rollspec")

EVERY = 64
"""Steps between two looks."""

ROWS = 64
"""Most rows of logits looked at in one step: a vocabulary of 150,000 makes a row half a megabyte."""


class MaxAcceptance:
    """Looks at a few requests' rows once in `EVERY` steps; `sums` = [sum of max p, rows].

    Args:
        runner: the model runner.
        drafted: how many drafts a request verifies in this step.
    """

    def __init__(self, runner: Any, drafted: Callable[[str], int]) -> None:
        self.sums = [0.0, 0.0]
        self._states = runner.sampler.sampling_states
        self._names = runner.req_states.index_to_req_id
        self._drafted = drafted
        self._wait = 0
        self._off = False
        self._look: tuple[list[int], list[float]] | None = None

    def process(
        self, apply: Callable[..., torch.Tensor], logits: torch.Tensor, slots: torch.Tensor, each: torch.Tensor,
        each_np: Any, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Around `Sampler.apply_sampling_params`; `slots`: of each row, `each`, `each_np`: of each request."""
        out = apply(logits, slots, each, each_np, *args, **kwargs)
        self._wait -= 1
        if not self._off and self._wait < 0:
            self._look = self._guarded(self._largest, out, slots, each_np, bool(kwargs.get("skip_top_k_top_p")))
        return out

    def sample(self, sample: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around `GPUModelRunner.sample`: how many of the rows became tokens."""
        self._look = None
        out = sample(*args, **kwargs)
        if self._look is not None:
            self._wait = EVERY - 1
            self._guarded(self._count, self._look, out[1])
        return out

    def _largest(
        self, logits: torch.Tensor, slots: torch.Tensor, each: Any, cut_later: bool
    ) -> tuple[list[int], list[float]] | None:
        s = self._states
        if cut_later and ((s.top_k.np[each] != s.vocab_size).any() or (s.top_p.np[each] != 1.0).any()):
            return None
        names = [self._names.get(i) for i in each.tolist()]
        if None in names:
            return None  # a dummy batch
        rows = [1 + self._drafted(str(r)) for r in names]
        if sum(rows) != len(logits):
            return None
        while rows and sum(rows) > ROWS:
            rows.pop()
        if not rows:
            return None
        chosen = logits[: sum(rows)].float()
        largest = (chosen.max(-1).values - chosen.logsumexp(-1)).exp()
        greedy = self._states.temperature.gpu[slots[: len(chosen)]] == 0.0
        return rows, torch.where(greedy, 1.0, largest).tolist()

    def _count(self, look: tuple[list[int], list[float]], emitted: torch.Tensor) -> None:
        rows, largest = look
        at = 0
        for n, count in zip(rows, emitted.tolist(), strict=False):
            self.sums[0] += sum(largest[at : at + min(count, n)])
            self.sums[1] += min(count, n)
            at += n

    def _guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        try:
            return work(*args)
        except Exception as e:  # a measurement must not end a job
            self._off = True
            logger.warning("rollspec: the largest possible acceptance is not measured (%s: %s).", type(e).__name__, e)
            return None
