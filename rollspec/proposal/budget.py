"""How many of the proposed tokens are worth verifying in a step.

Goodput (B + Σ p)/T(B + m) over the chosen m tokens is largest for the m likeliest: they are taken in falling order of
cumulative acceptance probability until the next one would lower it (SmartSpec arXiv:2406.14066; TETRIS
arXiv:2502.15197). A draft's probabilities never rise, so each request keeps a prefix. Tokens of requests that are
expected to run long may count for more (DAS arXiv:2511.13841).

Selection trap: with *sampled* drafts a token may not be dropped by looking at the token itself, its q(x) included: what
is kept is then no longer distributed as q. One-hot proposals and coupled sampling are exact under any rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rollspec.tuning.cost import CostModel


def floor(batch: int, cost: CostModel, context_tokens: float = 0.0, margin: float = 0.0) -> float:
    """Acceptance probability below which no token can be worth verifying at this batch size.

    A token raises goodput only if its p exceeds what it costs times the goodput without it; it costs at least the
    lowest slope of the step's curve, and the goodput is at least what the step reaches without any draft, B/T(B).
    `margin`: as `allocate` takes it.
    """
    return (1.0 + margin) * cost.slope(batch) * batch / cost.seconds(batch, context_tokens)


def allocate(
    drafts: Sequence[Sequence[float]],
    tokens: int,
    cost: CostModel,
    context_tokens: float = 0.0,
    weights: Sequence[float] | None = None,
    copies: float = 1.0,
    margin: float = 0.0,
    least: float = 0.0,
) -> list[int]:
    """Draft length per request that maximises expected (weighted) emitted tokens per second.

    `drafts`: per request, cumulative acceptance probabilities along its draft. `tokens`: what the step computes without
    any. `weights`: what a token of each request counts. `copies`: requests that each draft stands for, in a sample.
    `margin`: by how much more than their predicted price drafts have to pay. `least`: by how much the step has to be
    faster per token, or nothing is verified.
    """
    counts = [1.0] * len(drafts) if weights is None else weights
    flat = np.array([w * p for w, draft in zip(counts, drafts, strict=True) for p in draft])
    base = copies * sum(counts)
    if not flat.size:
        return [0] * len(drafts)
    flat[::-1].sort()
    curve = cost.curve(tokens, math.ceil(copies * flat.size), context_tokens)
    seconds = curve[(copies * np.arange(flat.size + 1)).astype(int)]
    seconds = seconds + margin * (seconds - seconds[0])
    rate = (base + copies * np.cumsum(flat)) / seconds[1:]
    best = int(rate.argmax())
    if rate[best] <= (1.0 + least) * base / seconds[0]:
        return [0] * len(drafts)
    threshold = float(flat[best])
    ties = best + 1 - int((flat > threshold).sum())  # tokens that are worth as much as the last one, as were counted
    lengths = []
    for w, draft in zip(counts, drafts, strict=True):
        n = 0
        for p in draft:
            if w * p < threshold or (w * p == threshold and not ties):
                break
            n += 1
            ties -= w * p == threshold
        lengths.append(n)
    return lengths


def likeliest(drafts: Sequence[Sequence[float]], capacity: int) -> list[int]:
    """Draft length per request by TETRIS (arXiv:2502.15197): the `capacity` tokens of the whole batch that are
    likeliest to be accepted, by cumulative probability. Ties go to the request that comes first.
    """
    ranked = sorted((-p, i, n) for i, draft in enumerate(drafts) for n, p in enumerate(draft))
    lengths = [0] * len(drafts)
    for _, i, _ in ranked[: max(capacity, 0)]:
        lengths[i] += 1
    return lengths
