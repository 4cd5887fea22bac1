"""vLLM engines that take turns: each arm of a comparison lives in a process of its own and is driven over a pipe.

    engine = Engine(Arm("suffix K=4", speculative={...}), model, max_len=704)
    engine.run(Work(prompts, lengths, batch=8, version=0))["seconds"]
    engine.close()

An idle engine waits without using a core (`cpu_seconds` shows it), so that several can be alive while one is measured.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, get_args

from benchmarks.prefixes import Prefixes
from benchmarks.probes import ledger
from rollspec.engine.vllm.compat import V2_SWITCH
from rollspec.machine import native_dtype

START_SECONDS = 240.0
RUN_SECONDS = 600.0
TRAINER = "rollspec.engine.daemon"  # in the command line of a job's trainer
MAX_NEW = 512  # tokens of a response that ends by itself
CACHING = {"enable_prefix_caching": True, "block_size": 32}
"""As a trainer's engine has it: samples of one prompt compute it once. vLLM's CPU platform has blocks of 128 tokens by
default, in which hardly a prompt here is complete; its kernels take multiples of 32.
"""


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: how its engine is built."""

    name: str
    speculative: dict[str, Any] | None = None  # vLLM's own methods
    rollspec: str | dict[str, Any] | None = None  # a preset, or a configuration
    environment: dict[str, str] = field(default_factory=dict)
    dtype: str | None = None  # None: this machine's
    seed: int = 0  # of the engine


@dataclass(frozen=True)
class Work:
    """One epoch for an engine: prompts, the length of each response, how many run at once."""

    prompts: list[list[int]]
    lengths: list[int] | None  # None: responses end by themselves, and their lengths are reported
    batch: int
    version: int
    weights: str | None = None  # safetensors file of the policy
    reset: bool = False  # forget what drafters learned before
    temperature: float = 1.0
    texts: bool = False  # whether to report what was said
    most: int = MAX_NEW  # tokens of a response that ends by itself


class Engine:
    """A vLLM engine in a child process."""

    def __init__(self, arm: Arm, model: str, max_len: int, max_seqs: int = 64) -> None:
        context = mp.get_context("spawn")
        self.arm = arm
        self._pipe, child = context.Pipe()
        # Not a daemon: vLLM starts processes of its own.
        self._process = context.Process(target=_serve, args=(child, arm, model, max_len, max_seqs))
        self._process.start()
        self.overlapping: bool = self._answer(START_SECONDS)["overlapping"]
        """Whether a step may begin before the one before it has ended."""

    def run(self, work: Work) -> dict[str, Any]:
        """Do `work`; returns seconds, CPU seconds of the engine and of its trainer, tokens, steps and counters."""
        before = self.cpu_seconds(), self.cpu_seconds(trainer=True)
        self._pipe.send(work)
        done: dict[str, Any] = self._answer(RUN_SECONDS)
        spent = self.cpu_seconds() - before[0], self.cpu_seconds(trainer=True) - before[1]
        return done | dict(zip(("cpu_seconds", "trainer_cpu_seconds"), spent, strict=True))

    def call(self, act: Callable[..., Any], *args: Any) -> Any:
        """Run `act(worker, *args)`, a function of a module, in the engine's worker; returns what it returned.

        Raises:
            RuntimeError: what it raised there; the engine goes on.
        """
        self._pipe.send((act, args))
        return self._answer(RUN_SECONDS)

    def cpu_seconds(self, trainer: bool = False) -> float:
        """Processor time used so far by the engine's processes, without a trainer's; or that trainer's."""
        import psutil

        total = 0.0
        for process in self._family():
            try:
                if (TRAINER in process.cmdline()) != trainer:
                    continue
                times = process.cpu_times()
            except psutil.Error:
                continue
            total += times.user + times.system
        return total

    def suspend(self) -> None:
        """Halt its processes: for a second after its last step an unpatched engine waits in a busy loop."""
        self._each("suspend")

    def resume(self) -> None:
        """Resume a suspended engine."""
        self._each("resume")

    def _each(self, act: str) -> None:
        import psutil

        for process in self._family():
            with contextlib.suppress(psutil.Error):  # it ended meanwhile; the next run will say so
                getattr(process, act)()

    def close(self) -> None:
        """End the engine and every process it started."""
        import psutil

        family = self._family()
        try:
            self._pipe.send(None)
            self._process.join(20)
        except (OSError, ValueError):
            pass
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)
        for process in family:
            try:
                process.kill()
            except psutil.Error:
                continue

    def _family(self) -> list[Any]:
        import psutil

        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.Error:
            return []

    def _answer(self, seconds: float) -> Any:
        # Processes that the engine started have its end of the pipe, too, and may outlive it.
        if not wait([self._pipe, self._process.sentinel], seconds):
            self.close()
            raise TimeoutError(f"rollspec: the engine of arm {self.arm.name!r} did not answer within {seconds:g} s.")
        try:
            if not self._pipe.poll():
                raise EOFError
            answer = self._pipe.recv()
        except EOFError as e:
            self.close()
            raise RuntimeError(f"rollspec: the engine of arm {self.arm.name!r} ended; its output is above.") from e
        if isinstance(answer, RuntimeError):
            raise answer
        return answer


# ---- in the child ---------------------------------------------------------------------------------------------------


def _serve(pipe: Any, arm: Arm, model: str, max_len: int, max_seqs: int) -> None:
    os.environ.update(arm.environment)
    # Functions sent to this process's own workers are pickled; nothing from outside is.
    os.environ.update(VLLM_ALLOW_INSECURE_SERIALIZATION="1", VLLM_LOGGING_LEVEL="ERROR")
    from vllm import LLM

    llm = LLM(
        model=model,
        dtype=arm.dtype or native_dtype(),
        enforce_eager=True,
        max_model_len=max_len,
        max_num_seqs=max_seqs,
        seed=arm.seed,
        **CACHING,
        disable_log_stats=False,
        async_scheduling=(overlapping := _overlaps(arm)) or None,
        speculative_config=dict(arm.speculative) if arm.speculative else None,
        additional_config={"rollspec": arm.rollspec} if arm.rollspec else {},
    )
    try:
        if os.environ.get(V2_SWITCH) == "0":
            llm.collective_rpc(_expand_right)
        prefixes = Prefixes.of(llm, arm.rollspec)
        pipe.send({"overlapping": overlapping})
        while (work := pipe.recv()) is not None:
            if isinstance(work, Work):
                pipe.send(epoch(llm, work, arm, prefixes))
            else:
                act, args = work
                try:
                    pipe.send(llm.collective_rpc(act, args=args)[0])
                except Exception as e:
                    pipe.send(RuntimeError(f"{type(e).__name__}: {e}"))
    finally:  # or this process waits for the engine's at its end, and who drives it for an answer
        llm.llm_engine.engine_core.shutdown()


def _overlaps(arm: Arm) -> bool:
    """Whether steps may overlap, as those of rollspec's engines do: vLLM starts some of its methods only without."""
    from vllm.config.speculative import EagleModelTypes, NgramGPUTypes

    allowed = {*get_args(EagleModelTypes), *get_args(NgramGPUTypes), "draft_model"}
    return not arm.speculative or arm.speculative["method"] in allowed


def epoch(llm: Any, work: Work, arm: Arm, prefixes: Prefixes | None = None) -> dict[str, Any]:
    """One epoch in an engine of this process: seconds, tokens, steps, the drafter's counters.

    Args:
        prefixes: of the last epoch's responses, which this one's start from (a lossy arm); scoring them counts.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if work.reset:
        llm.collective_rpc(_forget)
    if not llm.reset_prefix_cache():  # each work computes its prompts, as after new weights in a job
        raise RuntimeError("rollspec: the engine still has requests of the work before this one.")
    if work.weights:
        llm.collective_rpc(_load_weights, args=(work.weights,))
    if arm.rollspec:
        llm.collective_rpc("rollspec", args=("set_version", {"version": work.version}))
        llm.collective_rpc("rollspec", args=("stats", {}))
    skipped = llm.llm_engine.model_config.skip_tokenizer_init
    end = None if skipped else llm.get_tokenizer().eos_token_id
    said: dict[str, list[int]] = {}
    before = _counters(llm)
    engine, queue = llm.llm_engine, list(enumerate(work.prompts))
    running: set[str] = set()
    steps = 0
    start = time.perf_counter()
    begun = prefixes.take(llm, work.prompts, work.lengths) if prefixes and work.lengths else None
    while queue or running:
        while queue and len(running) < work.batch:
            i, prompt = queue.pop(0)
            request = f"{work.version}-{work.batch}-{i}-{start}"
            said[request] = kept = list(begun[i]) if begun else []
            most = (work.lengths[i] if work.lengths else work.most) - len(kept)
            if not most:
                continue
            params = SamplingParams(
                temperature=work.temperature,
                max_tokens=most,
                ignore_eos=work.lengths is not None,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                **(prefixes.settings(prompt) if prefixes else {}),
            )
            engine.add_request(request, {"prompt_token_ids": [*prompt, *kept]}, params)
            running.add(request)
        if not running:
            break
        steps += 1
        for out in engine.step():
            if out.finished:
                running.discard(out.request_id)
                said[out.request_id] += out.outputs[0].token_ids
                if prefixes:
                    prefixes.ended(int(out.request_id.split("-")[2]), out)
    seconds = time.perf_counter() - start
    after = _counters(llm)
    texts = list(said.values())
    out = {
        "seconds": seconds,
        "tokens": sum(map(len, texts)),
        "steps": steps,
        "after_end": sum(len(t) - t.index(end) - 1 for t in texts if end in t),
        "drafted": after["drafted"] - before["drafted"],
        "accepted": after["accepted"] - before["accepted"],
    }
    if work.lengths is None:
        out["lengths"] = [len(t) for t in texts]
    if work.texts:
        out["texts"] = texts
    if prefixes:
        out |= prefixes.remember(work.prompts, texts)
    return out | (_own(llm) if arm.rollspec else {})


def _own(llm: Any) -> dict[str, Any]:
    """What rollspec counted, from the rank that drafts."""
    buckets = llm.collective_rpc(ledger)[0]  # before they are drained
    stats: dict[str, Any] = next((a for a in llm.collective_rpc("rollspec", args=("stats", {})) if a), {})
    info: dict[str, Any] = next((a for a in llm.collective_rpc("rollspec", args=("info", {})) if a), {})
    if not stats.get("step_seconds"):
        return {"state": info.get("state")}
    return {
        "propose_share": stats["propose_seconds"] / stats["step_seconds"],
        "propose_seconds": stats["propose_seconds"],
        "tuner_seconds": stats["tuner_seconds"],
        "engine_seconds": stats["step_seconds"],
        "engine_steps": stats["steps"],
        "passes": stats["passes"],
        "pass_seconds": stats["pass_seconds"],
        "plays": stats["plays"],
        "modelled": stats["modelled"],
        "buckets": buckets,
        "max_acceptance": stats["max_prob"][0] / stats["max_prob"][1] if stats["max_prob"][1] else None,
        "alarms": stats["alarms"],
        "drafters_off": stats["drafters_off"],
        "by_source": stats["by_source"],
        "predicted": stats["predicted"],
        "predicted_by": stats["predicted_by"],
        "cost": info.get("cost"),
        "state": info.get("state"),
        "faults": stats["faults"],
    }


def _counters(llm: Any) -> dict[str, float]:
    found = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    return {
        "drafted": found.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted": found.get("vllm:spec_decode_num_accepted_tokens", 0),
    }


# ---- in the worker --------------------------------------------------------------------------------------------------


def _load_weights(worker: Any, path: str) -> None:
    from safetensors.torch import load_file

    worker.model_runner.model.load_weights(list(load_file(path).items()))


def _expand_right(worker: Any) -> None:
    """On a CPU vLLM's first model runner scales logits of draft tokens by temperatures that nothing has written, and so
    samples another distribution (vllm-project/vllm#55005).
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(x: Any, ends: Any, tokens: int, replace_from: float = 0, replace_to: float = 0) -> Any:
        counts = ends.diff(prepend=ends.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=tokens)

    rejection_sampler.expand_batch_to_tokens = expand


def _forget(worker: Any) -> None:
    """Suffix drafts start an epoch sequence knowing nothing."""
    bridge = getattr(worker.model_runner, "_rollspec", None)
    if bridge is not None:
        cost = bridge.engine.tuner.cost  # of the machine, not of the texts
        bridge.engine = type(bridge.engine)(bridge.config, bridge.engine.max_model_len)
        bridge.engine.tuner.cost = cost
