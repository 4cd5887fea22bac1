"""Are the rollouts what the trainer takes them for: draws of its policy, and independent of the last epoch's?

`agreement` compares the engine's log-probs with the trainer's. `overlap` compares responses with those of the same
prompt and sample number an epoch ago, which share their first tokens as often as `chance` says if randomness is fresh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rollspec.proposal.base import TokenArray

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]

BAND = (0.8, 1.25)
"""Importance ratios that count as agreement: within a quarter, either way (PPO's usual clip range is 0.2)."""

_LARGEST = 700.0  # exp of more than this overflows


@dataclass(frozen=True, slots=True)
class Agreement:
    """Engine against trainer over the sampled tokens of one step."""

    gap: float  # mean |log p_engine - log p_trainer|, nats; NaN if one log-prob is
    corr: float | None  # Pearson's, of the probabilities; None where one side is constant or a log-prob is not finite
    ess_token: float | None  # effective sample size of the tokens' weights over their number, (0, 1]
    ess_sequence: float | None  # the same of the responses' weights, whose logarithms are sums over tokens
    outside: float | None  # share of tokens whose ratio is outside `BAND`
    ratio_max: float | None  # of a token
    not_finite: int  # log-probs, of either side; their tokens are in none of the above but gap


def agreement(engine: Sequence[FloatArray], trainer: Sequence[FloatArray]) -> Agreement | None:
    """Compare log-probs, one array [tokens] per response on either side; None where there is nothing to compare."""
    lengths = [len(e) for e in engine]
    if sum(lengths) < 2 or lengths != [len(t) for t in trainer]:
        return None
    p = np.concatenate(engine).astype(np.float64)  # [tokens]
    q = np.concatenate(trainer).astype(np.float64)  # [tokens]
    known_p, known_q = np.isfinite(p), np.isfinite(q)
    known = known_p & known_q  # [tokens]
    with np.errstate(invalid="ignore"):  # inf - inf
        gap = float(np.abs(p - q).mean())
    lost = int(p.size - known_p.sum() + q.size - known_q.sum())
    if not known.any():
        return Agreement(gap, None, None, None, None, None, lost)
    log_ratio = np.where(known, q, 0.0) - np.where(known, p, 0.0)  # [tokens]; 0 where unknown
    row = np.repeat(np.arange(len(lengths)), lengths)  # [tokens] -> response
    sums = np.bincount(row, log_ratio, len(lengths)).astype(np.float64)  # [responses]
    whole = np.asarray(lengths) > 0
    whole[row[~known]] = False
    largest = float(log_ratio[known].max())
    away = (log_ratio < np.log(BAND[0])) | (log_ratio > np.log(BAND[1]))
    return Agreement(
        gap=gap,
        corr=None if lost else _correlation(np.exp(p), np.exp(q)),
        ess_token=effective_sample_size(log_ratio[known]),
        ess_sequence=effective_sample_size(sums[whole]) if whole.any() else None,
        outside=float(away[known].mean()),
        ratio_max=float(np.exp(min(largest, _LARGEST))),
        not_finite=lost,
    )


def effective_sample_size(log_weights: FloatArray) -> float:
    """Kish's (sum w)^2 / (n sum w^2) of the weights exp(`log_weights`) [n], n >= 1."""
    w = np.exp(log_weights - log_weights.max())  # [n], the largest is 1
    return float(w.sum() ** 2 / (w.size * (w @ w)))


@dataclass(frozen=True, slots=True)
class Overlap:
    """Responses against those of an epoch ago, of which the share `identical` is equal.

    `shared`: share of tokens in a prefix in common with the old response. `chance`: what it would be on average for a
    second, independent draw from the present policy; None without log-probs.
    """

    shared: float
    identical: float
    chance: float | None


def overlap(
    new: Sequence[TokenArray], old: Sequence[TokenArray], logprobs: Sequence[FloatArray] | None = None
) -> Overlap | None:
    """Compare each response with its old one; None where there is none. `logprobs`: [tokens] of each under the policy.

    The chance that an independent draw repeats the first k tokens is exp(sum of their log-probs), so the expected
    length of the prefix in common is the sum of that over k.
    """
    tokens = sum(map(len, new))
    if not tokens:
        return None
    shared = [_prefix(a, b) for a, b in zip(new, old, strict=True)]
    identical = [n == len(a) == len(b) for n, a, b in zip(shared, new, old, strict=True)]
    chance: float | None = None
    if logprobs is not None:
        chance = sum(float(np.exp(np.cumsum(x, dtype=np.float64)).sum()) for x in logprobs) / tokens
    return Overlap(sum(shared) / tokens, sum(identical) / len(new), chance)


def _prefix(a: TokenArray, b: TokenArray) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def _correlation(p: FloatArray, q: FloatArray) -> float | None:
    if not (p.std() > 0 and q.std() > 0):
        return None
    return float(np.corrcoef(p, q)[0, 1])
