"""What rollspec knows about vLLM versions and settings: the tested range, why an engine is left unaccelerated, and with
which settings of ours it was built.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from importlib import metadata
from importlib.util import find_spec
from typing import Any, TypeVar

from rollspec.config import RollspecConfig
from rollspec.machine import machine
from rollspec.tested import RANGES, in_range, installed

logger = logging.getLogger("rollspec")

KEY = "rollspec"
"""Of vLLM's `additional_config`, which every process can read: the configuration that an engine was built with, as a
mapping, or {"off": why there is none}.
"""

TESTED = RANGES["vllm"]
"""vLLM versions that rollspec speculates in."""

THINK = ("<think>", "</think>")
"""Around what a model thinks, as single tokens (Qwen3, DeepSeek-R1 and others)."""

T = TypeVar("T")

V2_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's own choice of the model runner, in the environment of the program that builds the engine."""

CPU_PLUGIN = "vllm_cpu_v2"
"""What brings the kernels of that runner on a CPU, where vLLM has no Triton: the distribution rollspec-cpu (cpu/)."""

NO_KERNELS = (
    "vLLM's second model runner has no kernels on this CPU; run `pip install ./cpu` (rollspec-cpu) in a checkout of "
    "rollspec to speculate"
)

MEMORY_METHOD = "ngram_gpu"
"""vLLM's speculative method that stands for model-free drafts."""


def is_on(vllm_config: Any) -> bool:
    """Whether rollspec is on in an engine; cheap enough to ask for every request of every step."""
    given = (getattr(vllm_config, "additional_config", None) or {}).get(KEY)
    return isinstance(given, dict) and "off" not in given


def engine_config(vllm_config: Any) -> RollspecConfig | None:
    """The configuration an engine was built with, or None where rollspec is off in it. Parses: once per object."""
    return RollspecConfig.from_dict(vllm_config.additional_config[KEY]) if is_on(vllm_config) else None


def keep_last_block() -> dict[str, bool]:
    """The setting by which an engine with a draft head computes no more of a cached prompt than one without.

    vLLM computes the last cached block again, because the head's KV cache at its last position depends on the token
    behind it, which may be another now. The head drafts a little worse there, if so; what is sampled does not change.
    """
    from vllm.config import SpeculativeConfig

    name = "disable_eagle_block_drop"
    return {name: True} if name in SpeculativeConfig.__dataclass_fields__ else {}


def vllm_version() -> str:
    """Version of the installed vLLM, whichever distribution provides it and without the name of its build such as
    `+cpu`; "0" where none is installed.
    """
    return (installed("vllm") or "0").partition("+")[0]


def ask_for_runner() -> None:
    """Have vLLM choose its second model runner on a CPU, where it does not by itself; workers inherit the variable.

    Not where it has no kernels: vLLM refuses to start then. On a GPU vLLM chooses it unless a feature of the engine is
    not supported there (`no_runner_because`).
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if current_platform.is_cpu() and (HAS_TRITON or find_spec(CPU_PLUGIN) is not None):
        os.environ.setdefault(V2_SWITCH, "1")


def runner_refused_by(env: Mapping[str, str]) -> str | None:
    """One sentence if the environment asks for vLLM's first model runner, else None."""
    value = env.get(V2_SWITCH, "").strip().lower()
    return (
        f"{V2_SWITCH}={value} asks for vLLM's first model runner; unset it to speculate"
        if value in ("0", "false")
        else None
    )


def no_runner_because(vllm_config: Any) -> str | None:
    """Why a complete engine configuration gets vLLM's first model runner, in which rollspec does not draft, or None."""
    if vllm_config.use_v2_model_runner:
        return None
    if find_spec("triton") is None and find_spec(CPU_PLUGIN) is None:
        return NO_KERNELS
    features: list[str] = getattr(vllm_config, "_get_v2_model_runner_unsupported_features", list)()
    why = f" ({', '.join(map(str, features))})" if features else ""
    return f"vLLM runs it in its first model runner{why}, and rollspec drafts in the second one only"


def unsupported_version(version: str) -> str | None:
    """One sentence if `version` is outside the tested range, else None."""
    if in_range(version, TESTED):
        return None
    return f"vLLM {version} is outside the tested range {TESTED}; install a version in it to speculate"


def unaccelerated_because(args: Any, config: RollspecConfig) -> str | None:
    """Why an engine with these `EngineArgs` cannot be accelerated, as one sentence, or None if it can.

    Never raises for a combination: such an engine runs as it would without rollspec.
    """
    if not config.enabled:
        return "enabled is false"
    if not config.proposal.drafters and config.mode == "standard":
        return "proposal.drafters is empty"
    reason = unsupported_version(vllm_version())
    if reason:
        return reason
    if args.speculative_config:
        given = args.speculative_config
        return f"the engine was given speculative_config {given!r}, which is kept; remove it to let rollspec speculate"
    # vLLM that speculates refuses processors given by name and leaves out installed ones without a word.
    if args.logits_processors:
        return "logits_processors were given, which vLLM does not run when it speculates; leave them out to speculate"
    if installed := [p.name for p in metadata.entry_points(group="vllm.logits_processors")]:
        return f"vLLM leaves the installed logits processor {installed[0]!r} out when it speculates; uninstall it"
    if (reason := runner_refused_by(os.environ)) is not None:
        return reason
    if args.pipeline_parallel_size > 1:
        return "pipeline_parallel_size > 1 is not tested with speculation; set it to 1"
    if args.distributed_executor_backend == "external_launcher" and args.tensor_parallel_size > 1:
        # Each rank schedules for itself, and drafts of different length would leave them waiting for each other.
        return "tensor_parallel_size > 1 with the external launcher (TRL, colocated) cannot speculate; set it to 1"
    if args.runner == "pooling":
        return "the engine is a pooling model, which generates nothing"
    if ("suffix" in config.proposal.drafters or not config.proposal.drafters) and find_spec("numba") is None:
        return "numba is not installed, so there are no suffix drafts; run pip install 'rollspec[suffix]'"
    return None


def vocabulary_mismatch(tokenizer_size: int, vocab_size: int) -> str | None:
    """One sentence if the tokenizer knows ids that the model has no logits for, else None.

    The other way round is usual (vocabularies are padded) and harmless in the engine.
    """
    if tokenizer_size <= vocab_size:
        return None
    return (
        f"the tokenizer has {tokenizer_size} tokens and the model's vocab_size is {vocab_size}, so the ids from "
        f"{vocab_size} up cannot be embedded or sampled; use the tokenizer that belongs to the model, or resize its "
        "embeddings"
    )


def check_vocabulary(vllm_config: Any) -> str | None:
    """`vocabulary_mismatch` for an engine about to be built; None where it has no tokenizer or that cannot be read."""
    model = vllm_config.model_config
    return _of_tokenizer(model, lambda t: vocabulary_mismatch(len(t), int(model.get_vocab_size())))


def tokenizer_of(model: Any) -> str | None:
    """The name of a running engine's tokenizer (`tokenizer_name`); None where it has none or it cannot be read: history
    is then checked against the vocabulary's size alone.
    """
    from rollspec.proposal.history import tokenizer_name

    return _of_tokenizer(model, lambda t: tokenizer_name(t.get_vocab().items()))


def think_tokens(model: Any) -> tuple[int, int] | None:
    """The tokens between which a running engine's model thinks; None where its tokenizer has none."""

    def find(tokenizer: Any) -> tuple[int, int] | None:
        added = tokenizer.get_added_vocab()
        return (added[THINK[0]], added[THINK[1]]) if all(token in added for token in THINK) else None

    return _of_tokenizer(model, find)


def _of_tokenizer(model: Any, say: Callable[[Any], T | None]) -> T | None:
    if model.skip_tokenizer_init:
        return None
    try:
        from transformers import AutoTokenizer

        return say(AutoTokenizer.from_pretrained(model.tokenizer, trust_remote_code=model.trust_remote_code))
    except Exception as e:  # vLLM reports an unusable tokenizer itself, and in its own words
        logger.debug("rollspec: the tokenizer was not read (%s)", e)
        return None


def machine_of(vllm_config: Any) -> dict[str, Any]:
    """What step costs depend on: a cost model holds for this only."""
    import torch

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    hf = model.hf_text_config
    on_gpu, here = torch.cuda.is_available(), machine()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"{here['cpu']} x{here['cores']}",
        "threads": None if on_gpu else torch.get_num_threads(),
        "layers": getattr(hf, "num_hidden_layers", None),
        "hidden_size": getattr(hf, "hidden_size", None),
        "vocab_size": getattr(hf, "vocab_size", None),
        "dtype": str(model.dtype),
        "tensor_parallel": int(parallel.tensor_parallel_size),
        "vllm": vllm_version(),
    }
