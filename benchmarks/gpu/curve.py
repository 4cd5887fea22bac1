"""What a decode step costs by batch size and drafter, with acceptance decreed; and acceptance on a real model.

Costs: models of real shapes without weights. vLLM's `rejection_sample_method="synthetic"` accepts drafts at given
rates, so all arms emit about as much per draft, and what differs is the time. A step's time is the difference between a
long and a short decode over the difference of their steps: prompts and the ends of requests cancel.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.gpu import models
from benchmarks.gpu.engine import SUFFIX, K, decode, engine
from benchmarks.gpu.plan import Spec
from benchmarks.gpu.propose import repeating

RATES = [0.65, 0.42, 0.27, 0.18]
"""Unconditional acceptance by position: acceptance length 2.5 at K = 4."""

SHORT, LONG = 16, 112
ROUNDS = 3


def cost(spec: Spec) -> dict[str, Any]:
    """Milliseconds of a step, tokens per second and drafts, by batch size, of one arm."""
    shape, arm, batches = (spec.arguments[name] for name in ("shape", "arm", "batches"))
    dtype = "float32" if spec.dry else "bfloat16"
    rows = []
    with engine(
        spec,
        str(models.target(spec.folder, shape, dtype)),
        rollspec=SUFFIX if arm == "rollspec" else None,
        speculative=_method(spec, arm, shape, dtype),
        rates=RATES if arm != "none" else None,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=max(batches),
        max_num_batched_tokens=8192,
        max_model_len=512,
    ) as llm:
        for batch in batches:
            rows.append({"batch": batch, **_row(llm, batch, spec.quick)})
    return {"shape": shape, "arm": arm, "k": 0 if arm == "none" else K, "synthetic": True, "batches": rows}


def _row(llm: Any, batch: int, quick: bool) -> dict[str, Any]:
    short, long = (4, 12) if quick else (SHORT, LONG)
    prompts = repeating(batch, 64)
    decode(llm, prompts, long)  # first touches
    times, steps, drafted, accepted = [], 0, 0.0, 0.0
    for _ in range(1 if quick else ROUNDS):
        few, many = decode(llm, prompts, short), decode(llm, prompts, long)
        more = max(1, many["steps"] - few["steps"])
        times.append((many["seconds"] - few["seconds"]) / more)
        steps += more
        drafted += many["drafted"] - few["drafted"]
        accepted += many["accepted"] - few["accepted"]
    seconds = statistics.median(times)
    tokens = len(times) * batch * (long - short)
    return {
        "step_ms": 1e3 * seconds,
        "step_ms_all": [1e3 * t for t in times],
        "tokens_per_second": tokens / (seconds * steps),
        "drafted_per_step": drafted / (steps * batch),
        "accepted_per_step": accepted / (steps * batch),
    }


def acceptance(spec: Spec) -> dict[str, Any]:
    """Tokens per verify step at temperature 1, epoch by epoch of one fixed policy, of drafts by lookup."""
    model = models.real(spec)
    count, copies, length, epochs = (4, 2, 24, 2) if spec.quick else (32, 8, 256, 3)
    prompts = [p for p in models.real_prompts(model, count) for _ in range(copies)]
    found: dict[str, Any] = {}
    for arm in ("ngram", "rollspec"):
        with engine(
            spec,
            model,
            rollspec=SUFFIX if arm == "rollspec" else None,
            speculative=_method(spec, arm, "", ""),
        ) as llm:
            found[arm] = []
            for _ in range(epochs):
                done = decode(llm, prompts, length, temperature=1.0, batch=32)
                found[arm].append(
                    {
                        "tokens": done["tokens"],
                        "drafted": done["drafted"],
                        "accepted": done["accepted"],
                        "rate": done["accepted"] / done["drafted"] if done["drafted"] else None,
                        "tokens_per_verification": done["tokens"] / max(1, done["tokens"] - done["accepted"]),
                        "seconds": done["seconds"],
                    }
                )
    return {"model": model, "epochs": found}


def _method(spec: Spec, arm: str, shape: str, dtype: str) -> dict[str, Any] | None:
    """vLLM's `speculative_config` of an arm that is vLLM's own."""
    if arm == "ngram":
        return {"method": "ngram_gpu", "num_speculative_tokens": K, "prompt_lookup_min": 1, "prompt_lookup_max": 5}
    if arm == "eagle3":
        head = str(models.head(spec.folder, shape, dtype))
        return {"method": "eagle3", "model": head, "num_speculative_tokens": K,
                "draft_load_config": {"load_format": "dummy"}}  # fmt: skip
    return None
