"""Suffix drafts: one corpus per prompt group, one global corpus as fallback.

A group's corpus holds its prompt, what its siblings have emitted so far in this round, and the responses of past
rounds (SuffixDecoding arXiv:2411.04975; siblings as in Seer arXiv:2511.14617, past epochs as in RhymeRL
arXiv:2508.18588 and DAS arXiv:2511.13841). The corpora are a cache over `History`: dropped under memory pressure,
rebuilt when their prompt comes back.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollspec.config import SuffixConfig
from rollspec.proposal.base import NO_DRAFT, Draft, TokenArray
from rollspec.proposal.history import History
from rollspec.proposal.lookup import DEPTH

PROMPT_TAIL = 8
"""Prompt tokens put before each response in a corpus, so that its first tokens have a context to match."""

BYTES_PER_TOKEN = 32
"""Upper estimate used between exact measurements."""

CORPUS_BYTES = 4
"""Bytes that all corpora may take per byte of `history.max_bytes`: a token has 4 bytes there and some 30 here."""

GROUP_BYTES = 1024
"""About what a prompt takes of which no text is kept, with the lengths of its responses."""

MAX_ENDED = 256
"""Lengths of finished responses kept per prompt."""


@dataclass(slots=True)
class Part:
    """What an aborted rollout has left in the corpora, until it goes on."""

    sequence: int  # of the group's corpus
    wide: int | None  # of the global corpus
    length: int  # in tokens


@dataclass(slots=True)
class Group:
    """The corpus of one prompt and which sequences are in it."""

    key: str
    corpus: Any
    head: TokenArray  # prompt tail that starts each response in the corpus
    next_seq: int = 1
    running: set[int] = field(default_factory=set)  # sequences of requests that run
    bytes: int = 0
    sequences: dict[int, int] = field(default_factory=dict)  # sequence id -> policy version
    versions: set[int] = field(default_factory=set)
    ended: list[int] = field(default_factory=list)  # lengths of finished responses, ascending
    parts: dict[str, Part] = field(default_factory=dict)  # by origin


class _NoCorpus:
    """A corpus that is always empty: nothing is drafted from it."""

    def extend(self, *args: Any) -> None:
        pass

    remove = extend

    def estimate_memory(self) -> int:
        return GROUP_BYTES


class SuffixDrafter:
    """Keeps the corpora and drafts from them. Not thread-safe: the engine's worker is one thread."""

    def __init__(self, config: SuffixConfig, history: History) -> None:
        self._new_corpus: Callable[[], Any] = _NoCorpus
        self._scan: Any = None
        if config.sources:
            from rollspec.proposal import scan  # numba is imported where something is drafted

            first = scan.Corpus()  # what is compiled is compiled now, and not in a step
            first.extend(0, range(DEPTH))
            scan.look_up([first], None, [range(DEPTH)], [1])
            self._new_corpus, self._scan = scan.Corpus, scan
        self.config = config
        self.history = history
        room = CORPUS_BYTES * history.max_bytes
        self._global_max = room // 4  # a quarter for the fallback; the groups' corpora earn more
        self._group_max = room - self._global_max
        self.bytes = 0
        self._groups: OrderedDict[str, Group] = OrderedDict()
        self._global: Any = self._new_corpus()
        self._global_seqs: dict[int, int] = {}  # sequence id -> bytes, oldest first
        self._global_next = 0
        self._global_bytes = 0

    # ---- life of a request ------------------------------------------------------------------------------------------

    def open(self, key: str, prompt: TokenArray, version: int, origin: str | None = None) -> tuple[Group, int]:
        """The prompt's group, built from history if need be, and this request's sequence id in it. What an aborted
        part of the rollout `origin` has left is taken out: its text comes back with the request.
        """
        group = self._groups.get(key)
        if group is None:
            group = self._build(key, prompt)
        else:
            self._groups.move_to_end(key)
        if version not in group.versions:
            group.versions.add(version)
            if version == max(group.versions):  # not what goes on after an abort in an older round
                self._forget_rounds(group, version)
        if origin is not None and (part := group.parts.pop(origin, None)) is not None:
            self._take_out(group, part)
        sequence = group.next_seq
        group.running.add(sequence)
        group.next_seq += 1
        if "siblings" in self.config.sources:
            group.sequences[sequence] = version
            group.corpus.extend(sequence, group.head)
        self._shrink(group)
        return group, sequence

    def extend(self, rows: Iterable[tuple[Group, int, Sequence[int]]]) -> None:
        """Add what requests emitted: (group, sequence, tokens) of each. Call it after drafting: a sequence's own end
        would count as a match that nothing follows.
        """
        if "siblings" not in self.config.sources:
            return
        emitted = []
        for group, sequence, tokens in rows:
            emitted.append((group.corpus, sequence, tokens))
            self._grow(group, len(tokens))
        self._scan.extend(emitted)

    def close(self, group: Group, sequence: int, tokens: TokenArray, version: int, aborted: str | None = None) -> None:
        """A request ended with `tokens` (its whole response): keep it for later rounds and for the global corpus.

        `aborted`: the origin of a rollout that may go on as another request.
        """
        group.running.discard(sequence)
        insort(group.ended, len(tokens))
        if len(group.ended) > MAX_ENDED:
            del group.ended[::2]  # thinned; the distribution is the same
        if "siblings" not in self.config.sources and "past" in self.config.sources:
            self._insert(group, sequence, tokens, version)
        wide = None
        if "global" in self.config.sources and len(tokens):
            wide = self._add_to_global(tokens)
            while self._global_bytes > self._global_max and len(self._global_seqs) > 1:
                self._forget_global(next(iter(self._global_seqs)))
        if aborted is not None:
            group.parts[aborted] = Part(sequence, wide, len(tokens))

    def forget(self, group: Group) -> None:
        """A request ended whose group is its own: keep nothing of it."""
        if self._groups.pop(group.key, None) is not None:
            self.bytes -= group.bytes

    # ---- drafting ---------------------------------------------------------------------------------------------------

    def draft(self, groups: Sequence[Group], contexts: Sequence[Sequence[int]], rooms: Sequence[int]) -> list[Draft]:
        """The likeliest draft after each context; see `scan.look_up`."""
        if self._scan is None:
            return [NO_DRAFT] * len(groups)
        found, wider = self._scan.look_up(
            [g.corpus for g in groups], self._global if "global" in self.config.sources else None, contexts, rooms
        )
        columns = (x.tolist() for x in (found.tokens, found.probs, found.counts, found.matches, wider))
        return [
            Draft(tokens[:n], probs[:n], "global" if other else "group", match) if n else NO_DRAFT
            for tokens, probs, n, match, other in zip(*columns, strict=True)
        ]

    # ---- memory -----------------------------------------------------------------------------------------------------

    @property
    def corpus_bytes(self) -> int:
        """Estimated bytes of all corpora."""
        return self.bytes + self._global_bytes

    def warm(self) -> None:
        """Fill the global corpus from a reloaded history; the groups' corpora are built when their prompts come."""
        if "global" in self.config.sources:
            self._global = self._new_corpus()
            self._global_seqs.clear()
            self._global_bytes = 0
            for _, entry in self.history:
                for r in entry.responses[-1:]:
                    self._add_to_global(r.tokens)
                    if self._global_bytes > self._global_max:
                        return

    def _build(self, key: str, prompt: TokenArray) -> Group:
        corpus = self._new_corpus()
        corpus.extend(0, prompt)
        group = self._groups[key] = Group(key, corpus, prompt[-PROMPT_TAIL:].copy())
        self._grow(group, len(prompt))
        past = self.history.get(key) if "past" in self.config.sources else None
        for response in past.responses if past else ():
            group.versions.add(response.version)
            insort(group.ended, len(response.tokens))
            self._insert(group, group.next_seq, response.tokens, response.version)
            if response.origin is not None:  # perhaps a part
                group.parts[response.origin] = Part(group.next_seq, None, len(response.tokens))
            group.next_seq += 1
        return group

    def _add_to_global(self, tokens: TokenArray) -> int:
        sequence = self._global_next
        self._global.extend(sequence, tokens)
        self._global_seqs[sequence] = len(tokens) * BYTES_PER_TOKEN
        self._global_next += 1
        self._global_bytes += self._global_seqs[sequence]
        return sequence

    def _forget_global(self, sequence: int) -> None:
        self._global.remove(sequence)
        self._global_bytes -= self._global_seqs.pop(sequence)

    def _take_out(self, group: Group, part: Part) -> None:
        if part.length in group.ended:
            group.ended.remove(part.length)
        if part.wide is not None and part.wide in self._global_seqs:
            self._forget_global(part.wide)
        if group.sequences.pop(part.sequence, None) is not None:
            group.corpus.remove(part.sequence)
            self._grow(group, -part.length)

    def _insert(self, group: Group, sequence: int, tokens: TokenArray, version: int) -> None:
        group.sequences[sequence] = version
        group.corpus.extend(sequence, group.head)
        group.corpus.extend(sequence, tokens)
        self._grow(group, len(tokens) + PROMPT_TAIL)

    def _grow(self, group: Group, tokens: int) -> None:
        group.bytes += tokens * BYTES_PER_TOKEN
        self.bytes += tokens * BYTES_PER_TOKEN

    def _forget_rounds(self, group: Group, current: int) -> None:
        """Slide the window: drop sequences of rounds older than the last `window` before the current one, but for
        rounds of which one still runs.
        """
        past = sorted(v for v in group.versions if v != current)
        keep = {current, *(group.sequences[s] for s in group.running if s in group.sequences)}
        if "past" in self.config.sources:
            keep.update(past[-self.config.window :])
        for sequence, version in list(group.sequences.items()):
            if version not in keep:
                group.corpus.remove(sequence)
                del group.sequences[sequence]
        group.parts = {origin: p for origin, p in group.parts.items() if p.sequence in group.sequences}
        before = group.bytes
        group.bytes = int(group.corpus.estimate_memory())
        self.bytes += group.bytes - before
        group.versions = keep

    def _shrink(self, current: Group) -> None:
        """Drop the least recently used corpora that no running request needs."""
        for key, group in list(self._groups.items()) if self.bytes > self._group_max else ():
            if self.bytes <= self._group_max:
                break
            if not group.running and group is not current:
                self.bytes -= group.bytes
                del self._groups[key]
