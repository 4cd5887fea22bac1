"""The metric table as Prometheus metrics: `rollspec/accept/rate` is `rollspec_accept_rate`, a counter ends in `_total`,
and what the table writes as `<drafter>` is a label.

    exporter = Exporter("my-model")
    exporter.update(stats)          # EngineStats counted since the last update

Counters add up over the life of the process; gauges are of the latest interval in which the engine did anything.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from rollspec.telemetry.engine_stats import EngineStats
from rollspec.telemetry.metrics import TABLE, Metric, find, to_metrics

OF_THE_TRAINER = ("rollspec/rollout/generation_s", "rollspec/health/", "rollspec/reward/", "rollspec/length/")
"""What only a trainer can measure; an engine that serves does not have it."""

MODEL = "model_name"
"""The label that every series has, as vLLM's own metrics do."""


@dataclass(frozen=True, slots=True)
class Series:
    """One Prometheus metric. `label`: what distinguishes its series besides the model, or None."""

    row: Metric
    name: str
    label: str | None


def series() -> tuple[Series, ...]:
    """Every metric that an engine has, in the order of the table."""
    names, out = {row.name for row in TABLE}, []
    for row in TABLE:
        if row.name.startswith(OF_THE_TRAINER):
            continue
        name, label = row.name, None
        if name.endswith(">"):
            name, _, label = name[:-1].partition("/<")
            label = "position" if label == "i" else label
            # `accept/rate` is a metric by itself, so the one per drafter needs a name of its own.
            name += f"_by_{label}" if name in names else ""
        out.append(Series(row, name.replace("/", "_"), label))
    return tuple(out)


@functools.cache  # a second engine in this process has the same metrics with another model's name
def _registered(registry: Any) -> dict[str, tuple[Series, Any]]:
    from prometheus_client import REGISTRY, Counter, Gauge

    kinds: dict[str, Any] = {"counter": Counter, "gauge": functools.partial(Gauge, multiprocess_mode="mostrecent")}
    out: dict[str, tuple[Series, Any]] = {}
    for s in series():
        labels = [MODEL, *([s.label] if s.label else [])]
        text = f"{s.row.meaning} ({s.row.unit})"
        out[s.row.name] = (s, kinds[s.row.kind](s.name, text, labelnames=labels, registry=registry or REGISTRY))
    return out


class Exporter:
    """Prometheus metrics of one engine, kept up to date by `update`.

    Args:
        model: value of the label `model_name`.
        registry: where they are registered; prometheus_client's own by default, which is the one that vLLM serves. In
            its multi-process mode (PROMETHEUS_MULTIPROC_DIR) they are written to that folder as vLLM's are.
    """

    def __init__(self, model: str, registry: Any = None) -> None:
        self._model = model
        self._metrics = _registered(registry)

    def update(self, stats: EngineStats) -> None:
        """Add what was counted since the last call."""
        for name, value in to_metrics(stats).items():
            row = find(name)
            if row is None or row.name not in self._metrics:
                continue
            s, metric = self._metrics[row.name]
            child = metric.labels(self._model, *([name.rsplit("/", 1)[1]] if s.label else []))
            if row.kind == "counter":
                child.inc(max(float(value), 0.0))
            else:
                child.set(float(value))
