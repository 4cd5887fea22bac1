"""Make everything a job with a model of one's own needs beside it: train and validation Parquet, and a manifest.

Usage, from the repository root::

    python -m examples.grpo_tasks.prepare --model smollm2 --out ~/.cache/rollspec/grpo_tasks --json

The result lies in a folder named by a hash of all its inputs, and is written whole or not at all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.cache import built_once
from examples.models import resolve
from rollspec.errors import RollspecError

HERE = Path(__file__).resolve().parent
_CODE = ("data.py", "prepare.py", "task.py")


@dataclass(frozen=True)
class Prepared:
    """Where things are. ``reward`` is the file for verl's ``reward.custom_reward_function.path``."""

    model: str
    train: str
    val: str
    reward: str
    manifest: str


def weights_of(model: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of every file of the checkpoint: another one has others, and gigabytes need not be read."""
    return [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(model.iterdir()) if p.is_file()]


def require_chat_template(model: Path) -> None:
    """Raises RollspecError where prompts cannot be put as a chat: of a base model verl would say so minutes later."""
    config = model / "tokenizer_config.json"
    if (model / "chat_template.jinja").is_file() or (
        config.is_file() and '"chat_template"' in config.read_text("utf-8")
    ):
        return
    raise RollspecError(
        f"rollspec: --model {model} has no chat template; give an instruct model, or put one beside it."
    )


def prepare(cache: str | Path, model: str, seed: int = 0, train_size: int = 256, val_size: int = 64) -> Prepared:
    """Build once per set of inputs; later calls return the same paths without work.

    Args:
        cache: folder for the results, made when missing.
        model: what `examples.models.resolve` takes.
        seed: of the tasks.
        train_size: training prompts.
        val_size: validation prompts.

    Raises:
        RollspecError: the model cannot be used.
    """
    folder = resolve(model)
    require_chat_template(folder)
    code = [hashlib.sha256((HERE / name).read_bytes()).hexdigest() for name in _CODE]
    inputs = {"model": str(folder), "files": weights_of(folder), "seed": seed, "train": train_size, "val": val_size}
    text = json.dumps({**inputs, "code": code}, indent=2)

    def build(out: Path) -> None:
        from examples.grpo_tasks.data import write_split

        write_split(out / "train.parquet", "train", train_size, seed)
        write_split(out / "val.parquet", "val", val_size, seed)
        (out / "manifest.json").write_text(text + "\n")

    final = built_once(cache, hashlib.sha256(text.encode()).hexdigest()[:12], "manifest.json", build)
    return Prepared(
        model=str(folder),
        train=str(final / "train.parquet"),
        val=str(final / "val.parquet"),
        reward=str(HERE / "reward.py"),
        manifest=str(final / "manifest.json"),
    )


def main() -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Write the prompts of the GRPO example for a real model.")
    parser.add_argument("--model", default="smollm2", help="PATH, model of the hub, or smollm2")
    parser.add_argument("--out", type=Path, required=True, help="cache folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-size", type=int, default=256)
    parser.add_argument("--val-size", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="print paths as JSON")
    args = parser.parse_args()
    try:
        found = asdict(prepare(args.out, args.model, args.seed, args.train_size, args.val_size))
    except RollspecError as e:
        print(e, file=sys.stderr)
        return 2
    print(json.dumps(found) if args.json else "\n".join(f"{name}: {value}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
