"""Gumbel-coupled drafting: the learned drafter draws its tokens with the noise that the target will draw with.

Under `mode: coupled` a token is argmax(logits / T + noise), so a drafter that takes the argmax of its own logits and
the same noise agrees with it as far as their laws do: the chance is at least (1 - d) / (1 + d), d being their total
variation, and 1 where they are equal (Daliri et al., arXiv:2408.07978). A greedy draft is accepted with the target's
probability of it, at best max p. Drafts stay one-hot: nothing of the drafter's law has to be kept or sent.

    noise.begin(req_ids, lengths, sampling_metadata)    # before the proposer's passes
    tokens, probs = noise.draw(logits)                  # at each pass, in order
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rollspec.engine.vllm.coupled import CoupledSampler
from rollspec.engine.vllm.noise_keys import GREEDY
from rollspec.sampling.noise import Ints, Words


class SharedNoise:
    """Draws the drafts of one worker's learned drafter. Which token is drafted never changes what is sampled.

    Args:
        coupled: the sampler of the target, whose keys are used.
    """

    def __init__(self, coupled: CoupledSampler) -> None:
        self._coupled = coupled
        self._step: tuple[Words, Ints, Any] | None = None  # keys, next positions, sampling metadata of this step
        self._begun: tuple[Words, Ints, Any] | None = None  # the same as the passes began

    def begin(self, req_ids: Sequence[str], lengths: Sequence[int], sampling: Any) -> None:
        """A step's passes begin.

        Args:
            req_ids: requests by row. lengths: tokens of each so far, prompt included: the position that is drafted
                first. sampling: vLLM's metadata of the same rows.
        """
        self._step = self._begun = None
        if not self._coupled.on or sampling.all_greedy:
            return
        keys = np.array([self._coupled.streams.keys[r] for r in req_ids], dtype=np.uint64)
        self._step = self._begun = keys, np.array(lengths, dtype=np.int64), sampling

    def again(self) -> None:
        """The step's passes begin again, with another drafter."""
        self._step = self._begun

    def draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """One token per row [n, vocab], and the drafter's probability of it; None where drafts are greedy now."""
        if self._step is None:
            return None
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        keys, positions, sampling = self._step
        temperature = sampling.temperature
        greedy = temperature < GREEDY
        scores = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
        most = scores.argmax(-1) if not sampling.all_random else None
        if sampling.top_k is not None or sampling.top_p is not None:
            scores = apply_top_k_top_p(scores, sampling.top_k, sampling.top_p)
        tokens = self._coupled.sample(scores, keys, positions)
        if most is not None:
            tokens = torch.where(greedy, most, tokens)
        probs = (scores.gather(-1, tokens[:, None])[:, 0] - scores.logsumexp(-1)).exp()
        self._step = keys, positions + 1, sampling
        return tokens, probs
