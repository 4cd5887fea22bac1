"""Watches the health of training rollouts over the steps: what `sampling/agreement.py` measures, as metrics, and one
warning per kind when a threshold of `telemetry.health` is crossed.

    watch = HealthWatch(config.telemetry.health, config.history.max_bytes)
    metrics = watch.agreement(engine_logprobs, trainer_logprobs)
    metrics |= watch.epochs(prompt_keys, samples, responses, engine_logprobs)
    metrics |= watch.check(metrics, step, suspects)
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from rollspec.config import HealthConfig
from rollspec.proposal.base import TokenArray
from rollspec.sampling.agreement import BAND, FloatArray, agreement, overlap

logger = logging.getLogger("rollspec")

PREFIX = "rollspec/health/"
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

    @staticmethod
    def agreement(engine: Sequence[FloatArray], trainer: Sequence[FloatArray]) -> dict[str, float]:
        """Metrics of engine against trainer log-probs, one array per response on either side."""
        a = agreement(engine, trainer)
        if a is None:
            return {}
        # NaN must show, not be averaged away: a NaN log-prob is how a broken sampler looks.
        found = {"logprob_gap": a.gap, "logprob_corr": a.corr, "logprob_lost": float(a.not_finite),
                 "ess_token": a.ess_token, "ess_sequence": a.ess_sequence,
                 "ratio_outside": a.outside, "ratio_max": a.ratio_max}  # fmt: skip
        return {f"{PREFIX}{name}": value for name, value in found.items() if value is not None}

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
        found = overlap([new for new, _, _ in pairs], [old for _, old, _ in pairs], chances)
        if found is None:
            return {}
        out = {f"{PREFIX}epoch_overlap": found.shared, f"{PREFIX}epoch_identical": found.identical}
        if found.chance is not None:
            out[f"{PREFIX}epoch_overlap_chance"] = found.chance
        return out

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
