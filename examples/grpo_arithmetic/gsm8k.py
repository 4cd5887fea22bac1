"""GSM8K in the same row format, for machines that can reach the dataset hub (or hold the data set in their cache).

Usage::

    python -m examples.grpo_arithmetic.gsm8k --out DIR

The reward of this folder reads its answers too (``#### 72``), without partial credit. The small policy shipped here
cannot solve it: bring a policy of your own.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_SPLITS = {"train": "train", "val": "test"}


class HubUnreachableError(RuntimeError):
    """The data set is neither in the local cache nor to be had from the hub."""


def row(example: dict[str, str], split: str, index: int) -> dict[str, Any]:
    """One GSM8K example (``question``, ``answer``) as a verl row."""
    match = re.search(r"####\s*(-?[\d,]+)", example["answer"])
    if match is None:
        raise ValueError(f"GSM8K {split}[{index}]: the answer has no '#### <number>' line")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{example['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": match.group(1).replace(",", "")},
        "extra_info": {"split": split, "index": index},
    }


def write_gsm8k(out: Path, load: Callable[..., Any] | None = None) -> tuple[Path, Path]:
    """Write ``train.parquet`` and ``val.parquet`` (GSM8K's test split) to ``out``; return both paths.

    Args:
        out: folder, made when missing.
        load: stands in for ``datasets.load_dataset`` in tests.

    Raises:
        HubUnreachableError: one sentence, when the data set cannot be had.
    """
    loader = load if load is not None else datasets.load_dataset
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for split, hub_split in _SPLITS.items():
        try:
            examples = loader(DATA_SOURCE, "main", split=hub_split)
        except Exception as error:  # the hub client raises a dozen unrelated types for "offline"
            raise HubUnreachableError(
                f"GSM8K could not be loaded because the dataset hub is unreachable from here and the local cache "
                f"has no copy ({type(error).__name__}); run this where the hub can be reached, or use the arithmetic "
                f"chains of examples/grpo_arithmetic, which need no network."
            ) from error
        path = out / f"{split}.parquet"
        rows = [row(example, split, index) for index, example in enumerate(examples)]
        datasets.Dataset.from_list(rows).to_parquet(str(path))
        paths.append(path)
    return paths[0], paths[1]


def main() -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Write GSM8K as Parquet in verl's row format.")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    try:
        train, val = write_gsm8k(args.out)
    except HubUnreachableError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{train}\n{val}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
