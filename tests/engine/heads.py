"""Small drafters for the engine tests: heads with random weights that fit the example's policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def random_head(folder: Path, target: Path, seed: int = 0, scale: float = 0.05) -> Path:
    """An EAGLE-3 head in speculators format with random weights: accepted now and then, by chance."""
    from safetensors.torch import save_file

    from drafter_online.architecture import aux_layers

    config = json.loads((target / "config.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    save_file(random_weights(config, seed, scale), folder / "model.safetensors")
    depth = config["num_hidden_layers"]
    layer = {
        k: config[k]
        for k in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                  "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act")
    }  # fmt: skip
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Eagle3DraftModel"],
                "speculators_model_type": "eagle3",
                "speculators_version": "0.9.0",
                "draft_vocab_size": config["vocab_size"],
                "target_hidden_size": config["hidden_size"],
                "norm_before_residual": False,
                "eagle_aux_hidden_state_layer_ids": aux_layers(depth),
                "transformer_layer_config": {
                    **layer,
                    "model_type": "llama",
                    "num_hidden_layers": 1,
                    "rope_theta": 10000.0,
                    "tie_word_embeddings": False,
                    "attention_bias": False,
                },
                "speculators_config": {
                    "algorithm": "eagle3",
                    "default_proposal_method": "greedy",
                    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                    "verifier": {"name_or_path": str(target), "architectures": config["architectures"]},
                },
                "torch_dtype": "float32",
            }
        )
    )
    return folder


def specforge_head(folder: Path, target: Path, seed: int = 0) -> Path:
    """The same head as SpecForge writes it, with an embedding of its own."""
    import torch
    from safetensors.torch import save_file

    random_head(folder, target, seed)
    config = json.loads((target / "config.json").read_text())
    weights = {n.replace("layers.0.", "midlayer."): t for n, t in random_weights(config, seed).items()}
    weights["embed_tokens.weight"] = torch.randn(config["vocab_size"], config["hidden_size"])
    save_file(weights, folder / "model.safetensors")
    plain = json.loads((folder / "config.json").read_text())
    layers = {"eagle_aux_hidden_state_layer_ids": plain["eagle_aux_hidden_state_layer_ids"]}
    flat = {"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float32", "eagle_config": layers}
    flat |= plain["transformer_layer_config"] | {"draft_vocab_size": plain["draft_vocab_size"]}
    (folder / "config.json").write_text(json.dumps(flat))
    return folder


def random_weights(config: dict[str, Any], seed: int = 0, scale: float = 0.05) -> dict[str, Any]:
    """The head's own weights; embedding and LM head are the target's."""
    import torch

    g = torch.Generator().manual_seed(seed)

    def r(*shape: int) -> Any:
        return torch.randn(*shape, generator=g) * scale

    h, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    ones = {
        n: torch.ones(h)
        for n in ("norm", "layers.0.input_layernorm", "layers.0.hidden_norm", "layers.0.post_attention_layernorm")
    }
    return {
        "fc.weight": r(h, 3 * h),
        "layers.0.self_attn.q_proj.weight": r(q, 2 * h),
        "layers.0.self_attn.k_proj.weight": r(kv, 2 * h),
        "layers.0.self_attn.v_proj.weight": r(kv, 2 * h),
        "layers.0.self_attn.o_proj.weight": r(h, q),
        "layers.0.mlp.gate_proj.weight": r(inner, h),
        "layers.0.mlp.up_proj.weight": r(inner, h),
        "layers.0.mlp.down_proj.weight": r(h, inner),
        **{f"{n}.weight": w for n, w in ones.items()},
    }
