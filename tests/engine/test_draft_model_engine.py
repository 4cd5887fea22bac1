"""A small draft model in one engine: captured, trained while it idles, swapped in; the text stays what it was."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from engines import build, call, close, generate

pytest.importorskip("speculators")
pytestmark = pytest.mark.engine


def small_model(folder: Path, target: Path) -> Path:
    """A random model of one layer with the target's vocabulary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = json.loads((target / "config.json").read_text())
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {k: config[k] for k in ("vocab_size", "max_position_embeddings", "eos_token_id")}
    LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, head_dim=32, **sizes, **more)).save_pretrained(folder)
    return folder


@pytest.mark.modes
@pytest.mark.slow  # `test_each_class_of_requests_has_a_draft_model_of_its_own` drafts with one, and trains none
def test_osd_with_a_small_draft_model(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "preset": "osd",
        "proposal.drafters": ["draft_model"],
        "proposal.head.model": str(small_model(tmp_path / "small", model)),
        "drafter.dir": str(tmp_path),
        "drafter.training": {"learning_rate": 3e-3, "batch_tokens": 512},
        "drafter.capture.share": 1.0,
    }
    llm = build(model, options)
    try:
        rates = []
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            assert generate(llm, prompts) == plain["greedy"]
            stats, info = call(llm, "stats"), call(llm, "info")["drafter"]
            assert not stats["faults"], stats["faults"]
            rates.append(stats["accepted"] / stats["drafted"])
            if info["promoted"] > 1 and rates[-1] > rates[0] + 0.05:
                break
            time.sleep(2.0)  # the engine idles
        assert set(stats["plays"]) == {"draft_model:5"}
        assert info["promoted"] > 1 and info["version"] > 0 and rates[-1] > rates[0] + 0.05, json.dumps([rates, info])
        assert info["training"]["error"] is None and stats["drafter_levels"]["loss/rejected"] > 0
        assert "loss/accept_0" not in stats["drafter_levels"], "it learns only where it was rejected"
    finally:
        close(llm)
