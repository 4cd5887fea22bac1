"""Which learned drafter an engine gets: the given one if it fits the target, a fresh one, or none (and why)."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from rollspec.config import RollspecConfig
from rollspec.tuning.tuner import LEARNED

logger = logging.getLogger("rollspec")

V2_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"


def settle(args: Any, config: RollspecConfig) -> tuple[RollspecConfig, str | None]:
    """The configuration with its learned drafter's folder filled in, and vLLM's name for the method.

    Where the learned drafter cannot be used, one sentence is logged and the configuration comes back without it.
    """
    name = next((d for d in config.proposal.drafters if d in LEARNED), None)
    if name is None:
        return config, None
    problem = _unusable(args)
    path = config.proposal.learned.model
    if problem is None and path is None:
        path, problem = _fresh(args, config)
    if problem is None and path is not None:
        problem = _misfit(args, path, name)
    if problem is not None:
        rest = [d for d in config.proposal.drafters if d != name]
        logger.warning(
            "rollspec: the drafter %r is left out because %s; %s.",
            name,
            problem,
            f"{', '.join(rest)} goes on" if rest else "nothing is drafted",
        )
        return RollspecConfig.load(config, overrides={"proposal.drafters": rest}, env={}), None
    # Drafts are put together in the first model runner's step; the second one keeps them on the device.
    os.environ[V2_SWITCH] = "0"
    return RollspecConfig.load(config, overrides={"proposal.learned.model": str(path)}, env={}), name


def _unusable(args: Any) -> str | None:
    """Why no learned drafter can run in an engine with these arguments, or None."""
    if getattr(args, "data_parallel_size", 1) > 1:
        return "data_parallel_size > 1 is not tested with it"
    return None


def _misfit(args: Any, path: str, name: str) -> str | None:
    """Why the drafter at `path` does not fit the target, or None; read from the two config.json files."""
    mine, target = _read(path), _read(str(args.model))
    if mine is None:
        if Path(path).is_dir():
            return f"{path}/config.json is missing or is not JSON"
        return None  # a hub name: vLLM finds it, or says what is wrong
    if target is None:
        return None
    target = target.get("text_config", target)
    layer = mine.get("transformer_layer_config", mine)
    if name == "draft_model":
        pairs = [("vocab_size", layer.get("vocab_size"), target.get("vocab_size"))]
    else:
        if "speculators_model_type" in mine and mine["speculators_model_type"] != "eagle3":
            return f"{path} holds a {mine['speculators_model_type']!r} drafter, not an eagle3 head"
        hidden = mine.get("target_hidden_size") or layer.get("hidden_size")
        pairs = [
            ("vocab_size", layer.get("vocab_size"), target.get("vocab_size")),
            ("hidden size of the target", hidden, target.get("hidden_size")),
        ]
        layers = mine.get("eagle_aux_hidden_state_layer_ids") or []
        depth = target.get("num_hidden_layers")
        if depth and any(not 0 <= int(i) <= depth for i in layers):
            return f"{path} reads the target's layers {layers}, and {args.model} has {depth}"
    for what, have, want in pairs:
        if have is not None and want is not None and have != want:
            return f"the {what} of {path} is {have} and that of {args.model} is {want}; give a drafter made for it"
    return None


def _read(folder: str) -> dict[str, Any] | None:
    try:
        data = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _fresh(args: Any, config: RollspecConfig) -> tuple[str | None, str | None]:
    """A fresh head for the target, made once: its folder, or why there is none."""
    return None, "proposal.learned.model is unset and fresh heads are not available"
