"""The report's figures about a learned drafter: what each of its versions reached, and what training and swaps took."""

from __future__ import annotations

from rollspec.telemetry import svg
from rollspec.telemetry.figure import Figure, borders, steps_of
from rollspec.telemetry.runs import Run

PREFIX = "rollspec/drafter/"
VERSION, REACHED, STALENESS, LOSS = (PREFIX + n for n in ("version", "accept_length", "staleness", "loss"))
AVAILABLE, HARVESTED = PREFIX + "idle_seconds", PREFIX + "harvested_seconds"
P99, MICRO_STEP, WASTED = (PREFIX + n for n in ("preempt_p99_seconds", "micro_step_seconds", "wasted_seconds"))
SWAPS, PAUSED, LONGEST = PREFIX + "swaps", PREFIX + "swap_seconds", PREFIX + "swap_longest"


def drafter_figures(run: Run) -> list[Figure]:
    """None where the run has no learned drafter."""
    if not run.has(VERSION):
        return []
    found = [reached_over_steps(run), reached_by_version(run), staleness(run)]
    if run.has(LOSS):
        found.append(loss(run))
    if run.has(AVAILABLE):
        found.append(idle(run))
    if run.has(SWAPS):
        found.append(pauses(run))
    return found


def reached_over_steps(run: Run) -> Figure:
    """Acceptance length of the learned drafter's own drafts, with the swaps marked."""
    title = "Learned drafter: acceptance length"
    if not run.has(REACHED):
        return Figure(title, "", missing=f"No step of {run.name} carries {REACHED}: the drafter never drafted.")
    line = svg.Line("its drafts", "s-run", steps_of(run), run.series(REACHED))
    drawing = svg.line_chart(
        [line], title=title, x_label="training step", y_label="tokens per verify step", borders=_swaps(run), zero=False
    )
    return Figure(title, drawing, note="Of what was scored since its weights last changed, verified or not.")


def reached_by_version(run: Run) -> Figure:
    """The same, as the last step that each version saw had it."""
    title = "Learned drafter: by version"
    last: dict[int, float] = {}
    for version, reached in zip(run.series(VERSION), run.series(REACHED), strict=True):
        if version is not None and reached is not None:
            last[int(version)] = reached
    if not last:
        return Figure(title, "", missing=f"No step of {run.name} carries {REACHED}: the drafter never drafted.")
    bars = svg.Bars("acceptance length", "s-run", [last[v] for v in sorted(last)])
    groups = [str(v) for v in sorted(last)]
    drawing = svg.bar_chart(groups, [bars], title=title, x_label="version", y_label="tokens per verify step")
    return Figure(title, drawing, note="Version 0 is what the engine was started with.")


def staleness(run: Run) -> Figure:
    """Policy versions since the weights last changed."""
    title = "Learned drafter: staleness"
    lines = [
        svg.Line("policy versions behind", "s-run", steps_of(run), run.series(STALENESS)),
        svg.Line("drafter version", "s-1", steps_of(run), run.series(VERSION)),
    ]
    drawing = svg.line_chart(lines, title=title, x_label="training step", y_label="versions", borders=borders(run))
    return Figure(title, drawing, tuple((line.label, line.style) for line in lines))


def loss(run: Run) -> Figure:
    """The training's latest loss and its terms."""
    title = "Learned drafter: training loss"
    lines = [svg.Line("loss", "s-run", steps_of(run), run.series(LOSS))]
    for i, name in enumerate(run.names(f"{LOSS}/")):
        lines.append(svg.Line(name.rpartition("/")[2], f"s-{i % 5}", steps_of(run), run.series(name)))
    drawing = svg.line_chart(lines, title=title, x_label="training step", y_label="nats", borders=_swaps(run))
    if len(lines) == 1:
        return Figure(title, drawing)
    legend = tuple((line.label, line.style) for line in lines)
    return Figure(title, drawing, legend, note="The terms are without their weights.")


def idle(run: Run) -> Figure:
    """Seconds in which training could run, and did."""
    title = "Idle time and what training made of it"
    lines = [
        svg.Line("idle", "s-base", steps_of(run), run.series(AVAILABLE)),
        svg.Line("harvested", "s-run", steps_of(run), run.series(HARVESTED)),
    ]
    drawing = svg.line_chart(lines, title=title, x_label="training step", y_label="seconds", borders=borders(run))
    available, harvested = (sum(v or 0.0 for v in run.series(n)) for n in (AVAILABLE, HARVESTED))
    note = f"{harvested:.1f} of {available:.1f} s, over all replicas."
    if run.has(WASTED):
        note += f" Given up: {sum(v or 0.0 for v in run.series(WASTED)):.1f} s."
    late, step = (_last(run.series(n)) for n in (P99, MICRO_STEP))
    if late is not None and step is not None:
        note += f" Requests waited {1e3 * late:.1f} ms for it at the 99th percentile; a step takes {1e3 * step:.1f} ms."
    return Figure(title, drawing, tuple((line.label, line.style) for line in lines), note=note)


def _last(values: list[float | None]) -> float | None:
    return next((v for v in reversed(values) if v is not None), None)


def pauses(run: Run) -> Figure:
    """Longest pause of a step's swaps."""
    title = "Pauses of swaps"
    longest = [None if v is None else 1e3 * v for v in run.series(LONGEST)]
    line = svg.Line("longest", "s-run", steps_of(run), longest)
    drawing = svg.line_chart([line], title=title, x_label="training step", y_label="ms", borders=borders(run))
    count, seconds = (sum(v or 0.0 for v in run.series(n)) for n in (SWAPS, PAUSED))
    note = f"{count:.0f} swaps, {1e3 * seconds / count:.2f} ms each." if count else ""
    return Figure(title, drawing, note=note)


def _swaps(run: Run) -> list[tuple[float, str]]:
    """Half a step before the first step that ran another version."""
    versions = run.series(VERSION)
    return [
        (step - 0.5, f"v{after:.0f}")
        for step, before, after in zip(run.steps[1:], versions, versions[1:], strict=False)
        if before is not None and after is not None and after != before
    ]
