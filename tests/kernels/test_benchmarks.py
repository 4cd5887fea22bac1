"""What the benchmarks do with vLLM's classes: faults that are planted, and rounds that start from old responses."""

from __future__ import annotations

from typing import Any

import pytest
from installed import needs_vllm
from vllm_like import like

pytestmark = needs_vllm


def test_planted_faults_are_one_percent() -> None:
    torch = pytest.importorskip("torch")
    from benchmarks import planted

    logits = 2.0 * torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(-1)
    for fault in ("Uniform", "MostLikely", "Second"):
        q = getattr(planted, fault)(None, None).apply(logits, None).softmax(-1)
        assert (0.5 * (p - q).abs().sum(-1) <= 0.01 + 1e-6).all() and (0.5 * (p - q).abs().sum(-1) > 0.001).all()
        assert fault == "Second" or (q.argmax(-1) == p.argmax(-1)).all()


LOGPROB = "vllm.logprobs:Logprob"


class Engine:
    """`LLM.generate` of a target that gives every old token the log-prob `new`, and always goes on with token 9."""

    def __init__(self, new: dict[int, float]) -> None:
        self.new = new
        self.asked: list[tuple[list[int], Any]] = []

    def generate(self, requests: list[dict[str, Any]], params: Any, use_tqdm: bool) -> list[Any]:
        out = []
        for request, p in zip(requests, params, strict=True):
            ids = list(request["prompt_token_ids"])
            self.asked.append((ids, p))
            log_probs = [None] + [{t: like(LOGPROB, logprob=self.new.get(t, -1.0))} for t in ids[1:]]
            said = [9] * p.max_tokens
            one = like(
                "vllm.outputs:CompletionOutput", token_ids=said, logprobs=[{9: like(LOGPROB, logprob=-0.5)}] * len(said)
            )
            out.append(
                like(
                    "vllm.outputs:RequestOutput",
                    finished=True,
                    prompt_token_ids=ids,
                    prompt_logprobs=log_probs,
                    outputs=[one],
                )
            )
        return out


def test_a_round_starts_from_old_responses_and_says_what_the_rule_decided() -> None:
    from benchmarks.two_policies import lenient_round
    from rollspec.audit.engine import AuditPlan
    from rollspec.audit.worker import AuditResponse
    from rollspec.config import ReuseConfig
    from rollspec.sampling.lenient_reuse import LenientReuse, old_responses

    reuse = LenientReuse(ReuseConfig(mode="lenient"), old_responses(1 << 20), 64, 20, frozenset({0}))
    engine = Engine({7: -99.0})
    old = [
        AuditResponse(0, 0, [4, 5, 0], [-1.0] * 3),  # kept whole, to its end
        AuditResponse(0, 0, [4, 7, 5], [-1.0] * 3),  # cut before the 7
        AuditResponse(1, 0, [7, 4], [-1.0] * 2),  # cut at once
        AuditResponse(1, 0, [4, 5], [-1.0] * 2),  # kept whole, and goes on
        AuditResponse(1, 0, [4, 5, 6, 6, 6, 6, 6], [-1.0] * 7),  # longer than the limit: generated whole
    ]
    plan = AuditPlan(((1, 2), (3, 4)), max_tokens=6, temperature=0.8)
    found = lenient_round(engine, plan, 2, reuse, old)
    assert [(s.tokens, ruled) for s, ruled, _ in found] == [
        ([4, 5, 0], 3),
        ([4, 9, 9, 9, 9, 9], 2),
        ([9] * 6, 1),
        ([4, 5, 9, 9, 9, 9], 2),
        ([9] * 6, 0),
    ]
    assert [s.log_probs for s, _, _ in found[:2]] == [[-1.0] * 3, [-1.0] + [-0.5] * 5]
    assert all((s.round, s.prompt) == (2, o.prompt) for (s, _, _), o in zip(found, old, strict=True))
    scored, rest = engine.asked[:4], engine.asked[4:]
    assert all(p.prompt_logprobs == 0 for _, p in scored)
    assert [(ids, p.max_tokens) for ids, p in rest] == [([1, 2, 4], 5), ([3, 4], 6), ([3, 4, 4, 5], 4), ([3, 4], 6)]
