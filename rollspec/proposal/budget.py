"""How many of the proposed tokens are worth verifying in a step.

The step emits one token per request plus the accepted ones, and takes T(n). Goodput (B + Σ p)/T(B + m) over the
chosen m tokens is largest for the m likeliest: they are taken in falling order of cumulative acceptance probability
until the next one would lower it (SmartSpec arXiv:2406.14066; TETRIS arXiv:2502.15197). A chain's probabilities never
rise, so each request keeps a prefix.

Exact for one-hot proposals and coupled sampling only: with sampled drafts a decision that looks at the drawn token
biases the law.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollspec.tuning.cost import CostModel


def floor(batch: int, cost: CostModel) -> float:
    """Acceptance probability below which no token can be worth verifying at this batch size.

    A token raises goodput only if its p exceeds c1 times the goodput without it, and that is at least what the step
    reaches without any draft, B/T(B).
    """
    return cost.c1 * batch / cost.seconds(batch)


def allocate(chains: Sequence[Sequence[float]], tokens: int, cost: CostModel) -> list[int]:
    """Draft length per request that maximises expected emitted tokens per second.

    Args:
        chains: per request, cumulative acceptance probabilities along its chain (non-increasing; possibly empty).
        tokens: tokens the step computes without any draft (one per request).
        cost: predicts the step's duration.

    Returns:
        Tokens to keep of each chain, same order.
    """
    flat = np.fromiter((p for chain in chains for p in chain), dtype=np.float64)
    if flat.size == 0:
        return [0] * len(chains)
    flat[::-1].sort()
    emitted = len(chains) + np.cumsum(flat)
    seconds = cost.c0 + cost.c1 * (tokens + np.arange(1, flat.size + 1))
    rate = emitted / seconds
    best = int(rate.argmax())
    if rate[best] <= len(chains) / cost.seconds(tokens):
        return [0] * len(chains)
    threshold = float(flat[best])
    lengths = []
    left = best + 1  # ties at the threshold: no more than were counted
    for chain in chains:
        n = 0
        for p in chain:
            if p < threshold or left == 0:
                break
            n += 1
            left -= 1
        lengths.append(n)
    return lengths
