"""An engine's end of the wire: connects, authenticates, keeps count, and never waits.

    link = Link("tcp://127.0.0.1:5765", hello={"base": base, ...})
    while running:
        for message in link.poll(0.05): ...          # what the daemon says; also connects and says hello again
        link.send(Message("samples", record, tensors))    # False: dropped, and counted

One thread owns a link. What cannot be sent now is dropped: an engine has no room for a queue that grows while its
daemon is away, and fresh feedback is worth more than old. At most `WINDOW` bytes are under way without an answer, so a
slow daemon slows the feedback down and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, OrderedDict
from typing import Any

import zmq

from drafter_online import wire
from drafter_online.errors import WireError
from drafter_online.samples import Sample
from drafter_online.wire import Message

log = logging.getLogger(__name__)

WINDOW = wire.MAX_FRAME  # bytes that may be unanswered
HELLO_SECONDS = 2.0  # between two attempts
CONNECT_SECONDS = 0.1  # the same, while there is no connection
REFUSED_SECONDS = 30.0  # the same, after the daemon said no
AWAY_SECONDS = 8.0  # of silence, after which the daemon counts as away


class Link:
    """One connection to a daemon, over its restarts.

    Args:
        endpoint: ZeroMQ's, such as tcp://host:5765 or ipc:///path.
        hello: what the daemon decides by: base of the target and so on. JSON types.
        token: the daemon's, None where it has none; encrypts.

    Raises:
        WireError: the endpoint cannot be used, or would need a token.
    """

    def __init__(self, endpoint: str, hello: dict[str, Any], *, token: str | None = None) -> None:
        # Nothing waits for a daemon that is not there.
        options = {zmq.IMMEDIATE: 1, zmq.RCVHWM: 64, zmq.RECONNECT_IVL: 200, zmq.RECONNECT_IVL_MAX: 2000}
        self._context, self._socket, self._refusals = wire.open_socket(self, endpoint, token, options, serves=False)
        self.endpoint = endpoint
        self.hello = hello
        self.counts: Counter[str] = Counter()  # sent, sent_bytes, dropped, refused/<kind>, sessions, lost
        self.away: str | None = "it has not answered yet"
        """Why nothing can be sent, None while the daemon listens."""
        self.welcome: dict[str, Any] = {}
        """What the daemon said of itself: `rejected`, whether it learns from rejected proposals."""
        self._seq = 0
        self._unanswered: OrderedDict[int, int] = OrderedDict()  # sequence number -> bytes
        self.under_way = 0  # bytes
        self._clock = wire.Awake()
        self._last_message = -AWAY_SECONDS
        self._next_hello = 0.0
        self._next_connection = 0.0
        self._given_up = False  # a handshake failed since the last attempt
        self._logged: set[str] = set()

    @property
    def ready(self) -> bool:
        """Whether a message would be sent now."""
        return self.away is None and self.under_way < WINDOW

    def send(self, message: Message) -> bool:
        """Send without waiting. False: it was dropped, because the daemon is away, behind, or would not take it."""
        if not self.ready:
            self.counts["dropped"] += 1
            return False
        try:
            size = self._send(message)
        except (WireError, zmq.ZMQError) as e:
            if isinstance(e, WireError):
                self._log_once(str(e))
            self.counts["dropped"] += 1
            return False
        self._unanswered[self._seq] = size
        self.under_way += size
        self.counts["sent"] += 1
        self.counts["sent_bytes"] += size
        return True

    def send_sample(self, sample: Sample) -> tuple[int, int]:
        """Send a sample, a long one in windows; how many of these were sent, and how many dropped."""
        windows = sample.windows()
        sent = 0
        for window in windows:
            tensors, record = window.parts()
            sent += self.send(Message("samples", record, tensors))
        return sent, len(windows) - sent

    def poll(self, seconds: float = 0.0) -> list[Message]:
        """Wait up to `seconds` for what the daemon says; keeps the connection alive. Never raises for what comes in."""
        now = time.monotonic()
        if self._clock.now() - self._last_message > AWAY_SECONDS and self.away is None:
            self._lose(f"it has said nothing for {AWAY_SECONDS:g} s")
        if self.away is not None and now >= self._next_hello:
            self._greet(now)
        while self._refusals.poll(0):
            self._refusals.recv_multipart()
            if self.away is not None:
                self._refused(f"it does not take this token; both sides need the same {wire.TOKEN_VARIABLE} or file")
                self._given_up = True
        if self._given_up and now >= self._next_connection:
            self._connect_again(now)
        out: list[Message] = []
        wait = int(1000 * seconds)
        while len(out) < 64 and self._socket.poll(wait):
            wait = 0
            message = self._take(self._socket.recv_multipart())
            if message is not None:
                out.append(message)
        return out

    def close(self) -> None:
        """Say goodbye if a daemon listens, and let go of the socket."""
        if self.away is None:
            with contextlib.suppress(zmq.ZMQError):
                self._send(Message("bye"))
        # With a moment for the goodbye.
        self._context.destroy(linger=200)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _send(self, message: Message) -> int:
        """Bytes sent; raises what `wire.pack` does, and ZMQError where the socket does not take it."""
        self._seq += 1
        frames = wire.pack(message, self._seq)
        self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        return sum(memoryview(f).nbytes for f in frames)

    def _greet(self, now: float) -> None:
        self._unanswered.clear()
        self.under_way = 0
        try:
            self._send(Message("hello", self.hello))
            self._next_hello = now + HELLO_SECONDS
        except zmq.ZMQError:
            self._next_hello = now + CONNECT_SECONDS

    def _connect_again(self, now: float) -> None:
        """ZeroMQ gives an endpoint up for good when one side encrypts and the other does not; its daemon may change."""
        self._given_up = False
        self._next_connection = now + HELLO_SECONDS
        with contextlib.suppress(zmq.ZMQError):  # it is disconnected already where it was given up
            self._socket.disconnect(self.endpoint)
        self._socket.connect(self.endpoint)

    def _lose(self, why: str) -> None:
        self.away = why
        self.counts["lost"] += 1
        log.warning("drafter-online: the drafter daemon at %s is away (%s); feedback is dropped.", self.endpoint, why)

    def _take(self, frames: list[bytes]) -> Message | None:
        try:
            _, message = wire.unpack(frames)
        except WireError as e:
            self.counts[f"refused/{e.kind}"] += 1
            return None
        now = time.monotonic()
        if message.kind == "again":
            self._next_hello = min(self._next_hello, now + HELLO_SECONDS)
            if self.away is None:
                self._lose("it was started again")
        elif message.kind == "refused":
            self._refused(str(message.body.get("reason", ""))[:500])
            self._next_hello = now + REFUSED_SECONDS
        elif message.kind == "welcome":
            self._last_message, self.welcome = self._clock.now(), message.body
            if self.away is not None:
                self.away = None
                self.counts["sessions"] += 1
                log.info("drafter-online: connected to the drafter daemon at %s.", self.endpoint)
        elif self.away is None:  # its messages from before the interruption are of no use
            self._last_message = self._clock.now()
            if message.kind == "ack" and isinstance(seq := message.body.get("seq"), int):
                self.under_way -= self._unanswered.pop(seq, 0)
            return message
        return None

    def _refused(self, reason: str) -> None:
        self.away = reason
        self._log_once(f"drafter-online: the drafter daemon at {self.endpoint} refuses this engine: {reason}.")

    def _log_once(self, sentence: str) -> None:
        log.log(logging.DEBUG if sentence in self._logged else logging.WARNING, "%s", sentence)
        self._logged.add(sentence)
