"""The daemon that replicas of a job start or find, and that of the preset of servers."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("zmq")

from wire_ends import until  # noqa: E402

from rollspec import RollspecConfig  # noqa: E402


@pytest.mark.timeout(180)
def test_replicas_of_a_job_share_one_process_that_ends_with_them(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("speculators")
    from fake_engine import FakeEngine

    from drafter_online import architecture
    from drafter_online.files import try_lock
    from rollspec.engine import daemon

    monkeypatch.setattr(daemon, "LINGER", 20.0)
    monkeypatch.setenv("ROLLSPEC", "not for the daemon")
    core = max(os.sched_getaffinity(0))
    monkeypatch.setenv("ROLLSPEC_TRAINER_CORES", str(core))
    config = RollspecConfig.load(
        {"proposal.drafters": ["eagle3"], "drafter.mode": "dedicated", "drafter.dir": str(tmp_path / "d")}, env={}
    )
    first, second = daemon.settle(config, str(tiny_target)), daemon.settle(config, str(tiny_target))
    assert first.drafter.endpoint == second.drafter.endpoint and str(first.drafter.endpoint).startswith("ipc://")
    lock = Path(str(first.drafter.endpoint).removeprefix("ipc://")).with_name("lock")
    assert try_lock(lock) is None, "the trainer has it"
    base = architecture.base_of(architecture.target_config(tiny_target))
    where = SimpleNamespace(
        hub=SimpleNamespace(endpoint=first.drafter.endpoint),
        trainer=SimpleNamespace(drafter=SimpleNamespace(base=base)),
    )
    engines = [FakeEngine(where, f"replica {i}") for i in range(2)]
    end = time.monotonic() + 90
    while not all(e.link.ready for e in engines):
        for e in engines:
            e.turn()
        assert time.monotonic() < end, (tmp_path / "d" / "daemon.log").read_text()
    threads = os.listdir(f"/proc/{(tmp_path / 'd' / 'lock').read_text()}/task")
    assert len(threads) > 1 and all(os.sched_getaffinity(int(thread)) == {core} for thread in threads)
    assert {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in threads} == {10}, "its engines come first"
    group = Path(f"/proc/{(tmp_path / 'd' / 'lock').read_text()}/autogroup")
    assert not group.is_file() or group.read_text().split()[-1] == "10", "what counts beside other sessions"
    # The next job has other settings: not while engines use the trainer, and at once when they are gone.
    monkeypatch.setattr(daemon, "LEAVE_SECONDS", 2.0)
    faster = config.change({"drafter.publish_every": 7})
    assert daemon.settle(faster, str(tiny_target)).drafter.mode == "dedicated"
    assert "keeps its settings, which differ in: publish_every" in caplog.text
    process = (tmp_path / "d" / "lock").read_text()
    for e in engines:
        e.link.close()
    monkeypatch.setattr(daemon, "LEAVE_SECONDS", 60.0)
    monkeypatch.setattr(daemon, "LINGER", 0.5)
    daemon.settle(faster, str(tiny_target))
    until(lambda: (tmp_path / "d" / "lock").read_text() not in ("", process), seconds=60)
    log = (tmp_path / "d" / "daemon.log").read_text()
    assert "its engines are gone and another trainer wants its folder" in log
    until(lambda: try_lock(lock), seconds=60)
    assert "no engine was connected" in (tmp_path / "d" / "daemon.log").read_text()


def test_a_trainer_on_an_engines_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given no device: it goes to the one of the engine that shows itself first, and sees all."""
    from rollspec.engine import daemon

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(
        daemon, "_process", lambda config, target: given.append(daemon.options(config, target)) or "ipc://x"
    )
    config = RollspecConfig.load({"proposal.drafters": ["eagle3"], "drafter.mode": "idle"}, env={})
    settled = daemon.settle(config, "target")
    assert settled.drafter.dir is not None and given[0]["dir"] == str(settled.drafter.dir)
    assert given[0]["yields_to"] == str(daemon.devices(settled.drafter.dir)) and "device" not in given[0]
    assert "CUDA_VISIBLE_DEVICES" not in daemon._environment(config)
    dedicated = config.change({"drafter.mode": "dedicated"})
    assert daemon._environment(dedicated)["CUDA_VISIBLE_DEVICES"] == "", "it trains on the CPU"
    gpu = dedicated.change({"drafter.device": "cuda:1", "drafter.dir": str(tmp_path / "d")})
    assert daemon._environment(gpu)["CUDA_VISIBLE_DEVICES"] == "5,6"
    assert daemon.options(gpu, "target")["device"] == "cuda:1" and "yields_to" not in daemon.options(gpu, "target")
    nice: list[int] = []
    monkeypatch.setattr(daemon, "give_way", nice.append)
    monkeypatch.delenv("ROLLSPEC_TRAINER_CORES", raising=False)
    for options in (given[0], daemon.options(dedicated, "target"), daemon.options(gpu, "target")):
        daemon._give_way(options)
    assert nice == [19, 10], "on the engine's own cores it gives way most; with a device of its own it need not"
    # A state in a temporary folder goes with the job, and no other.
    for folder in (settled.drafter.dir, tmp_path / "mine" / "state"):
        assert folder is not None
        folder.mkdir(parents=True, exist_ok=True)
        daemon._leave(folder)
    assert not settled.drafter.dir.exists() and (tmp_path / "mine" / "state").is_dir()


def test_a_trainer_that_cannot_be_started_costs_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from rollspec.engine import daemon

    (tmp_path / "file").write_text("")
    given = {"proposal.drafters": ["eagle3"], "drafter.mode": "dedicated", "drafter.dir": str(tmp_path / "file" / "d")}
    config = daemon.settle(RollspecConfig.load(given, env={}), "target")
    assert config.drafter.mode == "off" and "cannot be started" in caplog.text


def test_the_preset_of_servers() -> None:
    config = RollspecConfig.load("serve", env={})
    assert config.drafter.mode == "dedicated" and config.drafter.endpoint == "tcp://127.0.0.1:5765"
    assert config.drafter.captures and set(config.proposal.drafters) == {"suffix", "eagle3"}
    from rollspec.errors import ConfigError

    with pytest.raises(ConfigError, match="endpoint"):
        RollspecConfig.load({"preset": "serve", "drafter.endpoint": "localhost:1"}, env={})
    assert json.loads(json.dumps(config.to_dict()))["drafter"]["endpoint"]


def test_an_actor_whose_node_is_gone_learns_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollspec import machine

    monkeypatch.setattr(machine, "ORPHAN_SECONDS", 0.05)
    here = threading.Event()
    threading.Thread(target=machine.when_orphaned, args=(os.getppid(), here), daemon=True).start()
    file = tmp_path / "orphaned"
    if not (node := os.fork()):
        try:
            parent = os.getpid()
            if not os.fork():  # the actor
                gone = threading.Event()
                machine.when_orphaned(parent, gone)
                file.write_text(str(gone.is_set()))
            else:
                time.sleep(0.3)
        finally:
            os._exit(0)
    time.sleep(0.15)
    assert not file.exists(), "its node is there"
    os.waitpid(node, 0)
    until(lambda: file.exists() and file.read_text() == "True")
    assert not here.is_set()
