"""What the audit asks of vLLM's `LLM` for the log-probs of tokens that another engine sampled."""

from __future__ import annotations

from typing import Any

from installed import needs_vllm
from vllm_like import like, plays

from rollspec.audit.worker import score

pytestmark = needs_vllm


def test_an_engine_that_scores_no_prompts_says_why() -> None:
    @plays("vllm.entrypoints.llm:LLM")
    class Engine:
        def generate(self, *_: Any, **__: Any) -> Any:
            raise ValueError("prompt_logprobs\nare not supported")

    assert score(Engine(), (((1,), (2,)),)) == "ValueError: prompt_logprobs are not supported"


def test_scores_are_of_the_response() -> None:
    asked: list[Any] = []

    @plays("vllm.entrypoints.llm:LLM")
    class Engine:
        def generate(self, prompts: list[Any], sampling_params: Any, *, use_tqdm: bool) -> list[Any]:
            asked.append((prompts, sampling_params.max_tokens, sampling_params.prompt_logprobs))
            scores = [None] + [{t: like("vllm.logprobs:Logprob", logprob=-float(t))} for t in (6, 7, 8)]
            return [like("vllm.outputs:RequestOutput", prompt_token_ids=[5, 6, 7, 8], prompt_logprobs=scores)]

    (found,) = score(Engine(), (((5, 6), (7, 8)),))
    assert found.tolist() == [-7.0, -8.0]  # type: ignore[union-attr]
    assert asked == [([{"prompt_token_ids": [5, 6, 7, 8]}], 1, 0)]
    assert score(Engine(), ()) == ()
