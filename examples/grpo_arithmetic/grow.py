"""Grow a Qwen3 policy in width and depth without changing what it computes.

A policy small enough to train in minutes decodes so fast that there is nothing for speculation to save. The grown one
has the same logits and costs what a larger target costs. How each part stays the same function (all exact up to
floating-point order; see Net2Net, Chen et al. 2016, arXiv:1511.05641, for the idea):

* residual stream: new channels are never written (zero embedding columns, zero output rows), so they hold zero; what
  reads them is random, so the first gradient step writes to them.
* RMSNorm: the mean of squares over ``r = d_old / d_new`` as dense a vector is ``r`` times the old one. With
  ``eps' = r * eps`` and ``weight' = sqrt(r) * weight`` the output is the old one exactly.
* q_norm / k_norm share that ``eps``: with q_proj and k_proj times ``sqrt(r)`` their mean of squares is ``r`` times as
  large too.
* new attention heads (whole key/value groups) and new MLP channels: random inputs, zero output columns.
* new layers: random, with zero o_proj and down_proj, spread evenly between the old ones.

At a width ratio of 4 every factor is a power of two, so nothing is lost in bfloat16 either.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True)
class Size:
    """Target sizes of a grown policy."""

    hidden_size: int = 512
    intermediate_size: int = 384
    num_hidden_layers: int = 16
    num_attention_heads: int = 4
    num_key_value_heads: int = 2


def grown_config(old: Qwen3Config, size: Size) -> Qwen3Config:
    """The configuration after growth; raises ``ValueError`` naming the field that cannot be reached."""
    for field, value in vars(size).items():
        if value < getattr(old, field):
            raise ValueError(f"{field}={value} is below the source's {getattr(old, field)}: growth cannot shrink")
    old_ratio = old.num_attention_heads // old.num_key_value_heads
    if size.num_attention_heads != old_ratio * size.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads={size.num_attention_heads} must be {old_ratio} x num_key_value_heads="
            f"{size.num_key_value_heads}: query heads would move to other key/value heads"
        )
    values = copy.deepcopy(old.to_dict())
    values.update(vars(size))
    values["layer_types"] = None  # derived from the number of layers
    values["rms_norm_eps"] = old.rms_norm_eps * old.hidden_size / size.hidden_size
    return Qwen3Config(**values)


def layer_positions(old_layers: int, new_layers: int) -> list[int]:
    """Where the old layers go among the new ones: evenly, in order, the first one first."""
    return [index * new_layers // old_layers for index in range(old_layers)]


def _place(target: torch.Tensor, source: torch.Tensor, scale: float = 1.0) -> None:
    """Copy ``source`` times ``scale`` into the leading corner of ``target`` (same number of dimensions)."""
    target[tuple(slice(0, length) for length in source.shape)] = source * scale


@torch.no_grad()
def grow(model: Qwen3ForCausalLM, size: Size, seed: int = 0) -> Qwen3ForCausalLM:
    """Return a larger float32 policy with the logits of ``model``.

    Args:
        model: a Qwen3 policy, tied or untied embeddings; left unchanged.
        size: the sizes to reach, none below the source's.
        seed: seed of the new random weights.
    """
    old_cfg = model.config
    new_cfg = grown_config(old_cfg, size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        new = Qwen3ForCausalLM(new_cfg).to(torch.float32)
    source = {name: tensor.float() for name, tensor in model.state_dict().items()}
    root = (old_cfg.hidden_size / size.hidden_size) ** 0.5  # sqrt(r) above

    # The table is written to the residual stream: its new columns must be zero (and with tied embeddings read as zero).
    new.model.embed_tokens.weight.zero_()
    _place(new.model.embed_tokens.weight, source["model.embed_tokens.weight"])
    if not new_cfg.tie_word_embeddings:
        _place(new.lm_head.weight, source["lm_head.weight"])
    new.model.norm.weight.fill_(root)
    _place(new.model.norm.weight, source["model.norm.weight"], root)

    positions = layer_positions(old_cfg.num_hidden_layers, size.num_hidden_layers)
    for index, layer in enumerate(new.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        attention.o_proj.weight.zero_()
        mlp.down_proj.weight.zero_()
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.fill_(root)
        if index not in positions:
            continue
        prefix = f"model.layers.{positions.index(index)}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            _place(getattr(layer, name).weight, source[f"{prefix}{name}.weight"], root)
        for name in ("q_norm", "k_norm"):
            _place(getattr(attention, name).weight, source[f"{prefix}self_attn.{name}.weight"])
        for name, scale in (("q_proj", root), ("k_proj", root), ("v_proj", 1.0)):
            _place(getattr(attention, name).weight, source[f"{prefix}self_attn.{name}.weight"], scale)
        for name in ("gate_proj", "up_proj"):
            _place(getattr(mlp, name).weight, source[f"{prefix}mlp.{name}.weight"])
        _place(attention.o_proj.weight, source[f"{prefix}self_attn.o_proj.weight"])
        _place(mlp.down_proj.weight, source[f"{prefix}mlp.down_proj.weight"])
    new.generation_config = copy.deepcopy(model.generation_config)
    return new


def write_policy(
    checkpoint: Path, folder: Path, tokenizer: PreTrainedTokenizerFast, grown: bool, seed: int
) -> Qwen3ForCausalLM:
    """Write a shipped policy, grown or as it is, and its tokenizer into `folder`; the policy."""
    policy = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if grown:
        policy = grow(policy, Size(), seed=seed)
    policy.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return policy


def count_parameters(model: torch.nn.Module) -> int:
    """Number of distinct parameters (tied ones once)."""
    return sum(parameter.numel() for parameter in model.parameters())
