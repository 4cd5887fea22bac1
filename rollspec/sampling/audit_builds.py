"""Two builds of one engine, other in batching, scheduling or drafting: the same tokens where noise decides them.

In `mode: coupled` the texts are compared token by token; where they part, both tokens are scored with the reference's
logits and their noise, and rounding must explain the difference. In `mode: standard` only the law can agree: the second
build's tokens are tested as the first's, in the same family of tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rollspec.sampling.audit_evidence import Samples

Lead = Callable[[int, list[int], int, int], float]
"""(sequence, prefix, token a, token b) -> by how much a's perturbed score leads b's there."""


@dataclass(frozen=True, slots=True)
class SameTokens:
    """`identical` texts of `sequences`; `ties` part where two scores are within `tie`, `wrong` elsewhere. `leads` are
    the winners' leads where texts part; `first`: the first wrong one as (sequence, position, token, other, lead).
    """

    sequences: int
    tokens: int
    identical: int
    ties: int
    wrong: int
    tie: float
    leads: tuple[float, ...]
    first: tuple[int, int, int, int, float] | None

    @property
    def passed(self) -> bool:
        """No difference that rounding does not explain."""
        return self.wrong == 0


def same_tokens(a: Samples, b: Samples, lead: Lead, tie: float) -> SameTokens:
    """Compare the texts of two engines, each up to its first difference.

    One that ends where the other goes on is wrong: the end is a token, too.
    """
    compared = identical = ties = wrong = 0
    leads: list[float] = []
    first: tuple[int, int, int, int, float] | None = None
    n_sequences = min(len(a.tokens), len(b.tokens))
    for s in range(n_sequences):
        x, y = a.tokens[s], b.tokens[s]
        n = min(len(x), len(y))
        differ = np.flatnonzero(x[:n] != y[:n])
        if not len(differ):
            compared += n
            if len(x) == len(y):
                identical += 1
            else:
                wrong += 1
                first = first or (s, n, -1, -1, float("inf"))
            continue
        at = int(differ[0])
        compared += at + 1
        p, q = int(x[at]), int(y[at])
        distance = abs(lead(s, x[:at].tolist(), p, q))
        leads.append(distance)
        if distance <= tie:
            ties += 1
        else:
            wrong += 1
            first = first or (s, at, p, q, distance)
    return SameTokens(n_sequences, compared, identical, ties, wrong, tie, tuple(leads), first)
