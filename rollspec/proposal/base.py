"""Types that all drafters share: prompt keys and drafts. Token ids are int32 everywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]

DEPTH = 16  # longest match of a context in a corpus
NOTHING = -2  # fills a context that is shorter than `DEPTH`, on its left; equal to nothing in a corpus


def as_tokens(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> TokenArray:
    """Contiguous int32 copy-if-needed of `token_ids`, shape [n]."""
    return np.ascontiguousarray(token_ids, dtype=np.int32)


def prompt_key(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
    """Stable 128-bit hex key of a token sequence: group siblings and past epochs of one prompt share it."""
    return hashlib.blake2b(as_tokens(token_ids).astype("<i4").tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Turn:
    """Which turn of a rollout with tools a request is. Its prompt is the conversation so far, and grows by a turn.

    `name`: the same in all turns, and no other rollout's. `number`: from 0. `first`: tokens of the first turn's prompt,
    which siblings and epochs share. `since`: tokens of its own prompt that were there when the turn before it ended;
    what follows them is the environment's.
    """

    name: str
    number: int
    first: int
    since: int


@dataclass(slots=True)  # not frozen: that would triple the cost of making one
class Draft:
    """One request's proposal for one step."""

    token_ids: list[int]  # at most k_max tokens, possibly empty
    probs: list[float]  # the drafter's estimate, per token, that it and all before it are accepted
    source: str  # who drafted, for telemetry and calibration
    match_len: int  # context tokens that matched


NO_DRAFT = Draft([], [], "none", 0)
