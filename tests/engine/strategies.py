"""What the tuning strategies of published systems have to choose, computed from what they observed.

`events` are those of `noted.note_strategy`; `lengths` the draft length of each arm.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

REPEATS, KEEP = 3, 0.5
"""Of ReSpec here: plays of an arm in its profile, and what moving weights leave of the acceptance statistics."""

EPSILON, WINDOW = 0.1, 300  # of BEG-MAB: share of choices that are drawn, and plays of an arm that it remembers


def respec_table(
    events: Iterable[tuple[Any, ...]], lengths: Sequence[int], profile: Mapping[str, Sequence[float]]
) -> Counter[str]:
    """Every choice of ReSpec is the profile's or its table's. Arms: none first, then one drafter's by length.

    What was chosen by the table, how often it was solved, how often the longest drafts, the dearest profile or the
    highest acceptance alone would have said something else, and the steps that did not take what the cost model says.
    `profile`: seconds by bucket and arm that it ends with, which are the least that the clock said.
    """
    least: dict[int, dict[int, float]] = defaultdict(dict)  # by bucket and arm: seconds
    plays: dict[int, Counter[int]] = defaultdict(Counter)
    rates: dict[int, list[tuple[float, float]]] = defaultdict(list)  # (weight, θ) of each step
    table: dict[int, list[float]] = {}  # goodput of each arm
    found: Counter[str] = Counter()

    def solve(bucket: int) -> None:
        weight = sum(w for w, _ in rates[bucket])
        theta = sum(w * rate for w, rate in rates[bucket]) / max(weight, 1e-9)
        seconds = [least[bucket][arm] for arm in range(len(lengths))]
        table[bucket] = [sum(theta**i for i in range(k + 1)) / t for k, t in zip(lengths, seconds, strict=True)]
        found["solved"] += 1
        best = table[bucket].index(max(table[bucket]))
        found["not the longest"] += best != len(lengths) - 1
        found["not the cheapest"] += best != seconds.index(min(seconds))

    for event, *said in events:
        if event == "chose":
            bucket, arm = said
            if bucket in table:
                assert table[bucket][arm] > max(table[bucket]) * (1 - 1e-6), (bucket, arm, table[bucket])
                found["by table"] += 1
            else:
                assert plays[bucket][arm] == min(plays[bucket][a] for a in range(len(lengths))), "profiled unevenly"
        elif event == "observed":
            bucket, arm, batch, emitted, seconds, modelled = said
            assert seconds is not None, "no time was measured"
            found["not as modelled"] += abs(seconds / modelled - 1) > 0.05
            least[bucket][arm] = min(seconds, least[bucket].get(arm, seconds))
            plays[bucket][arm] += 1
            of = arm if lengths[arm] else len(lengths) - 1  # under no drafts the longest are scored, unverified
            rates[bucket].append((batch, acceptance(emitted[of] / batch - 1, lengths[of])))
            if bucket not in table and all(plays[bucket][a] >= REPEATS for a in range(len(lengths))):
                solve(bucket)
        elif event == "changed":
            for bucket in rates:
                if bucket in table:
                    solve(bucket)
                rates[bucket] = [(KEEP * w, rate) for w, rate in rates[bucket]]
    assert table and all(list(profile[str(b)]) == [least[b][a] for a in range(len(lengths))] for b in table), profile
    return found


def acceptance(mean: float, k: int) -> float:
    """The θ with θ + θ² + ... + θ^k = mean."""
    low, high = 0.0, 1.0
    for _ in range(50):
        theta = (low + high) / 2
        low, high = (theta, high) if sum(theta**i for i in range(1, k + 1)) < mean else (low, theta)
    return high if mean < k else 1.0


def beg_mab(events: Iterable[tuple[Any, ...]], lengths: Sequence[int], sets: Mapping[int, set[int]]) -> Counter[str]:
    """Every choice of BEG-MAB is of its batch's set, and drawn from the same seed or of the highest median reward.

    Counts both, and the steps that did not take what the cost model says. `sets`: draft lengths by the batch size up to
    which they hold; buckets are octaves.
    """
    rng = np.random.default_rng(0)
    rewards: dict[tuple[int, int], list[float]] = defaultdict(list)
    found: Counter[str] = Counter()
    for event, *said in events:
        if event == "chose":
            bucket, arm = said
            valid = next(ks for most, ks in sorted(sets.items()) if 2**bucket <= most)
            assert lengths[arm] in valid, (bucket, lengths[arm])
            among = [a for a, k in enumerate(lengths) if k in valid]
            if len(among) == 1:
                continue
            if rng.random() < EPSILON:
                assert arm == rng.choice(among), "another one was drawn"
                found["drawn"] += 1
                continue
            medians = {a: median(rewards[bucket, a][-WINDOW:] or [float("inf")]) for a in among}
            assert medians[arm] == max(medians.values()), (bucket, arm, medians)
            found["greedy"] += 1
        elif event == "observed":
            bucket, arm, _, emitted, seconds, modelled = said
            assert seconds is not None, "no step may be paid but in measured seconds"
            found["not as modelled"] += abs(seconds / modelled - 1) > 0.05
            rewards[bucket, arm].append(emitted[arm] / seconds)
    return found
