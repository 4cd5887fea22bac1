"""Every metric rollspec reports: name, unit, kind, meaning. One table; documentation and sinks are made from it.

`to_metrics` turns what an engine's worker counted (`EngineStats`) into the names users see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollspec.telemetry.engine_stats import EngineStats


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. `kind`: gauge (a level) or counter (a sum over the interval)."""

    name: str
    unit: str
    kind: str
    meaning: str


TABLE: tuple[Metric, ...] = (
    Metric("rollspec/rollout/engine_seconds", "s", "counter", "time the engine spent in decode and prefill steps"),
    Metric("rollspec/rollout/tokens", "tokens", "counter", "tokens emitted by the engine"),
    Metric("rollspec/rollout/tokens_per_second", "tokens/s", "gauge", "emitted tokens per second of engine step time"),
    Metric("rollspec/rollout/steps", "steps", "counter", "engine steps that sampled tokens"),
    Metric("rollspec/rollout/batch_mean", "requests", "gauge", "mean number of requests sampled in a step"),
    Metric("rollspec/rollout/tail_seconds", "s", "counter", "step time at a batch of at most a quarter of the peak"),
    Metric("rollspec/rollout/propose_seconds", "s", "counter", "time spent proposing, inside the step"),
    Metric("rollspec/rollout/propose_share", "ratio", "gauge", "propose_seconds / engine_seconds"),
    Metric(
        "rollspec/drafter/passes", "passes", "counter", "forward passes of the learned drafter, all its heads as one"
    ),
    Metric("rollspec/drafter/pass_seconds", "s", "counter", "time of these passes, inside engine_seconds"),
    Metric("rollspec/drafter/version", "version", "gauge", "version of the learned drafter's weights; 0: as started"),
    Metric(
        "rollspec/drafter/staleness",
        "versions",
        "gauge",
        "policy versions since the newest that its weights were trained on (not known: since they were swapped in)",
    ),
    Metric(
        "rollspec/drafter/accept_length",
        "tokens",
        "gauge",
        "tokens per verify step that its own drafts would give, mean over replicas by what they drafted",
    ),
    Metric("rollspec/drafter/swaps", "swaps", "counter", "times its weights were replaced, roll-backs included"),
    Metric("rollspec/drafter/swap_seconds", "s", "counter", "pauses that this made, in all"),
    Metric("rollspec/drafter/swap_longest", "s", "gauge", "longest of these pauses"),
    Metric("rollspec/drafter/promoted", "versions", "counter", "versions promoted after their canary"),
    Metric("rollspec/drafter/rolled_back", "versions", "counter", "versions rolled back after their canary"),
    Metric("rollspec/drafter/refused", "versions", "counter", "versions that were not loaded (the log says why)"),
    Metric("rollspec/drafter/resent", "times", "counter", "times lost or overwritten weights were put back"),
    Metric("rollspec/drafter/caught_up", "positions", "counter", "positions the drafter read late, after it rested"),
    Metric("rollspec/drafter/reread", "positions", "counter", "positions it read again after its weights changed"),
    Metric("rollspec/drafter/captured", "samples", "counter", "training samples captured"),
    Metric("rollspec/drafter/capture_dropped", "samples", "counter", "samples dropped to stay within their bytes"),
    Metric("rollspec/drafter/capture_seconds", "s", "counter", "time spent capturing, inside engine_seconds"),
    Metric("rollspec/drafter/capture_share", "ratio", "gauge", "capture_seconds / engine_seconds"),
    Metric("rollspec/drafter/private", "requests", "counter", "requests that asked not to be captured"),
    Metric("rollspec/drafter/sent", "samples", "counter", "samples sent to the drafter daemon (dedicated)"),
    Metric("rollspec/drafter/sent_bytes", "bytes", "counter", "bytes sent to it"),
    Metric("rollspec/drafter/feedback_dropped", "samples", "counter", "samples dropped because it was away or behind"),
    Metric("rollspec/drafter/away", "0/1", "gauge", "1 while the drafter daemon does not listen to this engine"),
    Metric("rollspec/drafter/train_steps", "steps", "counter", "optimiser steps of the drafter's training"),
    Metric("rollspec/drafter/train_tokens", "tokens", "counter", "tokens trained on"),
    Metric("rollspec/drafter/loss", "nats", "gauge", "latest training loss, mean over replicas by their steps"),
    Metric(
        "rollspec/drafter/loss/<term>", "nats", "gauge", "one term of it, without its weight: accept_0, rejected, ..."
    ),
    Metric("rollspec/drafter/train_length", "tokens", "gauge", "acceptance length on the latest training windows"),
    Metric("rollspec/drafter/buffered", "samples", "gauge", "samples that are trained on"),
    Metric("rollspec/drafter/preempted", "steps", "counter", "training steps given up for a request that came"),
    Metric("rollspec/drafter/preempt_seconds", "s", "gauge", "longest time until such a step had ended"),
    Metric("rollspec/drafter/preempt_p99_seconds", "s", "gauge", "99th percentile of that time over the latest 1000"),
    Metric("rollspec/drafter/micro_step_seconds", "s", "gauge", "mean duration of a whole training step"),
    Metric(
        "rollspec/drafter/step_age_seconds", "s", "gauge", "age of the training step that runs now; grows in a hang"
    ),
    Metric("rollspec/drafter/idle_seconds", "s", "counter", "time the engine was idle while training was allowed"),
    Metric("rollspec/drafter/harvested_seconds", "s", "counter", "part of it that training steps used"),
    Metric("rollspec/drafter/wasted_seconds", "s", "counter", "training steps that were given up, skipped or failed"),
    Metric("rollspec/rollout/generation_share", "ratio", "gauge", "generation time / time of the whole training step"),
    Metric("rollspec/rollout/generation_seconds", "s", "counter", "time the trainer waited for rollouts (TRL)"),
    Metric("rollspec/rollout/speculating", "0/1", "gauge", "1 while drafts are verified, 0 while speculation is off"),
    Metric("rollspec/accept/rate", "ratio", "gauge", "accepted / drafted tokens"),
    Metric("rollspec/accept/length", "tokens", "gauge", "tokens emitted per request and verify step (accepted + 1)"),
    Metric("rollspec/accept/drafted", "tokens", "counter", "tokens drafted and verified"),
    Metric("rollspec/accept/accepted", "tokens", "counter", "drafted tokens accepted"),
    Metric("rollspec/accept/draft_length", "tokens", "gauge", "drafted tokens per non-empty draft"),
    Metric("rollspec/accept/rate/<drafter>", "ratio", "gauge", "accepted / drafted of one drafter"),
    Metric("rollspec/accept/drafted/<drafter>", "tokens", "counter", "tokens drafted by one drafter"),
    Metric(
        "rollspec/accept/position/<i>", "ratio", "gauge", "acceptance of the i-th draft token, given it was verified"
    ),
    Metric(
        "rollspec/accept/ceiling", "ratio", "gauge", "mean largest probability of the target: what no draft can beat"
    ),
    Metric("rollspec/accept/predicted", "ratio", "gauge", "acceptance the drafters' calibrated confidence predicted"),
    Metric(
        "rollspec/rollout/speedup", "ratio", "gauge", "against no speculation, for the same tokens, by the cost model"
    ),
    Metric("rollspec/rollout/speedup_best_fixed", "ratio", "gauge", "what the best single arm would have reached"),
    Metric("rollspec/rollout/speedup_oracle", "ratio", "gauge", "what the best arm of each batch bucket would have"),
    Metric("rollspec/rollout/speedup_clairvoyant", "ratio", "gauge", "what knowing each step's acceptance would have"),
    Metric("rollspec/rollout/speedup_perfect", "ratio", "gauge", "what a drafter that is always right would have"),
    Metric("rollspec/tuner/arm/<arm>", "ratio", "gauge", "share of the steps that played this arm (drafters:K)"),
    Metric("rollspec/tuner/regret", "ratio", "gauge", "modelled time over that of the oracle arm per bucket, less 1"),
    Metric(
        "rollspec/tuner/modelled_seconds/<setting>", "s", "counter", "modelled time for the same tokens, by setting"
    ),
    Metric("rollspec/tuner/cost_error", "ratio", "gauge", "median relative error of predicted step times"),
    Metric("rollspec/tuner/cost_skipped", "steps", "counter", "steps whose time could not be used"),
    Metric("rollspec/tuner/seconds", "s", "counter", "time spent deciding how much to draft, inside propose_seconds"),
    Metric("rollspec/tuner/share", "ratio", "gauge", "tuner/seconds / engine_seconds"),
    Metric("rollspec/guard/alarms", "alarms", "counter", "drafters switched off because too little was accepted"),
    Metric("rollspec/guard/recoveries", "drafters", "counter", "drafters switched on again by their probes"),
    Metric("rollspec/guard/off", "drafters", "gauge", "(drafter, batch bucket) pairs that are off now"),
    Metric("rollspec/history/bytes", "bytes", "gauge", "past responses kept"),
    Metric("rollspec/history/tree_bytes", "bytes", "gauge", "corpora of suffix drafts in memory"),
    Metric("rollspec/history/prompts", "prompts", "gauge", "prompts with history"),
    Metric("rollspec/history/evicted", "responses", "counter", "responses dropped to stay within the byte bound"),
    Metric("rollspec/history/rewarded", "responses", "counter", "responses whose reward reached the history"),
    Metric("rollspec/reuse/correlated", "0/1", "gauge", "1 while noise is kept, so that epochs are correlated"),
    Metric(
        "rollspec/reuse/responses", "responses", "counter", "responses that had one with the same noise before them"
    ),
    Metric("rollspec/reuse/repeated", "tokens", "counter", "their leading tokens that repeat the old response"),
    Metric("rollspec/reuse/share", "ratio", "gauge", "repeated / all tokens of those responses"),
    Metric("rollspec/reuse/identical", "ratio", "gauge", "share of those responses that repeat the old one whole"),
    Metric("rollspec/policy/version", "version", "gauge", "policy version the engine samples from"),
    Metric("rollspec/guard/faults", "faults", "counter", "faults survived by degrading (each cause is logged once)"),
    Metric("rollspec/guard/faults/<cause>", "faults", "counter", "faults of one cause"),
    Metric("rollspec/reuse/lossy", "0/1", "gauge", "1 where rollouts started from old responses (lenient)"),
    Metric("rollspec/reuse/bias", "nats", "gauge", "reuse.bias of the lenient rule"),
    Metric("rollspec/reuse/verified", "responses", "counter", "old responses scored by the present policy"),
    Metric("rollspec/reuse/skip_ratio", "ratio", "gauge", "rollouts that were an old response whole (SPEC-RL)"),
    Metric("rollspec/reuse/cont_ratio", "ratio", "gauge", "the other rollouts: generated, in part or whole (SPEC-RL)"),
    Metric(
        "rollspec/reuse/avg_cut_idx", "tokens", "gauge", "where old responses are cut, mean over rollouts (SPEC-RL)"
    ),
    Metric("rollspec/reuse/avg_saved_tokens", "tokens", "gauge", "tokens not generated, mean over rollouts (SPEC-RL)"),
    Metric("rollspec/reuse/avg_resp_len", "tokens", "gauge", "length of old responses, mean over rollouts (SPEC-RL)"),
    Metric("rollspec/reuse/refused/<cause>", "responses", "counter", "rollouts generated whole for one cause"),
    Metric("rollspec/health/logprob_gap", "nats", "gauge", "mean |log p engine - log p trainer| of sampled tokens"),
    Metric("rollspec/health/logprob_corr", "ratio", "gauge", "correlation of engine and trainer probabilities"),
    Metric("rollspec/health/nan_logprobs", "tokens", "counter", "sampled tokens whose log-prob the engine gave as NaN"),
    Metric("rollspec/health/logprob_lost", "log-probs", "counter", "log-probs of either side that are not finite"),
    Metric("rollspec/health/ess_token", "ratio", "gauge", "effective sample size of the tokens' weights, 0..1"),
    Metric("rollspec/health/ess_sequence", "ratio", "gauge", "effective sample size of the responses' weights, 1/n..1"),
    Metric("rollspec/health/ratio_outside", "ratio", "gauge", "share of importance ratios outside 0.8 to 1.25"),
    Metric("rollspec/health/ratio_max", "ratio", "gauge", "largest importance ratio p trainer / p engine of a token"),
    Metric(
        "rollspec/health/epoch_overlap", "ratio", "gauge", "share of tokens in a prefix of the last epoch's response"
    ),
    Metric("rollspec/health/epoch_overlap_chance", "ratio", "gauge", "what it would be for independent draws"),
    Metric("rollspec/health/epoch_identical", "ratio", "gauge", "share of responses equal to the last epoch's"),
    Metric("rollspec/health/warnings", "warnings", "counter", "thresholds of telemetry.health crossed in this step"),
    Metric("rollspec/health/warnings/<kind>", "warnings", "counter", "one of them (each kind is logged once)"),
    Metric("rollspec/reward/mean", "reward", "gauge", "mean reward of the rollouts of this step"),
    Metric("rollspec/length/p50", "tokens", "gauge", "median response length of this step"),
    Metric("rollspec/length/p90", "tokens", "gauge", "90th percentile of response length of this step"),
    Metric("rollspec/length/p99", "tokens", "gauge", "99th percentile of response length of this step"),
    Metric("rollspec/length/max", "tokens", "gauge", "longest response of this step"),
)


def find(name: str) -> Metric | None:
    """The row that describes the concrete metric `name`: `rollspec/accept/rate/suffix` is `.../rate/<drafter>`."""
    stem = name.rsplit("/", 1)[0]
    for row in TABLE:
        if row.name == name or (row.name.endswith(">") and row.name.rsplit("/", 1)[0] == stem):
            return row
    return None


def to_metrics(s: EngineStats) -> dict[str, float]:
    """The user-facing names from raw counts. Ratios with no denominator are left out."""
    out: dict[str, float] = {
        "rollspec/rollout/engine_seconds": s.step_seconds,
        "rollspec/rollout/tail_seconds": s.tail_seconds,
        "rollspec/rollout/propose_seconds": s.propose_seconds,
        "rollspec/rollout/tokens": s.emitted,
        "rollspec/rollout/steps": s.steps,
        "rollspec/rollout/speculating": float(s.speculating),
        "rollspec/accept/drafted": s.drafted,
        "rollspec/accept/accepted": s.accepted,
        "rollspec/history/bytes": s.history_bytes,
        "rollspec/history/tree_bytes": s.tree_bytes,
        "rollspec/history/prompts": s.prompts,
        "rollspec/history/evicted": s.evicted,
        "rollspec/history/rewarded": s.rewarded,
        "rollspec/policy/version": s.version,
        "rollspec/guard/faults": sum(s.faults.values()),
    }
    if s.step_seconds > 0:
        out["rollspec/rollout/tokens_per_second"] = s.emitted / s.step_seconds
        out["rollspec/rollout/propose_share"] = s.propose_seconds / s.step_seconds
    if s.steps:
        out["rollspec/rollout/batch_mean"] = s.requests / s.steps
    if s.requests:
        out["rollspec/accept/length"] = s.emitted / s.requests
    if s.drafted:
        out["rollspec/accept/rate"] = s.accepted / s.drafted
        out["rollspec/accept/predicted"] = s.predicted / s.drafted
    if s.verified:
        out["rollspec/accept/draft_length"] = s.drafted / s.verified
    for source, (_, drafted, accepted) in sorted(s.by_source.items()):
        out[f"rollspec/accept/drafted/{source}"] = drafted
        if drafted:
            out[f"rollspec/accept/rate/{source}"] = accepted / drafted
    for cause, n in sorted(s.faults.items()):
        # A slash would open a new group in the trainer's logger.
        out[f"rollspec/guard/faults/{cause.replace('/', '.')}"] = n
    for i, (n, a) in enumerate(s.by_position):
        if n:
            out[f"rollspec/accept/position/{i + 1}"] = a / n
    if s.correlated:
        responses, tokens, repeated, identical = s.reuse
        out["rollspec/reuse/correlated"] = 1.0
        out["rollspec/reuse/responses"] = responses
        out["rollspec/reuse/repeated"] = repeated
        if tokens:
            out["rollspec/reuse/share"] = repeated / tokens
        if responses:  # one that was aborted and went on may have been counted as a response before this
            out["rollspec/reuse/identical"] = min(1.0, identical / responses)
    return out | _tuner_metrics(s) | _lenient_metrics(s.lenient)


def _lenient_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """SPEC-RL's own metrics, over all rollouts of the step as there; left out while no old response was verified."""
    prefix = "refused/"
    out = {f"rollspec/reuse/{name}": n for name, n in sorted(counts.items()) if name.startswith(prefix)}
    verified, rollouts = counts.get("verified", 0.0), counts.get("requests", 0.0)
    if counts:
        out["rollspec/reuse/lossy"] = float(verified > 0)
    if verified:
        skipped, accepted = counts.get("skipped", 0.0), counts.get("accepted", 0.0)
        out["rollspec/reuse/verified"] = verified
        out["rollspec/reuse/skip_ratio"] = skipped / rollouts
        out["rollspec/reuse/cont_ratio"] = 1.0 - skipped / rollouts
        out["rollspec/reuse/avg_cut_idx"] = accepted / rollouts
        out["rollspec/reuse/avg_saved_tokens"] = accepted / rollouts
        out["rollspec/reuse/avg_resp_len"] = counts.get("old_tokens", 0.0) / rollouts
    return out


def _tuner_metrics(s: EngineStats) -> dict[str, float]:
    out: dict[str, float] = {
        "rollspec/tuner/seconds": s.tuner_seconds,
        "rollspec/tuner/cost_skipped": s.cost_skipped,
        "rollspec/guard/alarms": s.alarms,
        "rollspec/guard/recoveries": s.recoveries,
        "rollspec/guard/off": len(s.drafters_off),
    }
    if s.step_seconds > 0:
        out["rollspec/tuner/share"] = s.tuner_seconds / s.step_seconds
    if s.cost_error is not None:
        out["rollspec/tuner/cost_error"] = s.cost_error
    for name, value in {**s.drafter, **s.drafter_levels}.items():
        out[f"rollspec/drafter/{name}"] = value
    if s.step_seconds > 0 and "capture_seconds" in s.drafter:
        out["rollspec/drafter/capture_share"] = s.drafter["capture_seconds"] / s.step_seconds
    if s.passes:
        out["rollspec/drafter/passes"] = s.passes
        out["rollspec/drafter/pass_seconds"] = s.pass_seconds
    steps = sum(s.plays.values())
    for arm, n in s.plays.items():
        out[f"rollspec/tuner/arm/{arm}"] = n / steps
    if s.max_prob[1]:
        out["rollspec/accept/ceiling"] = s.max_prob[0] / s.max_prob[1]
    m = s.modelled
    if m.get("played") and m.get("fixed/none"):
        for setting, seconds in m.items():
            out[f"rollspec/tuner/modelled_seconds/{setting.replace('fixed/', '')}"] = seconds
        out["rollspec/tuner/regret"] = m["played"] / m["oracle"] - 1.0
        out["rollspec/rollout/speedup"] = m["fixed/none"] / m["played"]
        out["rollspec/rollout/speedup_best_fixed"] = m["fixed/none"] / min(
            t for k, t in m.items() if k.startswith("fixed/")
        )
        out["rollspec/rollout/speedup_oracle"] = m["fixed/none"] / m["oracle"]
        out["rollspec/rollout/speedup_clairvoyant"] = m["fixed/none"] / m["clairvoyant"]
        out["rollspec/rollout/speedup_perfect"] = m["fixed/none"] / m["perfect"]
    return out
