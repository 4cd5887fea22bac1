"""The daemon's end of the wire: many engines, one thread, nothing believed before its seal is verified.

    hub = Hub("tcp://127.0.0.1:5765", handler, token=token)
    hub.start()                      # a thread; `handler` is called from it
    hub.send(session, message)       # from the handler, or from any other thread

A message that is malformed, too large, unsealed, or comes again is dropped and counted by kind; one whose handler fails
is counted as `failed`. Sessions that are silent are forgotten; an engine that was forgotten is told to say hello again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from drafter_online import wire
from drafter_online.errors import DrafterError, WireError
from drafter_online.wire import NO_SALT, TO_DAEMON, TO_ENGINE, Message

log = logging.getLogger(__name__)

SILENT_SECONDS = 20.0  # after which an engine is gone
PENDING_SECONDS = 10.0  # the same for one that only said hello
MOST_SESSIONS = 1024
TICK_SECONDS = 0.05


class Handler(Protocol):
    """What a hub's owner does. All are called on the hub's thread."""

    def greeted(self, session: str, body: dict[str, Any]) -> str | None:
        """An engine says hello; why it is refused, or None."""

    def received(self, session: str, message: Message) -> None:
        """A message of an engine that was welcomed. A `DrafterError` refuses it."""

    def gone(self, session: str) -> None:
        """An engine said goodbye or is silent."""


@dataclass(slots=True)
class _Session:
    route: bytes
    salt: bytes
    seq: int  # last one heard
    heard: float
    said: int = 0  # last one sent
    proven: bool = False  # it has spoken under its salt


class Hub:
    """A socket that engines connect to.

    Args:
        endpoint: ZeroMQ's; port 0 or * takes a free one (`endpoint` is then the real one).
        handler: see `Handler`.
        token: required where others than this machine can reach the endpoint.
        secret_key: CURVE's secret key (Z85); engines then need the public one.

    Raises:
        WireError: the endpoint is taken or cannot be used, or needs a token.
    """

    def __init__(
        self, endpoint: str, handler: Handler, *, token: str | None = None, secret_key: str | None = None
    ) -> None:
        import zmq

        wire.require_token(endpoint, token)
        wire.check_port(endpoint)
        self.handler = handler
        self.counts: Counter[str] = Counter()  # received, received_bytes, refused/<kind>, failed, unsent
        self._key = wire.key_of(token)
        self._sessions: dict[bytes, _Session] = {}
        self._outgoing: deque[tuple[bytes, Message]] = deque(maxlen=1024)
        self._stop = threading.Event()
        self._zmq = zmq
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        s = self._socket
        s.setsockopt(zmq.LINGER, 0)
        s.setsockopt(zmq.ROUTER_MANDATORY, 1)
        s.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME)
        s.setsockopt(zmq.SNDHWM, 64)
        s.setsockopt(zmq.RCVHWM, 16)  # per engine; the rest waits with it
        try:
            if secret_key is not None:
                s.curve_secretkey = secret_key.encode()
                s.curve_publickey = zmq.curve_public(secret_key.encode())
                s.curve_server = True
            s.bind(endpoint.replace(":0", ":*") if endpoint.endswith(":0") else endpoint)
        except (zmq.ZMQError, ValueError) as e:
            self._context.destroy(linger=0)
            raise WireError(
                "endpoint", f"{endpoint!r} cannot be listened on ({e}); is another daemon running there? Give another"
            ) from e
        self.endpoint = s.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="drafter-hub", daemon=True)

    def start(self) -> None:
        """Listen."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening; the socket is free afterwards."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10)
        self._context.destroy(linger=0)

    def send(self, session: str, message: Message) -> None:
        """Have a message sent; the oldest waiting ones are dropped where too many wait."""
        self._outgoing.append((bytes.fromhex(session), message))

    @property
    def listens(self) -> bool:
        """Whether its thread lives."""
        return self._thread.is_alive()

    def __len__(self) -> int:
        return sum(s.proven for s in self._sessions.values())

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self._socket.poll(int(1000 * TICK_SECONDS)):
                    self._receive()
                while self._outgoing:
                    self._send(*self._outgoing.popleft())
                self._forget()
            except Exception as e:  # one message must not end the service for all
                self.counts["failed"] += 1
                if self.counts["failed"] == 1:
                    log.warning("drafter-online: a message could not be handled (%s)", e, exc_info=e)

    def _receive(self) -> None:
        route, *frames = self._socket.recv_multipart()
        try:
            self._handle(route, frames)
        except WireError as e:
            kind = f"refused/{e.kind}"
            self.counts[kind] += 1
            log.log(logging.WARNING if self.counts[kind] == 1 else logging.DEBUG, "%s", e)
        except DrafterError as e:
            self.counts["refused/content"] += 1
            log.log(logging.WARNING if self.counts["refused/content"] == 1 else logging.DEBUG, "%s", e)

    def _handle(self, route: bytes, frames: list[bytes]) -> None:
        if not frames:
            raise WireError("malformed", "it is empty")
        wire.check_sizes([len(f) for f in frames])
        p = wire.prelude(frames[0])
        known = self._sessions.get(p.session)
        if p.seq == 0:
            self._greet(route, frames, p.session)
            return
        if known is None:
            self._reply(route, p.session, Message("again"))
            raise WireError("unknown", "its session is not known (this daemon was started after it)")
        message = wire.unpack(frames, self._key, known.salt, TO_DAEMON)
        if p.seq <= known.seq:
            raise WireError("replayed", f"number {p.seq} came after {known.seq}")
        known.seq, known.heard, known.route, known.proven = p.seq, time.monotonic(), route, True
        self.counts["received"] += 1
        self.counts["received_bytes"] += sum(map(len, frames))
        name = p.session.hex()
        if message.kind == "bye":
            self._drop(p.session)
            return
        try:
            self.handler.received(name, message)
        finally:
            # Also of what was refused: the engine must not wait for it.
            self._send(p.session, Message("ack", {"seq": p.seq}))

    def _greet(self, route: bytes, frames: list[bytes], session: bytes) -> None:
        if session in self._sessions:
            raise WireError("replayed", "its session has begun already")
        try:
            message = wire.unpack(frames, self._key, NO_SALT, TO_DAEMON)
        except WireError as e:
            if e.kind == "unauthenticated":
                self._reply(route, session, Message("denied"), key=b"")
            raise
        if message.kind != "hello":
            raise WireError("malformed", "a session begins with a hello")
        self._make_room()
        reason = self.handler.greeted(session.hex(), message.body)
        if reason is not None:
            self._reply(route, session, Message("refused", {"reason": reason}))
            raise WireError("refused", reason.rstrip("."))
        salt = os.urandom(len(NO_SALT))
        self._sessions[session] = _Session(route, salt, 0, time.monotonic())
        self._reply(route, session, Message("welcome", {"salt": salt}))

    def _reply(self, route: bytes, session: bytes, message: Message, key: bytes | None = None) -> None:
        """Outside of any session."""
        frames = wire.pack(message, session, 0, self._key if key is None else key, NO_SALT, TO_ENGINE)
        self._put(route, frames)

    def _send(self, session: bytes, message: Message) -> None:
        s = self._sessions.get(session)
        if s is None:
            return
        s.said += 1
        self._put(s.route, wire.pack(message, session, s.said, self._key, s.salt, TO_ENGINE))

    def _put(self, route: bytes, frames: list[Any]) -> None:
        try:
            self._socket.send_multipart([route, *frames], self._zmq.NOBLOCK, copy=False)
        except self._zmq.ZMQError:  # gone, or it does not read: it will say hello again
            self.counts["unsent"] += 1

    def _make_room(self) -> None:
        """Hellos can be replayed, so sessions that only said hello are few and short."""
        if len(self._sessions) >= MOST_SESSIONS:
            pending = [k for k, s in self._sessions.items() if not s.proven]
            if not pending:
                raise WireError("refused", f"{MOST_SESSIONS} engines are connected already")
            self._drop(min(pending, key=lambda k: self._sessions[k].heard))

    def _forget(self) -> None:
        now = time.monotonic()
        for key, s in list(self._sessions.items()):
            if now - s.heard > (SILENT_SECONDS if s.proven else PENDING_SECONDS):
                self._drop(key)

    def _drop(self, session: bytes) -> None:
        del self._sessions[session]
        self.handler.gone(session.hex())


def write_keys(path: Path) -> str:
    """Write a new CURVE secret key to `path`, for its owner only; returns the public key that engines are given.

    Raises:
        WireError: it cannot be written, or is there already.
    """
    import zmq

    public, secret = zmq.curve_keypair()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as f:
            f.write(secret + b"\n")
    except OSError as e:
        raise WireError("keys", f"{path} cannot be written ({e.strerror or e}); choose a new file") from e
    return public.decode()


def read_key(path: Path) -> tuple[str, str]:
    """(secret, public) of a file that `write_keys` made.

    Raises:
        WireError: it cannot be read or holds no key.
    """
    import zmq

    try:
        secret = path.read_text(encoding="utf-8").strip()
        return secret, zmq.curve_public(secret.encode()).decode()
    except (OSError, ValueError, zmq.ZMQError) as e:
        raise WireError("keys", f"{path} holds no CURVE secret key ({e}); make one with drafter-online keys") from e
