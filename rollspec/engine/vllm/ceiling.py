"""Measures what no draft can beat: the mean largest probability of the target over the tokens that were emitted.

A one-hot draft x is accepted with probability p(x), which is at most max p. In the first step that can be judged, and
in one every so many after it, the rows of a few requests are looked at before they are sampled; which of them became
tokens is known after. Nothing is changed.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from rollspec.engine.vllm.hooks import runner_v1 as v1

logger = logging.getLogger("rollspec")

EVERY = 64
"""Steps between two looks."""

ROWS = 64
"""Most rows of logits looked at in one step: a vocabulary of 150,000 makes a row half a megabyte."""


class Ceiling:
    """Wraps a model runner's `_sample` (vllm/v1/worker/gpu_model_runner.py) and adds to `sums` = [sum of max p, rows].

    Batches with top-k, top-p, min-p, penalties or bad words are left out: there max p is that of another distribution
    than the logits'.
    """

    def __init__(self, runner: Any) -> None:
        self.sums = [0.0, 0.0]
        self._runner = runner
        self._wait = 0
        self._off = False
        sample = runner._sample

        @functools.wraps(sample)
        def observed(logits: Any, spec_decode_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            look = None
            self._wait -= 1
            if not self._off and self._wait < 0 and logits is not None:
                look = self._guarded(self._look, logits, spec_decode_metadata)
                if look is not None:
                    self._wait = EVERY - 1
            output = sample(logits, spec_decode_metadata, *args, **kwargs)
            if look is not None:
                self._guarded(self._count, look, output.sampled_token_ids)
            return output

        v1.Sample.put(runner, observed, __name__)

    def _guarded(self, work: Any, *args: Any) -> Any:
        try:
            return work(*args)
        except Exception as e:  # a measurement must not end a job
            self._off = True
            logger.warning("rollspec: the acceptance ceiling is not measured (%s: %s).", type(e).__name__, e)
            return None

    def _look(self, logits: torch.Tensor, metadata: Any) -> tuple[list[int], list[float]] | None:
        sampling = self._runner.input_batch.sampling_metadata
        if (
            sampling.temperature is None
            or sampling.top_k is not None
            or sampling.top_p is not None
            or not sampling.no_penalties
            or sampling.bad_words_token_ids
            or sampling.allowed_token_ids_mask is not None
            or any(getattr(p, "min_p_count", 0) for p in sampling.logitsprocs.argmax_invariant)
        ):
            return None
        # A request has one row per draft token and one more, in order.
        each = [n + 1 for n in metadata.num_draft_tokens] if metadata is not None else [1] * len(logits)
        count = 0
        while count < len(each) and sum(each[: count + 1]) <= ROWS:
            count += 1
        each = each[:count]
        if not each:
            return None
        rows = logits[: sum(each)].float()
        temperature = torch.repeat_interleave(
            sampling.temperature[:count].float().to(rows.device), torch.tensor(each, device=rows.device)
        )
        greedy = temperature < 1e-5
        scaled = rows / torch.where(greedy, torch.ones_like(temperature), temperature)[:, None]
        largest = (scaled.max(-1).values - scaled.logsumexp(-1)).exp()
        return each, torch.where(greedy, torch.ones_like(largest), largest).tolist()

    def _count(self, look: tuple[list[int], list[float]], sampled: torch.Tensor) -> None:
        each, largest = look
        emitted = (sampled[: len(each)] >= 0).sum(1).tolist()
        at = 0
        for n, said in zip(each, emitted, strict=True):
            self.sums[0] += sum(largest[at : at + min(said, n)])
            self.sums[1] += min(said, n)
            at += n
