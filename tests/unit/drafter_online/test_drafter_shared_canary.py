"""The staggered canary: replicas that share a store of versions, each on a clock of its own, and in processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_online.errors import VersionError
from drafter_online.shared_canary import Decision, SharedCanary
from drafter_online.versions import Versions

LEASE = 10.0


class Fleet:
    """Replicas by name, each with a clock that starts somewhere else."""

    def __init__(self, folder: Path) -> None:
        self.store = Versions(folder, keep=8)
        self.now = 0.0

    def publish(self) -> int:
        return self.store.publish({"w": torch.ones(2)}, {}, base="b", target_version=1)

    def join(self, name: str, offset: float = 0.0) -> SharedCanary:
        return SharedCanary(self.store, name, lease_seconds=LEASE, clock=lambda: self.now + offset)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path / "versions")


def test_one_tries_and_the_others_wait_for_its_verdict(fleet: Fleet) -> None:
    a, b, c = fleet.join("a"), fleet.join("b", 1e6), fleet.join("c", -50.0)
    assert [r.decide(0).action for r in (a, b, c)] == ["none"] * 3
    n = fleet.publish()
    assert a.decide(0) == Decision("try", n)
    assert b.decide(0) == Decision("wait", n, "replica a tries it") and c.decide(0).action == "wait"
    assert a.decide(n).action == "try" and a.beat()
    assert a.conclude("promoted", "better", drafts=64) == "promoted"
    assert b.decide(0) == c.decide(0) == Decision("take", n)
    assert a.decide(n).action == "none" and b.decide(n).action == "none"
    assert fleet.store.promoted() == n
    event = fleet.store.events()[0]
    assert event.reason == "better" and event.facts == {"replica": "a", "drafts": 64}


def test_what_was_rolled_back_by_one_is_tried_by_no_other(fleet: Fleet) -> None:
    a, b = fleet.join("a"), fleet.join("b")
    first = fleet.publish()
    a.decide(0)
    assert a.conclude("rolled_back", "worse") == "rolled_back"
    assert a.decide(0).action == b.decide(0).action == "none"
    second = fleet.publish()
    assert b.decide(0) == Decision("try", second) and a.decide(0).action == "wait"
    assert first in {e.version for e in fleet.store.events()}


def test_a_replica_that_dies_is_followed_by_the_next_when_its_lease_is_over(fleet: Fleet) -> None:
    a, b, c = fleet.join("a"), fleet.join("b"), fleet.join("c", 500.0)
    n = fleet.publish()
    a.decide(0)
    assert b.decide(0).action == "wait"
    for _ in range(5):  # as long as it lives it keeps the canary, however long that takes
        fleet.now += 0.9 * LEASE
        assert a.beat() and b.decide(0).action == "wait" and c.decide(0).action == "wait"
    fleet.now += 0.9 * LEASE  # a is dead from here on
    late = fleet.join("late")
    assert b.decide(0).action == "wait" and late.decide(0).action == "wait"
    fleet.now += 0.2 * LEASE
    assert late.decide(0).action == "wait", "it has seen the beat stand still for a moment only"
    assert b.decide(0) == Decision("try", n)
    assert c.decide(0) == Decision("wait", n, "replica b tries it")
    b.conclude("promoted")
    assert c.decide(0).action == late.decide(0).action == "take"


def test_who_joins_while_a_canary_runs_waits_and_who_joins_after_it_takes(fleet: Fleet) -> None:
    a = fleet.join("a")
    one = fleet.publish()
    a.decide(0)
    early = fleet.join("early")
    assert early.decide(0).action == "wait"
    a.conclude("promoted")
    two = fleet.publish()
    assert a.decide(one) == Decision("try", two)
    assert early.decide(0) == fleet.join("new").decide(0) == Decision("take", one), "what is good already, first"
    assert early.decide(one).action == "wait"


def test_who_leaves_gives_its_canary_back_at_once(fleet: Fleet) -> None:
    a, b = fleet.join("a"), fleet.join("b")
    n = fleet.publish()
    a.decide(0)
    assert b.decide(0).action == "wait"
    a.release()
    assert a.trying is None and b.decide(0) == Decision("try", n)
    for _ in range(5):  # given back is not died
        b.release()
        assert b.decide(0) == Decision("try", n)


def test_a_replica_that_was_thought_dead_may_still_stop_a_version(fleet: Fleet) -> None:
    a, b, c = fleet.join("a"), fleet.join("b"), fleet.join("c")
    good = fleet.publish()
    a.decide(0)
    a.conclude("promoted")
    n = fleet.publish()
    a.decide(good), b.decide(good)
    fleet.now += LEASE
    assert b.decide(good) == Decision("try", n)
    assert not a.beat(), "another tries it by now"
    assert b.conclude("promoted") == "promoted"
    assert c.decide(good) == Decision("take", n)
    assert a.conclude("rolled_back", "worse here") == "rolled_back"
    assert b.decide(n) == c.decide(n) == Decision("back", good, f"version {n} was rolled back elsewhere")
    assert fleet.join("d").decide(0) == Decision("take", good)
    assert fleet.store.promoted() == good


def test_a_late_promotion_does_not_bring_back_what_was_rolled_back(fleet: Fleet) -> None:
    a, b = fleet.join("a"), fleet.join("b")
    n = fleet.publish()
    a.decide(0), b.decide(0)
    fleet.now += LEASE
    b.decide(0)
    b.conclude("rolled_back", "worse")
    assert a.conclude("promoted", "better") == "rolled_back", "the worse of the two counts"
    assert a.decide(n) == Decision("back", None, f"version {n} was rolled back elsewhere")
    assert fleet.store.promoted() is None and fleet.store.candidate() is None


def test_an_operator_decides_over_replicas(fleet: Fleet) -> None:
    a, b = fleet.join("a"), fleet.join("b")
    n = fleet.publish()
    a.decide(0)
    fleet.store.record(n, "promoted", "by hand")
    assert b.decide(0) == Decision("take", n), "without waiting"
    fleet.store.record(n, "rolled_back", "by hand")
    assert b.decide(n).action == "back" and a.decide(n).action == "back"


def test_a_version_that_kills_who_tries_it_is_refused(fleet: Fleet) -> None:
    n = fleet.publish()
    alive = [fleet.join(str(i)) for i in range(6)]
    for _ in range(100):
        fleet.now += 1.0
        for r in list(alive):
            if r.decide(0).action == "try":
                alive.remove(r)
    assert len(alive) == 3 and all(r.decide(0) == Decision("none") for r in alive)
    events = fleet.store.events()
    assert {(e.version, e.verdict) for e in events} == {(n, "refused")} and "3 replicas died" in events[0].reason
    assert alive[0].decide(0, willing=False).action == "none"


def test_a_replica_without_traffic_leaves_the_canary_to_another(fleet: Fleet) -> None:
    idle, busy = fleet.join("idle"), fleet.join("busy")
    n = fleet.publish()
    assert idle.decide(0, willing=False) == Decision("wait", n, "no replica tries it yet")
    assert busy.decide(0).action == "try"


def test_a_replica_that_starts_again_under_its_name_does_not_resume_its_old_canary(fleet: Fleet) -> None:
    n = fleet.publish()
    fleet.join("a").decide(0)
    again = fleet.join("a")
    assert again.decide(0).action == "wait" and not again.beat()
    fleet.now += LEASE
    assert again.decide(0) == Decision("try", n)


def test_a_newer_version_is_tried_after_the_one_on_canary(fleet: Fleet) -> None:
    a, b = fleet.join("a"), fleet.join("b")
    one = fleet.publish()
    a.decide(0)
    two = fleet.publish()
    assert b.decide(0) == Decision("wait", one, "replica a tries it")
    fleet.now += LEASE  # a dies: nobody needs its verdict when there is something newer
    assert b.decide(0) == Decision("try", two)


def test_retention_keeps_a_version_on_canary(fleet: Fleet) -> None:
    """Others publish meanwhile; whoever follows must find it, and its verdict must count."""
    fleet.store.keep = 1
    a, b = fleet.join("a"), fleet.join("b")
    one = fleet.publish()
    a.decide(0)
    for _ in range(3):
        last = fleet.publish()
        assert fleet.store.numbers() == [one, last] and a.beat(), "one, and the newest"
    a.conclude("promoted")
    assert b.decide(0) == Decision("take", one)
    fleet.publish()
    fleet.publish()
    assert one in fleet.store.numbers(), "it is promoted by now"
    b.decide(one)
    two = b.trying
    assert two is not None
    b.release()
    fleet.publish()
    assert not fleet.store.path(two).exists(), "its canary was given up"


def test_a_claim_that_was_abandoned_keeps_its_version_for_an_hour(fleet: Fleet) -> None:
    fleet.store.keep = 1
    one = fleet.publish()
    fleet.join("a").decide(0)  # and dies
    claim = fleet.store.path(one) / "canary-0.json"
    long_ago = time.time() - 3601
    os.utime(claim, (long_ago, long_ago))
    fleet.publish()
    assert not fleet.store.path(one).exists()


def test_a_version_may_be_deleted_while_it_is_on_canary(fleet: Fleet) -> None:
    a = fleet.join("a")
    one = fleet.publish()
    a.decide(0)
    two = fleet.publish()
    shutil.rmtree(fleet.store.path(one))
    assert not a.beat() and a.trying is None
    assert a.decide(0) == Decision("try", two)
    shutil.rmtree(fleet.store.path(two))
    assert a.conclude("promoted") == "promoted"
    assert not fleet.store.path(two).exists(), "a verdict does not make half a version"
    three = fleet.publish()
    assert three == 1, "a store that lost all begins anew"
    assert a.decide(0).action == "try"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"beat": "x"}', "\x00" * 9])
def test_a_damaged_claim_is_somebodys_until_its_lease_is_over(fleet: Fleet, text: str) -> None:
    n = fleet.publish()
    (fleet.store.path(n) / "canary-0.json").write_text(text)
    (fleet.store.path(n) / "verdict-0.json").write_text(text)
    (fleet.store.path(n) / "canary-x.json").write_text("{}")
    a = fleet.join("a")
    assert a.decide(0).action == "wait"
    fleet.now += LEASE
    assert a.decide(0) == Decision("try", n)


def test_what_cannot_be_used_or_written_is_one_sentence(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    a = fleet.join("a")
    with pytest.raises(VersionError, match="no canary"):
        a.conclude("promoted")
    fleet.publish()
    a.decide(0)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("drafter_online.files.write_synced", full)
    assert a.beat(), "one beat may be missed"
    with pytest.raises(VersionError, match="No space left"):
        a.conclude("promoted")
    assert fleet.join("b").decide(0).action == "wait", "the canary lapses"


def race(folder: str, name: str, start: Any, won: Any) -> None:
    replica = SharedCanary(Versions(folder), name)
    start.wait(20)
    won.put((name, [replica.decide(n - 1).action for n in Versions(folder).numbers()]))


def test_of_processes_that_race_exactly_one_tries(fleet: Fleet) -> None:
    n = fleet.publish()
    context = multiprocessing.get_context("fork")
    start, won = context.Event(), context.Queue()
    processes = [context.Process(target=race, args=(str(fleet.store.folder), str(i), start, won)) for i in range(8)]
    for p in processes:
        p.start()
    start.set()
    actions = dict(won.get(timeout=30) for _ in processes)
    for p in processes:
        p.join(20)
    assert sorted(a for row in actions.values() for a in row) == ["try"] + ["wait"] * 7
    winner = next(name for name, row in actions.items() if row == ["try"])
    assert json.loads((fleet.store.path(n) / "canary-0.json").read_text())["replica"] == winner


def live(folder: str, name: str, log: Any, slow: bool) -> None:
    """A replica as a process: it looks, tries for 0.2 s (or for ever), takes."""
    replica, running = SharedCanary(Versions(folder), name, lease_seconds=3.0), 0
    while running < 2:
        d = replica.decide(running)
        if d.action == "try":
            log.put((name, "try", d.version))
            until = time.monotonic() + (1e6 if slow else 0.2)
            while time.monotonic() < until:
                replica.beat()
                time.sleep(0.05)
            replica.conclude("promoted")
            running = d.version or 0
        elif d.action in ("take", "back"):
            running = d.version or 0
        time.sleep(0.05)
    log.put((name, "runs", running))


def test_a_process_that_is_killed_in_a_canary_is_followed_by_another_and_one_that_joins_later(fleet: Fleet) -> None:
    n = fleet.publish()
    context = multiprocessing.get_context("fork")
    log = context.Queue()

    def start(name: str, slow: bool = False) -> Any:
        p = context.Process(target=live, args=(str(fleet.store.folder), name, log, slow), daemon=True)
        p.start()
        return p

    doomed = start("doomed", slow=True)
    assert log.get(timeout=30) == ("doomed", "try", n)
    others = [start(str(i)) for i in range(3)]
    time.sleep(4.0)
    assert fleet.store.events() == [], "as long as it lives the others wait"
    doomed.kill()
    doomed.join(10)
    name, action, version = log.get(timeout=60)
    assert (action, version) == ("try", n) and name != "doomed"
    others.append(start("late"))
    deadline = time.monotonic() + 30
    while not fleet.store.promoted() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert fleet.store.promoted() == n
    m = fleet.publish()
    done = [log.get(timeout=30) for _ in range(5)]
    assert sorted(d for d in done if d[1] == "runs") == [(x, "runs", m) for x in ("0", "1", "2", "late")]
    for p in others:
        p.join(10)
