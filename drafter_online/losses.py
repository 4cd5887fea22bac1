"""The terms of the drafter's loss: pure functions of logits, one value per position, each with its source.

p is the target's distribution and q the drafter's; `z` are q's logits over the drafter's vocabulary [..., V]. Where p
is known over that vocabulary it is given by its logits `t` [..., V], as `speculators` does (`losses/eager.py`: what is
in common has the same values, which a test checks). Where the engine kept only the k largest logits and their
log-sum-exp, both distributions are reduced to k + 1 events, the last being "any other token": a lower bound of the
divergence (data-processing inequality), equal to it when k is the vocabulary.

All functions keep the dtype they are given, so that their gradients can be checked in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_TINY = 1e-7  # smallest probability of "any other token"
_LEAST_OVERLAP = 1e-5  # as speculators' neg_log_acceptance_loss


def forward_kl(z: Tensor, t: Tensor) -> Tensor:
    """KL(p‖q) [...]: distillation on the states the target visits.

    Source: Online Speculative Decoding (arXiv 2310.07177), eq. 3 with forward KL; the acceptance term of Aurora
    (arXiv 2602.06932); `speculators.losses.eager.kl_div_loss`.
    """
    log_p = t.log_softmax(-1)
    p = log_p.exp()
    # Dot products: nothing of the size of the logits is kept for them.
    return torch.linalg.vecdot(p, log_p) - torch.linalg.vecdot(p, z.log_softmax(-1))  # type: ignore[no-any-return]


def top1(z: Tensor, t: Tensor) -> Tensor:
    """-log q(argmax p) [...]: for engines that draft greedily. A draft is then accepted with probability p(argmax q),
    which is largest where the two argmaxes agree.

    Source: EAGLE-3 (arXiv 2503.01840), its token loss; `speculators.losses.eager.ce_loss`.
    """
    return -z.log_softmax(-1).gather(-1, t.argmax(-1, keepdim=True)).squeeze(-1)


def overlap(z: Tensor, t: Tensor) -> Tensor:
    """sum_v min(p, q) [...]: the probability that a draft sampled from q is accepted.

    Source: Leviathan et al. (arXiv 2211.17192), corollary 3.6.
    """
    return torch.minimum(z.softmax(-1), t.softmax(-1)).sum(-1)


def total_variation(z: Tensor, t: Tensor) -> Tensor:
    """1 - sum_v min(p, q) [...]: the rejection probability itself, for sampled drafts.

    Source: DistillSpec (arXiv 2310.08461), section 4; `speculators.losses.eager.tv_loss`.
    """
    return 1.0 - overlap(z, t)


def log_acceptance(z: Tensor, t: Tensor) -> Tensor:
    """-log sum_v min(p, q) [...]: as total variation, with a gradient that does not vanish where little overlaps.

    Source: LK losses (arXiv 2602.23881); `speculators.losses.eager.neg_log_acceptance_loss`.
    """
    return -overlap(z, t).clamp_min(_LEAST_OVERLAP).log()


def lk_hybrid(z: Tensor, t: Tensor, eta: float = 3.0) -> Tensor:
    """lambda KL(p‖q) + (1 - lambda) TV(p, q), lambda = exp(-eta overlap) held constant [...].

    Source: LK losses (arXiv 2602.23881), hybrid objective; `speculators.losses.eager.lk_hybrid_loss`.
    """
    o = overlap(z, t)
    weight = (-eta * o.detach()).exp()
    return weight * forward_kl(z, t) + (1.0 - weight) * (1.0 - o)


OBJECTIVES = {
    "kl": forward_kl,
    "top1": top1,
    "tv": total_variation,
    "lk": log_acceptance,
    "lk_hybrid": lk_hybrid,
}


def truncated(z: Tensor, ids: Tensor, logits: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """log p and log q over k + 1 events: the k tokens the engine kept, and any other.

    Args:
        z: the drafter's logits [..., V].
        ids: the kept tokens' indices in the drafter's vocabulary [..., k]; -1 where it has no such token (its mass
            joins "any other"), or where nothing was kept.
        logits: the target's logits of them [..., k]; -inf where nothing was kept.
        logsumexp: the target's, over its whole vocabulary [...].

    Returns:
        log p [..., k + 1] without gradient and log q [..., k + 1]; both -inf where an id is -1.
    """
    known = (ids >= 0) & logits.isfinite()
    log_p = (logits - logsumexp.unsqueeze(-1)).masked_fill(~known, -math.inf).detach()
    log_q = z.log_softmax(-1).gather(-1, ids.clamp_min(0)).masked_fill(~known, -math.inf)
    rest_p = (1.0 - log_p.exp().sum(-1, keepdim=True)).clamp_min(_TINY).log()
    rest_q = (1.0 - log_q.exp().sum(-1, keepdim=True)).clamp_min(_TINY).log()
    return torch.cat([log_p, rest_p], -1), torch.cat([log_q, rest_q], -1)


def truncated_forward_kl(z: Tensor, ids: Tensor, logits: Tensor, logsumexp: Tensor) -> Tensor:
    """KL(p‖q) of `truncated` [...]: what the target says where it rejected a proposal.

    Source: Aurora (arXiv 2602.06932), discard sampling: the same divergence as on accepted tokens, in expectation over
    what was rejected, weighted by lambda.
    """
    log_p, log_q = truncated(z, ids, logits, logsumexp)
    return _divergence(log_p, log_q)


def truncated_reverse_kl(z: Tensor, ids: Tensor, logits: Tensor, logsumexp: Tensor) -> Tensor:
    """KL(q‖p) of `truncated` [...]: takes mass from tokens that the drafter proposes and the target does not.

    Source: Draft-OPD (arXiv 2605.29343): reverse KL on states that the drafter's own proposals reached, weighted by
    gamma^k for the k-th proposal after the error.
    """
    log_p, log_q = truncated(z, ids, logits, logsumexp)
    return _divergence(log_q, log_p)


def _divergence(log_a: Tensor, log_b: Tensor) -> Tensor:
    """sum a (log a - log b); events that are impossible under both (-inf) add nothing and have no gradient."""
    possible = log_a.isfinite() & log_b.isfinite()
    a, b = log_a.masked_fill(~possible, 0.0), log_b.masked_fill(~possible, 0.0)
    return (a.exp() * (a - b)).masked_fill(~possible, 0.0).sum(-1)


def reward_weights(
    rewards: Tensor, mean: float, std: float, beta: float = 1.0, clip: tuple[float, float] = (0.2, 5.0)
) -> Tensor:
    """w(r) [N]: how much a rewarded rollout counts, 1 for one whose reward is not known (NaN).

    w = exp(beta (r - mean) / std), divided by its average over the known ones and clipped.

    Source: ReSpec (arXiv 2510.26475): distillation weighted by the rollout's reward, so that the drafter follows the
    policy to where it is going.

    Args:
        rewards: [N], NaN where not known.
        mean: of rewards, over more than these N.
        std: of rewards; 0 gives weights of 1.
        beta: 0 gives weights of 1.
        clip: smallest and largest weight.
    """
    known = rewards.isfinite()
    if std <= 0 or beta == 0 or not bool(known.any()):
        return torch.ones_like(rewards)
    w = (beta * (rewards - mean) / std).clamp(-20.0, 20.0).exp()
    w = w / w[known].mean()
    return torch.where(known, w.clamp(*clip), torch.ones_like(w))


def step_decay(step: int, decay: float = 0.8) -> float:
    """decay^i for the i-th drafted token: later ones are reached less often.

    Source: EAGLE-3 (arXiv 2503.01840) and SpecForge train with 0.8^i; `speculators.losses.utils.exp_loss_decay`.
    """
    return float(decay**step)
