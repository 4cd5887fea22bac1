"""Hooks in the processes that build an engine, schedule its steps and serve its answers."""

from __future__ import annotations

from rollspec.engine.vllm.hooks.base import ANY, Hook


class CreateEngineConfig(Hook):
    """Where every engine begins, whatever builds it: settings are read and speculation is switched on."""

    name = "create_engine_config"
    targets = ("vllm.engine.arg_utils:EngineArgs.create_engine_config",)
    versions = ANY
    by = ("plugin",)
    why = "switches speculation on, or says in one sentence why an engine is left alone"
    removal = "vLLM lets a plugin complete EngineArgs"


class AddRequest(Hook):
    """Where requests still come in the order in which they were submitted."""

    name = "add_request"
    targets = ("vllm.v1.core.sched.scheduler:Scheduler.add_request",)
    by = ("sample_index",)
    correctness = True
    why = "numbers requests in the order they arrive, which names the noise of coupled sampling"
    removal = "coupled sampling draws from the engine's own seeded noise"


class OutputHandler(Hook):
    """The first call in a server's process for which there is an event loop."""

    name = "run_output_handler"
    targets = ("vllm.v1.engine.async_llm:AsyncLLM._run_output_handler",)
    by = ("prometheus",)
    why = "starts the task that brings rollspec's metrics to a server's /metrics"
    removal = "vLLM lets a plugin add metrics of the workers to /metrics"


class ReserveSlots(Hook):
    """The asynchronous scheduler reserves the draft slots of the next step."""

    name = "update_after_schedule"
    targets = ("vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule",)
    by = ("scheduling",)
    why = "keeps slots for drafts that may not come from eating the token budget that prompts need"
    removal = "vLLM reserves slots by what drafters say they will use"


class UpdateFromOutput(Hook):
    """A step's result reaches the scheduler."""

    name = "update_from_output"
    targets = ("vllm.v1.core.sched.scheduler:Scheduler.update_from_output",)
    by = ("scheduling",)
    why = "says how many of the reserved slots had a draft, for vLLM's own statistics"
    removal = "the model runner's output says how many drafts were verified"


class DraftStatistics(Hook):
    """vLLM counts a request's drafts."""

    name = "make_spec_decoding_stats"
    targets = ("vllm.v1.core.sched.scheduler:Scheduler.make_spec_decoding_stats",)
    by = ("scheduling",)
    why = "leaves out requests whose slots had no draft"
    removal = UpdateFromOutput.removal
