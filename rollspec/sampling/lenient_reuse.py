"""LOSSY reuse of old responses with vLLM: SPEC-RL's verification pass, cut and continuation (arXiv:2509.23232).

For a prompt with an old response of the same sample number the present policy scores that response in one prefill
(`scoring`). Token i is kept while log U <= log p_new - log p_old + bias, up to the first rejected one, and the caller
generates the rest. That is not the policy's distribution even at bias 0: after a rejection the token is drawn from the
policy itself and not from what the kept tokens leave of it. The rollout's log-probs are the present policy's, so
importance ratios stay at 1 and no trainer can notice: that is why this is called lossy wherever it is on.

    found = await reuse.prefix(score, prompt, sampling_params, limit, sample)
    if found is None:      generate as ever
    elif found.finished:   the response is found.tokens, and nothing is generated
    else:                  generate up to limit - len(found.tokens) tokens after prompt + found.tokens
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rollspec.config import ReuseConfig
from rollspec.log_once import LogOnce
from rollspec.proposal.base import TokenArray, as_tokens, prompt_key
from rollspec.proposal.history import OLD_RESPONSES, History, Response
from rollspec.sampling import scoring

Floats = npt.NDArray[np.floating[Any]]

Score = Callable[[list[int], Any], Awaitable[Any]]
"""Runs one request of (prompt token ids, SamplingParams); a finished `RequestOutput`, or None if it was aborted."""

NEUTRAL = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
           "min_tokens": 0, "n": 1}  # fmt: skip
"""Values at which a sampling parameter leaves the distribution what `temperature` alone makes of it."""

EMPTY = ("stop", "bad_words", "allowed_token_ids", "logit_bias", "logits_processors", "structured_outputs",
         "prompt_logprobs", "seed")  # fmt: skip
"""Sampling parameters that must be unset: the rule compares the distributions of the temperature alone."""


_NO_PROMPT: TokenArray = as_tokens([])  # its key is enough


def warning(config: ReuseConfig) -> str:
    """The warning at start wherever this is on."""
    return (
        f"LOSSY: old responses are reused (reuse.mode = lenient, bias {config.bias:g}), so "
        "rollouts do not follow the policy exactly; importance ratios cannot show it."
    )


def keep_probability(log_new: Floats, log_old: Floats, bias: float = 0.0) -> Floats:
    """Chance that an old token is kept: min(1, exp(log p_new - log p_old + bias)).

    `log_new`, `log_old`: log-probs under the present and the old policy, any one shape. What is impossible under the
    present policy, or not a number, is never kept.
    """
    with np.errstate(invalid="ignore"):
        out: Floats = np.exp(np.minimum(0.0, log_new - log_old + bias))
    out[np.isneginf(log_new) | np.isnan(log_new)] = 0.0
    return out


def kept(log_new: Floats, log_old: Floats, uniform: Floats, bias: float = 0.0) -> int:
    """Leading tokens of an old response that are reused. Shapes [n]; `uniform` in (0, 1]."""
    rejected = uniform > keep_probability(log_new, log_old, bias)
    return int(rejected.argmax()) if rejected.any() else len(rejected)


def old_responses(max_bytes: int) -> History:
    """Responses with log-probs, the newest per prompt and sample."""
    return History(max_bytes, 1 << 30, OLD_RESPONSES)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What of an old response was accepted; `logprobs` are the present policy's. `finished`: nothing is to follow."""

    tokens: list[int]
    logprobs: list[float]
    finished: bool


@dataclass
class LenientReuse:
    """Decides prefixes for one engine and counts what SPEC-RL counts. One event loop."""

    config: ReuseConfig
    responses: History  # to reuse (`old_responses`)
    max_model_len: int
    vocab_size: int  # of the target; an old token beyond it is not reused
    eos: frozenset[int]  # tokens that end a response unless `ignore_eos`
    logprobs_mode: str = "processed_logprobs"  # vLLM's; log-probs must be the sampled distribution's
    rng: np.random.Generator = field(default_factory=np.random.default_rng)
    """Draws the rule's U, from fresh entropy: the same U in every epoch would repeat its decisions."""
    version: int = 0  # of the policy
    _counts: Counter[str] = field(default_factory=Counter)
    _log_once: LogOnce = field(default_factory=LogOnce)

    async def prefix(
        self, score: Score, prompt: Sequence[int], params: Mapping[str, Any], limit: int, sample: str | None
    ) -> Prefix | None:
        """The prefix that the rollout of `prompt` starts from; None where it starts from nothing.

        `params`: its sampling parameters, as `SamplingParams` takes them. `limit`: most response tokens. `sample`:
        which of the prompt's samples it is; None where that is not known.
        """
        if sample is None:
            return None
        self._counts["requests"] += 1
        old = self.responses.part(prompt_key(prompt), sample)
        reason = self.refuses(params) or (self._unusable(old, limit) if old is not None else None)
        if reason is not None:
            self._refuse(*reason)
            return None
        # One place is for the token that vLLM samples after what is scored.
        tokens = [] if old is None else old.tokens[: max(0, self.max_model_len - 1 - len(prompt))].tolist()
        if old is None or not tokens:
            return None
        version = self.version
        output = await score([*prompt, *tokens], scoring.params(float(params.get("temperature", 1.0))))
        if output is None or not output.finished or self.version != version:
            self._refuse("interrupted", "the policy changed, or the request was aborted, while it was scored")
            return None
        return self._cut(tokens, old, scoring.read(output, len(prompt)), params, limit)

    def _unusable(self, old: Response, limit: int) -> tuple[str, str] | None:
        """(cause, sentence part) why this response cannot be reused."""
        n = len(old.tokens)
        if n > limit:
            return "longer than the limit", f"it has {n} tokens and the rollout may have {limit}"
        if n and not 0 <= int(old.tokens.min()) <= int(old.tokens.max()) < self.vocab_size:
            worst = int(old.tokens.max())
            return "outside the vocabulary", f"it has token {worst} and the vocabulary ends at {self.vocab_size - 1}"
        return None

    def _cut(
        self,
        tokens: list[int],
        old: Response,
        new: npt.NDArray[np.float32],
        params: Mapping[str, Any],
        limit: int,
    ) -> Prefix:
        assert old.logprobs is not None
        log_new, log_old = new.astype(np.float64), old.logprobs[: len(tokens)].astype(np.float64)
        n = kept(log_new, log_old, 1.0 - self.rng.random(len(tokens)), self.config.bias)
        stop = {*(params.get("stop_token_ids") or ()), *(() if params.get("ignore_eos") else self.eos)}
        end = next((i + 1 for i, t in enumerate(tokens[:n]) if t in stop), 0)
        finished = bool(end) or n == limit
        n = end or n
        self._counts.update(verified=1, skipped=int(finished), accepted=n, old_tokens=len(old.tokens))
        return Prefix(tokens[:n], [float(x) for x in new[:n]], finished)

    def refuses(self, params: Mapping[str, Any]) -> tuple[str, str] | None:
        """(cause, sentence part) why a rollout with these sampling parameters cannot be started from an old one."""
        temperature = float(params.get("temperature", 1.0))
        if temperature < 1e-5:
            return "temperature 0", "a greedy rollout has no distribution to compare with"
        if int(params.get("top_k") or 0) > 0:
            return "top_k", f"top_k = {params['top_k']} cuts the distribution that the rule compares; set it to -1"
        for name, neutral in NEUTRAL.items():
            if params.get(name, neutral) not in (neutral, None):
                said = f"{name} = {params[name]} changes the distribution that the rule compares; set it to {neutral}"
                return name, said
        for name in EMPTY:
            if params.get(name) not in (None, [], {}, ""):
                return name, f"{name} is set, which the rule knows nothing of; unset it"
        if self.logprobs_mode != "processed_logprobs" and (self.logprobs_mode, temperature) != ("raw_logprobs", 1.0):
            said = f"logprobs_mode = {self.logprobs_mode} is not the distribution that is sampled; unset it"
            return "logprobs_mode", said
        return None

    def remember(self, items: Sequence[tuple[str, str, Any, Any]], version: int) -> dict[str, int]:
        """Keep finished rollouts, (prompt key, sample, tokens [n], log-probs [n]), for the next epoch. What cannot be
        reused is counted and logged once.
        """
        good = 0
        for key, sample, tokens, logprobs in items:
            given = np.ascontiguousarray(logprobs, np.float32)
            known = int(np.isfinite(given).sum())
            if not len(tokens) == len(given) == known:
                needs = (
                    f"a response of {len(tokens)} tokens needs as many finite log-probs to be reused, and has {known}"
                )
                self._refuse("log-probs", needs)
                continue
            response = Response(as_tokens(tokens), version, origin=sample, logprobs=given)
            self.responses.add(key, _NO_PROMPT, response)
            good += 1
        return {"kept": good, "bytes": self.responses.bytes}

    def drain(self) -> Mapping[str, float]:
        """Counts since the last call, for `EngineStats.lenient`: they add up over engines."""
        out, self._counts = dict(self._counts), Counter()
        return out

    def _refuse(self, cause: str, text: str) -> None:
        self._counts[f"refused/{cause}"] += 1
        self._log_once(
            cause, "rollspec: an old response is not reused because %s; the rollout is generated whole.", text
        )
