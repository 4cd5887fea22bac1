"""What benchmarks do inside an engine's worker to rollspec's drafter; sent there by `Engine.call`.

None of this is reachable from a running job: it replaces drafters by ones that know the answer, or none.
"""

from __future__ import annotations

import random
from typing import Any

Step = tuple[int, float, float, int]
"""What the cost model observes of a step: tokens, seconds, context tokens, requests."""


def become(worker: Any, source: dict[str, Any]) -> None:
    """Continue under another configuration, with nothing learned and no history: as an engine that starts now."""
    from rollspec.config import RollspecConfig

    drafter = worker.model_runner._rollspec
    drafter.config = RollspecConfig.load(source)
    drafter.engine = type(drafter.engine)(drafter.config, drafter.engine.max_model_len)


def ledger(worker: Any) -> dict[int, tuple[list[float], list[float]]]:
    """By batch bucket: tokens and modelled seconds under each arm since the last drain."""
    totals: dict[int, tuple[list[float], list[float]]] = worker.model_runner._rollspec.engine.tuner.ledger.totals()
    return totals


def machine(worker: Any) -> dict[str, Any]:
    """What step costs depend on, as it is stored beside them."""
    return dict(worker.model_runner._rollspec.machine)


def watch(worker: Any) -> None:
    """Keep every step that the cost model observes from now on; `steps` takes them."""
    cost = worker.model_runner._rollspec.engine.tuner.cost
    observe, worker.seen = cost.observe, []

    def seen(tokens: int, seconds: float, context_tokens: float = 0.0, requests: int = 0) -> None:
        worker.seen.append((tokens, seconds, context_tokens, requests))
        observe(tokens, seconds, context_tokens, requests)

    cost.observe = seen


def steps(worker: Any) -> list[Step]:
    """The steps seen since the last call."""
    out, worker.seen = worker.seen, []
    return list(out)


def know(worker: Any, answers: dict[str, list[int]], k: int, accepted: bool) -> None:
    """Draft `k` tokens of what a request is going to say, or as many that it will not say.

    Args:
        worker: vLLM's.
        answers: by prompt key, the whole greedy response; each prompt runs once at a time.
        k: draft length.
        accepted: false shifts every token by one.
    """
    from rollspec.proposal.base import Draft

    engine = worker.model_runner._rollspec.engine
    vocabulary = worker.model_runner.model_config.get_vocab_size()

    def one(group: Any, room: int) -> Draft:
        said = next(len(r.output) for r in engine.requests.values() if r.suffix.group is group)
        tokens = answers[group.key][said : said + room]
        if not accepted:
            tokens = [(t + 1) % vocabulary for t in tokens]
        return Draft(tokens, [0.99] * len(tokens), "group", 16)

    def draft(groups: Any, contexts: Any, rooms: list[int]) -> list[Draft]:
        return [one(group, room) for group, room in zip(groups, rooms, strict=True)]

    engine.suffix.draft = draft
    engine.k = k


def useless(worker: Any) -> None:
    """Draft random tokens, as many as allowed, and claim to be sure of them."""
    from rollspec.proposal.base import Draft

    rng = random.Random(0)
    vocabulary = worker.model_runner.model_config.get_vocab_size()

    def draft(groups: Any, contexts: Any, rooms: list[int]) -> list[Draft]:
        return [Draft([rng.randrange(vocabulary) for _ in range(k)], [0.99] * k, "group", 16) for k in rooms]

    worker.model_runner._rollspec.engine.suffix.draft = draft
