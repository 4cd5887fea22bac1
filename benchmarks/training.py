"""What a micro-step of draft head training costs: processor time, memory, and where they go.

One thread, fp32, batches of `batch_tokens` columns in windows of `window_tokens`, as a job trains on a CPU. Every arm
is a process of its own, so that its peak of memory is its own. What is computed does not depend on the weights: the
states are random. `peak` is what the processor reaches in a matrix product of the same kind.

    rollspec bench training --model smollm2
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.harness import QUICK, ROOT, provenance, save

WARM, STEPS = 1, 6
PROMPT, WINDOW = 64, 512
GOAL = {"cpu_seconds": 6.0, "peak_gigabytes": 2.0}
"""Of a micro-step of 2,048 tokens with the default vocabulary."""


def run(
    quick: bool = False, out: Path | None = None, model: Path | None = None, vocabularies: tuple[int, ...] = (8192, 0)
) -> Path:
    """Measure every draft vocabulary (0: the whole one) and write the JSON."""
    console = Console(stderr=True)
    target = str(model or _demo_policy())
    rows = []
    for size in track(vocabularies, "training", console=console, transient=True):
        given = json.dumps({"target": target, "size": size, "steps": 1 if quick else STEPS})
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.training", given],
            cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    table = Table(title=f"draft head training: {Path(target).name}, one thread" + (f" ({QUICK})" if quick else ""))
    for column in ("vocabulary", "tokens", "CPU s", "tokens/s", "GFLOP/s", "of", "GB", "most time"):
        table.add_column(column, justify="left" if column == "most time" else "right", no_wrap=True)
    for r in rows:
        most = ", ".join(f"{name} {share:.0%}" for name, share in list(r["profile"].items())[:2])
        table.add_row(
            f"{r['vocabulary']:,}", f"{r['tokens']:,}", f"{r['cpu_seconds']:.2f}", f"{r['tokens_per_second']:.0f}",
            f"{r['gflop'] / r['cpu_seconds']:.0f}", f"{r['peak_gflops']:.0f}", f"{r['peak_gigabytes']:.2f}", most,
        )  # fmt: skip
    Console().print(table)
    return save("training", {**provenance(), "target": Path(target).name, "goal": GOAL, "rows": rows}, out)


def _demo_policy() -> str:
    from benchmarks.drift import CACHE
    from examples.demo.job import JobSettings, prepare_assets

    return prepare_assets(JobSettings(), CACHE / "grpo_arithmetic").model


def measure(target: str, size: int, steps: int) -> dict[str, Any]:
    """Micro-steps of a fresh head, in this process."""
    import torch

    from drafter_online import head as heads
    from drafter_online.model import Eagle3
    from drafter_online.trainer import DrafterTraining, Trainer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = heads.fresh(target, draft_vocab_size=size or None)
    config = DrafterTraining(window_tokens=WINDOW)
    drafter = Eagle3(made)
    trainer = Trainer(drafter, _samples(made, 3 * config.batch_tokens), config)
    seconds, tokens = [], 0
    for _ in range(WARM + steps):
        begin = time.process_time()
        tokens = trainer.micro_step().tokens
        seconds.append(time.process_time() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    each = statistics.median(seconds[WARM:])
    return {
        "vocabulary": drafter.vocabulary,
        "parameters": sum(p.numel() for p in made.parameters() if p.requires_grad),
        "tokens": tokens,
        "cpu_seconds": each,
        "seconds": seconds[WARM:],
        "tokens_per_second": tokens / each,
        "gflop": _gflop(made, tokens, config.ttt_steps),
        "peak_gflops": _peak(made.config.target_hidden_size),
        "peak_gigabytes": peak,
        "profile": _profile(trainer),
    }


def _samples(head: Any, tokens: int) -> Any:
    import torch

    from drafter_online.buffer import Buffer, BufferConfig
    from drafter_online.samples import Sample

    hidden, layers = head.config.target_hidden_size, len(head.config.eagle_aux_hidden_state_layer_ids)
    buffer = Buffer(BufferConfig(max_bytes=1 << 32))
    for i in range(-(-tokens // WINDOW)):
        at = torch.arange(WINDOW)
        states = torch.randn(WINDOW, layers * hidden).bfloat16()
        last = torch.randn(WINDOW, hidden).bfloat16()
        ids = torch.randint(0, head.draft_vocab_size, (WINDOW,))
        buffer.add(Sample(ids, states, last, at >= PROMPT, at, f"p{i}", f"r{i}", 0, response_length=WINDOW - PROMPT))
    return buffer


def _gflop(head: Any, tokens: int, steps: int) -> float:
    """Arithmetic of the matrix products: two per weight and token forwards, twice that backwards; of the LM head, whose
    weights stand, once that. The target's logits are computed once for all steps. Attention is left out.
    """
    layers = sum(p.numel() for n, p in head.named_parameters() if p.requires_grad and n.startswith("layers."))
    fc, lm_head = head.fc.weight.numel(), head.lm_head.weight.numel()
    return float(2e-9 * tokens * (3 * layers * steps + 2 * fc + lm_head * (1 + 2 * steps)))


def _peak(hidden: int) -> float:
    """GFLOP/s of one matrix product of this processor, the best of some."""
    import torch

    a, b = torch.randn(512, hidden), torch.randn(hidden, 4096)
    best = float("inf")
    for _ in range(20):
        begin = time.process_time()
        a @ b
        best = min(best, time.process_time() - begin)
    return 2e-9 * 512 * hidden * 4096 / best


def _profile(trainer: Any, most: int = 8) -> dict[str, float]:
    """Share of a micro-step's processor time by operation."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        trainer.micro_step()
    own = {e.key.removeprefix("aten::"): e.self_cpu_time_total for e in found.key_averages()}
    total = sum(own.values())
    return {k: round(v / total, 4) for k, v in sorted(own.items(), key=lambda kv: -kv[1])[:most]}


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
