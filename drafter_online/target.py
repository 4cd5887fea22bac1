"""The target's own tensors as they come in pieces from an engine whose policy moves.

A head under training uses the target's embedding, final norm and LM head. In RL they change with every update, so one
engine sends them after a new policy version, in pieces, all of one version or nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import Tensor

from drafter_online.engines import read
from drafter_online.errors import WireError
from drafter_online.wire import Message

PIECE_BYTES = 8 << 20
MOST_BYTES = 16 << 30

Name = Literal["embed", "norm", "lm_head"]


class _Piece(msgspec.Struct, frozen=True):
    sender: str
    policy: int
    name: Name
    row: int  # first row
    rows: int  # of the whole tensor
    names: Annotated[list[Name], msgspec.Meta(min_length=1)]  # tensors that this version consists of


def pieces(weights: Mapping[str, Tensor], sender: str, policy: int) -> Iterator[Message]:
    """Tensors in messages of about `PIECE_BYTES` each, in order."""
    names = list(weights)
    for name, t in weights.items():
        each = max(1, PIECE_BYTES // max(1, t[0].numel() * t.element_size()))
        for row in range(0, len(t), each):
            body = {"sender": sender, "policy": policy, "name": name, "row": row, "rows": len(t), "names": names}
            yield Message("target", body, {"rows": t[row : row + each].to("cpu", copy=True)})


class TargetParts:
    """Puts pieces together. `add` on one thread, `take` on another."""

    def __init__(self) -> None:
        self._version: tuple[str, int] | None = None
        self._pieces: dict[str, list[Tensor]] = {}
        self._bytes = 0
        self._ready: dict[str, Tensor] = {}
        self._lock = threading.Lock()
        self.policy = 0

    def add(self, message: Message) -> None:
        """A piece: rows [row, row + n) of one tensor, in order.

        Raises:
            WireError: it does not continue what came before.
        """
        piece: _Piece = read(message.body, _Piece)
        data = message.tensors.get("rows")
        if data is None or data.dim() not in (1, 2) or not data.is_floating_point():
            raise WireError("malformed", "a piece of the target has no rows in it")
        key = (piece.sender, piece.policy)
        if key != self._version:
            if piece.row or piece.name != piece.names[0]:
                raise WireError("malformed", f"the beginning of policy version {piece.policy} is missing")
            self._version, self._pieces, self._bytes = key, {}, 0
        parts = self._pieces.setdefault(piece.name, [])
        have = sum(map(len, parts))
        self._bytes += data.nbytes
        if piece.row != have or have + len(data) > piece.rows or self._bytes > MOST_BYTES:
            self._version = None
            raise WireError("malformed", f"rows of {piece.name} do not follow each other")
        parts.append(data)
        last = piece.name == piece.names[-1] and have + len(data) == piece.rows
        if last and set(self._pieces) == set(piece.names):
            whole = {n: torch.cat(parts) for n, parts in self._pieces.items()}
            self._version, self._pieces = None, {}
            if not all(bool(t.isfinite().all()) for t in whole.values()):
                raise WireError("malformed", "the target's weights are not finite")
            with self._lock:
                self._ready, self.policy = whole, piece.policy

    @property
    def ready(self) -> bool:
        """Whether a whole set waits."""
        return bool(self._ready)

    def take(self) -> dict[str, Any]:
        """The newest whole set of tensors, once; empty where there is none."""
        with self._lock:
            ready, self._ready = self._ready, {}
        return ready
