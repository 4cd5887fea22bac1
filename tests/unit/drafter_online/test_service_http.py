"""The daemon over HTTP: what it shows, and who may change something."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
pytest.importorskip("torch")

from vllm_like import like  # noqa: E402

from drafter_online.alarms import Alarms  # noqa: E402
from drafter_online.engines import ConnectedEngine, DomainCounts, Engines, Hello, Status  # noqa: E402
from drafter_online.errors import DrafterError, VersionError  # noqa: E402
from drafter_online.http import HttpServer, build  # noqa: E402
from drafter_online.idle import StepWatch  # noqa: E402
from drafter_online.inbox import Inbox  # noqa: E402

TOKEN = "a token of some length"


@pytest.fixture
def service(tmp_path: Any) -> Any:
    """What the pages read of a daemon, without one."""
    from collections import Counter

    from drafter_online.versions import Versions

    engines = Engines()
    engines.by_session["s"] = ConnectedEngine(Hello("<b>host</b>:1", "base", [1, 2, 3]))
    engine = engines.report("s", Status(3, domains={"code": DomainCounts(1, 10, 5, 9, 6, 16)}))
    assert engine is not None
    engines.domains["code"] = DomainCounts(1, 10, 5, 9, 6, 16)
    alarms = Alarms()
    alarms.set("store", "it cannot be written")

    def no(number: int) -> int:
        if number > 3:
            raise VersionError(f"version {number} is not there.")
        return 4

    return like(
        "drafter_online.service:Service",
        started=time.time(),
        config=like("drafter_online.settings:ServiceConfig", target="MODEL"),
        trainer=like(
            "drafter_online.trainer:Trainer",
            device="cpu",
            drafter=like("drafter_online.model:Eagle3", base="base"),
            last_loss=1.5,
            counts=like("drafter_online.trainer:TrainerCounts", steps=10, tokens=100, not_finite=0, out_of_memory=0),
            buffer=type("OfOne", (), {"bytes": 5, "__len__": lambda self: 1})(),
        ),
        inbox=Inbox(),
        engines=engines,
        alarms=alarms,
        counts=Counter(published=3),
        hub=like(
            "drafter_online.hub:Hub", endpoint="ipc://wire", counts=Counter({"received": 5, "refused/replayed": 2})
        ),
        release=like(
            "drafter_online.release:Release",
            current=3,
            candidate=None,
            canaries=[],
            rolled_back=1,
            promote=no,
            rollback=no,
        ),
        versions=Versions(tmp_path / "versions"),
        trains=True,
        training="running",
        healthy=lambda: (True, "ok"),
        watch=StepWatch(),
        when=None,
        terms={"accept_0": 1.0},
    )


def publish_an_hour_ago(service: Any, version: int) -> Path:
    """A version of that age, as far as its age is read from its manifest; its folder."""
    folder: Path = service.versions.path(version)
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    os.utime(folder / "manifest.json", (time.time() - 3600,) * 2)
    return folder


def client(service: Any, **kw: Any) -> Any:
    from starlette.testclient import TestClient

    return TestClient(build(service, **kw), base_url="http://localhost")


def test_everything_is_shown(service: Any) -> None:
    c = client(service)
    assert c.get("/status").json()["versions"]["lag_seconds"] is None
    folder = publish_an_hour_ago(service, 3)
    s = c.get("/status").json()
    shutil.rmtree(folder)
    assert s["versions"]["running"] == {"<b>host</b>:1": 3} and s["domains"]["code"]["length"] == 1.6
    assert s["domains"]["code"]["rate"] == pytest.approx(2 / 3, abs=1e-3) and s["alarms"][0]["kind"] == "store"
    assert s["training"]["loss"] == 1.5 and s["versions"]["lag_seconds"] == pytest.approx(3600, abs=60)
    service.versions.publish({"w": __import__("torch").ones(1)}, {}, base="base", target_version=0)
    service.versions.record(1, "promoted", "because")
    (row,) = c.get("/versions").json()
    assert row["verdict"] == "promoted" and row["reason"] == "because" and row["bytes"] > 0
    assert c.get("/healthz").json() == {"healthy": True, "detail": "ok"}
    service.healthy = lambda: (False, "the thread that trains has ended")
    assert c.get("/healthz").status_code == 503


def test_metrics_are_prometheus(service: Any) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    publish_an_hour_ago(service, 3)
    text = client(service).get("/metrics").text
    found = {
        (s.name, *sorted(s.labels.values())): s.value for f in text_string_to_metric_families(text) for s in f.samples
    }
    assert found["drafter_online_domain_accepted_total", "code"] == 6
    assert found["drafter_online_messages_refused_total", "replayed"] == 2
    assert found["drafter_online_engine_version", "<b>host</b>:1"] == 3
    assert found["drafter_online_alarm", "store"] == 1
    assert found[("drafter_online_lag_seconds",)] == pytest.approx(3600, abs=60)


def test_versions_are_decided_upon(service: Any) -> None:
    c = client(service)
    assert c.post("/versions/2/promote").json() == {"version": 2, "promoted": True, "runs_as": 4}
    assert c.post("/versions/2/rollback").status_code == 200
    missing = c.post("/versions/9/promote")
    assert missing.status_code == 409 and missing.json()["detail"] == "drafter-online: version 9 is not there."
    assert c.post("/versions/x/promote").status_code == 422
    assert c.get("/versions/2/promote").status_code == 405


def test_a_token_is_asked_for(service: Any) -> None:
    c = client(service, token=TOKEN)
    assert c.get("/healthz").status_code == 200
    good = {"authorization": f"Bearer {TOKEN}"}
    for method, path in (
        ("GET", "/status"),
        ("GET", "/versions"),
        ("GET", "/metrics"),
        ("POST", "/versions/1/promote"),
    ):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer \u00e9".encode("latin-1")}):
            assert c.request(method, path, headers=headers).status_code == 401, path
        assert c.request(method, path, headers=good).status_code == 200, path


def test_other_pages_cannot_drive_it(service: Any) -> None:
    c = client(service)
    assert c.post("/versions/1/promote", headers={"origin": "http://evil.example"}).status_code == 403
    assert c.post("/versions/1/promote", headers={"origin": "http://localhost"}).status_code == 200
    assert c.get("/status", headers={"host": "evil.example"}).status_code == 400
    good = {"host": "any.example", "authorization": f"Bearer {TOKEN}"}
    assert client(service, local=False, token=TOKEN).get("/status", headers=good).status_code == 200
    assert c.get("/status", headers={"host": "[::1]:8765"}).status_code == 200


def test_it_listens_at_its_address(service: Any) -> None:
    with pytest.raises(DrafterError, match="needs a token"):
        HttpServer(service, "0.0.0.0", 0)
    server = HttpServer(service, "127.0.0.1", 0)
    try:
        end = time.monotonic() + 10
        while True:
            try:
                assert httpx.get(f"{server.url}healthz").status_code == 200
                break
            except httpx.TransportError:
                assert time.monotonic() < end
                time.sleep(0.05)
        with pytest.raises(DrafterError, match="another --port"):
            HttpServer(service, "127.0.0.1", server.port)
    finally:
        server.close()
    assert "drafter-http" not in [t.name for t in threading.enumerate()]
