"""A causal language model by name: a folder, a model of the hub, or `smollm2`, which is made on its first use.

    folder = resolve("smollm2")        # or "runs/my-checkpoint", or "Qwen/Qwen3-0.6B"

    python -m examples.models smollm2  # prints the folder

What rollspec cannot draft for is refused here, with the reason, before minutes of a job.
"""

from __future__ import annotations

import errno
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.cache import home
from examples.smollm2 import make
from rollspec.errors import RollspecError

SMOLLM2 = "smollm2"
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "tokenizer*")
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")
_STATE = ("state_size", "mamba_d_state", "ssm_state_size", "ssm_cfg", "hybrid_override_pattern")


def resolve(name: str, cache: Path | None = None) -> Path:
    """The folder of the model `name`, whole and of a kind that can be used here.

    Args:
        name: path of a checkpoint, id of a model of the hub, or `smollm2`.
        cache: where `smollm2` is kept; the user's cache when None.

    Raises:
        RollspecError: there is no such model, it cannot be had, or it is no causal language model with attention alone.
    """
    if name == SMOLLM2:
        return make(cache or home())
    folder = Path(name).expanduser()
    if not folder.exists() and _HUB.fullmatch(name):
        refuse_others(_from_hub(name, ("config.json",)))  # before gigabytes of weights
        folder = _from_hub(name, _FILES)
    elif not folder.is_dir():
        raise RollspecError(
            f"rollspec: --model {name} is no folder; give the folder of a checkpoint, a model of the hub "
            f"(ORGANISATION/NAME) or {SMOLLM2}."
        )
    refuse_others(folder)
    if not any(path for kind in ("safetensors", "bin") for path in folder.glob(f"*.{kind}")):
        raise RollspecError(f"rollspec: --model {name} holds no weights (*.safetensors); give a whole checkpoint.")
    return folder.resolve()


def refuse_others(folder: Path) -> None:
    """Raises RollspecError unless the checkpoint in `folder` is a causal language model with attention alone."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise RollspecError(
            f"rollspec: --model {folder} has no readable config.json ({e}); give the folder of a checkpoint in "
            "Hugging Face's format."
        ) from e
    why = unsuitable(config)
    if why:
        raise RollspecError(
            f"rollspec: --model {folder} {why}; give a causal language model whose layers are all attention layers."
        )


def unsuitable(config: Mapping[str, Any]) -> str | None:
    """What speaks against a model of this `config.json`, as the end of a sentence; None where nothing does."""
    if config.get("is_encoder_decoder"):
        return "is an encoder-decoder, whose responses have no prompt before them to draft from"
    architectures = config.get("architectures") or []
    if not any(a.endswith(("ForCausalLM", "LMHeadModel")) for a in architectures):
        return f"is no causal language model (its architectures are {architectures})"
    kinds = {kind for key in _LAYER_KINDS for kind in config.get(key) or ()}
    state = sorted(kinds - _ATTENTION) or [key for key in _STATE if config.get(key)]
    if state or str(config.get("model_type", "")).startswith(("mamba", "rwkv")):
        named = f" ({', '.join(state)})" if state else ""
        return f"has layers with a running state{named}, which cannot step back over rejected draft tokens"
    return None


def _from_hub(name: str, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except Exception as e:  # the hub's client raises a dozen unrelated types for "not there" and "offline"
        if isinstance(e, OSError) and e.errno == errno.ENOSPC:
            raise RollspecError(
                f"rollspec: --model {name} did not fit on the disk of the hub's cache; free some, or set HF_HOME to a "
                "folder with room."
            ) from e
        raise RollspecError(
            f"rollspec: --model {name} is no folder here, and the model hub did not give it ({type(e).__name__}); "
            f"give the folder of a checkpoint, or {SMOLLM2}."
        ) from e


def main() -> int:
    """Print the folder of the model that is named."""
    if len(sys.argv) != 2:
        print("usage: python -m examples.models PATH|HUB|smollm2", file=sys.stderr)
        return 2
    try:
        print(resolve(sys.argv[1]))
    except RollspecError as e:
        print(e, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
