"""Several windows in one sequence, aligned for the head; none attends to another.

Each sample is shifted as `speculators` does (`models/eagle3/data.py`): column c of a document with tokens x0, x1, ...

    column                       0    1    2
    input_ids                    x1   x2   x3
    hidden_states                g0   g1   g2
    verifier_last_hidden_states  y1   y2   y3     predicts x2, x3, x4

At training-time-test step i, column c has read x[c+1] .. x[c+1+i] and predicts x[c+2+i], whose target stands in column
c + i. Where the verify step that started at column c had a rejected proposal, the column reads the proposals
instead of the emitted tokens, and from the first rejected one on it learns from the target's choice there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafter_online.samples import Sample

ALWAYS = 1 << 30


@dataclass(frozen=True, eq=False)
class Rejected:
    """The target's choices from the first rejected proposal of a verify step on: R rows."""

    column: Tensor  # [R] int64
    step: Tensor  # [R] int64: at which training-time-test step the column is in that state
    depth: Tensor  # [R] int64: proposals since the error, 0 for the rejected one itself
    ids: Tensor  # [R, k] int64, target's token ids
    logits: Tensor  # [R, k] float32
    logsumexp: Tensor  # [R] float32


@dataclass(frozen=True, eq=False)
class Batch:
    """L columns of packed documents."""

    input_ids: Tensor  # [1, L] int64
    hidden_states: Tensor  # [1, L, A*H]
    verifier_last_hidden_states: Tensor  # [1, L, H]
    loss_mask: Tensor  # [1, L] bool: the token of the column is the response's
    position_ids: Tensor  # [1, L] int64
    document_ids: Tensor  # [1, L] int64
    weight: Tensor  # [1, L] float32
    temperature: Tensor  # [1, L] float32
    forced_until: Tensor  # [1, L] int64: last step at which the column reads only emitted tokens
    rejected: Rejected
    replace_column: Tensor  # [Q] int64: inputs that are proposals
    replace_step: Tensor  # [Q] int64
    replace_token: Tensor  # [Q] int64

    @property
    def tokens(self) -> int:
        """Columns."""
        return self.document_ids.shape[1]

    def to(self, device: Any, dtype: Any = None) -> Batch:
        """The batch on a device; hidden states in `dtype`."""
        values = {n: v.to(device, dtype if "hidden" in n else None) for n, v in vars(self).items() if n != "rejected"}
        return Batch(**values, rejected=Rejected(*(t.to(device) for t in vars(self.rejected).values())))


def pack(
    windows: Sequence[Sample],
    weights: Sequence[float] | None = None,
    *,
    steps: int,
    rejected_from: Sequence[str] = (),
) -> Batch:
    """Pack windows of at least two tokens.

    Args:
        windows: samples or windows of samples, all of one target.
        weights: what each counts in the loss; 1 when None.
        steps: training-time-test steps. With 1, the drafter is a model of sequences: a rejected proposal is learnt from
            in the column it would have had.
        rejected_from: drafters whose rejected proposals are learnt from.
    """
    kept = [w for w in windows if len(w) > 1]
    used = list(weights) if weights is not None else [1.0] * len(windows)
    used = [u for u, w in zip(used, windows, strict=True) if len(w) > 1]
    lengths = [len(w) - 1 for w in kept]

    def join(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts).unsqueeze(0)

    def spread(values: Sequence[float]) -> Tensor:
        return join([torch.full((n,), float(v)) for v, n in zip(values, lengths, strict=True)])

    found = _Proposals(steps, set(rejected_from))
    at = 0
    for w, n in zip(kept, lengths, strict=True):
        found.read(w, at, n)
        at += n
    forced = torch.full((1, sum(lengths)), ALWAYS, dtype=torch.int64)
    for column, accepted in found.errors.items():
        forced[0, column] = accepted
    documents = [torch.full((n,), i, dtype=torch.int64) for i, n in enumerate(lengths)]
    return Batch(
        input_ids=join([w.input_ids[1:] for w in kept]),
        hidden_states=join([w.hidden_states[:-1] for w in kept]),
        verifier_last_hidden_states=join([w.verifier_last_hidden_states[1:] for w in kept]),
        loss_mask=join([w.loss_mask[1:] for w in kept]),
        position_ids=join([w.position_ids[1:] for w in kept]),
        document_ids=join(documents),
        weight=spread(used),
        temperature=spread([w.temperature for w in kept]),
        forced_until=forced,
        rejected=found.rejected(),
        replace_column=torch.tensor([r[0] for r in found.replaced], dtype=torch.int64),
        replace_step=torch.tensor([r[1] for r in found.replaced], dtype=torch.int64),
        replace_token=torch.tensor([r[2] for r in found.replaced], dtype=torch.int64),
    )


class _Proposals:
    """Reads the verify steps of windows into rows and replaced inputs."""

    def __init__(self, steps: int, drafters: set[str]) -> None:
        self.steps = steps
        self.drafters = drafters
        self.errors: dict[int, int] = {}  # column -> proposals accepted before its error
        self.replaced: list[tuple[int, int, int]] = []
        self._where: list[tuple[int, int, int]] = []  # column, step, depth
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []  # ids [k], logits [k], logsumexp []

    def read(self, window: Sample, offset: int, columns: int) -> None:
        """The verify steps of a document that begins at column `offset`."""
        v = window.verify
        ends = v.lengths.cumsum(0).tolist()
        steps = zip(v.drafter, v.position.tolist(), v.lengths.tolist(), v.accepted.tolist(), ends, strict=True)
        for drafter, position, length, accepted, end in steps:
            column = position - 1  # the column whose token is the last one known
            if drafter not in self.drafters or accepted >= length or column < 0:
                continue
            first = end - length
            if self.steps == 1:
                if column + accepted < columns:
                    self._row(v, offset + column + accepted, 0, 0, first + accepted)
                continue
            if accepted >= self.steps or offset + column in self.errors:
                continue
            depth = min(length, self.steps)
            self.errors[offset + column] = accepted
            tokens = v.proposed[first : first + depth - 1].tolist()
            self.replaced += [(offset + column, i + 1, t) for i, t in enumerate(tokens)]
            for i in range(accepted, depth):
                self._row(v, offset + column, i, i - accepted, first + i)

    def _row(self, v: Any, column: int, step: int, depth: int, row: int) -> None:
        self._where.append((column, step, depth))
        self._rows.append((v.top_ids[row], v.top_logits[row], v.logsumexp[row]))

    def rejected(self) -> Rejected:
        """All rows, with the widest top-k among them."""
        width = max((len(r[0]) for r in self._rows), default=0)
        n = len(self._rows)
        ids = torch.zeros(n, width, dtype=torch.int64)
        logits = torch.full((n, width), float("-inf"))
        lse = torch.zeros(n)
        for i, (a, b, c) in enumerate(self._rows):
            ids[i, : len(a)], logits[i, : len(b)], lse[i] = a, b.float(), c.float()
        where = torch.tensor(self._where, dtype=torch.int64).reshape(n, 3)
        return Rejected(where[:, 0], where[:, 1], where[:, 2], ids, logits, lse)
