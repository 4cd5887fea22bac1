"""Which noise a request is sampled with: its 64-bit key, derived from what the user controls.

| request | key from |
|---|---|
| has a `seed` of its own | that seed, and the prompt |
| none, seeds fresh (default) | run seed, engine, policy version, prompt, sample index |
| none, seeds kept | run seed, engine, prompt, sample index |

The sample index counts the requests of one prompt in the order in which they arrive, from 0 again with every policy
version; so no two requests of a group share noise, over engines that differ in seed, and a job run again has it again.
Request names are not used: engines add random parts to them. Nor is the order in which requests begin, where their
arrivals are known: a grammar still being compiled, or a priority, lets a later one begin first.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from rollspec.proposal.base import prompt_key

logger = logging.getLogger("rollspec")

MOST_PROMPTS = 1 << 20
"""Prompts counted under one policy version; then counting starts again, under another salt."""


class Streams:
    """Keys of the running requests of one engine.

    Args:
        seed: the run's. engine: distinguishes engines that sample siblings of one prompt.
        keep: leave the policy version out, so that a sample of a prompt has the same noise in every epoch.
    """

    def __init__(self, seed: int, engine: Sequence[int] = (), keep: bool = False) -> None:
        self.keys: dict[str, int] = {}
        self._base = f"{seed}/{'.'.join(map(str, engine))}"
        self._keep = keep
        self._version = 0
        self._salt = 0
        self._round = 0
        self._seen: dict[str, _Count] = {}
        self._seeded: dict[int, int] = {}  # key -> running requests that have it
        self._warned = False

    def begin(
        self, request: str, prompt: Sequence[int] | None, seed: int | None = None, arrival: int | None = None
    ) -> int:
        """The request's key; the same again while it runs.

        Args:
            prompt: its token ids, None where there are none.
            arrival: how many requests of this prompt reached the engine before it (`Arrivals`); without it, requests
                count as arriving when they begin.
        """
        if request in self.keys:
            return self.keys[request]
        name = prompt_key(prompt) if prompt is not None else "embedded"
        if seed is not None:
            key = _hash("request", seed, name)
            self._repeated(key, seed)
        else:
            if name not in self._seen and len(self._seen) >= MOST_PROMPTS:
                self._seen.clear()
                self._salt += 1
            count = self._seen.setdefault(name, _Count(self._round))
            if count.round != self._round:
                count.round, count.base = self._round, count.next
            if arrival is None:
                arrival = count.next
            # May be negative, where a later arrival began under the version before; unique all the same.
            index = arrival - count.base
            count.next = max(count.next, arrival + 1)
            version = "kept" if self._keep else self._version
            key = _hash(self._base, version, self._salt, name, index)
        self.keys[request] = key
        return key

    def end(self, request: str) -> None:
        """The request is gone. Unknown ones are ignored."""
        key = self.keys.pop(request, None)
        if key in self._seeded:
            self._seeded[key] -= 1
            if not self._seeded[key]:
                del self._seeded[key]

    def set_version(self, version: int) -> None:
        """The policy changed: samples are counted from 0 again."""
        if version != self._version:
            self._version = version
            self._round += 1

    def _repeated(self, key: int, seed: int) -> None:
        running = self._seeded[key] = self._seeded.get(key, 0) + 1
        if running > 1 and not self._warned:
            self._warned = True
            logger.warning(
                "rollspec: two running requests of one prompt have seed %d and so the same noise: they will say the "
                "same; give each a seed of its own, or none.",
                seed,
            )


@dataclass(slots=True)
class _Count:
    """Of one prompt: the arrival that is sample 0 of this round, and the next one expected."""

    round: int
    base: int = 0
    next: int = 0


class Arrivals:
    """Numbers an engine's requests per prompt, where they arrive: 0, 1, 2, ... over all policy versions."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._start = 0

    def number(self, prompt: Sequence[int] | None) -> int:
        """Of the request that arrives now; `prompt` is None where there are no token ids."""
        name = prompt_key(prompt) if prompt is not None else "embedded"
        if name not in self._seen and len(self._seen) >= MOST_PROMPTS:
            self._seen.clear()
            self._start += 1 << 40  # no number is given twice
        n = self._seen[name] = self._seen.get(name, self._start - 1) + 1
        return n


def _hash(*parts: str | int) -> int:
    return int.from_bytes(hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest(), "little")
