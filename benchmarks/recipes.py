"""How to train a draft head: recipes compared on the samples that `drafter-online make-head` left in its folder.

    python -m benchmarks.recipes HEAD --seconds 120 --arms 'default;random start;lk_hybrid'

Every recipe trains a head, a fresh one or `--start`, for the same CPU-seconds of one thread, from the same samples, and
is measured on the same held-out prompts. The arms differ from `default` in the one thing that they are named after.
Rejected drafts and rewards are in samples of `benchmarks.feedback` only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import provenance, save
from benchmarks.options import arms_and_seeds

if TYPE_CHECKING:
    from drafter_online.buffer import Buffer
    from drafter_online.samples import Sample
    from drafter_online.trainer import Trainer

ARMS: dict[str, dict[str, Any]] = {
    "default": {},
    "random start": {"random": True},
    "batch 256": {"batch_tokens": 256},
    "batch 2048": {"batch_tokens": 2048},
    "rate 0.0003": {"learning_rate": 3e-4},
    "rate 0.003": {"learning_rate": 3e-3},
    "top1": {"objective": "top1"},
    "lk_hybrid": {"objective": "lk_hybrid"},
    "rejected": {"rejected": 0.5},
    "rejected only": {"accept": 0.0, "rejected": 1.0},
    "reward": {"reward_beta": 1.0},
    "window 128": {"window_tokens": 128},
    "rate 0.0001": {"learning_rate": 1e-4},
    "rate 0.00001": {"learning_rate": 1e-5},
}
BATCH = 512
STEPS = 4  # drafted tokens that the head is trained for, and measured on
HELD_OUT = 8192  # tokens
LOOKS = 4  # at the held-out prompts, during training


@dataclass(frozen=True)
class Recorded:
    """What `make-head` left: its record, samples to train on, and held-out ones."""

    record: dict[str, Any]
    kept: Buffer
    held: list[Sample]

    @classmethod
    def read(cls, folder: Path) -> Recorded:
        """From its folder."""
        from drafter_online.buffer import Buffer, BufferConfig
        from drafter_online.held_out import first, split
        from drafter_online.make_head import RECORD

        buffer = Buffer.load(folder / "buffer", BufferConfig(max_bytes=1 << 62))
        kept, held = split(buffer, 0.1)
        return cls(json.loads((folder / RECORD).read_text()), kept, first(held, HELD_OUT))


def train(
    given: Recorded, arm: str, seed: int, seconds: float, vocabulary: int, start: Path | None = None
) -> tuple[Trainer, dict[str, Any]]:
    """Train a fresh head, or `start`, by the recipe `arm`; what trained it, and acceptance over CPU-seconds."""
    from drafter_online import head as heads
    from drafter_online.make_head import PACKED, cooled
    from drafter_online.model import Eagle3
    from drafter_online.settings import training_of
    from drafter_online.trainer import Trainer

    recipe = dict(ARMS[arm])
    random = recipe.pop("random", False)
    if start is not None:
        made = heads.load(start, given.record["target"])
    else:
        made = heads.fresh(
            given.record["target"],
            aux=given.record["aux_layers"],
            draft_vocab_size=vocabulary,
            counts=given.kept.token_counts(),
            random=random,
            seed=seed,
        )
    config = training_of({"batch_tokens": BATCH, "ttt_steps": STEPS, "seed": seed, **recipe})
    trainer = Trainer(Eagle3(made), given.kept, config)
    found = trainer.evaluate(given.held, PACKED)
    curve = [{"cpu_seconds": 0.0, "acceptance_length": round(found.length, 4)}]
    spent = 0.0
    while spent < seconds:
        began = time.process_time()
        trainer.rate = cooled(spent / seconds)
        trainer.micro_step()
        spent += time.process_time() - began
        if spent >= seconds * len(curve) / LOOKS:
            found = trainer.evaluate(given.held, PACKED)
            curve.append({"cpu_seconds": round(spent, 1), "acceptance_length": round(found.length, 4)})
    c = trainer.counts
    counts = {"micro_steps": c.micro_steps, "tokens": c.tokens, "response_tokens": given.kept.token_counts().total()}
    return trainer, {"curve": curve, **counts}


def run(
    folder: Path,
    arms: Sequence[str] = tuple(ARMS),
    seeds: Sequence[int] = (0,),
    seconds: float = 120.0,
    vocabulary: int = 2048,
    start: Path | None = None,
    out: Path | None = None,
) -> Path:
    """Train them all, print a table, and write JSON."""
    import torch

    from drafter_online.held_out import max_acceptance

    torch.set_num_threads(1)
    console = Console(stderr=True)
    began = provenance()
    given = Recorded.read(folder)
    most = 0.0  # the largest possible, alike for all recipes
    found: dict[str, dict[str, Any]] = {}
    for arm in arms:
        found[arm] = {}
        for seed in seeds:
            trainer, result = train(given, arm, seed, seconds, vocabulary, start)
            most = most or round(max_acceptance(trainer, given.held).length, 4)
            found[arm][str(seed)] = {**result, "max_acceptance": most}
        console.print(arm, *(r["curve"][-1]["acceptance_length"] for r in found[arm].values()))
    table = Table(
        "recipe", "acceptance length", "of the largest possible", title=f"after {seconds:g} CPU-seconds of training"
    )
    for arm, runs in found.items():
        lengths = [r["curve"][-1]["acceptance_length"] for r in runs.values()]
        shares = [n / r["max_acceptance"] for n, r in zip(lengths, runs.values(), strict=True)]
        table.add_row(arm, f"{statistics.mean(lengths):.2f}", f"{statistics.mean(shares):.2f}")
    console.print(table)
    result = {
        "benchmark": "recipes",
        "provenance": began,
        "finished": {"load": provenance()["load"]},
        "target": given.record["target"],
        "temperature": given.record["temperature"],
        "draft_vocab_size": vocabulary if start is None else None,
        "start": str(start) if start else None,
        "cpu_seconds": seconds,
        "arms": found,
    }
    return save("recipes", result, out)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Compare recipes of draft head training on recorded samples.")
    parser.add_argument("folder", type=Path, help="folder of `drafter-online make-head`")
    parser.add_argument("--arms", default=";".join(ARMS), help="separated by semicolons")
    parser.add_argument("--seeds", default="0", help="separated by commas")
    parser.add_argument("--seconds", type=float, default=120.0, help="CPU-seconds of training for each")
    parser.add_argument("--draft-vocab", type=int, default=2048)
    parser.add_argument("--start", type=Path, help="folder of the head that training starts from; default: a fresh one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    arms, seeds = arms_and_seeds(parser, args.arms, args.seeds, ARMS)
    print(run(args.folder, arms, seeds, args.seconds, args.draft_vocab, args.start, args.out))


if __name__ == "__main__":
    main()
