"""Knobs that there were: who still sets one reads what took its place, instead of a guess at a typo."""

from __future__ import annotations

GONE: dict[str, str] = {
    "reuse.seeds": "noise is kept over epochs exactly where reuse.mode is coupled",
    "reuse.scale": "the ratio of probabilities counts as it is, as in SPEC-RL; reuse.bias decides how much is reused",
    **dict.fromkeys(
        (f"proposal.suffix.{name}" for name in ("siblings", "past", "global_tree")),
        "name in proposal.suffix.sources what is drafted from: siblings, past, global",
    ),
    "proposal.suffix.max_depth": "16 tokens of context are matched",
    "proposal.suffix.spec_factor": "a draft is at most twice as long as its match",
    "proposal.suffix.min_prob": "a draft ends where its cumulative frequency falls below 0.1",
    "proposal.learned.keep_bytes": "256 MiB of hidden states are kept",
    "proposal.learned.folder": "fresh and converted heads are in drafter.dir",
    "proposal.learned.canary_ratio": "new weights are rolled back below 0.9 of what the old ones got right; "
    "proposal.learned.canary_drafts = 0 trusts all",
    "proposal.budget.max_tokens": "proposal.budget.policy: goodput bounds a step by what it costs",
    "proposal.budget.cut": "proposal.budget.policy may be svip or specdec++",
    "proposal.budget.cut_threshold": "svip and specdec++ of proposal.budget.policy have a threshold each of their own",
    "drafter.ray.num_cpus": "Ray reserves no CPU for the trainer; drafter.ray.resources says where it may run",
    "drafter.ray.num_gpus": "Ray reserves one GPU where drafter.device is one",
    "drafter.ray.scheduling_strategy": "drafter.ray.resources says where the trainer may run",
    "drafter.step_bytes": "a training step that finds no memory is tried again with less",
    "drafter.capture.enabled": "drafter.mode: capture records samples where nothing trains",
    "drafter.capture.rate": "every request is recorded while drafter.capture.share of the step time allows it",
    "drafter.capture.max_bytes": "256 MiB of samples are kept until they are drained",
    "drafter.capture.top_k": "8 logits of the target are kept per proposed token",
    "tuning.seed": "it is 0, and decides speed alone",
    "tuning.guard.patience": "a verdict rests on 50 verify steps",
    "history.autosave": "what has a history.dir is saved there; unset that to save nothing",
    "history.tree_max_bytes": "it is four times history.max_bytes",
    **dict.fromkeys(
        (f"telemetry.health.{name}" for name in ("max_gap", "min_corr", "min_ess", "min_ess_sequence", "max_outside")),
        "the limits are in rollspec/telemetry/health.py, and crossing one is a warning and nothing else",
    ),
    **dict.fromkeys(
        (f"drafter.buffer.{name}" for name in ("half_life", "keep_versions", "tail_quota", "tail_versions", "seed")),
        "the samples of a job age as drafter_online.buffer.BufferConfig has it",
    ),
    "drafter.buffer.max_bytes": "set drafter.buffer_bytes",
    "drafter.training.draft_sampling": "it follows mode and coupled.drafts",
    "drafter.training.objective": "drafter.training.recipe is kl, matched, or a published one",
    "drafter.training.accept": "drafter.training.recipe: osd trains on rejected proposals alone",
    "drafter.training.rejected": "drafter.training.recipe: aurora and osd train on rejected proposals",
    "drafter.training.reward_beta": "drafter.training.recipe: respec weighs by reward",
    **dict.fromkeys(
        (f"drafter.training.{name}" for name in (
            "step_decay", "ttt_steps", "warmup_steps", "clip_norm", "window_tokens",
            "betas", "weight_decay", "accumulate", "precision", "train_lm_head", "max_bad_steps", "checkpoint_every",
            "seed", "induced", "gamma", "rejected_from", "reward_clip", "match_temperature",
        )),
        "a job trains as drafter.training.recipe has it, and else with the default of "
        "drafter_online.trainer.DrafterTraining",
    ),
    "tuning.options.half_life": "hedge learns over half-lives of 16, 64 and 256 steps",
    **dict.fromkeys(
        (f"tuning.options.{name}" for name in ("reward", "delta", "epsilon", "window", "alpha", "beta")),
        "published policies are played with the numbers of their papers",
    ),
}  # fmt: skip
"""Knobs that there were, and what is in the place of each."""
