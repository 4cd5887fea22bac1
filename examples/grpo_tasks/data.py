"""Prompts as Parquet, in the row format verl reads.

Row: ``data_source``, ``prompt`` (chat messages), ``ability``, ``reward_model`` ``{style, ground_truth}`` and
``extra_info`` ``{split, index, kind, totals}``; ``kind`` and ``totals`` are what the reward needs beside the answer.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset

from examples.grpo_tasks.task import Task, stream

DATA_SOURCE = "rollspec/tasks"
SEEDS = {"train": 1_000_003, "val": 2_000_003, "warm_up": 3_000_003}  # apart from each other for every seed of a job


def messages(task: Task) -> list[dict[str, str]]:
    """The chat, for the model's own template."""
    return [{"role": "user", "content": task.instruction}]


def row(task: Task, split: str, index: int) -> dict[str, Any]:
    """One row in verl's format."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": messages(task),
        "ability": "instruction",
        "reward_model": {"style": "rule", "ground_truth": task.answer},
        "extra_info": {"split": split, "index": index, "kind": task.kind, "totals": list(task.totals)},
    }


def write_split(path: Path, split: str, count: int, seed: int = 0) -> Path:
    """Write the first `count` tasks of a split to the Parquet file `path`."""
    rows = [row(task, split, index) for index, task in enumerate(islice(stream(SEEDS[split] + seed), count))]
    Dataset.from_list(rows).to_parquet(str(path))
    return path
