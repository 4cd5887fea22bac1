"""The models of the suite: shapes without weights for costs, heads for them, and a small real policy for acceptance."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import Spec

QWEN3: dict[str, dict[str, Any]] = {
    "qwen3-1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
                   "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512, "tie_word_embeddings": False},
}  # fmt: skip
"""As in the published config.json of Qwen/Qwen3-1.7B and Qwen/Qwen3-8B."""

MAX_LEN = 2048


def target(folder: str | Path, shape: str, dtype: str = "bfloat16") -> Path:
    """A checkpoint's folder with a configuration and no weights: for `load_format="dummy"`."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "max_position_embeddings": 40_960 if shape != "tiny" else MAX_LEN,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": dtype,
        **QWEN3[shape],
    }
    return _write(Path(folder) / f"{shape}-{dtype}", config)


def trainable(folder: str | Path, shape: str) -> Path:
    """The same with what of a target a head is trained against: embedding, final norm and LM head, at random."""
    import torch
    from safetensors.torch import save_file

    path = target(Path(folder) / "trainable", shape)
    file, c = path / "model.safetensors", QWEN3[shape]
    if not file.is_file():
        matrix = 0.02 * torch.randn(c["vocab_size"], c["hidden_size"], generator=torch.Generator().manual_seed(0))
        weights = {
            "model.embed_tokens.weight": matrix.bfloat16(),
            "model.norm.weight": torch.ones(c["hidden_size"], dtype=torch.bfloat16),
        }
        if not c["tie_word_embeddings"]:
            weights["lm_head.weight"] = matrix.flip(0).bfloat16().contiguous()
        save_file(weights, file.with_suffix(".part"), metadata={"format": "pt"})
        file.with_suffix(".part").rename(file)
    return path


def head(folder: str | Path, shape: str, dtype: str = "bfloat16") -> Path:
    """An EAGLE-3 head for `target` without weights, in speculators format: one Llama layer of the target's sizes."""
    aimed, c = target(folder, shape, dtype), QWEN3[shape]
    depth = c["num_hidden_layers"]
    layer = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10_000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        **{k: c[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
                             "num_key_value_heads", "head_dim")},
    }  # fmt: skip
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": c["vocab_size"],
        "target_hidden_size": c["hidden_size"],
        "norm_before_residual": False,
        # As EAGLE-3 chooses them: early, middle, late.
        "eagle_aux_hidden_state_layer_ids": [2, depth // 2, depth - 3] if depth > 8 else [1, depth // 2, depth - 1],
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": str(aimed), "architectures": ["Qwen3ForCausalLM"]},
        },
        "torch_dtype": dtype,
    }
    return _write(Path(folder) / f"{shape}-{dtype}-head", config)


def real(spec: Spec) -> str:
    """A checkpoint that says something: the one that was given, or the demo's policy."""
    if spec.model is not None:
        return spec.model
    from examples.cache import built_once
    from examples.grpo_arithmetic.prepare import inputs_hash

    size = "tiny" if spec.dry else "demo"
    name = f"policy-{size}-{inputs_hash(size, 0, 0, 0)[:12]}"
    return str(built_once(spec.folder, name, "config.json", lambda folder: _policy(folder, size)))


def _policy(folder: Path, size: str) -> None:
    """The demo's policy with its tokenizer, without its data, which take packages that a bare machine may lack."""
    import torch
    from transformers import Qwen3ForCausalLM

    from examples.grpo_arithmetic.grow import Size, grow
    from examples.grpo_arithmetic.prepare import CHECKPOINT
    from examples.grpo_arithmetic.tokenizer import build_tokenizer

    policy = Qwen3ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    if size == "demo":
        policy = grow(policy, Size(), seed=0)
    policy.to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def real_prompts(model: str, count: int) -> list[list[int]]:
    """The demo's problems as token ids of the model's tokenizer, in the demo's chat format."""
    from transformers import AutoTokenizer

    from examples.grpo_arithmetic.task import sample_problem
    from examples.grpo_arithmetic.tokenizer import prompt_text

    tokenizer, rng = AutoTokenizer.from_pretrained(model), random.Random(0)
    texts = [prompt_text(sample_problem(rng).question) for _ in range(count)]
    return [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


def _write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=1)
    path = folder / "config.json"
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)
    return folder
