"""EAGLE-3 heads of SpecForge and SGLang, read as `speculators` names them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter_online.architecture import aux_layers, target_config
from drafter_online.errors import HeadError

if TYPE_CHECKING:
    from torch import Tensor


def speculators_config(target: str | Path, tokens: int) -> Any:
    """The part of a head's configuration that says which target it is for, and how many tokens it drafts."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig.from_pretrained(str(target)),
    )


def from_specforge(
    plain: dict[str, Any], weights: dict[str, Tensor], target: str | Path
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """SpecForge's and SGLang's layout: `midlayer.*`, and a flat configuration with the layer's fields."""
    if not any(n.startswith("midlayer.") for n in weights):
        raise HeadError(
            "drafter-online: a head without `speculators_model_type` and without `midlayer.*` is not known."
        )
    weights = {n.replace("midlayer.", "layers.0.", 1): t for n, t in weights.items()}
    verifier = target_config(target)
    eagle = plain.get("eagle_config") or {}
    aux = eagle.get("eagle_aux_hidden_state_layer_ids") or plain.get("eagle_aux_hidden_state_layer_ids")
    drop = {"architectures", "eagle_config", "draft_vocab_size", "dtype", "torch_dtype", "transformers_version"}
    layer = {k: v for k, v in plain.items() if k not in drop}
    layer.setdefault("head_dim", layer["hidden_size"] // layer["num_attention_heads"])
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": plain.get("draft_vocab_size") or verifier.vocab_size,
        "target_hidden_size": plain.get("target_hidden_size"),
        **{n: bool(plain.get(n, eagle.get(n))) for n in ("norm_before_residual", "norm_before_fc", "fc_norm")},
        "norm_output": bool(plain.get("norm_output")),
        "eagle_aux_hidden_state_layer_ids": aux or aux_layers(verifier.num_hidden_layers),
        "transformer_layer_config": {
            **layer,
            "model_type": "llama",
            "vocab_size": verifier.vocab_size,
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
        },
        "speculators_config": speculators_config(target, 3).model_dump(),
    }
    return config, weights
