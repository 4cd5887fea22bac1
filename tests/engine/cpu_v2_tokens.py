"""Tokens and log-probabilities of one engine, for `test_cpu_v2_engine`: `cpu_v2_tokens.py MODEL OUT [SPECULATION]`.

A program of its own, because a process chooses its model runner once (`VLLM_USE_V2_MODEL_RUNNER`).
"""

from __future__ import annotations

import json
import sys
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 1.0},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "biases": {"temperature": 0.0, "logit_bias": {5: 3.0, 9: -4.0}, "min_tokens": 5},
    "allowed": {"temperature": 0.0, "allowed_token_ids": list(range(3, 30))},
    "bad_words": {"temperature": 0.0, "bad_words": ["a", "bc"]},
    "top_k_one": {"temperature": 0.7, "top_k": 1},
    "min_p_one": {"temperature": 0.7, "min_p": 1.0},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "prompt_logprobs": {"temperature": 0.0, "prompt_logprobs": 2},
    "samples": {"temperature": 0.7, "top_k": 1, "n": 3},
}


def main() -> None:
    """Generate every case and write the results as JSON."""
    import vllm_cpu_v2

    vllm_cpu_v2.register()
    from vllm import LLM, SamplingParams

    model, out, *speculative = sys.argv[1:]
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=32,  # prompts below are longer: chunked prefill
        num_gpu_blocks_override=40,
        block_size=32,  # requests below need more: pre-emption
        enable_prefix_caching=True,
        kv_cache_memory_bytes=64 << 20,
        seed=0,
        speculative_config=json.loads(speculative[0]) if speculative else None,
    )
    prompts = [[3 + (7 * i + 5 * j * j) % 40 for j in range(20 + 9 * i)] for i in range(10)]
    results: dict[str, Any] = {}
    for name, more in CASES.items():
        if speculative and ("min_p" in more or "logit_bias" in more):
            continue  # vLLM refuses these beside drafts
        params = [SamplingParams(max_tokens=60 - 3 * i, ignore_eos=True, seed=100 + i, **more) for i in range(10)]
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        results[name] = [[list(sample.token_ids) for sample in o.outputs] for o in found]
        if name == "logprobs":
            results["ranks"] = [table(o.outputs[0].logprobs) for o in found]
        if name == "prompt_logprobs":
            results["prompt_ranks"] = [table(o.prompt_logprobs) for o in found]
    results["runner"] = llm.llm_engine.vllm_config.use_v2_model_runner
    with open(out, "w") as file:
        json.dump(results, file)


def table(rows: Any) -> list[Any]:
    """[token, rank, rounded log-probability] of every position."""
    return [r and sorted([t, x.rank, round(x.logprob, 2)] for t, x in r.items()) for r in rows]


if __name__ == "__main__":
    main()
