"""Which noise a request is sampled with: its 64-bit key, derived from what the user controls.

| request | key from |
|---|---|
| has a `seed` of its own | that seed, and the prompt |
| none, seeds fresh (default) | run seed, engine, policy version, prompt, sample index |
| none, seeds kept | run seed, engine, prompt, sample index |
| a later turn of a rollout with tools | the key of its first turn, and the turn's number |

The sample index counts the requests of one prompt without a seed in the order in which they arrive, from 0 again with
every policy version; so no two requests of a group share noise, and a repeated job has the same noise. Request names
are not used: engines add random parts to them. Nor is the order in which requests begin, where it is known in which
they arrived: a grammar still being compiled, or a priority, lets a later one begin first.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from rollspec.log_once import LogOnce
from rollspec.proposal.base import Turn, prompt_key

MOST_PROMPTS = 1 << 20
"""Prompts, and requests' own seeds, counted under one policy version; then counting starts again, with another salt."""

MOST_ORIGINS = 1 << 16  # requests remembered that may be submitted again, the latest ones


@dataclass(frozen=True, slots=True)
class Origin:
    """Names a rollout that is submitted again after an abort, with its tokens so far behind the `prompt` tokens of its
    prompt; it resumes with the noise it had. `name`: the same in all its submissions, and no other request's.
    """

    name: str
    prompt: int


class Streams:
    """Keys of the running requests of one engine.

    `seed`: the run's. `engine`: distinguishes engines that sample siblings of one prompt. `keep`: leave the policy
    version out, so that a sample of a prompt has the same noise in every epoch.
    """

    def __init__(self, seed: int, engine: Sequence[int] = (), keep: bool = False) -> None:
        self.keys: dict[str, int] = {}
        self._base = f"{seed}/{'.'.join(map(str, engine))}"
        self._keep = keep
        self._version = 0
        self._salt = 0
        self._round = 0
        self._seen: dict[str, _Count] = {}
        self._seeded: dict[int, int] = {}  # key from a request's own seed -> requests with it in this round
        self._origins: OrderedDict[str, int] = OrderedDict()
        self._rollouts: OrderedDict[str, int] = OrderedDict()  # key of the first turn, by the rollout's name
        self._log_once = LogOnce()

    def begin(
        self,
        request: str,
        prompt: Sequence[int] | None,
        seed: int | None = None,
        sample_index: int | None = None,
        origin: Origin | None = None,
        turn: Turn | None = None,
    ) -> int:
        """The request's key; the same again while it runs, and in all submissions of one origin.

        `prompt`: token ids, if any, with what earlier submissions emitted. `sample_index`: how many requests of
        this prompt without a seed reached the engine before it, under all policy versions (`SampleIndex`); without it,
        requests are counted when they begin.
        """
        if request in self.keys:
            return self.keys[request]
        later = turn is not None and turn.number > 0
        if turn is not None and later:
            if (first := self._rollouts.get(turn.name)) is not None:
                return self._later(request, first, turn, seed, origin)
            self._log_once.warn(
                "a turn whose rollout began in another engine has noise by its own prompt: it follows the policy, but "
                "is not found again by reuse under kept noise"
            )
        known = None
        if prompt is None:
            name = "embedded"
        elif origin is None:
            name = prompt_key(prompt)
        else:
            known = self._origins.get(origin.name)
            moved = known is None and seed is None and len(prompt) > origin.prompt
            name = prompt_key(prompt if moved else prompt[: origin.prompt])
            if moved:
                self._log_once.warn(
                    "a request that was aborted in another engine resumes in this one with other noise: it follows the "
                    "policy, but says something else than it would have said undisturbed, and is not found again by "
                    "reuse under kept noise",
                )
        if later:
            name = f"later {name}"  # these are counted apart: no sample index is theirs
        if seed is not None:
            key = _hash("request", seed, name)
            if known is None:  # not one that resumes after an abort
                self._repeated(key, seed)
        elif known is not None:
            key = known
        else:
            if name not in self._seen and len(self._seen) >= MOST_PROMPTS:
                self._seen.clear()
                self._salt += 1
            count = self._seen.setdefault(name, _Count(self._round))
            if count.round != self._round:
                count.round, count.base = self._round, count.next
            if sample_index is None:
                sample_index = count.next
            # May be negative, where a later sample began under the version before; unique all the same.
            index = sample_index - count.base
            count.next = max(count.next, sample_index + 1)
            version = "kept" if self._keep else self._version
            key = _hash(self._base, version, self._salt, name, index)
        if origin is not None:
            _remember(self._origins, origin.name, key)
        if turn is not None and turn.number == 0:
            _remember(self._rollouts, turn.name, key)
        self.keys[request] = key
        return key

    def _later(self, request: str, first: int, turn: Turn, seed: int | None, origin: Origin | None) -> int:
        key = self.keys[request] = _hash("turn", first, turn.number)
        if seed is not None and (origin is None or origin.name not in self._origins):
            self._repeated(key, seed)
        if origin is not None:
            _remember(self._origins, origin.name, key)
        return key

    def end(self, request: str) -> None:
        """The request is gone. Unknown ones are ignored."""
        self.keys.pop(request, None)

    def repeated(self, request: str) -> bool:
        """Whether another request of the same prompt has, or had under this policy, the same seed of its own."""
        key = self.keys.get(request)
        return key is not None and self._seeded.get(key, 0) > 1

    def set_version(self, version: int) -> None:
        """The policy changed: samples are counted from 0 again."""
        if version != self._version:
            self._version = version
            self._round += 1
            self._forget()

    def _repeated(self, key: int, seed: int) -> None:
        if key not in self._seeded and len(self._seeded) >= MOST_PROMPTS:
            self._forget()
        count = self._seeded[key] = self._seeded.get(key, 0) + 1
        if count > 1:
            self._log_once(
                "repeated seed",
                f"rollspec: two requests of one prompt have seed {seed} under one policy and so the same noise: they "
                "will say the same; give each a seed of its own, or none.",
            )

    def _forget(self) -> None:
        """Keep the own seeds of running requests alone: the others' group is complete."""
        running = Counter(self.keys.values())
        self._seeded = {key: running[key] for key in self._seeded if key in running}


@dataclass(slots=True)
class _Count:
    """Of one prompt: the sample index that is 0 in this round, and the next one expected."""

    round: int
    base: int = 0
    next: int = 0


class SampleIndex:
    """Counts an engine's requests per prompt, where they arrive: 0, 1, 2, ... over all policy versions."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._start = 0
        self._origins: OrderedDict[str, int] = OrderedDict()

    def number(self, prompt: Sequence[int] | None, origin: Origin | None = None) -> int:
        """Of the request that arrives now, or arrived before; `prompt` is None where there are no token ids."""
        known = self._origins.get(origin.name) if origin is not None else None
        if known is not None:
            return known
        name = prompt_key(prompt) if prompt is not None else "embedded"
        if name not in self._seen and len(self._seen) >= MOST_PROMPTS:
            self._seen.clear()
            self._start += 1 << 40  # no number is given twice
        n = self._seen[name] = self._seen.get(name, self._start - 1) + 1
        if origin is not None:
            _remember(self._origins, origin.name, n)
        return n


def _remember(origins: OrderedDict[str, int], name: str, number: int) -> None:
    origins[name] = number
    origins.move_to_end(name)
    if len(origins) > MOST_ORIGINS:
        origins.popitem(last=False)


def _hash(*parts: str | int) -> int:
    return int.from_bytes(hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest(), "little")
