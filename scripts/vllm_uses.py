"""What rollspec calls, reads or derives from in vLLM without changing it, by the module that does.

`scripts/check_vllm.py` compares these signatures between versions along with the hooks' own targets.
"""

from __future__ import annotations

from collections.abc import Mapping

_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator"

USES: Mapping[str, tuple[str, ...]] = {
    "plugin.py": ("vllm.config.vllm:VllmConfig.use_v2_model_runner",),
    "draft_weights.py": (
        f"{_SPECULATOR}:DraftModelSpeculator.load_draft_model",
        "vllm.config.vllm:set_current_vllm_config",
    ),
    "v2/adapter.py": (
        "vllm.v1.core.sched.output:SchedulerOutput",
        "vllm.v1.core.sched.output:NewRequestData",
        "vllm.v1.core.sched.output:GrammarOutput",
        "vllm.v1.outputs:ModelRunnerOutput",
        "vllm.v1.outputs:DraftTokenIds",
        "vllm.v1.worker.gpu.async_utils:AsyncOutput",
        "vllm.v1.worker.gpu.states:RequestState",
        "vllm.v1.worker.gpu.input_batch:InputBatch",
    ),
    "specialists.py": (
        "vllm.compilation.backends:set_model_tag",
        "vllm.v1.worker.gpu.spec_decode.eagle.utils:load_eagle_model",
        f"{_SPECULATOR}:DraftModelSpeculator.load_model",
        "vllm.v1.worker.gpu.block_table:BlockTables.compute_slot_mappings",
        "vllm.v1.worker.gpu.dp_utils:dispatch_cg_and_sync_dp",
    ),
    "v2/speculator.py": (f"{_SPECULATOR}:BaseSpeculator",),
    "v2/verify.py": (
        "vllm.v1.worker.gpu.sample.gumbel:gumbel_sample",
        "vllm.v1.worker.gpu.sample.sampler:Sampler.apply_sampling_params",
        "vllm.v1.worker.gpu.sample.states:SamplingStates",
    ),
    "prometheus.py": ("vllm.v1.engine.async_llm:AsyncLLM.collective_rpc",),
}
"""Targets as in `Hook.targets`. Data that is only read (`input_batch`, `requests`) is covered by the engine tests."""
