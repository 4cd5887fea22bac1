"""The model-free drafters of past responses: suffix drafts from siblings and past epochs, and replay under kept noise.

Suffix drafts have one corpus per prompt group, one global corpus as fallback. A group's corpus holds its prompt, what
its siblings have emitted so far in this round, and the responses of past rounds (SuffixDecoding arXiv:2411.04975;
siblings as in Seer arXiv:2511.14617, past epochs as in RhymeRL arXiv:2508.18588 and DAS arXiv:2511.13841). The corpora
are a cache over `History`: dropped under memory pressure, rebuilt when their prompt comes back.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from rollspec.config import RollspecConfig
from rollspec.drafting.base import NO_DRAFT, Draft, Drafter, register_drafter
from rollspec.drafting.requests import Group, Part, Replay, Request
from rollspec.proposal.base import DEPTH, NOTHING, TokenArray, as_tokens
from rollspec.proposal.history import History
from rollspec.tuning.tuner import MODEL_DRAFTERS

PROMPT_TAIL = 8  # prompt tokens put before each response in a corpus, so that its first tokens have a context to match
BYTES_PER_TOKEN = 32  # of the global corpus, about

CORPUS_BYTES = 4
"""Bytes that all corpora may take per byte of `history.max_bytes`: a token has 4 bytes there and some 30 here."""

GROUP_BYTES = 1024  # about what a prompt takes of which no text is kept, with the lengths of its responses
MAX_ENDED = 256  # lengths of finished responses kept per prompt


@register_drafter("replay")
class ReplayDrafter(Drafter):
    """Proposes the response that a request gave an epoch ago under the same noise, while it repeats it."""

    def __init__(self, name: str, config: RollspecConfig, history: History) -> None:
        self.history = history

    def begin(self, r: Request) -> None:
        """Find the old response, if the request's noise is kept."""
        if r.stream is None or r.private:
            return
        old = self.history.previous(r.key, r.stream, r.version, r.origin)
        if old is None:
            return
        tokens = old.tolist()
        part = self.history.part(r.key, r.origin)
        if part is not None:  # it was aborted, and this part of it is counted; at least as long as what came back
            r.suffix.replay = Replay(tokens)
            r.suffix.replay.advance(part.tokens.tolist())
            r.suffix.counted = r.suffix.reused(len(part.tokens))
        r.suffix.replay = Replay(tokens)
        r.suffix.replay.advance(r.output)

    def observe(self, r: Request) -> None:
        """Follow the old response."""
        if r.suffix.replay is not None:
            r.suffix.replay.advance(r.emitted)

    def propose(self, r: Request, room: int) -> Draft | None:
        """What follows in the old response."""
        return r.suffix.replay.draft(room) if r.suffix.replay is not None else None


class _NoCorpus:
    """A corpus that is always empty: nothing is drafted from it."""

    def extend(self, *args: Any) -> None:
        pass

    remove = extend

    def estimate_memory(self) -> int:
        return GROUP_BYTES


@register_drafter("suffix")
class SuffixDrafter(Drafter):
    """Proposes what followed the same tokens in responses of the prompt's group, or of any prompt."""

    def __init__(self, name: str, config: RollspecConfig, history: History) -> None:
        self.config = config.proposal.suffix
        free = [d for d in config.proposal.drafters if d not in MODEL_DRAFTERS]
        if free and name not in free:  # others draft, and only they: prompts' lengths are kept here, and no text
            self.config = self.config.model_copy(update={"sources": ()})
        self._new_corpus: Callable[[], Any] = _NoCorpus
        self._scan: Any = None
        if self.config.sources:
            from rollspec.proposal import scan  # numba is imported where something is drafted

            first = scan.Corpus()  # what is compiled is compiled now, and not in a step
            first.extend(0, range(DEPTH))
            scan.look_up([first], None, [range(DEPTH)], [1])
            self._new_corpus, self._scan = scan.Corpus, scan
        self.history = history
        room = CORPUS_BYTES * history.max_bytes
        self._global_max = room // 4  # a quarter for the fallback; the groups' corpora earn more
        self._group_max = room - self._global_max
        self.bytes = 0  # of the groups' corpora, each as when a request of it last began or ended
        self._groups: OrderedDict[str, Group] = OrderedDict()
        self._global: Any = self._new_corpus()
        self._global_next = 0

    # ---- life of a request ------------------------------------------------------------------------------------------

    def begin(self, r: Request) -> None:
        """Open a sequence in the corpus of the prompt group, built from history if need be. What an aborted part of the
        rollout has left is taken out: its text comes back with the request.
        """
        group = self._groups.get(r.key)
        if group is None:
            group = self._build(r.key, r.root)
        else:
            self._groups.move_to_end(r.key)
        if r.version not in group.versions:
            group.versions.add(r.version)
            if r.version == max(group.versions):  # not what goes on after an abort in an older round
                self._forget_rounds(group, r.version)
        if r.origin is not None and (part := group.parts.pop(r.origin, None)) is not None:
            self._take_out(group, part, r.number)
        m = r.suffix
        m.group, m.sequence, m.ended = group, group.next_seq, group.ended.setdefault(r.number, [])
        m.context = [*[NOTHING] * DEPTH, *r.prompt[-DEPTH:].tolist(), *r.output][-DEPTH:]
        group.running.add(m.sequence)
        group.next_seq += 1
        if "siblings" in self.config.sources:
            group.sequences[m.sequence] = r.version
            group.corpus.extend(m.sequence, _lead(group, r))
        if r.output:
            self._extend([(group, m.sequence, r.output)])
        self._measure(group)
        self._shrink(group)

    def observe(self, r: Request) -> None:
        """Move the context on."""
        context = r.suffix.context
        context.extend(r.emitted)
        del context[:-DEPTH]

    def store_all(self, running: Sequence[Request], wait: bool) -> None:
        """Add what was emitted to the corpora; it waits while nothing is looked up, since adding in bulk costs less.

        After drafting: a sequence's own end would count as a match that nothing follows.
        """
        new = []
        for r in running:
            m = r.suffix
            if wait:
                m.unstored.extend(r.emitted)
            elif m.group is not None:
                new.append((m.group, m.sequence, [*m.unstored, *r.emitted] if m.unstored else r.emitted))
                m.unstored.clear()
        self._extend(new)

    def finish(self, r: Request) -> None:
        """Keep the whole response for later rounds and for the global corpus, or nothing of a private request."""
        m, sources = r.suffix, self.config.sources
        if (group := m.group) is None:
            return
        if r.private:
            if self._groups.pop(group.key, None) is not None:
                self.bytes -= group.bytes
            return
        if m.unstored:
            self._extend([(group, m.sequence, m.unstored)])
        tokens = as_tokens(r.output)
        group.running.discard(m.sequence)
        insort(ended := group.ended.setdefault(r.number, []), len(tokens))
        if len(ended) > MAX_ENDED:
            del ended[::2]  # thinned; the distribution is the same
        if "siblings" not in sources and "past" in sources:
            self._insert(group, m.sequence, tokens, r.version, _lead(group, r))
        self._measure(group)
        wide = None
        if "global" in sources and len(tokens):
            wide = self._add_to_global(tokens)
            while self._global_bytes > self._global_max and len(self._global.regions) > 1:
                self._global.remove(next(iter(self._global.regions)))
        if r.origin is not None and not r.ended:  # it may go on as another request
            group.parts[r.origin] = Part(m.sequence, wide, len(tokens))

    # ---- drafting ---------------------------------------------------------------------------------------------------

    def propose_all(self, asked: Sequence[Request], rooms: Sequence[int]) -> Sequence[Draft | None]:
        """The likeliest continuation of each one's context."""
        parts = [r.suffix for r in asked]
        return self.draft([m.group for m in parts if m.group], [m.context for m in parts], rooms)

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

    # ---- the corpora ------------------------------------------------------------------------------------------------

    @property
    def corpus_bytes(self) -> int:
        """Bytes of all corpora, about."""
        return sum(int(g.corpus.estimate_memory()) for g in self._groups.values()) + self._global_bytes

    @property
    def _global_bytes(self) -> int:
        return BYTES_PER_TOKEN * int(self._global.live) if "global" in self.config.sources else 0

    def warm(self) -> None:
        """Fill the global corpus from a reloaded history; the groups' corpora are built when their prompts come."""
        if "global" in self.config.sources:
            self._global = self._new_corpus()
            for _, entry in self.history:
                for r in entry.responses[-1:]:
                    self._add_to_global(r.tokens)
                    if self._global_bytes > self._global_max:
                        return

    def _build(self, key: str, prompt: TokenArray) -> Group:
        corpus = self._new_corpus()
        corpus.extend(0, prompt)
        group = self._groups[key] = Group(key, corpus, prompt[-PROMPT_TAIL:].copy())
        past = self.history.get(key) if "past" in self.config.sources else None
        for response in past.responses if past else ():
            group.versions.add(response.version)
            insort(group.ended.setdefault(response.turn, []), len(response.tokens))
            self._insert(group, group.next_seq, response.tokens, response.version, group.head)
            if response.origin is not None:  # perhaps a part
                group.parts[response.origin] = Part(group.next_seq, None, len(response.tokens))
            group.next_seq += 1
        return group

    def _extend(self, rows: Sequence[tuple[Group, int, Sequence[int]]]) -> None:
        if "siblings" in self.config.sources:
            self._scan.extend([(group.corpus, sequence, tokens) for group, sequence, tokens in rows])

    def _add_to_global(self, tokens: TokenArray) -> int:
        sequence = self._global_next
        self._global.extend(sequence, tokens)
        self._global_next += 1
        return sequence

    def _take_out(self, group: Group, part: Part, turn: int) -> None:
        if part.length in (ended := group.ended.get(turn, [])):
            ended.remove(part.length)
        if part.wide is not None and part.wide in self._global.regions:
            self._global.remove(part.wide)
        if group.sequences.pop(part.sequence, None) is not None:
            group.corpus.remove(part.sequence)

    def _insert(self, group: Group, sequence: int, tokens: TokenArray, version: int, lead: TokenArray) -> None:
        group.sequences[sequence] = version
        group.corpus.extend(sequence, lead)
        group.corpus.extend(sequence, tokens)

    def _measure(self, group: Group) -> None:
        """Count what the group's corpus takes now, where it is still kept."""
        if self._groups.get(group.key) is group:
            before, group.bytes = group.bytes, group.corpus.estimate_memory()
            self.bytes += group.bytes - before

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
        group.versions = keep

    def _shrink(self, current: Group) -> None:
        """Drop the least recently used corpora that no running request needs."""
        for key, group in list(self._groups.items()) if self.bytes > self._group_max else ():
            if self.bytes <= self._group_max:
                break
            if not group.running and group is not current:
                self.bytes -= group.bytes
                del self._groups[key]


def _lead(group: Group, r: Request) -> TokenArray:
    """What stands before a response in its group's corpus: the end of the prompt, and of a later turn all that the
    environment said since the last one, which a response may copy.
    """
    return group.head if r.turn is None or not r.turn.number else r.prompt[max(0, r.turn.since - PROMPT_TAIL) :]
