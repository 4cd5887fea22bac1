"""What goes over the network between engines and the daemon: framed and bounded. No socket here.

    header | tensor | tensor | ...

`header` is msgpack (format, sequence number, kind, body, each tensor's name, dtype and shape); tensors are their raw
bytes. Nothing but these types is decoded. With a token the connection is ZeroMQ's CURVE, encrypted, by keys that both
sides derive from the token (`keys_of`), which never travels. Without one there is loopback only.

    frames = pack(message, seq)
    seq, message = unpack(frames)    # WireError, by kind
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
import zmq
from torch import Tensor
from zmq.utils import z85

from drafter_online.errors import WireError

FORMAT = 2
MAX_HEADER = 1 << 20
MAX_FRAME = 64 << 20
MAX_FRAMES = 32

TOKEN_VARIABLE = "DRAFTER_ONLINE_TOKEN"
LEAST_TOKEN = 16  # characters
STOPPED_SECONDS = 2.0  # between two looks at the clock, after which a process counts as having been stopped

Kind = Literal[
    "hello", "samples", "rewards", "status", "fetch", "target", "save", "load", "bye",  # from engines
    "welcome", "refused", "again", "ack", "offer", "chunk", "refresh", "done",  # from the daemon, and status
]  # fmt: skip

_Dtype = Literal["int64", "int32", "bool", "uint8", "float32", "bfloat16", "float16"]
_Shape = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=4)]


class Awake:
    """A clock of one thread that looks at it often: seconds in which its process ran. While it was stopped, as by a
    debugger or with its machine, it received nothing, which is no silence of the other side.
    """

    def __init__(self) -> None:
        self._last, self._stopped = time.monotonic(), 0.0

    def now(self) -> float:
        """Seconds, from any start."""
        now = time.monotonic()
        if now - self._last > STOPPED_SECONDS:
            self._stopped += now - self._last
        self._last = now
        return now - self._stopped


class _Header(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    format: int
    seq: int
    kind: Kind
    body: dict[str, Any]
    tensors: list[tuple[str, _Dtype, _Shape]]  # by name


_decoder = msgspec.msgpack.Decoder(_Header)
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, eq=False)
class Message:
    """One message. `tensors` are on the CPU."""

    kind: Kind
    body: dict[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def pack(message: Message, seq: int = 0) -> list[Any]:
    """Frames of a message; tensors are not copied.

    Raises:
        WireError: it is larger than the other side would take.
    """
    tensors = {n: t.detach().to("cpu").contiguous() for n, t in message.tensors.items()}
    layout: Any = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()]
    header = _encoder.encode(_Header(FORMAT, seq, message.kind, message.body, layout))
    frames: list[Any] = [header, *map(_bytes_of, tensors.values())]
    check_sizes([memoryview(f).nbytes for f in frames])
    return frames


def unpack(frames: Sequence[bytes]) -> tuple[int, Message]:
    """Sequence number and message of `frames`.

    Raises:
        WireError: too large, of another format, or not a message.
    """
    check_sizes([len(f) for f in frames])
    try:
        header = _decoder.decode(frames[0] if frames else b"")
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise WireError("malformed", f"its header cannot be read ({e}); both sides need the same version") from e
    if header.format != FORMAT:
        raise WireError("malformed", f"its format is {header.format}, but this side speaks {FORMAT}; install the same")
    if len(frames) - 1 != len(header.tensors):
        raise WireError("malformed", f"it has {len(frames) - 1} tensors, but its header names {len(header.tensors)}")
    tensors = {n: _tensor(n, d, s, p) for (n, d, s), p in zip(header.tensors, frames[1:], strict=True)}
    return header.seq, Message(header.kind, header.body, tensors)


def check_sizes(sizes: Sequence[int]) -> None:
    """Raises WireError where there are too many frames, or one is too large."""
    if len(sizes) > MAX_FRAMES + 1:
        raise WireError("oversized", f"it has {len(sizes)} frames, more than {MAX_FRAMES + 1}")
    if sizes and sizes[0] > MAX_HEADER:
        raise WireError("oversized", f"its header has {sizes[0]} bytes, more than {MAX_HEADER}")
    if max(sizes, default=0) > MAX_FRAME:
        raise WireError("oversized", f"a frame has {max(sizes)} bytes, more than {MAX_FRAME}")


def _bytes_of(t: Tensor) -> Any:
    # numpy knows no bfloat16, and no view of a tensor without elements.
    data: Any = t.reshape(-1).view(torch.uint8).numpy() if t.numel() else b""
    return memoryview(data)


def _tensor(name: str, dtype: str, shape: list[int], data: bytes) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    if math.prod(shape) * kind.itemsize != len(data):
        raise WireError("malformed", f"{name} has {len(data)} bytes, which are not {dtype}{shape}")
    if not data:
        return torch.empty(shape, dtype=kind)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if dtype == "bool":  # any byte but 0 and 1 would be a third truth value
        return (flat != 0).reshape(shape)
    return flat.view(kind).reshape(shape)


# ---- tokens, endpoints, keys ----------------------------------------------------------------------------------------


def keys_of(token: str) -> tuple[bytes, bytes]:
    """The daemon's keys for CURVE (Z85), public and secret; derived slowly, so that guessing is slow as well. The
    public one, too, is known only to who has the token: it opens the connection.

    Raises:
        WireError: this ZeroMQ has no CURVE.
    """
    if not zmq.has("curve"):
        raise WireError("token", "this ZeroMQ cannot encrypt, which a token needs; install pyzmq from its wheel")
    raw = hashlib.scrypt(token.encode(), salt=b"drafter-online", n=1 << 14, r=8, p=1, dklen=32)
    secret = z85.encode(raw)
    return zmq.curve_public(secret), secret


def open_socket(owner: object, endpoint: str, token: str | None, options: Mapping[Any, int], serves: bool) -> Any:
    """One end of the wire: its context, its socket, and one from which its failed handshakes can be received.

    Raises:
        WireError: the endpoint cannot be used, or needs a token.
    """
    check_endpoint(endpoint, token)
    context: Any = zmq.Context()
    s = context.socket(zmq.ROUTER if serves else zmq.DEALER)
    for option, value in {zmq.LINGER: 0, zmq.MAXMSGSIZE: MAX_FRAME, zmq.SNDHWM: 64, **options}.items():
        s.setsockopt(option, value)
    failed = sum(int(zmq.Event[f"HANDSHAKE_FAILED_{kind}"]) for kind in ("NO_DETAIL", "PROTOCOL", "AUTH"))
    refusals = s.get_monitor_socket(failed)
    # A context that is collected before its sockets would wait for ever.
    weakref.finalize(owner, _close, context, (s, refusals))
    try:
        if token is not None:
            public, secret = keys_of(token)
            s.curve_publickey, s.curve_secretkey = (public, secret) if serves else zmq.curve_keypair()
            if serves:
                s.curve_server = True
            else:
                s.curve_serverkey = public
        (s.bind if serves else s.connect)(endpoint)
    except (zmq.ZMQError, ValueError) as e:
        _close(context, (s, refusals))
        what = "listened on ({}); is another daemon running there? Give another" if serves else "connected to ({})"
        raise WireError("endpoint", f"{endpoint!r} cannot be {what.format(e)}") from e
    return context, s, refusals


def _close(context: Any, sockets: tuple[Any, ...]) -> None:
    for s in sockets:
        s.close(linger=0)
    context.destroy(linger=0)


def read_token(file: Path | None) -> str | None:
    """The token from a file, else from the environment (`DRAFTER_ONLINE_TOKEN`), else none.

    Raises:
        WireError: the file cannot be read, or the token is too short to be one.
    """
    try:
        token = (os.environ.get(TOKEN_VARIABLE, "") if file is None else file.read_text(encoding="utf-8")).strip()
    except (OSError, ValueError) as e:
        raise WireError("token", f"the token file {file} cannot be read ({e})") from e
    if not token and file is None:
        return None
    if len(token) < LEAST_TOKEN:
        where = file or TOKEN_VARIABLE
        raise WireError("token", f"the token in {where} has {len(token)} characters; use at least {LEAST_TOKEN}")
    return token


def is_local(endpoint: str) -> bool:
    """Whether only this machine can reach a ZeroMQ endpoint or a host."""
    scheme, _, rest = endpoint.rpartition("://")
    host = (rest.rpartition(":")[0] if scheme else rest).strip("[]")
    if scheme in ("ipc", "inproc") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_endpoint(endpoint: str, token: str | None) -> None:
    """Raises WireError where others can reach an endpoint (or a host) and it would be without a token, or where a TCP
    endpoint has no port; ZeroMQ takes any number, and wraps it.
    """
    if token is None and not is_local(endpoint):
        raise WireError(
            "token", f"{endpoint} can be reached from other machines, which needs a token; set {TOKEN_VARIABLE}"
        )
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp://") and port != "*" and not (port.isdigit() and int(port) < 1 << 16):
        raise WireError("endpoint", f"{endpoint!r} cannot be used; a port is 1 to 65535, as in tcp://127.0.0.1:5765")
