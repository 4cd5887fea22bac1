"""The workloads of `rollspec bench peers`: which prompts, how many at once, how long, under which weights.

    epochs   the same prompts again and again under a policy that moves, groups of samples, long-tailed lengths
    fresh    prompts that never repeat, sampled a few times each
    shift    requests of one topic, then of another, the batch going up from 1 to 8 in both
    full     a batch that stays full, where drafting hardly pays

A seed is one turn of every workload: it has prompts and an order of its own, so that no arm knows them beforehand.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.drift import CACHE, Drift
from benchmarks.engines import Work
from benchmarks.harness import text_config
from examples.cache import built_once
from examples.grpo_arithmetic.prepare import prepare
from rollspec.errors import RollspecError

EPOCHS = 3
BURSTS = (1, 2, 4, 8)
"""Batch sizes of a topic's bursts, with so many requests each: `max(2, size)`."""
TOPIC = sum(max(2, b) for b in BURSTS)  # requests of one topic
ROOM = 512  # tokens of a prompt
WARM = 16
"""Prompts that engines warm up with at most, an eighth of all where these are few."""


@dataclass(frozen=True)
class Workload:
    """`prompts`: of a seed. `samples`: of each. `most`: tokens of a response, which all have where `whole`."""

    what: str
    prompts: int
    samples: int
    batch: int
    most: int
    whole: bool = False
    topics: int = 1


WORKLOADS: dict[str, Workload] = {
    "epochs": Workload("the same prompts again, the policy moves; 8 samples of each", 4, 8, 32, 160),
    "fresh": Workload("prompts that never repeat; 4 samples of each", 8, 4, 16, 128),
    "shift": Workload("another topic half-way, batch 1 to 8; one sample of each", TOPIC, 1, max(BURSTS), 96, topics=2),
    "full": Workload("128 responses of 48 tokens through a batch of 64", 16, 8, 64, 48, whole=True),
}
LATER = {"epochs": "from the second epoch on", "shift": "after the shift"}
"""What a workload's speed-up is of, where it is not of everything."""


def later(workload: str, runs: Sequence[Any]) -> Sequence[Any]:
    """The part of a turn that its speed-up is of."""
    first = {"epochs": 1, "shift": len(runs) // 2}.get(workload, 0)
    return runs[first:]


def batches(workload: str, works: int) -> list[int]:
    """Requests at once in each work of a turn."""
    return [*BURSTS, *BURSTS] if workload == "shift" else [WORKLOADS[workload].batch] * works


@dataclass
class Load:
    """Every seed's requests, and the lengths of their responses once they are recorded.

    Attributes:
        prompts: token ids by topic, in a random order that is always the same.
        weights: of each epoch; [""] keeps the engine's own.
        lengths: workload -> seed -> per work, tokens of each response.
    """

    prompts: list[list[list[int]]]
    weights: list[str]
    workloads: tuple[str, ...]
    lengths: dict[str, dict[str, list[list[int]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = list(chain.from_iterable(self.prompts))
        random.Random(0).shuffle(self.pool)
        self.warming = self.pool[-max(1, min(WARM, len(self.pool) // 8)) :]

    @property
    def longest(self) -> int:
        """Tokens of prompt and response at most."""
        return max(map(len, self.pool)) + max(w.most for w in WORKLOADS.values())

    def check(self, seeds: int, model: str = "") -> None:
        """Raises RollspecError unless every workload has prompts of its own in every seed, and the model has room for
        prompts and responses.
        """
        room = text_config(model).get("max_position_embeddings")
        if room is not None and room < self.longest:
            longest = max(map(len, self.pool))
            raise RollspecError(
                f"rollspec: --model {model} has a context of {room} tokens, and the longest prompt ({longest}) with "
                f"its response needs {self.longest}; give --prompts with shorter ones, or another model."
            )
        if "shift" in self.workloads and len(self.prompts) < 2:
            raise RollspecError(
                "rollspec: --workloads shift needs prompts of two topics, which these are not; give --prompts whose "
                "rows name their `kind` in extra_info, or other workloads."
            )
        for name in self.workloads:
            needed, there = WORKLOADS[name].prompts * seeds, [len(p) for p in self._of(name)]
            if min(there) < needed:
                raise RollspecError(
                    f"rollspec: --workloads {name} needs {needed} different prompts for --seeds {seeds}, and it has "
                    f"{min(there)}; give --prompts with more, or fewer seeds."
                )

    def _of(self, name: str) -> list[list[list[int]]]:
        """A workload's own prompts by topic: no other workload shows them to drafters, and which of them run does not
        change what they are.
        """
        warm = {tuple(p) for p in self.warming}
        topics = [[p for p in topic if tuple(p) not in warm] for topic in self.prompts[:2]]
        shifting = [topic[: 2 * len(topic) // 3] for topic in topics] if len(self.prompts) > 1 else []
        if name == "shift":
            return shifting
        taken = warm | {tuple(p) for topic in shifting for p in topic}
        pool = [p for p in self.pool if tuple(p) not in taken]
        others = [w for w in WORKLOADS if w != "shift"]
        shares = [WORKLOADS[w].prompts for w in others]
        at = others.index(name)
        begin, end = (len(pool) * sum(shares[:i]) // sum(shares) for i in (at, at + 1))
        return [pool[begin:end]]

    def works(self, name: str, seed: int) -> list[Work]:
        """One turn of a workload; without lengths while they are not recorded."""
        w = WORKLOADS[name]
        topics = [p[seed * w.prompts : (seed + 1) * w.prompts] for p in self._of(name)]
        version = 1000 * (seed + 1) + 100 * list(WORKLOADS).index(name)
        order = [list(p) for p in chain.from_iterable(topics) for _ in range(w.samples)]
        weights = [self.weights[0]]
        if name == "shift":
            left = iter(order)
            parts = [[next(left) for _ in range(max(2, b))] for b in batches(name, 2 * len(BURSTS))]
        else:
            random.Random(seed).shuffle(order)  # siblings start apart, as in a real batch
            weights = self.weights if name == "epochs" else weights
            parts = [order] * len(weights)
        known: Sequence[list[int] | None] = self.lengths.get(name, {}).get(str(seed)) or [None] * len(parts)
        if w.whole:
            known = [[w.most] * len(p) for p in parts]
        return [
            Work(p, n, b, version + i, weights[i] if i < len(weights) else "", most=w.most)
            for i, (p, n, b) in enumerate(zip(parts, known, batches(name, len(parts)), strict=True))
        ]

    def warm(self) -> list[Work]:
        """What compiles and touches everything, and shows the tuner what steps cost, and how often drafts of such texts
        are accepted: of prompts of no sense a head learns to rest. No workload has these prompts.
        """
        return [
            Work((self.warming * 4)[: max(4, b)], [16] * max(4, b), b, i, self.weights[0] if not i else "")
            for i, b in enumerate((64, 8, 1), 1)
        ]


def load(policy: Drift, file: Path | None, workloads: tuple[str, ...], room: int = ROOM) -> Load:
    """Prompts of `file`, of the example that the policy learned, or built-in instructions.

    Raises:
        TrainingError: the file cannot be used.
    """
    from drafter_online import prompts

    where = file or (arithmetic() if policy.prompts else None)
    rows = by_topic(where) if where else _built_in()
    found: list[list[list[int]]] = []
    seen: set[tuple[int, ...]] = set()
    for topic in rows.values():
        ids = [p for p in prompts.tokenized(topic, policy.model, room)[0] if tuple(p) not in seen]
        seen.update(map(tuple, ids))
        random.Random(0).shuffle(ids)
        found.append(ids)
    return Load(sorted(found, key=len, reverse=True), policy.weights, workloads)


def arithmetic(count: int = 400, cache: Path = CACHE) -> Path:
    """Prompts as the demo's job has, which itself needs fewer; the first ones are its own."""
    return Path(prepare(cache / "grpo_arithmetic", "tiny", train_size=count).train)


def _built_in() -> dict[str, list[Any]]:
    """Instructions of two kinds, of which half asks to tell and half to work something out."""
    from drafter_online import prompts

    openings = [text.partition("{")[0] for text in prompts.INSTRUCTIONS[: len(prompts.INSTRUCTIONS) // 2]]
    out: dict[str, list[Any]] = {"tell": [], "work out": []}
    for row in prompts.built_in():
        out["tell" if row.startswith(tuple(openings)) else "work out"].append(row)
    return out


def by_topic(file: Path) -> dict[str, list[Any]]:
    """Prompts of a file by the `kind` that a Parquet row's `extra_info` names; all as one topic where none does."""
    from drafter_online import prompts

    kinds: list[str] = []
    if file.suffix == ".parquet" and file.is_file():
        import pyarrow.parquet as parquet  # type: ignore[import-untyped,unused-ignore]

        if "extra_info" in parquet.read_schema(file).names:
            extra = parquet.read_table(file, columns=["extra_info"]).to_pylist()
            kinds = [str((row["extra_info"] or {}).get("kind") or "") for row in extra]
    rows = prompts.read(file)
    out: dict[str, list[Any]] = {}
    for i, row in enumerate(rows):
        out.setdefault(kinds[i] if len(kinds) == len(rows) else "", []).append(row)
    return out


def drifting(model: Path, towards: Path | None, epochs: int = EPOCHS, cache: Path = CACHE) -> Drift:
    """A policy of which no job saved checkpoints: `model` in the first epoch, `towards` in the last, and between them
    the weights on the straight line; without `towards` the same weights in every epoch.

    Raises:
        RollspecError: the two are not of one shape.
    """
    if towards is None:
        return Drift(str(model), "", [""] * epochs, "the same weights in every epoch")
    import hashlib

    def build(folder: Path) -> None:
        from safetensors.torch import save_file

        old, new = _weights(model), _weights(towards)
        if {k: v.shape for k, v in old.items()} != {k: v.shape for k, v in new.items()}:
            raise RollspecError(f"rollspec: --towards {towards} is no checkpoint of {model}; give a later one of it.")
        for e in range(epochs):
            share = e / (epochs - 1)
            save_file({k: old[k].lerp(new[k].to(old[k].dtype), share) for k in old}, folder / f"epoch_{e}.safetensors")

    stamps = [f"{p}:{p.stat().st_mtime_ns}" for m in (model, towards) for p in sorted(m.glob("*.safetensors"))]
    name = f"line-{hashlib.sha256(' '.join([*stamps, str(epochs)]).encode()).hexdigest()[:12]}"
    folder = built_once(cache / "drift", name, f"epoch_{epochs - 1}.safetensors", build)
    weights = [str(folder / f"epoch_{e}.safetensors") for e in range(epochs)]
    return Drift(str(model), "", weights, f"on the line from {model.name} to {towards.name}")


def _weights(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {k: v for file in sorted(model.glob("*.safetensors")) for k, v in load_file(file).items()}
