"""The verifiable reward, in the signature of verl's ``custom_reward_function``.

1.0 for a right final answer (the number after the last ``####``). Otherwise partial credit up to ``STEP_CREDIT`` for
the leading steps that are right, so that a group of eight wrong answers to a long chain still ranks its members and
GRPO has a gradient there. This file imports nothing from its folder because verl loads it by path.
"""

from __future__ import annotations

import re
from typing import Any

STEP_CREDIT = 0.2

_ANSWER = re.compile(r"####\s*(-?\d+)\s*$")
_TERM = re.compile(r"([+-]?)(\d+)")
_STEP = re.compile(r"^(?:[a-z]+ )?(\d+)([+-])(\d+)((?:=\d+(?:[+-]\d+)?)+)$")


def evaluate(expression: str) -> int | None:
    """Value of a chain such as ``17+58-23``; ``None`` when it is not one."""
    if not re.fullmatch(r"\d+(?:[+-]\d+)*", expression):
        return None
    return sum(-int(number) if sign == "-" else int(number) for sign, number in _TERM.findall(expression))


def extract_answer(solution: str) -> int | None:
    """The integer after ``####`` on the last line; ``None`` when there is none."""
    match = _ANSWER.search(solution.strip())
    return int(match.group(1)) if match else None


def correct_leading_steps(question: str, solution: str) -> tuple[int, int]:
    """Count the leading lines that are the right next step.

    A line is right when it starts from the running total, applies the next operation of ``question``, and every
    side of every ``=`` has the same value. Returns ``(right, total)``.
    """
    chain = question.removesuffix("=?")
    terms = _TERM.findall(chain)
    if evaluate(chain) is None or len(terms) < 2:
        return 0, 0
    total, right = int(terms[0][1]), 0
    for (sign, operand), line in zip(terms[1:], solution.strip().split("\n"), strict=False):
        match = _STEP.match(line.strip())
        if match is None or (int(match[1]), match[2], match[3]) != (total, sign, operand):
            break
        total += int(operand) if sign == "+" else -int(operand)
        if any(evaluate(side) != total for side in match[4][1:].split("=")):
            break
        right += 1
    return right, len(terms) - 1


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **_: Any,
) -> float:
    """Score one response in ``[0, 1]``.

    Args:
        data_source: name of the data set; not used, part of verl's signature.
        solution_str: the decoded response.
        ground_truth: the answer as a string of digits.
        extra_info: the row's ``extra_info``; its ``question`` is needed for partial credit, without it there is none.
    """
    if extract_answer(solution_str) == int(ground_truth.replace(",", "")):
        return 1.0
    question = (extra_info or {}).get("question")
    if not question:
        return 0.0
    right, steps = correct_leading_steps(question, solution_str)
    return STEP_CREDIT * right / steps if steps else 0.0
