"""The engine's step against a stored trace: the same worlds must give the same plans, drafts and counts, to the token.

PYTHONPATH=tests/unit python tests/unit/rollspec/test_step_trace.py     # writes it anew, after a change that is meant
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from step_world import WORLDS, play

from rollspec import RollspecConfig
from rollspec.step import DraftEngine

TRACE = Path(__file__).with_name("step_trace.json")


def make(overrides: dict[str, Any], head: str | None) -> Any:
    given = {"proposal.head.model": "x", **overrides}
    return DraftEngine(RollspecConfig.load("default", overrides=given, env={}), 4096, head)


@pytest.mark.parametrize("name", WORLDS)
def test_a_step_plans_proposes_and_counts_as_it_did(name: str) -> None:
    stored, now = json.loads(TRACE.read_text())[name], json.loads(json.dumps(play(WORLDS[name], make)))
    for n, (was, is_) in enumerate(zip(stored["steps"], now["steps"], strict=True)):
        assert is_ == was, f"step {n}"
    tuning, known = now.pop("tuning"), stored.pop("tuning")
    assert now == stored
    assert tuning.keys() == known.keys()
    for part, sums in tuning.items():
        assert sums == pytest.approx(known[part], rel=1e-4), part


if __name__ == "__main__":
    TRACE.write_text(json.dumps({name: play(world, make) for name, world in WORLDS.items()}, indent=0) + "\n")
