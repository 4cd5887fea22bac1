"""Puts rollspec into a worker that runs vLLM's second model runner: where it is kept, what a head gets beside it, and
what the worker must have.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from rollspec.config import RollspecConfig
from rollspec.engine import operations
from rollspec.engine.bridge import Bridge, PolicyWatch
from rollspec.engine.noise_keys import NoiseKeys
from rollspec.engine.vllm import compat, hooks, specialists
from rollspec.engine.vllm.hooks import table as v2
from rollspec.engine.vllm.v2.adapter import Adapter
from rollspec.engine.vllm.v2.layers import LAYERS
from rollspec.engine.vllm.v2.max_acceptance import MaxAcceptance
from rollspec.engine.vllm.v2.scoring import score_prompts
from rollspec.engine.vllm.v2.speculator_run import SpeculatorRun
from rollspec.engine.vllm.v2.verify import Verification
from rollspec.errors import UnsupportedEngineError
from rollspec.head.draft_head import DraftHead
from rollspec.head.ranks import Ranks
from rollspec.step import DraftEngine

logger = logging.getLogger("rollspec")

BRIDGE = "_rollspec"
"""On a model runner: rollspec's side of it."""


def bridge(worker: Any) -> Bridge | None:
    """rollspec's side of a worker, or None where rollspec is not on in it."""
    found: Bridge | None = getattr(getattr(worker, "model_runner", None), BRIDGE, None)
    return found


def make_speculator(make: Callable[..., Any], vllm_config: Any, *args: Any) -> Any:
    """Around `init_speculator`: model-free drafts alone get `ModelFreeSpeculator`; a head gets its specialists."""
    from rollspec.engine.vllm.v2.speculator import ModelFreeSpeculator

    given, config = vllm_config.speculative_config, compat.engine_config(vllm_config)
    if config is not None and given.method == compat.MEMORY_METHOD:
        return ModelFreeSpeculator(int(given.num_speculative_tokens))
    speculator = make(vllm_config, *args)
    if config is not None and config.proposal.head.specialists:
        specialists.arrange(speculator, config.proposal.head.specialists, _ranks_of(vllm_config))
    return speculator


def install(worker: Any, config: RollspecConfig) -> None:
    """Attach rollspec to a worker whose model and KV cache are ready.

    A fault here leaves the engine without speculation; it does not keep it from starting.
    """
    from rollspec.engine.vllm.v2.speculator import ModelFreeSpeculator

    runner = worker.model_runner
    ranks = _ranks_of(worker.vllm_config)
    model, machine = worker.vllm_config.model_config, compat.machine_of(worker.vllm_config)
    bridge = Bridge(config, int(model.max_model_len), machine, lambda: compat.tokenizer_of(runner.model_config))
    hooks.keep(runner, BRIDGE, bridge)
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
        if absent := hooks.missing():
            raise UnsupportedEngineError(
                f"vLLM {compat.vllm_version()} needs the patches {', '.join(absent)} to sample correctly, and "
                f"{hooks.ENV_PATCHES}=none forbids them; unset it"
            )
        # vLLM reads drafts from the first tensor-parallel rank of the last pipeline stage only (`output_rank`).
        bridge.drafting = int(worker.rank) % int(worker.vllm_config.parallel_config.tensor_parallel_size) == 0
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
            layers, further = getattr(runner.speculator, LAYERS, None), specialists.of(runner.speculator)
            head = DraftHead(bridge, runner, ranks, drafter, layers, further)
            if head.capture is not None:
                v2.ProcessLogits.wrap(runner.sampler, head.look, __name__)
            _equip(worker, bridge, head, config)
            adapter.head = head
    except Exception as e:
        bridge.fail("installation", e)
        return
    operations.load_history(bridge)


def _warm(config: RollspecConfig) -> None:
    """Load what the first steps would load while requests wait: compiled lookups and the cost model's solver.

    An engine of its own drafts for one request and is thrown away.
    """
    engine = DraftEngine(config, 64)
    engine.begin("warm", [1, 2, 3], 32)
    for n in range(1, 10):
        engine.timed(n, True, 0.01 * n, 1)  # the eighth measured step fits the costs
        engine.step(["warm"], [[1 + n % 3]], {})
    engine.finish("warm")


def _equip(worker: Any, bridge: Bridge, head: DraftHead, config: RollspecConfig) -> None:
    """Give a worker's head what swaps and trains it; where no trainer can be fed, the engine serves with the head it
    has.
    """
    from drafter_online.errors import DrafterError
    from rollspec.engine import daemon
    from rollspec.engine.vllm.draft_weights import DraftWeights
    from rollspec.head.swap import Swapper
    from rollspec.head.training import HeadTraining

    weights = DraftWeights(head)
    head.swapper = Swapper(head, weights, head.ranks, config.proposal.head.canary_drafts)
    bridge.head = head  # last: from now on it sees the steps
    _watch_sleep(worker, head)
    if not (config.drafter.trains and head.trainable):
        return
    weights.build()  # now rather than at the first swap
    if head.capture is None:  # this rank does not draft
        return
    try:
        folder = config.drafter.dir if config.drafter.mode == "idle" else None
        head.training = HeadTraining(head, folder and daemon.devices(folder) / _device_name(head.device))
    except (DrafterError, OSError) as e:
        bridge.count("drafter feedback")
        head.capture.paused = True
        logger.error("rollspec: the drafter gets no feedback: %s", str(e).removeprefix("drafter-online: "))


def _watch_sleep(worker: Any, head: DraftHead) -> None:
    """Track when the engine sleeps (its memory is released) and wakes up (the contents of its memory are unknown)."""

    def falls_asleep(sleep: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with head.reading:
            head.sleeps(True)
        return sleep(*args, **kwargs)

    def wakes_up(wake_up: Callable[..., Any], tags: list[str] | None = None) -> Any:
        out = wake_up(tags)
        if tags is None or "weights" in tags:
            head.sleeps(False)
            head.swapper.wake()
            if head.specialists is not None:
                head.specialists.stale = True
        return out

    if hasattr(worker, "sleep") and hasattr(worker, "wake_up"):
        v2.WorkerSleep.wrap(worker, falls_asleep, __name__)
        v2.WorkerWakeUp.wrap(worker, wakes_up, __name__)


def _device_name(device: torch.device) -> str:
    """What every process of the machine calls a device."""
    from vllm.platforms import current_platform

    return str(current_platform.get_device_uuid(device.index or 0)) if current_platform.is_cuda() else str(device)


def _ranks_of(vllm_config: Any) -> Ranks:
    """The tensor-parallel group that this worker is in."""
    if int(vllm_config.parallel_config.tensor_parallel_size) <= 1:
        return Ranks()
    from vllm.distributed.parallel_state import get_tp_group

    return Ranks(get_tp_group())
