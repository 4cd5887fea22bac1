"""LOSSY: an engine of a benchmark whose responses start from the last epoch's, as SPEC-RL's do (`reuse.mode: lenient`).

A trainer's server does this in a job; here the loop that drives the engine does, by the same code
(`rollspec/sampling/lenient_reuse.py`). The scoring pass is part of an epoch's seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Prefixes:
    """Old responses of an engine, by prompt and place in the epoch, which its new ones start from."""

    def __init__(self, reuse: Any) -> None:
        self._reuse = reuse
        self._old: dict[tuple[tuple[int, ...], int], tuple[list[int], list[float]]] = {}
        self._begun: list[Any] = []
        self._ruled: list[int] = []
        self._log_probs: dict[int, list[float]] = {}

    @classmethod
    def of(cls, llm: Any, source: Any) -> Prefixes | None:
        """For an engine of the configuration `source`; None where that reuses nothing."""
        from benchmarks.two_policies import lenient_reuse
        from rollspec.config import RollspecConfig

        reuse = lenient_reuse(llm, RollspecConfig.load(source, env={}).to_dict() if source else None, 0)
        return None if reuse is None else cls(reuse)

    def take(self, llm: Any, prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        """Tokens that each response starts with; an old one is cut to the length that the new one has to have."""
        from benchmarks.two_policies import prefixes
        from rollspec.proposal.base import prompt_key

        known = [self._old.get((tuple(p), i), ([], [])) for i, p in enumerate(prompts)]
        cut = [(tokens[:n], log_probs[:n]) for (tokens, log_probs), n in zip(known, lengths, strict=True)]
        self._reuse.remember(
            [(prompt_key(p), f"{i}", *old) for i, (p, old) in enumerate(zip(prompts, cut, strict=True)) if old[0]], 0
        )
        rollouts = [(p, n, f"{i}") for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))]
        self._begun = prefixes(llm, self._reuse, rollouts, {"temperature": 1.0, "ignore_eos": True})
        found = [[] if b is None else list(b.tokens) for b in self._begun]
        # A token that is kept, or the first one drawn in the place of a rejected one.
        self._ruled = [
            0 if b is None else min(len(b.tokens) + 1, len(tokens))
            for b, (tokens, _) in zip(self._begun, cut, strict=True)
        ]
        return found

    def settings(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Sampling parameters of a request that may begin with what was kept."""
        from rollspec.sampling import scoring

        return {"logprobs": 0, "extra_args": {scoring.KEY: {scoring.PROMPT: len(prompt)}}}

    def ended(self, i: int, output: Any) -> None:
        """Take the log-probs of what the request at place `i` generated."""
        from rollspec.audit.worker import read

        self._log_probs[i] = read(output)[1]

    def remember(self, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> dict[str, Any]:
        """Keep the epoch's responses for the next; what was kept, and how much of each response the rule decided."""
        begun, ruled = self._begun or [None] * len(texts), self._ruled
        for i, (prompt, text, start) in enumerate(zip(prompts, texts, begun, strict=True)):
            log_probs = [*([] if start is None else start.logprobs), *self._log_probs.get(i, [])]
            self._old[tuple(prompt), i] = (list(text), log_probs)
        self._begun, self._ruled, self._log_probs = [], [], {}
        kept = sum(0 if b is None else len(b.tokens) for b in begun)
        return {"kept": kept, "ruled": ruled, "texts": list(texts)}
