"""`drafter-online serve` as a process: killed, standing still, and started with what cannot be used."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("speculators")
pytest.importorskip("fastapi")

from drafter_target import sample  # noqa: E402
from fake_engine import FakeEngine, feed  # noqa: E402
from running_service import TRAINING  # noqa: E402
from vllm_like import like  # noqa: E402
from wire_ends import until  # noqa: E402

from drafter_online import architecture  # noqa: E402
from drafter_online.buffer import Buffer  # noqa: E402
from drafter_online.checkpoint import Checkpoints  # noqa: E402
from drafter_online.versions import Versions  # noqa: E402


class Daemon:
    """`drafter-online serve` as a process."""

    def __init__(self, folder: Path, target: Path, head: Path, *more: str) -> None:
        folder.mkdir(exist_ok=True)
        self.log = folder / "out.txt"
        self.endpoint = f"ipc://{folder}/wire"
        command = [
            sys.executable, "-m", "drafter_online.cli", "serve", "--target", str(target), "--dir", f"{folder}/daemon",
            "--head", str(head), "--endpoint", self.endpoint, "--port", "0", "--option", "publish_every=15",
            "--option", "save_seconds=1", "--nice", "0", "--option", "dtype=float32", *more,
        ]  # fmt: skip
        for name, value in TRAINING.items():
            command += ["--set", f"{name}={value}"]
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    def said(self) -> str:
        return self.log.read_text()


def where(d: Daemon, base: str) -> Any:
    """What an engine has to know of a daemon, which is another process."""
    drafter = like("drafter_online.model:Eagle3", base=base)
    hub = like("drafter_online.hub:Hub", endpoint=d.endpoint)
    return like(
        "drafter_online.service:Service", hub=hub, trainer=like("drafter_online.trainer:Trainer", drafter=drafter)
    )


@pytest.fixture
def daemon(tiny_target: Path, given_head: Path, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    started: list[Daemon] = []

    def start(*more: str) -> Daemon:
        before = (tmp_path / "d" / "out.txt").read_text().count("listening") if (tmp_path / "d").is_dir() else 0
        d = Daemon(tmp_path / "d", tiny_target, given_head, *more)
        started.append(d)
        until(lambda: d.said().count("listening") > before or d.process.poll() is not None, seconds=90)
        return d

    yield start
    for d in started:
        if d.process.poll() is None:
            d.process.kill()
        d.process.wait()


@pytest.mark.timeout(180)
def test_killed_and_started_again_it_catches_up(
    daemon: Callable[..., Daemon],
    tiny_target: Path,
    given_head: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """kill -9 in the middle of training; a second daemon for the folder is refused; TERM saves and ends with 0."""
    monkeypatch.setattr("drafter_online.link.AWAY_SECONDS", 2.0)
    d = daemon()
    refused = invoke(["--dir", str(tmp_path / "d" / "daemon")], tiny_target, given_head, tmp_path)
    assert refused.exit_code == 2 and refused.output.strip().count("\n") == 0
    assert f"in use by another daemon (process {d.process.pid})" in refused.output
    base = architecture.base_of(architecture.target_config(tiny_target))
    engine = FakeEngine(where(d, base))
    feed(engine, tiny_target, 8)
    engine.until(lambda: engine.version >= 1, 60)
    engine.until(lambda: len(Buffer.load(tmp_path / "d" / "daemon" / "buffer")) == 8, 30)  # it saves once a second
    d.process.send_signal(signal.SIGKILL)
    d.process.wait()
    engine.until(lambda: engine.link.away, 20)
    version = engine.version
    d = daemon()
    feed(engine, tiny_target, 8, 20)
    engine.until(lambda: engine.version > version, 60)
    store = Versions(tmp_path / "d" / "daemon" / "versions")
    engine.until(lambda: store.promoted() == engine.version)
    d.process.send_signal(signal.SIGTERM)
    assert d.process.wait(30) == 0
    assert "all is saved" in d.said() and "Traceback" not in d.said()
    assert store.promoted() is not None
    found = Checkpoints(tmp_path / "d" / "daemon" / "state").load()
    assert found is not None and found[1]["counts"]["steps"] > 0
    assert len(Buffer.load(tmp_path / "d" / "daemon" / "buffer")) == 16
    engine.link.close()


@pytest.mark.timeout(120)
def test_a_daemon_that_stands_still_is_away_until_it_goes_on(
    daemon: Callable[..., Daemon], tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafter_online.link.AWAY_SECONDS", 2.0)
    d = daemon()
    base = architecture.base_of(architecture.target_config(tiny_target))
    engine = FakeEngine(where(d, base))
    feed(engine, tiny_target, 8)
    engine.until(lambda: engine.version, 60)
    d.process.send_signal(signal.SIGSTOP)
    try:
        engine.until(lambda: engine.link.away, 20)
        assert not engine.send(sample(tiny_target, 30)), "nothing waits for it"
    finally:
        d.process.send_signal(signal.SIGCONT)
    version = engine.version
    engine.until(lambda: engine.link.ready, 30)
    feed(engine, tiny_target, 8, 40)
    engine.until(lambda: engine.version > version, 60)
    engine.link.close()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--endpoint", "tcp://0.0.0.0:5765"], "needs a token"),
        (["--host", "0.0.0.0"], "needs a token"),
        (["--set", "learning_rate=-1"], "training.learning_rate = -1"),
        (["--option", "publish_evry=3"], "publish_evry"),
        (["--option", 'buffer={"half_live": 3}'], "buffer.half_live = 3"),
        (["--token-file", "/nowhere"], "cannot be read"),
        (["--target", "/nowhere"], "not a model"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    arguments: list[str], sentence: str, tiny_target: Path, given_head: Path, tmp_path: Path
) -> None:
    result = invoke(arguments, tiny_target, given_head, tmp_path)
    assert result.exit_code == 2 and sentence in result.output, result.output
    assert result.output.strip().count("\n") == 0


def invoke(arguments: list[str], target: Path, head: Path, folder: Path) -> Any:
    """`drafter-online serve` in this process, for what ends before it begins."""
    from typer.testing import CliRunner

    from drafter_online.cli import app

    base = ["serve", "--target", str(target), "--dir", str(folder / "other"), "--head", str(head), "--nice", "0"]
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    try:
        return CliRunner().invoke(app, [*base, *arguments], env={"DRAFTER_ONLINE_TOKEN": ""})
    finally:
        for s, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(s, handler)


def test_the_documentation_has_every_knob_of_the_daemon() -> None:
    from drafter_online.settings import ServiceConfig

    page = (Path(__file__).parents[3] / "docs" / "service.md").read_text()
    options = {"dir", "target", "head", "endpoint", "token_file", "device", "training"}
    for name in ServiceConfig.model_fields:
        assert name in options or f"| `{name}` |" in page, name
