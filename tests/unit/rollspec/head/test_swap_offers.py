"""Versions that a swapper is offered: staged, replaced by newer ones, agreed on by all ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from other_rank import Others  # noqa: E402
from swap_owner import payload, run_until, weight  # noqa: E402

from rollspec.head.ranks import Note  # noqa: E402
from rollspec.head.swap import Swapper, SwapRefusedError  # noqa: E402


def test_a_promoted_version_needs_no_second_canary(swapper: Swapper, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "7").mkdir()
    save_file({"fc.weight": torch.full((4, 4), 3.0)}, tmp_path / "7" / "model.safetensors")
    swapper.offer(tmp_path / "7", canary=False)
    run_until(swapper, lambda: not swapper.busy)
    # A numbered folder must be a version of a store, with its manifest.
    assert swapper.counts["refused"] == 1
    (tmp_path / "7").rename(tmp_path / "head")
    swapper.offer(tmp_path / "head", canary=False)
    run_until(swapper, lambda: swapper.version == 1)
    assert swapper.counts["promoted"] == 1 and swapper.canary is None


def test_ranks_swap_when_all_are_ready_and_refuse_together(swapper: Swapper) -> None:
    swapper.ranks = others = Others()
    others.other = 0
    swapper.request(payload(2.0, wait=False, canary=False))
    swapper.deployment.wait()
    for _ in range(20):
        swapper.poll()
    assert swapper.version == 0 and swapper.busy, "one rank is not ready"
    others.other = 2
    swapper.poll()
    assert swapper.version == 1 and bool((weight(swapper) == 2.0).all())
    others.other = 1
    with pytest.raises(SwapRefusedError, match="another rank"):
        swapper.request(payload(3.0, canary=False))
    assert swapper.version == 1 and bool((weight(swapper) == 2.0).all()) and swapper.counts["refused"] == 1
    others.other = 2
    swapper.request(payload(3.0, canary=False))
    assert swapper.version == 2, "and the next one goes through"
    others.other = 0  # weights lost on the other rank only: put back on both, whose KV is then read again on both
    assert not swapper.verify() and swapper.counts["resent"] == 1


def test_ranks_learn_of_offers_and_verdicts(swapper: Swapper, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    swapper.ranks = Others()
    (tmp_path / "head").mkdir()
    save_file({"fc.weight": torch.full((4, 4), 3.0)}, tmp_path / "head" / "model.safetensors")
    assert swapper.note() == Note()
    swapper.offer(tmp_path / "head")
    swapper.poll()
    assert swapper._swap is None, "the other rank does not know of it yet"
    note = swapper.note()
    assert note.kind == "swap" and str(tmp_path / "head") in note.text
    swapper.apply(note)
    run_until(swapper, lambda: swapper.version == 1)
    while swapper.note().kind == "":
        swapper.observe(2, 2)
    assert swapper.canary is not None, "nothing is concluded before the other rank knows"
    swapper.apply(swapper.note())
    assert swapper.canary is None and swapper.last["verdict"] == "promoted" and swapper.note() == Note()


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """A store with the weights v in version v."""
    from drafter_online.versions import Versions

    store = Versions(tmp_path / "store", keep=10)
    for v in range(1, 6):
        store.publish({"fc.weight": torch.full((4, 4), float(v))}, {}, base="b", target_version=0)
    return store


def staged(swapper: Swapper) -> bool:
    """The offer is taken up and staged, and no step has swapped it in."""
    swapper.poll()
    swapper.deployment.wait()
    return swapper.canary is None and swapper._swap is not None and swapper._swap.staged is not None


def test_an_idle_stretch_deploys_its_newest_version(swapper: Swapper, store: Any) -> None:
    for v in (1, 2, 3):  # no step
        swapper.offer(store.path(v))
    run_until(swapper, lambda: swapper.version != 0)
    assert swapper.version == 3 and swapper.canary is not None
    assert [e.version for e in store.events()] == []


def test_a_staged_version_is_tried_before_a_newer_one(swapper: Swapper, store: Any) -> None:
    swapper.offer(store.path(1))
    assert staged(swapper) and swapper.version == 0
    swapper.offer(store.path(2))
    swapper.offer(store.path(3))  # between any two steps a newer one: the staged one goes in all the same
    swapper.poll()
    assert swapper.version == 1 and bool((weight(swapper) == 1.0).all())
    assert swapper.counts["refused"] == 0
    while swapper.canary is not None:
        swapper.observe(2, 2)
    run_until(swapper, lambda: swapper.version == 3)
    assert bool((weight(swapper) == 3.0).all()) and [e.version for e in store.events()] == [1]


def test_what_needs_no_canary_and_what_was_asked_for_go_in_order(swapper: Swapper, store: Any) -> None:
    swapper.offer(store.path(1), canary=False)
    assert staged(swapper)
    swapper.offer(store.path(2))
    swapper.poll()
    assert swapper.version == 1
    run_until(swapper, lambda: swapper.version == 2)
    while swapper.canary is not None:
        swapper.observe(2, 2)
    swapper.request({"dir": str(store.path(3)), "canary": False})
    swapper.deployment.wait()
    swapper.offer(store.path(4))
    swapper.poll()
    assert swapper.version == 3
    run_until(swapper, lambda: swapper.version == 4)


def test_ranks_swap_what_is_staged_before_they_take_a_newer_offer(swapper: Swapper, store: Any) -> None:
    swapper.ranks = Others()
    swapper.offer(store.path(1))
    swapper.apply(swapper.note())
    swapper.offer(store.path(2))
    assert swapper.note() == Note(), "a rank may still be staging"
    run_until(swapper, lambda: swapper.version != 0)
    assert swapper.version == 1 and bool((weight(swapper) == 1.0).all())


def test_an_offered_folder_that_is_gone_is_refused(swapper: Swapper, tmp_path: Path) -> None:
    swapper.offer(tmp_path / "gone")
    assert swapper.busy
    for _ in range(2000):
        swapper.poll()
        if not swapper.busy:
            break
        time.sleep(0.01)
    assert swapper.counts["refused"] == 1 and "gone" in swapper.last["refused"]


def test_staleness_is_counted_from_the_policy_that_the_weights_were_trained_on(swapper: Swapper, store: Any) -> None:
    known = [store.publish({"fc.weight": torch.full((4, 4), 2.0)}, {}, base="b", target_version=v) for v in (2, 6, 4)]
    swapper.head.engine.version = 5
    swapper.offer(store.path(known[0]), canary=False)
    run_until(swapper, lambda: swapper.version == known[0])
    assert swapper.deployment.running.since == 2
    swapper.offer(store.path(known[1]), canary=False)
    run_until(swapper, lambda: swapper.version == known[1])
    assert swapper.deployment.running.since == 5, "none is of the future"
    for _ in range(20):
        swapper.head.acceptance.observe(2, 2)
    swapper.offer(store.path(known[2]))
    run_until(swapper, lambda: swapper.version == known[2])
    assert swapper.deployment.running.since == 4
    while swapper.canary is not None:
        swapper.observe(0, 2)
    assert swapper.version == known[1] and swapper.deployment.running.since == 5, "so it is when they are rolled back"
    swapper.request({"canary": False, "back": True})
    run_until(swapper, lambda: swapper.version == 0)
    assert swapper.deployment.running.since == 0


def test_going_back_needs_no_newer_number(swapper: Swapper, tmp_path: Path) -> None:
    from drafter_online.versions import Versions

    store = Versions(tmp_path / "store")
    for value in (2.0, 3.0):
        store.publish({"fc.weight": torch.full((4, 4), value)}, {}, base="b", target_version=0)
    swapper.offer(store.path(2), canary=False)
    run_until(swapper, lambda: swapper.version == 2)
    swapper.offer(store.path(1), canary=False)
    run_until(swapper, lambda: swapper.counts["refused"] == 1)
    swapper.request({"dir": str(store.path(1)), "canary": False, "back": True})
    run_until(swapper, lambda: swapper.version == 1)
    assert bool((weight(swapper) == 2.0).all())
    swapper.request({"canary": False, "back": True})
    run_until(swapper, lambda: swapper.version == 0)
    assert bool((weight(swapper) == 1.0).all()), "what the engine was started with"
    # Versions that were taken without a canary have one line each, however many engines take them.
    swapper.offer(store.path(2), canary=False)
    run_until(swapper, lambda: swapper.version == 2)
    assert [e.version for e in store.events()] == [2, 1]


def test_a_verdict_that_cannot_be_recorded_is_a_fault_and_no_more(
    swapper: Swapper, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drafter_online.errors import VersionError

    def full(*_: Any, **__: Any) -> None:
        raise VersionError("the disk is full.")

    monkeypatch.setattr("drafter_online.versions.Versions.record", full)
    swapper.offer(store.path(1), canary=False)
    run_until(swapper, lambda: swapper.version == 1)
    assert swapper.head.faults == ["drafter versions: the disk is full."] and swapper.counts["promoted"] == 1


def test_the_engine_says_where_a_version_is(swapper: Swapper, store: Any) -> None:
    assert swapper.info()["state"] == "settled" and not swapper.head.engine.canary_runs
    swapper.offer(store.path(1))
    assert staged(swapper) and swapper.info()["state"] in ("staging", "staged")
    swapper.poll()
    assert swapper.info()["state"] == "canary" and swapper.head.engine.canary_runs
    while swapper.canary is not None:
        swapper.observe(2, 2)
    assert swapper.info()["state"] == "settled" and not swapper.head.engine.canary_runs
    swapper.head.asleep = True
    first, second = ({"dir": str(store.path(v)), "canary": False} for v in (2, 3))
    swapper.request(first)
    assert swapper.info()["state"] == "deferred"
    swapper.poll()  # a step that only reports ended requests
    assert swapper.info()["state"] == "deferred" and swapper.request(second)["deferred"], "of two, the later"
    swapper.head.asleep = False
    run_until(swapper, lambda: swapper.version == 3)
    assert swapper.counts["refused"] == 0
