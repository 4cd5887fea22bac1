"""How fast a head learns in idle time: tokens per second of `drafter_online.Trainer`, on states made up at random."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu import models
from benchmarks.gpu.plan import NotHereError, Spec

SECONDS = 15.0
WARM = 3
"""Micro-steps before the clock starts."""


def measure(spec: Spec) -> dict[str, Any]:
    """Tokens per second, milliseconds of a micro-step, and the memory it took."""
    try:
        import speculators  # noqa: F401 - the head's model class
        import torch

        from drafter_online import architecture
        from drafter_online import head as heads
        from drafter_online.buffer import Buffer, BufferConfig
        from drafter_online.model import Eagle3
        from drafter_online.trainer import DrafterTraining, Trainer
    except ImportError as e:
        raise NotHereError(f"training needs the packages of rollspec[drafter]: {e}") from e
    cuda = spec.device == "cuda"
    shape = "tiny" if spec.dry else "qwen3-1.7b"
    target = models.trainable(spec.folder, shape)
    depth, hidden = (models.QWEN3[shape][n] for n in ("num_hidden_layers", "hidden_size"))
    head = heads.fresh(target)
    buffer = Buffer(BufferConfig(max_bytes=1 << 31))
    for i in range(4 if spec.quick else 16):
        buffer.add(_sample(i, 64 if spec.quick else 512, hidden, len(architecture.aux_layers(depth)), shape))
    trainer = Trainer(
        Eagle3(head), buffer, DrafterTraining(batch_tokens=128 if spec.quick else 2048), device=spec.device
    )
    for _ in range(WARM):
        trainer.micro_step()
    tokens, steps, skipped = 0, 0, 0
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    while time.perf_counter() - start < (1.0 if spec.quick else SECONDS):
        report = trainer.micro_step()
        tokens, steps, skipped = tokens + report.tokens, steps + 1, skipped + int(report.skipped is not None)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {
        "shape": shape,
        "tokens_per_second": tokens / seconds,
        "micro_step_ms": 1e3 * seconds / steps,
        "micro_steps": steps,
        "skipped": skipped,
        "precision": str(trainer.dtype),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }


def _sample(i: int, length: int, hidden: int, layers: int, shape: str) -> Any:
    """A sequence with random states: their values do not matter to the speed."""
    import torch

    from drafter_online.samples import Sample

    g = torch.Generator().manual_seed(i)
    prompt = length // 8
    return Sample(
        input_ids=torch.randint(models.QWEN3[shape]["vocab_size"], (length,), generator=g),
        hidden_states=torch.randn(length, layers * hidden, generator=g).bfloat16(),
        verifier_last_hidden_states=torch.randn(length, hidden, generator=g).bfloat16(),
        loss_mask=torch.arange(length) >= prompt,
        position_ids=torch.arange(length),
        prompt_key=f"p{i}",
        request_id=f"r{i}",
        target_version=0,
        response_length=length - prompt,
    )
