"""Renders the metric table as `docs/metrics.md`, so that the page cannot disagree with the code."""

from __future__ import annotations

from pathlib import Path

from rollspec.telemetry.metrics import TABLE

FILE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

_GROUPS = {
    "rollout": "Generation as the engine sees it: time, tokens, batch, and what proposing costs.",
    "accept": "What the target accepted of what was drafted.",
    "tuner": "How much is drafted, how that was decided, and how far from the best it was.",
    "drafter": "The draft head: its passes, its weights, its samples and its training.",
    "history": "The past responses that drafts come from.",
    "reuse": "What was taken over from past rollouts: `reuse.mode: replay`, and the lossy `lenient`.",
    "policy": "Which policy is being sampled.",
    "guard": "Drafters that are switched off because too little of theirs is accepted.",
    "faults": "What went wrong and was survived.",
    "health": "Whether the rollouts are what the trainer takes them for: draws of its policy, and fresh ones.",
    "reward": "What the rollouts earned.",
    "length": "Response lengths; the tail is what speculation is for.",
}

_HEAD = """\
# Metrics

Every metric rollspec reports. Generated from `rollspec/telemetry/metrics.py` by `python -m scripts.generate`:
edit the table there.

A *gauge* is a level, a *counter* a sum over the interval since the last report (one training step). `<drafter>`,
`<i>`, `<cause>`, `<kind>`, `<arm>` and `<setting>` stand for a drafter's name, a draft position counted from 1, a short
name of a fault, one of a warning, an arm (`none` or `drafters:K`), and a setting that the ledger replays
([tuning](tuning.md#how-far-from-optimal)). A ratio whose denominator is zero is left out rather than reported as zero.

The metrics go to the trainer's own logger (so to W&B, TensorBoard or a console without further set-up) and, with
`telemetry.jsonl`, to a JSON-lines file; a server shows them at `/metrics` ([monitoring](monitoring.md)).
`rollspec report RUN` reads a folder with `metrics.jsonl` (one object per training step; verl's `file` logger is read
too) and `run.json` (where the run came from), or TRL's `trainer_state.json`.
"""

_TAIL = """\
## Read by the report from the trainer

| name | meaning |
|---|---|
| `training/global_step`, `training/epoch` | the step (from 1) and the epoch (from 0) |
| `timing_s/gen`, `timing_s/step`, `timing_s/<phase>` | seconds of generation, of the whole step, of its other phases |
| `timing_per_token_ms/gen` | milliseconds of generation per response token; gives the token count |
| `critic/score/mean`, `critic/rewards/mean` | mean reward, where `rollspec/reward/mean` is missing |
| `response_length/mean`, `max`, `min`, `clip_ratio` | response lengths; `clip_ratio` is the share cut at the limit |
| `rollout/spec_accept_rate`, `rollout/spec_accept_length` | acceptance, where `rollspec/accept/*` is missing |
| `training/rollout_actor_probs_pearson_corr`, `training/rollout_probs_diff_mean` | agreement of engine and trainer |

For the histogram of response lengths the folder may have `lengths.jsonl`: `{"step": 3, "lengths": [87, 212]}` per step.
verl writes it to the path in `ROLLSPEC_VERL_LENGTHS`.
"""


def render() -> str:
    """The page as Markdown, one section per metric group in the order of the table."""
    parts = [_HEAD]
    for group in dict.fromkeys(row.name.split("/")[1] for row in TABLE):
        parts.append(f"## {group}\n\n{_GROUPS[group]}\n\n| name | unit | kind | meaning |\n|---|---|---|---|")
        parts.append(
            "\n".join(
                f"| `{row.name}` | {row.unit} | {row.kind} | {row.meaning.replace('|', chr(92) + '|')} |"
                for row in TABLE
                if row.name.split("/")[1] == group
            )
            + "\n"
        )
    return "\n".join([*parts, _TAIL])
