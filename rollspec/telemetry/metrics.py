"""Every metric rollspec reports: name (under `rollspec/`), unit, kind, meaning. One table; documentation and sinks are
made from it.

`to_metrics` turns what an engine's worker counted (`EngineStats`) into the names users see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollspec.telemetry.engine_stats import EngineStats


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. `kind`: gauge (a level) or counter (a sum over the interval)."""

    name: str
    unit: str
    kind: str
    meaning: str


_ROWS = (
    ("rollout/engine_seconds", "s", "counter", "time the engine spent in decode and prefill steps"),
    ("rollout/tokens", "tokens", "counter", "tokens emitted by the engine"),
    ("rollout/tokens_per_second", "tokens/s", "gauge", "emitted tokens per second of engine step time"),
    ("rollout/steps", "steps", "counter", "engine steps that sampled tokens"),
    ("rollout/batch_mean", "requests", "gauge", "mean number of requests sampled in a step"),
    ("rollout/tail_seconds", "s", "counter", "step time at a batch of at most a quarter of the peak"),
    ("rollout/propose_seconds", "s", "counter", "time spent proposing, inside the step"),
    ("rollout/propose_share", "ratio", "gauge", "propose_seconds / engine_seconds"),
    ("drafter/passes", "passes", "counter", "forward passes of the draft head; several heads count as one"),
    ("drafter/pass_seconds", "s", "counter", "time of these passes, inside engine_seconds"),
    ("drafter/version", "version", "gauge", "oldest version of the head that a replica runs; 0: as started"),
    ("drafter/staleness", "versions", "gauge", "policy versions since the newest it was trained on, or else its swap"),
    ("drafter/accept_length", "tokens", "gauge", "tokens per verify step of its drafts, replicas weighted by these"),
    ("drafter/swaps", "swaps", "counter", "times its weights were replaced, roll-backs included"),
    ("drafter/swap_seconds", "s", "counter", "pauses that this made, in all"),
    ("drafter/swap_longest", "s", "gauge", "longest of these pauses"),
    ("drafter/promoted", "versions", "counter", "versions promoted after their canary"),
    ("drafter/rolled_back", "versions", "counter", "versions rolled back after their canary"),
    ("drafter/refused", "versions", "counter", "versions that were not loaded (the log says why)"),
    ("drafter/resent", "times", "counter", "times lost or overwritten weights were put back"),
    ("drafter/caught_up", "positions", "counter", "positions the drafter read late, after it rested"),
    ("drafter/reread", "positions", "counter", "positions it read again after its weights changed"),
    ("drafter/captured", "samples", "counter", "training samples captured"),
    ("drafter/capture_dropped", "samples", "counter", "samples dropped to stay within their bytes"),
    ("drafter/capture_seconds", "s", "counter", "time spent capturing, inside engine_seconds"),
    ("drafter/capture_share", "ratio", "gauge", "capture_seconds / engine_seconds"),
    ("drafter/private", "requests", "counter", "requests that asked not to be captured"),
    ("drafter/sent", "samples", "counter", "samples sent to the trainer"),
    ("drafter/sent_bytes", "bytes", "counter", "bytes sent to it"),
    ("drafter/feedback_dropped", "samples", "counter", "samples dropped because it was away or behind"),
    ("drafter/away", "0/1", "gauge", "1 while the drafter daemon does not listen to this engine"),
    ("drafter/train_steps", "steps", "counter", "optimiser steps of the drafter's training"),
    ("drafter/train_tokens", "tokens", "counter", "tokens trained on; a daemon's are shared out among its engines"),
    ("drafter/loss", "nats", "gauge", "latest training loss, mean over replicas by their steps"),
    ("drafter/loss/<term>", "nats", "gauge", "one term of it, without its weight: accept_0, rejected, ..."),
    ("drafter/train_length", "tokens", "gauge", "acceptance length on the latest training windows"),
    ("drafter/buffered", "samples", "gauge", "samples that are trained on"),
    ("drafter/preempted", "steps", "counter", "training steps given up for a request that came"),
    ("drafter/preempt_seconds", "s", "gauge", "longest time until such a step had ended"),
    ("drafter/preempt_p99_seconds", "s", "gauge", "99th percentile of that time over the latest 1000"),
    ("drafter/micro_step_seconds", "s", "gauge", "mean duration of a whole training step"),
    ("drafter/step_age_seconds", "s", "gauge", "age of the training step that runs now; grows in a hang"),
    ("drafter/idle_seconds", "s", "counter", "time that the trainer's device, which is an engine's, was free for it"),
    ("drafter/used_seconds", "s", "counter", "part of it that training steps used"),
    ("drafter/wasted_seconds", "s", "counter", "training steps that were given up, skipped or failed"),
    ("drafter/idle_cost", "ratio", "gauge", "engine time in which training had yet to give way; above 3 % it waits"),
    ("drafter/policy_samples", "samples", "counter", "taken from the policy's training pass (drafter.mode: policy)"),
    ("drafter/policy_dropped", "samples", "counter", "of these, dropped to stay within their bytes"),
    ("drafter/policy_share", "ratio", "gauge", "share of the job's time that taking them took"),
    ("rollout/generation_share", "ratio", "gauge", "generation time / time of the whole training step"),
    ("rollout/wait_share", "ratio", "gauge", "time an asynchronous trainer waits for rollouts / of the step (verl)"),
    ("rollout/generation_seconds", "s", "counter", "time the trainer waited for rollouts (TRL)"),
    (
        "rollout/speculating",
        "0/1",
        "gauge",
        "1 while speculation is on, also where nothing is drafted because nothing pays; 0 while it is off",
    ),
    ("accept/rate", "ratio", "gauge", "accepted / drafted tokens"),
    ("accept/length", "tokens", "gauge", "tokens emitted per request and engine step; 1 where none was drafted"),
    ("accept/drafted", "tokens", "counter", "tokens drafted and verified"),
    ("accept/accepted", "tokens", "counter", "drafted tokens accepted"),
    ("accept/draft_length", "tokens", "gauge", "drafted tokens per non-empty draft"),
    ("accept/rate/<drafter>", "ratio", "gauge", "accepted / drafted of one drafter"),
    ("accept/drafted/<drafter>", "tokens", "counter", "tokens drafted by one drafter"),
    ("accept/position/<i>", "ratio", "gauge", "acceptance of the i-th draft token, given it was verified"),
    ("accept/max_acceptance", "ratio", "gauge", "mean largest probability of the target: what no draft can beat"),
    ("accept/predicted", "ratio", "gauge", "acceptance the drafters' calibrated confidence predicted"),
    ("accept/thinking_length", "tokens", "gauge", "accept/length between <think> and </think>, where the model thinks"),
    ("accept/thinking_rate", "ratio", "gauge", "accept/rate there"),
    ("accept/thinking_share", "ratio", "gauge", "tokens emitted there / all"),
    ("accept/answer_length", "tokens", "gauge", "accept/length elsewhere"),
    ("accept/answer_rate", "ratio", "gauge", "accept/rate elsewhere"),
    ("rollout/speedup", "ratio", "gauge", "against no speculation, for the same tokens, by the cost model"),
    ("rollout/speedup_best_fixed", "ratio", "gauge", "what the best single arm would have reached"),
    ("rollout/speedup_oracle", "ratio", "gauge", "what the best arm of each batch bucket would have"),
    ("rollout/speedup_clairvoyant", "ratio", "gauge", "what knowing each step's acceptance would have"),
    ("rollout/speedup_perfect", "ratio", "gauge", "with a drafter whose drafts are always accepted"),
    ("tuner/arm/<arm>", "ratio", "gauge", "share of the steps that played this arm (drafters:K)"),
    ("tuner/regret", "ratio", "gauge", "modelled time over that of the oracle arm per bucket, less 1"),
    ("tuner/regret_measured", "ratio", "gauge", "the same, each arm's modelled time corrected by its timed steps"),
    ("tuner/modelled_seconds/<setting>", "s", "counter", "modelled time for the same tokens, by setting"),
    ("tuner/clock_seconds/<setting>", "s", "counter", "the same of `played` and `oracle`, corrected by timed steps"),
    ("tuner/cost_error", "ratio", "gauge", "median relative error of predicted step times"),
    ("tuner/cost_skipped", "steps", "counter", "steps whose time could not be used"),
    ("tuner/seconds", "s", "counter", "time spent deciding how much to draft, inside propose_seconds"),
    ("tuner/share", "ratio", "gauge", "tuner/seconds / engine_seconds"),
    ("guard/alarms", "alarms", "counter", "drafters switched off because too little was accepted"),
    ("guard/recoveries", "drafters", "counter", "drafters switched on again by their probes"),
    ("guard/off", "drafters", "gauge", "(drafter, batch bucket) pairs that are off now"),
    ("history/bytes", "bytes", "gauge", "past responses kept"),
    ("history/corpus_bytes", "bytes", "gauge", "corpora of suffix drafts in memory"),
    ("history/prompts", "prompts", "gauge", "prompts with history"),
    ("history/evicted", "responses", "counter", "responses dropped to stay within the byte bound"),
    ("history/rewarded", "responses", "counter", "responses whose reward reached the history"),
    ("reuse/correlated", "0/1", "gauge", "1 while noise is kept, so that epochs are correlated"),
    ("reuse/responses", "responses", "counter", "responses that had one with the same noise before them"),
    ("reuse/repeated", "tokens", "counter", "their leading tokens that repeat the old response"),
    ("reuse/share", "ratio", "gauge", "repeated / all tokens of those responses"),
    ("reuse/identical", "ratio", "gauge", "share of those responses that repeat the old one whole"),
    ("policy/version", "version", "gauge", "policy version the engine samples from"),
    ("policy/spanning", "responses", "gauge", "responses of the step that several policy versions sampled (verl)"),
    ("reuse/lossy", "0/1", "gauge", "1 where rollouts started from old responses (lenient)"),
    ("reuse/bias", "nats", "gauge", "reuse.bias of the lenient rule"),
    ("reuse/verified", "responses", "counter", "old responses scored by the present policy"),
    ("reuse/skip_ratio", "ratio", "gauge", "rollouts that were an old response whole (SPEC-RL)"),
    ("reuse/cont_ratio", "ratio", "gauge", "the other rollouts: generated, in part or whole (SPEC-RL)"),
    ("reuse/avg_cut_idx", "tokens", "gauge", "where old responses are cut, mean over rollouts (SPEC-RL)"),
    ("reuse/avg_saved_tokens", "tokens", "gauge", "tokens not generated, mean over rollouts (SPEC-RL)"),
    ("reuse/avg_resp_len", "tokens", "gauge", "length of old responses, mean over rollouts (SPEC-RL)"),
    ("reuse/refused/<cause>", "responses", "counter", "rollouts generated whole for one cause"),
    ("faults", "faults", "counter", "faults survived by degrading (each cause is logged once)"),
    ("faults/<cause>", "faults", "counter", "faults of one cause"),
    ("health/logprob_gap", "nats", "gauge", "mean |log p engine - log p trainer| of sampled tokens"),
    ("health/logprob_corr", "ratio", "gauge", "correlation of engine and trainer probabilities"),
    ("health/nan_logprobs", "tokens", "counter", "sampled tokens whose log-prob the engine gave as NaN"),
    ("health/logprob_lost", "log-probs", "counter", "log-probs of either side that are not finite"),
    ("health/ess_token", "ratio", "gauge", "effective sample size of the tokens' weights, 0..1"),
    ("health/ess_sequence", "ratio", "gauge", "effective sample size of the responses' weights, 1/n..1"),
    ("health/ratio_outside", "ratio", "gauge", "share of importance ratios outside 0.8 to 1.25"),
    ("health/ratio_max", "ratio", "gauge", "largest importance ratio p trainer / p engine of a token"),
    ("health/epoch_overlap", "ratio", "gauge", "share of tokens in a prefix of the last epoch's response"),
    ("health/epoch_overlap_chance", "ratio", "gauge", "what it would be for independent draws"),
    ("health/epoch_identical", "ratio", "gauge", "share of responses equal to the last epoch's"),
    ("health/warnings", "warnings", "counter", "thresholds of telemetry.health crossed in this step"),
    ("health/warnings/<kind>", "warnings", "counter", "one of them (each kind is logged once)"),
    ("reward/mean", "reward", "gauge", "mean reward of the rollouts of this step"),
    ("length/p50", "tokens", "gauge", "median response length of this step"),
    ("length/p90", "tokens", "gauge", "90th percentile of response length of this step"),
    ("length/p99", "tokens", "gauge", "99th percentile of response length of this step"),
    ("length/max", "tokens", "gauge", "longest response of this step"),
)
TABLE = tuple(Metric(f"rollspec/{name}", unit, kind, meaning) for name, unit, kind, meaning in _ROWS)

NO_ANSWER = "no answer"


def find(name: str) -> Metric | None:
    """The row that describes the concrete metric `name`: `rollspec/accept/rate/suffix` is `.../rate/<drafter>`."""
    stem = name.rsplit("/", 1)[0]
    for row in TABLE:
        if row.name == name or (row.name.endswith(">") and row.name.rsplit("/", 1)[0] == stem):
            return row
    return None


def engine_metrics(answers: Sequence[Mapping[str, Any]], faults: Mapping[str, int]) -> dict[str, float]:
    """Metrics of all engines together.

    Args:
        answers: of each engine to the operation `stats`: an `EngineStats` mapping, `{}` where rollspec is off in it,
            `{"error": ...}` where it did not answer.
        faults: what failed on the trainer's side, by cause.
    """
    parts = [EngineStats.from_dict(a) for a in answers if a and "error" not in a]
    silent = sum("error" in a for a in answers)
    mine = EngineStats(speculating=False, faults={**faults, **({NO_ANSWER: silent} if silent else {})})
    measured = to_metrics(EngineStats.merge([*parts, mine]))
    if silent and not parts:  # nothing was measured, which is not the same as zero
        return {name: value for name, value in measured.items() if name.startswith("rollspec/faults")}
    return measured


def to_metrics(s: EngineStats) -> dict[str, float]:
    """The user-facing names from raw counts. Ratios with no denominator are left out."""
    found: dict[str, float] = {
        "rollout/engine_seconds": s.step_seconds,
        "rollout/tail_seconds": s.tail_seconds,
        "rollout/propose_seconds": s.propose_seconds,
        "rollout/tokens": s.emitted,
        "rollout/steps": s.steps,
        "rollout/speculating": float(s.speculating),
        "accept/drafted": s.drafted,
        "accept/accepted": s.accepted,
        "history/bytes": s.history_bytes,
        "history/corpus_bytes": s.corpus_bytes,
        "history/prompts": s.prompts,
        "history/evicted": s.evicted,
        "history/rewarded": s.rewarded,
        "policy/version": s.version,
        "guard/alarms": s.alarms,
        "guard/recoveries": s.recoveries,
        "guard/off": len(s.drafters_off),
        "faults": sum(s.faults.values()),
        "tuner/seconds": s.tuner_seconds,
        "tuner/cost_skipped": s.cost_skipped,
    }
    if s.cost_error is not None:
        found["tuner/cost_error"] = s.cost_error
    found |= {f"accept/drafted/{source}": drafted for source, (_, drafted, _) in sorted(s.by_source.items())}
    # A slash would open a new group in the trainer's logger.
    found |= {f"faults/{cause.replace('/', '.')}": n for cause, n in sorted(s.faults.items())}
    found |= {f"drafter/{name}": value for name, value in (s.drafter | s.drafter_levels).items()}
    if s.passes:
        found |= {"drafter/passes": s.passes, "drafter/pass_seconds": s.pass_seconds}
    if s.correlated:
        found |= {"reuse/correlated": 1.0, "reuse/responses": s.reuse[0], "reuse/repeated": s.reuse[2]}
    found |= {name: part / whole for name, (part, whole) in _ratios(s).items() if whole}
    found |= _modelled_metrics(s.modelled) | _lenient_metrics(s.lenient)
    return {f"rollspec/{name}": value for name, value in found.items()}


def _ratios(s: EngineStats) -> dict[str, tuple[float, float]]:
    """(numerator, denominator) by name."""
    out: dict[str, tuple[float, float]] = {
        "rollout/tokens_per_second": (s.emitted, s.step_seconds),
        "rollout/propose_share": (s.propose_seconds, s.step_seconds),
        "rollout/batch_mean": (s.requests, s.steps),
        "accept/length": (s.emitted, s.requests),
        "accept/rate": (s.accepted, s.drafted),
        "accept/predicted": (s.predicted, s.drafted),
        "accept/draft_length": (s.drafted, s.verified),
        "accept/max_acceptance": (s.max_prob[0], s.max_prob[1]),
        "tuner/share": (s.tuner_seconds, s.step_seconds),
    }
    out |= {f"accept/rate/{source}": (accepted, drafted) for source, (_, drafted, accepted) in s.by_source.items()}
    out |= {f"accept/position/{i}": (accepted, n) for i, (n, accepted) in enumerate(s.by_position, 1)}
    if s.thinking[1][0]:
        for name, (steps, emitted, drafted, accepted) in zip(("answer", "thinking"), s.thinking, strict=True):
            out |= {f"accept/{name}_length": (emitted, steps), f"accept/{name}_rate": (accepted, drafted)}
        out["accept/thinking_share"] = (s.thinking[1][1], s.emitted)
    steps = sum(s.plays.values())
    out |= {f"tuner/arm/{arm}": (n, steps) for arm, n in s.plays.items()}
    if "capture_seconds" in s.drafter:
        out["drafter/capture_share"] = (s.drafter["capture_seconds"], s.step_seconds)
    if s.correlated:
        responses, tokens, repeated, identical = s.reuse
        out["reuse/share"] = (repeated, tokens)
        # One that was aborted and resumed may have been counted as a response before this.
        out["reuse/identical"] = (min(identical, responses), responses)
    return out


def _lenient_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """SPEC-RL's own metrics, over all rollouts of the step as there; left out while no old response was verified."""
    out = {f"reuse/{name}": n for name, n in sorted(counts.items()) if name.startswith("refused/")}
    verified, rollouts = counts.get("verified", 0.0), counts.get("requests", 0.0)
    if counts:
        out["reuse/lossy"] = float(verified > 0)
    if verified:
        skipped, accepted = counts.get("skipped", 0.0) / rollouts, counts.get("accepted", 0.0) / rollouts
        out |= {"reuse/verified": verified, "reuse/skip_ratio": skipped, "reuse/cont_ratio": 1.0 - skipped}
        out |= {"reuse/avg_cut_idx": accepted, "reuse/avg_saved_tokens": accepted}
        out["reuse/avg_resp_len"] = counts.get("old_tokens", 0.0) / rollouts
    return out


def _modelled_metrics(seconds: Mapping[str, float]) -> dict[str, float]:
    """Of the tuner's ledger (rollspec/tuning/regret.py): seconds by setting, and speed-ups over no drafts."""
    if not (seconds.get("played") and seconds.get("fixed/none")):
        return {}
    none = seconds["fixed/none"]
    clock = {k: n for k, n in seconds.items() if k.startswith("clock/")}
    out = {f"tuner/{k.replace('clock/', 'clock_seconds/')}": n for k, n in clock.items()}
    out |= {f"tuner/modelled_seconds/{k.replace('fixed/', '')}": n for k, n in seconds.items() if k not in clock}
    out["tuner/regret"] = seconds["played"] / seconds["oracle"] - 1.0
    if clock:
        out["tuner/regret_measured"] = clock["clock/played"] / clock["clock/oracle"] - 1.0
    out["rollout/speedup"] = none / seconds["played"]
    out["rollout/speedup_best_fixed"] = none / min(n for k, n in seconds.items() if k.startswith("fixed/"))
    return out | {f"rollout/speedup_{name}": none / seconds[name] for name in ("oracle", "clairvoyant", "perfect")}
