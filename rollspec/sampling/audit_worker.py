"""One engine of an audit, in a process of its own: `python -m rollspec.sampling.audit_worker JOB.json`.

Reads what to build and generate, writes the tokens to `tokens.npz` and the counters to `counters.json` beside the job.
Only vLLM's public interface is used (`LLM`, `SamplingParams`, `get_metrics`, `collective_rpc`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

MAX_SEQS = 64  # more requests than this queue, so that they end and begin at different steps, as in a rollout


def run(folder: Path, job: dict[str, Any]) -> None:
    """Build the engine of `job` (see `audit_engine.run_arm`), generate, write the results into `folder`."""
    began = time.perf_counter()
    llm = _build(job)
    swaps = Swaps(llm, folder, job["plan"]["swap_every"]) if _swaps(job) else None
    started = time.perf_counter()
    plan, version = job["plan"], 0
    arrays: dict[str, Any] = {}
    greedy: list[tuple[int, int, Any]] = []
    for r in range(job["greedy_rounds"]):
        version = _next_round(llm, job, version)
        greedy += [(i, r, o) for i, o in _generate(llm, plan, 2 if r else 1, 0.0, swaps)]
    arrays |= _arrays("greedy", greedy)
    before, sampled, tokens, r = _counters(llm), [], 0, 0
    while job["sample"] and (tokens < plan["tokens"] or r < plan["min_rounds"]) and r < plan["max_rounds"]:
        version = _next_round(llm, job, version)
        for i, o in _generate(llm, plan, plan["samples"], plan["temperature"], swaps):
            sampled.append((i, r, o))
            tokens += len(o.token_ids)
        r += 1
        _write(folder / "progress.json", {"done": min(tokens, plan["tokens"]), "total": plan["tokens"]})
    arrays |= _arrays("sample", sampled)
    after = _counters(llm)
    np.savez(folder / "tokens.npz", **arrays)
    _write(
        folder / "counters.json",
        {
            "greedy_drafts": before,
            "sample_drafts": (after[0] - before[0], after[1] - before[1]),
            "off": _off(llm, job),
            "rounds": r,
            "swaps": swaps.done if swaps is not None else 0,
            "start_seconds": started - began,
            "generate_seconds": time.perf_counter() - started,
        },
    )


def _build(job: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.platforms import current_platform

    plan = job["plan"]
    args: dict[str, Any] = {
        "model": job["model"],
        "dtype": plan["dtype"],
        "seed": plan["seed"],
        "max_num_seqs": MAX_SEQS,
        "max_model_len": job["max_model_len"],
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": False,  # the draft counters come with the statistics
        # Compiling costs a minute on CPU and a GPU's graphs are what its user runs.
        "enforce_eager": bool(current_platform.is_cpu()),
    }
    if job["speculative_config"] is not None:
        args["speculative_config"] = job["speculative_config"]
    if job["rollspec"] is not None:
        args["additional_config"] = {"rollspec": job["rollspec"]}
    return LLM(**(args | job["engine"]))


def _swaps(job: dict[str, Any]) -> bool:
    return bool(job["plan"]["swap_every"]) and job["rollspec"] is not None


class Swaps:
    """Swaps the learned drafter's weights while requests run, again and again: versions that differ by some 10 %.

    Raises:
        RuntimeError: a swap is refused.
    """

    def __init__(self, llm: Any, folder: Path, every: int) -> None:
        from safetensors.torch import load_file, save_file

        self.llm, self.every, self.done, self._step = llm, every, 0, 0
        info = self._call("info")
        if "drafter" not in info:
            raise RuntimeError("swaps need a learned drafter: name eagle3 or draft_model in proposal.drafters")
        self._version = int(info["drafter"]["version"])
        self._folders = []
        for name, factor in (("a", 0.9), ("b", 1.1)):
            into = folder / name
            into.mkdir()
            for file in Path(info["drafter"]["started_with"]).glob("*.safetensors"):
                tensors = {n: t * factor if t.is_floating_point() else t for n, t in load_file(file).items()}
                save_file(tensors, into / file.name)
            self._folders.append(into)

    def step(self) -> None:
        """Before an engine step."""
        self._step += 1
        if self._step % self.every:
            return
        state = self._call("info")["drafter"]
        if state["state"] != "settled":
            return
        self.done = state["promoted"]
        self._version += 1
        folder = str(self._folders[self._version % 2])
        answer = self._call("swap", dir=folder, version=self._version, canary=False)
        if "error" in answer:
            raise RuntimeError(answer["error"])

    def _call(self, op: str, **payload: Any) -> dict[str, Any]:
        return next(a for a in self.llm.collective_rpc("rollspec", args=(op, payload)) if a)


def _generate(
    llm: Any, plan: dict[str, Any], copies: int, temperature: float, swaps: Swaps | None
) -> list[tuple[int, Any]]:
    """(prompt index, completion) of every request; the copies of a prompt are siblings, in order."""
    from vllm import SamplingParams

    order = [i for i in range(len(plan["prompts"])) for _ in range(copies)]
    params = SamplingParams(
        temperature=temperature,
        max_tokens=plan["max_tokens"],
        logprobs=0,
        detokenize=False,
        # Greedy text is cheap to compare at any length; sampled responses end as they do in a rollout.
        ignore_eos=temperature == 0,
    )
    requests = [{"prompt_token_ids": plan["prompts"][i]} for i in order]
    if swaps is not None:
        return list(zip(order, _stepped(llm, requests, params, swaps), strict=True))
    outputs = llm.generate(requests, params, use_tqdm=False)
    return [(i, o.outputs[0]) for i, o in zip(order, outputs, strict=True)]


def _stepped(llm: Any, requests: list[Any], params: Any, swaps: Swaps) -> list[Any]:
    """What each request said, with swaps between the engine's steps."""
    core = llm.llm_engine
    name = f"{time.perf_counter_ns()}"
    for i, request in enumerate(requests):
        core.add_request(f"{i}-{name}", request, params.clone())
    found: dict[int, Any] = {}
    while core.has_unfinished_requests():
        swaps.step()
        for out in core.step():
            if out.finished:
                found[int(out.request_id.split("-")[0])] = out.outputs[0]
    return [found[i] for i in range(len(requests))]


def _next_round(llm: Any, job: dict[str, Any], version: int) -> int:
    """Tell rollspec that a round begins, as a trainer does after a weight sync: past rounds are drafted from too."""
    if job["rollspec"] is not None and _off(llm, job) is None:
        llm.collective_rpc("rollspec", args=("set_version", {"version": version}))
    return version + 1


def _off(llm: Any, job: dict[str, Any]) -> str | None:
    """Why rollspec does not speculate in this engine, or None where it does or was not asked to."""
    if job["rollspec"] is None:
        return None
    given = (llm.llm_engine.vllm_config.additional_config or {}).get("rollspec")
    if isinstance(given, dict) and "off" in given:
        return str(given["off"])
    try:
        infos = [i for i in llm.collective_rpc("rollspec", args=("info", {})) if i]
    except Exception as e:
        return f"its plugin is not loaded in the engine's worker ({type(e).__name__}: {e})"
    # Coupled sampling without drafters is on, though it drafts nothing.
    return next((str(i["reason"]) for i in infos if i["state"] in ("none", "off") and i.get("mode") != "coupled"), None)


def _counters(llm: Any) -> tuple[int, int]:
    """(draft tokens, accepted tokens) since the engine started."""
    values = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    return (
        int(values.get("vllm:spec_decode_num_draft_tokens", 0)),
        int(values.get("vllm:spec_decode_num_accepted_tokens", 0)),
    )


def _arrays(name: str, outputs: Iterable[tuple[int, int, Any]]) -> dict[str, Any]:
    rows = list(outputs)
    tokens = [np.asarray(o.token_ids, dtype=np.int64) for *_, o in rows]
    reported = [
        np.array([step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True)], dtype=np.float64)
        for *_, o in rows
    ]
    return {
        f"{name}_tokens": np.concatenate([*tokens, np.zeros(0, dtype=np.int64)]),
        f"{name}_log_probs": np.concatenate([*reported, np.zeros(0)]),
        f"{name}_lengths": np.array([len(t) for t in tokens], dtype=np.int64),
        f"{name}_prompt": np.array([i for i, *_ in rows], dtype=np.int64),
        f"{name}_round": np.array([r for _, r, _ in rows], dtype=np.int64),
    }


def _write(path: Path, data: dict[str, Any]) -> None:
    """Whole or not at all: the audit reads it while this process runs."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data))
    os.replace(part, path)


def _end_with_parent() -> None:
    """End this process and its engine once the audit is gone: killed, it cannot do so itself."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.killpg(0, signal.SIGKILL)  # the audit gave this process a group of its own

    threading.Thread(target=watch, name="rollspec-audit-parent", daemon=True).start()


if __name__ == "__main__":
    if os.getpgrp() == os.getpid():
        _end_with_parent()
    _job = Path(sys.argv[1])
    run(_job.parent, json.loads(_job.read_text()))
