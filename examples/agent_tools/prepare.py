"""Make everything the job needs: the policy, and train and validation Parquet in the row format verl reads.

Usage, from the repository root::

    python -m examples.agent_tools.prepare --out ~/.cache/rollspec/agent_tools --json

The result lies in a folder named by a hash of all its inputs, and is written whole or not at all. Row: ``data_source``,
``prompt`` (chat messages), ``ability``, ``reward_model`` ``{style, ground_truth}`` and ``extra_info`` ``{split, index,
results}``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from examples.agent_tools.task import Task, stream
from examples.cache import built_once

HERE = Path(__file__).resolve().parent
CHECKPOINT = HERE / "checkpoint"
SIZES = ("demo", "tiny")
DATA_SOURCE = "rollspec/agent_tools"
SEEDS = {"train": 1_000_003, "val": 2_000_003}  # apart from each other and from the policy's training
_CODE = (
    *(HERE / name for name in ("prepare.py", "task.py", "tokenizer.py")),
    *(HERE.parent / "grpo_arithmetic" / name for name in ("grow.py", "tokenizer.py")),
)


@dataclass(frozen=True)
class Prepared:
    """Where things are. `reward` and `tools` are files that verl loads by path."""

    model: str
    train: str
    val: str
    reward: str
    tools: str
    manifest: str


def row(task: Task, split: str, index: int) -> dict[str, Any]:
    """One row in verl's format."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": task.question}],
        "ability": "tools",
        "reward_model": {"style": "rule", "ground_truth": str(task.answer)},
        "extra_info": {"split": split, "index": index, "results": list(task.results)},
    }


def prepare(
    cache: str | Path, size: str = "demo", seed: int = 0, train_size: int = 256, val_size: int = 64
) -> Prepared:
    """Build once per set of inputs; later calls return the same paths without work.

    Args:
        cache: folder for the results, made when missing.
        size: ``demo`` (grown, 16 M parameters) or ``tiny`` (as shipped, 1 M, for tests).
        seed: of the tasks and of the grown policy's new weights.
        train_size: training prompts.
        val_size: validation prompts.
    """
    if size not in SIZES:
        raise ValueError(f"size={size!r} is not one of {SIZES}")
    files = [*_CODE, *sorted(p for p in CHECKPOINT.iterdir() if p.is_file())]
    inputs = {"size": size, "seed": seed, "train": train_size, "val": val_size}
    digests = {p.relative_to(HERE.parent).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    text = json.dumps({**inputs, "files": digests}, indent=2)

    def build(out: Path) -> None:
        from datasets import Dataset

        from examples.agent_tools.tokenizer import build_tokenizer
        from examples.grpo_arithmetic.grow import write_policy

        write_policy(CHECKPOINT, out / "model", build_tokenizer(), size == "demo", seed)
        for split, count in (("train", train_size), ("val", val_size)):
            rows = [row(task, split, i) for i, task in enumerate(islice(stream(SEEDS[split] + seed), count))]
            Dataset.from_list(rows).to_parquet(str(out / f"{split}.parquet"))
        (out / "manifest.json").write_text(text + "\n")

    final = built_once(cache, f"{size}-{hashlib.sha256(text.encode()).hexdigest()[:12]}", "manifest.json", build)
    return Prepared(
        model=str(final / "model"),
        train=str(final / "train.parquet"),
        val=str(final / "val.parquet"),
        reward=str(HERE / "reward.py"),
        tools=str(HERE / "verl_tools.py"),
        manifest=str(final / "manifest.json"),
    )


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Build the policy and the data of the example with tools.")
    parser.add_argument("--out", type=Path, required=True, help="cache folder")
    parser.add_argument("--size", choices=SIZES, default="demo", help="grown policy, or the shipped one for tests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-size", type=int, default=256)
    parser.add_argument("--val-size", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="print paths as JSON")
    args = parser.parse_args()
    found = asdict(prepare(args.out, args.size, args.seed, args.train_size, args.val_size))
    print(json.dumps(found) if args.json else "\n".join(f"{name}: {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
