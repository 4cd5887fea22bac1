"""EAGLE-3 heads as folders on disk: made fresh for a target, converted, read and written in `speculators` format.

What belongs to the target (embedding, final norm and, with the whole vocabulary, the LM head) is read from the target
and never written: the engine shares its own, and a copy in a drafter's file would be loaded over it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as dump
from torch import Tensor

from drafter_online import vocabulary
from drafter_online.architecture import aux_layers, base_of, check_aux_layers, check_room, target_config
from drafter_online.errors import HeadError
from drafter_online.files import oserror_as, replace
from drafter_online.initial_weights import start_as_target
from drafter_online.modes import normal_mode
from drafter_online.recipes import TTT_STEPS

log = logging.getLogger(__name__)

MODEL, CONFIG = "model.safetensors", "config.json"
OURS = "drafter_online"  # our key in config.json
# torch's own attention with a dense mask: flex attention would have to be compiled, which stalls an engine's worker.
ATTENTION = "sdpa"


def fresh(
    target: str | Path,
    *,
    aux: Sequence[int] | None = None,
    draft_vocab_size: int | None = None,
    counts: Mapping[int, int] | None = None,
    layers: int = 1,
    speculative_tokens: int = TTT_STEPS,
    random: bool = False,
    seed: int = 0,
) -> Any:
    """A new EAGLE-3 head in float32. Its embedding and LM head are the target's, and its layers start as the target's
    last ones (`initial_weights`), or random where these do not fit.

    Args:
        target: folder (or hub name) of the target's checkpoint.
        aux: auxiliary layers; `aux_layers` when None.
        draft_vocab_size: tokens the head can draft; the whole vocabulary when None or not smaller than it.
        counts: how often the target emitted each token; decides which tokens the head can draft. None: the vocabulary's
            first ones, until `refresh` gets counts.
        layers: decoder layers of the head.
        speculative_tokens: draft length written into the configuration (engines can override it).
        random: do not start as the target; `seed`: of the random weights.

    Raises:
        HeadError: the target cannot be read, or an argument does not fit it.
    """
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.utils import flatten_rope_parameters, resolve_draft_intermediate_size
    from transformers import LlamaConfig

    verifier = target_config(target)
    check_room(target, verifier)
    chosen = list(aux) if aux is not None else aux_layers(verifier.num_hidden_layers)
    check_aux_layers(chosen, verifier.num_hidden_layers)
    whole = int(verifier.vocab_size)
    size = min(draft_vocab_size or whole, whole)
    if size < 1:
        raise HeadError(f"draft_vocab_size = {draft_vocab_size} leaves nothing to draft; give 1 or more.")
    # A Llama layer with the target's sizes, whatever the target is: every engine that serves EAGLE-3 serves this one.
    layer = LlamaConfig(
        vocab_size=whole,
        hidden_size=verifier.hidden_size,
        intermediate_size=resolve_draft_intermediate_size(verifier),
        num_hidden_layers=layers,
        num_attention_heads=verifier.num_attention_heads,
        num_key_value_heads=getattr(verifier, "num_key_value_heads", None) or verifier.num_attention_heads,
        head_dim=getattr(verifier, "head_dim", None) or verifier.hidden_size // verifier.num_attention_heads,
        max_position_embeddings=verifier.max_position_embeddings,
        rms_norm_eps=getattr(verifier, "rms_norm_eps", 1e-6),
        rope_parameters=flatten_rope_parameters(verifier).rope_parameters,
        hidden_act="silu",
        attention_bias=False,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    layer._attn_implementation = ATTENTION
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        architectures=["Eagle3DraftModel"],
        draft_vocab_size=size,
        target_hidden_size=verifier.hidden_size,
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=chosen,
        speculators_config=_speculators_config(target, speculative_tokens),
    )
    coverage: float | None = 1.0
    with normal_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3DraftModel(config).float()
        if size < whole:
            d2t, t2d, coverage = vocabulary.choose(counts or {}, size, whole)
            head.load_vocab_mappings(t2d, d2t)
        _attach(head, target)
        taken = [] if random else start_as_target(head, target, verifier.num_hidden_layers)
    setattr(head.config, OURS, {"base": base_of(verifier), "vocabulary_coverage": coverage, "starts_as_layers": taken})
    share = "" if coverage is None else f", {coverage:.4f} of the target's text"
    start = f"as layer {', '.join(map(str, taken))} of its target" if taken else "random"
    log.info("drafter-online: a fresh head starts %s and drafts %d of %d tokens%s", start, size, whole, share)
    return head


def own_weights(head: Any, dtype: Any = None) -> dict[str, Tensor]:
    """What a head's file holds: everything that the target does not have.

    The LM head belongs to the target where the head drafts the whole vocabulary; a pruned one is the head's own.
    """
    shared = {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    if not head.use_draft_vocab:
        shared.add("lm_head.weight")
    state: dict[str, Tensor] = {n: t.detach() for n, t in head.state_dict().items() if n not in shared}
    return {n: t.to(dtype) if dtype is not None and t.is_floating_point() else t for n, t in state.items()}


def config_of(head: Any, dtype: Any = None) -> dict[str, Any]:
    """config.json of a head. Layer fields are written out in full: engines do not know `transformers`' defaults."""
    plain: dict[str, Any] = json.loads(head.config.to_json_string(use_diff=False))
    layer = head.config.transformer_layer_config.to_dict()
    layer = {k: v for k, v in layer.items() if v is not None and not k.startswith("_")}
    name = str(dtype or head.fc.weight.dtype).removeprefix("torch.")
    plain["transformer_layer_config"] = {**layer, "dtype": name, "torch_dtype": name}
    plain[OURS] = getattr(head.config, OURS)
    return {**plain, "dtype": name, "torch_dtype": name}


def save(head: Any, folder: Path | str, dtype: Any = None) -> Path:
    """Write a head as `speculators` and vLLM read it; `dtype` of the weights, the head's own when None.

    Raises:
        HeadError: the folder cannot be written.
    """
    folder = Path(folder)
    weights = {n: t.to("cpu").contiguous() for n, t in own_weights(head, dtype).items()}
    with oserror_as(HeadError, f"a head cannot be written to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        replace(folder / MODEL, dump(weights, metadata={"format": "pt"}))
        replace(folder / CONFIG, json.dumps(config_of(head, dtype), indent=2).encode())
    return folder


def convert(folder: Path | str, target: str | Path, into: Path | str) -> list[str]:
    """Write a head of another layout as `save` does, in its own dtype, without what belongs to the target.

    Returns the names of weights in whose place the target's are used from now on; the configuration keeps them as
    `replaced`. Raises as `load` and `save`.
    """
    head = load(folder, target)
    _, weights = _read(Path(folder))
    state = head.state_dict()
    targets: list[str] = [
        n for n in ("embed_tokens.weight", "lm_head.weight") if n in weights and n not in own_weights(head)
    ]
    replaced = [n for n in targets if not torch.equal(weights[n], state[n].to(weights[n].dtype))]
    getattr(head.config, OURS)["replaced"] = replaced
    save(head, into, weights["fc.weight"].dtype)
    return replaced


def load(folder: Path | str, target: str | Path | None = None) -> Any:
    """Read a head in `speculators` format, or a SpecForge/SGLang one (`midlayer.*`), for training in float32; `target`:
    where its configuration says when None.

    Raises:
        HeadError: a file is missing or damaged, a weight is missing, superfluous or mis-shaped, or it is not for
        `target`.
    """
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    folder = Path(folder)
    plain, weights = _read(folder)
    if "speculators_model_type" not in plain:
        if target is None:
            raise HeadError(f"{folder} does not say which target it is for; give the target.")
        plain, weights = _from_specforge(plain, weights, target)
    config = Eagle3SpeculatorConfig.from_dict({k: v for k, v in plain.items() if k not in ("dtype", "torch_dtype")})
    where = str(target or config.speculators_config.verifier.name_or_path)
    config.speculators_config.verifier.name_or_path = where
    verifier = target_config(where)
    check_aux_layers(config.eagle_aux_hidden_state_layer_ids or [], verifier.num_hidden_layers)
    layer = config.transformer_layer_config
    for name in ("hidden_size", "vocab_size"):
        if getattr(layer, name) != getattr(verifier, name):
            raise HeadError(
                f"the head in {folder} has {name} {getattr(layer, name)}, but its target {where} has "
                f"{getattr(verifier, name)}; give the target it was made for."
            )
    layer._attn_implementation = ATTENTION
    with normal_mode():
        head = Eagle3DraftModel(config).float()
        _fill(head, weights, folder)
        _attach(head, where)
    extra = {"vocabulary_coverage": None, **(plain.get(OURS) or {}), "base": base_of(verifier)}
    setattr(head.config, OURS, extra)
    return head


def refresh(
    head: Any,
    *,
    embed: Tensor | None = None,
    norm: Tensor | None = None,
    lm_head: Tensor | None = None,
    counts: Mapping[int, int] | None = None,
) -> None:
    """Copy the target's present weights into a head under training: in RL they move with the policy.

    An LM head that is the target's rows follows them; one that was trained is not changed. `counts`: how often the
    target emitted each token lately; where other tokens cover more of it, the head drafts them from now on.
    """
    from speculators.models.utils import uses_gemma_style_final_norm

    with torch.no_grad():
        if embed is not None:
            head.embed_tokens.weight.copy_(embed)
        if norm is not None:
            # Gemma's norms multiply by 1 + gain (speculators models/utils.py); the head's by the gain.
            head.verifier_norm.weight.copy_(norm + 1.0 if uses_gemma_style_final_norm(head.config) else norm)
        if lm_head is not None:
            ours = _follows(head)
            found = None
            if ours and head.use_draft_vocab and counts:
                found = vocabulary.better(head.t2d, head.draft_vocab_size, counts)
            if found is not None:
                d2t, t2d, share, before = found
                head.load_vocab_mappings(t2d, d2t)
                getattr(head.config, OURS)["vocabulary_coverage"] = share
                log.info(
                    "drafter-online: the head drafts other %d of %d tokens, %.4f of the target's text; it was %.4f",
                    head.draft_vocab_size, head.verifier_vocab_size, share, before,
                )  # fmt: skip
            rows = lm_head[head.t2d.to(lm_head.device)] if head.use_draft_vocab else lm_head
            head.verifier_lm_head.weight.copy_(rows)
            if ours:
                head.lm_head.weight.copy_(rows)


def fit_vocabulary(head: Any, target: str | Path, counts: Mapping[int, int]) -> None:
    """Have a head draft the tokens that `counts` has most of. As `refresh` with the counts alone, where the target does
    not move: its LM head is read from its checkpoint, and only where other tokens are to be drafted.

    Raises:
        HeadError: the target cannot be read.
    """
    if not head.use_draft_vocab or not _follows(head):
        return
    if vocabulary.better(head.t2d, head.draft_vocab_size, counts) is not None:
        refresh(head, lm_head=of_target(target)[2], counts=counts)


def _follows(head: Any) -> bool:
    """Whether a head's LM head is the target's rows, not one that was trained elsewhere."""
    return not head.use_draft_vocab or bool(head.lm_head.weight.equal(head.verifier_lm_head.weight))


def of_target(target: str | Path) -> tuple[Tensor, Tensor, Tensor]:
    """Embedding, final norm and LM head of a checkpoint; the last is the embedding where they are tied.

    Raises:
        HeadError: they cannot be read.
    """
    from loguru import logger
    from speculators.utils.loading import load_model_layers

    logger.disable("speculators.utils.loading")  # a line per file that is read
    try:
        found = load_model_layers(["embed_tokens.weight", "lm_head.weight", "model.norm.weight"], str(target))
        embed, norm = found["embed_tokens.weight"], found["model.norm.weight"]
    except (OSError, ValueError, KeyError) as e:
        raise HeadError(f"the target {target} has no readable embedding and final norm ({e}).") from e
    return embed, norm, found.get("lm_head.weight", embed)


def _attach(head: Any, target: str | Path) -> None:
    """Fill in what belongs to the target, from its checkpoint."""
    embed, norm, lm_head = of_target(target)
    fresh = head.use_draft_vocab and bool(head.lm_head.weight.isnan().any())
    refresh(head, embed=embed, norm=norm, lm_head=lm_head)
    if fresh:
        head.lm_head.weight.data.copy_(head.verifier_lm_head.weight)
    for name in ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"):
        getattr(head, name).weight.requires_grad_(False)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and all weights of a head's folder."""
    try:
        plain = json.loads((folder / CONFIG).read_bytes())
        weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights |= load_file(file)
    except (OSError, ValueError, SafetensorError) as e:
        raise HeadError(f"{folder} is not a readable head ({e}).") from e
    if not weights:
        raise HeadError(f"{folder} has no safetensors file; heads in other formats are not read.")
    return plain, weights


def _speculators_config(target: str | Path, tokens: int) -> Any:
    """The part of a head's configuration that says which target it is for, and how many tokens it drafts."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm="eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig.from_pretrained(str(target)),
    )


def _from_specforge(
    plain: dict[str, Any], weights: dict[str, Tensor], target: str | Path
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """SpecForge's and SGLang's layout: `midlayer.*`, and a flat configuration with the layer's fields."""
    if not any(n.startswith("midlayer.") for n in weights):
        raise HeadError("a head without `speculators_model_type` and without `midlayer.*` is not known.")
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
        "speculators_config": _speculators_config(target, 3).model_dump(),
    }
    return config, weights


def _fill(head: Any, weights: dict[str, Tensor], folder: Path) -> None:
    own = own_weights(head)
    # A head that brings a copy of what its target has: the target's own is used.
    given = {n: t for n, t in weights.items() if n in own}
    missing = sorted(own.keys() - given.keys())
    spare = sorted(weights.keys() - given.keys() - head.state_dict().keys() - {"d2t", "t2d"})
    wrong = [n for n, t in given.items() if t.shape != own[n].shape]
    what = None
    if missing or spare:
        what = f"lacks {missing[0]}" if missing else f"has {spare[0]}, which an EAGLE-3 head of its kind has not"
    elif wrong:
        have, want = list(given[wrong[0]].shape), list(own[wrong[0]].shape)
        what = f"has {wrong[0]} of shape {have}, but its configuration says {want}"
    if what is not None:
        raise HeadError(f"the head in {folder} {what}; it cannot be used.")
    if head.use_draft_vocab and (problem := vocabulary.misfit(given)):
        raise HeadError(
            f"the vocabulary map of {folder} does not fit ({problem}); give the head with the d2t and "
            "t2d that it was trained with, or make it anew."
        )
    head.load_state_dict(given, strict=False)
