"""The engine's step against a stored trace: the same worlds must give the same plans, drafts and counts, to the token.

python tests/unit/test_step_trace.py     # writes the trace anew, after a change that is meant to change it
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from step_world import WORLDS, play

from rollspec import RollspecConfig

pytest.importorskip("arctic_inference")

TRACE = Path(__file__).with_name("step_trace.json")


def make(overrides: dict[str, Any], head: str | None) -> Any:
    from rollspec.proposal.hybrid import HybridProposer
    from rollspec.proposal.proposer import Proposer

    given = {"proposal.learned.model": "x", **overrides}
    config = RollspecConfig.load("default", overrides=given, env={})
    if head is None:
        p = Proposer(config, 4096)
        plain, whole = p.prepare, p.complete
        p.prepare = lambda *args: plain(*args) or 0  # type: ignore[method-assign]
        p.complete = lambda rows=None, probs=None: whole()  # type: ignore[method-assign]
        return p
    h = HybridProposer(config, 4096, head)
    prepare = h.prepare

    def prepared(*args: Any) -> int:
        prepare(*args)
        return h.passes

    h.prepare = prepared  # type: ignore[assignment,method-assign]
    return h


@pytest.mark.parametrize("name", WORLDS)
def test_a_step_plans_proposes_and_counts_as_it_did(name: str) -> None:
    stored, now = json.loads(TRACE.read_text())[name], json.loads(json.dumps(play(WORLDS[name], make)))
    for n, (was, is_) in enumerate(zip(stored["steps"], now["steps"], strict=True)):
        assert is_ == was, f"step {n}"
    assert now == stored


if __name__ == "__main__":
    TRACE.write_text(json.dumps({name: play(world, make) for name, world in WORLDS.items()}, indent=0) + "\n")
