"""What a verify step's sampling costs: coupled against vLLM's rejection sampling, without a model.

Both get the same logits, drafts and settings (temperature 1, K drafts per request: the likeliest tokens) and take
turns; on the CPU with the kernels vLLM's own worker uses there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import pin, provenance, ratio, save

VOCABULARIES = (512, 151_936)
BATCHES = (1, 8, 64)
K = 4
SECONDS = 0.15
"""Least time of one side's turn."""


def _sides(vocab: int, batch: int, k: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A step by coupled sampling, and one by vLLM's."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from rollspec import RollspecConfig
    from rollspec.engine.vllm import patches
    from rollspec.engine.vllm.coupled import CoupledSampler
    from rollspec.engine.vllm.ranks import Ranks

    patches.install()
    current_platform.register_triton_kernel_overrides()
    torch.manual_seed(0)
    rows = batch * (k + 1)
    logits = 2.0 * torch.randn(rows, vocab)
    likely = torch.randint(vocab, (rows, 4))
    logits.scatter_add_(
        1, likely, torch.tensor([12.0, 11.0, 9.0, 7.0]).expand(rows, 4)
    )  # a model that knows what it wants
    nothing = torch.zeros(batch)
    sampling = SamplingMetadata(
        temperature=torch.ones(batch),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    sampler = Sampler()
    rejection = RejectionSampler(sampler)
    metadata = None
    if k:
        at = torch.arange(rows).view(batch, k + 1)
        metadata = SpecDecodeMetadata(
            draft_token_ids=likely[at[:, :k].flatten(), 0].to(torch.int32),
            num_draft_tokens=[k] * batch,
            cu_num_draft_tokens=(torch.arange(batch) + 1).to(torch.int32) * k,
            cu_num_sampled_tokens=(torch.arange(batch) + 1).to(torch.int32) * (k + 1),
            target_logits_indices=at[:, :k].flatten(),
            bonus_logits_indices=at[:, k].clone(),
            logits_indices=torch.arange(rows),
        )

    def standard() -> Any:
        if metadata is None:
            return Sampler.forward(plain, logits.clone(), sampling)
        return rejection(metadata, None, logits, sampling)

    plain = Sampler()
    runner = SimpleNamespace(
        _sample=lambda values, spec: sampler(values.clone(), sampling),
        sampler=sampler,
        rejection_sampler=rejection,
        input_batch=SimpleNamespace(sampling_metadata=sampling, req_ids=[str(i) for i in range(batch)], num_reqs=batch),
        positions=torch.arange(rows) + 100,
        query_start_loc=SimpleNamespace(gpu=torch.arange(batch + 1)),
        model_config=SimpleNamespace(seed=0, get_vocab_size=lambda: vocab),
        device=logits.device,
        parallel_config=SimpleNamespace(data_parallel_rank=0),
    )
    coupled = CoupledSampler(runner, RollspecConfig.load({"mode": "coupled"}, env={}), lambda cause: None, Ranks())
    for i in range(batch):
        coupled.streams.begin(str(i), [i])
    return lambda: runner._sample(logits, metadata), standard


def _turn(step: Callable[[], Any], seconds: float) -> float:
    """Seconds per step."""
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds or not count:
        step()
        count += 1
    return passed / count


def run(quick: bool = False, out: Path | None = None) -> Path:
    """Print and save the table."""
    pin()
    rounds, seconds = (2, 0.01) if quick else (25, SECONDS)
    began = provenance()
    results: list[dict[str, Any]] = []
    table = Table(title="sampling a verify step: coupled / vLLM's rejection sampling")
    for column in ("vocabulary", "batch", "K", "coupled ms", "vLLM ms", "ratio (95 %)"):
        table.add_column(column, justify="right")
    for vocab in VOCABULARIES:
        for batch in BATCHES if not quick else BATCHES[:2]:
            for k in (K, 0):
                coupled, standard = _sides(vocab, batch, k)
                for step in (coupled, standard):  # compiles, and fills caches
                    _turn(step, seconds)
                mine, theirs = [], []
                for r in range(rounds):
                    order = (coupled, mine), (standard, theirs)
                    for step, times in order if r % 2 else reversed(order):
                        times.append(_turn(step, seconds))
                found = ratio(mine, theirs)
                results.append(
                    {
                        "vocab": vocab,
                        "batch": batch,
                        "k": k,
                        "coupled_ms": 1e3 * statistics.median(mine),
                        "vllm_ms": 1e3 * statistics.median(theirs),
                        "ratio": found,
                    }
                )
                table.add_row(
                    str(vocab),
                    str(batch),
                    str(k),
                    f"{results[-1]['coupled_ms']:.2f}",
                    f"{results[-1]['vllm_ms']:.2f}",
                    f"{found.median:.2f} ({found.low:.2f}-{found.high:.2f})",
                )
    Console(stderr=True).print(table)
    ended = provenance()
    return save(
        "coupled" + ("-quick" if quick else ""),
        {
            "benchmark": "coupled",
            "provenance": began,
            "load_after": ended["load"],
            "rounds": rounds,
            "cells": results,
        },
        out,
    )
