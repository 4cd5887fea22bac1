"""The verifiable reward, in the signature of verl's ``custom_reward_function``.

1.0 for a right answer, the number after ``####`` in the last line. Otherwise up to `STEPS` for the share of the results
on the way that a tool answered, in their order, so that a group of wrong responses still ranks its members. This file
imports nothing from its folder because verl loads it by path.
"""

from __future__ import annotations

import re
from typing import Any

STEPS = 0.3

_ANSWER = re.compile(r"####\s*(-?\d+)\s*$")
_ANSWERS = re.compile(r"<tool_response>\s*(-?\d+)\s*</tool_response>")


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
        solution_str: the decoded response, tools' answers included.
        ground_truth: `Task.answer`.
        extra_info: the row's ``extra_info``: `results`.
    """
    match = _ANSWER.search(solution_str.strip())
    # What a tool answered is no answer of the policy's, so it has to come behind the last of them.
    if match and match.start() > solution_str.rfind("</tool_response>") and match[1] == ground_truth:
        return 1.0
    results = (extra_info or {}).get("results")
    wanted = [] if results is None else [str(r) for r in results]
    found = 0
    for said in _ANSWERS.findall(solution_str):
        found += found < len(wanted) and said == wanted[found]
    return STEPS * found / len(wanted) if wanted else 0.0
