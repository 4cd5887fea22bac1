"""Arithmetic chains with written-out steps: the problems, and worked solutions to learn from.

A problem is ``17+58-23=?``. A solution carries the running total line by line and ends like GSM8K::

    17+58=67+8=75        a step may be worked in two parts (tens first, then ones)
    then 75-23=52        and may open with a connective
    #### 52

The number of operations is heavy-tailed (most problems have 2-4, a few have 20-32), so response lengths are as well:
that tail is what keeps a rollout batch small and its accelerators idle. Free choices (connectives, one or two parts)
give sampled text real entropy, so that no drafter can guess it all.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

MIN_OPS = 2
MAX_OPS = 32
TAIL_EXPONENT = 1.0  # P(ops >= k) ~ 1 / k, cut at MAX_OPS: median 3, one problem in seven beyond 10
MAX_OPERAND = 99
MAX_TOTAL = 199
CONNECTIVES = ("then ", "now ", "next ")
P_CONNECTIVE = 0.25
P_TWO_PARTS = 0.5


@dataclass(frozen=True)
class Problem:
    """A chain ``start op operand op operand ...`` evaluated from left to right."""

    start: int
    ops: tuple[tuple[str, int], ...]

    @property
    def question(self) -> str:
        """The text shown to the policy, e.g. ``17+58-23=?``."""
        return f"{self.start}" + "".join(f"{sign}{operand}" for sign, operand in self.ops) + "=?"

    @property
    def totals(self) -> tuple[int, ...]:
        """Running totals, one per operation."""
        totals, total = [], self.start
        for sign, operand in self.ops:
            total += operand if sign == "+" else -operand
            totals.append(total)
        return tuple(totals)

    @property
    def answer(self) -> int:
        """The last running total."""
        return self.totals[-1]


def num_ops_at(quantile: float) -> int:
    """The number of operations at ``quantile`` in ``[0, 1)`` of a discrete Pareto distribution cut at ``MAX_OPS``."""
    beyond = (MIN_OPS / (MAX_OPS + 1)) ** TAIL_EXPONENT  # the mass cut off, shared out over the rest
    return int(MIN_OPS * (1.0 - quantile * (1.0 - beyond)) ** (-1.0 / TAIL_EXPONENT))


def sample_num_ops(rng: random.Random, exponent: float = TAIL_EXPONENT) -> int:
    """An independent draw from that distribution, optionally with another exponent."""
    while True:
        ops = int(MIN_OPS * (1.0 - rng.random()) ** (-1.0 / exponent))
        if ops <= MAX_OPS:  # drawn again rather than clipped: clipping would pile a spike up at MAX_OPS
            return ops


def sample_problem(rng: random.Random, num_ops: int | None = None, exponent: float = TAIL_EXPONENT) -> Problem:
    """Draw a chain whose running total stays within ``0..MAX_TOTAL``; ``num_ops`` is drawn when not given."""
    total = start = rng.randint(1, MAX_OPERAND)
    ops: list[tuple[str, int]] = []
    for _ in range(sample_num_ops(rng, exponent) if num_ops is None else num_ops):
        # Operands are drawn first and the sign adapts: all operands stay equally likely along the whole chain.
        operand = rng.randint(1, MAX_OPERAND)
        signs = [s for s, nxt in (("+", total + operand), ("-", total - operand)) if 0 <= nxt <= MAX_TOTAL]
        sign = rng.choice(signs)
        total += operand if sign == "+" else -operand
        ops.append((sign, operand))
    return Problem(start, tuple(ops))


def worked_solution(problem: Problem, rng: random.Random) -> str:
    """One of the many correct write-ups of ``problem``; ``rng`` makes the free choices."""
    lines, total = [], problem.start
    for (sign, operand), after in zip(problem.ops, problem.totals, strict=True):
        opening = rng.choice(CONNECTIVES) if rng.random() < P_CONNECTIVE else ""
        middle = ""
        tens, ones = operand - operand % 10, operand % 10
        if tens and ones and rng.random() < P_TWO_PARTS:
            middle = f"{total + tens if sign == '+' else total - tens}{sign}{ones}="
        lines.append(f"{opening}{total}{sign}{operand}={middle}{after}")
        total = after
    return "\n".join(lines) + f"\n#### {problem.answer}"
