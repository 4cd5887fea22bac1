"""One engine of an audit, in a process of its own: `python -m rollspec.sampling.audit_worker JOB.json`.

Reads what to build and generate, writes the tokens to `tokens.npz` and the counters to `counters.json` beside the job.
Only vLLM's public interface is used (`LLM`, its engine's `step`, `SamplingParams`, `get_metrics`, `collective_rpc`).

Where the job names an old policy, rounds of it come before what is audited: its weights are loaded into the running
engine, and the audited ones again, as a trainer does between two epochs.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAX_SEQS = 64  # more requests than this queue, so that they end and begin at different steps, as in a rollout


SWAP_STEPS = 17  # engine steps between two swaps of drafter weights: no multiple of anything, requests are in flight


@dataclass(slots=True)
class Said:
    """One response. `ruled`: leading tokens that the lossy rule decided, kept or replaced; `kept`: those it kept."""

    prompt: int
    round: int
    tokens: list[int]
    log_probs: list[float]
    ruled: int = 0
    kept: int = 0


def run(folder: Path, job: dict[str, Any]) -> None:
    """Build the engine of `job` (see `audit_engine.run_arm`), generate, write the results into `folder`."""
    began = time.perf_counter()
    llm = _build(job)
    started = time.perf_counter()
    plan, temperature = job["plan"], job["plan"]["temperature"]
    version = 0
    greedy: list[Said] = []
    for r in range(job["greedy_rounds"]):
        version = _next_round(llm, job, version)
        greedy += _generate(llm, plan, r, copies=2 if r else 1, temperature=0.0)
    greedy_drafts = _counters(llm)
    sampled: list[Said] = []
    drafts, seconds = [0, 0], 0.0
    swaps = Swaps(llm, job["swaps"])
    reuse = _lossy(llm, job)
    tokens = r = 0
    while job["sample"] and (tokens < plan["tokens"] or r < plan["min_rounds"]) and r < plan["max_rounds"]:
        old: list[Said] = []
        if (job["old"] or job["old_temperature"]) and (r == 0 or reuse is not None):
            _load(llm, job["old"])
            version = _next_round(llm, job, version)
            old = _generate(llm, plan, r, plan["samples"], job["old_temperature"] or temperature)
            _load(llm, job["old"] and job["model"])
        version = _next_round(llm, job, version)
        before, start = _counters(llm), time.perf_counter()
        if reuse is not None:
            found = _generate_lossily(llm, plan, r, reuse, old)
        else:
            found = _generate(llm, plan, r, plan["samples"], temperature, swaps)
        seconds += time.perf_counter() - start
        drafts = [d + b - a for d, a, b in zip(drafts, before, _counters(llm), strict=True)]
        sampled += found
        tokens += sum(len(s.tokens) for s in found)
        r += 1
        _write(folder / "progress.json", {"done": min(tokens, plan["tokens"]), "total": plan["tokens"]})
    np.savez(folder / "tokens.npz", **_arrays("greedy", greedy), **_arrays("sample", sampled))
    _write(
        folder / "counters.json",
        {
            "greedy_drafts": greedy_drafts,
            "sample_drafts": drafts,
            "sample_seconds": seconds,
            "off": _off(llm, job),
            "rounds": r,
            "swaps": swaps.made,
            "swap_errors": swaps.errors,
            "start_seconds": started - began,
            "generate_seconds": time.perf_counter() - started,
        },
    )


def _build(job: dict[str, Any]) -> Any:
    from vllm import LLM

    from rollspec.engine.vllm.compat import ask_for_runner

    ask_for_runner()  # engines without rollspec, too: what is compared differs in drafting alone
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


class Swaps:
    """Replaces the drafter's weights while requests run: the folders take turns, every `SWAP_STEPS` engine steps."""

    def __init__(self, llm: Any, folders: Sequence[str]) -> None:
        self.folders = list(folders)
        self.made = 0
        self.errors: list[str] = []
        self._llm = llm
        self._steps = self._asked = 0

    def step(self) -> None:
        """An engine step begins."""
        self._steps += 1
        if not self.folders or self._steps % SWAP_STEPS:
            return
        self._asked += 1
        payload = {
            "dir": self.folders[(self._asked - 1) % len(self.folders)],
            "version": self._asked,
            "canary": False,
            "wait": True,
        }
        for answer in self._llm.collective_rpc("rollspec", args=("swap", payload)):
            if answer and "error" in answer:
                self.errors.append(str(answer["error"]))
            elif answer:
                self.made += 1


def _generate(
    llm: Any, plan: dict[str, Any], r: int, copies: int, temperature: float, swaps: Swaps | None = None
) -> list[Said]:
    """Responses to every prompt; the copies of a prompt are siblings, in order."""
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
    if swaps is not None and swaps.folders:
        outputs = _step_by_step(llm, requests, params, swaps)
    else:
        outputs = llm.generate(requests, params, use_tqdm=False)
    return [Said(i, r, *_read(o)) for i, o in zip(order, outputs, strict=True)]


def _step_by_step(llm: Any, requests: list[Any], params: Any, swaps: Swaps) -> list[Any]:
    """`llm.generate`, with something done between two engine steps."""
    engine = llm.llm_engine
    for i, request in enumerate(requests):
        engine.add_request(str(i), request, params)
    done: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        swaps.step()
        done |= {o.request_id: o for o in engine.step() if o.finished}
    return [done[str(i)] for i in range(len(requests))]


def _read(output: Any) -> tuple[list[int], list[float]]:
    """(tokens, log-probs) of a finished request."""
    (o,) = output.outputs
    return list(o.token_ids), [step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True)]


def _load(llm: Any, model: str | None) -> None:
    """Weights of `model` into the running engine, as a trainer loads them; None changes nothing."""
    if model is not None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": model})
        llm.reset_prefix_cache()


# ---- the lossy rule
# -----------------------------------------------------------------------------------------------------


def _lossy(llm: Any, job: dict[str, Any]) -> Any:
    """What `reuse.mode: lenient` does in a trainer's server, for this engine; None where it is not asked for."""
    if job["rollspec"] is None or job["rollspec"]["reuse"]["mode"] != "lenient" or not job["sample"]:
        return None
    from rollspec.config import RollspecConfig
    from rollspec.proposal.response_cache import ResponseCache
    from rollspec.sampling import scoring
    from rollspec.sampling.lenient_reuse import LenientReuse

    config = RollspecConfig.from_dict(job["rollspec"])
    model = llm.llm_engine.vllm_config.model_config
    return LenientReuse(
        config.reuse,
        ResponseCache(config.history.max_bytes),
        int(model.max_model_len),
        int(model.get_vocab_size()),
        scoring.eos_tokens(llm),
        rng=np.random.default_rng(job["plan"]["seed"]),
    )


def _generate_lossily(llm: Any, plan: dict[str, Any], r: int, reuse: Any, old: list[Said]) -> list[Said]:
    """A round that starts from the responses `old`, sibling by sibling."""
    from vllm import SamplingParams

    from rollspec.proposal.base import prompt_key
    from rollspec.sampling import scoring

    prompts, limit = plan["prompts"], plan["max_tokens"]
    keys = [prompt_key(p) for p in prompts]
    reuse.remember([(keys[s.prompt], f"{i}", s.tokens, s.log_probs) for i, s in enumerate(old)], r)
    waiting: list[tuple[list[int], Any, asyncio.Future[Any]]] = []

    def score(prompt: list[int], params: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting.append((prompt, params, future))
        return future

    async def prefixes() -> list[Any]:
        given = {"temperature": plan["temperature"]}
        tasks = [
            asyncio.ensure_future(reuse.prefix(score, prompts[s.prompt], given, limit, f"{i}"))
            for i, s in enumerate(old)
        ]
        await asyncio.sleep(0)  # each runs up to its request, and all are scored as one batch
        outputs = llm.generate(
            [{"prompt_token_ids": p} for p, *_ in waiting], [q for _, q, _ in waiting], use_tqdm=False
        )
        for (*_, future), output in zip(waiting, outputs, strict=True):
            future.set_result(output)
        return list(await asyncio.gather(*tasks))

    found = asyncio.run(prefixes())
    out, requests, params = [], [], []
    for s, prefix in zip(old, found, strict=True):
        start = [] if prefix is None else prefix.tokens
        said = Said(s.prompt, r, list(start), [] if prefix is None else list(prefix.logprobs))
        if prefix is not None:  # a token that is kept, or the first one drawn in the place of a refused one
            said.ruled = min(len(start) + 1, len(s.tokens))
            said.kept = len(start)
        out.append(said)
        if prefix is None or not prefix.finished:
            prompt = prompts[s.prompt]
            requests.append((said, {"prompt_token_ids": [*prompt, *start]}))
            params.append(
                SamplingParams(
                    temperature=plan["temperature"],
                    max_tokens=limit - len(start),
                    logprobs=0,
                    detokenize=False,
                    extra_args={scoring.KEY: {scoring.PROMPT: len(prompt)}},
                )
            )
    for (said, _), output in zip(requests, llm.generate([q for _, q in requests], params, use_tqdm=False), strict=True):
        tokens, log_probs = _read(output)
        said.tokens += tokens
        said.log_probs += log_probs
    return out


# ---- what the engine says of itself
# -------------------------------------------------------------------------------------


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


def _arrays(name: str, rows: Iterable[Said]) -> dict[str, Any]:
    rows = list(rows)
    tokens = [np.asarray(s.tokens, dtype=np.int64) for s in rows]
    reported = [np.asarray(s.log_probs, dtype=np.float64) for s in rows]
    return {
        f"{name}_tokens": np.concatenate([*tokens, np.zeros(0, dtype=np.int64)]),
        f"{name}_log_probs": np.concatenate([*reported, np.zeros(0)]),
        f"{name}_lengths": np.array([len(t) for t in tokens], dtype=np.int64),
        f"{name}_prompt": np.array([s.prompt for s in rows], dtype=np.int64),
        f"{name}_round": np.array([s.round for s in rows], dtype=np.int64),
        f"{name}_ruled": np.array([s.ruled for s in rows], dtype=np.int64),
        f"{name}_kept": np.array([s.kept for s in rows], dtype=np.int64),
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
