"""An engine that generates and records what its target computed.

    python -m rollspec.engine.vllm.generate JOB.json PID

`drafter-online make-head` starts it in a process of its own, so that the engine's memory is free again when training
begins. It samples as it always does; the head beside it says which layers are recorded, and drafts if the job says so.

    job.json         what to build and generate (`drafter_online.generate.GenerationJob`)
    progress.json    what was generated so far, or why not
    samples/         one file per response (`drafter_online.samples.Sample`), whole or not there

PID is the process that started it: when that is gone, so is this one.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafter_online.child import end_with
from drafter_online.files import replace

DRAIN_SECONDS = 2.0
"""Between two times that the worker writes what it holds, which is bounded (`rollspec.head.capture.HOLD_BYTES`)."""


DRAFTING = {"proposal.budget.rule": "fixed", "tuning.strategy": "static", "tuning.guard.enabled": False}
"""Of an engine whose head drafts in every step, whether that pays or not."""


def run(folder: Path, job: dict[str, Any]) -> None:
    """Build the engine of `job`, generate until a limit of it is reached, and write samples and progress."""
    began = time.monotonic()
    progress: dict[str, Any] = {"state": "starting", "start_seconds": 0.0, "seconds": 0.0}
    progress |= dict.fromkeys(("requests", "tokens", "samples", "bytes"), 0)
    try:
        engine = build(job).llm_engine
        progress["start_seconds"] = time.monotonic() - began
        _generate(engine, folder, job, progress)
        progress["state"] = "done"
    except Exception as e:
        progress |= {"state": "failed", "error": " ".join(f"{type(e).__name__}: {e}".split())}
        raise
    finally:
        _write(folder, progress)


def build(job: dict[str, Any]) -> Any:
    """An `LLM` whose head is there for capture."""
    from vllm import LLM

    from rollspec.config import resolve
    from rollspec.engine.vllm.compat import ask_for_runner
    from rollspec.machine import native_dtype

    ask_for_runner()
    from vllm.platforms import current_platform

    drafts = job.get("drafts", 0)
    config = resolve(
        "default",
        env={},  # whatever the shell says about jobs
        overrides={
            "proposal.drafters": ["eagle3"],
            "proposal.head.model": job["head"],
            "tuning.arms": [drafts],  # 0: nothing is drafted
            **(DRAFTING | {"proposal.k_max": drafts, "proposal.head.k_max": drafts} if drafts else {}),
            "drafter.mode": "capture",
            "drafter.capture.share": 1.0,  # recording is what this engine is for
            "history.dir": None,
            "telemetry.jsonl": None,
        },
    )
    args: dict[str, Any] = {
        "model": job["model"],
        "seed": job["seed"],
        "max_num_seqs": job["batch"],
        "max_model_len": job["max_model_len"],
        "enable_prefix_caching": False,  # prompts are recorded whole
        # Compiling costs a minute on CPU and a GPU's graphs are what makes it fast.
        "enforce_eager": bool(current_platform.is_cpu()),
        "additional_config": {"rollspec": config.to_dict()},
    }
    if current_platform.is_cpu():
        args["dtype"] = native_dtype()
        # vLLM serves with one thread unless this is set; nothing else runs while this engine generates.
        os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    return LLM(**(args | job["engine"]))


def _generate(engine: Any, folder: Path, job: dict[str, Any], progress: dict[str, Any]) -> None:
    from vllm import SamplingParams

    params = SamplingParams(temperature=job["temperature"], max_tokens=job["max_tokens"], detokenize=False)
    prompts = job["prompts"]
    order = endless(len(prompts), job["seed"])
    running: dict[str, int] = {}  # response tokens of each request so far
    began = drained = time.monotonic()
    _drain(engine, folder, progress)  # says whether samples are recorded at all
    progress["state"] = "generating"
    while True:
        now = time.monotonic()
        progress["seconds"] = now - began
        if now - drained > DRAIN_SECONDS:
            _drain(engine, folder, progress)
            drained = now
        if reached(progress, job):
            break
        while len(running) < job["batch"]:
            name = str(progress["requests"])
            engine.add_request(name, {"prompt_token_ids": prompts[next(order)]}, params)
            running[name] = 0
            progress["requests"] += 1
        for out in engine.step():
            tokens = len(out.outputs[0].token_ids)
            progress["tokens"] += tokens - running[out.request_id]
            running[out.request_id] = tokens
            if out.finished:
                del running[out.request_id]
    # What was emitted so far is a sample, too; the worker learns that requests ended with the next step it makes.
    engine.abort_request(list(running))
    engine.add_request("last", {"prompt_token_ids": prompts[0]}, SamplingParams(max_tokens=1, detokenize=False))
    while engine.has_unfinished_requests():
        engine.step()
    _drain(engine, folder, progress)


def reached(progress: dict[str, Any], job: dict[str, Any]) -> bool:
    """Whether one of the limits of time, response tokens and bytes of samples is reached."""
    return any(job[name] is not None and progress[name] >= job[name] for name in ("seconds", "tokens", "bytes"))


def endless(count: int, seed: int) -> Iterator[int]:
    """0 .. count - 1 in a new random order every time round."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(range(count), count)


def _drain(engine: Any, folder: Path, progress: dict[str, Any]) -> None:
    """Have the worker write the samples it holds.

    Raises:
        RuntimeError: it records none.
    """
    payload = {"dir": str(folder / "samples")}
    answers = [a for a in engine.collective_rpc("rollspec", args=("samples", payload)) if a]
    if not answers or "error" in answers[0]:
        info = [a for a in engine.collective_rpc("rollspec", args=("info", {})) if a]
        reason = next((a["reason"] for a in info if a.get("reason")), None)
        raise RuntimeError(reason or (answers[0]["error"] if answers else "no worker records samples"))
    for name in ("samples", "bytes"):
        progress[name] += answers[0][name]
    progress |= {"dropped": answers[0]["dropped"], "skipped": answers[0]["skipped"]}
    _write(folder, progress)


def _write(folder: Path, progress: dict[str, Any]) -> None:
    replace(folder / "progress.json", json.dumps(progress).encode())


if __name__ == "__main__":
    _job = Path(sys.argv[1])
    end_with(int(sys.argv[2]))
    run(_job.parent, json.loads(_job.read_text()))
