"""Coupled verification on the V2 runner: a draft is accepted while it is the token that the plain sampler would draw.

The runner draws by Gumbel noise that is a function of (seed of the request, position, token)
(vllm/v1/worker/gpu/sample/gumbel.py), so without drafts it is a coupled sampler already; only its verification throws
the coupling away. Here every row of a verify step draws the token that it would have drawn as a step of its own, from
the same processed logits and the same noise:

    row          0     1     2     3        position p .. p + 3, fed the last token and three drafts
    draft        a     b     c              b is what row 0 should draw, ...
    drawn        a     b     x     .        a, b accepted, x emitted, row 3 ignored

A one-hot draft d is accepted with the target's probability of d, as by rejection sampling. The texts are the same
whether or not anything was drafted, and a request's `seed` means one text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rollspec.head.ranks import Ranks

ARGUMENTS = (
    "logits", "draft_logits", "draft_sampled", "pos", "cu_num_logits", "idx_mapping", "idx_mapping_np",
    "expanded_idx_mapping", "expanded_local_pos", "seq_lens_upper_bound_np", "verify_draft_sampled",
)  # fmt: skip
"""Of `RejectionSampler._verify`, in order."""


def verify(sampler: Any, num_speculative_steps: int, given: dict[str, Any]) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """In the place of `RejectionSampler._verify` (vllm/v1/worker/gpu/spec_decode/rejection_sampler.py).

    Args:
        sampler: vLLM's `Sampler`, which holds temperatures, seeds and processors by request slot.
        given: the arguments of `_verify` by name; rows are those of all requests, one after the other.

    Returns:
        processed logits [rows, vocab], tokens [requests, k + 1] and how many of them each request emits [requests].
    """
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    slots, pos = given["expanded_idx_mapping"], given["pos"]
    processed = sampler.apply_sampling_params(
        given["logits"],
        slots,
        given["idx_mapping"],
        given["idx_mapping_np"],
        pos,
        given["draft_sampled"],
        given["expanded_local_pos"],
        given["seq_lens_upper_bound_np"],
    )
    states = sampler.sampling_states
    drawn = gumbel_sample(
        processed,
        slots,
        states.temperature.gpu,
        states.seeds.gpu,
        pos,
        apply_temperature=False,
        is_drafting=False,
        use_fp64=sampler.use_fp64_gumbel,
    )  # [rows]
    return processed, *accept(drawn, given["verify_draft_sampled"], given["cu_num_logits"], num_speculative_steps)


def accept(
    drawn: torch.Tensor, fed: torch.Tensor, starts: torch.Tensor, num_speculative_steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each request emits: drafts while they are what was drawn, and the token drawn after them.

    Args:
        drawn: token that each row draws, [rows].
        fed: token that each row is fed, [rows]: its request's last one, then the drafts; -1 is never accepted.
        starts: first row of each request, and the number of rows, [requests + 1].

    Returns:
        tokens [requests, k + 1], of which the first `count` [requests] int32 are emitted.
    """
    steps = torch.arange(num_speculative_steps + 1, device=drawn.device)
    rows = starts[:-1, None].long() + steps  # [requests, k + 1]
    last = len(drawn) - 1
    tokens = drawn[rows.clamp(max=last)]
    next_is_draft = rows + 1 < starts[1:, None]
    agree = (tokens == fed[(rows + 1).clamp(max=last)]) & next_is_draft
    count = 1 + agree.long().cumprod(1).sum(1)
    return tokens, count.to(torch.int32)


class Verification:
    """How one runner's verify steps choose: coupled where `coupled` says so or a request has a seed, else vLLM's.

    Args:
        rejection_sampler: the runner's, whose `_verify` this wraps.
        coupled: whether all requests are to be coupled now.
        failed: called with a fault; from then on vLLM verifies, by the same distribution, with noise that depends on
            the drafts.
        ranks: that verify the same.
    """

    def __init__(
        self, rejection_sampler: Any, coupled: Callable[[], bool], failed: Callable[[BaseException], None], ranks: Ranks
    ) -> None:
        self.sampler = rejection_sampler.sampler
        self.k = int(rejection_sampler.num_speculative_steps)
        self.broken = False
        self._coupled = coupled
        self._failed = failed
        self._ranks = ranks

    def around(self, standard: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around `RejectionSampler._verify`."""
        given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        # The engine's one-hot drafts alone: drafts drawn from a distribution need rejection sampling to be exact.
        if given["draft_logits"] is not None or self.broken:
            return standard(*args, **kwargs)
        if not (self._coupled() or self.sampler.sampling_states.any_explicit_seed(given["idx_mapping_np"])):
            return standard(*args, **kwargs)
        error, out = None, None
        try:
            out = verify(self.sampler, self.k, given)
        except Exception as e:  # nothing was drawn yet, and the logits are as the model left them
            error = e
        # All ranks switch to vLLM's verification at the same step, or their texts would differ.
        if self._ranks.least(int(error is None)):
            return out
        self.broken = True
        self._failed(error or RuntimeError("it failed on another rank of the engine"))
        return standard(*args, **kwargs)
