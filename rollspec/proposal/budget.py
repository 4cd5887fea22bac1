"""How many of the proposed tokens are worth verifying in a step.

The step emits one token per request plus the accepted ones, and takes T(n). Goodput (B + Σ p)/T(B + m) over the
chosen m tokens is largest for the m likeliest: they are taken in falling order of cumulative acceptance probability
until the next one would lower it (SmartSpec arXiv:2406.14066; TETRIS arXiv:2502.15197). A draft's probabilities never
rise, so each request keeps a prefix. Tokens of requests that are expected to run long may count for more (DAS
arXiv:2511.13841): they are what the rollout waits for.

Selection trap: with *sampled* drafts a token may not be dropped by looking at the token itself, its q(x) included: what
is kept is then no longer distributed as q, and the acceptance test is biased. For those, give probabilities that were
known before the tokens were drawn. One-hot proposals and coupled sampling are exact under any rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rollspec.tuning.cost import CostModel


def floor(batch: int, cost: CostModel, context_tokens: float = 0.0) -> float:
    """Acceptance probability below which no token can be worth verifying at this batch size.

    A token raises goodput only if its p exceeds what it costs times the goodput without it; it costs at least the
    lowest slope of the step's curve, and the goodput is at least what the step reaches without any draft, B/T(B).
    """
    return cost.slope(batch) * batch / cost.seconds(batch, context_tokens)


SVIP_BOUND = 0.7
"""Of SVIP, in sqrt(nats): a choice between two tokens is unsure where the likelier has less than about 0.8."""

SPECDEC_RISK = 0.7
"""Of SpecDec++: the chance that any token of a draft is rejected, beyond which it is not continued."""


def allocate(
    drafts: Sequence[Sequence[float]],
    tokens: int,
    cost: CostModel,
    context_tokens: float = 0.0,
    weights: Sequence[float] | None = None,
    copies: float = 1.0,
    most: int | None = None,
) -> list[int]:
    """Draft length per request that maximises expected (weighted) emitted tokens per second.

    Args:
        drafts: per request, cumulative acceptance probabilities along its draft (non-increasing; possibly empty).
        tokens: tokens the step computes without any draft (one per request).
        cost: predicts the step's duration.
        context_tokens: of the batch.
        weights: what a token of each request counts; 1 for all where None.
        copies: each draft stands for this many requests (a sample of the batch).
        most: draft tokens that the whole step may verify; None for no bound.

    Returns:
        Tokens to keep of each draft, same order.
    """
    if weights is None:
        flat = np.fromiter((p for draft in drafts for p in draft), dtype=np.float64)
        base = copies * len(drafts)
    else:
        flat = np.fromiter((w * p for w, draft in zip(weights, drafts, strict=True) for p in draft), dtype=np.float64)
        base = copies * sum(weights)
    if flat.size == 0:
        return [0] * len(drafts)
    flat[::-1].sort()
    if most is not None:
        flat = flat[: max(0, int(most / copies))]
        if not flat.size:
            return [0] * len(drafts)
    if copies == 1.0:
        seconds = cost.curve(tokens, flat.size, context_tokens)
    else:
        seconds = cost.curve(tokens, math.ceil(copies * flat.size), context_tokens)[
            (copies * np.arange(flat.size + 1)).astype(int)
        ]
    rate = (base + copies * np.cumsum(flat)) / seconds[1:]
    best = int(rate.argmax())
    if rate[best] <= base / seconds[0]:
        return [0] * len(drafts)
    threshold = float(flat[best])
    lengths = []
    left = best + 1  # ties at the threshold: no more than were counted
    for i, draft in enumerate(drafts):
        w = 1.0 if weights is None else weights[i]
        n = 0
        for p in draft:
            if w * p < threshold or left == 0:
                break
            n += 1
            left -= 1
        lengths.append(n)
    return lengths


def likeliest(drafts: Sequence[Sequence[float]], capacity: int) -> list[int]:
    """Draft length per request by TETRIS (arXiv:2502.15197): the `capacity` tokens of the whole batch that are
    likeliest to be accepted, by cumulative probability, whatever verifying them costs.

    A draft's probabilities never rise, so each request keeps a prefix. Ties go to the request that comes first.
    """
    ranked = sorted((-p, i, n) for i, draft in enumerate(drafts) for n, p in enumerate(draft))
    lengths = [0] * len(drafts)
    for _, i, _ in ranked[: max(capacity, 0)]:
        lengths[i] += 1
    return lengths


def svip_cut(probs: Sequence[float], threshold: float = SVIP_BOUND) -> int:
    """Tokens to keep under SVIP's entropy bound (arXiv:2411.18462): stop where √H of the drafter's next-token
    distribution exceeds `threshold`.

    A corpus knows the frequency f of its choice only, so H is that of {f, 1 - f}: the least it can be.
    `probs`: cumulative probabilities.
    """
    before = 1.0
    for n, p in enumerate(probs):
        f = min(max(p / before, 0.0), 1.0) if before > 0 else 0.0
        entropy = -sum(x * math.log(x) for x in (f, 1.0 - f) if x > 0)
        if f < 0.5:  # an unlikely choice is unsure, however little its complement says
            entropy = max(entropy, math.log(2.0))
        if math.sqrt(entropy) > threshold:
            return n
        before = p
    return len(probs)


def specdec_cut(probs: Sequence[float], threshold: float = SPECDEC_RISK) -> int:
    """Tokens to keep under SpecDec++ (arXiv:2405.19715, §3): stop where the chance that any token so far is rejected,
    1 - Π p, exceeds `threshold`. `probs`: cumulative probabilities.
    """
    for n, p in enumerate(probs):
        if 1.0 - p > threshold:
            return n
    return len(probs)
