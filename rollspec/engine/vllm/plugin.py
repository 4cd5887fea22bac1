"""The one entry point of `vllm.general_plugins`: reaches the engine whoever builds it, and is inert until asked.

vLLM loads it in every process: where the engine is built it wraps `EngineArgs.create_engine_config`, and in the worker
it installs the hooks. It is asked by `ROLLSPEC=<preset|yaml>`, by `additional_config={"rollspec": ...}`, or by an
integration through `enable(...)`; without one of these it changes nothing.

    ROLLSPEC=default python train.py
    vllm serve MODEL --additional-config '{"rollspec": "default"}'
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

from rollspec.config import RollspecConfig, Source, resolve, switched_on
from rollspec.engine.vllm import arrivals, compat, heads, overlap, patches, places, prometheus

logger = logging.getLogger("rollspec")

KEY = "rollspec"
PROPOSER = "rollspec.engine.vllm.proposer.VllmProposer"

_enabled: Source = None


def register() -> None:
    """Called by vLLM in every process, possibly more than once. Installs wrappers only; imports nothing heavy."""
    if patches.wanted_by_environment():
        patches.install()
    patches.on_import("vllm.engine.arg_utils", _wrap_engine_args)
    patches.on_import("vllm.v1.worker.worker_base", _wrap_worker)
    arrivals.register()
    overlap.register()
    prometheus.register()


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


def _wrap_engine_args(module: ModuleType) -> None:
    cls = module.EngineArgs
    create = cls.create_engine_config
    if getattr(create, "_rollspec", False):
        return

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        source = _asked_for(self)
        if source is not None:
            configure(self, source)
        vllm_config = create(self, *args, **kwargs)
        overlap.switch_on(vllm_config)
        if engine_config(vllm_config) is not None and (problem := compat.check_vocabulary(vllm_config)):
            logger.warning("rollspec: %s.", problem)
        return vllm_config

    create_engine_config._rollspec = True  # type: ignore[attr-defined]
    cls.create_engine_config = create_engine_config


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
        level = logging.INFO if not config.enabled else logging.WARNING
        what = "without speculation" if config.mode == "standard" else "without speculation and coupled sampling"
        logger.log(level, "rollspec: this engine runs %s because %s.", what, reason)
        args.additional_config = {**(args.additional_config or {}), KEY: {"off": reason}}
        return
    config, method = heads.settle(args, config)
    if not config.proposal.drafters and config.mode == "standard":  # coupled sampling goes on without drafts
        args.additional_config = {**(args.additional_config or {}), KEY: {"off": "no drafter fits this engine"}}
        return
    if config.drafter.mode == "dedicated" and config.drafter.endpoint is None:
        from rollspec.engine import daemon

        config = daemon.settle(config, str(args.model))
    args.additional_config = {**(args.additional_config or {}), KEY: config.to_dict()}
    overlap.want(args)
    # A fresh dict each time: vLLM writes into it.
    args.speculative_config = {"num_speculative_tokens": config.proposal.k_max}
    if method is None:
        args.speculative_config |= {"method": "custom_class", "model": PROPOSER}
    else:
        # vLLM's own proposer, whose rows ours replaces on their way out: greedy drafts.
        args.speculative_config |= {"method": method, "model": config.proposal.learned.model}
        if getattr(args, "load_format", None) == "dummy":  # trainers send the target's weights, not the drafter's
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


def engine_config(vllm_config: Any) -> RollspecConfig | None:
    """The configuration an engine was built with, or None where rollspec is off in it."""
    given = (getattr(vllm_config, "additional_config", None) or {}).get(KEY)
    if not isinstance(given, dict) or "off" in given:
        return None
    return RollspecConfig.from_dict(given)


def _wrap_worker(module: ModuleType) -> None:
    wrapper, base = module.WorkerWrapperBase, module.WorkerBase
    init_device, initialize = wrapper.init_device, wrapper.initialize_from_config
    if getattr(init_device, "_rollspec", False):
        return

    @functools.wraps(init_device)
    def patch_and_init_device(self: Any) -> None:
        # Plugins are loaded inside `init_worker`, so this is the first step that can be wrapped; it is early enough:
        # the model runner is made here and the model, whose weights are packed, is loaded after it.
        if patches.wanted_by_environment() is not False and engine_config(self.vllm_config) is not None:
            patches.install()
        config = engine_config(self.vllm_config)
        if config is not None and config.drafter.captures:
            from rollspec.engine.vllm import capture

            patches.on_import("vllm.v1.worker.gpu_model_runner", capture.widen)
        init_device(self)
        if config is not None and config.proposal.learned.specialists:
            from rollspec.engine.vllm import specialists

            drafter = getattr(self.worker.model_runner, "drafter", None)
            if hasattr(drafter, "_maybe_share_embeddings"):  # vLLM's own proposer of heads
                specialists.arrange(drafter, config.proposal.learned.specialists)

    @functools.wraps(initialize)
    def initialize_and_install(self: Any, kv_cache_configs: list[Any]) -> None:
        initialize(self, kv_cache_configs)
        config = engine_config(self.vllm_config)
        if config is not None:
            from rollspec.engine.vllm.worker import install

            install(self.worker, config)
        if overlap.on(self.vllm_config):  # whatever became of the rest
            overlap.Overlap(self.worker.model_runner)
        elif config is not None:
            places.Unpadded(self.worker.model_runner)

    def rollspec(self: Any, op: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        from rollspec.engine.vllm.worker import call

        return call(self, op, payload or {})

    patch_and_init_device._rollspec = True  # type: ignore[attr-defined]
    wrapper.init_device = patch_and_init_device
    wrapper.initialize_from_config = initialize_and_install
    base.rollspec = rollspec
