"""A step without its padded draft slots.

The asynchronous scheduler pads every request to k draft slots, because it does not know drafts in advance. A padded
slot holds -1 or an old token; taken for a draft it would change what is sampled, so it is removed before the step runs,
and the scheduler sees it as rejected.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


def resized(scheduled: Any, drafts: dict[str, list[int]], slots: Mapping[str, int]) -> Any:
    """A new `SchedulerOutput` with these drafts in the place of those scheduled. `slots`: how many were reserved."""
    counts = dict(scheduled.num_scheduled_tokens)
    for request, n in slots.items():
        counts[request] -= n - len(drafts.get(request, ()))
    step = copy.copy(scheduled)
    step.num_scheduled_tokens = counts
    step.total_num_scheduled_tokens = sum(counts.values())
    step.scheduled_spec_decode_tokens = drafts
    return step


def masks(grammar: Any, slots: Mapping[str, int], drafts: Mapping[str, list[int]]) -> Any:
    """A `GrammarOutput`'s masks for the rows there are: vLLM 0.32 has one for each slot reserved, and one more.

    From 0.33 on every request has as many masks as a step may have rows of it, and the kernel passes the others over.
    """
    if grammar is None or not slots:
        return grammar
    rows: list[int] = []
    at = 0
    for request in grammar.structured_output_request_ids:
        rows.extend(range(at, at + 1 + len(drafts.get(request, ()))))
        at += 1 + slots.get(request, 0)
    return dataclasses.replace(grammar, grammar_bitmask=grammar.grammar_bitmask[np.array(rows, dtype=np.int64)])
