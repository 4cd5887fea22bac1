"""Puts rollspec into a worker that runs vLLM's second model runner."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rollspec.config import RollspecConfig
from rollspec.engine.vllm.proposer import VllmProposer
from rollspec.engine.vllm.ranks import Ranks

logger = logging.getLogger("rollspec")


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put `around(original, ...)` in the place of `owner.name`: on a class it gets `self` after the original.

    Once each: functions of several names stand around each other, the newest outside.
    """
    original = getattr(owner, name)
    marks = getattr(original, "_rollspec", ())
    if around.__qualname__ in marks:
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapped._rollspec = (*marks, around.__qualname__)  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def replace_speculator(module: ModuleType) -> None:
    """`init_speculator` as the runner's module sees it: drafts from memory alone get `MemorySpeculator`.

    `module`: vllm.v1.worker.gpu.model_runner.
    """
    from rollspec.engine.vllm.plugin import engine_config
    from rollspec.engine.vllm.v2 import layers

    def init_speculator(make: Callable[..., Any], vllm_config: Any, *args: Any) -> Any:
        from rollspec.engine.vllm.v2.speculator import METHOD, MemorySpeculator

        given = vllm_config.speculative_config
        if engine_config(vllm_config) is not None and given.method == METHOD:
            return MemorySpeculator(int(given.num_speculative_tokens))
        return make(vllm_config, *args)

    wrap(module, "init_speculator", init_speculator)
    wrap(module.GPUModelRunner, "load_model", layers.read_and_widen)


def schedule(module: ModuleType) -> None:
    """What the scheduler of an accelerated engine does otherwise; `module`: vllm.v1.core.sched.async_scheduler."""
    from rollspec.engine.vllm.plugin import engine_config
    from rollspec.engine.vllm.v2 import scheduling

    def only_ours(around: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduler.use_v2_model_runner and engine_config(scheduler.vllm_config) is not None:
                return around(original, scheduler, *args, **kwargs)
            return original(scheduler, *args, **kwargs)

        return chosen

    wrap(module.AsyncScheduler, "_update_after_schedule", only_ours(scheduling.limit_slots))
    wrap(module.Scheduler, "update_from_output", only_ours(scheduling.count_drafts))
    wrap(module.Scheduler, "make_spec_decoding_stats", only_ours(scheduling.leave_out_empty))


def install(worker: Any, config: RollspecConfig) -> None:
    """Attach rollspec to a worker whose model and KV cache are ready.

    A fault here leaves the engine without speculation; it does not keep it from starting.
    """
    from rollspec.engine.vllm.policy import PolicyWatch
    from rollspec.engine.vllm.v2.adapter import Adapter
    from rollspec.engine.vllm.v2.ceiling import Ceiling
    from rollspec.engine.vllm.v2.coupled import SeededNoise
    from rollspec.engine.vllm.v2.drafter import Drafter
    from rollspec.engine.vllm.v2.head import Head
    from rollspec.engine.vllm.v2.scoring import Scoring
    from rollspec.engine.vllm.v2.speculator import MemorySpeculator
    from rollspec.engine.vllm.v2.verify import Verification
    from rollspec.engine.vllm.worker import equip, is_output_rank, load_history, next_version, ready

    runner = worker.model_runner
    ranks = Ranks.of(int(worker.vllm_config.parallel_config.tensor_parallel_size))
    bridge = runner.__dict__["drafter"] = VllmProposer(worker.vllm_config)
    adapter = Adapter(bridge, runner, ranks)
    bridge.runner, bridge.running, bridge.join = runner, adapter.requests, adapter.join
    run = runner.speculator.propose
    wrap(runner, "execute_model", adapter.execute_model)
    wrap(runner, "sample_tokens", adapter.sample_tokens)
    wrap(runner, "take_draft_token_ids", adapter.take_draft_token_ids)
    wrap(runner, "sample", adapter.sample)
    wrap(runner.speculator, "propose", adapter.propose)

    def coupled() -> bool:
        return bridge.mode == "coupled"

    def shares_noise() -> bool:
        return coupled() and config.coupled.drafts == "noise"

    memory = isinstance(runner.speculator, MemorySpeculator)
    try:
        ready()
        bridge.drafting = is_output_rank(worker)
        if config.mode == "coupled":  # on every rank: each draws, and all must draw alike
            noise = bridge.coupled = SeededNoise(runner, config, bridge.count)
            wrap(runner.sampler, "add_request", noise.add_request)
        verification = Verification(runner.rejection_sampler, coupled, bridge.uncouple, ranks)
        wrap(runner.rejection_sampler, "_verify", verification.around)
        knows = config.reuse.mode == "coupled" or (shares_noise() and not memory)
        if bridge.drafting and not knows:  # drafts that know the noise are right more often than max p
            ceiling = bridge.ceiling = Ceiling(runner, lambda req_id: len(bridge.scheduled.get(req_id, ())))
            wrap(runner.sampler, "apply_sampling_params", ceiling.process)
            wrap(runner, "sample", ceiling.sample)
        if config.reuse.mode == "lenient":  # on every rank: each computes the log-probs
            wrap(runner.prompt_logprobs_worker, "compute_prompt_logprobs", Scoring(adapter.requests).compute)
            bridge.scores = True
        bridge.policy = PolicyWatch(runner.get_model(), functools.partial(next_version, bridge))
        if not memory:
            drafter = Drafter(runner.speculator, run, runner, shares_noise)
            # Where the first runner has them: vLLM's drafter, and rollspec beside it.
            runner.__dict__["drafter"], runner.__dict__["_rollspec"] = drafter, bridge
            head = Head(bridge, runner, ranks, drafter)
            if head.capture is not None:
                wrap(runner.sampler, "apply_sampling_params", head.look)
            equip(worker, bridge, head, config)
            adapter.head = head
    except Exception as e:
        bridge.fail("installation", e)
        return
    load_history(bridge)
