"""The figures of a report: which series each one shows, and what to say when a run does not carry them."""

from __future__ import annotations

from collections.abc import Sequence

from rollspec.telemetry import svg
from rollspec.telemetry.charts_drafter import drafter_figures
from rollspec.telemetry.figure import Figure, borders
from rollspec.telemetry.limits import ARM, MODELLED, arm_shares, speedups
from rollspec.telemetry.runs import GEN, STEP_TIME, Run
from rollspec.telemetry.summary import ACCEPT_LENGTH, ACCEPT_RATE, CHANCE, ESS_SEQUENCE, ESS_TOKEN, OVERLAP, REWARD

RATE, DRAFTED, POSITION = "rollspec/accept/rate/", "rollspec/accept/drafted/", "rollspec/accept/position/"
SKIPPED, SAVED = "rollspec/reuse/skip_ratio", "rollspec/reuse/avg_saved_tokens"
COLOURS = 5  # the template defines s-0 ... s-4


def figures(run: Run, baseline: Run | None) -> list[Figure]:
    """All figures, in the order of the report."""
    return [
        over_steps(run, baseline, (GEN,), "Generation time per step", "seconds"),
        over_steps(run, baseline, REWARD, "Mean reward", "reward", zero=False),
        acceptance_length(run),
        acceptance_by_drafter(run),
        acceptance_by_position(run),
        *drafter_figures(run),
        response_lengths(run, baseline),
        speedup_limits(run),
        arms_played(run),
        propose_overhead(run),
        importance_weights(run),
        epochs_apart(run),
        *([lossy_reuse(run)] if run.has(SKIPPED) else []),
        over_steps(run, baseline, (STEP_TIME,), "Time of the whole training step", "seconds"),
    ]


def over_steps(
    run: Run, baseline: Run | None, names: Sequence[str], title: str, unit: str, *, zero: bool = True
) -> Figure:
    """One metric of both runs over the training steps, epoch borders marked."""
    lines = [
        svg.Line(r.name, style, [float(s) for s in r.steps], r.series(*names))
        for r, style in _both(run, baseline)
        if r.has(*names)
    ]
    if not lines:
        return Figure(title, "", missing=f"No step carries {_names(names)}.")
    drawing = svg.line_chart(lines, title=title, x_label="training step", y_label=unit, borders=borders(run), zero=zero)
    without = [r.name for r, _ in _both(run, baseline) if not r.has(*names)]
    note = f"{without[0]} does not carry {_names(names)}." if without else ""
    return Figure(title, drawing, tuple((line.label, line.style) for line in lines), note=note)


def acceptance_length(run: Run) -> Figure:
    """Tokens per request and verify step; 1.0 is what decoding without drafts gives."""
    title = "Acceptance length"
    if not run.has(*ACCEPT_LENGTH):
        return Figure(title, "", missing=_not_speculating(run, ACCEPT_LENGTH))
    line = svg.Line("tokens per verify step", "s-run", [float(s) for s in run.steps], run.series(*ACCEPT_LENGTH))
    drawing = svg.line_chart(
        [line], title=title, x_label="training step", y_label="tokens per verify step", borders=borders(run)
    )
    return Figure(title, drawing, note="Accepted draft tokens plus one; without drafts it is 1.")


def acceptance_by_drafter(run: Run) -> Figure:
    """Acceptance rate of each drafter over the steps."""
    title = "Acceptance by drafter"
    names = run.names(RATE) or [n for n in ACCEPT_RATE if run.has(n)][:1]
    if not names:
        return Figure(title, "", missing=_not_speculating(run, ACCEPT_RATE))
    lines = [
        svg.Line(_label(n), f"s-{i % COLOURS}", [float(s) for s in run.steps], run.series(n))
        for i, n in enumerate(names)
    ]
    drawing = svg.line_chart(
        lines, title=title, x_label="training step", y_label="accepted / drafted", borders=borders(run), percent=True
    )
    legend = []
    for line, name in zip(lines, names, strict=True):
        drafted = sum(v for v in run.series(f"{DRAFTED}{line.label}") if v is not None)
        count = f" ({drafted:,.0f} drafted)" if name.startswith(RATE) and drafted else ""
        legend.append((line.label + count, line.style))
    return Figure(title, drawing, tuple(legend))


def acceptance_by_position(run: Run) -> Figure:
    """Acceptance of the i-th drafted token given that all before it were accepted, in the first and the last epoch."""
    title = "Acceptance by draft position"
    names = run.names(POSITION)
    if not names:
        return Figure(title, "", missing=_not_speculating(run, (POSITION + "<i>",)))
    epochs = sorted(set(run.epochs))
    chosen = [epochs[0], epochs[-1]] if len(epochs) > 1 else [epochs[0]]
    bars = []
    for style, epoch in zip(("s-1", "s-run") if len(chosen) > 1 else ("s-run",), chosen, strict=True):
        rows = [row for row, e in zip(run.rows, run.epochs, strict=True) if e == epoch]
        heights = []
        for name in names:
            values = [row[name] for row in rows if name in row]
            heights.append(sum(values) / len(values) if values else None)
        bars.append(svg.Bars(f"epoch {epoch + 1}" if len(chosen) > 1 else "all steps", style, heights))
    drawing = svg.bar_chart(
        [n.rsplit("/", 1)[1] for n in names],
        bars,
        title=title,
        x_label="position in the draft",
        y_label="accepted, given verified",
        percent=True,
    )
    return Figure(title, drawing, tuple((b.label, b.style) for b in bars) if len(bars) > 1 else ())


def response_lengths(run: Run, baseline: Run | None) -> Figure:
    """Histogram of single responses where the run recorded them, else the percentiles of each step."""
    title = "Response lengths"
    samples = [(r.name, style, r.all_lengths) for r, style in _both(run, baseline) if r.all_lengths]
    if samples:
        drawing = svg.histogram(samples, title=title, x_label="response length (tokens)", y_label="responses (log)")
        missing = [r.name for r, _ in _both(run, baseline) if not r.all_lengths]
        note = f"{missing[0]} did not record single response lengths." if missing else ""
        return Figure(title, drawing, tuple((label, style) for label, style, _ in samples), note=note)
    candidates = [
        ("p50", ("rollspec/length/p50",)),
        ("mean", ("response_length/mean",)),
        ("p90", ("rollspec/length/p90",)),
        ("p99", ("rollspec/length/p99",)),
        ("max", ("rollspec/length/max", "response_length/max")),
    ]
    lines = [
        svg.Line(label, f"s-{i % COLOURS}", [float(s) for s in run.steps], run.series(*names))
        for i, (label, names) in enumerate((label, names) for label, names in candidates if run.has(*names))
    ]
    if not lines:
        return Figure(title, "", missing="No step carries lengths, rollspec/length/* or response_length/*.")
    drawing = svg.line_chart(lines, title=title, x_label="training step", y_label="tokens", borders=borders(run))
    note = f"Of {run.name}, per step: it did not record the single lengths that a histogram needs."
    return Figure(title, drawing, tuple((line.label, line.style) for line in lines), note=note)


def speedup_limits(run: Run) -> Figure:
    """Modelled speed-up over the steps, beside what was possible."""
    title = "Speed-up and its limits"
    lines = speedups(run)
    if not lines:
        return Figure(title, "", missing=_not_speculating(run, (MODELLED + "<setting>",)))
    drawing = svg.line_chart(
        lines, title=title, x_label="training step", y_label="times no drafts", borders=borders(run)
    )
    note = "By the fitted cost of engine steps. The clairvoyant knows what will be accepted; no policy can reach it."
    return Figure(title, drawing, tuple((line.label, line.style) for line in lines), note=note)


def arms_played(run: Run) -> Figure:
    """What the tuner chose, as shares of the engine's steps."""
    title = "Draft lengths chosen"
    shares = arm_shares(run)
    if not shares:
        return Figure(title, "", missing=_not_speculating(run, (ARM + "<arm>",)))
    steps = [float(s) for s in run.steps]
    lines = [svg.Line(arm, f"s-{i % COLOURS}", steps, values) for i, (arm, values) in enumerate(shares)]
    drawing = svg.line_chart(
        lines,
        title=title,
        x_label="training step",
        y_label="share of engine steps",
        borders=borders(run),
        percent=True,
    )
    return Figure(title, drawing, tuple((line.label, line.style) for line in lines))


def propose_overhead(run: Run) -> Figure:
    """Share of the engine's step time that went into proposing."""
    title = "Cost of proposing"
    name = "rollspec/rollout/propose_share"
    if not run.has(name):
        return Figure(title, "", missing=_not_speculating(run, (name,)))
    line = svg.Line("share of engine time", "s-run", [float(s) for s in run.steps], run.series(name))
    drawing = svg.line_chart(
        [line],
        title=title,
        x_label="training step",
        y_label="share of engine time",
        borders=borders(run),
        percent=True,
    )
    return Figure(title, drawing)


def importance_weights(run: Run) -> Figure:
    """Effective sample size of the importance weights: 1 while engine and trainer hold the same policy."""
    lines = _shares(run, (("of tokens", ESS_TOKEN), ("of whole responses", ESS_SEQUENCE)))
    note = "Engine against trainer; rounding alone lowers that of whole responses as they get longer."
    return _health(run, "Effective sample size", lines, "share of the sample", (ESS_TOKEN,), note)


def epochs_apart(run: Run) -> Figure:
    """What the responses share with those of an epoch ago, beside what independent draws would."""
    lines = _shares(run, (("repeated", OVERLAP), ("by chance", CHANCE)))
    note = "Tokens in a prefix that equals the prompt's last response of the same number."
    return _health(run, "Repeats of the last epoch", lines, "share of tokens", (OVERLAP,), note)


def lossy_reuse(run: Run) -> Figure:
    """What lenient reuse took over, as SPEC-RL counts it."""
    lines = _shares(run, (("responses taken over whole", SKIPPED),))
    kept = [
        s / n if s is not None and n else None
        for s, n in zip(run.series(SAVED), run.series("rollspec/reuse/avg_resp_len"), strict=True)
    ]
    lines.append(svg.Line("tokens of old responses kept", "s-1", [float(s) for s in run.steps], kept))
    note = "Lossy: these rollouts do not follow the policy exactly."
    return _health(run, "Old responses reused (lossy)", lines, "share", (SKIPPED,), note)


def _shares(run: Run, names: Sequence[tuple[str, str]]) -> list[svg.Line]:
    steps = [float(s) for s in run.steps]
    found = [(label, name) for label, name in names if run.has(name)]
    return [svg.Line(label, f"s-{i}", steps, run.series(name)) for i, (label, name) in enumerate(found)]


def _health(run: Run, title: str, lines: list[svg.Line], unit: str, names: Sequence[str], note: str) -> Figure:
    if not lines:
        return Figure(title, "", missing=f"No step of {run.name} carries {_names(names)}.")
    drawing = svg.line_chart(
        lines, title=title, x_label="training step", y_label=unit, borders=borders(run), percent=True
    )
    return Figure(title, drawing, tuple((line.label, line.style) for line in lines), note=note)


def _both(run: Run, baseline: Run | None) -> list[tuple[Run, str]]:
    return [*([(baseline, "s-base")] if baseline is not None else []), (run, "s-run")]


def _not_speculating(run: Run, names: Sequence[str]) -> str:
    return f"No step of {run.name} carries {_names(names)}: speculation was off, or its metrics did not arrive."


def _names(names: Sequence[str]) -> str:
    return " or ".join(names)


def _label(name: str) -> str:
    return name.removeprefix(RATE) if name.startswith(RATE) else "all drafters"
