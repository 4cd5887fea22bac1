"""The verifiable reward, in the signature of verl's ``custom_reward_function``.

1.0 for a right answer in the right form. Otherwise `FORM` for the form and up to `PARTIAL` for the share of the answer
that is right (sums of a story, items in their place, fields of JSON), so that a group of wrong responses still ranks
its members and GRPO has a gradient there. This file imports nothing from its folder because verl loads it by path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

FORM = 0.1
PARTIAL = 0.5

_ANSWER = re.compile(r"answer:[ \t]*(\S.*)", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d+")
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)\n?```", re.DOTALL)


def last_line(text: str) -> tuple[str, bool]:
    """What the last line says, and whether it has the form "Answer: ...", the only one of its kind."""
    lines = text.strip().splitlines() or [""]
    found = _ANSWER.fullmatch(lines[-1].strip())
    if found is None:
        return lines[-1].strip(), False
    return found[1].strip(), not any(_ANSWER.match(line.strip()) for line in lines[:-1])


def number(text: str, answer: str, totals: Sequence[int]) -> tuple[bool, bool, float]:
    """Of a story or a count: is it right, is the form, and the share of running totals in their order."""
    said, form = last_line(text)
    form = form and _NUMBER.fullmatch(said.rstrip(".")) is not None
    right = form and int(said.rstrip(".")) == int(answer)
    found = 0
    for total in re.findall(r"=\s*(-?\d+)", text):
        found += found < len(totals) and int(total) == totals[found]
    return right, form, found / len(totals) if totals else float(right)


def items(text: str, answer: str) -> tuple[bool, bool, float]:
    """Of a list: the same, with the share of items in their place."""
    said, form = last_line(text)
    given = [item.strip() for item in said.rstrip(".").split(",")]
    wanted = answer.split(", ")
    share = sum(a == b for a, b in zip(given, wanted, strict=False)) / max(len(given), len(wanted))
    return form and given == wanted, form, share


def fields(text: str, answer: str) -> tuple[bool, bool, float]:
    """Of JSON, bare or in one fence: the same, with the share of fields that are right."""
    fence = _FENCE.fullmatch(text.strip())
    try:
        given = json.loads(fence[1] if fence else text)
    except (ValueError, RecursionError):
        return False, False, 0.0
    wanted = json.loads(answer)
    form = isinstance(given, list) and all(isinstance(one, dict) for one in given)
    if not form:
        return False, False, 0.0
    # With the type of a value: 1 == True == 1.0 in Python and not in JSON.
    pairs = [
        {(i, k, json.dumps(v)) for i, one in enumerate(people) for k, v in one.items()} for people in (given, wanted)
    ]
    return given == wanted and pairs[0] == pairs[1], True, len(pairs[0] & pairs[1]) / max(map(len, pairs))


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
        ground_truth: `Task.answer`.
        extra_info: the row's ``extra_info``: `kind`, and a story's `totals`.
    """
    info = extra_info or {}
    kind = info.get("kind")
    if kind == "json":
        right, form, share = fields(solution_str, ground_truth)
    elif kind in ("story", "count"):
        totals = info.get("totals")
        right, form, share = number(solution_str, ground_truth, [] if totals is None else list(totals))
    else:
        right, form, share = items(solution_str, ground_truth)
    return 1.0 if right else FORM * form + PARTIAL * share
