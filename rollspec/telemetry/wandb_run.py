"""What a W&B run should know about rollspec's metrics: which summary each has, and what deserves an alert.

The trainer's own logger writes the metrics; an integration passes them here too, where nothing happens unless a W&B
run is active in this process (offline runs keep the alerts in their file):

    watch = WandbWatch()
    watch.observe(metrics)
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

from rollspec.telemetry.metrics import TABLE

logger = logging.getLogger("rollspec")

PREFIXES: dict[str, dict[str, str]] = {"": {}, "train/": {"step_metric": "train/global_step"}}
"""transformers' W&B callback puts `train/` before every name, and has a step of its own; verl does not."""

HARM, HARM_REPORTS = 0.97, 3
"""Speculation costs time: a modelled speed-up below this in that many reports in a row."""

CAUSES = "rollspec/faults/"
WAIT_SECONDS = 300
"""W&B drops an alert of the same title within this time."""


def active_run() -> Any:
    """The active W&B run of this process, or None. Does not import wandb."""
    return getattr(sys.modules.get("wandb"), "run", None)


def define(run: Any) -> None:
    """Define every metric's summary (counters: the last; gauges: the mean and the last) and its step."""
    for row in TABLE:
        name = row.name.split("<")[0] + "*" if row.name.endswith(">") else row.name
        for prefix, step in PREFIXES.items():
            run.define_metric(f"{prefix}{name}", summary="last" if row.kind == "counter" else "mean,last", **step)


class WandbWatch:
    """Defines the metrics of the active run once, and raises its alerts."""

    def __init__(self) -> None:
        self._defined: Any = None
        self._harmed = 0
        self._failed = False

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Look at one report. Never raises: a failure is logged once, and W&B is left alone from then on."""
        run = active_run()
        if run is None or self._failed:
            return
        try:
            if self._defined != run.id:
                define(run)
                self._defined = run.id
            for title, text, level in self.alerts(metrics):
                run.alert(title, text, level=level, wait_duration=WAIT_SECONDS)
        except Exception as e:
            self._failed = True
            logger.error("rollspec: W&B gets no alerts (%s: %s).", type(e).__name__, e)

    def alerts(self, metrics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        """(title, text, level) of what deserves one."""

        def value(name: str) -> float:
            return float(metrics.get(f"rollspec/{name}") or 0.0)

        lost, rate = value("health/nan_logprobs"), value("accept/rate")
        causes = ", ".join(sorted(n.removeprefix(CAUSES) for n in metrics if n.startswith(CAUSES)))
        speedup = metrics.get("rollspec/rollout/speedup")
        if speedup is not None:
            self._harmed = self._harmed + 1 if speedup < HARM else 0
        slower = 1 / max(speedup or 1.0, 1e-9)
        found = (
            (lost, "ERROR", "NaN log-probs", f"{lost:.0f} sampled tokens have a log-prob of NaN."),
            (value("faults"), "WARN", "degraded",
             f"Something failed and was left out: {causes or 'see the log'}."),
            (value("guard/alarms"), "WARN", "acceptance collapsed",
             f"A drafter was switched off because too little was accepted (rate {rate:.2f})."),
            (value("drafter/rolled_back"), "WARN", "drafter version rolled back",
             "New weights of the drafter had fewer tokens accepted than the ones before, which are back."),
            (value("drafter/refused"), "WARN", "drafter version refused",
             "New weights of the drafter were not loaded; the engine's log says why."),
            (self._harmed >= HARM_REPORTS, "WARN", "speculation costs time",
             f"By the cost model, speculation takes {slower:.2f} times as long as none."),
        )  # fmt: skip
        return [(f"rollspec: {name}", text, level) for crossed, level, name, text in found if crossed]
