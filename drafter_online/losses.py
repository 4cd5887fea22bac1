"""The terms of the drafter's loss: pure functions of logits, one value per position, each with its source.

p is the target's distribution and q the drafter's; `z` are q's logits over the drafter's vocabulary [N, V]. Where p is
known over that vocabulary it is given by its logits `t` [N, V]. Where the engine kept only the k largest logits and
their log-sum-exp, both distributions are reduced to k + 1 events, the last being "any other token": a lower bound of
the divergence (data-processing inequality), equal to it when k is the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_TINY = 1e-7  # smallest probability of "any other token"
REWARD_WEIGHTS = (0.2, 5.0)  # the smallest and the largest


def forward_kl(z: Tensor, t: Tensor) -> Tensor:
    """KL(p‖q) [...]: distillation on the states the target visits.

    Source: Online Speculative Decoding (arXiv 2310.07177), eq. 3 with forward KL; the acceptance term of Aurora
    (arXiv 2602.06932); `speculators.losses.eager.kl_div_loss`.
    """
    log_p = t.log_softmax(-1)
    p = log_p.exp()
    # Dot products: nothing of the size of the logits is kept for them.
    return torch.linalg.vecdot(p, log_p) - torch.linalg.vecdot(p, z.log_softmax(-1))  # type: ignore[no-any-return]


def _library(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(z: Tensor, t: Tensor) -> Tensor:
        from speculators.losses import eager

        return getattr(eager, name)(z[None], t[None])[0]  # type: ignore[no-any-return]

    return loss


OBJECTIVES = {
    "kl": forward_kl,
    "top1": _library("ce_loss"),
    "lk_hybrid": _library("lk_hybrid_loss"),
}
"""Divergences on emitted tokens, [N] from `z` and `t`; all but the first are those of `speculators.losses.eager`.

    top1       -log q(argmax p): greedy drafts are accepted with probability p(argmax q) (EAGLE-3, arXiv 2503.01840)
    lk_hybrid  `kl` and the total variation, 1 - sum min(p, q), which is the rejection probability of sampled drafts:
               the more of it the more overlaps (LK losses, arXiv 2602.23881)
"""


def truncated(z: Tensor, ids: Tensor, logits: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """log p [..., k + 1] without gradient and log q [..., k + 1], over the k tokens the engine kept and any other.

    Args:
        z: the drafter's logits [..., V].
        ids: the kept tokens' indices in the drafter's vocabulary [..., k]; -1 where it has no such token: both logs are
            -inf there, and its mass joins "any other".
        logits, logsumexp: the target's [..., k] (-inf where nothing was kept), and over its whole vocabulary [...].
    """
    known = (ids >= 0) & logits.isfinite()
    log_p = (logits - logsumexp.unsqueeze(-1)).masked_fill(~known, -math.inf).detach()
    log_q = z.log_softmax(-1).gather(-1, ids.clamp_min(0)).masked_fill(~known, -math.inf)
    rest_p = (1.0 - log_p.exp().sum(-1, keepdim=True)).clamp_min(_TINY).log()
    rest_q = (1.0 - log_q.exp().sum(-1, keepdim=True)).clamp_min(_TINY).log()
    return torch.cat([log_p, rest_p], -1), torch.cat([log_q, rest_q], -1)


def divergence(log_a: Tensor, log_b: Tensor) -> Tensor:
    """sum a (log a - log b) [...]; events that are impossible under both (-inf) add nothing and have no gradient.

    Of `truncated`, KL(p‖q) is what the target says where it rejected a proposal (Aurora, arXiv 2602.06932, discard
    sampling).
    """
    possible = log_a.isfinite() & log_b.isfinite()
    a, b = log_a.masked_fill(~possible, 0.0), log_b.masked_fill(~possible, 0.0)
    return (a.exp() * (a - b)).masked_fill(~possible, 0.0).sum(-1)


def reward_weights(rewards: Tensor, mean: float, std: float, beta: float) -> Tensor:
    """w(r) [N]: how much a rewarded rollout counts, 1 for one whose reward is not known (NaN).

    w = exp(beta (r - mean) / std), divided by its average over the known ones and clipped to `REWARD_WEIGHTS`. 1 where
    beta or std is 0.

    Source: ReSpec (arXiv 2510.26475): distillation weighted by the rollout's reward, so that the drafter follows the
    policy to where it is going.
    """
    known = rewards.isfinite()
    if std <= 0 or beta == 0 or not bool(known.any()):
        return torch.ones_like(rewards)
    w = (beta * (rewards - mean) / std).clamp(-20.0, 20.0).exp()
    w = w / w[known].mean()
    return torch.where(known, w.clamp(*REWARD_WEIGHTS), torch.ones_like(w))
