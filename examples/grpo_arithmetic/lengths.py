"""Sample the policy with vLLM and report reward, truncation, response lengths and the time of a decode step.

Usage, from the repository root::

    python -m examples.grpo_arithmetic.lengths --cache ~/.cache/rollspec/grpo_arithmetic --prompts 64 --samples 8
    python -m examples.grpo_arithmetic.lengths --cache ~/.cache/rollspec/grpo_arithmetic --step-times
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.grpo_arithmetic.data import problems
from examples.grpo_arithmetic.prepare import SIZES, prepare
from examples.grpo_arithmetic.reward import compute_score
from examples.grpo_arithmetic.tokenizer import prompt_text


def percentile(values: Sequence[int], q: float) -> int:
    """The smallest value with at least a share ``q`` of the sample at or below it."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -(-int(q * 1000) * len(ordered) // 1000) - 1))]


def summarize_lengths(lengths: Sequence[int]) -> dict[str, float]:
    """p50, p90, p99, max and how many times the median the maximum is."""
    stats: dict[str, float] = {f"p{round(q * 100)}": percentile(lengths, q) for q in (0.5, 0.9, 0.99)}
    stats["max"] = max(lengths)
    stats["max_over_p50"] = round(stats["max"] / stats["p50"], 2)
    return stats


def open_engine(model: str, dtype: str = "bfloat16", max_num_seqs: int = 64) -> Any:
    """A vLLM engine for ``model``; sets the variables a CPU build needs unless they are set."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is the report's
    from vllm import LLM

    return LLM(model=model, dtype=dtype, enforce_eager=True, max_model_len=1024, max_num_seqs=max_num_seqs, seed=0)


def sample_report(llm: Any, prompts: int, samples: int, max_tokens: int, split: str = "train") -> dict[str, Any]:
    """Sample at temperature 1, top_p 1; return mean reward, shares right and truncated, and length percentiles."""
    from vllm import SamplingParams

    asked = problems(split, prompts)
    params = SamplingParams(n=samples, temperature=1.0, top_p=1.0, max_tokens=max_tokens)
    outputs = llm.generate([prompt_text(problem.question) for problem in asked], params, use_tqdm=False)
    scores, lengths, cut, mixed = [], [], 0, 0
    for problem, output in zip(asked, outputs, strict=True):
        info = {"question": problem.question}
        group = [compute_score("arithmetic", c.text, str(problem.answer), info) for c in output.outputs]
        mixed += len(set(group)) > 1
        scores += group
        lengths += [len(completion.token_ids) for completion in output.outputs]
        cut += sum(completion.finish_reason == "length" for completion in output.outputs)
    return {
        "responses": len(scores),
        "mean_reward": round(sum(scores) / len(scores), 3),
        "share_right": round(sum(score == 1.0 for score in scores) / len(scores), 3),
        "groups_with_signal": round(mixed / len(asked), 3),
        "truncated": round(cut / len(scores), 4),
        **summarize_lengths(lengths),
    }


def step_time_ms(llm: Any, batch: int, tokens: int = 64) -> float:
    """Milliseconds per decode step at a fixed batch size, by runs of two lengths, so that prefill cancels out.

    Raises ``RuntimeError`` when the machine was too busy for the longer runs to take longer.
    """
    from vllm import SamplingParams

    texts = [prompt_text(problem.question) for problem in problems("val", batch)]

    def run(count: int) -> float:
        params = SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True)
        started = time.perf_counter()
        llm.generate(texts, params, use_tqdm=False)
        return time.perf_counter() - started

    run(8)  # first use of a batch size compiles
    # The fastest of each length, then the difference: the smallest difference would reward a disturbed short run.
    pairs = [(run(tokens + 8), run(8)) for _ in range(5)]
    seconds = min(long for long, _ in pairs) - min(short for _, short in pairs)
    if seconds <= 0:
        raise RuntimeError(f"batch={batch}: {tokens} more tokens took no longer; the machine is too busy to be timed")
    return round(seconds / tokens * 1000, 2)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Response lengths, reward and step times of the example's policy.")
    parser.add_argument("--cache", required=True, help="cache folder of prepare")
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--model", help="another checkpoint to sample from, e.g. a trained one")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--split", default="train", choices=("train", "val"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--step-times", action="store_true", help="time decode steps at batch 1, 8 and 32 instead")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    llm = open_engine(args.model or prepare(args.cache, args.size).model, args.dtype)
    if args.step_times:
        report: dict[str, Any] = {f"ms_per_step_batch_{b}": step_time_ms(llm, b) for b in (1, 8, 32)}
    else:
        report = sample_report(llm, args.prompts, args.samples, args.max_tokens, args.split)
    if args.json:
        print(json.dumps(report))
        return
    table = Table(show_header=False)
    for name, value in report.items():
        table.add_row(name, str(value))
    Console().print(table)


if __name__ == "__main__":
    main()
