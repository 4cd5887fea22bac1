"""The wire: what is sent arrives, and what is malformed, oversized, replayed or unauthenticated is refused, by kind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
zmq = pytest.importorskip("zmq")

from wire_ends import Ends, Recorder, until  # noqa: E402

from drafter_online import wire  # noqa: E402
from drafter_online.errors import SampleError, WireError  # noqa: E402
from drafter_online.hub import Hub, read_key, write_keys  # noqa: E402
from drafter_online.link import Link  # noqa: E402
from drafter_online.wire import NO_SALT, TO_DAEMON, TO_ENGINE, Message  # noqa: E402

TOKEN = "a token of some length"
KEY = wire.key_of(TOKEN)
SESSION = bytes(range(16))
TENSORS = {
    "ids": torch.arange(5),
    "states": torch.randn(3, 4, dtype=torch.bfloat16),
    "mask": torch.tensor([True, False]),
    "none": torch.empty(0, 4),
    "one": torch.tensor(2.5),
}


def packed(message: Message | None = None, seq: int = 1, key: bytes = KEY, salt: bytes = NO_SALT) -> list[bytes]:
    message = message or Message("samples", {"a": 1}, TENSORS)
    return [bytes(f) for f in wire.pack(message, SESSION, seq, key, salt, TO_DAEMON)]


def test_what_is_packed_is_unpacked() -> None:
    frames = packed()
    assert wire.prelude(frames[0]) == wire.Prelude(SESSION, 1)
    message = wire.unpack(frames, KEY, NO_SALT, TO_DAEMON)
    assert message.kind == "samples" and message.body == {"a": 1}
    for name, t in TENSORS.items():
        assert message.tensors[name].dtype == t.dtype and torch.equal(message.tensors[name], t), name


def test_a_seal_is_of_token_salt_direction_and_every_byte() -> None:
    frames = packed()
    for key, salt, way in ((b"", NO_SALT, TO_DAEMON), (KEY, b"1" * 16, TO_DAEMON), (KEY, NO_SALT, TO_ENGINE)):
        with pytest.raises(WireError, match="token") as e:
            wire.unpack(frames, key, salt, way)
        assert e.value.kind == "unauthenticated"
    for i in range(len(frames) - 1):
        if frames[i]:
            altered = [*frames[:i], bytes([frames[i][0] ^ 1]) + frames[i][1:], *frames[i + 1 :]]
            with pytest.raises(WireError):
                wire.unpack(altered, KEY, NO_SALT, TO_DAEMON)


def sealed(*frames: bytes) -> list[bytes]:
    return [*frames, wire.seal(frames, KEY, NO_SALT, TO_DAEMON)]


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\x93",
        wire._encoder.encode(["hello"]),
        wire._encoder.encode(["who", {}, []]),
        wire._encoder.encode(["hello", [], []]),
        wire._encoder.encode(["hello", {}, [["t", "float32", [2]]]]),
        wire._encoder.encode(["hello", {}, [], 1]),
        b"\x93\xa5hello" + b"\x81\xa1a" * 20000 + b"\xc0\x90",
    ],
)
def test_sealed_nonsense_is_malformed(header: bytes) -> None:
    with pytest.raises(WireError) as e:
        wire.unpack(sealed(packed()[0], header), KEY, NO_SALT, TO_DAEMON)
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
    header = wire._encoder.encode(["samples", {}, [["t", dtype, shape]]])
    with pytest.raises(WireError) as e:
        wire.unpack(sealed(packed()[0], header, b"0" * size), KEY, NO_SALT, TO_DAEMON)
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
        wire.unpack([*packed()[:2], b"0" * 1025, b"0" * 32], KEY, NO_SALT, TO_DAEMON)
    assert e.value.kind == "oversized"


@settings(deadline=None)
@given(st.lists(st.binary(max_size=80), max_size=6), st.booleans())
def test_any_frames_are_refused_and_nothing_else(frames: list[bytes], sealed_: bool) -> None:
    if sealed_ and frames:
        frames = [packed()[0], *frames]
        frames.append(wire.seal(frames, KEY, NO_SALT, TO_DAEMON))
    try:
        wire.unpack(frames, KEY, NO_SALT, TO_DAEMON)
    except WireError:
        return
    assert sealed_


def test_tokens_and_endpoints(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert wire.read_token(file, {}) == TOKEN
    assert wire.read_token(None, {wire.TOKEN_VARIABLE: TOKEN}) == TOKEN
    assert wire.read_token(None, {}) is None
    for path, env in ((tmp_path / "no", {}), (None, {wire.TOKEN_VARIABLE: "short"})):
        with pytest.raises(WireError, match="token"):
            wire.read_token(path, env)
    file.write_text("")
    with pytest.raises(WireError, match="0 characters"):
        wire.read_token(file, {})
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
    hub._sessions.clear()
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


def test_the_wire_can_be_encrypted(ends: Ends, tmp_path: Path) -> None:
    if not zmq.has("curve"):
        pytest.skip("this ZeroMQ has no CURVE")
    public = write_keys(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    secret, again = read_key(tmp_path / "key")
    assert again == public
    hub = ends.hub(secret_key=secret, token=TOKEN)
    link = connected(ends, hub, server_key=public, token=TOKEN)
    assert link.send(Message("samples", {"n": 1}, TENSORS))
    until(lambda: hub.handler.messages, link)
    plain = ends.link(hub.endpoint, token=TOKEN)
    stranger = ends.link(hub.endpoint, token=TOKEN, server_key=write_keys(tmp_path / "other"))
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        plain.poll(0.01)
        stranger.poll(0.01)
    assert plain.away and stranger.away and len(hub.handler.sessions) == 1
    for bad in (tmp_path / "none", tmp_path):
        with pytest.raises(WireError, match="CURVE"):
            read_key(bad)
    with pytest.raises(WireError, match="new file"):
        write_keys(tmp_path / "key")


@pytest.mark.parametrize("endpoint", ["carrier://pigeon", "tcp://127.0.0.1:99999"])
def test_endpoints_that_cannot_be(endpoint: str) -> None:
    for make in (lambda: Link(endpoint, {}, token=TOKEN), lambda: Hub(endpoint, Recorder(), token=TOKEN)):
        with pytest.raises(WireError, match="cannot be"):
            make()


def test_one_endpoint_has_one_daemon(ends: Ends) -> None:
    hub = ends.hub()
    with pytest.raises(WireError, match="another daemon"):
        Hub(hub.endpoint, Recorder())


# ---- somebody else speaks -------------------------------------------------------------------------------------------


class Stranger:
    """A raw socket that sends whatever it likes."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)

    def close(self) -> None:
        self.context.destroy(linger=0)


def test_replays_are_refused(ends: Ends) -> None:
    """Everything that an engine ever said is said again, by somebody who has no token."""
    hub = ends.hub(token=TOKEN)
    link = ends.link(hub.endpoint, token=TOKEN)
    said: list[list[bytes]] = []
    send = link._socket.send_multipart

    def overheard(frames: Any, *args: Any, **kw: Any) -> None:
        send(frames, *args, **kw)
        said.append([bytes(f) for f in frames])

    link._socket.send_multipart = overheard
    until(lambda: link.away is None, link)
    for i in range(3):
        link.send(Message("rewards", {"a": float(i)}))
    until(lambda: len(hub.handler.messages) == 3, link)
    stranger = Stranger(hub.endpoint)
    ends.open.append(stranger)
    for frames in said:
        stranger.socket.send_multipart(frames)
    until(lambda: hub.counts["refused/replayed"] >= len(said), link)
    assert len(hub.handler.messages) == 3
    # After a restart the sessions are not known, and an old hello opens one with another salt.
    hub._sessions.clear()
    for frames in said:
        stranger.socket.send_multipart(frames)
    until(lambda: hub.counts["refused/unauthenticated"] >= 3, link)
    assert len(hub.handler.messages) == 3


def test_hellos_without_end_do_not_fill_the_table(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter_online.hub.MOST_SESSIONS", 8)
    hub = ends.hub()
    link = connected(ends, hub)
    link.send(Message("rewards", {"a": 1.0}))
    until(lambda: hub.handler.messages, link)
    stranger = Stranger(hub.endpoint)
    ends.open.append(stranger)
    for _ in range(50):
        frames = wire.pack(Message("hello", {}), os.urandom(16), 0, b"", NO_SALT, TO_DAEMON)
        stranger.socket.send_multipart(frames)
    until(lambda: len(hub.handler.sessions) == 51, link)
    assert len(hub._sessions) <= 8
    link.send(Message("rewards", {"a": 2.0}))
    until(lambda: len(hub.handler.messages) == 2, link)


_mutation = st.tuples(
    st.sampled_from(["flip", "cut", "drop", "twice", "swap", "grow", "prelude"]), st.integers(0, 1 << 16)
)


@given(st.lists(st.one_of(st.lists(st.binary(max_size=64), min_size=1, max_size=6), _mutation), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fuzz_never_harms_the_daemon(fuzzed: tuple[Any, Link, Stranger], messages: list[Any]) -> None:
    """Random and mutated frames from a peer without the token: refused and counted; the honest engine is served."""
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
    frames = packed(
        Message("samples", {"n": n}, {"t": torch.arange(n % 50)}), seq=1 + n % 3, key=wire.key_of("not the token")
    )
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
    hub = ends.hub(token=TOKEN)
    link = connected(ends, hub, token=TOKEN)
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
