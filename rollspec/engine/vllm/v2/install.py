"""Puts rollspec into a worker that runs vLLM's second model runner."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from rollspec.config import RollspecConfig
from rollspec.engine import operations
from rollspec.engine.bridge import Bridge
from rollspec.engine.noise_keys import NoiseKeys
from rollspec.engine.policy import PolicyWatch
from rollspec.engine.vllm import compat
from rollspec.engine.vllm.hooks import keep
from rollspec.engine.vllm.hooks import table as v2
from rollspec.engine.vllm.settings import engine_config

logger = logging.getLogger("rollspec")


def make_speculator(make: Callable[..., Any], vllm_config: Any, *args: Any) -> Any:
    """Around `init_speculator`: model-free drafts alone get `ModelFreeSpeculator`; a head gets its specialists."""
    from rollspec.engine.vllm import specialists
    from rollspec.engine.vllm.v2.speculator import ModelFreeSpeculator

    given, config = vllm_config.speculative_config, engine_config(vllm_config)
    if config is not None and given.method == compat.MEMORY_METHOD:
        return ModelFreeSpeculator(int(given.num_speculative_tokens))
    speculator = make(vllm_config, *args)
    if config is not None and config.proposal.head.specialists:
        specialists.arrange(speculator, config.proposal.head.specialists)
    return speculator


def install(worker: Any, config: RollspecConfig) -> None:
    """Attach rollspec to a worker whose model and KV cache are ready.

    A fault here leaves the engine without speculation; it does not keep it from starting.
    """
    from rollspec.engine.vllm.v2.adapter import Adapter
    from rollspec.engine.vllm.v2.head import RunnerDraftHead
    from rollspec.engine.vllm.v2.max_acceptance import MaxAcceptance
    from rollspec.engine.vllm.v2.scoring import score_prompts
    from rollspec.engine.vllm.v2.speculator import ModelFreeSpeculator
    from rollspec.engine.vllm.v2.speculator_run import SpeculatorRun
    from rollspec.engine.vllm.v2.verify import Verification
    from rollspec.engine.vllm.worker import BRIDGE, equip, is_output_rank, ranks_of, ready

    runner = worker.model_runner
    ranks = ranks_of(worker.vllm_config)
    model, machine = worker.vllm_config.model_config, compat.machine_of(worker.vllm_config)
    bridge = Bridge(config, int(model.max_model_len), machine, lambda: compat.tokenizer_of(runner.model_config))
    keep(runner, BRIDGE, bridge)
    adapter = Adapter(bridge, runner, ranks)
    bridge.runner, bridge.running, bridge.join = runner, adapter.requests, adapter.join
    run = runner.speculator.propose
    v2.BeginStep.wrap(runner, adapter.execute_model, __name__)
    v2.EndStep.wrap(runner, adapter.sample_tokens, __name__)
    v2.GiveDrafts.wrap(runner, adapter.take_draft_token_ids, __name__)
    v2.SampleStep.wrap(runner, adapter.sample, __name__)
    v2.Propose.wrap(runner.speculator, adapter.propose, __name__)

    def coupled() -> bool:
        return bridge.mode == "coupled"

    def shares_noise() -> bool:
        return coupled() and config.coupled.drafts == "noise"

    model_free = isinstance(runner.speculator, ModelFreeSpeculator)
    try:
        ready()
        bridge.drafting = is_output_rank(worker)
        if config.mode == "coupled":  # on every rank: each draws, and all must draw alike
            noise = bridge.coupled = NoiseKeys(runner, config, bridge.count)
            v2.NoFlashInfer.put(runner.sampler, False, __name__)  # it draws with noise of its own
            v2.GiveSeed.wrap(runner.sampler, noise.add_request, __name__)
        verification = Verification(runner.rejection_sampler, coupled, bridge.uncouple, ranks)
        v2.Verify.wrap(runner.rejection_sampler, verification.around, __name__)
        knows = config.reuse.mode == "replay" or (shares_noise() and not model_free)
        if bridge.drafting and not knows:  # drafts that know the noise are accepted more often than max p
            most = bridge.max_acceptance = MaxAcceptance(runner, lambda req_id: len(bridge.scheduled.get(req_id, ())))
            v2.ProcessLogits.wrap(runner.sampler, most.process, __name__)
            v2.SampleStep.wrap(runner, most.sample, __name__)
        if config.reuse.mode == "lenient":  # on every rank: each computes the log-probs
            scored = functools.partial(score_prompts, adapter.requests)
            v2.ScorePrompts.wrap(runner.prompt_logprobs_worker, scored, __name__)
            bridge.scores = True
        if bridge.drafting:
            _warm(config)
            bridge.engine.think = compat.think_tokens(runner.model_config)
        watch = bridge.policy = PolicyWatch(functools.partial(operations.next_version, bridge))
        v2.LoadWeights.wrap(runner.get_model(), watch.load, __name__)
        if not model_free:
            drafter = SpeculatorRun(runner.speculator, run, runner, shares_noise)
            head = RunnerDraftHead(bridge, runner, ranks, drafter)
            if head.capture is not None:
                v2.ProcessLogits.wrap(runner.sampler, head.look, __name__)
            equip(worker, bridge, head, config)
            adapter.head = head
    except Exception as e:
        bridge.fail("installation", e)
        return
    operations.load_history(bridge)


def _warm(config: RollspecConfig) -> None:
    """Load what the first steps would load while requests wait: compiled lookups and the cost model's solver.

    An engine of its own drafts for one request and is thrown away.
    """
    from rollspec.step import DraftEngine

    engine = DraftEngine(config, 64)
    engine.begin("warm", [1, 2, 3], 32)
    for n in range(1, 10):
        engine.timed(n, True, 0.01 * n, 1)  # the eighth measured step fits the costs
        engine.step(["warm"], [[1 + n % 3]], {})
    engine.finish("warm")
