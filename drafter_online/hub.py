"""The daemon's end of the wire: many engines, one thread, and with a token only for who has it.

    hub = Hub("tcp://127.0.0.1:5765", handler, token=token)
    hub.start()                      # a thread; `handler` is called from it
    hub.send(session, message)       # from the handler, or from any other thread

A message that is malformed or too large is dropped and counted by kind; a connection without the token is refused
before it can send one; a message whose handler fails is counted as `failed`. Engines that are silent are forgotten;
one that was forgotten has to say hello again.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from typing import Any, Protocol

import zmq

from drafter_online import wire
from drafter_online.errors import DrafterError, WireError
from drafter_online.wire import Message

log = logging.getLogger(__name__)

SILENT_SECONDS = 20.0  # after which an engine is gone
MOST_SESSIONS = 1024
TICK_SECONDS = 0.05


class Handler(Protocol):
    """What a hub's owner does. All are called on the hub's thread."""

    def greeted(self, session: str, body: dict[str, Any]) -> str | None:
        """An engine says hello; why it is refused, or None."""

    def received(self, session: str, message: Message) -> None:
        """A message of an engine that was welcomed. A `DrafterError` refuses it."""

    def gone(self, session: str) -> None:
        """An engine said goodbye or has been silent too long."""


class Hub:
    """A socket that engines connect to.

    Args:
        endpoint: ZeroMQ's; port 0 or * takes a free one (`endpoint` is then the real one).
        token: required where others than this machine can reach the endpoint; encrypts.
        welcome: what the daemon says of itself to every engine that may connect.

    Raises:
        WireError: the endpoint is taken or cannot be used, or needs a token.
    """

    def __init__(
        self, endpoint: str, handler: Handler, *, token: str | None = None, welcome: dict[str, Any] | None = None
    ) -> None:
        options = {zmq.ROUTER_MANDATORY: 1, zmq.RCVHWM: 16}  # messages per engine; the rest waits with it
        endpoint = endpoint.replace(":0", ":*") if endpoint.endswith(":0") else endpoint
        self._context, self._socket, self._refusals = wire.open_socket(self, endpoint, token, options, serves=True)
        self.handler, self._welcome = handler, welcome or {}
        self.counts: Counter[str] = Counter()  # received, received_bytes, refused/<kind>, failed, unsent
        self._clock = wire.Awake()
        self._last_message: dict[bytes, float] = {}  # route of an engine -> time of its last message
        self._outgoing: deque[tuple[bytes, Message]] = deque(maxlen=1024)
        self._stop = threading.Event()
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
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
        return len(self._last_message)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self._socket.poll(int(1000 * TICK_SECONDS)):
                    route, *frames = self._socket.recv_multipart()
                    try:
                        self._handle(route, frames)
                    except DrafterError as e:
                        self._refused(e)
                while self._refusals.poll(0):
                    self._refusals.recv_multipart()
                    self._refused(WireError("unauthenticated", "its connection does not have this daemon's token"))
                while self._outgoing:
                    route, message = self._outgoing.popleft()
                    if route in self._last_message:
                        self._put(route, message)
                silent = self._clock.now() - SILENT_SECONDS
                for route in [r for r, last in self._last_message.items() if last < silent]:
                    self._drop(route)
            except Exception as e:  # one message must not end the service for all
                self.counts["failed"] += 1
                if self.counts["failed"] == 1:
                    log.warning("drafter-online: a message could not be handled (%s)", e, exc_info=e)

    def _refused(self, e: DrafterError) -> None:
        kind = f"refused/{e.kind if isinstance(e, WireError) else 'content'}"
        self.counts[kind] += 1
        log.log(logging.WARNING if self.counts[kind] == 1 else logging.DEBUG, "%s", e)

    def _handle(self, route: bytes, frames: list[bytes]) -> None:
        seq, message = wire.unpack(frames)
        if message.kind == "hello":
            self._greet(route, message)
            return
        if route not in self._last_message:
            self._put(route, Message("again"))
            raise WireError("unknown", "who sent it has not said hello (this daemon was started after it)")
        self._last_message[route] = self._clock.now()
        self.counts["received"] += 1
        self.counts["received_bytes"] += sum(map(len, frames))
        if message.kind == "bye":
            self._drop(route)
            return
        try:
            self.handler.received(route.hex(), message)
        finally:
            # Also of what was refused: the engine must not wait for it.
            self._put(route, Message("ack", {"seq": seq}))

    def _greet(self, route: bytes, message: Message) -> None:
        if route not in self._last_message and len(self._last_message) >= MOST_SESSIONS:
            self._drop(min(self._last_message, key=self._last_message.__getitem__))  # who lives says hello again
        reason = self.handler.greeted(route.hex(), message.body)
        if reason is not None:
            self._put(route, Message("refused", {"reason": reason}))
            raise WireError("refused", reason.rstrip("."))
        self._last_message[route] = self._clock.now()
        self._put(route, Message("welcome", self._welcome))

    def _put(self, route: bytes, message: Message) -> None:
        try:
            self._socket.send_multipart([route, *wire.pack(message)], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:  # gone, or it does not read: it will say hello again
            self.counts["unsent"] += 1

    def _drop(self, route: bytes) -> None:
        del self._last_message[route]
        self.handler.gone(route.hex())
