"""What tests note in an engine's worker, so that they can compute by a paper's formula what had to come of it.

llm.collective_rpc(note_drafter, args=("stand",))
...
(events,) = llm.collective_rpc(noted)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from engines import bridge

from rollspec.drafting.base import DRAFTERS


def noted(worker: Any) -> list[tuple[Any, ...]]:
    """What was noted, in order."""
    return list(bridge(worker).engine.noted)


def note_drafter(worker: Any, name: str) -> None:
    """Note what a drafter receives, what it drafts, and what of it the engine verified:

    ("begin", request, prompt's key, prompt)    ("verify", request, draft tokens)    ("end", request)
    ("emit", request, tokens)                   ("draft", request, room, tokens, source, tokens of its match)
    """
    engine = bridge(worker).engine
    (drafter,) = (d for d in engine.drafters if type(d) is DRAFTERS[name])
    log: list[tuple[Any, ...]] = []
    engine.noted = log
    begin, observe, propose_all, finish = drafter.begin, drafter.observe, drafter.propose_all, drafter.finish
    prepare = engine.prepare

    def beginning(r: Any) -> None:
        log.append(("begin", r.req_id, r.key, r.prompt.tolist()))
        begin(r)

    def observing(r: Any) -> None:
        log.append(("emit", r.req_id, list(r.emitted)))
        observe(r)

    def proposing(asked: Any, rooms: Any) -> Any:
        drafts = propose_all(asked, rooms)
        for r, room, draft in zip(asked, rooms, drafts, strict=True):
            tokens, source, match = ([], "", 0) if draft is None else (draft.token_ids, draft.source, draft.match_len)
            log.append(("draft", r.req_id, room, list(tokens), source, match))
        return drafts

    def finishing(r: Any) -> None:
        log.append(("end", r.req_id))
        finish(r)

    def preparing(req_ids: Any, sampled: Any, scheduled: Any, *args: Any) -> Any:
        log.extend(("verify", req_id, list(tokens)) for req_id, tokens in scheduled.items() if tokens)
        return prepare(req_ids, sampled, scheduled, *args)

    drafter.begin, drafter.observe, drafter.propose_all, drafter.finish = beginning, observing, proposing, finishing
    engine.prepare = preparing


def note_budget(worker: Any) -> None:
    """Note as well how the budget of a step was shared, beside what `note_drafter` notes:

    ("shared", share of ends that waiting requests fill, requests that each draft stands for, seconds by draft tokens,
               [(request, most tokens of it, cumulative chances of its draft's tokens, how many are allowed)])
    """
    engine = bridge(worker).engine
    selection = engine.selection
    allot, log = selection.allot, engine.noted

    def allotting(drafts: Any, step: Any, cost: Any) -> Any:
        shares = allot(drafts, step, cost)
        batch, copies = len(step.running), len(step.running) / max(len(step.asked), 1) if step.plan.watch else 1.0
        seconds = cost.curve(batch, math.ceil(copies * sum(map(len, drafts))), step.context_tokens).tolist()
        rows = [(r.req_id, r.max_tokens, list(d), n) for r, d, n in zip(step.asked, drafts, shares, strict=True)]
        log.append(("shared", selection.refill.rate, copies, seconds, rows))
        return shares

    selection.allot = allotting


def noise_of_stand(worker: Any) -> list[float]:
    """Of the drafter `stand`, as it was drawn beforehand."""
    return next(list(d.noise) for d in bridge(worker).engine.drafters if type(d) is DRAFTERS["stand"])


class Drafted(NamedTuple):
    """A draft, and what is known where its length is decided. Both chances are cumulative, by token."""

    source: str
    match: int  # tokens
    own: list[float]  # by the drafter
    expected: list[float]  # as calibrated
    remaining: float  # tokens that its request is expected to emit until its end


def note_steps(worker: Any) -> None:
    """Note which drafts each step had and what of them was handed over, and what a rule for their length gets:

    ("step", running requests, longest draft of the plan, share of ends that waiting requests fill,
             [(as `Drafted`, tokens that were handed over) of each request that was drafted for])
    ("learned", running requests, as `Drafted`, leading tokens that came, tokens known, verified, of these accepted)
    """
    engine = bridge(worker).engine
    selection, complete = engine.selection, engine.complete
    log: list[tuple[Any, ...]] = []
    engine.noted = log

    def drafted(r: Any, p: Any) -> Drafted:
        own, calibrated = list(p.draft.probs[: len(p.expected)]), list(p.expected)
        return Drafted(p.draft.source, p.draft.match_len, own, calibrated, r.suffix.remaining)

    def completing(*args: Any) -> Any:
        step, rate = engine._step, selection.refill.rate
        drafts = complete(*args)
        rows = [(drafted(r, r.lookup), len(drafts[r.place])) for r in step.asked]
        log.append(("step", len(step.running), step.plan.k, rate, rows))
        return drafts

    engine.complete = completing
    if (rule := selection.rule) is not None:
        learn = rule.learn

        def learning(r: Any, p: Any, accepted: int, known: int, verified: int, batch: int) -> None:
            log.append(("learned", batch, drafted(r, p), accepted, known, verified, r.accepted))
            learn(r, p, accepted, known, verified, batch)

        rule.learn = learning


def note_heads(worker: Any) -> None:
    """Note what several heads propose for a request, and what it is given to verify:

    (request, {head: (tokens, the chance that it gives each)}, draft)
    """
    engine, found = bridge(worker).engine, bridge(worker).head.specialists
    each, complete = found.each, engine.complete
    log: list[tuple[Any, ...]] = []
    engine.noted = log
    proposed: dict[str, tuple[Any, Any]] = {}

    def asking(run: Any, *args: Any, heads: Any = None) -> Any:
        out = each(run, *args, heads=heads)
        if heads is not None:
            proposed.clear()
            proposed.update(
                (found.names[i], tuple(x.tolist() for x in both)) for i, both in zip(heads, out, strict=True)
            )
        return out

    def completing(*args: Any) -> Any:
        drafts = complete(*args)
        for r in engine._step.running if args and args[0] is not None else ():
            log.append((r.req_id, {n: (t[r.place], p[r.place]) for n, (t, p) in proposed.items()}, drafts[r.place]))
        return drafts

    found.each, engine.complete = asking, completing


def note_bandits(worker: Any) -> None:
    """Note what the bandits of a rule with one per prompt choose, and what verifications emit:

    ("chose", request, arm, tokens proposed, tokens kept, (probabilities, arm) of the last draw or None)
    ("paid", request, tokens that the engine emitted where it had verified draft tokens)
    """
    from rollspec.drafting import stopping

    engine = bridge(worker).engine
    rule, prepare, make = engine.selection.rule, engine.prepare, stopping.make
    log: list[tuple[Any, ...]] = []
    engine.noted, keep = log, rule.keep

    class Draws:
        """A generator whose draws are noted."""

        def __init__(self, rng: Any) -> None:
            self.rng = rng
            self.last: tuple[list[float], int] | None = None

        def __getattr__(self, name: str) -> Any:
            return getattr(self.rng, name)

        def choice(self, n: int, p: Any) -> int:
            self.last = list(map(float, p)), int(self.rng.choice(n, p=p))
            return self.last[1]

    def making(*args: Any) -> Any:
        learner = make(*args)
        learner.rng = Draws(learner.rng)
        return learner

    def keeping(r: Any, p: Any, batch: int) -> Any:
        kept = keep(r, p, batch)
        if r.req_id in rule.learners:
            learner, arm = rule.learners[r.req_id]
            log.append(("chose", r.req_id, arm, len(p.expected), kept, learner.rng.last))
        return kept

    def preparing(req_ids: Any, sampled: Any, scheduled: Any, *args: Any) -> Any:
        log.extend(
            ("paid", q, len(said)) for q, said in zip(req_ids, sampled, strict=True) if said and scheduled.get(q)
        )
        return prepare(req_ids, sampled, scheduled, *args)

    setattr(stopping, "make", making)  # noqa: B010 - it is the module's of the worker
    rule.keep, engine.prepare = keeping, preparing


def note_strategy(worker: Any) -> None:
    """Note what the tuning strategy chooses and observes, and what was drafted:

        ("chose", bucket, arm)    ("drafted", requests, draft tokens that were handed over)    ("changed",)
        ("observed", bucket, arm, requests, tokens emitted under every arm, seconds, what the cost model says)

    Seconds have to be those of the clock.
    """
    engine = bridge(worker).engine
    strategy, complete = engine.tuner.strategy, engine.complete
    log: list[tuple[Any, ...]] = []
    engine.noted = log
    choose, observe, changed = strategy.choose, strategy.observe, strategy.changed

    def choosing(bucket: int) -> int:
        arm: int = choose(bucket)
        log.append(("chose", bucket, arm))
        return arm

    def observing(bucket: int, outcome: Any) -> None:
        seconds = outcome.elapsed if outcome.measured == outcome.elapsed else None
        emitted, modelled = (list(map(float, x)) for x in (outcome.emitted, outcome.seconds))
        played = outcome.played
        log.append(("observed", bucket, played, outcome.batch, emitted, seconds, modelled[played]))
        observe(bucket, outcome)

    def changing() -> None:
        log.append(("changed",))
        changed()

    def completing(*args: Any) -> Any:
        drafts = complete(*args)
        log.append(("drafted", len(engine._step.running), sum(map(len, drafts))))
        return drafts

    strategy.choose, strategy.observe, strategy.changed = choosing, observing, changing
    engine.complete = completing


def arms_of_strategy(worker: Any) -> list[int]:
    """The draft length of each arm that the tuning strategy has."""
    return [arm.k if arm.drafters else 0 for arm in bridge(worker).engine.tuner.strategy.arms]


def profile_of_strategy(worker: Any) -> dict[str, list[float]]:
    """Seconds of each arm that ReSpec has, by bucket."""
    found: dict[str, Any] = bridge(worker).engine.tuner.strategy.state()["buckets"]
    return {bucket: of["seconds"] for bucket, of in found.items()}


def draft_right(worker: Any, texts: dict[str, list[int]], every: int) -> None:
    """The draft head proposes what is said next, but for each `every`-th token. `texts`: responses by prompt's key."""
    engine = bridge(worker).engine
    complete = engine.complete

    def completing(rows: Any = None, probs: Any = None) -> Any:
        if rows is not None:
            rows = [list(map(int, row)) for row in rows]
            for r in engine._step.running:
                row, text = rows[r.place], texts[r.key][len(r.output) :]
                for i, token in enumerate(text[: len(row)]):
                    row[i] = token if (len(r.output) + i) % every else row[i]
        return complete(rows, probs)

    engine.complete = completing
