"""Real vLLM engines for the tests: built small, called through the same operations a trainer uses."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_LEN = 256
KV_BYTES = 64 << 20
"""Of the KV cache: every request of these tests fits four times. A GiB, the least that vLLM takes from the environment,
is written before the first step, and without this number vLLM runs the model to find out what memory it needs.
"""


def build(model: Path, rollspec: Any = None, costs: str = "held", **kwargs: Any) -> Any:
    """An engine. `costs`: "measured" where the test is about that; else how much is drafted depends on no clock."""
    from vllm import LLM

    # Functions sent to the worker by these tests are pickled; nothing outside tests does that.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    llm = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_LEN,
        disable_log_stats=False,
        additional_config={} if rollspec is None else {"rollspec": rollspec},
        **{"enable_prefix_caching": False, "max_num_seqs": 16, "kv_cache_memory_bytes": KV_BYTES, **kwargs},
    )
    if rollspec is not None and costs == "held":
        llm.collective_rpc(_hold_costs)
    return llm


def _hold_costs(worker: Any) -> None:
    """What a step, a pass and drafting cost stays as it is assumed before anything is measured."""
    if (found := bridge(worker)) is None or (engine := found.engine) is None:
        return  # it does not speculate
    engine.tuner.host = engine.tuner.cost.observe = lambda *args, **kwargs: None
    if engine.head is not None:
        engine.head.cost.observe = engine.tuner.host


CACHING = {"enable_prefix_caching": True, "block_size": 32}
"""As jobs run; with blocks that these tests' prompts fill."""

ALWAYS = {"tuning.strategy": "static", "proposal.budget.rule": "fixed", "tuning.guard.enabled": False}
"""Everything that is proposed is verified, whatever it brings."""


def promote_all(worker: Any) -> None:
    """In a worker: every canary that can be run is promoted, however little is accepted of what its weights draft."""
    from rollspec.head.swap import swapper

    swapper.CANARY_RATIO = 0.0


def metric(llm: Any, name: str) -> float:
    """One of vLLM's own counters."""
    return float(next(m.value for m in llm.get_metrics() if m.name == f"vllm:{name}"))


def close(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()


def call(llm: Any, op: str, **payload: Any) -> dict[str, Any]:
    return next(r for r in llm.collective_rpc("rollspec", args=(op, payload)) if r)


def bridge(worker: Any) -> Any:
    """rollspec's side of a worker, for functions that tests send there."""
    from rollspec.engine.vllm.v2.install import bridge as found

    return found(worker)


def pace(llm: Any, seconds: float) -> None:
    """Steps take longer from now on, by `seconds`: a test acts between two of them, and its own process may be slow."""
    llm.collective_rpc(_pace, args=(seconds,))


def _pace(worker: Any, seconds: float) -> None:
    runner = worker.model_runner
    step = getattr(runner.execute_model, "unpaced", runner.execute_model)

    def paced(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return step(*args, **kwargs)

    paced.unpaced = step  # type: ignore[attr-defined]
    runner.execute_model = paced if seconds else step


def say_together(llm: Any, requests: list[Any], params: Any) -> list[Any]:
    """`llm.generate` whose requests are all there before the first one is scheduled."""
    llm.sleep(level=0, mode="keep")
    llm.enqueue(requests, params, use_tqdm=False)
    llm.wake_up(tags=["scheduling"])
    return llm.wait_for_completion(use_tqdm=False)  # type: ignore[no-any-return]


def generate(
    llm: Any, prompts: list[list[int]], copies: int = 2, limit: int = 160, own: Any = lambda i: {}, **params: Any
) -> list[list[int]]:
    """What an engine says to `copies` of each prompt, which are all there before the first is scheduled. `own`: further
    parameters of the i-th request.
    """
    from vllm import SamplingParams

    requests = [{"prompt_token_ids": p} for p in prompts for _ in range(copies)]
    # Staggered limits: requests leave the batch at different steps, as in a long tail.
    sampling = [
        SamplingParams(detokenize=False, **{"temperature": 0.0, "max_tokens": limit - 7 * (i % 5), **params, **own(i)})
        for i in range(len(requests))
    ]
    return [list(o.outputs[0].token_ids) for o in say_together(llm, requests, sampling)]


def swap(llm: Any, folder: Path, **payload: Any) -> dict[str, Any]:
    """The answer to weights of a folder, loaded before this returns."""
    return call(llm, "swap", dir=str(folder), **{"wait": True, **payload})


def during(llm: Any, prompts: list[list[int]], act: Any, at: int = 12) -> list[list[int]]:
    """Generate greedily; `act` is called once, after `at` steps."""
    from vllm import SamplingParams

    core = llm.llm_engine
    pace(llm, 0.05)  # an engine does not wait for its client
    for i, prompt in enumerate(p for p in prompts for _ in range(2)):
        params = SamplingParams(temperature=0.0, max_tokens=160 - 7 * (i % 5), ignore_eos=True, detokenize=False)
        core.add_request(f"s-{i}", {"prompt_token_ids": prompt}, params)
    done: dict[int, list[int]] = {}
    steps = 0
    while core.has_unfinished_requests():
        for out in core.step():
            if out.finished:
                done[int(out.request_id.split("-")[1])] = list(out.outputs[0].token_ids)
        steps += 1
        if steps == at:
            pace(llm, 0)
            act()
    return [done[i] for i in range(2 * len(prompts))]


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for what happens in another process."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.1)
