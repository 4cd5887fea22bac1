from __future__ import annotations

import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from vllm_like import like

from rollspec import RollspecConfig
from rollspec.config import resolve
from rollspec.engine.vllm import compat, plugin
from rollspec.errors import ConfigError


def args(**kwargs: Any) -> Any:
    defaults = {
        "speculative_config": None, "additional_config": {}, "async_scheduling": None, "logits_processors": None,
        "pipeline_parallel_size": 1, "tensor_parallel_size": 1, "distributed_executor_backend": None, "runner": "auto",
        "load_format": "auto",
    }  # fmt: skip
    return like("vllm.engine.arg_utils:EngineArgs", **{**defaults, **kwargs})


@pytest.fixture(autouse=True)
def tested_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.32.0")
    for name in ("ROLLSPEC", compat.V2_SWITCH):
        monkeypatch.delenv(name, raising=False)


def reason(config: Any = "default", **kwargs: Any) -> str | None:
    return compat.unaccelerated_because(args(**kwargs), RollspecConfig.load(config))


def test_an_ordinary_engine_is_accelerated() -> None:
    assert reason() is None


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [
        ({"speculative_config": {"method": "ngram"}}, "speculative_config"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"runner": "pooling"}, "pooling"),
        ({"config": {"enabled": False}}, "enabled"),
        ({"config": {"proposal.drafters": []}}, "drafters"),
        ({"logits_processors": ["mine:Processor"]}, "logits_processors"),
    ],
)
def test_what_cannot_be_accelerated_says_why(kwargs: dict[str, Any], word: str) -> None:
    said = reason(**kwargs)
    assert said is not None and word in said and "\n" not in said


def test_a_cpu_without_kernels_for_the_second_runner_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    first = like("vllm.config:VllmConfig", use_v2_model_runner=False)
    monkeypatch.setattr(compat, "find_spec", lambda name: None)
    assert compat.no_runner_because(first) == compat.NO_KERNELS
    monkeypatch.setattr(compat, "find_spec", lambda name: object() if name == "triton" else None)
    assert "first model runner" in (compat.no_runner_because(first) or "")


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "1.0", "0"])
def test_versions_outside_the_range(version: str) -> None:
    said = compat.unsupported_version(version)
    assert said is not None and version in said and compat.TESTED in said


def test_configure_writes_the_speculative_config() -> None:
    a = args(additional_config={"other": 1, "rollspec": "default"})
    plugin.configure(a, "default")
    assert a.speculative_config == {
        "method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 1, "num_speculative_tokens": 16,
    }  # fmt: skip
    assert a.additional_config["other"] == 1
    again = compat.engine_config(a)
    assert again == RollspecConfig.load("default")


def test_an_engine_that_gets_the_first_model_runner_is_built_again_without_speculation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    built: list[Any] = []

    def create(given: Any) -> Any:
        built.append((given.speculative_config, dict(given.additional_config)))
        return like(
            "vllm.config:VllmConfig",
            additional_config=given.additional_config,
            use_v2_model_runner=False,
            _get_v2_model_runner_unsupported_features=lambda: ["watermarks"],
        )

    a = args(additional_config={"rollspec": "default", "other": 1})
    config = plugin._create_engine_config(create, a)
    assert [b[0] is None for b in built] == [False, True] and built[1][1]["other"] == 1
    assert compat.engine_config(config) is None and "watermarks" in config.additional_config["rollspec"]["off"]
    assert sum("without speculation because" in r.getMessage() for r in caplog.records) == 1


def test_configure_takes_resolved_settings_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSPEC__HISTORY__DIR", "/data")
    of_trainer = resolve("default").of_replica(0)
    for source in (of_trainer, of_trainer.to_dict()):
        a = args()
        plugin.configure(a, source)
        assert compat.engine_config(a) == of_trainer and of_trainer.history.dir == Path("/data/replica_0")
    a = args()
    plugin.configure(a, {"preset": "suffix_only"})
    assert compat.engine_config(a) == resolve("suffix_only"), "what a user wrote meets the environment, once"


def test_configure_leaves_an_unsupported_engine_alone() -> None:
    a = args(pipeline_parallel_size=2)
    plugin.configure(a, "default")
    assert a.speculative_config is None
    assert compat.engine_config(a) is None
    plugin.configure(a, a.additional_config["rollspec"])  # as when the arguments are used a second time
    assert a.speculative_config is None


def test_configure_refuses_a_typo() -> None:
    with pytest.raises(ConfigError, match=r"proposal\.k_max"):
        plugin.configure(args(), {"proposal.kmax": 4})


def test_switches_and_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin._asked_for(args()) is None
    monkeypatch.setenv("ROLLSPEC", "suffix_only")
    assert plugin._asked_for(args()) == "suffix_only"
    monkeypatch.setattr(plugin, "_enabled", "default")
    assert plugin._asked_for(args()) == "default"
    assert plugin._asked_for(args(additional_config={"rollspec": {"proposal.k_max": 2}})) == {"proposal.k_max": 2}


def test_vocabulary_mismatch() -> None:
    assert compat.vocabulary_mismatch(151665, 151936) is None
    said = compat.vocabulary_mismatch(300, 272)
    assert said is not None and "300" in said and "272" in said


def test_every_patch_states_its_range_reference_and_end() -> None:
    from rollspec.engine.vllm.hooks import PATCHES

    for patch in PATCHES:
        assert patch.name and patch.versions and patch.targets and patch.why and patch.removal


def test_patch_outside_its_range_is_left_out() -> None:
    from rollspec.engine.vllm.hooks import PATCHES

    for patch in PATCHES:
        assert patch.apply("0.1.0") is False


def test_waiting_pauses_instead_of_spinning_and_longer_the_longer_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import ModuleType

    from rollspec.engine.vllm.hooks import CpuIdleWait, cpu

    now = [100.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    queue = ModuleType("vllm.distributed.device_communicators.shm_broadcast")
    monkeypatch.setitem(sys.modules, queue.__name__, queue)
    monkeypatch.setattr(cpu, "time", like("time", sleep=sleep, monotonic=lambda: now[0]))
    monkeypatch.setattr(cpu, "_wait", threading.local())
    queue.sched_yield = lambda: None  # type: ignore[attr-defined]
    CpuIdleWait.install("0.32.0", *CpuIdleWait.arounds)
    for _ in range(2):
        slept.clear()
        while sum(slept) < 0.1:
            queue.sched_yield()
        assert slept == sorted(slept) and slept[0] == cpu.SHORTEST and slept[-1] < 0.005
        assert len(slept) * cpu.LOOK < 0.002, "looking takes no more than a fiftieth of the wait"
        now[0] += 0.001  # the message is read, and what it asks for is done


def test_a_patch_that_only_saves_time_does_not_switch_speculation_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollspec.engine.vllm import hooks

    monkeypatch.setattr(hooks, "_patched", [])
    monkeypatch.setattr(hooks.Patch, "needed", lambda patch: True)
    assert hooks.missing() == ["cpu_repack_weights"]


def test_what_vllm_would_drop_silently_keeps_speculation_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        m.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        assert "VLLM_USE_V2_MODEL_RUNNER=0" in (reason() or "")
    entry = metadata.EntryPoint("watermark", "somewhere:Processor", "vllm.logits_processors")
    monkeypatch.setattr(compat.metadata, "entry_points", lambda group: [entry])
    assert "'watermark'" in (reason() or "")


def test_a_tokenizer_larger_than_the_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    tokenizer = like(
        "transformers.models.auto.tokenization_auto:AutoTokenizer", from_pretrained=lambda *a, **k: range(300)
    )
    monkeypatch.setattr(transformers, "AutoTokenizer", tokenizer)
    model = like(
        "vllm.config:ModelConfig",
        skip_tokenizer_init=False,
        tokenizer="t",
        trust_remote_code=False,
        get_vocab_size=lambda: 272,
    )
    assert "300" in (compat.check_vocabulary(like("vllm.config:VllmConfig", model_config=model)) or "")
    model.skip_tokenizer_init = True
    assert compat.check_vocabulary(like("vllm.config:VllmConfig", model_config=model)) is None
