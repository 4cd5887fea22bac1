"""Two engines and one store: one tries a version, the other takes it; both go back; tokens stay what they are."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from engines import build, call, close, generate, promote_all
from heads import random_head, random_weights

pytest.importorskip("speculators")
pytestmark = pytest.mark.engine


def test_one_engine_tries_and_the_other_takes(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    from drafter_online.architecture import base_of, target_config
    from drafter_online.versions import Versions

    store = Versions(tmp_path / "versions")
    options: dict[str, Any] = {
        "proposal.drafters": ["eagle3"],
        "proposal.learned.model": str(random_head(tmp_path / "head", model)),
        "proposal.learned.k_max": 2,
        "proposal.learned.canary_drafts": 8,
        "proposal.budget.policy": "fixed",
        "tuning.policy": "static",
        "tuning.guard.enabled": False,
        "drafter.versions": str(store.folder),
    }
    engines: list[Any] = []
    try:
        for _ in range(2):
            engines.append(build(model, options))
            engines[-1].collective_rpc(promote_all)  # all stay that can be run

        def infos() -> list[dict[str, Any]]:
            return [call(e, "info")["drafter"] for e in engines]

        def until(version: int, **counted: list[int]) -> list[dict[str, Any]]:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                for e in engines:
                    assert generate(e, prompts) == plain["greedy"]
                found = infos()
                # An engine counts what it took when it next looks at the store, a moment after the swap.
                counts = all(sorted(i["following"][name] for i in found) == n for name, n in counted.items())
                if counts and all(i["version"] == version and i["state"] == "settled" for i in found):
                    return found
            raise AssertionError(json.dumps(infos()))

        weights = random_weights(json.loads((model / "config.json").read_text()), seed=5)
        number = store.publish(weights, {}, base=base_of(target_config(model)), target_version=0)
        until(number, tried=[0, 1], taken=[0, 1])
        assert [(e.version, e.verdict) for e in store.events()].count((number, "promoted")) >= 1
        assert store.promoted() == number
        store.record(number, "rolled_back", "by hand")
        until(0, back=[1, 1])
        for e in engines:
            assert not call(e, "stats")["faults"]
    finally:
        for e in engines:
            close(e)
