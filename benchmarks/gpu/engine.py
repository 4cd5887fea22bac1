"""How the suite builds engines, and what it asks of their workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from benchmarks.engines import Arm, Work, epoch
from benchmarks.gpu.plan import NotHereError, Spec
from benchmarks.harness import pin

K = 4
"""Draft length of every arm."""

SUFFIX: dict[str, Any] = {
    "preset": "default",
    "proposal.drafters": ["suffix"],
    "proposal.k_max": K,
    "proposal.budget.rule": "fixed",
    "tuning": {"strategy": "static", "arms": [K], "guard": {"enabled": False}},
}
"""rollspec drafts by suffixes and verifies all that it drafted: costs and identity, not the best speed."""


@contextlib.contextmanager
def engine(
    spec: Spec,
    model: str,
    *,
    rollspec: dict[str, Any] | None = None,
    speculative: dict[str, Any] | None = None,
    rates: list[float] | None = None,
    dtype: str | None = None,
    **options: Any,
) -> Iterator[Any]:
    """A vLLM engine, ended when the block is left.

    Args:
        spec: of the part.
        model: folder of the checkpoint.
        rollspec: its configuration; None: without it.
        speculative: of vLLM's own methods.
        rates: accept drafts at random, at these unconditional rates by position (vLLM's "synthetic" method).
        dtype: bfloat16 when None.
        options: of `vllm.LLM`.
    """
    environment(spec)
    if rates is not None:
        accept_at(rates)
    from vllm import LLM

    settings: dict[str, Any] = {
        "dtype": dtype or ("float32" if spec.device == "cpu" else "bfloat16"),
        "enforce_eager": spec.device == "cpu",
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "enable_prefix_caching": False,
    }
    llm = LLM(
        model=model,
        disable_log_stats=False,
        speculative_config=speculative,
        additional_config={"rollspec": rollspec} if rollspec else {},
        **settings | options | dict(spec.engine),
    )
    try:
        if rollspec is not None and (info := call(llm, "info")).get("state") == "off":
            raise RuntimeError(f"rollspec is off in this engine: {info.get('reason')}")
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def environment(spec: Spec) -> None:
    """What engines of this process find in the environment."""
    if spec.device == "cpu":
        pin()
    for name in [n for n in os.environ if n == "ROLLSPEC" or n.startswith("ROLLSPEC__")]:
        del os.environ[name]  # would switch rollspec on in the arms without it
    # Functions of this package are sent to the workers pickled; nothing else is.
    os.environ.update(VLLM_ALLOW_INSECURE_SERIALIZATION="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # A fork of a process that has computed with several threads can wait for ever for the ones that it lacks.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if spec.arguments.get("invariant"):
        os.environ["VLLM_BATCH_INVARIANT"] = "1"


def call(llm: Any, op: str, **payload: Any) -> dict[str, Any]:
    """One of rollspec's operations, answered by the rank that drafts."""
    return next((a for a in llm.collective_rpc("rollspec", args=(op, payload)) if a), {})


def decode(
    llm: Any, prompts: list[list[int]], length: int, *, temperature: float = 0.0, batch: int | None = None
) -> dict[str, Any]:
    """Decode `length` tokens for each prompt: seconds, steps, drafted, accepted, texts."""
    lengths = [length] * len(prompts)
    work = Work(prompts, lengths, batch or len(prompts), 0, temperature=temperature, texts=True)
    return epoch(llm, work, Arm("gpu"))


def facts(llm: Any) -> dict[str, Any]:
    """Which runner, graphs and scheduling an engine really has."""
    config = llm.llm_engine.vllm_config
    return {
        "v2_runner": bool(config.use_v2_model_runner),
        "asynchronous": bool(config.scheduler_config.async_scheduling),
        "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
        "graphs": llm.collective_rpc(_graphs)[0],
    }


def needs_v2(llm: Any) -> None:
    """Raises `NotHereError` where an engine runs in vLLM's first model runner."""
    if not llm.llm_engine.vllm_config.use_v2_model_runner:
        raise NotHereError("this engine runs in vLLM's first model runner; set VLLM_USE_V2_MODEL_RUNNER=1")


# ---- in the worker --------------------------------------------------------------------------------------------------


def _graphs(worker: Any) -> dict[str, Any]:
    """CUDA graphs that the target's runner captured, by kind."""
    manager = getattr(worker.model_runner, "cudagraph_manager", None)
    kinds: dict[str, int] = {}
    tokens = []
    for shape in getattr(manager, "graphs", {}):
        kinds[shape.cg_mode.name] = kinds.get(shape.cg_mode.name, 0) + 1
        tokens.append(int(shape.num_tokens))
    return {"runner": type(worker.model_runner).__module__, "captured": kinds, "largest": max(tokens, default=0)}


def count_graphs(worker: Any) -> None:
    """Count the steps by the kind of CUDA graph that they replay, from now on, where there are any."""
    counts = worker._rollspec_graphs = dict[str, int]()
    manager = getattr(worker.model_runner, "cudagraph_manager", None)
    if manager is None or not manager.graphs:
        return
    inner = manager.dispatch

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs)
        counts[found.cg_mode.name] = counts.get(found.cg_mode.name, 0) + 1
        return found

    manager.dispatch = dispatch


def graphs_replayed(worker: Any) -> dict[str, int]:
    """Steps since the last time, by kind."""
    found = dict(worker._rollspec_graphs)
    worker._rollspec_graphs.clear()
    return found


# ---- acceptance by decree -------------------------------------------------------------------------------------------


def accept_at(rates: list[float]) -> None:
    """Give every engine that speculates from now on vLLM's synthetic acceptance.

    It is set on the finished configuration because rollspec writes `speculative_config` itself.
    """
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        given = config.speculative_config
        if given is not None:
            given.rejection_sample_method = "synthetic"
            given.synthetic_acceptance_rates = rates[: given.num_speculative_tokens]
        return config

    create_engine_config._rollspec = getattr(create, "_rollspec", False)  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config
