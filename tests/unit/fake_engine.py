"""An engine as the daemon sees it, without one: it sends samples and takes versions."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from drafter_target import sample

from drafter_online.errors import VersionError
from drafter_online.fetch import Fetch
from drafter_online.link import Link
from drafter_online.samples import Sample
from drafter_online.versions import Versions
from drafter_online.wire import Message


class FakeEngine:
    """Says `verdict` of every version that it is offered, once it has fetched and loaded it as a real one would."""

    def __init__(self, service: Any, name: str = "engine", verdict: str = "promoted", **hello: Any) -> None:
        given = {"name": name, "base": service.trainer.drafter.base, "aux": [1, 2, 3], **hello}
        self.link = Link(service.hub.endpoint, given)
        self.verdict = verdict
        self.version = 0
        self.policy = 0
        self.verdicts: list[list[Any]] = []
        self.offers: list[dict[str, Any]] = []
        self.others: list[Message] = []
        self.domains: dict[str, list[int]] = {}
        self.fetch: Fetch | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._reported = 0.0

    def turn(self, seconds: float = 0.02) -> None:
        """One round of listening and reporting."""
        for message in self.link.poll(seconds):
            if message.kind == "offer":
                self.offers.append(message.body)
                self.take(message.body)
            elif message.kind == "chunk":
                self.fetched(message)
            elif message.kind != "ack":
                self.others.append(message)
        if self.link.away is None and time.monotonic() - self._reported > 0.1:
            self._reported = time.monotonic()
            self.report()

    def take(self, body: dict[str, Any]) -> None:
        self.fetch = Fetch(body["manifest"], Path(self._folder.name) / "versions")
        self.link.send(Message("fetch", self.fetch.wants() or {}))

    def fetched(self, message: Message) -> None:
        assert self.fetch is not None
        try:
            self.fetch.take(message)
        except VersionError:  # it was deleted meanwhile
            self.fetch = None
            return
        if (ask := self.fetch.wants()) is not None:
            self.link.send(Message("fetch", ask))
            return
        path, canary = self.fetch.path, self.offers[-1]["canary"]
        self.fetch = None
        if int(path.name) <= self.version:  # it was offered twice
            return
        version = Versions(path.parent).load(int(path.name), newer_than=self.version)
        if self.verdict == "promoted" or not canary:
            self.version = version.number
        if self.verdict != "silent":
            self.verdicts.append([version.number, self.verdict, "because"])

    def report(self, **kw: Any) -> bool:
        body = {
            "version": self.version,
            "policy": self.policy,
            "domains": self.domains,
            "verdicts": self.verdicts,
            **kw,
        }
        return self.link.send(Message("status", body))

    def send(self, sample: Sample) -> bool:
        tensors, record = sample.parts()
        return self.link.send(Message("samples", record, tensors))

    def until(self, condition: Any, seconds: float = 90.0) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.turn()
            found = condition()
            if found:
                return found
        raise AssertionError(f"it did not come; {self.link.away=} {self.link.counts=} {self.verdicts=}")


def feed(engine: FakeEngine, target: Path, n: int = 8, start: int = 0, **fields: Any) -> None:
    """The engine sends `n` samples."""
    engine.until(lambda: engine.link.ready)
    for i in range(n):
        assert engine.send(sample(target, start + i, **fields))


def checkpoint(engine: FakeEngine, kind: Any, folder: Path | str) -> dict[str, Any]:
    """What the daemon answers when it is asked to save to `folder` or load from it."""
    number = len(engine.others) + 1
    assert engine.link.send(Message(kind, {"id": number, "folder": str(folder)}))
    found: Message = engine.until(
        lambda: next((m for m in engine.others if m.kind == "done" and m.body["id"] == number), None)
    )
    return found.body
