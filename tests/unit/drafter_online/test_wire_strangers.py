"""The wire among others than engines: what they overhear, alter, say or send without end is refused."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
zmq = pytest.importorskip("zmq")

from wire_ends import TOKEN, Ends, connected, packed, until  # noqa: E402

from drafter_online import wire  # noqa: E402
from drafter_online.link import Link  # noqa: E402
from drafter_online.wire import Message  # noqa: E402


class Stranger:
    """A raw socket that sends whatever it likes."""

    def __init__(self, endpoint: str, token: str | None = None) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        if token is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = zmq.curve_keypair()
            self.socket.curve_serverkey = wire.keys_of(token)[0]
        self.socket.connect(endpoint)

    def close(self) -> None:
        self.context.destroy(linger=0)


class Tap:
    """Stands between an engine and the daemon, and keeps what the engine says, or alters its last byte (`spoil`)."""

    def __init__(self, endpoint: str) -> None:
        self.there = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.said = bytearray()
        self.spoil = False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        engine, _ = self.listener.accept()
        daemon = socket.create_connection(self.there)
        threading.Thread(target=self._pass, args=(daemon, engine, bytearray()), daemon=True).start()
        self._pass(engine, daemon, self.said)

    def _pass(self, source: socket.socket, to: socket.socket, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                kept += data
                to.sendall(data[:-1] + bytes([data[-1] ^ self.spoil]) if kept is self.said else data)

    def close(self) -> None:
        self.listener.close()


def tapped(ends: Ends, hub: Any, token: str | None) -> tuple[Tap, Link]:
    """An engine that has been welcomed, and what its connection passes through."""
    tap = Tap(hub.endpoint)
    ends.open.append(tap)
    return tap, connected(ends, tap, token=token)


SECRET = "what somebody asked"


@pytest.mark.parametrize("token", [TOKEN, None])
def test_what_is_overheard_says_nothing_and_cannot_be_said_again(ends: Ends, token: str | None) -> None:
    hub = ends.hub(token=token)
    tap, link = tapped(ends, hub, token)
    for i in range(3):
        link.send(Message("rewards", {SECRET: float(i)}))
    until(lambda: len(hub.handler.messages) == 3, link)
    # The check can fail: without a token everything is there to read.
    assert (SECRET.encode() in tap.said) == (token is None) and TOKEN.encode() not in tap.said
    if token is None:
        return
    before = hub.counts["refused/unauthenticated"]
    with socket.create_connection(tap.there) as again:
        with contextlib.suppress(OSError):
            again.sendall(tap.said)
            again.shutdown(socket.SHUT_WR)
        until(lambda: hub.counts["refused/unauthenticated"] > before, link)
    assert len(hub.handler.messages) == 3 and len(hub.handler.sessions) == 1


@pytest.mark.parametrize("token", [TOKEN, None])
def test_what_was_altered_on_the_way_is_not_taken(ends: Ends, token: str | None) -> None:
    hub = ends.hub(token=token)
    tap, link = tapped(ends, hub, token)
    tap.spoil = True
    assert link.send(Message("samples", {}, {"t": torch.zeros(4, dtype=torch.uint8)}))
    if token is None:  # the check can fail: nothing but the token's keys notices
        until(lambda: hub.handler.messages, link)
        assert hub.handler.messages[0].tensors["t"].tolist() == [0, 0, 0, 1]
        return
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        link.poll(0.01)
    assert not hub.handler.messages and hub.counts["received"] == 0 and hub.listens


@pytest.mark.parametrize("token", [None, "quite another token"])
def test_strangers_are_ignored_by_all(ends: Ends, token: str | None) -> None:
    """A raw peer with no token or another one says every kind of message that there is."""
    hub = ends.hub(token=TOKEN)
    link = connected(ends, hub, token=TOKEN)
    stranger = Stranger(hub.endpoint, token)
    ends.open.append(stranger)
    for kind in get_args(wire.Kind):
        with contextlib.suppress(zmq.Again):
            stranger.socket.send_multipart(packed(Message(kind, {"name": "x"})), zmq.NOBLOCK)
    until(lambda: hub.counts["refused/unauthenticated"], link)  # one without a token may give up after one attempt
    assert not hub.handler.messages and len(hub.handler.sessions) == len(hub) == 1 and hub.counts["received"] == 0
    link.send(Message("rewards", {"a": 1.0}))
    until(lambda: hub.handler.messages, link)


@pytest.mark.parametrize(("first", "then"), [(None, TOKEN), ("quite another token", TOKEN), (TOKEN, None)])
def test_a_daemon_that_is_started_again_with_the_engines_token_is_found(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, first: str | None, then: str | None
) -> None:
    """ZeroMQ gives an endpoint up for good where one side encrypts and the other does not."""
    monkeypatch.setattr("drafter_online.link.HELLO_SECONDS", 0.2)
    hub = ends.hub(token=first)
    link = ends.link(hub.endpoint, token=then)
    until(lambda: "does not take this token" in (link.away or ""), link)
    hub.close()
    ends.hub(hub.endpoint, token=then)
    until(lambda: link.away is None, link)


def test_hellos_without_end_do_not_fill_the_table(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter_online.hub.MOST_SESSIONS", 4)
    hub = ends.hub()
    link = connected(ends, hub)
    for _ in range(12):
        stranger = Stranger(hub.endpoint)
        ends.open.append(stranger)
        for _ in range(4):
            stranger.socket.send_multipart(packed(Message("hello", {})))
    until(lambda: len(hub.handler.sessions) == 49, link)
    assert len(hub) <= 4
    until(lambda: link.send(Message("rewards", {"a": 2.0})) and hub.handler.messages, link)


_mutation = st.tuples(
    st.sampled_from(["flip", "cut", "drop", "twice", "swap", "grow", "header"]), st.integers(0, 1 << 16)
)


@given(st.lists(st.one_of(st.lists(st.binary(max_size=64), min_size=1, max_size=6), _mutation), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fuzz_never_harms_the_daemon(fuzzed: tuple[Any, Link, Stranger], messages: list[Any]) -> None:
    """Random and mutated frames from a peer that said no hello: refused and counted; the honest engine is served."""
    hub, link, stranger = fuzzed
    before = sum(n for k, n in hub.counts.items() if k.startswith("refused/"))
    honest = len(hub.handler.messages)
    for m in messages:
        frames = _mutate(*m) if isinstance(m, tuple) else list(m)
        stranger.socket.send_multipart(frames)
    link.send(Message("rewards", {"a": 1.0}))
    until(lambda: len(hub.handler.messages) == honest + 1, link)
    count = lambda: sum(n for k, n in hub.counts.items() if k.startswith("refused/"))  # noqa: E731
    until(lambda: count() == before + len(messages), link)
    assert hub.listens and hub.counts["failed"] == 0 and link.away is None


def _mutate(how: str, n: int) -> list[bytes]:
    frames = packed(Message("samples", {"n": n}, {"t": torch.arange(n % 50)}), seq=1 + n % 3)
    i = n % len(frames)
    f = frames[i]
    if how == "flip" and f:
        frames[i] = f[: n % len(f)] + bytes([f[n % len(f)] ^ 0x55]) + f[n % len(f) + 1 :]
    elif how == "cut":
        frames[i] = f[: n % (len(f) + 1)]
    elif how == "drop":
        del frames[i]
    elif how == "twice":
        frames.insert(i, f)
    elif how == "swap":
        frames.reverse()
    elif how == "grow":
        frames[i] = f * (1 + n % 40)
    else:
        frames[0] = os.urandom(len(frames[0]))
    return frames


@pytest.fixture
def fuzzed(ends: Ends) -> tuple[Any, Link, Stranger]:
    hub = ends.hub()
    link = connected(ends, hub)
    stranger = Stranger(hub.endpoint)
    ends.open.append(stranger)
    return hub, link, stranger


def test_frames_beyond_the_limit_end_the_connection_that_sends_them(ends: Ends, monkeypatch: Any) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME", 1 << 12)
    hub = ends.hub()
    link = connected(ends, hub)
    stranger = Stranger(hub.endpoint)
    ends.open.append(stranger)
    stranger.socket.send_multipart([b"0" * (1 << 20)])
    link.send(Message("rewards", {"a": 1.0}))
    until(lambda: hub.handler.messages, link)
    assert hub.listens and hub.counts["failed"] == 0
