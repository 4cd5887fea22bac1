"""What a drafter must match of its target: its architecture, sizes and vocabulary, and the layers that a head reads."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafter_online.errors import HeadError

# What of a target decides whether a drafter fits it. Weights are not among it: in RL they change at every step.
_BASE_FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)

# Of layers that are no attention: parts of their names in `layer_types`, and fields that only such models have.
RECURRENT = ("linear", "mamba", "recurrent", "conv", "ssm", "rwkv")
STATES = ("ssm_cfg", "state_size", "ssm_state_size", "mamba_d_state", "hybrid_override_pattern")


def target_config(target: str | Path) -> Any:
    """The target's (text) configuration as `transformers` reads it.

    Raises:
        HeadError: there is none.
    """
    from speculators.models.utils import get_verifier_config

    try:
        return get_verifier_config(str(target))
    except (OSError, ValueError, KeyError) as e:
        raise HeadError(f"{target} is not a model that transformers can read ({e}); give a checkpoint's folder.") from e


def check_room(target: str | Path, config: Any) -> None:
    """That a model has room for an EAGLE-3 head.

    Raises:
        HeadError: it has none.
    """
    if why := without_room(config):
        raise HeadError(f"{target} {why}; give a decoder-only model whose layers are all attention.")


def without_room(config: Any) -> str | None:
    """Why a model (its configuration: an object or a mapping) has no room for an EAGLE-3 head, as a part of a sentence:
    it is an encoder-decoder, or has layers with a recurrent state, which rejected drafts cannot leave. Else None.
    """
    get = functools.partial(_field, config)
    kind = get("model_type")
    if get("is_encoder_decoder"):
        return f"is an encoder-decoder model ({kind}), which has no room for an EAGLE-3 head"
    kinds = [str(kind), *(get("layer_types") or ()), *(get("layers_block_type") or ())]
    state = next((k for k in kinds if any(word in k for word in RECURRENT)), None)
    state = state or next((n for n in STATES if get(n) is not None), None)
    if state is not None:
        return f"({kind}) has layers with a recurrent state ({state}), which have no room for an EAGLE-3 head"
    return None


def base_of(config: Any) -> str:
    """A name for what a drafter must fit: the target's architecture, sizes and vocabulary.

    Args:
        config: the target's text configuration (an object or a mapping). Engines have it at hand.
    """
    fields = {n: _field(config, n) for n in _BASE_FIELDS}
    short = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]
    return "{model_type}-l{num_hidden_layers}-h{hidden_size}-v{vocab_size}-".format(**fields) + short


def _field(config: Any, name: str) -> Any:
    """Of a configuration, an object or a mapping; None where it has none of that name."""
    plain: dict[str, Any] = dict(config) if isinstance(config, Mapping) else vars(config)
    return plain.get(name, getattr(config, name, None))


def is_draft_model(folder: str | Path) -> bool:
    """Whether a folder (or name on the hub) holds a language model of its own, not a head for a target's states."""
    try:
        plain = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return not Path(folder).exists()  # of the hub, where `transformers` finds it
    names = " ".join(plain.get("architectures") or ())
    return "speculators_model_type" not in plain and "ForCausalLM" in names and "Eagle3" not in names


def aux_layers(layers: int) -> list[int]:
    """Auxiliary layers for a target with that many: EAGLE-3's (2, n/2, n-3) where they are three, else spread out."""
    chosen = [2, layers // 2, layers - 3]
    if not 2 < layers // 2 < layers - 3:
        chosen = [1, layers // 2, layers - 1] if layers > 3 else list(range(layers - 2, layers + 1))
    check_aux_layers(chosen, layers)
    return chosen


def check_aux_layers(chosen: Sequence[int], layers: int) -> None:
    """Assert the convention of `samples`: ascending, each the number of decoder layers before it, 0..layers.

    Raises:
        HeadError: naming the first that does not fit.
    """
    if len(chosen) < 2 or list(chosen) != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] > layers:
        raise HeadError(
            f"auxiliary layers {list(chosen)} do not fit a target of {layers} layers; give at least "
            f"two, ascending, each from 0 (the embedding) to {layers} (after the last layer)."
        )
