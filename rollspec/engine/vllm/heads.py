"""Which learned drafter an engine gets: the given one if it fits the target, a fresh one, or none (and why)."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rollspec.config import RollspecConfig
from rollspec.tuning.tuner import LEARNED

logger = logging.getLogger("rollspec")

GENERAL = "general"
"""What the head in proposal.learned.model is called among specialists."""

V2_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"

MAKE = "import sys; from drafter_online import head; head.save(head.fresh(sys.argv[1]), sys.argv[2])"
MAKE_SECONDS = 600.0


def settle(args: Any, config: RollspecConfig) -> tuple[RollspecConfig, str | None]:
    """The configuration with its learned drafter's folder filled in, and vLLM's name for the method.

    Where the learned drafter cannot be used, one sentence is logged and the configuration comes back without it.
    """
    name = next((d for d in config.proposal.drafters if d in LEARNED), None)
    if name is None:
        return _without(config, []), None
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
        return _without(config, [("proposal.drafters", rest)]), None
    # Drafts are put together in the first model runner's step; the second one keeps them on the device.
    os.environ[V2_SWITCH] = "0"
    kept = _specialists(args, config, path, name)
    found = {"proposal.learned.model": str(path), "proposal.learned.specialists": kept}
    return RollspecConfig.load(config, overrides=found, env={}), name


def _without(config: RollspecConfig, changes: list[tuple[str, Any]]) -> RollspecConfig:
    """The configuration of an engine that runs no head."""
    if config.proposal.learned.specialists:
        logger.warning("rollspec: the specialists are left out because proposal.drafters has no eagle3 that can run.")
        changes = [*changes, ("proposal.learned.specialists", {})]
    return RollspecConfig.load(config, overrides=dict(changes), env={}) if changes else config


def _specialists(args: Any, config: RollspecConfig, path: str | None, name: str) -> dict[str, str]:
    """Those that can run beside the head at `path`; the others are left out, with a sentence each."""
    kept: dict[str, str] = {}
    mine = _read(str(path))
    for domain, folder in config.proposal.learned.specialists.items():
        theirs = _read(folder)
        if name != "eagle3":
            problem: str | None = f"only eagle3 heads run beside each other, and the drafter is a {name}"
        elif domain == GENERAL:
            problem = "that is what the head in proposal.learned.model is called"
        elif mine is None or theirs is None:
            problem = f"{folder if theirs is None else path} is no folder with a config.json, which is compared"
        else:
            problem = _misfit(args, folder, name)
            if problem is None and _shape(mine) != _shape(theirs):
                problem = f"{folder} has another shape than {path}; make both with the same options"
        if problem:
            logger.warning("rollspec: the specialist %r is left out because %s.", domain, problem)
        else:
            kept[domain] = folder
    return kept


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


def _shape(config: dict[str, Any]) -> dict[str, Any]:
    """What heads that run beside each other have in common: everything that is computed with, but for the weights."""
    layer = config.get("transformer_layer_config", config)
    plain = {k: v for k, v in layer.items() if "dtype" not in k and k not in ("max_position_embeddings", "model_type")}
    own = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc")
    return {"layer": plain, **{k: config.get(k) or None for k in own}}


def _read(folder: str) -> dict[str, Any] | None:
    try:
        data = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _fresh(args: Any, config: RollspecConfig) -> tuple[str | None, str | None]:
    """A fresh head for the target, made once per target: its folder, or why there is none.

    In a process of its own: making it imports torch and `speculators`, which the process that builds the engine (a
    trainer, a server) may not want, and may not have initialised yet.
    """
    target = str(args.model)
    plain = _read(target)
    key = hashlib.sha256(json.dumps(plain if plain is not None else target, sort_keys=True).encode()).hexdigest()[:16]
    learned = config.proposal.learned
    parent = learned.folder or (config.history.dir / "heads" if config.history.dir else None)
    try:
        parent = Path(parent) if parent is not None else Path(tempfile.gettempdir()) / f"rollspec-heads-{os.getuid()}"
        folder = parent / f"fresh-{key}"
        if (folder / "config.json").is_file():
            return str(folder), None
        parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".fresh-", dir=parent))
    except OSError as e:
        return None, f"a fresh head cannot be written ({e}); set proposal.learned.folder"
    try:
        made = subprocess.run(
            [sys.executable, "-c", MAKE, target, str(temporary)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=MAKE_SECONDS,
            check=False,
        )
        if made.returncode:
            last = (made.stderr.strip().splitlines() or ["no message"])[-1]
            return None, f"no fresh head could be made for {target} ({last})"
        try:
            os.rename(temporary, folder)
        except OSError:  # another process was faster
            if not (folder / "config.json").is_file():
                raise
        logger.info("rollspec: a fresh EAGLE-3 head for %s is in %s.", target, folder)
        return str(folder), None
    except (OSError, subprocess.SubprocessError) as e:
        return None, f"no fresh head could be made for {target} ({e})"
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
