"""Held-out prompts: which they are, how much of their text a head can draft at all, and what drafts achieve at most."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from drafter_online.buffer import Buffer, BufferConfig
from drafter_online.files import sha256
from drafter_online.objective import Acceptance, evaluate
from drafter_online.packing import pack

if TYPE_CHECKING:
    from drafter_online.samples import Sample
    from drafter_online.trainer import Trainer


def split(samples: Iterable[Sample], share: float) -> tuple[Buffer, list[Sample]]:
    """What is trained on, and the samples that acceptance is measured on: those of about `share` of the prompts, of one
    at least; none where `share` is 0 or there is a single prompt.

    By a prompt's hash, so that what is added later moves none from one side to the other.
    """
    samples = list(samples)
    out = held_out(map(_key, samples), share)
    kept = Buffer(BufferConfig(max_bytes=1 << 62))
    for sample in samples:
        if _key(sample) not in out:
            kept.add(sample)
    return kept, sorted((s for s in samples if _key(s) in out), key=lambda s: _place(_key(s)))


def held_out(prompts: Iterable[str], share: float) -> set[str]:
    """The keys of the prompts that `split` measures on."""
    order = sorted(set(prompts), key=_place)
    count = sum(_place(k) < share for k in order)
    return set(order[: min(max(1, count), len(order) - 1)]) if share else set()


def _place(key: str) -> float:
    return int(sha256(key.encode())[:8], 16) / 2**32


def _key(sample: Sample) -> str:
    return sample.prompt_key or sample.request_id


def first(samples: list[Sample], tokens: int) -> list[Sample]:
    """The first samples that have `tokens` tokens together, or all."""
    short = sum(total < tokens for total in accumulate(map(len, samples)))
    return samples[: short + 1]


def covered(head: Any, samples: list[Sample]) -> float:
    """Share of the samples' response tokens that a head can draft."""
    if not head.use_draft_vocab:
        return 1.0
    drafted = [head.t2d.cpu()[s.input_ids[s.loss_mask]] for s in samples]
    return sum(int(t.sum()) for t in drafted) / max(1, sum(map(len, drafted)))


def max_acceptance(trainer: Trainer, samples: list[Sample]) -> Acceptance:
    """What greedy drafts achieve at most with this draft vocabulary: those of a drafter that knows the target's own
    likeliest token at every position. At a temperature above 0 the target does not always say it.
    """
    steps, drafter = trainer.steps, trainer.drafter
    knowing: Any = SimpleNamespace(
        vocabulary=drafter.vocabulary,
        to_draft=drafter.to_draft,
        trained_head=(),
        targets=drafter.targets,
        score=drafter.targets,
    )
    total = Acceptance(0, (0,) * steps)
    with torch.no_grad():
        for sample in samples:
            batch = pack([sample], steps=steps).to(trainer.device, trainer.dtype)
            states = [batch.verifier_last_hidden_states.roll(-i, dims=1) for i in range(steps)]
            total = total + evaluate(knowing, states, batch, trainer.config).acceptance
    return total
