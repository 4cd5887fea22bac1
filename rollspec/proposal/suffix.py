"""Suffix drafts: one corpus per prompt group, one global corpus as fallback.

A corpus is an array with chains of positions (`proposal.scan.Corpus`).

A group's corpus holds its prompt, what its siblings have emitted so far in this round, and the responses of past
rounds, so that a request can be drafted from any of them (SuffixDecoding arXiv:2411.04975; siblings as in Seer
arXiv:2511.14617, past epochs as in RhymeRL arXiv:2508.18588 and DAS arXiv:2511.13841). The corpora are a cache over
`History`: dropped under memory pressure, rebuilt when their prompt comes back.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollspec.config import SuffixConfig
from rollspec.proposal.base import NO_DRAFT, Draft, TokenArray
from rollspec.proposal.history import History

PROMPT_TAIL = 8
"""Prompt tokens put before each response in a corpus, so that its first tokens have a context to match."""

BYTES_PER_TOKEN = 32
"""Upper estimate used between exact measurements."""

SPEC_FACTOR = 2.0
"""A draft is at most this many times as long as its match: a short match says little about what follows."""

MIN_PROB = 0.1
"""A draft stops where its cumulative frequency falls below this; later tokens would rarely pay for verification."""

CORPUS_BYTES = 4
"""Bytes that all corpora may take per byte of `history.max_bytes`. A token has 4 bytes there and some 30 here, but
corpora of prompts that do not run need not stay.
"""

GROUP_BYTES = 1024
"""About what a prompt takes of which no text is kept, with the lengths of its responses."""

WEAK_MATCH = 8
"""Below this match length the group's draft is compared with the global corpus's."""

MAX_ENDED = 256
"""Lengths of finished responses kept per prompt."""


@dataclass(slots=True)
class Group:
    """The corpus of one prompt and which sequences are in it."""

    key: str
    prompt: TokenArray
    corpus: Any
    head: TokenArray  # prompt tail that starts each response in the corpus
    next_seq: int = 1
    active: int = 0
    bytes: int = 0
    sequences: dict[int, int] = field(default_factory=dict)  # sequence id -> policy version
    versions: set[int] = field(default_factory=set)
    ended: list[int] = field(default_factory=list)  # lengths of finished responses, ascending


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
            first.extend(0, [0, 1, 2, 3])
            first.speculate([0, 1], 1, SPEC_FACTOR, MIN_PROB)
            self._new_corpus, self._scan = scan.Corpus, scan
        self.config = config
        self.history = history
        room = CORPUS_BYTES * history.max_bytes
        self._global_max = room // 4  # a quarter for the fallback; the groups' corpora earn more
        self._group_max = room - self._global_max
        self.bytes = 0
        self._groups: OrderedDict[str, Group] = OrderedDict()
        self._global: Any = self._new_corpus()
        self._global_seqs: deque[tuple[int, int]] = deque()  # (sequence id, bytes), oldest first
        self._global_next = 0
        self._global_bytes = 0

    # ---- life of a request ------------------------------------------------------------------------------------------

    def open(self, key: str, prompt: TokenArray, version: int) -> tuple[Group, int]:
        """The prompt's group, built from history if need be, and this request's sequence id in it."""
        group = self._groups.get(key)
        if group is None:
            group = self._build(key, prompt)
        else:
            self._groups.move_to_end(key)
        if version not in group.versions:
            group.versions.add(version)
            self._forget_rounds(group, version)
        group.active += 1
        sequence = group.next_seq
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
            grown = len(tokens) * BYTES_PER_TOKEN
            group.bytes += grown
            self.bytes += grown
        self._scan.extend(emitted)

    def close(self, group: Group, sequence: int, tokens: TokenArray, version: int) -> None:
        """A request ended with `tokens` (its whole response): keep it for later rounds and for the global corpus."""
        group.active -= 1
        insort(group.ended, len(tokens))
        if len(group.ended) > MAX_ENDED:
            del group.ended[::2]  # thinned; the distribution is the same
        if "siblings" not in self.config.sources and "past" in self.config.sources:
            self._insert(group, sequence, tokens, version)
        if "global" in self.config.sources and len(tokens):
            self._global.extend(self._global_next, tokens)
            size = len(tokens) * BYTES_PER_TOKEN
            self._global_seqs.append((self._global_next, size))
            self._global_next += 1
            self._global_bytes += size
            while self._global_bytes > self._global_max and len(self._global_seqs) > 1:
                old, freed = self._global_seqs.popleft()
                self._global.remove(old)
                self._global_bytes -= freed

    def forget(self, group: Group) -> None:
        """A request ended whose group is its own: keep nothing of it."""
        group.active -= 1
        if self._groups.pop(group.key, None) is not None:
            self.bytes -= group.bytes

    # ---- drafting ---------------------------------------------------------------------------------------------------

    def draft(self, groups: Sequence[Group], contexts: Sequence[Sequence[int]], rooms: Sequence[int]) -> list[Draft]:
        """The likeliest draft after each of `contexts`, of at most as many tokens as there is room for.

        `contexts`: the last `lookup.DEPTH` tokens of prompt + response, filled with `NOTHING` on the left.
        """
        if self._scan is None:
            return [NO_DRAFT] * len(groups)
        found, wider = self._scan.look_up(
            [g.corpus for g in groups],
            self._global if "global" in self.config.sources else None,
            WEAK_MATCH,
            contexts,
            rooms,
            SPEC_FACTOR,
            MIN_PROB,
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
                    self._global.extend(self._global_next, r.tokens)
                    size = len(r.tokens) * BYTES_PER_TOKEN
                    self._global_seqs.append((self._global_next, size))
                    self._global_next += 1
                    self._global_bytes += size
                    if self._global_bytes > self._global_max:
                        return

    def _build(self, key: str, prompt: TokenArray) -> Group:
        corpus = self._new_corpus()
        corpus.extend(0, prompt)
        group = Group(key, prompt, corpus, prompt[-PROMPT_TAIL:].copy())
        group.bytes = len(prompt) * BYTES_PER_TOKEN
        self.bytes += group.bytes
        self._groups[key] = group
        past = self.history.get(key) if "past" in self.config.sources else None
        for response in past.responses if past else ():
            group.versions.add(response.version)
            insort(group.ended, len(response.tokens))
            self._insert(group, group.next_seq, response.tokens, response.version)
            group.next_seq += 1
        return group

    def _insert(self, group: Group, sequence: int, tokens: TokenArray, version: int) -> None:
        group.sequences[sequence] = version
        group.corpus.extend(sequence, group.head)
        group.corpus.extend(sequence, tokens)
        grown = (len(tokens) + PROMPT_TAIL) * BYTES_PER_TOKEN
        group.bytes += grown
        self.bytes += grown

    def _forget_rounds(self, group: Group, current: int) -> None:
        """Slide the window: drop sequences of rounds older than the last `window` before the current one."""
        past = sorted(v for v in group.versions if v != current)
        keep = set(past[-self.config.window :]) if "past" in self.config.sources else set()
        for sequence, version in list(group.sequences.items()):
            if version != current and version not in keep:
                group.corpus.remove(sequence)
                del group.sequences[sequence]
        before = group.bytes
        group.bytes = int(group.corpus.estimate_memory())
        self.bytes += group.bytes - before
        group.versions = keep | {current}

    def _shrink(self, current: Group) -> None:
        """Drop the least recently used corpora that no running request needs."""
        if self.bytes <= self._group_max:
            return
        for key, group in list(self._groups.items()):
            if self.bytes <= self._group_max:
                break
            if group.active == 0 and group is not current:
                self.bytes -= group.bytes
                del self._groups[key]
