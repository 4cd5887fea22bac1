"""The plugin and the patches in a real engine: weight sync, preemption, refusals. Each engine is real vLLM on CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import build, call, close, generate

pytestmark = pytest.mark.engine


def _load_weights(worker: Any, path: str) -> None:
    """What TRL and OpenRLHF do after a policy update: one `load_weights` per parameter, and no repacking."""
    from safetensors.torch import load_file

    for name, tensor in load_file(path).items():
        worker.model_runner.model.load_weights([(name, tensor)])


def _greedy_hf(model: Any, prompts: list[list[int]], n: int) -> list[list[int]]:
    import torch

    out = []
    with torch.no_grad():
        for p in prompts:
            ids = torch.tensor([p])
            got = model.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)
            out.append(got[0, len(p) :].tolist())
    return out


@pytest.mark.supports("vLLM", "any program", "policy versions")
def test_weight_sync_without_repacking_matches_hf(
    model: Path,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    """After a large weight change loaded the TRL way, greedy vLLM with drafts equals greedy HF, token for token."""
    policy, weights = _changed(model, tmp_path)
    llm = build(model, "default")
    try:
        before = generate(llm, prompts, copies=1, limit=60, ignore_eos=True)
        llm.collective_rpc(_load_weights, args=(weights,))
        for _ in range(2):  # the second time with the first one's tokens as drafts
            after = generate(llm, prompts, copies=1, limit=60, ignore_eos=True)
            expected = _greedy_hf(policy, prompts, 60)
            assert after == [e[: len(a)] for a, e in zip(after, expected, strict=True)]
        assert after != before
        assert call(llm, "stats")["accepted"] > 0
        assert call(llm, "info")["version"] == 1, "loading weights began a version"
        call(llm, "set_version", version=5)
        llm.collective_rpc(_load_weights, args=(weights,))
        generate(llm, prompts[:1], copies=1, limit=20)
        assert call(llm, "info")["version"] == 5, "from then on it is announced"
    finally:
        close(llm)


def test_weight_sync_without_the_patch_is_lost(
    model: Path, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that the patch is for: new weights are refused, or the engine goes on with the old ones."""
    monkeypatch.setenv("ROLLSPEC_PATCHES", "none")
    _, weights = _changed(model, tmp_path)
    llm = build(model, None)
    try:
        before = generate(llm, prompts, copies=1, limit=60, ignore_eos=True)
        try:
            llm.collective_rpc(_load_weights, args=(weights,))
        except Exception:
            return
        assert generate(llm, prompts, copies=1, limit=60, ignore_eos=True) == before
    finally:
        close(llm)


def _changed(model: Path, folder: Path) -> tuple[Any, str]:
    """The policy after a large change of its weights, and a file with them."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    policy.generation_config.eos_token_id = None
    torch.manual_seed(7)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(torch.randn_like(p) * p.std().clamp_min(0.02))
    state = {k: v.contiguous().clone() for k, v in policy.state_dict().items() if k != "lm_head.weight"}
    if not policy.config.tie_word_embeddings:
        state["lm_head.weight"] = policy.lm_head.weight.detach().clone()
    save_file(state, str(folder / "new.safetensors"))
    return policy, str(folder / "new.safetensors")


def test_preemption_keeps_tokens(model: Path, prompts: list[list[int]]) -> None:
    """A KV cache too small for the batch: requests are preempted and resumed, with and without drafts."""
    outputs = []
    for rollspec in (None, "suffix_only"):
        llm = build(model, rollspec, num_gpu_blocks_override=5, block_size=128)
        try:
            for _ in range(2 if rollspec else 1):  # the second time there is something to draft from
                out = generate(llm, prompts, copies=2, limit=180, ignore_eos=True)
            outputs.append(out)
            preempted = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}["vllm:num_preemptions"]
            assert preempted > 0
        finally:
            close(llm)
    assert outputs[0] == outputs[1]


def test_user_speculative_config_is_kept(model: Path, prompts: list[list[int]]) -> None:
    """The user's own speculation wins, and rollspec says that it is off and why."""
    from vllm.engine.arg_utils import EngineArgs

    from rollspec.engine.vllm import plugin

    plugin.register()
    args = EngineArgs(
        model=str(model),
        speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2},
        additional_config={"rollspec": "default"},
    )
    config = args.create_engine_config()
    assert config.speculative_config.method == "ngram"
    assert "speculative_config" in config.additional_config["rollspec"]["off"]


def test_untested_version_runs_unaccelerated(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from rollspec.engine.vllm import compat, plugin

    plugin.register()
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.99.0")
    config = EngineArgs(model=str(model), additional_config={"rollspec": "default"}).create_engine_config()
    assert config.speculative_config is None
    assert "0.99.0" in config.additional_config["rollspec"]["off"]


def test_a_wrong_key_stops_the_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from rollspec.engine.vllm import plugin
    from rollspec.errors import ConfigError

    plugin.register()
    monkeypatch.setenv("ROLLSPEC", "defualt")
    with pytest.raises(ConfigError, match="did you mean 'default'"):
        EngineArgs(model=str(model)).create_engine_config()
    monkeypatch.setenv("ROLLSPEC", "suffix_only")
    config = EngineArgs(model=str(model)).create_engine_config()
    assert config.speculative_config.num_speculative_tokens == 16
