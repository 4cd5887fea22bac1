"""The MTP layer of a checkpoint as a drafter: run where it pays, rested, caught up, and no token changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engines import ALWAYS, build, call, close, generate
from switching import any_arm_and_passes

pytestmark = pytest.mark.engine


def model_with_mtp(folder: Path, tokenizer: Path) -> Path:
    """A random MiMo of two layers and one for MTP, with the tokenizer of another model."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    of = json.loads((tokenizer / "config.json").read_text())
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=of["vocab_size"], eos_token_id=of["eos_token_id"], max_position_embeddings=1024,
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    last = "model.layers.1."
    layer = {n.replace(last, "model.mtp_layers.0."): t.clone() for n, t in weights.items() if n.startswith(last)}
    mine = {f"model.mtp_layers.0.{n}_layernorm.weight": torch.ones(64) for n in ("token", "hidden", "final")}
    mine["model.mtp_layers.0.input_proj.weight"] = torch.cat([0.1 * torch.eye(64), torch.eye(64)], dim=1)
    save_file({**weights, **layer, **mine}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, folder / file.name)
    return folder


def test_an_mtp_layer_drafts_rests_and_catches_up(model: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    target = model_with_mtp(tmp_path / "mimo", model)
    alone = build(target)
    try:
        wanted = generate(alone, prompts)
    finally:
        close(alone)
    llm = build(target, {"proposal.drafters": ["mtp"], "proposal.head.k_max": 3, **ALWAYS})
    try:
        assert generate(llm, prompts) == wanted
        stats, info = call(llm, "stats"), call(llm, "info")
        assert not stats["faults"], stats["faults"]
        assert info["state"] == "mtp" and stats["drafted"] > 0 and stats["accepted"] > 0, [info, stats]
        llm.collective_rpc(any_arm_and_passes)
        assert generate(llm, prompts) == wanted
        stats, info = call(llm, "stats"), call(llm, "info")
        assert not stats["faults"] and info["drafter"]["caught_up"] > 0 and not info["drafter"]["off"], [info, stats]
    finally:
        close(llm)
