"""Lossy reuse in a real engine: an engine, verl's server around it, and rollouts through that server.

What stands in for verl's server is the request handling around `AsyncLLM.generate` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from engines import KV_BYTES
from vllm_like import like, plays

from rollspec.audit.distribution import distribution_tests
from rollspec.audit.evidence import Evidence, Samples
from rollspec.audit.reference import Reference
from rollspec.audit.verdict import AuditResult, check_log_probs
from rollspec.config import RollspecConfig
from rollspec.proposal.base import prompt_key
from rollspec.sampling import scoring
from rollspec.telemetry.engine_stats import EngineStats
from rollspec.telemetry.metrics import to_metrics

PROMPTS = tuple(tuple(range(3 + i, 11 + i)) for i in range(6))
LIMIT = 24
PRESENT, PAST = 0.8, 0.4  # the policy that samples, and a sharper one that sampled the old responses

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@contextlib.contextmanager
def event_loop() -> Iterator[Run]:
    """Runs coroutines, each for four minutes at most."""
    loop = asyncio.new_event_loop()
    try:
        yield lambda coroutine: loop.run_until_complete(asyncio.wait_for(coroutine, 240))
    finally:
        pending = asyncio.all_tasks(loop)  # vLLM's, which read from the engine
        for task in pending:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        loop.close()


@contextlib.contextmanager
def started(model: Path, rollspec: dict[str, Any], run: Run) -> Iterator[Any]:
    """An engine with these settings."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def start() -> Any:
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(model),
                dtype="float32",
                enforce_eager=True,
                max_model_len=256,
                max_num_seqs=64,
                kv_cache_memory_bytes=KV_BYTES,
                logprobs_mode="processed_logprobs",
                additional_config={"rollspec": rollspec},
            )
        )

    found = run(start())
    try:
        yield found
    finally:
        found.shutdown()


async def make_server(engine: Any, settings: dict[str, Any]) -> Any:
    """Verl's server around the engine, which reuses responses by these settings."""
    from rollspec_verl.replica import ServerCalls
    from rollspec_verl.reuse import ReusingServer
    from verl.workers.rollout.replica import TokenOutput
    from vllm import SamplingParams

    @plays("verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer")
    class Verl:
        """vLLMHttpServer.generate: SamplingParams from a mapping, tokens and log-probs back."""

        config = like(
            "verl.workers.config.rollout:RolloutConfig",
            response_length=LIMIT,
            prompt_length=16,
            max_model_len=256,
            enable_rollout_routing_replay=False,
            full_determinism=False,
        )
        model_config = like("verl.workers.config.model:HFModelConfig", tokenizer=engine.get_tokenizer())
        lora_as_adapter, _disaggregation_role = False, "null"
        replica_rank = node_rank = global_steps = _admitting = 0

        async def _park_until_admitted(self, request_id: str) -> None:
            self._admitting += 1

        async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Any:
            params = {"max_tokens": LIMIT, **sampling_params, "logprobs": 0, "detokenize": False}
            prompt = {"prompt_token_ids": prompt_ids}
            async for out in engine.generate(prompt, SamplingParams(**params), request_id):
                last = out.outputs[0]
            tokens = list(last.token_ids)
            log_probs = [found[t].logprob for t, found in zip(tokens, last.logprobs, strict=True)]
            return TokenOutput(token_ids=tokens, log_probs=log_probs, stop_reason="completed")

    class Server(ReusingServer, ServerCalls, Verl):
        pass

    out = Server()
    out.engine, out.rollspec_on = engine, True
    await out.rollspec_begin_reuse(RollspecConfig.load(settings, env={}), await out.rollspec_call("info", {}))
    assert out.rollspec_reuse is not None
    out.rollspec_reuse.rng = np.random.default_rng(7)  # not that of the old responses
    await out.rollspec_call("stats", {})  # from here on
    return out


async def rollouts(server: Any, temperature: float, copies: int, tag: str) -> list[tuple[int, str, Any]]:
    """(prompt number, sample, output), all at once."""

    async def one(i: int, c: int) -> tuple[int, str, Any]:
        sample = f"{c}_0"
        params = {"temperature": temperature, "extra_args": {scoring.KEY: {"sample": sample}}}
        return i, sample, await server.generate(list(PROMPTS[i]), params, request_id=f"{tag}-{i}-{c}")

    return await asyncio.gather(*(one(i, c) for i in range(len(PROMPTS)) for c in range(copies)))


def remember(server: Any, found: list[tuple[int, str, Any]], shift: float = 0.0) -> None:
    items = [(prompt_key(PROMPTS[i]), s, o.token_ids, np.array(o.log_probs) + shift) for i, s, o in found]
    server.rollspec_reuse.remember(items, 0)


def audit(sharp: Path, found: list[tuple[int, str, Any]], temperature: float) -> Any:
    samples = Samples(
        tuple(np.array(o.token_ids) for _, _, o in found),
        np.array([i for i, _, _ in found]),
        np.zeros(len(found), dtype=np.int64),
        tuple(np.array(o.log_probs) for _, _, o in found),
    )
    target = Reference(sharp, temperature)
    evidence = Evidence(samples, target.vocab, np.random.default_rng(0))
    target.fill(evidence, PROMPTS)
    return AuditResult(distribution_tests(evidence), samples.n_tokens, log_probs=check_log_probs(evidence))


def counts(answer: dict[str, Any]) -> dict[str, float]:
    return {n: v for n, v in to_metrics(EngineStats.from_dict(answer)).items() if n.startswith("rollspec/reuse/")}
