"""From measured runs to the numbers a report states: per run, one against the other, and against what was possible.

Claims are kept honest here: a speed-up comes with its bootstrap interval over steps, reward and lengths
are compared with what two runs without rollspec differ by, and a number whose metric is missing is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median, variance
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from rollspec.telemetry.runs import GEN, STEP_TIME, Run

DRAWS = 2000  # of the bootstrap
REWARD = ("rollspec/reward/mean", "critic/score/mean", "critic/rewards/mean")
LENGTH = "response_length/mean"
ACCEPT_LENGTH = ("rollspec/accept/length", "rollout/spec_accept_length")
ACCEPT_RATE = ("rollspec/accept/rate", "rollout/spec_accept_rate")
GAP = ("rollspec/health/logprob_gap", "training/rollout_probs_diff_mean")
CORR = ("rollspec/health/logprob_corr", "training/rollout_actor_probs_pearson_corr")
ESS_TOKEN, ESS_SEQUENCE = "rollspec/health/ess_token", "rollspec/health/ess_sequence"
OVERLAP, CHANCE = "rollspec/health/epoch_overlap", "rollspec/health/epoch_overlap_chance"
WARNINGS, FAULTS = "rollspec/health/warnings", "rollspec/faults"
SPECULATING, ENGINE_TIME = "rollspec/rollout/speculating", "rollspec/rollout/engine_seconds"
MODELLED, CLOCK = "rollspec/tuner/modelled_seconds/", "rollspec/tuner/clock_seconds/"
# verl's phases of a step that do not contain each other.
PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights",
          "save_checkpoint")  # fmt: skip
ENOUGH_DRAFTED, PART = 500, 0.2
"""Drafted tokens after which predicted and accepted ones should agree, and by what share they may part."""
REGRETS_PART = 0.03
"""Difference between modelled and measured regret from which on the report warns."""

FloatArray = npt.NDArray[np.float64]
Series = Sequence[float | None]
Numbers = dict[str, Any]
"""Numbers by name, as the report's JSON has them: seconds, tokens, tokens per second, ratios; None: not measured."""


def summarize(run: Run) -> Numbers:
    """The numbers of one run."""
    sizes, rewards, tokens, epochs = run.all_lengths, run.series(*REWARD), tokens_per_step(run), run.epochs

    def over(function: Callable[[list[float]], float], *names: str) -> float | None:
        return measured(function, run.series(*names))

    def share(part: str, whole: str) -> float | None:
        return _quotient(run.series(part), run.series(whole))

    # Without single lengths, the mean over steps of each step's own percentile is the closest thing measured.
    quantiles = {q: float(np.percentile(sizes, q)) if sizes else over(fmean, f"rollspec/length/p{q}")
                 for q in (50, 90, 99)}  # fmt: skip
    # The first and the last epoch hold the same prompts; a run of one epoch has thirds.
    third = max(1, len(epochs) // 3)
    first, last = (epochs.count(epochs[i]) if len(set(epochs)) > 1 else third for i in (0, -1))
    rate = share("rollspec/accept/accepted", "rollspec/accept/drafted")
    return {
        "name": run.name,
        "steps": len(run.steps),
        "epochs": len(set(epochs)),
        "gen_total": over(sum, GEN),
        "gen_median": over(median, GEN),
        "step_total": over(sum, STEP_TIME),
        "step_median": over(median, STEP_TIME),
        "gen_share": share(GEN, STEP_TIME),
        "tokens": measured(sum, tokens),
        "tokens_per_second": _quotient(tokens, run.series(GEN)),
        "accept_length": over(fmean, *ACCEPT_LENGTH),
        "accept_rate": rate if rate is not None else over(fmean, *ACCEPT_RATE),
        "reward_first": measured(fmean, rewards[:first]),
        "reward_last": measured(fmean, rewards[-last:]),
        "length_mean": fmean(sizes) if sizes else over(fmean, LENGTH),
        **{f"length_p{q}": value for q, value in quantiles.items()},
        "length_max": max(sizes) if sizes else over(max, "rollspec/length/max", "response_length/max"),
        "clip_ratio": over(fmean, "response_length/clip_ratio"),
        "propose_share": share("rollspec/rollout/propose_seconds", ENGINE_TIME),
        "logprob_gap": over(fmean, *GAP),
        "logprob_corr_min": over(min, *CORR),
        "speculating_share": over(fmean, SPECULATING),
        "ess_token_min": over(min, ESS_TOKEN),
        "ess_sequence_min": over(min, ESS_SEQUENCE),
        "ratio_outside": over(fmean, "rollspec/health/ratio_outside"),
        "epoch_overlap": over(fmean, OVERLAP),
        "epoch_overlap_chance": over(fmean, CHANCE),
        "lossy": any(run.known("rollspec/reuse/lossy")),  # rollouts started from old responses by SPEC-RL's rule
        "correlated": any(run.known("rollspec/reuse/correlated")),  # noise was kept over epochs
        "health_warnings": _counts(run, WARNINGS),
        "faults": _counts(run, FAULTS),
        "phases": _phases(run),
    }  # fmt: skip


def compare(run: Run, baseline: Run) -> Numbers:
    """`run` against `baseline`, over the steps that both have; times without the first of them, which warms up."""
    common, *rows = np.intersect1d(baseline.steps, run.steps, return_indices=True)
    # The first step of a process builds and compiles what the others find there: three to four times their time.
    timed = [r[1:] if len(common) > 2 else r for r in rows]

    def pair(of: Callable[[Run], Series]) -> FloatArray:  # [baseline and run, timed steps]
        return np.array([np.array(of(r), float)[at] for r, at in zip((baseline, run), timed, strict=True)])

    gen, tokens, rest = pair(lambda r: r.series(GEN)), pair(tokens_per_step), pair(_other_phases)
    speed = np.array([tokens[1], *gen, tokens[0]])  # tokens per second, of the run over the baseline's
    # Generation with the speed of the other phases divided out: a machine that is slower in one run is so in both.
    relative = np.array([gen[0], rest[1], gen[1], rest[0]])
    epochs = np.array(run.epochs)
    epoch, later = epochs[timed[1]], epochs[timed[1]] > epochs[rows[1]][:1]
    saved = _known(*gen)
    return {
        "steps": len(common),
        "timed": len(timed[0]),
        "overall": ratio(*gen),
        "later": ratio(*gen[:, later]),  # from the second epoch on
        "by_epoch": {int(e): r for e in np.unique(epoch) if (r := ratio(*gen[:, epoch == e]))},
        "tokens_per_second": (ratio(*speed) or {}).get("value"),
        "later_tokens_per_second": ratio(*speed[:, later]),  # what `later` would be at equal lengths
        "step": ratio(*pair(lambda r: r.series(STEP_TIME))),
        "other_phases": ratio(*rest),
        "relative": ratio(*relative[:, later if later.any() else slice(None)]),
        "saved_seconds": float(saved[0].sum() - saved[1].sum()) if saved.size else None,
        "reward": _difference(run, baseline, *REWARD),
        "length": _difference(run, baseline, LENGTH),
    }


def limits(run: Run) -> Numbers | None:
    """Speed-ups over no drafts, all modelled so that they compare; None where the run's metrics do not carry them.

    The engine's ledger (tuning/regret.py) writes per training step the seconds that other settings would have taken.
    `oracle`: the best arm of each batch bucket, known in hindsight; `clairvoyant`: the best arm of each engine step,
    which no strategy can reach; `perfect`: a drafter whose drafts are always accepted. Shares are of engine time.
    """
    seconds = {name.removeprefix(MODELLED): sum(run.known(name)) for name in run.names(MODELLED)}
    bounds = ("played", "oracle", "clairvoyant", "perfect")
    if not all(map(seconds.get, ("none", *bounds))):
        return None
    speed = {setting: seconds["none"] / s for setting, s in seconds.items() if s > 0}
    got, oracle, clairvoyant, perfect = map(speed.pop, bounds)
    arm = max(speed, key=speed.__getitem__)
    regret, clock = oracle / got - 1.0, _quotient(run.series(f"{CLOCK}played"), run.series(f"{CLOCK}oracle"))
    measured_regret = None if clock is None else clock - 1.0

    def mean(name: str) -> float | None:
        values, weights = _known(run.series(name), run.series(ENGINE_TIME))
        return _quotient(values * weights, weights)

    return {
        "got": got,
        "best_fixed": speed[arm],
        "best_fixed_arm": arm,
        "oracle": oracle,
        "clairvoyant": clairvoyant,
        "perfect": perfect,
        "cost_error": mean("rollspec/tuner/cost_error"),  # median relative error of predicted step times
        "max_acceptance": mean("rollspec/accept/max_acceptance"),  # E[max p]: what one-hot drafts can reach
        "tuner_share": mean("rollspec/tuner/share"),
        "host_share": mean("rollspec/rollout/propose_share"),
        "regret": regret,  # modelled time over the oracle's, less 1
        "regret_measured": measured_regret,  # the same with each arm's time corrected by its timed steps
        "regrets_part": measured_regret is not None and abs(measured_regret - regret) > REGRETS_PART,
    }


def calibration(run: Run) -> Numbers | None:
    """Of the drafted tokens, how many the drafters expected to be accepted, and how many were; None without drafts.

    They part where they differ by more than chance and a moving policy explain.
    """
    each, rate, accepts = _known(*(run.series(f"rollspec/accept/{n}") for n in ("drafted", "predicted", "accepted")))
    drafted, predicted, accepted = (float(x.sum()) for x in (each, each * rate, accepts))
    parts = drafted >= ENOUGH_DRAFTED and abs(predicted - accepted) > PART * max(accepted, 1.0)
    return {"drafted": drafted, "predicted": predicted, "accepted": accepted, "parts": parts} if drafted else None


def ratio(*columns: Series | FloatArray) -> Numbers | None:
    """Sums of the first half of `columns` over those of the second, multiplied; None without data.

    Columns have a value per step. With a 95 % bootstrap interval over the steps that all of them have.
    """
    table = _known(*columns)  # [columns, steps]
    if not (table.sum(axis=1) > 0).all():
        return None

    def of(sums: FloatArray) -> Any:
        return sums[: len(sums) // 2].prod(axis=0) / sums[len(sums) // 2 :].prod(axis=0)

    n = table.shape[1]
    draws = np.random.default_rng(0).integers(0, n, size=(DRAWS, n))  # the same file must give the same report
    low, high = np.percentile(of(np.maximum(table[:, draws].sum(axis=2), 1e-12)), [2.5, 97.5])
    return {"value": float(of(table.sum(axis=1))), "low": float(low), "high": float(high), "steps": n}


def tokens_per_step(run: Run) -> list[float | None]:
    """Response tokens of each step, from the most direct measurement the run has."""
    names = ("timing_per_token_ms/gen", GEN, "rollspec/rollout/tokens")
    return [
        float(sum(sizes)) if sizes else seconds * 1000 / ms if ms and seconds is not None else tokens
        for sizes, ms, seconds, tokens in zip(run.lengths, *map(run.series, names), strict=True)
    ]


def _difference(run: Run, baseline: Run, *names: str) -> Numbers | None:
    """Mean over paired steps of (run - baseline).

    Steps of a training are not independent: two runs of one job part, and stay apart. So the difference is compared
    with those between `pairs` of runs without rollspec: 95 of 100 such pairs are expected within +-`noise`, for reward
    and length together. `noise` and `unchanged` are None where there are fewer than two pairs.
    """

    def by_step(r: Run) -> dict[int, float]:
        return {s: v for s, v in zip(r.steps, r.series(*names), strict=True) if v is not None}

    mine, theirs = by_step(run), by_step(baseline)
    steps = mine.keys() & theirs.keys()
    if not steps:
        return None

    def mean(values: dict[int, float]) -> float:
        return fmean(values[s] for s in steps)

    difference = mean(mine) - mean(theirs)
    known = [[mean(v) for v in map(by_step, group) if steps <= v.keys()] for group in baseline.repeats]
    groups = [means for means in known if len(means) > 1]
    free = sum(len(means) - 1 for means in groups)
    found: Numbers = {"mean": difference, "steps": len(steps), "pairs": free, "noise": None, "unchanged": None}
    if free > 1:  # one pair has no spread worth a bound
        # Two runs of a group differ by the square root of two times the spread of one, pooled over the groups.
        pooled = sum((len(means) - 1) * variance(means) for means in groups) / free
        noise = t_critical(free) * math.sqrt(2 * pooled)
        found |= {"noise": noise, "unchanged": abs(difference) <= noise}
    return found


def t_critical(n: int) -> float:
    """Two-sided quantile of Student's t with n degrees of freedom.

    At 97.5 %: reward and length are compared, and a report without any difference should say so 95 times in 100.
    """
    return float(stdtrit(n, 1 - 0.025 / 2))


def _counts(run: Run, name: str) -> dict[str, int]:
    """Kind -> count over the run; counts without a kind go under 'unnamed'."""
    out = {n.removeprefix(f"{name}/"): int(sum(run.known(n))) for n in run.names(f"{name}/")}
    out["unnamed"] = int(sum(run.known(name))) - sum(out.values())
    return {kind: n for kind, n in out.items() if n > 0}


def _phases(run: Run) -> dict[str, float]:
    """Seconds of each phase of the step, and of the rest."""
    out = {phase: sum(run.known(f"timing_s/{phase}")) for phase in PHASES}
    rest = sum(run.known(STEP_TIME)) - sum(out.values())
    return {k: t for k, t in {**out, "other": rest}.items() if t > 0} if any(out.values()) else {}


def _other_phases(run: Run) -> list[float | None]:
    """By step, the seconds of all phases but generation: of the machine, of a head's training, and of padding."""
    series = [run.series(f"timing_s/{phase}") for phase in PHASES if phase != "gen"]
    return [sum(s or 0.0 for s in step) or None for step in zip(*series, strict=True)]


def _known(*columns: Series | FloatArray) -> FloatArray:
    """The columns without the steps that one of them lacks: [columns, steps]."""
    table = np.array(columns, float)
    return table[:, ~np.isnan(table).any(axis=0)]


def _quotient(parts: Series | FloatArray, wholes: Series | FloatArray) -> float | None:
    """Sum over sum, of the steps that have both."""
    part, whole = _known(parts, wholes).sum(axis=1)
    return float(part / whole) if whole else None


def measured(function: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    """`function` of the values that are there; None without any."""
    known = [v for v in values if v is not None]
    return function(known) if known else None
