"""What rollspec calls, reads or derives from in vLLM without changing it, by the module that does.

`scripts/check_vllm.py` compares these signatures between versions along with the hooks' own targets.
"""

from __future__ import annotations

from collections.abc import Mapping

_DRAFTER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_REJECTION = "vllm.v1.sample.rejection_sampler:RejectionSampler"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

USES: Mapping[str, tuple[str, ...]] = {
    "plugin.py": ("vllm.config.vllm:VllmConfig.use_v2_model_runner",),
    "proposer.py": (
        f"{_RUNNER}._input_fits_in_drafter",
        "vllm.v1.core.sched.output:NewRequestData",
    ),
    "overlap.py": (
        "vllm.v1.core.sched.output:SchedulerOutput",
        "vllm.v1.core.sched.output:CachedRequestData",
        "vllm.v1.core.sched.output:GrammarOutput",
        "vllm.v1.outputs:ModelRunnerOutput",
        "vllm.v1.engine.core:EngineCore.step_with_batch_queue",
    ),
    "scheduler.py": (
        f"{_SCHEDULER}.schedule",
        f"{_SCHEDULER}.update_from_output",
        f"{_SCHEDULER}.make_spec_decoding_stats",
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule",
    ),
    "coupled.py": (
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p",
        "vllm.v1.sample.rejection_sampler:apply_sampling_constraints",
        "vllm.v1.sample.sampler:Sampler.apply_logits_processors",
        "vllm.v1.sample.sampler:Sampler.apply_temperature",
        f"{_REJECTION}.forward",
        f"{_REJECTION}.apply_logits_processors",
        f"{_REJECTION}._get_logprobs_tensors",
        "vllm.v1.sample.metadata:SamplingMetadata",
        "vllm.v1.spec_decode.metadata:SpecDecodeMetadata",
        "vllm.v1.outputs:SamplerOutput",
    ),
    "learned.py": (
        "vllm.v1.outputs:DraftTokenIds",
        "vllm.v1.attention.backend:CommonAttentionMetadata",
    ),
    "swap/weights.py": (
        f"{_DRAFTER}._get_model",
        "vllm.config.vllm:set_current_vllm_config",
    ),
    "v2/adapter.py": (
        "vllm.v1.outputs:DraftTokenIds",
        "vllm.v1.worker.gpu.async_utils:AsyncOutput",
        "vllm.v1.worker.gpu.states:RequestState",
        "vllm.v1.worker.gpu.input_batch:InputBatch",
    ),
    "specialists.py": (
        "vllm.compilation.backends:set_model_tag",
        "vllm.v1.worker.gpu.spec_decode.eagle.utils:load_eagle_model",
        "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.load_model",
        "vllm.v1.worker.gpu.block_table:BlockTables.compute_slot_mappings",
        "vllm.v1.worker.gpu.dp_utils:dispatch_cg_and_sync_dp",
    ),
    "v2/speculator.py": ("vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator",),
    "v2/verify.py": (
        "vllm.v1.worker.gpu.sample.gumbel:gumbel_sample",
        "vllm.v1.worker.gpu.sample.sampler:Sampler.apply_sampling_params",
        "vllm.v1.worker.gpu.sample.states:SamplingStates",
    ),
    "prometheus.py": ("vllm.v1.engine.async_llm:AsyncLLM.collective_rpc",),
}
"""Targets as in `Hook.targets`. Data that is only read (`input_batch`, `requests`) is covered by the engine tests."""
