"""From two measured runs to the numbers a report states: per run, per epoch, and one against the other.

Claims are kept honest here: a speed-up comes with its bootstrap interval over steps, "unchanged" means that the runs
differ by no more than two runs without rollspec do, and a number whose metric is missing is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np

from rollspec.telemetry.runs import GEN, STEP_TIME, Run

DRAWS = 2000  # of the bootstrap
REWARD = ("rollspec/reward/mean", "critic/score/mean", "critic/rewards/mean")
ACCEPT_LENGTH = ("rollspec/accept/length", "rollout/spec_accept_length")
ACCEPT_RATE = ("rollspec/accept/rate", "rollout/spec_accept_rate")
GAP = ("rollspec/health/logprob_gap", "training/rollout_probs_diff_mean")
CORR = ("rollspec/health/logprob_corr", "training/rollout_actor_probs_pearson_corr")
ESS_TOKEN, ESS_SEQUENCE = "rollspec/health/ess_token", "rollspec/health/ess_sequence"
OVERLAP, CHANCE = "rollspec/health/epoch_overlap", "rollspec/health/epoch_overlap_chance"
WARNINGS = "rollspec/health/warnings"
LOSSY, CORRELATED = "rollspec/reuse/lossy", "rollspec/reuse/correlated"
SPECULATING = "rollspec/rollout/speculating"
FAULTS = "rollspec/guard/faults"
# verl's phases of a step that do not contain each other.
PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights",
          "save_checkpoint")  # fmt: skip


@dataclass(frozen=True)
class RunSummary:
    """Numbers of one run; None where it was not measured. Seconds, tokens, tokens per second, ratios."""

    name: str
    steps: int
    epochs: int
    gen_total: float | None
    gen_median: float | None
    step_total: float | None
    step_median: float | None
    gen_share: float | None
    tokens: float | None
    tokens_per_second: float | None
    accept_length: float | None
    accept_rate: float | None
    reward_first: float | None
    reward_last: float | None
    length_mean: float | None
    length_p50: float | None
    length_p90: float | None
    length_p99: float | None
    length_max: float | None
    clip_ratio: float | None
    propose_share: float | None
    logprob_gap: float | None
    logprob_corr_min: float | None
    speculating_share: float | None
    ess_token_min: float | None = None
    ess_sequence_min: float | None = None
    ratio_outside: float | None = None
    epoch_overlap: float | None = None
    epoch_overlap_chance: float | None = None
    lossy: bool = False  # rollouts started from old responses by SPEC-RL's rule
    correlated: bool = False  # noise was kept over epochs
    health_warnings: dict[str, int] = field(default_factory=dict)  # kind -> steps
    faults: dict[str, int] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)  # seconds of each phase of the step, and of the rest


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


@dataclass(frozen=True)
class Comparison:
    """A run against its baseline, over the steps that both have; times without the first of them, which warms up."""

    steps: int
    timed: int
    overall: Ratio | None
    later: Ratio | None  # from the second epoch on
    by_epoch: dict[int, Ratio]
    tokens_per_second: float | None  # ratio
    later_tokens_per_second: Ratio | None  # from the second epoch on; what `later` would be at equal lengths
    step: Ratio | None
    saved_seconds: float | None
    reward: Difference | None
    length: Difference | None


def summarize(run: Run) -> RunSummary:
    """The numbers of one run."""
    gen, step, tokens = run.series(GEN), run.series(STEP_TIME), tokens_per_step(run)
    both = [(g, s) for g, s in zip(gen, step, strict=True) if g is not None and s is not None]
    timed = [(t, g) for t, g in zip(tokens, gen, strict=True) if t is not None and g]
    sizes = run.all_lengths
    rewards = run.series(*REWARD)
    first, last = _ends(run)
    accepted, drafted = _total(run.known("rollspec/accept/accepted")), _total(run.known("rollspec/accept/drafted"))
    propose, engine = (_total(run.known(f"rollspec/rollout/{n}_seconds")) for n in ("propose", "engine"))
    return RunSummary(
        name=run.name,
        steps=len(run.steps),
        epochs=len(set(run.epochs)),
        gen_total=_total(gen),
        gen_median=_median(gen),
        step_total=_total(step),
        step_median=_median(step),
        gen_share=sum(g for g, _ in both) / sum(s for _, s in both) if both else None,
        tokens=_total(tokens),
        tokens_per_second=sum(t for t, _ in timed) / sum(g for _, g in timed) if timed else None,
        accept_length=_mean(run.known(*ACCEPT_LENGTH)),
        accept_rate=accepted / drafted if accepted is not None and drafted else _mean(run.known(*ACCEPT_RATE)),
        reward_first=_mean(rewards[i] for i in first),
        reward_last=_mean(rewards[i] for i in last),
        length_mean=float(np.mean(sizes)) if sizes else _mean(run.known("response_length/mean")),
        length_p50=_percentile(sizes, 50, run, "rollspec/length/p50"),
        length_p90=_percentile(sizes, 90, run, "rollspec/length/p90"),
        length_p99=_percentile(sizes, 99, run, "rollspec/length/p99"),
        length_max=max(sizes) if sizes else _max(run.known("rollspec/length/max", "response_length/max")),
        clip_ratio=_mean(run.known("response_length/clip_ratio")),
        propose_share=propose / engine if propose is not None and engine else None,
        logprob_gap=_mean(run.known(*GAP)),
        logprob_corr_min=_min(run.known(*CORR)),
        speculating_share=_mean(run.known(SPECULATING)),
        ess_token_min=_min(run.known(ESS_TOKEN)),
        ess_sequence_min=_min(run.known(ESS_SEQUENCE)),
        ratio_outside=_mean(run.known("rollspec/health/ratio_outside")),
        epoch_overlap=_mean(run.known(OVERLAP)),
        epoch_overlap_chance=_mean(run.known(CHANCE)),
        lossy=bool(_max(run.known(LOSSY))),
        correlated=bool(_max(run.known(CORRELATED))),
        health_warnings={n.rsplit("/", 1)[1]: int(sum(run.known(n))) for n in run.names(f"{WARNINGS}/")},
        faults=_faults(run),
        phases=_phases(run),
    )


def compare(run: Run, baseline: Run) -> Comparison:
    """`run` against `baseline`, step by step."""
    here, there = dict(zip(run.steps, run.rows, strict=True)), dict(zip(baseline.steps, baseline.rows, strict=True))
    common = sorted(here.keys() & there.keys())
    epoch = dict(zip(run.steps, run.epochs, strict=True))
    # The first step of a process builds and compiles what the others find there: three to four times their time.
    warm = common[1:] if len(common) > 2 else common
    gen = {s: (there[s][GEN], here[s][GEN]) for s in warm if GEN in here[s] and GEN in there[s]}
    step = [(there[s][STEP_TIME], here[s][STEP_TIME]) for s in warm if STEP_TIME in here[s] and STEP_TIME in there[s]]
    first_epoch = min((epoch[s] for s in common), default=0)
    overall = _per_token(run, baseline, list(gen))
    return Comparison(
        steps=len(common),
        timed=len(warm),
        overall=ratio(list(gen.values())),
        later=ratio([pair for s, pair in gen.items() if epoch[s] > first_epoch]),
        by_epoch={
            e: r
            for e in sorted({epoch[s] for s in gen})
            if (r := ratio([pair for s, pair in gen.items() if epoch[s] == e])) is not None
        },
        tokens_per_second=overall.value if overall else None,
        later_tokens_per_second=_per_token(run, baseline, [s for s in gen if epoch[s] > first_epoch]),
        step=ratio(step),
        saved_seconds=sum(b - r for b, r in gen.values()) if gen else None,
        reward=_paired(run, baseline, common, REWARD),
        length=_paired(run, baseline, common, ("response_length/mean",)),
    )


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
    for i, sizes in enumerate(run.lengths):
        ms, seconds = per_token[i], gen[i]
        if sizes:
            out.append(float(sum(sizes)))
        elif ms and seconds is not None:
            out.append(seconds * 1000 / ms)
        else:
            out.append(emitted[i])
    return out


def _paired(run: Run, baseline: Run, common: Sequence[int], names: Sequence[str]) -> Difference | None:
    mine, theirs = _by_step(run, names), _by_step(baseline, names)
    steps = [s for s in common if s in mine and s in theirs]
    if not steps:
        return None
    mean = fmean(mine[s] - theirs[s] for s in steps)
    means = []  # of each group of runs without rollspec
    for group in baseline.repeats:
        known = [values for r in group if set(steps) <= (values := _by_step(r, names)).keys()]
        means.append([fmean(values[s] for s in steps) for values in known])
    free = sum(max(0, len(group) - 1) for group in means)
    if free < 2:  # one pair has no spread worth a bound
        return Difference(mean, len(steps), free)
    # Two runs of a group differ by the square root of two times the spread of one, pooled over the groups.
    pooled = sum(sum((m - fmean(group)) ** 2 for m in group) for group in means if group) / free
    noise = t_critical(free) * math.sqrt(2 * pooled)
    return Difference(mean, len(steps), free, noise, abs(mean) <= noise)


def _by_step(run: Run, names: Sequence[str]) -> dict[int, float]:
    return {s: v for s, v in zip(run.steps, run.series(*names), strict=True) if v is not None}


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


def _faults(run: Run) -> dict[str, int]:
    """Cause -> count over the run; counts without a cause go under 'unnamed'."""
    out = {n.rsplit("/", 1)[1]: int(sum(run.known(n))) for n in run.names(f"{FAULTS}/")}
    out = {cause: n for cause, n in out.items() if n}
    missing = int(sum(run.known(FAULTS))) - sum(out.values())
    return {**out, **({"unnamed": missing} if missing > 0 else {})}


def _phases(run: Run) -> dict[str, float]:
    out: dict[str, float] = {}
    for phase in PHASES:
        seconds = _total(run.known(f"timing_s/{phase}"))
        if seconds:
            out[phase] = seconds
    whole = _total(run.known(STEP_TIME))
    if whole and out and whole > sum(out.values()):
        out["other"] = whole - sum(out.values())
    return out


def _percentile(sizes: Sequence[int], q: float, run: Run, name: str) -> float | None:
    # Without single lengths, the mean over steps of each step's own percentile is the closest thing measured.
    return float(np.percentile(sizes, q)) if sizes else _mean(run.known(name))


def _of(function: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return function(known) if known else None


_FUNCTIONS: tuple[Callable[[list[float]], float], ...] = (sum, fmean, median, min, max)
_total, _mean, _median, _min, _max = (partial(_of, function) for function in _FUNCTIONS)
