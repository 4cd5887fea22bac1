"""Engines that follow a shared store, with stand-ins for swappers; the rule is in test_drafter_shared_canary.py."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from drafter_online.shared_canary import LEASE_SECONDS  # noqa: E402
from drafter_online.versions import Versions  # noqa: E402
from rollspec.head import follow  # noqa: E402
from rollspec.head.follow import STALL_SECONDS, Follower  # noqa: E402


class Swapper:
    """What `rollspec.head.swap.Swapper` does to the attributes that a follower reads."""

    def __init__(self) -> None:
        self.version = 0
        self.canary: Any = None
        self.last: dict[str, Any] = {}
        self.offered: tuple[Path | None, bool] | None = None
        self.refuses: str | None = None
        self._before = 0

    @property
    def busy(self) -> bool:
        return self.offered is not None or self.canary is not None

    def offer(self, folder: Path | None, canary: bool = True, back: bool = False) -> None:
        self.offered = (folder, canary)

    def withdraw(self) -> bool:
        offered, self.offered = self.offered, None
        return offered is not None

    def step(self) -> None:
        """The engine begins a step."""
        if self.offered is None:
            return
        (folder, canary), self.offered = self.offered, None
        if self.refuses is not None:
            self.last = {"refused": self.refuses}
            return
        self._before, self.version = self.version, 0 if folder is None else int(folder.name)
        if canary:
            self.canary = SimpleNamespace(seen=0)
        self.last = {"version": self.version}
        if not canary:
            self.last |= {"verdict": "promoted", "reason": "without a canary"}

    def judge(self, verdict: str) -> None:
        self.canary = None
        if verdict == "rolled_back":
            self.version = self._before
        self.last |= {"verdict": verdict, "reason": "because"}


class Fleet:
    def __init__(self, folder: Path, size: int) -> None:
        self.store = Versions(folder)
        self.folder = folder
        self.now = 0.0
        self.faults: list[str] = []
        self.working = True
        self.engines: dict[str, tuple[Swapper, Follower]] = {}
        for i in range(size):
            self.join(str(i))

    def join(self, name: str) -> Swapper:
        s = Swapper()
        f = Follower(s, self.folder, lambda: self.working, self.faults.append, name, lambda: self.now)
        self.engines[name] = (s, f)
        return s

    def publish(self) -> int:
        return self.store.publish({"w": torch.ones(2)}, {}, base="b", target_version=1)

    def pass_(self, seconds: float = 1.0) -> None:
        while seconds > 0:
            self.now += 1.0
            seconds -= 1.0
            for s, f in self.engines.values():
                f.tick()
                s.step()

    @property
    def versions(self) -> list[int]:
        return [s.version for s, _ in self.engines.values()]

    @property
    def trying(self) -> list[str]:
        return [name for name, (s, _) in self.engines.items() if s.canary is not None]


def test_an_engine_without_a_step_is_offered_what_was_promoted_since(tmp_path: Path) -> None:
    """The store keeps four versions and the promoted one: what was promoted before that goes."""
    fleet = Fleet(tmp_path, 1)
    idle, follower = fleet.join("idle"), fleet.engines["idle"][1]
    del fleet.engines["idle"]  # it looks into the store, and takes no step
    numbers = []
    for _ in range(2):
        for _ in range(5):
            numbers.append(fleet.publish())
        fleet.pass_(2)
        fleet.engines["0"][0].judge("promoted")
        fleet.pass_(2)
        follower.tick()
        follower.tick()
    fleet.publish()
    assert fleet.versions == [numbers[-1]] and numbers[4] not in fleet.store.numbers()
    assert idle.offered is not None and idle.offered[0] == fleet.store.path(numbers[-1])
    idle.step()
    follower.tick()
    assert idle.version == numbers[-1] and follower.counts["taken"] == 1 and follower.counts["unusable"] == 0


def test_one_engine_tries_and_the_rest_take_what_it_keeps(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 4)
    n = fleet.publish()
    fleet.pass_(5)
    assert fleet.trying == ["0"] and fleet.versions == [n, 0, 0, 0]
    fleet.engines["0"][0].judge("promoted")
    fleet.pass_(3)
    assert fleet.versions == [n] * 4 and fleet.trying == []
    assert [f.counts["tried"] for _, f in fleet.engines.values()] == [1, 0, 0, 0]
    assert [f.counts["taken"] for _, f in fleet.engines.values()] == [0, 1, 1, 1]
    assert fleet.join("late").version == 0
    fleet.pass_(3)
    assert fleet.versions == [n] * 5 and fleet.faults == []
    assert fleet.engines["late"][1].info() == {
        "replica": "late", "action": "none", "version": None, "reason": "",
        "tried": 0, "taken": 1, "back": 0, "given_back": 0, "unusable": 0,
    }  # fmt: skip


def test_what_one_engine_takes_back_reaches_no_other(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 3)
    good = fleet.publish()
    fleet.pass_(3)
    fleet.engines["0"][0].judge("promoted")
    fleet.pass_(3)
    fleet.publish()
    fleet.pass_(3)
    [name] = fleet.trying
    fleet.engines[name][0].judge("rolled_back")
    fleet.pass_(5)
    assert fleet.versions == [good] * 3 and fleet.trying == []
    assert fleet.store.promoted() == good


def test_engines_go_back_from_what_an_operator_took_back(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2)
    n = fleet.publish()
    fleet.pass_(2)
    fleet.engines["0"][0].judge("promoted")
    fleet.pass_(3)
    fleet.store.record(n, "rolled_back", "by hand")
    fleet.pass_(3)
    assert fleet.versions == [0, 0] and [f.counts["back"] for _, f in fleet.engines.values()] == [1, 1]


def test_an_engine_that_dies_in_a_canary_is_followed_by_another(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 3)
    n = fleet.publish()
    fleet.pass_(2)
    [dead] = fleet.trying
    del fleet.engines[dead]
    fleet.pass_(LEASE_SECONDS - 3)
    assert fleet.trying == []
    fleet.pass_(6)
    [next_] = fleet.trying
    fleet.engines[next_][0].judge("promoted")
    fleet.pass_(3)
    assert fleet.versions == [n, n]


def test_an_engine_without_traffic_gives_its_canary_back_and_does_not_ask_for_one(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2)
    fleet.working = False
    n = fleet.publish()
    fleet.pass_(5)
    assert fleet.trying == [] and fleet.engines["0"][1].info()["reason"] == "no replica tries it yet"
    fleet.working = True
    fleet.pass_(2)
    assert fleet.trying == ["0"]
    for _ in range(3):  # as long as drafts are scored it keeps the canary
        fleet.engines["0"][0].canary.seen += 1
        fleet.pass_(STALL_SECONDS - 5)
    assert fleet.trying == ["0"]
    fleet.pass_(10)
    assert fleet.trying == ["0", "1"] and fleet.engines["0"][1].counts["given_back"] == 1
    fleet.engines["1"][0].judge("promoted")
    fleet.pass_(2)
    fleet.engines["0"][0].judge("promoted")
    fleet.pass_(2)
    assert fleet.versions == [n, n] and fleet.faults == []


def test_a_version_that_cannot_be_loaded_is_refused_for_all_by_who_tries_it(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2)
    n = fleet.publish()
    fleet.engines["0"][0].refuses = "rollspec: version 1 is refused: it is for another target."
    fleet.pass_(5)
    assert fleet.versions == [0, 0] and fleet.trying == []
    assert [(e.version, e.verdict) for e in fleet.store.events()] == [(n, "refused")]


def test_one_engine_that_cannot_load_what_is_good_stays_alone_with_that(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2)
    n = fleet.publish()
    fleet.pass_(2)
    fleet.engines["0"][0].judge("promoted")
    s, f = fleet.engines["1"]
    s.refuses = "rollspec: it cannot be read"
    fleet.pass_(10)
    assert fleet.versions == [n, 0] and f.counts["unusable"] == 1
    s.refuses = None
    m = fleet.publish()
    fleet.pass_(2)
    fleet.engines[fleet.trying[0]][0].judge("promoted")
    fleet.pass_(3)
    assert fleet.versions == [m, m]


def test_a_swap_that_is_being_taken_up_is_not_mistaken_for_one_that_is_over(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 1)
    fleet.publish()
    s, f = fleet.engines["0"]
    f.tick()
    offered, s.offered = s.offered, None  # the engine's thread has it, and has not begun
    assert not s.busy
    f.tick()
    assert fleet.store.events() == []
    s.offered = offered
    s.step()
    s.canary = None  # and here the verdict is about to be written
    f.tick()
    assert fleet.store.events() == []
    s.judge("promoted")
    f.tick()
    assert [e.verdict for e in fleet.store.events()] == ["promoted"]


def test_a_store_that_fails_costs_the_versions_not_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(tmp_path, 1)
    n = fleet.publish()

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as m:
        m.setattr("drafter_online.versions.Versions.numbers", broken)
        fleet.pass_(3)
    assert len(fleet.faults) == 3 and "Input/output" in fleet.faults[0]
    fleet.pass_(2)
    assert fleet.versions == [n]


def test_the_thread_begins_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.01)
    fleet = Fleet(tmp_path, 0)
    s = Swapper()
    n = fleet.publish()
    f = Follower(s, tmp_path, lambda: True, fleet.faults.append)
    f.start()
    for _ in range(500):
        if s.offered is not None:
            break
        time.sleep(0.01)
    assert s.offered == (fleet.store.path(n), True)
    f.stop()
    assert f._thread is not None
    f._thread.join(20)
    other = Follower(Swapper(), tmp_path, lambda: True, fleet.faults.append)
    other.tick()
    assert other.counts["tried"] == 1, "who left gave the canary back"


def test_a_version_that_an_idle_engine_has_not_taken_up_makes_way_for_a_newer_one(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 1)
    s, f = fleet.engines["0"]
    fleet.publish()
    f.tick()
    assert s.offered is not None and f.counts["tried"] == 1
    fleet.working = False
    f.tick()
    assert s.offered is None and f.counts["given_back"] == 1
    newest = [fleet.publish() for _ in range(6)][-1]  # retention drops the first one
    f.tick()
    assert s.offered is None, "it has no traffic to judge by"
    fleet.working = True
    fleet.pass_(2)
    assert fleet.versions == [newest] and fleet.faults == [] and f.counts["unusable"] == 0
