"""Which draft model an engine gets: the given one if it fits the target, a fresh head, or none (and why).

An engine whose head is trained or replaced runs it in the layout in which versions are published: a given head of
another layout, or with weights of its own for what is the target's, is converted once, beside the fresh ones. An engine
that only drafts runs a head as vLLM reads it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from drafter_online.files import temporary_folder
from rollspec.config import RollspecConfig
from rollspec.tuning.tuner import MODEL_DRAFTERS

logger = logging.getLogger("rollspec")

GENERAL = "general"
"""What the head in proposal.head.model is called among specialists."""

MAKE = """
import sys
from drafter_online import architecture, head, vocabulary
target, size, folder = sys.argv[1:]
size = int(size) or vocabulary.drafted(int(architecture.target_config(target).vocab_size))
head.save(head.fresh(target, draft_vocab_size=size), folder)
"""
CONVERT = "import sys; from drafter_online import head; head.convert(*sys.argv[1:])"
MAKE_SECONDS = 600.0

FILES = ("*.json", "*.safetensors")
"""What of a hub's repository is fetched: nothing pickled."""


NO_MAPPING = "vLLM's second model runner has no mapping between the tokens of two vocabularies"
PARALLEL = "vLLM's second model runner drafts in parallel with DFlash and DSpark only"
BLOCK = "vLLM drafts its whole block in one pass over keys that it wrote itself, which a head that rests cannot repair"
STATE = "vLLM's second model runner has no such drafter"
OTHERS = {
    "dflash": BLOCK, "dspark": BLOCK, "peagle": PARALLEL, "pard": PARALLEL, "medusa": STATE, "mlp_speculator": STATE,
}  # fmt: skip
"""Why a drafter of another kind does not run here, by a part of what its config.json calls it."""


UNCOMPARED = ("max_position_embeddings", "model_type", "transformers_version", "_name_or_path", "use_cache")
"""Settings of a model that may differ between heads that run beside each other."""


class _UnfitError(Exception):
    """Why a draft model cannot run, as a part of a sentence."""


def settle(args: Any, config: RollspecConfig) -> tuple[RollspecConfig, str | None]:
    """The configuration with its draft model's folder filled in, and vLLM's name for the method.

    Where it cannot be used, one sentence is logged and the configuration comes back without it.
    """
    name = next((d for d in config.proposal.drafters if d in MODEL_DRAFTERS), None)
    if name is None:
        return _without(config, {}), None
    try:
        path = _found(args, config, name)
    except _UnfitError as problem:
        rest = [d for d in config.proposal.drafters if d != name]
        logger.warning(
            "rollspec: the drafter %r is left out because %s; %s.",
            name,
            problem,
            f"{', '.join(rest)} is used" if rest else "nothing is drafted",
        )
        return _without(config, {"proposal.drafters": rest}), None
    kept = _specialists(args, config, path, name)
    return config.change({"proposal.head.model": path, "proposal.head.specialists": kept}), name


def _without(config: RollspecConfig, changes: dict[str, Any]) -> RollspecConfig:
    """The configuration of an engine that runs no head."""
    if config.proposal.head.specialists:
        logger.warning(
            "rollspec: the specialists are left out because proposal.drafters has no head or draft model that can run."
        )
        changes = {**changes, "proposal.head.specialists": {}}
    return config.change(changes) if changes else config


def _found(args: Any, config: RollspecConfig, name: str) -> str:
    """The folder, or what vLLM finds it by."""
    if getattr(args, "data_parallel_size", 1) > 1:
        raise _UnfitError("data_parallel_size > 1 is not tested with it")
    given, target = config.proposal.head.model, str(args.model)
    if name == "mtp":
        return _with_mtp(target, given)
    if given is None:  # made once per target
        size = str(config.drafter.draft_vocab or 0)
        name = f"fresh-{_key([_read(target) or target, size])}"
        path = _made(config, name, MAKE, [target, size], f"a fresh EAGLE-3 head for {target}")
    else:
        path = _fetched(args, given) if name == "eagle3" else given
    _check(args, path, name)
    return _publishable(args, config, path) if given is not None and name == "eagle3" else path


def _with_mtp(target: str, given: str | None) -> str:
    """The target, whose checkpoint has the layer that predicts further tokens."""
    if given is not None:
        raise _UnfitError("proposal.head.model is set, and an MTP layer is in its target's checkpoint")
    config = _read(target) or {}
    layers = int(config.get("text_config", config).get("num_nextn_predict_layers") or 0)
    if layers != 1:
        raise _UnfitError(f"{target} has {layers} MTP layers (num_nextn_predict_layers), and one is run over and over")
    return target


def _specialists(args: Any, config: RollspecConfig, path: str, name: str) -> dict[str, str]:
    """Those that can run beside the head at `path`; the others are left out, with a sentence each."""
    kept: dict[str, str] = {}
    mine = _read(path)
    for domain, given in config.proposal.head.specialists.items():
        try:
            if name == "mtp":
                raise _UnfitError("the drafter is an MTP layer, of which a target has one")
            if domain == GENERAL:
                raise _UnfitError("that is what the head in proposal.head.model is called")
            theirs, folder = _read(given), given
            if name == "eagle3" and theirs is not None and _flat(theirs):
                folder = _publishable(args, config, given)
                theirs = _read(folder)
            if mine is None or theirs is None:
                nowhere = given if theirs is None else path
                raise _UnfitError(f"{nowhere} is no folder with a config.json, which is compared")
            _check(args, folder, name)
            if _shape(mine) != _shape(theirs):
                raise _UnfitError(f"{given} has another shape than {path}; make both with the same options")
            kept[domain] = folder
        except _UnfitError as problem:
            logger.warning("rollspec: the specialist %r is left out because %s.", domain, problem)
    return kept


def _check(args: Any, path: str, name: str) -> None:
    """That the draft model at `path` fits the target, by the two config.json files and the head's vocabulary map."""
    mine, target = _read(path), _read(str(args.model))
    if mine is None:
        if Path(path).is_dir():
            raise _UnfitError(f"{path}/config.json is missing or is not JSON")
        return  # vLLM finds it, or says what is wrong
    if target is None:
        return
    target = target.get("text_config", target)
    layer = mine.get("transformer_layer_config", mine)
    if (kind := _kind(mine)) in OTHERS:
        raise _UnfitError(f"{path} holds a {kind!r} drafter, and {OTHERS[kind]}")
    pairs = [("vocab_size", layer.get("vocab_size"), target.get("vocab_size"))]
    if name == "eagle3":
        if mine.get("speculators_model_type", "eagle3") != "eagle3":
            raise _UnfitError(f"{path} holds a {mine['speculators_model_type']!r} drafter, not an eagle3 head")
        hidden = mine.get("target_hidden_size") or layer.get("hidden_size")
        pairs.append(("hidden size of the target", hidden, target.get("hidden_size")))
        layers, depth = mine.get("eagle_aux_hidden_state_layer_ids") or [], target.get("num_hidden_layers")
        if depth and any(not 0 <= int(i) <= depth for i in layers):
            raise _UnfitError(f"{path} reads the target's layers {layers}, and {args.model} has {depth}")
        from drafter_online.architecture import without_room
        from drafter_online.vocabulary import misfit

        if why := without_room(target):
            raise _UnfitError(f"{args.model} {why}")
        if why := misfit(_weights(Path(path), "d2t", "t2d"), target.get("vocab_size")):
            raise _UnfitError(f"the vocabulary map of {path} does not fit ({why})")
    for what, have, want in pairs:
        if have is not None and want is not None and have != want:
            why = f", and {NO_MAPPING}" if name == "draft_model" else ""
            raise _UnfitError(
                f"the {what} of {path} is {have} and that of {args.model} is {want}{why}; give a drafter made for it"
            )


def _weights(folder: Path, *read: str) -> dict[str, Any]:
    """The weights in a folder's safetensors files by name, None but for those in `read`; empty where a file cannot be
    read, as vLLM will say.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, Any] = {}
    try:
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="pt") as f:
                found |= {name: f.get_tensor(name) if name in read else None for name in f.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return {}
    return found


def _kind(config: dict[str, Any]) -> str:
    """What a drafter calls itself, where that is one of `OTHERS`."""
    if "pard_token" in config or "ptd_token_id" in config:
        return "pard"
    names = [config.get("speculators_model_type"), config.get("model_type"), *(config.get("architectures") or ())]
    said = " ".join(str(n).lower() for n in names if n)
    return next((kind for kind in OTHERS if kind in said), "")


def _shape(config: dict[str, Any]) -> dict[str, Any]:
    """What heads that run beside each other have in common: everything that is computed with, but for the weights."""
    layer = config.get("transformer_layer_config", config)
    plain = {k: v for k, v in layer.items() if "dtype" not in k and not k.endswith("_token_id") and k not in UNCOMPARED}
    own = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc")
    return {"layer": plain, **{k: config.get(k) or None for k in own}}


def _read(folder: str) -> dict[str, Any] | None:
    try:
        data = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _fetched(args: Any, path: str) -> str:
    """The folder of a head that may be given by its name on the hub, downloaded where need be."""
    elsewhere = "://" in path or os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true")
    if Path(path).is_dir() or elsewhere:
        return path
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(path, cache_dir=getattr(args, "download_dir", None), allow_patterns=list(FILES))
    except Exception as e:  # the hub's, the network's, the disk's: whatever it is, there is no head
        first = next(iter(str(e).strip().splitlines()), type(e).__name__)
        raise _UnfitError(f"{path} is neither a folder nor to be had from the hub ({first})") from e
    if not any(Path(folder).glob("*.safetensors")):
        raise _UnfitError(f"{path} has no safetensors file on the hub, and pickled weights are not loaded")
    return folder


def _publishable(args: Any, config: RollspecConfig, path: str) -> str:
    """The head at `path`, or its copy in the layout of versions where the engine gets versions and it has another."""
    plain, source, target = _read(path), Path(path), str(args.model)
    if plain is None or not config.drafter.trains:
        return path
    names = _weights(source)
    own = ["embed_tokens.weight", *([] if "d2t" in names else ["lm_head.weight"])]
    if names and not _flat(plain) and not any(n in names for n in own):
        return path
    try:
        files = [f for f in sorted(source.iterdir()) if f.suffix == ".safetensors"]
        stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    except OSError:
        return path  # vLLM says what is wrong
    key = _key([str(source.resolve()), plain, stats, _read(target) or target])
    try:
        found = _made(config, f"given-{key}", CONVERT, [path, target], f"a copy of {path} for training")
    except _UnfitError as problem:
        logger.warning("rollspec: %s; it drafts as it is, and what is trained may not be taken up.", problem)
        return path
    replaced = ((_read(found) or {}).get("drafter_online") or {}).get("replaced") or []
    logger.log(
        logging.WARNING if replaced else logging.INFO,
        "rollspec: the head in %s runs as its copy in %s, in the layout of published versions%s.",
        path,
        found,
        f", with the target's {' and '.join(replaced)} in the place of its own" if replaced else "",
    )
    return found


def _flat(config: dict[str, Any]) -> bool:
    """Whether a head is in SpecForge's and SGLang's layout."""
    return "speculators_model_type" not in config


def _key(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _made(config: RollspecConfig, name: str, code: str, given: list[str], what: str) -> str:
    """The folder `name` among the heads that are made here. Made once, by `code`.

    In a process of its own, with `given` and the folder to write for arguments: it imports torch and `speculators`,
    which the process that builds the engine (a trainer, a server) may not want, and may not have initialised yet.
    """
    parent = next((d / "heads" for d in (config.drafter.dir, config.history.dir) if d is not None), None)
    parent = parent or Path(tempfile.gettempdir()) / f"rollspec-heads-{os.getuid()}"
    folder = parent / name
    try:
        if (folder / "config.json").is_file():
            return str(folder)
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise _UnfitError(f"{what} cannot be written ({e}); set drafter.dir") from e
    try:
        with temporary_folder(parent, ".making") as temporary:
            made = subprocess.run(
                [sys.executable, "-c", code, *given, str(temporary)],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                capture_output=True,
                text=True,
                timeout=MAKE_SECONDS,
                check=False,
            )
            if made.returncode:
                last = (made.stderr.strip().splitlines() or ["no message"])[-1]
                raise _UnfitError(f"{what} could not be made ({last})")
            try:
                os.rename(temporary, folder)
            except OSError:  # another process was faster
                if not (folder / "config.json").is_file():
                    raise
    except (OSError, subprocess.SubprocessError) as e:
        raise _UnfitError(f"{what} could not be made ({e})") from e
    logger.info("rollspec: %s is in %s.", what, folder)
    return str(folder)
