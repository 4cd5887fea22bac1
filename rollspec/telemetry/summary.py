"""From measured runs to the numbers a report states: per run, one against the other, and against what was possible.

Claims are kept honest here: a speed-up comes with its bootstrap interval over steps, "unchanged" means that the runs
differ by no more than two runs without rollspec do, and a number whose metric is missing is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

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
WARNINGS, FAULTS = "rollspec/health/warnings", "rollspec/guard/faults"
SPECULATING = "rollspec/rollout/speculating"
MODELLED = "rollspec/tuner/modelled_seconds/"
# verl's phases of a step that do not contain each other.
PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights",
          "save_checkpoint")  # fmt: skip
ENOUGH_DRAFTED, PART = 500, 0.2
"""Drafted tokens after which predicted and accepted ones should agree, and by what share they may part."""

Numbers = dict[str, Any]
"""Numbers by name, as the report's JSON has them: seconds, tokens, tokens per second, ratios; None: not measured."""


@dataclass(frozen=True)
class Ratio:
    """How many times faster, with a 95 % bootstrap interval over steps."""

    value: float
    low: float
    high: float
    steps: int


@dataclass(frozen=True)
class Difference:
    """Mean over paired steps of (run - baseline).

    Steps of a training are not independent: two runs of one job part, and stay apart. So the difference is compared
    with those between `pairs` of runs without rollspec: 95 of 100 such pairs are expected within +-`noise`, for reward
    and length together. `noise` and `unchanged` are None where there are fewer than two pairs.
    """

    mean: float
    steps: int
    pairs: int
    noise: float | None = None
    unchanged: bool | None = None


def summarize(run: Run) -> Numbers:
    """The numbers of one run."""
    sizes, rewards, tokens = run.all_lengths, run.series(*REWARD), tokens_per_step(run)

    def over(function: Callable[[list[float]], float], *names: str) -> float | None:
        return _of(function, run.series(*names))

    def share(part: str, whole: str) -> float | None:
        return _quotient(run.series(part), run.series(whole))

    # Without single lengths, the mean over steps of each step's own percentile is the closest thing measured.
    quantiles = {q: float(np.percentile(sizes, q)) if sizes else over(fmean, f"rollspec/length/p{q}")
                 for q in (50, 90, 99)}  # fmt: skip
    first, last = _ends(run)
    rate = share("rollspec/accept/accepted", "rollspec/accept/drafted")
    return {
        "name": run.name,
        "steps": len(run.steps),
        "epochs": len(set(run.epochs)),
        "gen_total": over(sum, GEN),
        "gen_median": over(median, GEN),
        "step_total": over(sum, STEP_TIME),
        "step_median": over(median, STEP_TIME),
        "gen_share": share(GEN, STEP_TIME),
        "tokens": _of(sum, tokens),
        "tokens_per_second": _quotient(tokens, run.series(GEN)),
        "accept_length": over(fmean, *ACCEPT_LENGTH),
        "accept_rate": rate if rate is not None else over(fmean, *ACCEPT_RATE),
        "reward_first": _of(fmean, (rewards[i] for i in first)),
        "reward_last": _of(fmean, (rewards[i] for i in last)),
        "length_mean": fmean(sizes) if sizes else over(fmean, LENGTH),
        **{f"length_p{q}": value for q, value in quantiles.items()},
        "length_max": max(sizes) if sizes else over(max, "rollspec/length/max", "response_length/max"),
        "clip_ratio": over(fmean, "response_length/clip_ratio"),
        "propose_share": share("rollspec/rollout/propose_seconds", "rollspec/rollout/engine_seconds"),
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
    common = sorted(set(run.steps) & set(baseline.steps))
    # The first step of a process builds and compiles what the others find there: three to four times their time.
    warm = common[1:] if len(common) > 2 else common
    epoch = dict(zip(run.steps, run.epochs, strict=True))
    gen, whole = (_pairs(_by_step(run, name), _by_step(baseline, name), warm) for name in (GEN, STEP_TIME))
    later = [s for s in gen if epoch[s] > epoch[common[0]]]
    overall = _per_token(run, baseline, list(gen))
    return {
        "steps": len(common),
        "timed": len(warm),
        "overall": ratio(list(gen.values())),
        "later": ratio([gen[s] for s in later]),  # from the second epoch on
        "by_epoch": {e: r for e in sorted({epoch[s] for s in gen})
                     if (r := ratio([pair for s, pair in gen.items() if epoch[s] == e])) is not None},
        "tokens_per_second": overall.value if overall else None,
        "later_tokens_per_second": _per_token(run, baseline, later),  # what `later` would be at equal lengths
        "step": ratio(list(whole.values())),
        "other_phases": ratio(list(_pairs(_other_phases(run), _other_phases(baseline), warm).values())),
        "saved_seconds": sum(b - r for b, r in gen.values()) if gen else None,
        "reward": _difference(run, baseline, common, *REWARD),
        "length": _difference(run, baseline, common, LENGTH),
    }  # fmt: skip


def limits(run: Run) -> Numbers | None:
    """Speed-ups over no drafts, all modelled so that they compare; None where the run's metrics do not carry them.

    The engine's ledger (tuning/regret.py) writes per training step the seconds that other settings would have taken.
    `oracle`: the best arm of each batch bucket, known in hindsight; `clairvoyant`: the best arm of each engine step,
    which no policy can reach; `perfect`: a drafter that is always right. Shares are of engine time.
    """
    seconds = {name.removeprefix(MODELLED): sum(run.known(name)) for name in run.names(MODELLED)}
    bounds = ("played", "oracle", "clairvoyant", "perfect")
    if not all(seconds.get(k) for k in (*bounds, "none")):
        return None
    got, oracle, clairvoyant, perfect = (seconds["none"] / seconds.pop(k) for k in bounds)
    arm = min((k for k, t in seconds.items() if t > 0), key=seconds.__getitem__)
    weights = run.series("rollspec/rollout/engine_seconds")

    def mean(name: str) -> float | None:
        weighed = [v * w if v is not None and w else None for v, w in zip(run.series(name), weights, strict=True)]
        return _quotient(weighed, weights)

    return {
        "got": got,
        "best_fixed": seconds["none"] / seconds[arm],
        "best_fixed_arm": arm,
        "oracle": oracle,
        "clairvoyant": clairvoyant,
        "perfect": perfect,
        "cost_error": mean("rollspec/tuner/cost_error"),  # median relative error of predicted step times
        "max_acceptance": mean("rollspec/accept/max_acceptance"),  # E[max p]: what one-hot drafts can reach
        "tuner_share": mean("rollspec/tuner/share"),
        "host_share": mean("rollspec/rollout/propose_share"),
        "regret": oracle / got - 1.0,  # modelled time over the oracle's, less 1
    }


def calibration(run: Run) -> Numbers | None:
    """Of the drafted tokens, how many the drafters expected to be accepted, and how many were; None without drafts.

    They part where they differ by more than chance and a moving policy explain.
    """
    names = ("rollspec/accept/drafted", "rollspec/accept/predicted", "rollspec/accept/accepted")
    drafted = predicted = accepted = 0.0
    for d, p, a in zip(*map(run.series, names), strict=True):
        if d is not None and p is not None and a is not None:
            drafted, predicted, accepted = drafted + d, predicted + d * p, accepted + a
    parts = drafted >= ENOUGH_DRAFTED and abs(predicted - accepted) > PART * max(accepted, 1.0)
    return {"drafted": drafted, "predicted": predicted, "accepted": accepted, "parts": parts} if drafted else None


def ratio(pairs: Sequence[tuple[float, float]]) -> Ratio | None:
    """Total of the first over total of the second; None without data."""
    if not pairs or sum(b for _, b in pairs) <= 0:
        return None
    return _bootstrap(pairs, lambda sums: sums[..., 0] / sums[..., 1])


def _per_token(run: Run, baseline: Run, steps: Sequence[int]) -> Ratio | None:
    """Tokens per second of `run` over those of `baseline` in `steps`."""
    sides = []
    for side in (run, baseline):
        values = dict(zip(side.steps, zip(tokens_per_step(side), side.series(GEN), strict=True), strict=True))
        sides.append([values[s] for s in steps])
    rows = [(*a, *b) for a, b in zip(*sides, strict=True) if None not in a and None not in b]
    if not rows or min(map(sum, zip(*rows, strict=True))) <= 0:
        return None
    # Tokens and seconds of the one, of the other.
    return _bootstrap(rows, lambda sums: sums[..., 0] * sums[..., 3] / (sums[..., 1] * sums[..., 2]))


def _bootstrap(rows: Any, of: Callable[[Any], Any]) -> Ratio:
    """`of` the column sums of `rows` [steps, columns], with a 95 % interval from resampling the rows."""
    table = np.asarray(rows, dtype=np.float64)
    rng = np.random.default_rng(0)  # the same file must give the same report
    sums = table[rng.integers(0, len(table), size=(DRAWS, len(table)))].sum(axis=1)  # [DRAWS, columns]
    low, high = np.percentile(of(np.maximum(sums, 1e-12)), [2.5, 97.5])
    return Ratio(float(of(table.sum(axis=0))), float(low), float(high), len(table))


def tokens_per_step(run: Run) -> list[float | None]:
    """Response tokens of each step, from the most direct measurement the run has."""
    per_token, gen, emitted = (run.series(n) for n in ("timing_per_token_ms/gen", GEN, "rollspec/rollout/tokens"))
    out: list[float | None] = []
    for sizes, ms, seconds, tokens in zip(run.lengths, per_token, gen, emitted, strict=True):
        if sizes:
            out.append(float(sum(sizes)))
        else:
            out.append(seconds * 1000 / ms if ms and seconds is not None else tokens)
    return out


def _difference(run: Run, baseline: Run, common: Sequence[int], *names: str) -> Difference | None:
    pairs = _pairs(_by_step(run, *names), _by_step(baseline, *names), common)
    if not pairs:
        return None
    mean = fmean(mine - theirs for theirs, mine in pairs.values())
    means = []  # of each group of runs without rollspec
    for group in baseline.repeats:
        known = [values for r in group if pairs.keys() <= (values := _by_step(r, *names)).keys()]
        means.append([fmean(values[s] for s in pairs) for values in known])
    free = sum(max(0, len(group) - 1) for group in means)
    if free < 2:  # one pair has no spread worth a bound
        return Difference(mean, len(pairs), free)
    # Two runs of a group differ by the square root of two times the spread of one, pooled over the groups.
    pooled = sum(sum((m - fmean(group)) ** 2 for m in group) for group in means if group) / free
    noise = t_critical(free) * math.sqrt(2 * pooled)
    return Difference(mean, len(pairs), free, noise, abs(mean) <= noise)


def _by_step(run: Run, *names: str) -> dict[int, float]:
    return {s: v for s, v in zip(run.steps, run.series(*names), strict=True) if v is not None}


def _pairs(mine: dict[int, float], theirs: dict[int, float], steps: Sequence[int]) -> dict[int, tuple[float, float]]:
    """(baseline's, run's) of the steps that have both."""
    return {s: (theirs[s], mine[s]) for s in steps if s in mine and s in theirs}


def t_critical(n: int) -> float:
    """Two-sided quantile of Student's t with n >= 2 degrees of freedom, within 6 % (Cornish-Fisher expansion).

    At 97.5 %: reward and length are compared, and a report without any difference should say so 95 times in 100.
    """
    z = 2.241403
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def _ends(run: Run) -> tuple[list[int], list[int]]:
    """Row numbers of the first and the last epoch, which hold the same prompts; else the first and last third."""
    epochs = run.epochs
    if len(set(epochs)) > 1:
        return [i for i, e in enumerate(epochs) if e == epochs[0]], [i for i, e in enumerate(epochs) if e == epochs[-1]]
    third = max(1, len(epochs) // 3)
    return list(range(third)), list(range(len(epochs) - third, len(epochs)))


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


def _other_phases(run: Run) -> dict[int, float]:
    """By step, the seconds of all phases but generation: rollouts do not change them, so they show the machine."""
    series = [run.series(f"timing_s/{phase}") for phase in PHASES if phase != "gen"]
    return {s: t for s, *parts in zip(run.steps, *series, strict=True) if (t := sum(p or 0.0 for p in parts)) > 0.0}


def _quotient(parts: Sequence[float | None], wholes: Sequence[float | None]) -> float | None:
    """Sum over sum, of the steps that have both."""
    both = [(p, w) for p, w in zip(parts, wholes, strict=True) if p is not None and w]
    return sum(p for p, _ in both) / sum(w for _, w in both) if both else None


def _of(function: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return function(known) if known else None
