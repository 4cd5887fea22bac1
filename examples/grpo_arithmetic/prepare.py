"""Make everything a job needs: the grown policy with its tokenizer, train and validation Parquet, and a manifest.

Usage, from the repository root::

    python -m examples.grpo_arithmetic.prepare --out ~/.cache/rollspec/grpo_arithmetic --json

Takes seconds the first time and nothing after that: the result lies in a folder named by a hash of all its inputs
(code, checkpoint, arguments), written beside its final place and renamed, so a half-written one is never found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from examples.cache import built_once

HERE = Path(__file__).resolve().parent
CHECKPOINT = HERE / "checkpoint"
SIZES = ("demo", "tiny")
# What decides the outcome; README and tests may change without making the cache stale.
_CODE = ("data.py", "grow.py", "prepare.py", "task.py", "tokenizer.py")


@dataclass(frozen=True)
class Prepared:
    """Where things are. ``reward`` is the file for verl's ``reward.custom_reward_function.path``."""

    model: str
    train: str
    val: str
    reward: str
    manifest: str
    parameters: int
    size: str


def inputs_hash(size: str, seed: int, train_size: int, val_size: int) -> str:
    """Hash of everything the outcome depends on: arguments, code, the bytes of the checkpoint."""
    digest = hashlib.sha256(json.dumps([size, seed, train_size, val_size]).encode())
    checkpoint_files = sorted(path for path in CHECKPOINT.iterdir() if path.is_file())
    for path in [*(HERE / name for name in _CODE), *checkpoint_files]:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _build(folder: Path, size: str, seed: int, train_size: int, val_size: int) -> int:
    """Write policy and data into ``folder``; return the number of parameters."""
    from examples.grpo_arithmetic.data import write_split
    from examples.grpo_arithmetic.grow import count_parameters, write_policy
    from examples.grpo_arithmetic.tokenizer import build_tokenizer

    policy = write_policy(CHECKPOINT, folder / "model", build_tokenizer(), size == "demo", seed)
    write_split(folder / "train.parquet", "train", train_size, seed)
    write_split(folder / "val.parquet", "val", val_size, seed)
    return count_parameters(policy)


def prepare(
    cache_dir: str | Path, size: str = "demo", seed: int = 0, train_size: int = 256, val_size: int = 64
) -> Prepared:
    """Build once per set of inputs; later calls return the same paths without work.

    Args:
        cache_dir: folder for the results, made when missing; one sub-folder per set of inputs.
        size: ``demo`` (grown, 16 M parameters) or ``tiny`` (as shipped, 1 M, for tests).
        seed: seed of the prompts and of the grown policy's new weights.
        train_size: training prompts.
        val_size: validation prompts.
    """
    if size not in SIZES:
        raise ValueError(f"size={size!r} is not one of {SIZES}")
    digest = inputs_hash(size, seed, train_size, val_size)
    manifest = {
        "inputs_sha256": digest, "size": size, "seed": seed, "train_size": train_size, "val_size": val_size,
    }  # fmt: skip

    def build(folder: Path) -> None:
        parameters = _build(folder, size, seed, train_size, val_size)
        text = json.dumps({**manifest, "parameters": parameters}, indent=2)
        (folder / "manifest.json").write_text(text + "\n")

    final = built_once(cache_dir, f"{size}-{digest[:12]}", "manifest.json", build)
    parameters = json.loads((final / "manifest.json").read_text())["parameters"]
    return Prepared(
        model=str(final / "model"),
        train=str(final / "train.parquet"),
        val=str(final / "val.parquet"),
        reward=str(HERE / "reward.py"),
        manifest=str(final / "manifest.json"),
        parameters=parameters,
        size=size,
    )


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Build the policy and the data of the arithmetic GRPO example.")
    parser.add_argument("--out", type=Path, required=True, help="cache folder")
    parser.add_argument("--size", choices=SIZES, default="demo", help="grown policy, or the shipped one for tests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-size", type=int, default=256)
    parser.add_argument("--val-size", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="print paths as JSON")
    args = parser.parse_args()
    if args.json:
        result = prepare(args.out, args.size, args.seed, args.train_size, args.val_size)
        print(json.dumps(asdict(result)))
        return
    console = Console()
    with console.status("growing the policy and writing the data"):
        result = prepare(args.out, args.size, args.seed, args.train_size, args.val_size)
    table = Table(show_header=False)
    for name, value in asdict(result).items():
        table.add_row(name, str(value))
    console.print(table)


if __name__ == "__main__":
    main()
