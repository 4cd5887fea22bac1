"""The one entry point of `vllm.general_plugins`: reaches the engine, whatever builds it, and is inert until asked.

vLLM loads it in every process: where the engine is built it wraps `EngineArgs.create_engine_config`, and in the worker
it attaches rollspec to the model runner (`hooks/` has every change, in order). It is asked by `ROLLSPEC=<preset|yaml>`,
by `additional_config={"rollspec": ...}`, or by an integration through `enable(...)`; without one of these it changes
nothing.

    ROLLSPEC=default python train.py
    vllm serve MODEL --additional-config '{"rollspec": "default"}'
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

from rollspec.config import RollspecConfig, Source, resolve, switched_on
from rollspec.engine.vllm import compat, hooks, prometheus
from rollspec.engine.vllm.compat import KEY, engine_config
from rollspec.engine.vllm.hooks import table
from rollspec.engine.vllm.v2 import scheduling
from rollspec.head import checkpoint_resolver

logger = logging.getLogger("rollspec")

_enabled: Source = None


def register() -> None:
    """Called by vLLM in every process, possibly more than once. Installs wrappers only; imports nothing heavy."""
    if hooks.wanted_by_environment():
        hooks.install_patches()
    hooks.install(BEHAVIOUR)


def enable(source: Source = "default") -> None:
    """Switch rollspec on for engines that this process builds from now on (`None` switches it off again)."""
    global _enabled
    _enabled = source
    register()


def _asked_for(args: Any) -> Source:
    given = (args.additional_config or {}).get(KEY)
    if given is not None:
        return given  # type: ignore[no-any-return]
    if _enabled is not None:
        return _enabled
    return switched_on()


def _create_engine_config(create: Any, args: Any, *given: Any, **named: Any) -> Any:
    """Around `EngineArgs.create_engine_config`."""
    source = _asked_for(args)
    if source is not None:
        configure(args, source)
    vllm_config = create(args, *given, **named)
    config = engine_config(vllm_config)
    if config is None:
        return vllm_config
    if (reason := compat.no_runner_because(vllm_config)) is not None:
        args.speculative_config = None
        _leave(args, config, reason)
        return create(args, *given, **named)
    _overlap_steps(vllm_config, args)
    if problem := compat.check_vocabulary(vllm_config):
        logger.warning("rollspec: %s.", problem)
    return vllm_config


def _overlap_steps(vllm_config: Any, args: Any) -> None:
    """Schedule asynchronously on CPUs as well, where vLLM switches it off (vllm/platforms/cpu.py).

    With one worker in a process of its own: elsewhere nothing could overlap, or it was never run.
    """
    parallel = vllm_config.parallel_config
    if (
        args.async_scheduling is not False
        and parallel.distributed_executor_backend == "mp"
        and parallel.world_size == 1
    ):
        vllm_config.scheduler_config.async_scheduling = True


def _leave(args: Any, config: RollspecConfig, reason: str) -> None:
    """Log in one sentence why the engine of these `EngineArgs` runs as it would without rollspec."""
    level = logging.INFO if not config.enabled else logging.WARNING
    what = "without speculation" if config.mode == "standard" else "without speculation and coupled sampling"
    logger.log(level, "rollspec: this engine runs %s because %s.", what, reason)
    _keep(args, {"off": reason})


def _keep(args: Any, settings: dict[str, Any]) -> None:
    """What every process of the engine reads of rollspec: its settings, or why it is off (`info` says so)."""
    args.additional_config = {**(args.additional_config or {}), KEY: settings}


def configure(args: Any, source: Source) -> None:
    """Turn `EngineArgs` into those of an accelerated engine, or log in one sentence why they are left as they are.

    Raises:
        ConfigError: the configuration itself is wrong (a typo must stop the start, not silently cost the speed-up).
    """
    if isinstance(source, dict) and "off" in source:
        return
    config = resolve(source)  # as it is where a trainer resolved it; from here on it is data
    reason = compat.unaccelerated_because(args, config)
    if reason is not None:
        _leave(args, config, reason)
        return
    config, method = checkpoint_resolver.settle(args, config)
    if not config.proposal.drafters and config.mode == "standard":  # coupled sampling needs no drafts
        _keep(args, {"off": "no drafter fits this engine"})
        return
    if config.drafter.mode == "policy" and "verl" not in sys.modules:
        logger.warning(
            "rollspec: drafter.mode = policy reads the training pass of verl's policy, which is not here; samples are "
            "taken from the engine, as with dedicated."
        )
        config = config.change({"drafter.mode": "dedicated"})
    if config.drafter.trains and config.drafter.endpoint is None:
        from rollspec.engine import daemon

        config = daemon.settle(config, str(args.model))
    _keep(args, config.to_dict())
    compat.ask_for_runner()
    # A fresh dict each time: vLLM writes into it.
    args.speculative_config = {"num_speculative_tokens": config.proposal.k_max}
    if method is None:
        args.speculative_config |= {"method": compat.MEMORY_METHOD, "prompt_lookup_min": 1, "prompt_lookup_max": 1}
    else:
        # vLLM's own proposer, whose rows ours replaces when they are returned: greedy drafts.
        args.speculative_config |= {"method": method, "model": config.proposal.head.model, **compat.keep_last_block()}
        if args.load_format == "dummy":  # trainers send the target's weights, not the drafter's
            args.speculative_config["draft_load_config"] = {"load_format": "auto"}
    logger.info(
        "rollspec: speculation is on (preset %s, mode %s, drafters %s, up to %d tokens).",
        config.preset,
        config.mode,
        ", ".join(config.proposal.drafters) or "none",
        config.proposal.k_max,
    )
    if config.reuse.mode == "lenient":
        logger.warning(
            "rollspec: reuse.mode = lenient (LOSSY) starts rollouts from old responses where rollspec_verl drives the "
            "engine; driven by anything else it reuses none and stays exact."
        )


def _init_device(init_device: Any, wrapper: Any) -> None:
    """Around `WorkerWrapperBase.init_device`.

    Plugins are loaded inside `init_worker`, so this is the first step that can be wrapped; it is early enough: the
    model runner is made here and the model, whose weights are packed, is loaded after it.
    """
    config = engine_config(wrapper.vllm_config)
    if hooks.wanted_by_environment() is not False and config is not None:
        hooks.install_patches()
    if config is not None:
        from rollspec.engine.vllm.v2 import graphs, install, layers

        hooks.install(
            {
                table.InitSpeculator: install.make_speculator,
                table.LookAtAttention: graphs.look_at_attention,
                table.MakeGraphs: graphs.make_graphs,
                table.LoadTarget: layers.read_and_widen,
            }
        )
    init_device(wrapper)


def _initialize_from_config(initialize: Any, wrapper: Any, kv_cache_configs: list[Any]) -> None:
    """Around `WorkerWrapperBase.initialize_from_config`."""
    initialize(wrapper, kv_cache_configs)
    config = engine_config(wrapper.vllm_config)
    if config is not None:
        from rollspec.engine.vllm.v2.install import install

        install(wrapper.worker, config)


def _worker_call(worker: Any, op: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
    """`WorkerBase.rollspec`, which trainers call by `collective_rpc`."""
    from rollspec.engine.operations import call
    from rollspec.engine.vllm.v2.install import bridge

    return call(bridge(worker), op, payload or {})


BEHAVIOUR: Mapping[hooks.Hook, hooks.Around] = {
    table.CreateEngineConfig: _create_engine_config,
    table.InitDevice: _init_device,
    table.InitializeFromConfig: _initialize_from_config,
    table.WorkerCall: _worker_call,
    table.AddRequest: scheduling.add_request,
    table.OutputHandler: prometheus.run_output_handler,
    table.ReserveSlots: scheduling.limit_slots,
    table.UpdateFromOutput: scheduling.count_drafts,
    table.DraftStatistics: scheduling.leave_out_empty,
}
"""What runs in the place of vLLM's functions, in every process; `hooks.HOOKS` has the order."""
