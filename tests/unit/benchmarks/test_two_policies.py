"""What is measured between two policies: the distance of lossy reuse, and the round that starts from old responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.identity import same_tokens
from benchmarks.two_policies import check_lossy
from rollspec.audit.evidence import samples_from
from rollspec.sampling import lenient_reuse

VOCAB, LENGTH = 30, 8


class Distributions:
    """A reference model with one distribution per position, whatever came before."""

    def __init__(self, seed: int, other: np.ndarray | None = None, by: float = 1.0) -> None:
        logits = np.random.default_rng(seed).normal(size=(LENGTH, VOCAB)) * 2.0
        logits = logits if other is None else other + by * logits
        self.logits = logits
        self.p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    def log_probs(self, prompt: Sequence[int], response: list[int]) -> np.ndarray:
        return np.log(self.p[: len(response)])


def draw(p: np.ndarray, rng: np.random.Generator) -> int:
    return int(rng.choice(len(p), p=p))


def rollouts(
    new: Distributions, old: Distributions, n: int, bias: float, rng: np.random.Generator
) -> tuple[list[list[int]], list[int]]:
    """Responses that start from old ones by the rule, and how many tokens it decided."""
    said, ruled = [], []
    for _ in range(n):
        before = [draw(q, rng) for q in old.p]
        cut = 0
        while cut < LENGTH:
            kept = lenient_reuse.keep_probability(
                np.log(new.p[cut, before[cut : cut + 1]]), np.log(old.p[cut, before[cut : cut + 1]]), bias
            )
            if rng.random() > kept[0]:
                break
            cut += 1
        said.append(before[:cut] + [draw(p, rng) for p in new.p[cut:]])
        ruled.append(min(cut + 1, LENGTH))
    return said, ruled


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_the_measured_distance_is_the_formulas(bias: float) -> None:
    new = Distributions(0)
    old = Distributions(1, new.logits, 0.3)
    said, ruled = rollouts(new, old, 1500, bias, np.random.default_rng(2))
    found = check_lossy(samples_from(said, [0] * len(said)), np.array(ruled), [(1,)], new, old, bias)  # type: ignore[arg-type]
    assert found.positions == sum(ruled) and found.tokens == 1500 * LENGTH
    assert found.theory > 0.02 and found.largest > found.theory and found.error < 0.01
    assert found.agrees, found
    honest = [[draw(p, np.random.default_rng(i * LENGTH + j)) for j, p in enumerate(new.p)] for i in range(1500)]
    found = check_lossy(samples_from(honest, [0] * 1500), np.array(ruled), [(1,)], new, old, bias)  # type: ignore[arg-type]
    assert abs(found.measured) < 4 * found.error and not found.agrees, "it would report the formula whatever was said"


# ---- texts of two builds


def texts(*rows: list[int]) -> Any:
    return samples_from(list(rows), [0] * len(rows))


def test_texts_of_two_builds() -> None:
    a = texts([1, 2, 3], [4, 5, 6], [7, 8], [1, 1])
    b = texts([1, 2, 3], [4, 9, 9], [7, 8, 9], [2, 1])
    asked: list[tuple[Any, ...]] = []

    def lead(*given: Any) -> float:
        asked.append(given)
        return {5: -1e-6, 1: 0.3}[given[2]]

    found = same_tokens(a, b, lead, 1e-4)
    assert (found.identical, found.ties, found.wrong, found.sequences) == (1, 1, 2, 4)
    assert asked == [(1, [4], 5, 9), (3, [], 1, 2)] and found.leads == (1e-6, 0.3)
    assert found.first == (2, 2, -1, -1, float("inf")) and found.tokens == 3 + 2 + 2 + 1 and not found.passed
    assert same_tokens(a, a, lead, 0.0).passed
