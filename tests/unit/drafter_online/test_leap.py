"""Leap+Verify: versions are extrapolated, and not after one that was rolled back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from drafter_online.leap import Leap  # noqa: E402
from drafter_online.recipes import RECIPES  # noqa: E402
from drafter_online.versions import Versions  # noqa: E402


def weights(value: float) -> dict[str, Any]:
    return {"w": torch.full((2,), value), "d2t": torch.tensor([int(value)])}


def test_a_version_is_ahead_by_what_changed_since_the_last_one(tmp_path: Path) -> None:
    store, leap = Versions(tmp_path), Leap(RECIPES["leap"]["leap"])
    out, leapt = leap.ahead(weights(1.0), store)
    assert out["w"].tolist() == [1.0, 1.0] and not leapt, "nothing to extrapolate from"
    out, leapt = leap.ahead(weights(1.5), store)
    assert out["w"].tolist() == [2.0, 2.0] and leapt and out["d2t"].tolist() == [1], "w + 1 (w - w')"
    out, _ = leap.ahead(weights(1.75), store)
    assert out["w"].tolist() == [2.0, 2.0], "from what was trained, not from what was published"


def test_after_a_rollback_what_was_trained_is_published_as_it_is(tmp_path: Path) -> None:
    store, leap = Versions(tmp_path), Leap(2.0)
    leap.ahead(weights(1.0), store)
    out, _ = leap.ahead(weights(2.0), store)
    assert out["w"].tolist() == [4.0, 4.0]
    leap.last = store.publish(out, {}, base="b", target_version=0)
    store.record(leap.last, "rolled_back")
    out, leapt = leap.ahead(weights(3.0), store)
    assert out["w"].tolist() == [3.0, 3.0] and not leapt
    out, leapt = leap.ahead(weights(4.0), store)
    assert out["w"].tolist() == [6.0, 6.0] and leapt


def test_without_it_versions_are_what_was_trained(tmp_path: Path) -> None:
    leap = Leap(0.0)
    for value in (1.0, 2.0):
        assert leap.ahead(weights(value), Versions(tmp_path))[0]["w"].tolist() == [value, value]


def test_a_trainer_publishes_it(tiny_target: Path, tmp_path: Path) -> None:
    pytest.importorskip("speculators")
    from drafter_target import filled, head

    from drafter_online.model import Eagle3
    from drafter_online.trainer import DrafterTraining, Trainer

    settings = DrafterTraining(leap=1.0, batch_tokens=96, window_tokens=48, learning_rate=3e-3, warmup_steps=1)
    t, store = Trainer(Eagle3(head(tiny_target)), filled(tiny_target, 4), settings), Versions(tmp_path)
    trained = []
    for _ in range(2):
        assert t.micro_step().skipped is None
        trained.append({n: w.clone() for n, w in t.drafter.weights().items()})
        found = store.load(t.publish(store))
    before, now = (w["fc.weight"] for w in trained)
    torch.testing.assert_close(found.tensors["fc.weight"], 2 * now - before)
    assert found.manifest.provenance["leap"] == 1.0 and not torch.equal(now, before)
    assert torch.equal(t.drafter.weights()["fc.weight"], now), "training goes on from what was trained"
