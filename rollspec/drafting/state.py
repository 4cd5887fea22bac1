"""The state of drafting between steps: requests, drafters, tuning; and the calls by which an adapter
updates it.

The step itself is `rollspec/step.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rollspec.config import RollspecConfig
from rollspec.drafting import hierarchy, recycling, siblings  # noqa: F401 - they are registered
from rollspec.drafting.base import DRAFTERS
from rollspec.drafting.counters import Counters
from rollspec.drafting.head import Head, Scored
from rollspec.drafting.requests import Request, Step, still_thinks
from rollspec.drafting.selection import Selection
from rollspec.drafting.suffix import SuffixDrafter
from rollspec.proposal.base import TokenArray, Turn, as_tokens, prompt_key
from rollspec.proposal.confidence import Confidence
from rollspec.proposal.history import History, extend_spans
from rollspec.telemetry.engine_stats import EngineStats
from rollspec.tuning.cost import LONGEST
from rollspec.tuning.tuner import Plan, Tuner

THINK_TAIL = 8  # tokens of a prompt in which a chat template may begin the response's thinking


class DraftState:
    """Requests, drafters and tuning, of one inference engine. One thread.

    Args:
        config: resolved settings.
        max_model_len: tokens of prompt and response at most.
        head: name of the drafter that the inference engine runs, such as `eagle3`; None where it runs none.
    """

    def __init__(self, config: RollspecConfig, max_model_len: int, head: str | None = None) -> None:
        self.config, self.max_model_len = config, max_model_len
        self.k_max = self.k = config.proposal.k_max
        self.version = 0
        """Of the policy."""
        self.requests: dict[str, Request] = {}
        self.history = History(config.history.max_bytes, config.proposal.suffix.window)
        # The suffix drafter is kept beside a head that drafts alone as well: expected lengths and rewards rest on it.
        names = dict.fromkeys(("replay", *config.proposal.drafters, "suffix"))
        made = {name: DRAFTERS[name](name, config, self.history) for name in names}
        self.drafters = [d for d in made.values() if not isinstance(d, Head)]
        """Asked in this order, before the head: they cost no forward pass."""
        self.head = next((d for name, d in made.items() if name == head and isinstance(d, Head)), None)
        self.confidence = Confidence()
        self.tuner = Tuner(config.tuning, self.k_max, config.proposal.drafters)
        self.selection = Selection(config.proposal.budget, config.tuning.lengths(self.k_max))
        self.counters = Counters()
        self.think: tuple[int, int] | None = None
        """Tokens that begin and end the model's thinking, where it has such."""
        self.resting = False
        """True while the head cannot be run."""
        self.canary_runs = False
        """True while the head's weights are a canary."""
        self.scored: Scored | None = None
        """Called with every scored draft of the head."""
        self._step = Step()
        self._plan: Plan | None = None  # what was decided after the last step
        self._drafted = 0.0  # seconds that drafting for the present step took, passes included
        self._measured: float | None = None  # seconds of the step that `prepare` is called with next, drafting included

    # ---- requests ---------------------------------------------------------------------------------------------------

    def begin(
        self,
        req_id: str,
        prompt: Sequence[int] | TokenArray,
        max_tokens: int,
        stop_ids: Collection[int] = (),
        stream: int | None = None,
        emitted: Sequence[int] = (),
        private: bool = False,
        origin: str | None = None,
        min_tokens: int = 0,
        spans: Sequence[tuple[int, int]] = (),
        turn: Turn | None = None,
    ) -> None:
        """A request samples its first token next, or the one after the tokens `emitted` that it starts from.

        Args:
            prompt: without `emitted`, the output that it starts from. max_tokens: of its output, `emitted` included.
            min_tokens: that it emits before it may stop, `emitted` apart.
            spans: which policy versions sampled `emitted`, where the rollout knows; else what history knows of it.
            stop_ids, stream, origin, private, turn: as `Request` has them.
        """
        with self.counters.drafting:
            tokens = as_tokens(prompt)
            turn = None if private or turn is None or turn.since > len(tokens) else turn
            key = f"private-{req_id}" if private else prompt_key(tokens if turn is None else tokens[: turn.first])
            part = self.history.part(key, origin)
            known = part is not None and part.tokens[: len(emitted)].tolist() == list(emitted)
            if not spans and part is not None and known:
                spans = part.spans or ((0, part.version),)
            # Without either, the present policy has sampled or accepted all that the request starts from.
            spans = extend_spans(spans, len(emitted) if spans else 0, self.version)
            r = self.requests[req_id] = Request(
                req_id,
                key,
                tokens,
                spans[0][1],
                min(max_tokens, self.max_model_len - len(tokens)),
                frozenset(stop_ids),
                list(emitted),
                began_at=len(emitted),
                min_output=len(emitted) + min_tokens if min_tokens else 0,
                stream=None if private else stream,
                origin=origin,
                spans=spans,
                known=len(emitted) if known else 0,
                private=private,
                turn=turn,
                after=self.tuner.ledger.ended,
                counted=len(emitted) + 1,
            )
            if self.think is not None:  # a template may begin it in the prompt
                r.thinks = still_thinks([*tokens[-THINK_TAIL:].tolist(), *emitted], self.think, False)
            self.selection.refill.began()
            for d in self.drafters:
                d.begin(r)

    def finish(self, req_id: str) -> None:
        """A request ended or was aborted; its output is history from now on. Unknown ids are ignored."""
        r = self.requests.pop(req_id, None)
        if r is None:
            return
        with self.counters.drafting:
            self.selection.refill.ended()
            self.selection.finish(r)
            for d in self.drafters:
                d.finish(r)
            if r.output and not r.private:
                self.history.add(r.key, r.root, r.response)
            self.counters.finished(r)
            self.tuner.ledger.end(*r.decoded())

    def set_version(self, version: int) -> None:
        """The policy was synchronised to `version`: it samples what running requests emit from now on, and prompts that
        come from now on belong to its round.
        """
        self.version = version
        for r in self.requests.values():
            r.spans = extend_spans(r.spans, len(r.output), version)
        self.counters.peak = 0  # batches are compared with those of the same round
        self.tuner.changed()

    # ---- times ------------------------------------------------------------------------------------------------------

    def timed(self, tokens: int, decode_only: bool, seconds: float, batch: int) -> None:
        """The step that `prepare` is called with next computed `tokens` tokens in `seconds`."""
        self.counters.step(seconds, batch)
        self._measured = seconds + self._drafted if decode_only and 0.0 < seconds < LONGEST else None
        self._drafted = 0.0
        if decode_only:
            self.tuner.cost.observe(tokens, seconds, self._step.context_tokens, batch)

    def passed(self, passes: int, seconds: float, batch: int, late: float = 0.0) -> None:
        """The head ran `passes` passes for `batch` requests, `late` of the seconds to read what it had missed.

        These are no part of what a pass costs: they are spent once after a rest. Were they, a head that is only
        probed would seem too dear to be run at all.
        """
        assert self.head is not None
        cost = self.head.cost  # after a rest a pass takes several times what it does in a row of many
        if self.head.rested:
            late = min(late, seconds)
            cost.rested(batch, passes, seconds - late, late)
        else:
            cost.observe(batch, passes, seconds - late)
        self._drafted += seconds
        self.stats.passes += passes
        self.stats.pass_seconds += seconds

    # ---- the head ---------------------------------------------------------------------------------------------------

    def swapped(self, version: int, known: Mapping[str, Sequence[float]] | None = None) -> None:
        """The head's weights were replaced: what is known of it is old, and it may draft again.

        Args:
            version: of the weights that it has now.
            known: their acceptance, where they ran before.
        """
        assert self.head is not None
        self.head.swapped(version, known, self.requests.values())
        self.tuner.guard.forget(self.head.name)
        self.tuner.changed()

    # ---- telemetry and what is kept ---------------------------------------------------------------------------------

    @property
    def stats(self) -> EngineStats:
        """Counters since the last `drain`."""
        return self.counters.stats

    @property
    def suffix(self) -> SuffixDrafter:
        """The corpora of suffix drafts."""
        return next(d for d in self.drafters if isinstance(d, SuffixDrafter))

    def drain(self) -> EngineStats:
        """Counters since the last call, with the present levels filled in."""
        out = self.counters.drain(self.tuner, self.requests.values())
        out.version = self.version
        out.correlated = self.config.reuse.seeds == "keep"
        out.corpus_bytes = self.suffix.corpus_bytes
        history = self.history
        out.history_bytes, out.prompts = history.bytes, len(history)
        out.evicted, history.evicted = history.evicted, 0
        out.rewarded, history.rewarded = history.rewarded, 0
        return out

    def snapshot(self) -> dict[str, Any]:
        """History with what running requests have emitted so far; for `History.save`."""
        running = (r for r in self.requests.values() if r.output and not r.private)
        return self.history.snapshot((r.key, r.root, r.response) for r in running)

    def tuning_state(self) -> dict[str, Any]:
        """What was measured of speed and acceptance, in JSON types; `rollspec.tuning.store` keeps it."""
        out = {"tuner": self.tuner.state(), "confidence": self.confidence.state()}
        return out if self.head is None else out | self.head.state()

    def restore_tuning(self, state: Mapping[str, Any]) -> None:
        """Start from what an earlier run saved.

        Raises:
            ValueError, KeyError, TypeError: it cannot be used; nothing of it is.
        """
        confidence, tuner = Confidence(), Tuner(self.config.tuning, self.k_max, self.config.proposal.drafters)
        confidence.restore(state["confidence"])
        if "tuner" in state:
            tuner.restore(state["tuner"])
        if self.head is not None:
            self.head.restore(state)
        self.confidence, self.tuner, self._plan = confidence, tuner, None
        for r in self.requests.values():  # the new tuner has counted nothing of them
            r.decoded()
