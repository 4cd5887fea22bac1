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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafter_online.samples import Sample, Verify

ALWAYS = 1 << 30


@dataclass(frozen=True, eq=False)
class Rejected:
    """The target's choices from the first rejected proposal of a verify step on: R rows."""

    column: Tensor  # [R] int64
    step: Tensor  # [R] int64: at which training-time-test step the column is in that state
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
    windows: Sequence[Sample], weights: Sequence[float] | None = None, *, steps: int, rejected: bool = False
) -> Batch:
    """Pack windows of at least two tokens, all of one target.

    Args:
        weights: what each counts in the loss; 1 when None.
        steps: training-time-test steps. With 1, the drafter is a model of sequences: a rejected proposal is learnt from
            in the column it would have had.
        rejected: learn from the drafter's own rejected proposals.
    """
    each = zip(windows, weights if weights is not None else [1.0] * len(windows), strict=True)
    kept, used = zip(*((w, u) for w, u in each if len(w) > 1), strict=True)
    lengths = [len(w) - 1 for w in kept]
    forced = torch.full((1, sum(lengths)), ALWAYS, dtype=torch.int64)
    replaced: list[tuple[int, int, int]] = []  # column, step, token
    rows: list[tuple[int, int, Verify, int]] = []  # column, step, and a row of these verify steps
    at = 0
    for w, n in zip(kept, lengths, strict=True):
        for column, accepted, length, first in _errors(w) if rejected else ():
            here = at + column
            if steps == 1:
                if column + accepted < n:
                    rows.append((here + accepted, 0, w.verify, first + accepted))
            elif accepted < steps and forced[0, here] == ALWAYS:
                forced[0, here] = accepted
                depth = min(length, steps)
                tokens = w.verify.proposed[first : first + depth - 1].tolist()
                replaced += [(here, i, t) for i, t in enumerate(tokens, 1)]
                rows += [(here, i, w.verify, first + i) for i in range(accepted, depth)]
        at += n

    def join(parts: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(parts)).unsqueeze(0)

    def spread(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values)).repeat_interleave(torch.tensor(lengths)).unsqueeze(0)

    replace_column, replace_step, replace_token = torch.tensor(replaced, dtype=torch.int64).reshape(-1, 3).unbind(1)
    return Batch(
        input_ids=join(w.input_ids[1:] for w in kept),
        hidden_states=join(w.hidden_states[:-1] for w in kept),
        verifier_last_hidden_states=join(w.verifier_last_hidden_states[1:] for w in kept),
        loss_mask=join(w.loss_mask[1:] for w in kept),
        position_ids=join(w.position_ids[1:] for w in kept),
        document_ids=spread(range(len(kept))),
        weight=spread(map(float, used)),
        temperature=spread(w.temperature for w in kept),
        forced_until=forced,
        rejected=Rejected(
            column=torch.tensor([r[0] for r in rows], dtype=torch.int64),
            step=torch.tensor([r[1] for r in rows], dtype=torch.int64),
            ids=_padded([v.top_ids[i] for *_, v, i in rows], 0),
            logits=_padded([v.top_logits[i].float() for *_, v, i in rows], float("-inf")),
            logsumexp=torch.tensor([float(v.logsumexp[i]) for *_, v, i in rows]),
        ),
        replace_column=replace_column,
        replace_step=replace_step,
        replace_token=replace_token,
    )


def _errors(w: Sample) -> Iterator[tuple[int, int, int, int]]:
    """Of the drafter's verify steps with a rejected proposal: the column whose token is the last one known, proposals
    accepted, proposals in all, and the row of the first.
    """
    v = w.verify
    columns = (v.position, v.lengths, v.accepted, v.lengths.cumsum(0) - v.lengths)
    for drafter, position, length, accepted, first in zip(v.drafter, *(c.tolist() for c in columns), strict=True):
        if drafter == "head" and accepted < length and position > 0:
            yield position - 1, accepted, length, first


def _padded(rows: list[Tensor], value: float) -> Tensor:
    """[R, k], k being the widest among them."""
    return pad_sequence(rows, batch_first=True, padding_value=value) if rows else torch.zeros(0, 0)
