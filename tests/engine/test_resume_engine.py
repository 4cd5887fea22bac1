"""Two hundred aborts of running rollouts over ten syncs of weights, each submitted again with what it had said: as a
trainer does whose rollouts do not wait for each other.

The same rollouts are aborted at the same tokens twice: without drafts in a wide batch, and with drafts of any length in
a batch that not all of them fit into, from cached prefixes. float32, so what they say is compared token by token. Once
more with weights that say by each token which version they are.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engines import CACHING, bridge, build, call, close, metric
from marked_weights import band
from models import moved, with_mark
from switching import COUPLED, QUIET, any_arm

pytestmark = pytest.mark.engine

SYNCS, LIVE = 10, 24
"""Rollouts that are live at once: 20 or more of them are aborted at each sync."""

LENGTHS = (60, 110)
SHARE = (8, 18)
"""Tokens of a rollout, and of those between two syncs."""

FIRST = 50  # policy version of the first weights


class Rollout:
    """One response, over all its requests. `cuts`: how many tokens it has at its aborts."""

    def __init__(self, number: int, prompt: list[int]) -> None:
        rng = random.Random(number)
        self.name, self.prompt, self.length = f"r{number}", prompt, rng.randrange(*LENGTHS)
        self.said: list[int] = []
        self.spans: list[tuple[int, int]] = []
        """(first token, policy version), of all that it said."""
        self.tells = rng.random() < 0.5  # its requests say so; else the history has to know
        self.rng = rng
        self.request = ""

    def next_cut(self) -> int | None:
        """Where the next abort comes; None where it ends before one. Drafts may lead past it, but never to the end."""
        cut = len(self.said) + self.rng.randrange(*SHARE)
        return cut if cut + 20 < self.length else None

    def submit(self, engine: Any, version: int) -> None:
        from vllm import SamplingParams

        own: dict[str, Any] = {"origin": self.name, "prompt_tokens": len(self.prompt)}
        if self.tells and self.spans:
            own["spans"] = [[s, v] for s, v in self.spans]
        params = SamplingParams(
            temperature=1.0, max_tokens=self.length - len(self.said), detokenize=False, ignore_eos=True,
            extra_args={"rollspec": own},
        )  # fmt: skip
        self.request = f"{self.name}-{version}"
        self.spans.append((len(self.said), version))
        engine.add_request(self.request, {"prompt_token_ids": [*self.prompt, *self.said]}, params)


def _load(worker: Any, file: str) -> None:
    from safetensors.torch import load_file

    worker.model_runner.model.load_weights(list(load_file(file).items()))


def _history(worker: Any) -> list[tuple[str | None, list[int], list[tuple[int, int]]]]:
    """Name, tokens and versions of every response of a rollout."""
    out = []
    for _, entry in bridge(worker).engine.history:
        for r in entry.responses:
            out.append((r.origin, r.tokens.tolist(), list(r.spans or ((0, r.version),))))
    return out


def rollouts(llm: Any, prompts: list[list[int]], weights: list[Path]) -> tuple[list[Rollout], int, dict[str, Any]]:
    """All that ran until the last sync's ones have ended, how many aborts there were, and what the history knew of each
    as long as it was in its window.
    """
    engine, aborts = llm.llm_engine, 0
    every: list[Rollout] = []
    live: list[Rollout] = []
    kept: dict[str, Any] = {}
    for version in range(FIRST, FIRST + SYNCS + 1):
        llm.collective_rpc(_load, args=(str(weights[version % len(weights)] / "model.safetensors"),))
        llm.reset_prefix_cache()
        call(llm, "set_version", version=version)
        last = version == FIRST + SYNCS
        while len(live) < LIVE and not last:
            live.append(Rollout(len(every), prompts[len(every) % len(prompts)]))
            every.append(live[-1])
        cuts = {}
        for r in live:
            r.submit(engine, version)
            cuts[r.request] = (r, None if last else r.next_cut(), len(r.said))
        while engine.has_unfinished_requests():
            for output in engine.step():
                r, cut, before = cuts[output.request_id]
                r.said = [*r.said[:before], *output.outputs[0].token_ids]
                if cut is not None and len(r.said) >= cut:
                    assert not output.finished
                    engine.abort_request([output.request_id])
                    cuts[output.request_id] = r, None, before
                    r.said, aborts = r.said[:cut], aborts + 1
                elif output.finished:
                    live.remove(r)
        call(llm, "rewards", items=[])  # what has just ended is in the history
        (history,) = llm.collective_rpc(_history)
        found = {name: (tokens, [(start, v) for start, v in spans]) for name, tokens, spans in history}
        assert len(found) == len(history), "a response is in the history twice"
        kept |= found
    assert not live
    return every, aborts, kept


def test_two_hundred_aborts_over_ten_syncs_lose_and_double_nothing(
    model: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    weights = [model, moved(model, tmp_path / "moved", 0.05)]
    llm = build(model, QUIET, max_num_seqs=32)
    try:
        quiet, aborts, _ = rollouts(llm, prompts, weights)
        assert not call(llm, "stats")["faults"]
    finally:
        close(llm)
    assert aborts >= 200, aborts
    assert all(len(r.said) == r.length for r in quiet)
    tight: dict[str, Any] = CACHING | {"max_num_seqs": 16, "max_num_batched_tokens": 256}
    llm = build(model, COUPLED, **tight)
    try:
        llm.collective_rpc(any_arm)
        drafted, again, history = rollouts(llm, prompts, weights)
        stats = call(llm, "stats")
        assert not stats["faults"] and stats["drafted"] > stats["accepted"] > 0
        assert metric(llm, "prefix_cache_hits") > 0
    finally:
        close(llm)
    assert (again, len(drafted)) == (aborts, len(quiet))
    parted = [r.name for r, other in zip(drafted, quiet, strict=True) if r.said != other.said]
    assert not parted, parted
    assert history == {r.name: (r.said, r.spans) for r in drafted}
    changed = sum(len({v for _, v in r.spans}) > 3 for r in drafted)
    assert changed > LIVE, "most span several policies"


def test_every_token_is_of_the_version_whose_weights_said_it(
    model: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    """By a mark in the weights, not by what this test noted. Drafts of versions before are all rejected."""
    weights = [with_mark(model, tmp_path / str(mark), mark) for mark in range(SYNCS + 1)]
    tight: dict[str, Any] = CACHING | {"max_num_seqs": 16, "max_num_batched_tokens": 256}
    llm = build(model, {"preset": "default"}, **tight)
    try:
        llm.collective_rpc(any_arm)
        every, aborts, history = rollouts(llm, prompts, weights)
        stats = call(llm, "stats")
    finally:
        close(llm)
    assert not stats["faults"] and stats["drafted"] > stats["accepted"] > 0
    assert aborts >= 200, aborts
    assert {name: tokens for name, (tokens, _) in history.items()} == {r.name: r.said for r in every}
    wrong, versions = [], set()
    for name, (tokens, spans) in history.items():
        for (start, version), end in zip(spans, [*(s for s, _ in spans[1:]), len(tokens)], strict=True):
            said = band(version % len(weights))
            wrong += [(name, at, version) for at in range(start, end) if tokens[at] not in said]
            versions.add(version)
    assert not wrong, f"{len(wrong)} tokens are of another version: {wrong[:5]}"
    assert len(versions) == SYNCS + 1
    assert sum(len(spans) > 3 for _, spans in history.values()) > LIVE, "most span several policies"
