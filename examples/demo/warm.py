"""Fills the caches that a machine's first engine fills in its first steps, so that both runs find them full.

    python -m examples.demo.warm MODEL DTYPE

An engine with rollspec on decodes a few tokens of the policy. What it compiles stays on the disk, and what it reads in
memory: code, libraries and weights.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 90.0  # at most: what it saves is less


def warm_up(model: str, dtype: str, environment: Mapping[str, str]) -> str:
    """Run it in a process of its own; what went wrong in a sentence, or nothing. The job says better what is missing.

    Args:
        model: folder of the policy.
        dtype: that the job computes in.
        environment: what the job sets besides the caller's.
    """
    command = [sys.executable, "-m", "examples.demo.warm", model, dtype]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        return f"it took more than {SECONDS:g} s"
    finally:  # the engine's own processes, too
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"it exited with status {code}" if code else ""


def main(model: str, dtype: str) -> None:
    """Decode twice the same, the second time with drafts from the first."""
    from vllm import LLM, SamplingParams

    engine = LLM(model=model, dtype=dtype, enforce_eager=True, max_model_len=256, max_num_seqs=8,
                 async_scheduling=True, additional_config={"rollspec": "default"})  # fmt: skip
    prompts = [{"prompt_token_ids": [5, 6, 7, 8 + i // 4]} for i in range(8)]
    for _ in range(2):
        engine.generate(prompts, SamplingParams(max_tokens=32, ignore_eos=True, detokenize=False), use_tqdm=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
