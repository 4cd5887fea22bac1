"""Step time of vLLM's two model runners on CPU: V1 with its C++ kernels against V2 with `vllm_cpu_v2`.

    python -m benchmarks.runners [--model PATH] [--json FILE] [--profile]

One engine of each runner lives in a process of its own; the processes take turns, so that load slows both.
Every request decodes the same number of tokens with one synchronous step per token, so time / tokens is the step time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

RUNNERS = {"V1": "0", "V2": "1"}
BATCHES = (1, 4, 16, 64)
TOKENS = 64


def serve(model: str, dtype: str) -> None:
    """The child: build an engine, then time one batch per line of standard input, `SIZE [profile]`."""
    start = time.process_time(), time.perf_counter()
    import torch

    torch.set_num_threads(1)
    import vllm_cpu_v2

    vllm_cpu_v2.register()
    from vllm import LLM, SamplingParams

    imported = time.process_time(), time.perf_counter()
    llm = LLM(
        model=model,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=max(BATCHES),
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=False,
        async_scheduling=False,
    )

    def generate(size: int) -> None:
        params = [SamplingParams(temperature=1.0, seed=i, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
                  for i in range(size)]  # fmt: skip
        llm.generate([{"prompt_token_ids": [3 + i % 5] * 8} for i in range(size)], params, use_tqdm=False)

    generate(2)
    ready = time.process_time(), time.perf_counter()
    say({"start_cpu_s": ready[0] - imported[0], "start_s": ready[1] - imported[1], "import_s": imported[1] - start[1]})
    for line in sys.stdin:
        size, *options = line.split()
        if options:
            say(profile(generate, int(size)))
            continue
        cpu, wall = time.process_time(), time.perf_counter()
        generate(int(size))
        say({"cpu_ms": 1e3 * (time.process_time() - cpu) / TOKENS, "ms": 1e3 * (time.perf_counter() - wall) / TOKENS})


def profile(generate: Any, size: int) -> dict[str, Any]:
    """Own time per step in milliseconds of the 30 most expensive functions."""
    import cProfile
    import pstats

    recorder = cProfile.Profile()
    recorder.runcall(generate, size)
    rows = sorted(pstats.Stats(recorder).stats.items(), key=lambda item: -item[1][2])[:30]  # type: ignore[attr-defined]
    return {f"{os.path.basename(f)}:{line} {name}": round(1e3 * own[2] / TOKENS, 4) for (f, line, name), own in rows}


def say(result: dict[str, Any]) -> None:
    print("RESULT", json.dumps(result), flush=True)


class Engine:
    """An engine in a child process."""

    def __init__(self, runner: str, model: str, dtype: str) -> None:
        env = {
            **os.environ,
            "VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner],
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.runners", "--serve", "--model", model, "--dtype", dtype],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip

    def ask(self, line: str = "") -> dict[str, Any]:
        """The next result, after sending `line`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if line:
            print(line, file=self.process.stdin, flush=True)
        for answer in self.process.stdout:
            if answer.startswith("RESULT "):
                return dict(json.loads(answer[7:]))
        raise RuntimeError(f"the engine process ended with code {self.process.wait()}; its standard error says why.")

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def compare(model: str, dtype: str, pairs: int, profiled: bool) -> dict[str, Any]:
    engines: dict[str, Engine] = {}
    result: dict[str, Any] = {"dtype": dtype, "tokens": TOKENS, "pairs": pairs, "start": {}, "batches": {}}
    for runner in RUNNERS:  # one after the other: start-up is timed too
        engines[runner] = Engine(runner, model, dtype)
        result["start"][runner] = engines[runner].ask()
    for size in BATCHES:
        seen: dict[str, list[dict[str, float]]] = {runner: [] for runner in RUNNERS}
        for i in range(pairs):
            for runner in sorted(RUNNERS, reverse=bool(i % 2)):
                seen[runner].append(engines[runner].ask(str(size)))
        row: dict[str, Any] = {
            runner: {key: round(statistics.median(x[key] for x in many), 4) for key in ("cpu_ms", "ms")}
            for runner, many in seen.items()
        }
        for key in ("cpu_ms", "ms"):
            ratios = [b[key] / a[key] for a, b in zip(seen["V1"], seen["V2"], strict=True)]
            row[f"V2/V1 {key}"] = round(statistics.median(ratios), 4)
        result["batches"][size] = row
        print(size, json.dumps(row), flush=True)
    if profiled:
        result["profile"] = {runner: engine.ask("4 profile") for runner, engine in engines.items()}
    for engine in engines.values():
        engine.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the policy of examples/grpo_arithmetic")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.model, options.dtype)
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            from pathlib import Path

            from examples.grpo_arithmetic.prepare import prepare

            options.model = str(prepare(Path(folder)).model)
        result = compare(options.model, options.dtype, options.pairs, options.profile)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
