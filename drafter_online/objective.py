"""The drafter's loss of a packed batch, and what the drafter would have achieved on it.

    L = sum_i decay^i (a * accept_i) + lambda * rejected + mu * induced

`accept` runs over emitted tokens (accepted drafts, corrections, bonus tokens), `rejected` and `induced` over what the
target said from the first rejected proposal on. Every term is an average over what it runs over, and each can be off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from drafter_online import losses
from drafter_online.packing import PADDING, Batch

if TYPE_CHECKING:
    from torch import Tensor

Objective = Literal["kl", "top1", "tv", "lk", "lk_hybrid", "matched"]


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
    induced: float = Field(
        0.0, ge=0, description="mu: reverse KL from the rejected proposal on (Draft-OPD), times gamma^k; 0: off."
    )
    gamma: float = Field(0.8, gt=0, le=1, description="Discount of the k-th proposal after the rejected one.")
    rejected_from: tuple[str, ...] = Field(
        ("learned",), description="Drafters whose rejected proposals are learnt from; the drafter's own by default."
    )
    step_decay: float = Field(0.8, gt=0, le=1, description="Weight of training-time-test step i is this to the i-th.")
    reward_beta: float = Field(0.0, ge=0, description="Strength of the reward weight (ReSpec); 0: off.")
    reward_clip: tuple[float, float] = Field((0.2, 5.0), description="Smallest and largest reward weight.")
    match_temperature: bool = Field(True, description="Take the target's distribution at the sampling temperature.")

    @property
    def divergence(self) -> str:
        """The name in `losses.OBJECTIVES`."""
        if self.objective != "matched":
            return self.objective
        return "top1" if self.draft_sampling == "greedy" else "lk_hybrid"

    @property
    def reads_rejected(self) -> tuple[str, ...]:
        """Drafters whose rejected proposals a batch needs."""
        return self.rejected_from if self.rejected or self.induced else ()


@dataclass(frozen=True)
class Acceptance:
    """What greedy drafts would have achieved on emitted tokens: sums over D places a draft could start at.

    A draft token counts where it is the token that was emitted. At temperature T that happens with the probability
    that rejection sampling accepts it, so these are unbiased estimates of the engine's numbers. Places that a batch
    leads on by rejected proposals are not counted: with those terms on, a training batch flatters the drafter, and only
    `Trainer.evaluate`, which leads none, is to be believed.
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


def evaluate(logits: list[Tensor], targets: Tensor, batch: Batch, terms: LossTerms, to_draft: Tensor | None) -> Result:
    """Loss and acceptance.

    Args:
        logits: [1, L, V] per step.
        targets: [1, L, V].
        batch: what they were computed from.
        terms: which terms count.
        to_draft: draft id by target id, -1 where there is none; None: the same vocabulary.
    """
    loss = logits[0].float().sum() * 0.0
    values: dict[str, float] = {}
    if terms.accept:
        for i, z in enumerate(logits):
            term = _accept(z, targets, batch, terms, i)
            loss = loss + terms.accept * losses.step_decay(i, terms.step_decay) * term
            values[f"accept_{i}"] = float(term.detach())
    if terms.reads_rejected and len(batch.rejected.column):
        forward, reverse = _rejected(logits, batch, terms, to_draft)
        loss = loss + terms.rejected * forward + terms.induced * reverse
        if terms.rejected:
            values["rejected"] = float(forward.detach())
        if terms.induced:
            values["induced"] = float(reverse.detach())
    values["loss"] = float(loss.detach())
    return Result(loss, values, acceptance(logits, batch, to_draft))


def _accept(z: Tensor, targets: Tensor, batch: Batch, terms: LossTerms, step: int) -> Tensor:
    n = z.shape[1] - step
    if n <= 0:
        return z.float().sum() * 0.0
    here, there = slice(0, n), slice(step, None)  # the column that predicts, and the one with its target
    mask = batch.loss_mask[:, there] & _together(batch, n, step) & (batch.forced_until[:, here] >= step)  # [1, n]
    q, p = z[:, here][mask].float(), targets[:, there][mask].float()  # [M, V]
    if terms.match_temperature:
        t = batch.temperature[:, there][mask].unsqueeze(-1)  # [M, 1]
        t = t.where(t > 0, t.new_ones(()))
        p = p / t
        q = q / t if terms.draft_sampling == "probabilistic" else q
    w = batch.weight[:, here][mask]  # [M]
    value = losses.OBJECTIVES[terms.divergence](q, p)
    return (value * w).sum() / w.sum().clamp_min(1e-6)


def _rejected(logits: list[Tensor], batch: Batch, terms: LossTerms, to_draft: Tensor | None) -> tuple[Tensor, Tensor]:
    import torch

    r = batch.rejected
    z = torch.stack([x[0] for x in logits])[r.step, r.column].float()  # [R, V]
    ids = r.ids if to_draft is None else to_draft.to(r.ids.device)[r.ids]
    w = batch.weight[0, r.column] * r.logits.isfinite().any(-1)  # rows whose logits the engine did not keep: 0
    total = w.sum().clamp_min(1e-6)
    zero = z.sum() * 0.0
    forward = (losses.truncated_forward_kl(z, ids, r.logits, r.logsumexp) * w).sum() / total if terms.rejected else zero
    if not terms.induced:
        return forward, zero
    reverse = losses.truncated_reverse_kl(z, ids, r.logits, r.logsumexp) * terms.gamma ** r.depth.float()
    return forward, (reverse * w).sum() / total


def _together(batch: Batch, n: int, shift: int) -> Tensor:
    """[1, n] bool: column c and column c + shift are of one document, and not padding."""
    d = batch.document_ids
    return (d[:, :n] == d[:, shift : shift + n]) & (d[:, :n] != PADDING)


def acceptance(logits: list[Tensor], batch: Batch, to_draft: Tensor | None) -> Acceptance:
    """See `Acceptance`. A place counts where all its steps can be compared with emitted tokens of the response."""
    import torch

    steps = len(logits)
    n = batch.input_ids.shape[1] - steps
    if n <= 0:
        return Acceptance(0, (0,) * steps)
    # Only places whose every step is teacher-forced and in the same document; the first predicted token decides whether
    # it is the response's (later ones are then, too).
    valid = _together(batch, n, steps) & batch.loss_mask[:, 1 : n + 1] & (batch.forced_until[:, :n] >= steps)
    alive = valid
    reached = []
    for i, z in enumerate(logits):
        emitted = batch.input_ids[:, 1 + i : 1 + i + n]  # [1, n]
        if to_draft is not None:
            emitted = to_draft.to(emitted.device)[emitted]
        with torch.no_grad():
            alive = alive & (z[:, :n].argmax(-1) == emitted)
        reached.append(int(alive.sum()))
    return Acceptance(int(valid.sum()), tuple(reached))
