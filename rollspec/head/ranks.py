"""Decisions that the tensor-parallel ranks of one engine share, so that all of them do the same at the same step.

Ranks compute the drafter together: one that ran another number of passes, or other weights, would wait for the rest
forever, or draft nonsense. The output rank decides and sends its decision once a step; what each rank checks for itself
is reduced to the minimum over ranks. With one rank nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["", "swap", "promoted", "rolled_back"]
KINDS: tuple[Kind, ...] = ("", "swap", "promoted", "rolled_back")


@dataclass(frozen=True, slots=True)
class Note:
    """What the output rank sends beside the number of passes: a verdict, or the folder of a version to swap in."""

    kind: Kind = ""
    text: str = ""


NOTHING = Note()


class Ranks:
    """The ranks of a tensor-parallel group; `group`: vLLM's `GroupCoordinator`, None for a single rank."""

    def __init__(self, group: Any = None) -> None:
        self._group = group

    @property
    def alone(self) -> bool:
        """Whether there is one rank only."""
        return self._group is None

    @property
    def first(self) -> bool:
        """Whether this is the rank whose drafts vLLM reads."""
        return self._group is None or bool(self._group.is_first_rank)

    def least(self, value: int) -> int:
        """The smallest of what the ranks give; all must call it."""
        if self._group is None:
            return value
        least = torch.tensor([value])
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=self._group.cpu_group)
        return int(least)

    def decide(self, passes: int, note: Note) -> tuple[int, Note]:
        """What the first rank says; all must call it. Three numbers are sent, then the text's bytes if there is one."""
        if self._group is None:
            return passes, note
        text = note.text.encode()
        message = torch.tensor([passes, KINDS.index(note.kind), len(text)])
        self._broadcast(message)
        passes, kind, size = (int(x) for x in message)
        if not size:
            return passes, Note(KINDS[kind])
        body = torch.frombuffer(bytearray(text if self.first else bytes(size)), dtype=torch.uint8)
        self._broadcast(body)
        return passes, Note(KINDS[kind], bytes(body.tolist()).decode())

    def share(self, drafts: list[list[int]], count: int, k: int) -> list[list[int]]:
        """The first rank's drafts of `count` requests, each of 0..k tokens; all must call it."""
        if self._group is None:
            return drafts
        table = torch.zeros(count, k + 1, dtype=torch.int64)  # [requests, length and tokens]
        if self.first:
            for row, draft in zip(table, drafts, strict=True):
                row[: len(draft) + 1] = torch.tensor([len(draft), *draft])
        self._broadcast(table)
        return [row[1 : row[0] + 1] for row in table.tolist()]

    def gather(self, weight: torch.Tensor) -> torch.Tensor:
        """The ranks' parts of a weight that is split along its first dimension, in order; all must call it."""
        if self._group is None:
            return weight
        whole: torch.Tensor = self._group.all_gather(weight.contiguous(), dim=0)
        return whole

    def _broadcast(self, tensor: torch.Tensor) -> None:
        torch.distributed.broadcast(tensor, src=self._group.first_rank, group=self._group.cpu_group)
