"""Renders the metric table as a Grafana dashboard, `docs/monitoring/grafana.json`, to be imported there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drafter_online.status import METRICS, Exported
from rollspec.telemetry.prometheus import MODEL, Series, series

FILE = Path(__file__).resolve().parents[2] / "docs" / "monitoring" / "grafana.json"

OVERVIEW = (
    "rollspec/rollout/tokens_per_second",
    "rollspec/rollout/speedup",
    "rollspec/accept/length",
    "rollspec/accept/rate",
    "rollspec/rollout/speculating",
    "rollspec/faults",
)
"""Shown large, on top."""

UNITS = {"s": "s", "ratio": "percentunit", "bytes": "bytes", "tokens/s": "short", "0/1": "bool"}
WIDTH, HEIGHT = 8, 7
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def render() -> str:
    """The dashboard as JSON: an overview, a row of panels per metric group in the order of the table, the daemon."""
    panels: list[dict[str, Any]] = []
    by_name = {s.row.name: s for s in series()}
    y = 0
    for i, name in enumerate(OVERVIEW):
        place = {"x": 4 * i, "y": y, "w": 4, "h": 4}
        panels.append(_panel(by_name[name], len(panels) + 1, place, "stat"))
    y += 4
    for group in dict.fromkeys(s.row.name.split("/")[1] for s in series()):
        rows = [s for s in series() if s.row.name.split("/")[1] == group]
        panels.append(_row(group, len(panels) + 1, y))
        y += 1
        for i, s in enumerate(rows):
            place = {"x": WIDTH * (i % 3), "y": y + HEIGHT * (i // 3), "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(s, len(panels) + 1, place, "timeseries"))
        y += HEIGHT * -(-len(rows) // 3)
    panels.append(_row("drafter-online", len(panels) + 1, y))
    for i, m in enumerate(METRICS):
        place = {"x": WIDTH * (i % 3), "y": y + 1 + HEIGHT * (i // 3), "w": WIDTH, "h": HEIGHT}
        panels.append(_daemon_panel(m, len(panels) + 1, place))
    dashboard = {
        "title": "rollspec",
        "uid": "rollspec",
        "tags": ["rollspec", "vllm"],
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {"list": [_source_variable(), _model_variable()]},
        "panels": panels,
    }
    return json.dumps(dashboard, indent=1) + "\n"


def scraped(s: Series) -> str:
    """A metric's name as it is scraped."""
    return f"{s.name}_total" if s.row.kind == "counter" else s.name


def expression(s: Series) -> str:
    """PromQL of a panel: counters as rates per second, gauges as they are."""
    selected = f'{scraped(s)}{{{MODEL}=~"$model"}}'
    if s.row.kind != "counter":
        return selected
    return f"sum by ({s.label or MODEL}) (rate({selected}[$__rate_interval]))"


def _row(title: str, number: int, y: int) -> dict[str, Any]:
    return {"id": number, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}}


def _panel(s: Series, number: int, place: dict[str, int], kind: str) -> dict[str, Any]:
    per_second = s.row.kind == "counter"
    unit = "short" if per_second else UNITS.get(s.row.unit, "short")
    if s.row.name.startswith("rollspec/rollout/speedup"):
        unit = "short"  # a factor, not a share
    title = s.row.name.removeprefix("rollspec/") + (f" ({s.row.unit} per second)" if per_second else "")
    return _drawn(number, kind, title, s.row.meaning, place, unit, expression(s), s.label or MODEL)


def _daemon_panel(m: Exported, number: int, place: dict[str, int]) -> dict[str, Any]:
    name, per_second = f"drafter_online_{m.name}", m.kind == "counter"
    expr = f"sum by ({m.label or 'instance'}) (rate({name}_total[$__rate_interval]))" if per_second else name
    title = m.name + (" (per second)" if per_second else "")
    unit = "s" if m.name.endswith("_seconds") else "percentunit" if m.name.endswith("_rate") else "short"
    return _drawn(number, "timeseries", title, m.text, place, unit, expr, m.label or "instance")


def _drawn(
    number: int, kind: str, title: str, text: str, place: dict[str, int], unit: str, expr: str, label: str
) -> dict[str, Any]:
    return {
        "id": number,
        "type": kind,
        "title": title,
        "description": text,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [{"refId": "A", "datasource": SOURCE, "expr": expr, "legendFormat": f"{{{{{label}}}}}"}],
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus"}


def _model_variable() -> dict[str, Any]:
    return {
        "name": "model",
        "type": "query",
        "datasource": SOURCE,
        "query": f"label_values(rollspec_rollout_tokens_total, {MODEL})",
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }
