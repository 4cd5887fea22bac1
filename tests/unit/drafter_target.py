"""A tiny random target on disk, and samples of it, for the drafter's tests."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from reference_samples import capture, verify

from drafter_online import head as heads
from drafter_online.buffer import Buffer, BufferConfig
from drafter_online.samples import Sample

VOCABULARY, HIDDEN, LAYERS = 40, 32, 4
AUX = (1, 2, 3)


@cache
def target(folder: Path) -> Path:
    """The folder of a Qwen3 with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=256,
            initializer_range=0.3,
            tie_word_embeddings=False,
        )
        Qwen3ForCausalLM(config).save_pretrained(folder / "target")
    return folder / "target"


@cache
def model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def sequence(seed: int, length: int) -> list[int]:
    """Counting with a seed-dependent step: something a drafter can learn in seconds."""
    rng = random.Random(seed)
    start, step = rng.randrange(VOCABULARY), rng.choice([1, 2, 3])
    return [(start + step * i) % VOCABULARY for i in range(length)]


def sample(path: Path, seed: int = 0, length: int = 24, prompt: int = 4, errors: int = 0, **fields: Any) -> Sample:
    """A sample with `errors` verify steps, each of three proposals, the second of them wrong."""
    ids = sequence(seed, length)
    steps = []
    for i in range(errors):
        at = prompt + 4 * i
        wrong = (ids[at + 2] + 5) % VOCABULARY
        steps.append(verify(model(path), ids, at, [ids[at + 1], wrong, (wrong + 1) % VOCABULARY], k=VOCABULARY))
    values: dict[str, Any] = {"request_id": f"r{seed}", "prompt_key": f"p{seed % 3}", **fields}
    return capture(model(path), ids, prompt, AUX, steps=steps, **values)


def filled(path: Path, n: int = 12, length: int = 24, **fields: Any) -> Buffer:
    buffer = Buffer(BufferConfig(max_bytes=1 << 24))
    for i in range(n):
        buffer.add(sample(path, i, length, **fields))
    return buffer


def head(path: Path, **kw: Any) -> Any:
    return heads.fresh(path, aux=AUX, **kw)
