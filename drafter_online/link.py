"""An engine's end of the wire: connects, authenticates, keeps count, and never waits.

    link = Link("tcp://127.0.0.1:5765", hello={"base": base, ...})
    while running:
        for message in link.poll(0.05): ...          # what the daemon says; also connects and says hello again
        link.send(Message("samples", record, tensors))    # False: dropped, and counted

One thread owns a link. What cannot be sent now is dropped: an engine has no room for a queue that grows while its
daemon is away, and fresh feedback is worth more than old. At most `window` bytes are under way without an answer, so a
slow daemon slows the feedback down and nothing else.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, OrderedDict
from typing import Any

from drafter_online import wire
from drafter_online.errors import WireError
from drafter_online.wire import NO_SALT, TO_DAEMON, TO_ENGINE, Message

log = logging.getLogger(__name__)

HELLO_SECONDS = 2.0  # between two attempts
CONNECT_SECONDS = 0.1  # the same, while there is no connection
REFUSED_SECONDS = 30.0  # the same, after the daemon said no
AWAY_SECONDS = 8.0  # of silence, after which the daemon counts as away


class Link:
    """One connection to a daemon, over its restarts.

    Args:
        endpoint: ZeroMQ's, such as tcp://host:5765 or ipc:///path.
        hello: what the daemon decides by: base of the target and so on. JSON types.
        token: the daemon's, None where it has none.
        server_key: the daemon's public CURVE key (Z85), None for no encryption.
        window: bytes that may be unanswered.

    Raises:
        WireError: the endpoint cannot be used, or would need a token.
    """

    def __init__(
        self,
        endpoint: str,
        hello: dict[str, Any],
        *,
        token: str | None = None,
        server_key: str | None = None,
        window: int = wire.MAX_FRAME,
    ) -> None:
        import zmq

        wire.require_token(endpoint, token)
        wire.check_port(endpoint)
        self.endpoint = endpoint
        self.hello = hello
        self.window = window
        self.counts: Counter[str] = Counter()  # sent, sent_bytes, dropped, refused/<kind>, sessions, lost
        self.away: str | None = "it has not answered yet"
        """Why nothing can be sent, None while the daemon listens."""
        self._key = wire.key_of(token)
        self._session = b""
        self._salt = NO_SALT
        self._seq = self._heard_seq = 0
        self._unanswered: OrderedDict[int, int] = OrderedDict()  # sequence number -> bytes
        self._under_way = 0
        self._heard = -AWAY_SECONDS
        self._next_hello = 0.0
        self._told: set[str] = set()
        self._zmq = zmq
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        s = self._socket
        s.setsockopt(zmq.LINGER, 0)
        s.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits for a daemon that is not there
        s.setsockopt(zmq.SNDHWM, 64)
        s.setsockopt(zmq.RCVHWM, 64)
        s.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME)
        s.setsockopt(zmq.RECONNECT_IVL, 200)
        s.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        try:
            if server_key is not None:
                s.curve_publickey, s.curve_secretkey = zmq.curve_keypair()
                s.curve_serverkey = server_key.encode()
            s.connect(endpoint)
        except (zmq.ZMQError, ValueError) as e:
            self.close()
            raise WireError("endpoint", f"{endpoint!r} cannot be connected to ({e})") from e

    @property
    def ready(self) -> bool:
        """Whether a message would be sent now."""
        return self.away is None and self._under_way < self.window

    @property
    def under_way(self) -> int:
        """Bytes sent and not yet answered."""
        return self._under_way

    def send(self, message: Message) -> bool:
        """Send without waiting. False: it was dropped, because the daemon is away, behind, or would not take it."""
        if not self.ready:
            self.counts["dropped"] += 1
            return False
        try:
            size = self._send(message)
        except WireError as e:
            self._tell(str(e), f"{e}")
            size = None
        if size is None:
            self.counts["dropped"] += 1
            return False
        self._unanswered[self._seq] = size
        self._under_way += size
        self.counts["sent"] += 1
        self.counts["sent_bytes"] += size
        return True

    def poll(self, seconds: float = 0.0) -> list[Message]:
        """Wait up to `seconds` for what the daemon says; keeps the connection alive. Never raises for what comes in."""
        now = time.monotonic()
        if self.away is None and now - self._heard > AWAY_SECONDS:
            self._lose(f"it has said nothing for {AWAY_SECONDS:g} s")
        if self.away is not None and now >= self._next_hello:
            self._greet(now)
        out: list[Message] = []
        wait = int(1000 * seconds)
        while self._socket.poll(wait):
            wait = 0
            message = self._take(self._socket.recv_multipart())
            if message is not None:
                out.append(message)
            if len(out) >= 64:
                break
        return out

    def close(self) -> None:
        """Say goodbye if anybody listens, and let go of the socket."""
        if self.away is None:
            self._send(Message("bye"))
        # With a moment for the goodbye.
        self._context.destroy(linger=200)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _send(self, message: Message) -> int | None:
        """Bytes sent; None where the socket does not take it."""
        self._seq += 1
        frames = wire.pack(message, self._session, self._seq, self._key, self._salt, TO_DAEMON)
        try:
            self._socket.send_multipart(frames, self._zmq.NOBLOCK, copy=False)
        except self._zmq.ZMQError:
            return None
        return sum(memoryview(f).nbytes for f in frames)

    def _greet(self, now: float) -> None:
        self._next_hello = now + HELLO_SECONDS
        self._session, self._salt, self._seq, self._heard_seq = os.urandom(16), NO_SALT, -1, 0
        self._unanswered.clear()
        self._under_way = 0
        if self._send(Message("hello", self.hello)) is None:
            self._next_hello = now + CONNECT_SECONDS

    def _lose(self, why: str) -> None:
        self.away = why
        self.counts["lost"] += 1
        log.warning("drafter-online: the drafter daemon at %s is away (%s); feedback is dropped.", self.endpoint, why)

    def _take(self, frames: list[bytes]) -> Message | None:
        try:
            p = wire.prelude(frames[0])
            if p.session != self._session:
                raise WireError("replayed", "it is of another session")
            greeting = self._salt == NO_SALT
            try:
                message = wire.unpack(frames, self._key, self._salt, TO_ENGINE)
            except WireError as e:
                # What a daemon says that does not know this session (yet, or any more).
                message = self._stranger(frames, e, greeting)
            if message.kind == "again":
                self._next_hello = min(self._next_hello, time.monotonic() + HELLO_SECONDS)
                if self.away is None:
                    self._lose("it was started again")
                return None
            if greeting:
                self._welcome(message)
                return None
            if p.seq <= self._heard_seq:
                raise WireError("replayed", f"number {p.seq} came after {self._heard_seq}")
            self._heard_seq = p.seq
        except WireError as e:
            self.counts[f"refused/{e.kind}"] += 1
            return None
        self._heard = time.monotonic()
        if message.kind == "ack":
            self._answered(message.body.get("seq"))
        return message

    def _stranger(self, frames: list[bytes], error: WireError, greeting: bool) -> Message:
        if error.kind != "unauthenticated":
            raise error
        if not greeting:
            message = wire.unpack(frames, self._key, NO_SALT, TO_ENGINE)
            if message.kind != "again":
                raise error
            return message
        # A daemon with another token can only say so unsealed; it is believed no more than that.
        message = wire.unpack(frames, b"", NO_SALT, TO_ENGINE)
        if message.kind != "denied":
            raise error
        return message

    def _welcome(self, message: Message) -> None:
        salt = message.body.get("salt")
        if message.kind == "welcome" and isinstance(salt, bytes) and len(salt) == len(NO_SALT) and salt != NO_SALT:
            self._salt = salt
            self._heard = time.monotonic()
            self.away = None
            self.counts["sessions"] += 1
            log.info("drafter-online: connected to the drafter daemon at %s.", self.endpoint)
        elif message.kind in ("refused", "denied"):
            reason = str(message.body.get("reason", ""))[:500]
            if message.kind == "denied":
                reason = f"it does not take this token; both sides need the same {wire.TOKEN_VARIABLE} or file"
            self.away = reason
            self._next_hello = time.monotonic() + REFUSED_SECONDS
            self._tell(reason, f"drafter-online: the drafter daemon at {self.endpoint} refuses this engine: {reason}.")

    def _answered(self, seq: Any) -> None:
        if isinstance(seq, int):
            self._under_way -= self._unanswered.pop(seq, 0)

    def _tell(self, key: str, sentence: str) -> None:
        log.log(logging.DEBUG if key in self._told else logging.WARNING, "%s", sentence)
        self._told.add(key)
