from __future__ import annotations

import errno
import functools
import json
import multiprocessing
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from killed import die, killed, killing

from drafter_online import versions as module
from drafter_online.engines import ConnectedEngine, Engines, Hello, VersionVerdict
from drafter_online.errors import VersionError
from drafter_online.fetch import Fetch, piece
from drafter_online.release import Release
from drafter_online.versions import MANIFEST, MODEL, Versions

BASE = "qwen3-l4-h8"


def weights(seed: int = 0, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"fc.weight": torch.randn(8, 24, generator=g).bfloat16(), "d2t": torch.arange(5), **more}


def publish(store: Versions, seed: int = 0, **kw: Any) -> int:
    return store.publish(weights(seed), {"a": 1}, **{"base": BASE, "target_version": 3, **kw})


def test_what_is_published_is_loaded(tmp_path: Path) -> None:
    store = Versions(tmp_path / "store")
    assert store.latest() is None and store.numbers() == []
    n = publish(store, provenance={"steps": 7})
    v = store.load(n, base=BASE, newer_than=0)
    assert n == v.number == 1 and v.config == {"a": 1} and v.manifest.provenance == {"steps": 7}
    assert all(torch.equal(t, weights()[k]) and t.dtype == weights()[k].dtype for k, t in v.tensors.items())
    assert v.manifest.target_version == 3 and v.manifest.tensors["fc.weight"] == ["bfloat16", [8, 24]]
    assert sorted(p.name for p in store.path(1).iterdir()) == ["config.json", MANIFEST, MODEL]


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flip":
        data[-3] ^= 4
        path.write_bytes(data)
    elif how == "delete":
        path.unlink()
    else:
        path.write_bytes(b"")


@pytest.mark.parametrize("name", [MODEL, "config.json", MANIFEST])
@pytest.mark.parametrize("how", ["truncate", "flip", "delete", "empty"])
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, how: str) -> None:
    store = Versions(tmp_path)
    damage(store.path(publish(store)) / name, how)
    with pytest.raises(VersionError, match=r"version 1 is (refused|not in)"):
        store.load(1)


def remanifest(store: Versions, n: int, **change: Any) -> None:
    """Change a manifest and make its checksum right again."""
    path = store.path(n) / MANIFEST
    data = {**json.loads(path.read_text()), **change}
    del data["checksum"], data["format"]
    path.write_text(json.dumps({"format": module.FORMAT, **data, "checksum": module.digest(data)}))


def test_what_does_not_fit_is_refused_in_one_sentence(tmp_path: Path) -> None:
    store = Versions(tmp_path)
    n = publish(store)
    for kw, says in (
        ({"base": "llama"}, "for the target 'qwen3-l4-h8', not 'llama'"),
        ({"newer_than": 1}, "not newer than version 1"),
        ({"newer_than": 9}, "not newer than version 9"),
    ):
        with pytest.raises(VersionError, match=says) as e:
            store.load(n, **kw)  # type: ignore[arg-type]
        assert str(e.value).count(". ") == 0
    with pytest.raises(VersionError, match=r"version 5 is not in .*it has \[1\]"):
        store.load(5)
    remanifest(store, n, files={})
    with pytest.raises(VersionError, match=r"model\.safetensors does not match its checksum"):
        store.load(n)
    remanifest(store, n, version=4)
    with pytest.raises(VersionError, match="manifest is that of version 4"):
        store.load(n)


def test_non_finite_and_the_targets_own_weights_are_neither_published_nor_loaded(tmp_path: Path) -> None:
    store = Versions(tmp_path)
    bad = {"fc.weight": torch.full((2, 2), float("nan"))}
    shared = weights(**{"embed_tokens.weight": torch.ones(2, 2)})
    for tensors, says in (
        (bad, "NaN or infinity"),
        (shared, "embed_tokens.weight belongs to the target"),
        ({}, "without"),
    ):
        with pytest.raises(VersionError, match=says):
            store.publish(tensors, {}, base=BASE, target_version=0)
    assert store.numbers() == [] and list(tmp_path.iterdir()) == []
    # A draft model's embedding is its own.
    n = store.publish(shared, {}, base=BASE, target_version=0, kind="draft_model")
    store.load(n)
    remanifest(store, n, kind="eagle3")
    with pytest.raises(VersionError, match=r"version 1 is refused: embed_tokens\.weight belongs to the target"):
        store.load(n)


def test_retention_keeps_the_newest_and_the_promoted(tmp_path: Path) -> None:
    store = Versions(tmp_path, keep=2)
    for seed in range(3):
        publish(store, seed)
    store.record(2, "promoted")
    for seed in range(3):
        publish(store, seed)
    assert store.numbers() == [2, 5, 6] and store.promoted() == 2
    assert not list(tmp_path.glob(".publish*"))


@pytest.mark.parametrize("restarted", [False, True])
def test_retention_keeps_the_version_on_canary(tmp_path: Path, restarted: bool) -> None:
    store = Versions(tmp_path, keep=2)
    release = Release(store, Engines(), lambda: publish(store), patience=60.0)
    store.record(publish(store), "promoted")
    candidate = publish(store)
    if restarted:
        release.reread()
    else:
        release.published(candidate)

    def offered() -> tuple[int, bool] | None:
        return release.offer(ConnectedEngine(Hello("engine", BASE, [])))

    assert offered() == (candidate, True)
    number = release.promote(1)  # published again under a new number: engines take nothing older than what they run
    for _ in range(3):
        assert offered() == (number, False)
        back = release.rollback(number)
        assert back is not None and back > number
        number = back
    assert store.numbers()[-2:] == [number - 1, number] and number > candidate + store.keep
    assert store.load(candidate).number == candidate
    release.published(publish(store))
    publish(store)
    assert candidate not in store.numbers(), "another one is on canary"


def test_a_verdict_on_a_version_of_the_store_before_is_none_on_this_ones(tmp_path: Path) -> None:
    """A job goes back to a checkpoint while an engine has a version on canary that the checkpoint does not know."""
    saved, store = Versions(tmp_path / "saved"), Versions(tmp_path / "store")
    for folder in (saved, store, store):
        publish(folder)
    release = Release(store, Engines(), lambda: publish(store), patience=60.0)
    candidate = release.candidate
    assert candidate == 2 and release.offer(ConnectedEngine(Hello("engine", BASE, []))) == (2, True)

    with pytest.raises(FileNotFoundError), release.replacing():
        shutil.copytree(tmp_path / "gone", store.folder)
    assert release.candidate == 2, "nothing was replaced"

    with release.replacing():
        shutil.rmtree(store.folder)
        shutil.copytree(saved.folder, store.folder)
        assert not release.judge("engine", VersionVerdict(2, "promoted"))
    assert store.events() == [] and release.current is None
    # Version 1 is not the one of that number that the engine knows, and waits for no verdict of its.
    assert release.candidate is None and not release.judge("engine", VersionVerdict(1, "promoted"))
    assert store.events() == []


def test_verdicts(tmp_path: Path) -> None:
    store = Versions(tmp_path)
    for seed in range(4):
        publish(store, seed)
    assert store.promoted() is None and store.candidate() == 4
    store.record(1, "promoted", "first")
    store.record(3, "promoted", "1.9 against 1.6")
    store.record(4, "refused", "truncated")
    assert store.promoted() == 3 and store.candidate() == 3 and store.candidate(after=3) is None
    store.record(3, "rolled_back", "acceptance fell")
    assert store.promoted() == 1 and store.candidate(after=1) == 2
    with open(tmp_path / "events.jsonl", "ab") as f:
        f.write(b'{"version": 9, "verd')  # a crash
    assert [e.verdict for e in store.events()] == ["promoted", "promoted", "refused", "rolled_back"]
    assert store.events()[1].reason == "1.9 against 1.6"


def test_two_publishers_never_share_a_number(tmp_path: Path) -> None:
    got: list[int] = []

    def work() -> None:
        store = Versions(tmp_path, keep=100)
        got.extend(publish(store, i) for i in range(12))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    store = Versions(tmp_path, keep=100)
    assert sorted(got) == list(range(1, 37)) == store.numbers()
    assert all(store.load(n).number == n for n in store.numbers())


def publish_in_a_process(folder: Path, start: Any, queue: Any) -> None:
    store = Versions(folder, keep=100)
    start.wait(60)
    queue.put([publish(store, i) for i in range(12)])


def test_two_publishing_processes_never_share_a_number(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, queue = context.Barrier(2), context.Queue()
    processes = [context.Process(target=publish_in_a_process, args=(tmp_path, start, queue)) for _ in range(2)]
    for p in processes:
        p.start()
    got = [queue.get(timeout=120) for _ in processes]
    for p in processes:
        p.join(60)
        assert p.exitcode == 0
    store = Versions(tmp_path, keep=100)
    assert sorted(got[0] + got[1]) == list(range(1, 25)) == store.numbers()
    assert all(numbers == sorted(numbers) for numbers in got)
    assert all(store.load(n).number == n for n in store.numbers()) and not list(tmp_path.glob(".publish-*"))


def test_a_deleted_store_starts_again_above_the_parent(tmp_path: Path) -> None:
    store = Versions(tmp_path / "s")
    n = publish(store)
    shutil.rmtree(store.folder)
    with pytest.raises(VersionError, match="folder does not exist"):
        store.load(n)
    assert store.latest() is None and store.events() == []
    assert publish(store, parent=n) == n + 1


@pytest.mark.parametrize("where", ["fsync", "rename"])
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    store = Versions(tmp_path)
    publish(store)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as m:
        m.setattr(module.os, where, full)
        with pytest.raises(VersionError, match=r"cannot be written to .* \(No space left on device\)"):
            publish(store)
        if where == "fsync":
            with pytest.raises(VersionError, match="verdict 'promoted' on version 1"):
                store.record(1, "promoted")
    assert store.numbers() == [1] and not list(tmp_path.glob(".publish*"))
    store.load(1)
    assert publish(store) == 2


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    with pytest.raises(VersionError, match="cannot be written"):
        publish(Versions(tmp_path / "store"))


WRITES = 5
"""Of the weights, the configuration, the manifest, the folder to disk, and the rename."""


@pytest.mark.parametrize("writes", range(WRITES + 1))
def test_a_publisher_killed_at_any_write_leaves_a_whole_version_or_none(tmp_path: Path, writes: int) -> None:
    store = Versions(tmp_path)
    publish(store)

    def publishes() -> None:
        counted = killing(writes)
        module.write_synced, module.sync_folder = counted(module.write_synced), counted(module.sync_folder)
        os.rename = counted(os.rename)
        publish(store, seed=1)

    assert killed(publishes)  # after the last of these writes: by the folder's second sync
    left = [p for p in tmp_path.iterdir() if p.name.startswith(".publish")]
    assert len(left) == (writes < WRITES)
    after = Versions(tmp_path)
    assert after.numbers() == ([1] if writes < WRITES else [1, 2])
    for number in after.numbers():
        assert torch.equal(after.load(number).tensors["fc.weight"], weights(number - 1)["fc.weight"])
    for folder in left:
        os.utime(folder, (then := time.time() - 2 * module.STALE_SECONDS, then))
    assert publish(after, seed=2) == after.numbers()[-1] == 2 + (writes == WRITES)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{n:08d}" for n in after.numbers()], "nothing is left over"


def test_an_engine_killed_in_a_fetch_serves_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before the fetch is whole, whichever piece was the last; and the engine after it fetches it again."""
    monkeypatch.setattr("drafter_online.fetch.CHUNK", 64)
    store, here = Versions(tmp_path / "store"), tmp_path / "engine"
    number = publish(store)
    manifest = (store.path(number) / MANIFEST).read_bytes()

    def fetched(most: int | None = None) -> Fetch:
        fetch, pieces = Fetch(manifest, here), 0
        while (ask := fetch.wants()) is not None:
            if pieces == most:
                die()
            assert fetch.take(piece(store, ask))
            pieces += 1
        return fetch

    size = sum((store.path(number) / name).stat().st_size for name in (MODEL, "config.json"))
    for most in range(size // 64):
        assert killed(functools.partial(fetched, most))
        with pytest.raises(VersionError, match=rf"version {number} is (refused|not in)"):
            Versions(here).load(number)
    assert fetched().path == Versions(here).path(number)
    assert torch.equal(Versions(here).load(number).tensors["fc.weight"], weights()["fc.weight"])
