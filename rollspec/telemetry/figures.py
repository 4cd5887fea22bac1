"""The figures of a report: which series each one shows, and what to say when a run does not carry them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollspec.telemetry.limits import ARM, CLAIRVOYANT, MODELLED, NONE, ORACLE, PERFECT, PLAYED, arm_shares
from rollspec.telemetry.plots import Bars, Line, bar_chart, histogram, line_chart
from rollspec.telemetry.runs import GEN, STEP_TIME, Run
from rollspec.telemetry.summary import ACCEPT_LENGTH, ACCEPT_RATE, CHANCE, ESS_SEQUENCE, ESS_TOKEN, OVERLAP, REWARD

RATE, DRAFTED, POSITION = "rollspec/accept/rate/", "rollspec/accept/drafted/", "rollspec/accept/position/"
PROPOSE = "rollspec/rollout/propose_share"
SKIPPED, SAVED = "rollspec/reuse/skip_ratio", "rollspec/reuse/avg_saved_tokens"
DRAFTER = "rollspec/drafter/"
VERSION, REACHED, LOSS = DRAFTER + "version", DRAFTER + "accept_length", DRAFTER + "loss"
NO_SPECULATION = ": speculation was off, or its metrics did not arrive"
COLOURS = 5  # the style sheet defines s-0 ... s-4

Marks = Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Figure:
    """A chart with its legend (label, CSS class), or with a sentence that says what is missing."""

    title: str
    svg: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    missing: str = ""
    note: str = ""


def figures(run: Run, baseline: Run | None) -> list[Figure]:
    """All figures, in the order of the report."""
    drafter = ": the drafter never drafted"
    found = [
        of_both(run, baseline, (GEN,), "Generation time per step", "seconds"),
        of_both(run, baseline, REWARD, "Mean reward", "reward", zero=False),
        over_steps(
            run, "Acceptance length", "tokens per verify step", _line(run, "", "s-run", *ACCEPT_LENGTH),
            missing=_missing(run, ACCEPT_LENGTH, NO_SPECULATION),
            note="Accepted draft tokens plus one; without drafts it is 1.",
        ),
        acceptance_by_drafter(run),
        acceptance_by_position(run),
    ]  # fmt: skip
    if run.has(VERSION):
        found += [
            over_steps(
                run, "Learned drafter: acceptance length", "tokens per verify step", _line(run, "", "s-run", REACHED),
                missing=_missing(run, (REACHED,), drafter), marks=_swaps(run), zero=False,
                note="Of what was scored since its weights last changed, verified or not.",
            ),
            reached_by_version(run, _missing(run, (REACHED,), drafter)),
            over_steps(
                run, "Learned drafter: staleness", "versions",
                _line(run, "policy versions behind", "s-run", DRAFTER + "staleness")
                + _line(run, "drafter version", "s-1", VERSION),
            ),
            *([loss(run)] if run.has(LOSS) else []),
            *([idle(run)] if run.has(DRAFTER + "idle_seconds") else []),
            *([pauses(run)] if run.has(DRAFTER + "swaps") else []),
        ]  # fmt: skip
    found += [
        response_lengths(run, baseline),
        speedup_limits(run),
        over_steps(
            run, "Draft lengths chosen", "share of engine steps",
            [Line(arm, f"s-{i % COLOURS}", run.steps, values) for i, (arm, values) in enumerate(arm_shares(run))],
            missing=_missing(run, (ARM + "<arm>",), NO_SPECULATION), percent=True,
        ),
        over_steps(
            run, "Cost of proposing", "share of engine time", _line(run, "", "s-run", PROPOSE),
            missing=_missing(run, (PROPOSE,), NO_SPECULATION), percent=True,
        ),
        over_steps(
            run, "Effective sample size", "share of the sample",
            _line(run, "of tokens", "s-0", ESS_TOKEN) + _line(run, "of whole responses", "s-1", ESS_SEQUENCE),
            missing=_missing(run, (ESS_TOKEN,)), percent=True,
            note="Engine against trainer; rounding alone lowers that of whole responses as they get longer.",
        ),
        over_steps(
            run, "Repeats of the last epoch", "share of tokens",
            _line(run, "repeated", "s-0", OVERLAP) + _line(run, "by chance", "s-1", CHANCE),
            missing=_missing(run, (OVERLAP,)), percent=True,
            note="Tokens in a prefix that equals the prompt's last response of the same number.",
        ),
        *([lossy_reuse(run)] if run.has(SKIPPED) else []),
        of_both(run, baseline, (STEP_TIME,), "Time of the whole training step", "seconds"),
    ]  # fmt: skip
    return found


def over_steps(
    run: Run,
    title: str,
    unit: str,
    lines: Sequence[Line],
    *,
    missing: str = "",
    note: str = "",
    marks: Marks | None = None,
    percent: bool = False,
    zero: bool = True,
) -> Figure:
    """Lines over the training steps, epoch borders marked unless `marks` are given; a line without label has no key."""
    if not lines:
        return Figure(title, missing=missing)
    borders = _epochs(run) if marks is None else marks
    drawing = line_chart(
        lines, title=title, x_label="training step", y_label=unit, borders=borders, percent=percent, zero=zero
    )
    return Figure(title, drawing, _legend(lines), note=note)


def of_both(
    run: Run, baseline: Run | None, names: Sequence[str], title: str, unit: str, *, zero: bool = True
) -> Figure:
    """One metric of both runs."""
    lines = [line for r, style in _both(run, baseline) for line in _line(r, r.name, style, *names)]
    without = [r.name for r, _ in _both(run, baseline) if not r.has(*names)]
    carried = " or ".join(names)
    note = f"{without[0]} does not carry {carried}." if without else ""
    return over_steps(run, title, unit, lines, missing=f"No step carries {carried}.", note=note, zero=zero)


def acceptance_by_drafter(run: Run) -> Figure:
    """Acceptance rate of each drafter."""
    names = run.names(RATE)
    lines = []
    for i, name in enumerate(names):
        drafter = name.removeprefix(RATE)
        drafted = sum(run.known(DRAFTED + drafter))
        label = f"{drafter} ({drafted:,.0f} drafted)" if drafted else drafter
        lines += _line(run, label, f"s-{i % COLOURS}", name)
    lines = lines or _line(run, "all drafters", "s-0", *ACCEPT_RATE)
    missing = _missing(run, ACCEPT_RATE, NO_SPECULATION)
    return over_steps(run, "Acceptance by drafter", "accepted / drafted", lines, missing=missing, percent=True)


def acceptance_by_position(run: Run) -> Figure:
    """Acceptance of the i-th drafted token given that all before it were accepted, in the first and the last epoch."""
    title, names = "Acceptance by draft position", run.names(POSITION)
    if not names:
        return Figure(title, missing=_missing(run, (POSITION + "<i>",), NO_SPECULATION))
    first, last = min(run.epochs), max(run.epochs)
    bars = []
    for epoch, style in [(first, "s-1"), (last, "s-run")] if first < last else [(last, "s-run")]:
        rows = [row for row, e in zip(run.rows, run.epochs, strict=True) if e == epoch]
        values = [[row[name] for row in rows if name in row] for name in names]
        label = f"epoch {epoch + 1}" if first < last else ""
        bars.append(Bars(label, style, [sum(v) / len(v) if v else None for v in values]))
    drawing = bar_chart(
        [n.removeprefix(POSITION) for n in names], bars, title=title, x_label="position in the draft",
        y_label="accepted, given verified", percent=True,
    )  # fmt: skip
    return Figure(title, drawing, _legend(bars))


def reached_by_version(run: Run, missing: str) -> Figure:
    """The acceptance length of the learned drafter's drafts, as the last step that each version saw had it."""
    title = "Learned drafter: by version"
    seen = zip(run.series(VERSION), run.series(REACHED), strict=True)
    last = {int(version): reached for version, reached in seen if version is not None and reached is not None}
    if not last:
        return Figure(title, missing=missing)
    bars = Bars("acceptance length", "s-run", [last[v] for v in sorted(last)])
    groups = [str(v) for v in sorted(last)]
    drawing = bar_chart(groups, [bars], title=title, x_label="version", y_label="tokens per verify step")
    return Figure(title, drawing, note="Version 0 is what the engine was started with.")


def loss(run: Run) -> Figure:
    """The training's latest loss and its terms."""
    terms = run.names(f"{LOSS}/")
    lines = _line(run, "loss" if terms else "", "s-run", LOSS)
    for i, name in enumerate(terms):
        lines += _line(run, name.rpartition("/")[2], f"s-{i % COLOURS}", name)
    note = "The terms are without their weights." if terms else ""
    return over_steps(run, "Learned drafter: training loss", "nats", lines, marks=_swaps(run), note=note)


def idle(run: Run) -> Figure:
    """Seconds in which training could run, and did."""
    available, used, wasted = (DRAFTER + f"{n}_seconds" for n in ("idle", "used", "wasted"))
    lines = _line(run, "idle", "s-base", available) + _line(run, "used", "s-run", used)
    note = f"{sum(run.known(used)):.1f} of {sum(run.known(available)):.1f} s, over all replicas."
    if run.has(wasted):
        note += f" Given up: {sum(run.known(wasted)):.1f} s."
    late, step = (run.known(DRAFTER + n)[-1:] for n in ("preempt_p99_seconds", "micro_step_seconds"))
    if late and step:
        note += f" Requests waited {1e3 * late[0]:.1f} ms for it at the 99th percentile; "
        note += f"a step takes {1e3 * step[0]:.1f} ms."
    return over_steps(run, "Idle time and what training made of it", "seconds", lines, note=note)


def pauses(run: Run) -> Figure:
    """Longest pause of a step's swaps."""
    longest = [None if v is None else 1e3 * v for v in run.series(DRAFTER + "swap_longest")]
    count, seconds = sum(run.known(DRAFTER + "swaps")), sum(run.known(DRAFTER + "swap_seconds"))
    note = f"{count:.0f} swaps, {1e3 * seconds / count:.2f} ms each." if count else ""
    return over_steps(run, "Pauses of swaps", "ms", [Line("", "s-run", run.steps, longest)], note=note)


def response_lengths(run: Run, baseline: Run | None) -> Figure:
    """Histogram of single responses where the run recorded them, else the percentiles of each step."""
    title = "Response lengths"
    samples = [(r.name, style, r.all_lengths) for r, style in _both(run, baseline) if r.all_lengths]
    if samples:
        drawing = histogram(samples, title=title, x_label="response length (tokens)", y_label="responses (log)")
        missing = [r.name for r, _ in _both(run, baseline) if not r.all_lengths]
        note = f"{missing[0]} did not record single response lengths." if missing else ""
        return Figure(title, drawing, tuple((label, style) for label, style, _ in samples), note=note)
    names = {"p50": "rollspec/length/p50", "mean": "response_length/mean", "p90": "rollspec/length/p90",
             "p99": "rollspec/length/p99", "max": "rollspec/length/max"}  # fmt: skip
    lines: list[Line] = []
    for label, name in names.items():
        lines += _line(run, label, f"s-{len(lines) % COLOURS}", name, f"response_length/{label}")
    missing_ = "No step carries lengths, rollspec/length/* or response_length/*."
    note = f"Of {run.name}, per step: it did not record the single lengths that a histogram needs."
    return over_steps(run, title, "tokens", lines, missing=missing_, note=note)


def speedup_limits(run: Run) -> Figure:
    """Modelled speed-up over the steps, beside what was possible."""
    base, lines = run.series(MODELLED + NONE), []
    for label, key, style in (
        ("perfect drafter", PERFECT, "s-4"),
        ("clairvoyant", CLAIRVOYANT, "s-2"),
        ("oracle arm", ORACLE, "s-1"),
        ("got", PLAYED, "s-run"),
    ):
        if run.has(MODELLED + key):
            ratios = [b / t if b and t else None for b, t in zip(base, run.series(MODELLED + key), strict=True)]
            lines.append(Line(label, style, run.steps, ratios))
    note = "By the fitted cost of engine steps. The clairvoyant knows what will be accepted; no policy can reach it."
    missing = _missing(run, (MODELLED + "<setting>",), NO_SPECULATION)
    return over_steps(run, "Speed-up and its limits", "times no drafts", lines, missing=missing, note=note)


def lossy_reuse(run: Run) -> Figure:
    """What lenient reuse took over, as SPEC-RL counts it."""
    saved = zip(run.series(SAVED), run.series("rollspec/reuse/avg_resp_len"), strict=True)
    kept = [s / n if s is not None and n else None for s, n in saved]
    lines = _line(run, "responses taken over whole", "s-0", SKIPPED)
    lines.append(Line("tokens of old responses kept", "s-1", run.steps, kept))
    note = "Lossy: these rollouts do not follow the policy exactly."
    return over_steps(run, "Old responses reused (lossy)", "share", lines, percent=True, note=note)


# ---- helpers --------------------------------------------------------------------------------------------------------


def _line(run: Run, label: str, style: str, *names: str) -> list[Line]:
    return [Line(label, style, run.steps, run.series(*names))] if run.has(*names) else []


def _legend(series: Iterable[Line | Bars]) -> tuple[tuple[str, str], ...]:
    return tuple((s.label, s.style) for s in series if s.label)


def _both(run: Run, baseline: Run | None) -> list[tuple[Run, str]]:
    return [*([(baseline, "s-base")] if baseline is not None else []), (run, "s-run")]


def _missing(run: Run, names: Sequence[str], why: str = "") -> str:
    return f"No step of {run.name} carries {' or '.join(names)}{why}."


def _epochs(run: Run) -> Marks:
    """Half a step before the first step of every later epoch."""
    return _changes(run, [f"epoch {e + 1}" for e in run.epochs])


def _swaps(run: Run) -> Marks:
    """Half a step before the first step that ran another version of the drafter."""
    return _changes(run, [None if v is None else f"v{v:.0f}" for v in run.series(VERSION)])


def _changes(run: Run, labels: Sequence[str | None]) -> Marks:
    pairs = zip(run.steps[1:], labels, labels[1:], strict=False)
    return [(step - 0.5, after) for step, before, after in pairs if before and after and before != after]
