"""One figure of a report, and what all of them draw alike."""

from __future__ import annotations

from dataclasses import dataclass

from rollspec.telemetry.runs import Run


@dataclass(frozen=True)
class Figure:
    """A chart with its legend (label, CSS class), or with a sentence that says what is missing."""

    title: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()
    missing: str = ""
    note: str = ""


def steps_of(run: Run) -> list[float]:
    """The x axis."""
    return [float(s) for s in run.steps]


def borders(run: Run) -> list[tuple[float, str]]:
    """Half a step before the first step of every later epoch."""
    epochs = run.epochs
    return [
        (step - 0.5, f"epoch {after + 1}")
        for step, before, after in zip(run.steps[1:], epochs, epochs[1:], strict=False)
        if after != before
    ]
