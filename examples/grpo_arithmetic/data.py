"""Prompts as Parquet, in the row format verl reads.

Row: ``data_source``, ``prompt`` (chat messages), ``ability``, ``reward_model`` ``{style, ground_truth}`` and
``extra_info`` ``{split, index, question}``; ``question`` lets the reward give credit for single steps.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from datasets import Dataset

from examples.grpo_arithmetic.task import Problem, num_ops_at, sample_problem

DATA_SOURCE = "rollspec/arithmetic_chain"
_GOLDEN = 0.6180339887498949  # its multiples modulo 1 fill the unit interval evenly at every length
_SPLIT_SEEDS = {"train": 1_000_003, "val": 2_000_003}  # apart from each other and from pre-training's small seeds


def problems(split: str, count: int, seed: int = 0) -> list[Problem]:
    """``count`` distinct problems of a split, the same for the same seed; a longer list starts with a shorter one.

    Chain lengths follow the task's distribution by evenly spread quantiles instead of independent draws, so that even
    a few dozen prompts hold their share of long ones.
    """
    if split not in _SPLIT_SEEDS:
        raise ValueError(f"split={split!r} is not one of {sorted(_SPLIT_SEEDS)}")
    rng = random.Random(_SPLIT_SEEDS[split] + seed)
    found: dict[Problem, None] = {}
    quantile = rng.random()
    while len(found) < count:
        found.setdefault(sample_problem(rng, num_ops_at(quantile)))
        quantile = (quantile + _GOLDEN) % 1.0
    return list(found)


def row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """One row in verl's format."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"split": split, "index": index, "question": problem.question},
    }


def write_split(path: Path, split: str, count: int, seed: int = 0) -> Path:
    """Write ``count`` prompts of ``split`` to the Parquet file ``path``."""
    rows = [row(problem, split, index) for index, problem in enumerate(problems(split, count, seed))]
    Dataset.from_list(rows).to_parquet(str(path))
    return path
