"""What the tuner and the drafters learned is kept with the job."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from step_world import random_texts, rollout

from rollspec import RollspecConfig
from rollspec.errors import HistoryError
from rollspec.step import DraftEngine
from rollspec.tuning import store

pytestmark = pytest.mark.usefixtures("steady_clock")

MACHINE = {"device": "cpu x2", "layers": 4}


def tuning_state() -> dict[str, Any]:
    p = DraftEngine(RollspecConfig.load("default", env={}), 4096)
    rollout(p, random_texts(4, 200, 4))
    return p.tuning_state()


def test_what_was_learned_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: 1e-6 * next(ticks))  # the tuner counts its own time
    first = DraftEngine(RollspecConfig.load("default", env={}), 4096)
    rollout(first, random_texts(4, 300, 1))  # all drafts are accepted: no two arms are alike
    store.save(tmp_path, first.tuning_state(), MACHINE)
    found, problem = store.load(tmp_path, MACHINE)
    assert found is not None and problem is None
    again = DraftEngine(RollspecConfig.load("default", env={}), 4096)
    again.restore_tuning(found)
    then, now = (p.tuner.cost.seconds(20) for p in (first, again))
    assert now == pytest.approx(then, rel=0.05)
    assert again.tuning_state()["confidence"] == first.tuning_state()["confidence"]
    assert again.tuner.plan(4, 0.0).k == first.tuner.plan(4, 0.0).k


def test_another_machine_keeps_the_calibration_and_drops_the_costs(tmp_path: Path) -> None:
    store.save(tmp_path, tuning_state(), MACHINE)
    found, problem = store.load(tmp_path, MACHINE | {"device": "cpu x64"})
    assert found is not None and "tuner" not in found and found["confidence"]
    assert problem is not None and "device = 'cpu x2' and this is 'cpu x64'" in problem
    p = DraftEngine(RollspecConfig.load("default", env={}), 4096)
    p.restore_tuning(found)
    assert not p.tuner.cost.fitted


def test_other_arms_keep_the_costs(tmp_path: Path) -> None:
    p = DraftEngine(RollspecConfig.load("default", overrides={"proposal.k_max": 4}, env={}), 4096)
    p.restore_tuning(tuning_state())
    assert p.tuner.cost.fitted


@pytest.mark.parametrize("damage", ["truncated", "altered", "format", "not json", "numbers"])
def test_a_damaged_file_is_refused_and_set_aside(tmp_path: Path, damage: str) -> None:
    good = tuning_state()
    path = store.save(tmp_path, good, MACHINE)
    text = path.read_text()
    if damage == "numbers":
        good["confidence"]["group"]["accepted"][0] = -5.0
        store.save(tmp_path, good, MACHINE)
        found, _ = store.load(tmp_path, MACHINE)
        with pytest.raises(ValueError, match="numbers that cannot be"):
            DraftEngine(RollspecConfig.load("default", env={}), 4096).restore_tuning(found or {})
        return
    outer = json.loads(text)
    outer["body"] = outer["body"].replace("1", "2")
    path.write_text(
        {
            "truncated": text[:-9],
            "altered": json.dumps(outer),
            "format": text.replace(store.FORMAT, "other-1"),
            "not json": "[]",
        }[damage]
    )
    with pytest.raises(HistoryError, match="is refused") as e:
        store.load(tmp_path, MACHINE)
    assert str(tmp_path) in str(e.value) and list(tmp_path.glob("*.corrupt")) and not path.exists()
    assert store.load(tmp_path, MACHINE) == (None, None)


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryError, match="cannot be written"):
        store.save(tmp_path / "file" / "sub", {}, MACHINE)
