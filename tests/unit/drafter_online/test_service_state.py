"""What the daemon keeps: a job's checkpoint, samples, and a folder of its own."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("speculators")
pytest.importorskip("fastapi")

from drafter_target import sample  # noqa: E402
from fake_engine import FakeEngine, checkpoint, feed  # noqa: E402
from killed import killed, killing  # noqa: E402
from running_service import TRAINING, Services  # noqa: E402
from vllm_like import like  # noqa: E402

from drafter_online import job_checkpoint  # noqa: E402
from drafter_online.errors import DrafterError  # noqa: E402
from drafter_online.service import Service  # noqa: E402


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def settled(service: Service, engine: FakeEngine) -> int:
    """Steps, once what came has been learned and the training waits for more; the engine's link is looked after."""
    engine.until(lambda: service.trainer.counts.steps and service.training == "waiting for new feedback")
    return service.trainer.counts.steps


def test_its_state_goes_into_the_jobs_checkpoint_and_comes_back(
    services: Services, tiny_target: Path, tmp_path: Path
) -> None:
    service = services(job=True, recency=0, passes=20, training={**TRAINING, "seed": 3})
    engine = FakeEngine(service)
    feed(engine, tiny_target)
    steps = settled(service, engine)
    engine.until(lambda: service.release.candidate is None and engine.version)
    folder = made(tmp_path / "step_6" / "rollspec" / "drafter")
    assert checkpoint(engine, "save", folder) | {"id": 0} == {"id": 0, "done": True, "error": None}
    sibling = FakeEngine(service, "sibling", "silent")
    sibling.until(lambda: sibling.link.ready)
    index = (folder / "buffer" / "index.json").stat().st_ino
    assert checkpoint(sibling, "save", folder)["done"] and (folder / "buffer" / "index.json").stat().st_ino == index
    assert checkpoint(sibling, "save", folder)["done"] and (folder / "buffer" / "index.json").stat().st_ino != index
    held, promoted = len(service.trainer.buffer), service.release.current
    assert promoted is not None
    weights = service.versions.load(promoted).tensors
    # The job goes on, and then back to its checkpoint.
    feed(engine, tiny_target, 4, 20)
    engine.until(lambda: len(service.trainer.buffer) > held)
    assert settled(service, engine) > steps
    engine.until(lambda: service.release.candidate is None and engine.version > promoted)
    assert checkpoint(engine, "load", folder)["done"]
    assert (service.trainer.counts.steps, len(service.trainer.buffer)) == (steps, held)
    assert (service.config.dir / "replaced" / "state").is_dir()
    before = engine.version
    engine.until(lambda: engine.version > before)  # the old weights, under a new number
    again = service.versions.load(engine.version).tensors
    assert all(torch.equal(again[n], t) for n, t in weights.items())
    # A sibling asks for the same state: it is not taken over again.
    feed(engine, tiny_target, 4, 40)
    engine.until(lambda: len(service.trainer.buffer) > held)
    assert checkpoint(sibling, "load", folder)["done"] and len(service.trainer.buffer) > held
    settled(service, engine)
    service.close()
    # As is one that begins elsewhere.
    other = services("other", job=True, recency=0, training={**TRAINING, "seed": 3})
    engine = FakeEngine(other)
    engine.until(lambda: engine.link.ready)
    assert checkpoint(engine, "load", folder)["done"]
    assert (other.trainer.counts.steps, len(other.trainer.buffer)) == (steps, held)
    engine.until(lambda: engine.version == promoted)


def test_a_checkpoint_that_is_not_answered_says_how_long_it_waited(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(job_checkpoint, "SAVE_SECONDS", 0.2)
    faults: list[tuple[str, str]] = []
    client = job_checkpoint.CheckpointClient(lambda *fault: faults.append(fault))
    link: Any = like("drafter_online.link:Link", away=None, send=lambda message: True)
    saved: list[bool] = []
    job = threading.Thread(target=lambda: saved.append(client.save(tmp_path / "drafter")))
    job.start()
    while job.is_alive():
        client.tick(link)
    assert saved == [False] and faults == [("saving", "the daemon has not answered for 0.2 s")]


def test_what_replicas_ask_for_together_is_done_for_the_first(tmp_path: Path) -> None:
    from drafter_online.job_checkpoint import JobCheckpoint

    sessions = {"a": None, "b": None}
    config = like("drafter_online.settings:ServiceConfig", dir=tmp_path)
    engines = like("drafter_online.engines:Engines", by_session=sessions)
    c = JobCheckpoint(like("drafter_online.service:Service", config=config, engines=engines))
    one, two = ("save", "/1"), ("save", "/2")
    asked = [("a", one), ("b", one), ("a", two), ("b", two), ("b", two), ("a", two), ("a", ("load", "/2"))]
    assert [c._done_for_sibling(*a) for a in asked] == [False, True, False, True, False, True, False]
    sessions.clear()  # the job was started again, and goes back to its checkpoint
    assert not c._done_for_sibling("c", ("load", "/2")), "it is another job's engine that got it"


RENAMES = 6
"""Of what is whole, of three old parts, and of two new ones."""


def aged(tmp_path: Path) -> dict[str, Path]:
    """Two folders whose parts say how old they are; the new one has no samples, which stayed in memory."""
    ages = {age: tmp_path / age for age in ("old", "new")}
    for age, parts in (("old", job_checkpoint.PARTS), ("new", ("state", "versions"))):
        for part in parts:
            made(ages[age] / part).joinpath("age").write_text(age)
    return ages


def copied_until_killed(ages: dict[str, Path], renames: int, aside: bool) -> bool:
    """`copy_state` in a process of its own, which is killed before rename `renames`; whether it was."""

    def copies() -> None:
        os.rename = killing(renames)(os.rename)
        job_checkpoint.copy_state(ages["new"], ages["old"], aside)

    return killed(copies)


def ages_of(folder: Path) -> dict[str, str]:
    return {part: (folder / part / "age").read_text() for part in job_checkpoint.PARTS if (folder / part).is_dir()}


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("renames", range(RENAMES + 1))
def test_a_daemon_killed_in_a_copy_leaves_parts_of_one_age(tmp_path: Path, renames: int, aside: bool) -> None:
    """SIGKILL before each rename of a copy, and after the last."""
    ages = aged(tmp_path)
    assert copied_until_killed(ages, renames, aside) == (renames < RENAMES)
    job_checkpoint.finish(ages["old"])
    new = dict.fromkeys(("state", "versions"), "new")
    assert ages_of(ages["old"]) == (new if renames else dict.fromkeys(job_checkpoint.PARTS, "old"))
    kept = [job_checkpoint.REPLACED] if renames and aside else []
    assert sorted(p.name for p in ages["old"].iterdir()) == sorted([*ages_of(ages["old"]), *kept]), (
        "nothing is left over"
    )
    if kept:
        assert ages_of(ages["old"] / kept[0]) == dict.fromkeys(job_checkpoint.PARTS, "old")


def test_an_error_in_a_copy_leaves_it_to_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ages = aged(tmp_path)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(job_checkpoint, "sync_folder", lambda path: full(path) if path == ages["old"] else None)
        with pytest.raises(OSError, match="No space"):
            job_checkpoint.copy_state(ages["new"], ages["old"])
    job_checkpoint.finish(ages["old"])
    assert ages_of(ages["old"]) == dict.fromkeys(("state", "versions"), "new")


def test_a_daemon_finishes_what_one_before_it_left(services: Services, tmp_path: Path) -> None:
    """In its own folder when it starts, and in a checkpoint that it is to resume from or to write to."""
    ages = aged(tmp_path)
    for part in job_checkpoint.PARTS:
        shutil.rmtree(ages["old"] / part)
    assert copied_until_killed(ages, 2, False) and (ages["old"] / job_checkpoint.UNDER_WAY).is_dir()
    service = services(dir=ages["old"], job=True)
    assert not (ages["old"] / job_checkpoint.UNDER_WAY).exists()
    for kind in ("save", "load"):
        folder = made(tmp_path / kind)
        made(folder / job_checkpoint.UNDER_WAY)
        (service.job_checkpoint._save if kind == "save" else _refused(service.job_checkpoint._load))(folder)
        assert not (folder / job_checkpoint.UNDER_WAY).exists(), kind


def _refused(load: Any) -> Any:
    def refused(folder: Path) -> None:
        with pytest.raises(DrafterError, match="no state of a drafter's training"):
            load(folder)

    return refused


def test_copies_that_cannot_be_made_are_refused_in_one_sentence(
    services: Services, tiny_target: Path, tmp_path: Path
) -> None:
    service = services(job=True)
    engine = FakeEngine(service)
    feed(engine, tiny_target)
    settled(service, engine)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    steps = service.trainer.counts.steps
    for kind, folder, says in (
        ("save", "here", "no absolute path"),
        ("save", tmp_path / "nowhere", "is not there for the daemon"),
        ("save", service.config.dir / "state" / "x", "a part of the daemon's own folder"),
        ("load", tmp_path / "empty", "no state of a drafter's training"),
        ("load", tmp_path / "file", "no state of a drafter's training"),
    ):
        answer = checkpoint(engine, kind, folder)
        assert not answer["done"] and says in answer["error"] and "\n" not in answer["error"], answer
    for kind in ("save", "load"):
        assert checkpoint(engine, kind, service.config.dir)["done"], "its own folder is a copy already"
    broken = made(tmp_path / "broken" / "drafter")
    assert checkpoint(engine, "save", broken)["done"]
    for file in broken.glob("state/*"):
        file.unlink()  # a link to the daemon's own
        file.write_text("{}")
    assert "can be read" in checkpoint(engine, "load", broken)["error"]
    assert service.trainer.counts.steps == steps and service.healthy()[0]
    engine.send(sample(tiny_target, 77))
    engine.until(lambda: service.trainer.counts.steps > steps)
    served = services("served")
    engine = FakeEngine(served)
    engine.until(lambda: engine.link.ready)
    assert checkpoint(engine, "save", broken) | {"id": 0} == {"id": 0, "done": False, "error": None}, "it is no job's"


def test_old_samples_are_deleted(services: Services, tiny_target: Path, monkeypatch: Any) -> None:
    service = services(recency=1.0, retention_hours=1.0, passes=0.01)
    engine = FakeEngine(service)
    feed(engine, tiny_target, 3)
    engine.until(lambda: len(service.trainer.buffer) == 3)
    now = time.time()
    monkeypatch.setattr("drafter_online.service.time.time", lambda: now + 3700)
    service._save()
    assert len(service.trainer.buffer) == 0 and service.counts["expired"] == 3
    assert not list((service.config.dir / "buffer" / "samples").iterdir())


def test_what_stays_in_the_buffer_is_configured(services: Services, tiny_target: Path) -> None:
    service = services(recency=0, buffer={"keep_versions": 1, "tail_quota": 0.0}, buffer_bytes=1 << 22)
    config = service.trainer.buffer.config
    assert (config.keep_versions, config.tail_quota, config.max_bytes) == (1, 0.0, 1 << 22)
    engine = FakeEngine(service)
    feed(engine, tiny_target, 3, target_version=1)
    feed(engine, tiny_target, 2, start=5, target_version=2)
    engine.until(lambda: service.trainer.buffer.counts.added == 5)
    assert [s.target_version for s in service.trainer.buffer] == [2, 2]


def test_samples_stay_in_memory_where_that_is_wanted(services: Services, tiny_target: Path) -> None:
    service = services(keep_samples=False)
    engine = FakeEngine(service)
    feed(engine, tiny_target)
    engine.until(lambda: engine.version)
    service.close()
    assert not (service.config.dir / "buffer").exists()


def test_one_daemon_per_folder(services: Services) -> None:
    services()
    with pytest.raises(DrafterError, match=rf"in use by another daemon \(process {os.getpid()}\)"):
        services()
    with pytest.raises(DrafterError, match="needs a token"):
        services("other", endpoint="tcp://0.0.0.0:0")
    assert services("other")
