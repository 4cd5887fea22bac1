"""What a trainer's side measures of a step's rollouts, shared by the integrations, and one warning per kind when a
threshold of `telemetry.health` is crossed: are they draws of its policy, and independent of the last epoch's?

    watch = HealthWatch(config.telemetry.health, config.history.max_bytes)
    metrics = rollout_metrics(lengths, scores, engine_logprobs, trainer_logprobs)
    metrics |= watch.epochs(prompt_keys, samples, responses, engine_logprobs)
    metrics |= watch.check(metrics, step, suspects)
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rollspec.config import HealthConfig
from rollspec.proposal.base import TokenArray

logger = logging.getLogger("rollspec")

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]

PREFIX = "rollspec/health/"
BAND = (0.8, 1.25)
"""Importance ratios that count as agreement: within a quarter, either way (PPO's usual clip range is 0.2)."""
_LARGEST = 700.0  # exp of more than this overflows
LIMITS = {"gap": 0.1, "corr": 0.98, "ess": 0.9, "ess_sequence": 0.1, "ratios": 0.05}
"""Where rollouts begin to look off, by kind. Rounding alone lowers the effective sample size of whole responses as they
get longer, so that limit is far below that of tokens.
"""
_KINDS = {  # metric, the side on which it is usual, what to say
    "gap": ("logprob_gap", "at most", "engine and trainer differ by {:.3g} nats per token"),
    "corr": ("logprob_corr", "at least", "engine and trainer probabilities correlate at {:.4f} only"),
    "ess": ("ess_token", "at least", "the tokens' importance weights are worth {:.3f} of their number"),
    "ess_sequence": ("ess_sequence", "at least", "the responses' importance weights are worth {:.3f} of their number"),
    "ratios": ("ratio_outside", "at most",
               f"a share of {{:.3f}} of the importance ratios is outside {BAND[0]:g} to {BAND[1]:g}"),
}  # fmt: skip
_USUAL = {
    "lost": "the engine's sampler or the trainer's forward pass is broken, and what is learned from them too",
    "ratios": "usual causes are weights that did not reach the engine, other kernels or precision on the two sides, "
    "and a temperature or logits processor that the trainer does not know of",
    "overlap": "usual causes are the same seeds in both epochs and responses that are reused",
}


def rollout_metrics(
    lengths: Sequence[int],
    scores: Sequence[float],
    engine: Sequence[FloatArray] = (),
    trainer: Sequence[FloatArray] = (),
) -> dict[str, float]:
    """Mean reward, length quantiles, and whether engine and trainer agree about the sampled tokens.

    Args:
        lengths: tokens per response.
        scores: reward per response; NaN where there was none.
        engine: log-probs of the sampled tokens per response, by the engine that sampled them.
        trainer: the same tokens' by the trainer's model; left out where its shape differs.
    """
    out: dict[str, float] = {}
    rewards = np.asarray(scores, float)
    if np.isfinite(rewards).any():
        out["rollspec/reward/mean"] = float(np.nanmean(rewards))
    if len(lengths):
        for q in (50, 90, 99):
            out[f"rollspec/length/p{q}"] = float(np.percentile(lengths, q))
        out["rollspec/length/max"] = float(max(lengths))
    if len(engine):
        out[f"{PREFIX}nan_logprobs"] = int(np.isnan(np.concatenate(engine)).sum())
        if len(trainer):
            out |= agreement(engine, trainer)
    return out


def agreement(engine: Sequence[FloatArray], trainer: Sequence[FloatArray]) -> dict[str, float]:
    """Compare log-probs, one array [tokens] per response on either side; empty where there is nothing to compare.

    A NaN must show, not be averaged away: it is how a broken sampler looks. So `logprob_gap` is NaN where one log-prob
    is; what is not finite is counted in `logprob_lost` and is in no other metric. `ess_token`, `ess_sequence`:
    effective sample size of the importance weights of tokens and of responses, over their number, in (0, 1]; ratios are
    of tokens, p trainer / p engine. A metric without a value is left out: `logprob_corr` (Pearson's, of the
    probabilities) where one side is constant or a log-prob is not finite.
    """
    lengths = [len(e) for e in engine]
    if sum(lengths) < 2 or lengths != [len(t) for t in trainer]:
        return {}
    p = np.concatenate(engine).astype(np.float64)  # [tokens]
    q = np.concatenate(trainer).astype(np.float64)  # [tokens]
    known_p, known_q = np.isfinite(p), np.isfinite(q)
    known = known_p & known_q  # [tokens]
    lost = int(p.size - known_p.sum() + q.size - known_q.sum())
    with np.errstate(invalid="ignore"):  # inf - inf
        found = {"logprob_gap": float(np.abs(p - q).mean()), "logprob_lost": float(lost)}
    if not lost and (corr := _correlation(np.exp(p), np.exp(q))) is not None:
        found["logprob_corr"] = corr
    if known.any():
        log_ratio = np.where(known, q, 0.0) - np.where(known, p, 0.0)  # [tokens]; 0 where unknown
        row = np.repeat(np.arange(len(lengths)), lengths)  # [tokens] -> response
        sums = np.bincount(row, log_ratio, len(lengths)).astype(np.float64)  # [responses] logarithms of their weights
        whole = np.asarray(lengths) > 0
        whole[row[~known]] = False
        away = (log_ratio < np.log(BAND[0])) | (log_ratio > np.log(BAND[1]))
        found["ess_token"] = effective_sample_size(log_ratio[known])
        if whole.any():
            found["ess_sequence"] = effective_sample_size(sums[whole])
        found["ratio_outside"] = float(away[known].mean())
        found["ratio_max"] = float(np.exp(min(float(log_ratio[known].max()), _LARGEST)))
    return {f"{PREFIX}{name}": value for name, value in found.items()}


def effective_sample_size(log_weights: FloatArray) -> float:
    """Kish's (sum w)^2 / (n sum w^2) of the weights exp(`log_weights`) [n], n >= 1."""
    w = np.exp(log_weights - log_weights.max())  # [n], the largest is 1
    return float(w.sum() ** 2 / (w.size * (w @ w)))


def overlap(
    new: Sequence[TokenArray], old: Sequence[TokenArray], logprobs: Sequence[FloatArray] | None = None
) -> dict[str, float]:
    """Compare each response with its old one; empty where there is none. `logprobs`: [tokens] of each under the policy.

    `epoch_overlap` is the share of tokens in a prefix in common with the old response, `epoch_overlap_chance` what it
    would be on average for a second, independent draw from the present policy. The chance that such a draw repeats the
    first k tokens is exp(sum of their log-probs), so the expected length of the prefix is the sum of that over k.
    """
    tokens = sum(map(len, new))
    if not tokens:
        return {}
    shared = [_prefix(a, b) for a, b in zip(new, old, strict=True)]
    identical = [n == len(a) == len(b) for n, a, b in zip(shared, new, old, strict=True)]
    out = {f"{PREFIX}epoch_overlap": sum(shared) / tokens, f"{PREFIX}epoch_identical": sum(identical) / len(new)}
    if logprobs is not None:
        chance = sum(float(np.exp(np.cumsum(x, dtype=np.float64)).sum()) for x in logprobs) / tokens
        out[f"{PREFIX}epoch_overlap_chance"] = chance
    return out


class HealthWatch:
    """Remembers the last responses per prompt, and which warnings were logged. One per trainer, one thread.

    Args:
        config: the limit that jobs with kept noise may want to move.
        max_bytes: bound on the tokens of remembered responses; the prompts not seen for longest go first.
        log: is given each warning.
    """

    def __init__(self, config: HealthConfig, max_bytes: int, log: Callable[[str], None] = logger.warning) -> None:
        self.config = config
        self._log = log
        self.max_bytes = max_bytes
        self.bytes = 0
        self._last: OrderedDict[str, dict[str, TokenArray]] = OrderedDict()  # prompt key -> sample -> response
        self._logged: set[str] = set()

    def epochs(
        self,
        keys: Sequence[str],
        samples: Sequence[str],
        responses: Sequence[TokenArray],
        logprobs: Sequence[FloatArray] | None = None,
    ) -> dict[str, float]:
        """Metrics of this step's responses against those the same prompts got when they came last; then remembers them.

        Args:
            keys: `prompt_key` per response.
            samples: which of its prompt's samples each response is, the same number in every epoch.
            responses: their tokens.
            logprobs: their tokens' log-probs under the policy, for what is shared by chance. A response with another
                number of log-probs than tokens (one with tool output) is left out.
        """
        seen: dict[str, dict[str, TokenArray]] = {}
        pairs: list[tuple[TokenArray, TokenArray, FloatArray | None]] = []
        for i, (key, sample, response) in enumerate(zip(keys, samples, responses, strict=True)):
            if logprobs is not None and len(logprobs[i]) != len(response):
                continue
            # A prompt that is in the data twice has two responses of one number: the first counts.
            if len(response) and seen.setdefault(key, {}).setdefault(sample, response) is response:
                old = self._last.get(key, {}).get(sample)
                if old is not None:
                    pairs.append((response, old, None if logprobs is None else logprobs[i]))
        for key, group in seen.items():
            self.bytes += _bytes(group) - _bytes(self._last.pop(key, {}))
            self._last[key] = group
        while self.bytes > self.max_bytes and self._last:
            self.bytes -= _bytes(self._last.popitem(last=False)[1])
        chances = None if logprobs is None else [c for _, _, c in pairs if c is not None]
        return overlap([new for new, _, _ in pairs], [old for _, old, _ in pairs], chances)

    def check(self, metrics: Mapping[str, float], step: int, suspects: Mapping[str, Sequence[str]]) -> dict[str, float]:
        """The warnings that `metrics` call for, as counts; each kind is logged the first time, with its cause.

        Args:
            metrics: of this step, as the other methods give them.
            step: training step, for the log.
            suspects: what in this job is known to cause a kind of warning, "ratios" or "overlap", as clauses.
        """
        m = {name.removeprefix(PREFIX): value for name, value in metrics.items() if name.startswith(PREFIX)}
        if not m:
            return {}
        crossed = []  # (kind, what was seen, group of causes)
        if lost := m.get("logprob_lost", 0.0):
            crossed.append(("not_finite", f"{lost:.0f} log-probs are NaN or infinite", "lost"))
        for kind, (metric, side, text) in _KINDS.items():
            limit, value = LIMITS[kind], m.get(metric)
            if value is not None and (value > limit if side == "at most" else value < limit):
                crossed.append((kind, f"{text.format(value)} ({side} {limit:g} is usual)", "ratios"))
        chance, limit = m.get("epoch_overlap_chance"), self.config.max_overlap
        if chance is not None and (shared := m["epoch_overlap"]) - chance > limit:
            what = f"a share of {shared:.3f} of the tokens repeats the last epoch's, {chance:.3f} would by chance"
            crossed.append(("overlap", f"{what} (telemetry.health.max_overlap = {limit:g})", "overlap"))
        for kind, what, cause in crossed:
            if kind not in self._logged:
                self._logged.add(kind)
                known = "; ".join(suspects.get(cause, ())) or _USUAL[cause]
                counted = f"Later ones are counted in {PREFIX}warnings/{kind}."
                self._log(f"rollspec: at step {step} {what}: {known}. {counted}")
        return {f"{PREFIX}warnings": float(len(crossed)), **{f"{PREFIX}warnings/{kind}": 1.0 for kind, *_ in crossed}}


def _bytes(group: Mapping[str, TokenArray]) -> int:
    return sum(tokens.nbytes for tokens in group.values())


def _prefix(a: TokenArray, b: TokenArray) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def _correlation(p: FloatArray, q: FloatArray) -> float | None:
    return float(np.corrcoef(p, q)[0, 1]) if p.std() > 0 and q.std() > 0 else None
