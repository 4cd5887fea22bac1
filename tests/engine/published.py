"""What the drafters of published systems have to draft, computed from the texts by their rules on plain lists.

A rule receives what an engine's drafter received (`noted.note_drafter`), and `check` compares every draft.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rollspec.drafting.suffix import PROMPT_TAIL
from rollspec.proposal.ngrams import FOLLOWERS, MIN_PROB, UNSEEN


@dataclass
class Sample:
    """A request. `number`: among those of its prompt, from 1."""

    key: str
    prompt: list[int]
    number: int
    output: list[int] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        """Of prompt and response."""
        return [*self.prompt, *self.output]


Choice = tuple[int, float, str] | None
"""A token, the chance that it is accepted, and its source; None where no source has one."""


class Rule:
    """One drafter. `differs`: draft tokens that a simpler rule would have chosen otherwise, by its name."""

    def __init__(self) -> None:
        self.differs: Counter[str] = Counter()

    def begins(self, s: Sample) -> None:
        """A request begins."""

    def emitted(self, s: Sample, new: int) -> None:
        """Its text has `new` tokens more."""

    def ends(self, s: Sample) -> None:
        """It has ended."""

    def draft(self, s: Sample, room: int) -> tuple[list[int], str]:
        """The chain of `next` while it is likely enough, and who knew its first token."""
        chain: list[int] = []
        source, cumulative = "", 1.0
        while len(chain) < room and (found := self.next(s, [*s.text, *chain], len(s.output) + len(chain))):
            cumulative *= found[1]
            if cumulative < MIN_PROB:
                break
            chain.append(found[0])
            source = source or found[2]
        return chain, source

    def next(self, s: Sample, text: Sequence[int], place: int) -> Choice:
        """What is drafted after `text`, at `place` of the response."""
        raise NotImplementedError


class Followers(Rule):
    """What samples of a prompt emitted after contexts, in order: (number of the sample, token)."""

    lengths: Sequence[int]

    def __init__(self) -> None:
        super().__init__()
        self.after: dict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)

    def emitted(self, s: Sample, new: int) -> None:
        """Remember them."""
        text = s.text
        for at in range(len(text) - new, len(text)):
            for n in self.lengths:
                if at >= n:
                    self.add(self.after[(s.key, *text[at - n : at])], s.number, text[at])

    def add(self, row: list[tuple[int, int]], number: int, token: int) -> None:
        """What followed a context once more."""
        row.append((number, token))

    def longest(self, s: Sample, text: Sequence[int]) -> list[tuple[int, int]]:
        """What followed the longest known context."""
        rows = (self.after.get((s.key, *text[len(text) - n :])) for n in sorted(self.lengths, reverse=True))
        return next((row for row in rows if row), [])


class Stand(Followers):
    """x = argmax log P(y) + g_y of the n-gram of four to two tokens, g by the sample, the place and the token."""

    lengths = (1, 2, 3)

    def __init__(self, noise: Sequence[float]) -> None:
        super().__init__()
        self.noise = noise

    def add(self, row: list[tuple[int, int]], number: int, token: int) -> None:
        """Of ten followers the rarest makes room for another one."""
        counts = Counter(y for _, y in row)
        if token not in counts and len(counts) == FOLLOWERS:
            rarest = min(counts, key=counts.__getitem__)
            row[:] = [(n, y) for n, y in row if y != rarest]
        row.append((number, token))

    def next(self, s: Sample, text: Sequence[int], place: int) -> Choice:
        """A sample of what followed."""
        if not (row := self.longest(s, text)):
            return None
        counts = Counter(y for _, y in row)

        def perturbed(y: int) -> float:
            return math.log(counts[y] / len(row)) + self.noise[hash((s.number, place, y)) % len(self.noise)]

        token = max(counts, key=perturbed)
        short = self.after[s.key, text[-1]]
        self.differs["argmax"] += token != counts.most_common(1)[0][0]
        self.differs["bigram"] += token != max(
            Counter(y for _, y in short), key=Counter(y for _, y in short).__getitem__
        )
        return token, counts[token] / (len(row) + UNSEEN), "stand"


class Consensus(Followers):
    """What most of the other samples emitted after the same three tokens; each has one vote per token."""

    lengths = (3,)

    def next(self, s: Sample, text: Sequence[int], place: int) -> Choice:
        """What wins the vote."""
        votes: dict[int, set[int]] = {}
        row = self.longest(s, text)
        for number, y in row:
            votes.setdefault(y, set()).update({number} - {s.number})
        if not (voters := set().union(*votes.values())):
            return None
        token = max(votes, key=lambda y: len(votes[y]))
        counts = Counter(y for _, y in row)
        self.differs["last"] += token != row[-1][1]
        self.differs["first"] += token != row[0][1]
        self.differs["most often"] += token != max(counts, key=counts.__getitem__)
        return token, len(votes[token]) / (len(voters) + UNSEEN), "consensus"


class TokenRecycling(Rule):
    """The best candidate of a matrix of all requests: w <- 3/4 w, and 1/4 more of what was emitted; eight per token."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix: dict[int, dict[int, float]] = {}
        self.order: dict[int, list[int]] = defaultdict(list)

    def emitted(self, s: Sample, new: int) -> None:
        """Update the rows that the tokens went through."""
        text = s.text
        for x, y in list(pairwise(text))[-new:]:
            row = {z: 0.75 * w for z, w in self.matrix.get(x, {}).items()}
            row[y] = row.get(y, 0.0) + 0.25
            best = sorted(row, key=row.__getitem__, reverse=True)[:8]
            self.matrix[x] = {z: w for z, w in row.items() if z in best}
            self.order[x].append(y)

    def next(self, s: Sample, text: Sequence[int], place: int) -> Choice:
        """The first candidate."""
        if (row := self.matrix.get(text[-1])) is None:
            return None
        token = max(row, key=row.__getitem__)
        counts = Counter(self.order[text[-1]])
        self.differs["last"] += token != self.order[text[-1]][-1]
        self.differs["most often"] += token != max(counts, key=counts.__getitem__)
        return token, row[token] / (sum(row.values()) + 0.25 * UNSEEN), "token_recycling"


class Hierarchy(Rule):
    """A phrase of the request's own text, else of finished responses, else of prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.statistics: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.prompts: set[str] = set()

    def begins(self, s: Sample) -> None:
        """A prompt that is new is text in general."""
        if s.key not in self.prompts:
            self.prompts.add(s.key)
            self._count(self.statistics, s.prompt, (1, 2))

    def ends(self, s: Sample) -> None:
        """A finished response is the model's text."""
        self._count(self.model, s.output, (2,))

    def draft(self, s: Sample, room: int) -> tuple[list[int], str]:
        """Of four tokens at most, from the first that knows the last two, or of the statistics the last one."""
        room = min(room, 4)
        asked = {
            "context": self._context(s.text, room),
            "model": self._chain(self.model, s.text, room, (2,)),
            "statistics": self._chain(self.statistics, s.text, room, (2, 1)),
        }
        known = [name for name, chain in asked.items() if chain]
        if not known:
            return [], ""
        for other in known[1:]:
            self.differs[f"{known[0]} before {other}"] += asked[other] != asked[known[0]]
        return asked[known[0]], f"hierarchy-{known[0]}"

    @staticmethod
    def _count(base: dict[tuple[int, ...], list[int]], text: Sequence[int], lengths: Iterable[int]) -> None:
        for at in range(len(text)):
            for n in lengths:
                if at >= n:
                    base[tuple(text[at - n : at])].append(text[at])

    @staticmethod
    def _context(text: list[int], room: int) -> list[int]:
        """What followed the latest earlier occurrence of the last two tokens; a loop repeats."""
        starts = [i for i in range(2, len(text)) if text[i - 2 : i] == text[-2:]]
        phrase = text[starts[-1] :] if starts else []
        return [phrase[i % len(phrase)] for i in range(room)] if phrase else []

    @staticmethod
    def _chain(
        base: dict[tuple[int, ...], list[int]], text: Sequence[int], room: int, lengths: Sequence[int]
    ) -> list[int]:
        """The most frequent follower of the longest known context, and what follows it in turn."""
        chain: list[int] = []
        cumulative = 1.0
        while len(chain) < room:
            now = [*text, *chain]
            row = next((base[c] for n in lengths if (c := tuple(now[-n:])) in base), [])
            if not row:
                break
            counts = Counter(row)
            token = max(counts, key=counts.__getitem__)
            cumulative *= counts[token] / (len(row) + UNSEEN)
            if cumulative < MIN_PROB:
                break
            chain.append(token)
        return chain


def check(events: Iterable[tuple[Any, ...]], rule: Rule) -> Counter[str]:
    """Every draft of an engine is the rule's, and what it verified is its beginning. Tokens drafted by source."""
    samples: dict[str, Sample] = {}
    drafted: dict[str, list[int]] = {}
    joined: Counter[str] = Counter()
    found: Counter[str] = Counter()
    for event, request, *said in events:
        if event == "begin":
            joined[said[0]] += 1
            samples[request] = Sample(*said, joined[said[0]])
            rule.begins(samples[request])
        elif event == "emit":
            samples[request].output += said[0]
            rule.emitted(samples[request], len(said[0]))
        elif event == "end":
            rule.ends(samples.pop(request))
        elif event == "draft":
            room, tokens, source, _ = said
            wanted, knows = rule.draft(samples[request], room)
            assert (tokens, source if tokens else "") == (wanted, knows if wanted else ""), (request, samples[request])
            drafted[request] = tokens
            found[source] += len(tokens)
        else:
            (tokens,) = said
            assert tokens == drafted[request][: len(tokens)], "something else was verified"
            found["verified"] += len(tokens)
    return found


def origins(rounds: Iterable[Iterable[tuple[Any, ...]]]) -> Counter[tuple[str, ...]]:
    """How many drafts of suffixes each of these has, with what they match: the prompt, the response itself, a sibling
    that runs, one that has ended, a response of the round before. `rounds`: events by policy version.
    """
    found: Counter[tuple[str, ...]] = Counter()
    ended: dict[str, list[Sample]] = defaultdict(list)
    samples: dict[str, Sample] = {}

    def has(s: Sample, gram: list[int]) -> bool:
        text = [*s.prompt[-PROMPT_TAIL:], *s.output]
        return any(text[i : i + len(gram)] == gram for i in range(len(text) - len(gram) + 1))

    for events in rounds:
        past, ended = ended, defaultdict(list)
        for event, request, *said in events:
            if event == "begin":
                samples[request] = Sample(*said, 0)
            elif event == "emit":
                samples[request].output += said[0]
            elif event == "end":
                ended[samples[request].key].append(samples.pop(request))
            elif event == "draft" and said[1]:
                s, (_, tokens, _, match) = samples[request], said
                gram = [*s.text[-match:], *tokens]
                others = [other for other in samples.values() if other is not s and other.key == s.key]
                whole = Sample(s.key, [], 0, s.prompt)
                texts = {"prompt": [whole], "own": [s], "running": others, "ended": ended[s.key], "past": past[s.key]}
                found[tuple(name for name, those in texts.items() if any(has(each, gram) for each in those))] += 1
    return found
