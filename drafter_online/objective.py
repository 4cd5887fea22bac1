"""The drafter's loss of a packed batch, and what the drafter would have achieved on it.

    L = sum_i decay^i (a * accept_i) + lambda * rejected

`accept` runs over emitted tokens, `rejected` over the target's choices from the first rejected proposal on. Each term
is an average over what it runs over, and can be off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from drafter_online import losses
from drafter_online.errors import Preempted
from drafter_online.model import TrainedDrafter
from drafter_online.packing import Batch

Objective = Literal["kl", "top1", "lk_hybrid", "matched"]


class LossTerms(BaseModel):
    """Which terms count, and how much."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    objective: Objective = Field(
        "kl",
        description="Divergence on emitted tokens; `matched`: top1 for greedy drafts, lk_hybrid for sampled ones.",
    )
    draft_sampling: Literal["greedy", "probabilistic"] = Field(
        "greedy", description="How the engine draws drafts; decides `matched`, and whether q is taken at temperature."
    )
    accept: float = Field(1.0, ge=0, description="Weight of the term on emitted tokens; 0: off.")
    rejected: float = Field(0.0, ge=0, description="lambda: forward KL where the target rejected (Aurora); 0: off.")
    step_decay: float = Field(0.8, gt=0, le=1, description="Weight of training-time-test step i is this to the i-th.")
    reward_beta: float = Field(0.0, ge=0, description="Strength of the reward weight (ReSpec); 0: off.")

    @property
    def divergence(self) -> str:
        """The name in `losses.OBJECTIVES`."""
        if self.objective != "matched":
            return self.objective
        return "top1" if self.draft_sampling == "greedy" else "lk_hybrid"


@dataclass(frozen=True)
class Acceptance:
    """What greedy drafts would have achieved on emitted tokens: sums over D positions a draft could start at.

    A draft token counts where it is the token that was emitted, which happens with the probability that rejection
    sampling accepts it. Columns that read rejected proposals are not counted, so only `Trainer.evaluate` does not
    flatter the drafter.
    """

    drafts: int
    reached: tuple[int, ...]  # [steps]: drafts of which tokens 0..i were all accepted

    @property
    def rates(self) -> list[float]:
        """Share of drafts whose tokens 0..i were all accepted; the first is top-1 accuracy."""
        return [r / max(1, self.drafts) for r in self.reached]

    @property
    def length(self) -> float:
        """Tokens per verify step: accepted ones and the bonus token."""
        return 1.0 + sum(self.rates)

    def __add__(self, other: Acceptance) -> Acceptance:
        if not self.drafts:
            return other
        return Acceptance(
            self.drafts + other.drafts, tuple(a + b for a, b in zip(self.reached, other.reached, strict=True))
        )


@dataclass(frozen=True, eq=False)
class Result:
    """The loss to be differentiated, its terms (without their weights), and the acceptance."""

    loss: Tensor
    terms: dict[str, float]
    acceptance: Acceptance


LOGITS = {"cpu": 1 << 22, "cuda": 1 << 25}
"""Logits that exist at a time, by device: with whole batches of a real vocabulary, memory and its traffic are most of
the cost. Every part reads the whole LM head: where a CPU's arithmetic takes longer than that, a GPU's does not, so its
parts are as large as the memory beside an engine allows, about 1 GB."""


def evaluate(
    drafter: TrainedDrafter,
    states: list[Tensor],
    batch: Batch,
    terms: LossTerms,
    interrupt: Callable[[], bool] | None = None,
) -> Result:
    """Loss and acceptance, of `LOGITS` logits at a time.

    The gradient of each part is computed with it, down to the drafter's states [1, L, H] per step, so that no logits
    are kept; the loss that is returned has these gradients. Without gradients (evaluation) there is no loss.

    Raises:
        Preempted: `interrupt`, asked before each part, returned true.
    """
    x = torch.stack([s[0] for s in states])  # [steps, L, H]
    learns = torch.is_grad_enabled()
    gradient = torch.zeros_like(x) if learns else None
    own = [torch.zeros_like(p, dtype=torch.float32) for p in drafter.trained_head]  # sums of many parts
    values: dict[str, float] = {}
    drafts = draft_starts(batch, len(x))
    best = torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device)  # [steps, L]: what would be drafted
    # [L] of each step: the columns that learn then.
    accepts = learns and bool(terms.accept)
    rows = [_columns(batch, i, batch.loss_mask[0, i:] & accepts) for i in range(len(x))]
    totals = [batch.weight[0][r].sum().clamp_min(1e-6) for r in rows]
    sums = torch.zeros(len(x))
    # By the target's columns, whose logits serve every step: at step i, column c + i is what column c learns from.
    wanted = torch.zeros_like(drafts)
    for i, r in enumerate(rows):
        wanted[i:] |= (r | drafts)[: len(wanted) - i]
    for columns in _parts(wanted.nonzero()[:, 0], drafter):
        if interrupt is not None and interrupt():
            raise Preempted
        p = drafter.targets(batch.verifier_last_hidden_states[0, columns]) if accepts else None
        for i in range(len(x)):
            at = columns - i
            used = (at >= 0).nonzero()[:, 0]
            used = used[(rows[i] | drafts)[at[used]]]
            here = at[used]
            h = x[i, here].detach().requires_grad_(learns)
            z = drafter.score(h)
            best[i, here] = z.detach().argmax(-1)
            kept = rows[i][here]
            if p is None or gradient is None or not bool(kept.any()):
                continue
            whole = bool(kept.all())
            q, target = (z, p[used]) if whole else (z[kept], p[used[kept]])
            value = _accept(q, target, batch, terms, here[kept], i) / totals[i]
            sums[i] += float(value.detach())
            value = value * terms.accept * terms.step_decay**i
            found = torch.autograd.grad(value, (h, *drafter.trained_head))
            gradient[i].index_add_(0, here, found[0])
            for g, f in zip(own, found[1:], strict=True):
                g += f
    loss = 0.0
    if accepts:
        values = {f"accept_{i}": value for i, value in enumerate(sums.tolist())}
        loss = sum(terms.accept * terms.step_decay**i * value for i, value in enumerate(sums.tolist()))
    if gradient is not None and terms.rejected and len(batch.rejected.column):
        values["rejected"] = _rejected(drafter, x, gradient, own, batch, terms.rejected)
        loss += terms.rejected * values["rejected"]
    values["loss"] = loss
    pairs = [] if gradient is None else [(x, gradient), *zip(drafter.trained_head, own, strict=True)]
    # A number that has this value, and these gradients with respect to these tensors.
    linear = sum(((t * g).sum().float() for t, g in pairs), torch.tensor(0.0))
    return Result(loss + (linear - linear.detach()), values, _acceptance(best, drafts, batch, drafter.to_draft))


def _parts(indices: Tensor, drafter: TrainedDrafter) -> Sequence[Tensor]:
    return torch.split(indices, max(1, LOGITS.get(indices.device.type, LOGITS["cuda"]) // drafter.vocabulary))


def draft_starts(batch: Batch, steps: int) -> Tensor:
    """[L] bool: the positions of `Acceptance`, whose every step can be compared with emitted tokens of the response.

    The first predicted token decides whether it is the response's; later ones are then, too.
    """
    return _columns(batch, steps, batch.loss_mask[0, 1:])


def _columns(batch: Batch, step: int, mask: Tensor) -> Tensor:
    """[L] bool: columns c of the mask that read emitted tokens only until this step, c + step in their document."""
    d, rows = batch.document_ids[0], torch.zeros_like(batch.loss_mask[0])
    n = max(0, len(d) - step)
    rows[:n] = mask[:n] & (d[:n] == d[step:]) & (batch.forced_until[0, :n] >= step)
    return rows


def _accept(q: Tensor, p: Tensor, batch: Batch, terms: LossTerms, columns: Tensor, step: int) -> Tensor:
    """The weighted sum over columns [M] of the divergence of q from p, both logits [M, V]."""
    q, p = q.float(), p.float()
    t = batch.temperature[0, columns + step].unsqueeze(-1)  # [M, 1]
    t = t.where(t > 0, t.new_ones(()))
    if bool((t != 1.0).any()):
        p = p / t
        q = q / t if terms.draft_sampling == "probabilistic" else q
    return (losses.OBJECTIVES[terms.divergence](q, p) * batch.weight[0, columns]).sum()


def _rejected(
    drafter: TrainedDrafter, x: Tensor, gradient: Tensor, own: list[Tensor], batch: Batch, weight: float
) -> float:
    """The term on rejected proposals; what it adds to the gradients, times `weight`, is added there."""
    r = batch.rejected
    to_draft = drafter.to_draft
    ids = r.ids if to_draft is None else to_draft.to(r.ids.device)[r.ids]
    weights = batch.weight[0, r.column] * r.logits.isfinite().any(-1)  # rows whose logits the engine did not keep: 0
    total = weights.sum().clamp_min(1e-6)
    loss = 0.0
    for part in _parts(torch.arange(len(r.column), device=x.device), drafter):
        step, column, w = r.step[part], r.column[part], weights[part] / total
        h = x[step, column].detach().requires_grad_()
        z = drafter.score(h).float()
        log_p, log_q = losses.truncated(z, ids[part], r.logits[part], r.logsumexp[part])
        value = (losses.divergence(log_p, log_q) * w).sum()
        loss += float(value.detach())
        found = torch.autograd.grad(weight * value, (h, *drafter.trained_head))
        gradient.index_put_((step, column), found[0], accumulate=True)
        for g, f in zip(own, found[1:], strict=True):
            g += f
    return loss


def _acceptance(best: Tensor, drafts: Tensor, batch: Batch, to_draft: Tensor | None) -> Acceptance:
    """See `Acceptance`. `best`: what would be drafted, [steps, L]; `drafts`: where, [L]."""
    at = drafts.nonzero()[:, 0]
    alive = drafts[at]
    reached = []
    for i, drafted in enumerate(best):
        emitted = batch.input_ids[0, at + 1 + i]
        if to_draft is not None:
            emitted = to_draft.to(emitted.device)[emitted]
        alive = alive & (drafted[at] == emitted)
        reached.append(int(alive.sum()))
    return Acceptance(len(at), tuple(reached))
