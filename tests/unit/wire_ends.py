"""Both ends of the wire for tests: a hub whose handler keeps what comes, and links to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from drafter_online import wire
from drafter_online.hub import Hub
from drafter_online.link import Link
from drafter_online.wire import Message

TOKEN = "a token of some length"
TENSORS = {
    "ids": torch.arange(5),
    "states": torch.randn(3, 4, dtype=torch.bfloat16),
    "mask": torch.tensor([True, False]),
    "none": torch.empty(0, 4),
    "one": torch.tensor(2.5),
}


def packed(message: Message | None = None, seq: int = 1) -> list[bytes]:
    return [bytes(f) for f in wire.pack(message or Message("samples", {"a": 1}, TENSORS), seq)]


class Recorder:
    """A handler that keeps what comes."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.sessions: list[str] = []
        self.left: list[str] = []
        self.refuse: str | None = None
        self.fail: Exception | None = None

    def greeted(self, session: str, body: dict[str, Any]) -> str | None:
        if self.refuse is None:
            self.sessions.append(session)
        return self.refuse

    def received(self, session: str, message: Message) -> None:
        if self.fail is not None:
            raise self.fail
        self.messages.append(message)

    def gone(self, session: str) -> None:
        self.left.append(session)


class Ends:
    """Hubs and links that are closed at the end."""

    def __init__(self) -> None:
        self.open: list[Any] = []

    def hub(self, endpoint: str = "tcp://127.0.0.1:0", **kw: Any) -> Any:
        handler = Recorder()
        hub = Hub(endpoint, handler, **kw)
        hub.start()
        self.open.append(hub)
        return hub

    def link(self, endpoint: str, **kw: Any) -> Link:
        link = Link(endpoint, {"name": "test"}, **kw)
        self.open.append(link)
        return link


def until(condition: Callable[[], Any], link: Link | None = None, seconds: float = 10.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if link is not None:
            link.poll(0.01)
        found = condition()
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError("it did not come")


def connected(ends: Ends, hub: Any, **kw: Any) -> Link:
    link = ends.link(hub.endpoint, **kw)
    until(lambda: link.away is None, link)
    return link
