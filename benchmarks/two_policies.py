"""Rollouts of two policies in one engine, without a trainer: what reuse makes of an update, and how lossy it is.

The old policy answers, then the engine gets the new policy's weights and answers again, as between two epochs of a job.
Where `reuse.mode` is lenient, the second rollouts start from the first by the code that verl's server runs.

`check_lossy` measures how far such rollouts are from the policy. Where an old response still stood, the next token was
kept from it or drawn in its place; by the rule its distribution is min(l p, q) + (1 - a) p, and its distance from p is
TV = 1/2 sum |min(l p, q) - a p|. Both p and q are known in full from two reference models, so the distance can be
measured without binning: on the set A of tokens that the rule favours, where its distribution exceeds p, the share of
tokens in A exceeds p(A) by TV on average. Each position gives one unbiased number.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.lenient_distance import distribution, total_variation
from drafter_online.child import CPU_ENVIRONMENT
from rollspec.audit.engine import AuditJob, AuditPlan, Variant
from rollspec.audit.evidence import Samples
from rollspec.audit.verdict import DraftCounts
from rollspec.audit.worker import AuditResponse, build, counters, gathered, generate, next_round, read

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST = 20_000
"""Positions looked at: each needs two rows of the whole vocabulary, and the error is below 0.004 by then."""


@dataclass(frozen=True)
class Rollouts:
    """What the new policy's engine sampled. `ruled`: [sequences] leading tokens of each response that the lossy rule
    decided; `kept`: those it kept.
    """

    samples: Samples
    drafts: DraftCounts
    ruled: Ints
    kept: Ints
    seconds: float


def rollouts(
    model: str | Path, plan: AuditPlan, arm: Variant, old: str | Path, old_temperature: float | None = None
) -> Rollouts:
    """Rounds of `arm`'s engine with the weights of `model`, after one with those of `old`, or under a lossy rule after
    one each. They are as many as `plan` asks for, and whole.
    """
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    llm = build(AuditJob(str(model), plan, arm))
    try:
        reuse = lenient_reuse(llm, arm.rollspec, plan.seed)
        found: list[tuple[AuditResponse, int, int]] = []
        drafts, seconds, version, r = [0, 0], 0.0, 0, 0
        while (sum(len(s.tokens) for s, _, _ in found) < plan.tokens or r < plan.min_rounds) and r < plan.max_rounds:
            before: list[AuditResponse] = []
            if r == 0 or reuse is not None:
                _load(llm, old)
                version = next_round(llm, arm, version)
                before = generate(llm, plan, r, plan.samples, old_temperature or plan.temperature)
                _load(llm, model)
            version = next_round(llm, arm, version)
            counted, start = counters(llm), time.perf_counter()
            if reuse is None:
                found += [(s, 0, 0) for s in generate(llm, plan, r, plan.samples, plan.temperature)]
            else:
                found += lenient_round(llm, plan, r, reuse, before)
            seconds += time.perf_counter() - start
            drafts = [d + b - a for d, a, b in zip(drafts, counted, counters(llm), strict=True)]
            r += 1
    finally:
        llm.llm_engine.engine_core.shutdown()
    ruled, kept = (np.array([f[i] for f in found], dtype=np.int64) for i in (1, 2))
    return Rollouts(gathered([f[0] for f in found]), DraftCounts(*drafts), ruled, kept, seconds)


def _load(llm: Any, model: str | Path) -> None:
    """Weights of `model` into the running engine, as a trainer loads them."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
    llm.reset_prefix_cache()


def lenient_reuse(llm: Any, source: Mapping[str, Any] | None, seed: int) -> Any:
    """What `reuse.mode: lenient` does in a trainer's server, for this engine; None where its configuration, resolved,
    does not ask for it.
    """
    if source is None or source["reuse"]["mode"] != "lenient":
        return None
    from rollspec.config import RollspecConfig
    from rollspec.sampling import scoring
    from rollspec.sampling.lenient_reuse import LenientReuse, old_responses

    config = RollspecConfig.from_dict(dict(source))
    model = llm.llm_engine.vllm_config.model_config
    return LenientReuse(
        config.reuse,
        old_responses(config.history.max_bytes),
        int(model.max_model_len),
        int(model.get_vocab_size()),
        scoring.eos_tokens(llm),
        rng=np.random.default_rng(seed),
    )


def prefixes(
    llm: Any, reuse: Any, rollouts: Sequence[tuple[Sequence[int], int, str]], params: dict[str, Any]
) -> list[Any]:
    """What each rollout, (prompt, most tokens, sample), starts from, by `LenientReuse.prefix`; scored as one batch."""
    waiting: list[tuple[list[int], Any, asyncio.Future[Any]]] = []

    def score(prompt: list[int], given: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting.append((prompt, given, future))
        return future

    async def every() -> list[Any]:
        tasks = [asyncio.ensure_future(reuse.prefix(score, p, params, most, sample)) for p, most, sample in rollouts]
        await asyncio.sleep(0)  # each runs up to its request
        if waiting:
            outputs = llm.generate(
                [{"prompt_token_ids": p} for p, *_ in waiting], [q for _, q, _ in waiting], use_tqdm=False
            )
            for (*_, future), output in zip(waiting, outputs, strict=True):
                future.set_result(output)
        return list(await asyncio.gather(*tasks))

    return asyncio.run(every())


def lenient_round(
    llm: Any, plan: AuditPlan, r: int, reuse: Any, old: list[AuditResponse]
) -> list[tuple[AuditResponse, int, int]]:
    """A round that starts from the responses `old`, sibling by sibling: (response, tokens ruled, tokens kept) each."""
    from vllm import SamplingParams

    from rollspec.proposal.base import prompt_key
    from rollspec.sampling import scoring

    prompts, limit = plan.prompts, plan.max_tokens
    keys = [prompt_key(p) for p in prompts]
    reuse.remember([(keys[s.prompt], f"{i}", s.tokens, s.log_probs) for i, s in enumerate(old)], r)
    old_ones = [(prompts[s.prompt], limit, f"{i}") for i, s in enumerate(old)]
    found = prefixes(llm, reuse, old_ones, {"temperature": plan.temperature})
    out, requests, params = [], [], []
    for s, prefix in zip(old, found, strict=True):
        start = [] if prefix is None else prefix.tokens
        said = AuditResponse(s.prompt, r, list(start), [] if prefix is None else list(prefix.logprobs))
        # A token that is kept, or the first one drawn in the place of a rejected one.
        out.append((said, 0 if prefix is None else min(len(start) + 1, len(s.tokens)), len(start)))
        if prefix is None or not prefix.finished:
            prompt = prompts[s.prompt]
            requests.append((said, {"prompt_token_ids": [*prompt, *start]}))
            params.append(
                SamplingParams(
                    temperature=plan.temperature,
                    max_tokens=limit - len(start),
                    logprobs=0,
                    detokenize=False,
                    extra_args={scoring.KEY: {scoring.PROMPT: len(prompt)}},
                )
            )
    for (said, _), output in zip(requests, llm.generate([q for _, q in requests], params, use_tqdm=False), strict=True):
        tokens, log_probs = read(output)
        said.tokens += tokens
        said.log_probs += log_probs
    return out


class Policy(Protocol):
    """What is asked of a reference model (`audit_reference.Reference`)."""

    def log_probs(self, prompt: Sequence[int], response: list[int]) -> Floats:
        """[tokens, V] log-probabilities of the token at each position of one response."""


@dataclass(frozen=True, slots=True)
class LossyCheck:
    """`positions` decided by the rule, of `tokens` sampled in all. `measured` +- `error` (one standard error) is the
    total variation found, `theory` what the rule's formula says, both means over these positions; `largest` is the
    formula's largest.
    """

    tokens: int
    ruled: int
    positions: int
    measured: float
    error: float
    theory: float
    largest: float
    bias: float

    @property
    def agrees(self) -> bool:
        """Whether what was measured is what the formula says, within four standard errors."""
        return abs(self.measured - self.theory) <= 4 * max(self.error, 1e-12)


def check_lossy(
    samples: Samples,
    ruled: Ints,
    prompts: Sequence[Sequence[int]],
    new: Policy,
    old: Policy,
    bias: float,
    most: int = MOST,
) -> LossyCheck:
    """Measure the distance.

    Args:
        samples: what was sampled. ruled: [sequences] leading tokens that the rule decided.
        prompts: tokens by prompt index. new, old: the two policies at their temperatures.
    """
    excess: list[float] = []
    theory: list[float] = []
    order = np.random.default_rng(0).permutation(np.flatnonzero(ruled > 0))  # `most` must not prefer some prompts
    for s in order.tolist():
        if len(excess) >= most:
            break
        n = int(ruled[s])
        tokens = samples.tokens[s][:n]
        prompt = prompts[int(samples.prompt[s])]
        p, q = (np.exp(r.log_probs(prompt, tokens.tolist())) for r in (new, old))  # [n, V]
        favoured = distribution(p, q, bias) > p  # [n, V]
        excess += (favoured[np.arange(n), tokens] - (p * favoured).sum(-1)).tolist()
        theory += total_variation(p, q, bias).tolist()
    n = len(excess)
    return LossyCheck(
        tokens=samples.n_tokens,
        ruled=int(ruled.sum()),
        positions=n,
        measured=float(np.mean(excess)) if n else 0.0,
        error=float(np.std(excess)) / math.sqrt(n) if n else 0.0,
        theory=float(np.mean(theory)) if n else 0.0,
        largest=max(theory, default=0.0),
        bias=bias,
    )
