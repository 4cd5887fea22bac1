"""Where a fresh head's decoder layers start: as the target's last ones, which already read its hidden states.

The head's first layer reads the next token's embedding beside the hidden state: each half of its queries, keys and
values starts as the target's, scaled so that their sum has the variance of one. `fc` starts as the last auxiliary state
alone. Where the target has its last layer under other names, in other shapes or quantized, the head starts random.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

DOUBLED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
ALIKE = ("self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")


def start_as_target(head: Any, target: str | Path, layers: int) -> list[int]:
    """Give a fresh head the weights of the last of the target's `layers` layers, and its final norm's gain.

    Returns:
        the target's layers that were taken, in the order of the head's; empty where there is none that fits.
    """
    from speculators.models.utils import uses_gemma_style_final_norm

    gain = float(uses_gemma_style_final_norm(head.config))  # Gemma's norms multiply by 1 + what is stored
    taken = [layers - len(head.layers) + i for i in range(len(head.layers))]
    if taken[0] < 0:
        return []
    found = _read(target, [f"layers.{at}.{name}" for at in taken for name in (*DOUBLED, *NORMS, *ALIKE)])
    pairs: list[tuple[Tensor, Tensor]] = []
    for i, at in enumerate(taken):
        ours = dict(head.layers[i].named_parameters())
        for name in (*DOUBLED, *NORMS, *ALIKE):
            given = found.get(f"layers.{at}.{name}")
            if given is None or given.dtype not in (torch.float32, torch.float16, torch.bfloat16):
                return []
            given = given.float()
            if name in NORMS:
                given = given + gain
            if i == 0 and name in DOUBLED:
                given = torch.cat([given, given], dim=1) * math.sqrt(0.5)
            pairs.append((ours[name], given))
            if i == 0 and name == NORMS[0]:
                pairs.append((ours["hidden_norm.weight"], given))
    width = head.fc.weight.shape[0]
    if any(own.shape != given.shape for own, given in pairs) or head.fc.weight.shape[1] % width:
        return []
    with torch.no_grad():
        for own, given in pairs:
            own.copy_(given)
        head.norm.weight.copy_(head.verifier_norm.weight)
        head.fc.weight.zero_()
        head.fc.weight[:, -width:] = torch.eye(width)
    return taken


def _read(target: str | Path, names: list[str]) -> dict[str, Tensor]:
    """Those of the target's tensors that it has."""
    from speculators.utils.loading import load_model_layers

    try:
        return dict(load_model_layers(names, str(target)))
    except (OSError, ValueError, KeyError) as e:
        log.info("drafter-online: the head's layers start random (%s)", e)
        return {}
