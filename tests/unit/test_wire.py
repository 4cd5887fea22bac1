"""The wire: what is sent arrives, and what is malformed, oversized or unauthenticated is refused, by kind."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
zmq = pytest.importorskip("zmq")

from wire_ends import Ends, Recorder, until  # noqa: E402

from drafter_online import wire  # noqa: E402
from drafter_online.errors import SampleError, WireError  # noqa: E402
from drafter_online.hub import Hub  # noqa: E402
from drafter_online.link import Link  # noqa: E402
from drafter_online.wire import FORMAT, Message  # noqa: E402

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


def header(*fields: Any) -> bytes:
    return wire._encoder.encode([FORMAT, 1, *fields])


def test_what_is_packed_is_unpacked() -> None:
    seq, message = wire.unpack(packed(seq=7))
    assert seq == 7 and message.kind == "samples" and message.body == {"a": 1}
    for name, t in TENSORS.items():
        assert message.tensors[name].dtype == t.dtype and torch.equal(message.tensors[name], t), name


def test_keys_are_of_the_token() -> None:
    keys = wire.keys_of(TOKEN)
    assert wire.keys_of(TOKEN) == keys and zmq.curve_public(keys.secret) == keys.public
    assert wire.keys_of(f"{TOKEN}.") != keys


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\x93",
        header("hello"),
        header("who", {}, []),
        header("hello", [], []),
        header("hello", {}, [["t", "float32", [2]]]),
        header("hello", {}, [], 1),
        b"\x95\x02\x01\xa5hello" + b"\x81\xa1a" * 20000 + b"\xc0\x90",
        wire._encoder.encode([FORMAT + 1, 1, "hello", {}, []]),
    ],
)
def test_nonsense_is_malformed(header: bytes) -> None:
    with pytest.raises(WireError) as e:
        wire.unpack([header])
    assert e.value.kind == "malformed"


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("float32", [2], 7),
        ("object", [1], 8),
        ("float32", [-1], 4),
        ("float32", [1] * 9, 4),
        ("int64", [1 << 40, 1 << 40], 8),
        ("__class__", [1], 1),
    ],
)
def test_tensors_that_are_not_what_they_say(dtype: str, shape: list[int], size: int) -> None:
    with pytest.raises(WireError) as e:
        wire.unpack([header("samples", {}, [["t", dtype, shape]]), b"0" * size])
    assert e.value.kind == "malformed"


def test_sizes_are_bounded_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME", 1 << 10)
    monkeypatch.setattr(wire, "MAX_HEADER", 1 << 9)
    for body, tensors in (
        ({}, {"t": torch.zeros(1 << 10)}),
        ({"a": "x" * 600}, {}),
        ({}, {str(i): torch.zeros(1) for i in range(wire.MAX_FRAMES + 1)}),
    ):
        with pytest.raises(WireError) as e:
            packed(Message("samples", body, tensors))
        assert e.value.kind == "oversized"
    with pytest.raises(WireError) as e:
        wire.unpack([packed(Message("samples"))[0], b"0" * 1025])
    assert e.value.kind == "oversized"


@settings(deadline=None)
@given(st.lists(st.binary(max_size=80), max_size=6), st.booleans())
def test_any_frames_are_refused_and_nothing_else(frames: list[bytes], begun: bool) -> None:
    if begun:
        frames = [packed()[0], *frames]
    with pytest.raises(WireError):
        wire.unpack(frames)


def test_tokens_and_endpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(wire.TOKEN_VARIABLE, raising=False)
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert wire.read_token(file) == TOKEN and wire.read_token(None) is None
    with pytest.raises(WireError, match="token"):
        wire.read_token(tmp_path / "no")
    file.write_text("")
    with pytest.raises(WireError, match="0 characters"):
        wire.read_token(file)
    monkeypatch.setenv(wire.TOKEN_VARIABLE, TOKEN)
    assert wire.read_token(None) == TOKEN
    monkeypatch.setenv(wire.TOKEN_VARIABLE, "short")
    with pytest.raises(WireError, match="token"):
        wire.read_token(None)
    for endpoint in ("tcp://127.0.0.1:1", "ipc:///a", "tcp://localhost:1", "tcp://[::1]:1", "127.0.0.1", "::1"):
        assert wire.is_local(endpoint), endpoint
    for endpoint in ("tcp://0.0.0.0:1", "tcp://*:1", "tcp://10.0.0.1:5", "tcp://host:1", "0.0.0.0", "::"):
        assert not wire.is_local(endpoint), endpoint
        with pytest.raises(WireError, match="needs a token"):
            wire.require_token(endpoint, None)
        wire.require_token(endpoint, TOKEN)


# ---- sockets --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[Ends]:
    e = Ends()
    yield e
    for x in reversed(e.open):
        x.close()


def connected(ends: Ends, hub: Any, **kw: Any) -> Link:
    link = ends.link(hub.endpoint, **kw)
    until(lambda: link.away is None, link)
    return link


def test_messages_arrive_and_are_answered(ends: Ends) -> None:
    hub = ends.hub()
    link = connected(ends, hub)
    sample = Message("samples", {"n": 1}, TENSORS)
    assert link.send(sample) and link.under_way > 0
    until(lambda: hub.handler.messages, link)
    assert torch.equal(hub.handler.messages[0].tensors["states"], TENSORS["states"])
    until(lambda: link.under_way == 0, link)
    hub.send(hub.handler.sessions[-1], Message("offer", {"version": 7}))
    got: list[Message] = []
    until(lambda: got.extend(link.poll(0.01)) or [m for m in got if m.kind == "offer"])
    link.close()
    ends.open.remove(link)
    until(lambda: hub.handler.left)


def test_a_daemon_that_is_away_costs_what_is_sent_and_no_time(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter_online.link.HELLO_SECONDS", 0.2)
    monkeypatch.setattr("drafter_online.link.AWAY_SECONDS", 0.6)
    hub = ends.hub()
    link = connected(ends, hub)
    endpoint = hub.endpoint
    hub.close()
    ends.open.remove(hub)
    until(lambda: link.away is not None, link)
    begin = time.monotonic()
    for _ in range(200):
        assert not link.send(Message("rewards", {"a": 1.0}))
    assert time.monotonic() - begin < 0.5 and link.counts["dropped"] == 200 and link.counts["lost"] == 1
    again = ends.hub(endpoint)
    until(lambda: link.away is None, link)
    assert link.send(Message("rewards", {"a": 1.0}))
    until(lambda: again.handler.messages, link)


def test_a_daemon_that_was_started_again_at_once_is_told_who_speaks(ends: Ends, monkeypatch: Any) -> None:
    monkeypatch.setattr("drafter_online.link.HELLO_SECONDS", 0.2)
    hub = ends.hub()
    link = connected(ends, hub)
    hub._last_message.clear()
    link.send(Message("rewards", {"a": 1.0}))
    until(lambda: link.counts["sessions"] == 2, link)
    assert link.send(Message("rewards", {"a": 2.0}))
    until(lambda: [m for m in hub.handler.messages if m.body == {"a": 2.0}], link)


def test_a_slow_daemon_slows_feedback_only(ends: Ends) -> None:
    hub = ends.hub()
    link = connected(ends, hub, window=1 << 16)
    gate = threading.Event()
    take = hub.handler.received
    hub.handler.received = lambda s, m: (gate.wait(5), take(s, m))
    sent = [link.send(Message("samples", {}, {"t": torch.zeros(1 << 12)})) for _ in range(20)]
    assert sum(sent) == 4 and link.counts["dropped"] == 16
    gate.set()
    until(lambda: link.under_way == 0, link)
    assert link.send(Message("samples", {}, {"t": torch.zeros(1 << 12)}))


@pytest.mark.parametrize(("ours", "theirs"), [(TOKEN, None), (None, TOKEN), (TOKEN, "quite another token")])
def test_a_wrong_token_is_refused_in_one_sentence(
    ends: Ends, caplog: pytest.LogCaptureFixture, ours: str | None, theirs: str | None
) -> None:
    hub = ends.hub(token=theirs)
    link = ends.link(hub.endpoint, token=ours)
    until(lambda: "does not take this token" in (link.away or ""), link)
    until(lambda: hub.counts["refused/unauthenticated"] >= 1, link)
    assert not hub.handler.sessions
    assert caplog.text.count("refuses this engine") == 1


def test_an_engine_of_another_target_is_told_why(ends: Ends) -> None:
    hub = ends.hub()
    hub.handler.refuse = "this daemon trains a drafter for another target"
    link = ends.link(hub.endpoint)
    until(lambda: link.away == hub.handler.refuse, link)
    assert not link.send(Message("samples", {})) and len(hub) == 0


def test_what_the_handler_refuses_is_counted_and_answered(ends: Ends) -> None:
    hub = ends.hub()
    link = connected(ends, hub)
    faults = {
        "refused/content": SampleError("bad"),
        "failed": RuntimeError("a fault"),
        "refused/malformed": WireError("malformed", "x"),
    }
    for kind, error in faults.items():
        hub.handler.fail = error
        assert link.send(Message("samples", {}))
        until(lambda kind=kind: hub.counts[kind] == 1, link)
    hub.handler.fail = None
    link.send(Message("samples", {"fine": True}))
    until(lambda: hub.handler.messages, link)
    until(lambda: link.under_way == 0, link)


@pytest.mark.parametrize("endpoint", ["carrier://pigeon", "tcp://127.0.0.1:99999"])
def test_endpoints_that_cannot_be(endpoint: str) -> None:
    for make in (lambda: Link(endpoint, {}, token=TOKEN), lambda: Hub(endpoint, Recorder(), token=TOKEN)):
        with pytest.raises(WireError, match="cannot be"):
            make()


def test_one_endpoint_has_one_daemon(ends: Ends) -> None:
    hub = ends.hub()
    with pytest.raises(WireError, match="another daemon"):
        Hub(hub.endpoint, Recorder())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", [Link, Hub])
def test_an_end_that_is_dropped_without_a_close_does_not_wait(end: Any) -> None:
    """Collected in a cycle, a ZeroMQ context ends before its sockets do and waits for them."""
    dropped = [end("tcp://127.0.0.1:0" if end is Hub else "tcp://127.0.0.1:5", {})]
    context = dropped[0]._context
    dropped.append(dropped)
    del dropped
    gc.collect()
    assert context.closed


# ---- somebody else speaks -------------------------------------------------------------------------------------------


class Stranger:
    """A raw socket that sends whatever it likes."""

    def __init__(self, endpoint: str, token: str | None = None) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        if token is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = zmq.curve_keypair()
            self.socket.curve_serverkey = wire.keys_of(token).public
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
def test_strangers_are_heard_by_nobody(ends: Ends, token: str | None) -> None:
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
