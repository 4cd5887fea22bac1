"""CUDA graphs for drafts of different lengths: which engines get them, and that vLLM's own dispatch finds them."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
from vllm_like import like, plays

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport  # noqa: E402
from vllm.v1.worker.gpu import cudagraph_utils  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import (  # noqa: E402
    maybe_create_adaptive_verification_manager,
)

from rollspec.engine.vllm.v2 import graphs  # noqa: E402

K, SEQUENCES = 4, 8


@plays("vllm.v1.attention.backend:AttentionMetadataBuilder", "support")
class Attention:
    """A metadata builder of a backend."""

    def __init__(self, support: AttentionCGSupport) -> None:
        self.support = support

    def get_cudagraph_support(self, *_: Any) -> AttentionCGSupport:
        return self.support

    def get_varlen_cudagraph_max_query_len(self, *_: Any) -> None:
        return None


class FLASH_ATTN:  # noqa: N801 - as vLLM names its backends
    """What a warning names."""


def configured(rollspec: bool = True) -> Any:
    more = {"rollspec": {"preset": "default"}} if rollspec else {}
    return like(
        "vllm.config.vllm:VllmConfig",
        additional_config=more,
        num_speculative_tokens=K,
        speculative_config=like(
            "vllm.config.speculative:SpeculativeConfig", uses_dynamic_speculative_decoding=lambda: False
        ),
        scheduler_config=like("vllm.config.scheduler:SchedulerConfig", max_num_seqs=SEQUENCES),
        compilation_config=like(
            "vllm.config.compilation:CompilationConfig",
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
            cudagraph_capture_sizes=[1, 2, 4, 8, 16, 24, 32, 40],
            max_cudagraph_capture_size=40,
        ),
        parallel_config=like("vllm.config.parallel:ParallelConfig", tensor_parallel_size=1),
        cache_config=like("vllm.config.cache:CacheConfig", use_kda_recoverssm=False),
    )


def look(vllm_config: Any, support: AttentionCGSupport = AttentionCGSupport.ALWAYS, manager: Any = None) -> Any:
    group = like(
        "vllm.v1.worker.utils:AttentionGroup",
        layer_names=["layer"],
        backend=FLASH_ATTN,
        kv_cache_spec=None,
        get_metadata_builder=lambda ubatch_id: Attention(support),
    )
    given = {
        "enable_adaptive_verification": False, "attn_groups": [[group]], "num_bonus_tokens": 1, "max_total_logits": 1,
        "req_states": like("vllm.v1.worker.gpu.states:RequestState", num_speculative_steps=K), "query_start_loc": None,
        "vllm_config": vllm_config, "target_layer_names": {"layer"},
        "additional_attn_cg_support": (AttentionCGSupport.ALWAYS, None),
    }  # fmt: skip
    inspect.signature(maybe_create_adaptive_verification_manager).bind(**given)
    return graphs.look_at_attention(lambda **_: manager, **given)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own plan of graphs, as the runner asks for it."""
    rank = like("vllm.distributed.parallel_state:GroupCoordinator", is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    monkeypatch.setattr(cudagraph_utils.current_platform, "get_global_graph_pool", lambda: None, raising=False)

    def plan(vllm_config: Any) -> Any:
        mode = vllm_config.compilation_config.cudagraph_mode
        manager = graphs.make_graphs(
            cudagraph_utils.ModelCudaGraphManager, vllm_config, torch.device("cpu"), mode, decode_query_len=1 + K,
            lora_capture_cases=[0], varlen_decode=False, ubatch_runner=None,
        )  # fmt: skip
        manager._graphs_captured = True
        return manager

    return plan


def mode_of(manager: Any, lengths: list[int], prefill: bool = False) -> tuple[str, int]:
    uniform = lengths[0] if len(set(lengths)) == 1 and not prefill else None
    longest = None if prefill else max(lengths)
    found = manager.dispatch(len(lengths), sum(lengths), uniform, 0, max_query_len=longest)
    return found.cg_mode.name, found.num_tokens


STEPS = {"no drafts": [1] * 5, "some": [1, 5, 2, 1, 4], "all": [5] * 5, "one": [1]}


@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
def test_steps_with_drafts_of_any_length_replay_a_full_graph(planned: Any, lengths: list[int]) -> None:
    vllm_config = configured()
    assert look(vllm_config) is None
    mode, tokens = mode_of(planned(vllm_config), lengths)
    assert mode == "FULL" and sum(lengths) <= tokens < sum(lengths) + 8


def test_a_step_with_a_prompt_does_not_nor_one_that_is_too_long(planned: Any) -> None:
    vllm_config = configured()
    look(vllm_config)
    manager = planned(vllm_config)
    assert mode_of(manager, [1, 3], prefill=True)[0] == "PIECEWISE"
    assert mode_of(manager, [1, K + 2])[0] == "PIECEWISE"


def test_without_it_vllm_has_none_for_them(planned: Any) -> None:
    """What this is for: the day vLLM replays full graphs by itself, these hooks go."""
    manager = planned(configured(rollspec=False))
    modes = {name: mode_of(manager, lengths)[0] for name, lengths in STEPS.items()}
    assert modes == {"no drafts": "PIECEWISE", "some": "PIECEWISE", "all": "FULL", "one": "PIECEWISE"}


def test_kernels_that_cannot_are_named_once(planned: Any, caplog: pytest.LogCaptureFixture) -> None:
    vllm_config = configured()
    with caplog.at_level(logging.WARNING, "rollspec"):
        for _ in range(2):  # once when memory is profiled
            look(vllm_config, AttentionCGSupport.UNIFORM_BATCH)
    (said,) = [r.getMessage() for r in caplog.records]
    assert "FLASH_ATTN" in said and "without full CUDA graphs" in said
    assert mode_of(planned(vllm_config), STEPS["some"])[0] == "PIECEWISE"
    assert mode_of(planned(vllm_config), STEPS["all"])[0] == "FULL"


def test_engines_without_rollspec_or_graphs_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    plain, eager, adaptive = configured(rollspec=False), configured(), configured()
    eager.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    manager = object()
    with caplog.at_level(logging.WARNING, "rollspec"):
        look(plain, AttentionCGSupport.NEVER)
        look(eager, AttentionCGSupport.NEVER)
        assert look(adaptive, AttentionCGSupport.NEVER, manager) is manager
    assert not caplog.records
    assert not any(hasattr(c, graphs.VARIABLE) for c in (plain, eager, adaptive))
