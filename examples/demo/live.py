"""What the demonstration shows while it runs: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from rollspec.telemetry.runs import EPOCH, GEN, STEP, STEP_TIME, Row
from rollspec.telemetry.summary import ACCEPT_LENGTH, REWARD

SHOWN = 8  # latest steps in the panel


@dataclass
class RunView:
    """One run as it proceeds. `estimate`: seconds that the whole run may take, when an earlier one tells."""

    name: str
    total: int
    estimate: float | None = None
    started: float = field(default_factory=time.monotonic)
    first_step: float | None = None
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """A training step ended."""
        self.rows.append(row)
        if self.first_step is None:
            self.first_step = time.monotonic()

    def eta(self) -> float | None:
        """Seconds that are left: from the steps so far, before the first one from the earlier run."""
        now = time.monotonic()
        if len(self.rows) >= 2 and self.first_step is not None:
            seconds = [row[STEP_TIME] for row in self.rows if STEP_TIME in row]
            pace = sum(seconds[1:]) / len(seconds[1:]) if len(seconds) > 1 else None
            return None if pace is None else pace * (self.total - len(self.rows))
        return None if self.estimate is None else max(0.0, self.estimate - (now - self.started))

    def phase(self) -> str:
        """What the run is doing, in words."""
        if not self.rows:
            return "starting Ray, the trainer and the engine"
        if len(self.rows) >= self.total:
            return "shutting down"
        return f"epoch {int(self.rows[-1].get(EPOCH, 0)) + 1}"


class Display:
    """Shows the runs of a demonstration one after the other."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.view: RunView | None = None
        self._live: Live | None = None

    @contextmanager
    def watching(self, view: RunView) -> Iterator[RunView]:
        """Show `view` until the block ends."""
        self.view = view
        self.say(f"[bold]{view.name}[/bold]: {view.total} training steps")
        if not self.console.is_terminal:
            yield view
            return
        with Live(self._panel(), console=self.console, refresh_per_second=4, transient=True) as self._live:
            try:
                yield view
            finally:
                self._live = None

    def step(self, row: Row) -> None:
        """A training step of the current run ended."""
        assert self.view is not None
        self.view.add(row)
        if self._live is None:
            self.console.print(self._line(row), highlight=False, soft_wrap=True)

    def tick(self) -> None:
        """Time passed."""
        if self._live is not None:
            self._live.update(self._panel())

    def say(self, message: str) -> None:
        """One line that stays."""
        self.console.print(message, highlight=False, soft_wrap=True)

    def _line(self, row: Row) -> str:
        assert self.view is not None
        left = self.view.eta()
        cells = [f"  step {int(row.get(STEP, len(self.view.rows)))}/{self.view.total}"]
        cells += [f"{label} {value}" for label, value in zip(_HEAD[1:], _cells(row)[1:], strict=True) if value != "–"]
        return ", ".join([*cells, *([f"about {clock(left)} left"] if left else [])])

    def _panel(self) -> RenderableType:
        view = self.view
        assert view is not None
        elapsed, left = time.monotonic() - view.started, view.eta()
        bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=28), MofNCompleteColumn(), console=self.console
        )
        bar.add_task(f"[bold]{view.name}[/bold]", total=view.total, completed=len(view.rows))
        when = f"{view.phase()}, {clock(elapsed)} so far" + (f", about {clock(left)} left" if left else "")
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for head in _HEAD:
            table.add_column(head, justify="right")
        for row in view.rows[-SHOWN:]:
            table.add_row(*_cells(row))
        return Group(bar, Text(when, style="dim"), table if view.rows else Text(""))


_HEAD = ("step", "generation s", "tokens/s", "acceptance length", "reward", "step s")


def _cells(row: Row) -> list[str]:
    gen, per_token = row.get(GEN), row.get("timing_per_token_ms/gen")
    step = row.get(STEP)
    return [
        "–" if step is None else f"{step:.0f}",
        _text(gen, ".2f"),
        _text(1000 / per_token if per_token else None, ".0f"),
        _text(_first(row, ACCEPT_LENGTH), ".2f"),
        _text(_first(row, REWARD), ".3f"),
        _text(row.get(STEP_TIME), ".1f"),
    ]


def _first(row: Row, names: tuple[str, ...]) -> float | None:
    return next((row[name] for name in names if name in row), None)


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def clock(seconds: float) -> str:
    """`75.2` as `1:15`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
