"""The daemon that replicas of a job start or find, and that of the preset of servers."""

from __future__ import annotations

import json
import os
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
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("speculators")
    from fake_engine import FakeEngine

    from drafter_online import architecture
    from drafter_online.files import try_lock
    from rollspec.engine import daemon

    monkeypatch.setattr(daemon, "LINGER", 2.0)
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
    for e in engines:
        e.link.close()
    until(lambda: try_lock(lock), seconds=60)
    assert "no engine was connected" in (tmp_path / "d" / "daemon.log").read_text()


def test_a_trainer_on_an_engines_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both say the same file, whatever of the machine's devices each of them sees."""
    from rollspec.engine import daemon

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(
        daemon, "_process", lambda config, target: given.append(daemon.options(config, target)) or "ipc://x"
    )
    config = RollspecConfig.load({"proposal.drafters": ["eagle3"], "drafter.mode": "idle"}, env={})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    monkeypatch.setenv("LOCAL_RANK", "1")
    settled = daemon.settle(config, "target", "cuda")
    assert settled.drafter.device == given[0]["device"] == "cuda:1" and given[0]["dir"] == str(settled.drafter.dir)
    assert Path(given[0]["yields_to"]).name == "cuda-6"
    assert daemon.activity_file(settled, torch.device("cuda", 1)) == Path(given[0]["yields_to"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    assert daemon.activity_file(settled, torch.device("cuda", 0)) == Path(given[0]["yields_to"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert daemon.activity_file(settled, torch.device("cuda", 6)) == Path(given[0]["yields_to"])
    settled = daemon.settle(config, "target", "cpu")
    assert daemon.activity_file(settled, torch.device("cpu")) == Path(given[1]["yields_to"])
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
