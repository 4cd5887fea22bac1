"""The wire: what is sent arrives, and what is malformed, oversized or not meant for this end is refused, by kind."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
zmq = pytest.importorskip("zmq")

from wire_ends import TENSORS, TOKEN, Ends, Recorder, connected, packed, until  # noqa: E402

from drafter_online import wire  # noqa: E402
from drafter_online.errors import SampleError, WireError  # noqa: E402
from drafter_online.hub import Hub  # noqa: E402
from drafter_online.link import Link  # noqa: E402
from drafter_online.wire import FORMAT, Message  # noqa: E402


def header(*fields: Any) -> bytes:
    return wire._encoder.encode([FORMAT, 1, *fields])


def test_what_is_packed_is_unpacked() -> None:
    seq, message = wire.unpack(packed(seq=7))
    assert seq == 7 and message.kind == "samples" and message.body == {"a": 1}
    for name, t in TENSORS.items():
        assert message.tensors[name].dtype == t.dtype and torch.equal(message.tensors[name], t), name


def test_keys_are_of_the_token() -> None:
    public, secret = wire.keys_of(TOKEN)
    assert wire.keys_of(TOKEN) == (public, secret) and zmq.curve_public(secret) == public
    assert wire.keys_of(f"{TOKEN}.") != (public, secret)


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
            wire.check_endpoint(endpoint, None)
        wire.check_endpoint(endpoint, TOKEN)


# ---- sockets --------------------------------------------------------------------------------------------------------


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


def test_an_engine_that_stood_still_does_not_call_its_daemon_away(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a debugger, a scheduler or a benchmark stopped: what it did not hear is no silence."""
    monkeypatch.setattr("drafter_online.wire.STOPPED_SECONDS", 0.4)
    monkeypatch.setattr("drafter_online.link.AWAY_SECONDS", 0.6)
    hub = ends.hub()
    link = connected(ends, hub)
    time.sleep(1.0)
    link.poll(0.01)
    assert link.away is None and link.counts["lost"] == 0
    assert link.send(Message("rewards", {"a": 1.0}))
    until(lambda: hub.handler.messages, link)


def test_a_daemon_that_was_started_again_at_once_learns_who_speaks(ends: Ends, monkeypatch: Any) -> None:
    monkeypatch.setattr("drafter_online.link.HELLO_SECONDS", 0.2)
    hub = ends.hub()
    link = connected(ends, hub)
    hub._last_message.clear()
    link.send(Message("rewards", {"a": 1.0}))
    until(lambda: link.counts["sessions"] == 2, link)
    assert link.send(Message("rewards", {"a": 2.0}))
    until(lambda: [m for m in hub.handler.messages if m.body == {"a": 2.0}], link)


def test_a_slow_daemon_slows_feedback_only(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter_online.link.WINDOW", 1 << 16)
    hub = ends.hub()
    link = connected(ends, hub)
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


def test_an_engine_of_another_target_learns_why(ends: Ends) -> None:
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
