"""How published systems train their drafters, by name: fields of `drafter_online.trainer.DrafterTraining`.

    DrafterTraining(**RECIPES["osd"], batch_tokens=512)

Imports nothing, so that settings can be checked where no trainer is.
"""

from __future__ import annotations

from typing import Any

TTT_STEPS = 4
"""Drafted tokens that a head is trained for, each a pass of training; trained for four, it drafts eight as well."""

RECIPES: dict[str, dict[str, Any]] = {
    "kl": {},
    "matched": {"objective": "matched"},
    # arXiv:2602.06932 and togethercomputer/aurora, its example for Qwen3-8B. Its code has no loss on rejected
    # proposals, so their weight is ours.
    "aurora": {"learning_rate": 1e-5, "warmup_steps": 0, "clip_norm": 2.5, "rejected": 0.5},
    # arXiv:2310.07177: the loss where a proposal was rejected and nowhere else; rate and warm-up of its scripts.
    "osd": {"learning_rate": 1e-5, "warmup_steps": 0, "accept": 0.0, "rejected": 1.0},
    # arXiv:2510.26475: rewards as weights of the loss, and one update of the drafter for several of the policy; its
    # abstract gives neither strength nor interval, so these are ours.
    "respec": {"reward_beta": 1.0, "update_interval": 2},
    # arXiv:2602.19580: versions are extrapolated by one interval between two publications, and the canary judges them.
    "leap": {"leap": 1.0},
}
"""`kl` is `DrafterTraining` as it is: KL(p‖q) on emitted tokens. `matched` takes the loss that suits how the engine
draws drafts: top1 where they are greedy, lk_hybrid where they are sampled (LK losses, arXiv:2602.23881).
"""
