"""What goes over the network between engines and the daemon: framed, bounded, sealed. No socket here.

    prelude | header | tensor | tensor | ... | seal

`prelude` is 30 bytes (magic, format, session, sequence number); `header` is msgpack (kind, body, each tensor's name,
dtype and shape); tensors are their raw bytes; `seal` is a keyed BLAKE2b over all frames, with the token as key. It also
covers a salt that the daemon draws for each session, and the direction: what was recorded cannot be sent again, neither
in its session (the sequence number does not grow), nor in another one. Nothing is decoded before its seal is verified,
and the token itself never travels. Without a token the seal is a checksum.

    frames = pack(message, session, seq, key, salt, TO_DAEMON)
    message = unpack(frames, expect=prelude(frames[0]), key=key, salt=salt, way=TO_DAEMON)    # WireError, by kind

Secrecy is CURVE's (ZeroMQ), where keys are given; otherwise hidden states, token ids and weights travel in the clear.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from drafter_online.errors import WireError

if TYPE_CHECKING:
    from torch import Tensor

MAGIC, FORMAT = b"drft", 1
PRELUDE = struct.Struct(">4sH16sQ")
MAX_HEADER = 1 << 20
MAX_FRAME = 64 << 20
MAX_FRAMES = 32
SEAL_BYTES = 32
NO_SALT = b"\0" * 16
MOST_DIMENSIONS = 4

TOKEN_VARIABLE = "DRAFTER_ONLINE_TOKEN"
LEAST_TOKEN = 16  # characters

Way = Literal[b"to daemon", b"to engine"]
TO_DAEMON: Way = b"to daemon"
TO_ENGINE: Way = b"to engine"

Kind = Literal[
    "hello", "samples", "rewards", "status", "fetch", "target", "save", "load", "bye",  # from engines
    "welcome", "denied", "refused", "again", "ack", "offer", "chunk", "refresh", "done",  # from the daemon, and status
]  # fmt: skip

_DTYPES = {"int64": 8, "int32": 4, "bool": 1, "uint8": 1, "float32": 4, "bfloat16": 2, "float16": 2}


class _Header(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    kind: Kind
    body: dict[str, Any]
    tensors: list[tuple[str, str, list[int]]]  # name, dtype, shape


_decoder = msgspec.msgpack.Decoder(_Header)
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Prelude:
    """Who speaks, and the how-manieth time."""

    session: bytes  # 16
    seq: int


@dataclass(frozen=True, eq=False)
class Message:
    """One message. `tensors` are on the CPU."""

    kind: Kind
    body: dict[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def key_of(token: str | None) -> bytes:
    """The seal's key; an empty one without a token."""
    return hashlib.sha256(token.encode()).digest() if token else b""


def pack(message: Message, session: bytes, seq: int, key: bytes, salt: bytes, way: Way) -> list[Any]:
    """Frames of a message; tensors are not copied.

    Raises:
        WireError: it is larger than the other side would take.
    """
    tensors = {n: t.detach().to("cpu").contiguous() for n, t in message.tensors.items()}
    layout = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()]
    header = _encoder.encode(_Header(message.kind, message.body, layout))
    frames: list[Any] = [PRELUDE.pack(MAGIC, FORMAT, session, seq), header, *map(_bytes_of, tensors.values())]
    check_sizes([memoryview(f).nbytes for f in frames] + [SEAL_BYTES])
    return [*frames, seal(frames, key, salt, way)]


def prelude(frame: bytes) -> Prelude:
    """Read the first frame.

    Raises:
        WireError: it is not one.
    """
    if len(frame) != PRELUDE.size:
        raise WireError("malformed", f"its first frame has {len(frame)} bytes, not {PRELUDE.size}")
    magic, version, session, seq = PRELUDE.unpack(frame)
    if magic != MAGIC:
        raise WireError("malformed", "it does not begin as drafter-online's messages do")
    if version != FORMAT:
        raise WireError("malformed", f"its format is {version}, but this side speaks {FORMAT}; install the same")
    return Prelude(session, seq)


def unpack(frames: Sequence[bytes], key: bytes, salt: bytes, way: Way) -> Message:
    """The message in `frames`, once its seal is verified.

    Raises:
        WireError: too large, not sealed with this key, salt and direction, or not a message.
    """
    check_sizes([len(f) for f in frames])
    if len(frames) < 3:
        raise WireError("malformed", f"it has {len(frames)} frames")
    if not hmac.compare_digest(bytes(frames[-1]), seal(frames[:-1], key, salt, way)):
        raise WireError("unauthenticated", "its seal is of another token")
    try:
        header = _decoder.decode(frames[1])
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise WireError("malformed", f"its header cannot be read ({e})") from e
    payload = frames[2:-1]
    if len(payload) != len(header.tensors):
        raise WireError("malformed", f"it has {len(payload)} tensors, but its header names {len(header.tensors)}")
    tensors = {n: _tensor(n, d, s, p) for (n, d, s), p in zip(header.tensors, payload, strict=True)}
    return Message(header.kind, header.body, tensors)


def check_sizes(sizes: Sequence[int]) -> None:
    """Raises WireError where there are too many frames, or one is too large."""
    if len(sizes) > MAX_FRAMES + 3:
        raise WireError("oversized", f"it has {len(sizes)} frames, more than {MAX_FRAMES + 3}")
    if len(sizes) > 1 and sizes[1] > MAX_HEADER:
        raise WireError("oversized", f"its header has {sizes[1]} bytes, more than {MAX_HEADER}")
    if max(sizes, default=0) > MAX_FRAME:
        raise WireError("oversized", f"a frame has {max(sizes)} bytes, more than {MAX_FRAME}")


def seal(frames: Sequence[Any], key: bytes, salt: bytes, way: Way) -> bytes:
    """Keyed BLAKE2b-256 over direction, salt and frames, each with its length."""
    h = hashlib.blake2b(key=key, digest_size=SEAL_BYTES, salt=salt, person=way)
    for frame in frames:
        view = memoryview(frame)
        h.update(view.nbytes.to_bytes(8, "big"))
        h.update(view)
    return h.digest()


def _bytes_of(t: Tensor) -> Any:
    import torch

    # numpy knows no bfloat16, and no view of a tensor without elements.
    data: Any = t.reshape(-1).view(torch.uint8).numpy() if t.numel() else b""
    return memoryview(data)


def _tensor(name: str, dtype: str, shape: list[int], data: bytes) -> Tensor:
    import torch

    size = _DTYPES.get(dtype)
    if size is None:
        raise WireError("malformed", f"{name} has the dtype {dtype!r}")
    if len(shape) > MOST_DIMENSIONS or any(n < 0 for n in shape) or math.prod(shape) * size != len(data):
        raise WireError("malformed", f"{name} has {len(data)} bytes, which are not {dtype}{shape}")
    kind = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=kind)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if dtype == "bool":  # any byte but 0 and 1 would be a third truth value
        return (flat != 0).reshape(shape)
    return flat.view(kind).reshape(shape)


# ---- tokens, endpoints, keys ----------------------------------------------------------------------------------------


def read_token(file: Path | None, environ: Mapping[str, str] | None = None) -> str | None:
    """The token from a file, else from the environment (`DRAFTER_ONLINE_TOKEN`), else none.

    Raises:
        WireError: the file cannot be read, or the token is too short to be one.
    """
    where = TOKEN_VARIABLE
    token = (os.environ if environ is None else environ).get(TOKEN_VARIABLE, "").strip()
    if file is not None:
        where = str(file)
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as e:
            raise WireError("token", f"the token file {file} cannot be read ({e})") from e
    if not token and file is None:
        return None
    if len(token) < LEAST_TOKEN:
        raise WireError("token", f"the token in {where} has {len(token)} characters; use at least {LEAST_TOKEN}")
    return token


def is_local(endpoint: str) -> bool:
    """Whether only this machine can reach a ZeroMQ endpoint or a host."""
    scheme, _, rest = endpoint.rpartition("://")
    if scheme in ("ipc", "inproc"):
        return True
    host = rest if not scheme else rest.rpartition(":")[0]
    host = host.strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_token(endpoint: str, token: str | None) -> None:
    """Raises WireError where an endpoint that others can reach would be without a token."""
    if token is None and not is_local(endpoint):
        raise WireError(
            "token",
            f"{endpoint} can be reached from other machines, which needs a token; set {TOKEN_VARIABLE}",
        )


def check_port(endpoint: str) -> None:
    """Raises WireError where a TCP endpoint has no port; ZeroMQ takes any number, and wraps it."""
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp://") and port != "*" and not (port.isdigit() and int(port) < 1 << 16):
        raise WireError("endpoint", f"{endpoint!r} cannot be used; a port is 1 to 65535, as in tcp://127.0.0.1:5765")
