"""Renders the metric table as a W&B workspace, `docs/monitoring/wandb.json`, and saves it as a view of a project.

Make it a saved view (`pip install wandb-workspaces`, built against 0.4.13; TRL and OpenRLHF log under `train/`):

    python -m scripts.generate.wandb_workspace --save ENTITY/PROJECT
    python -m scripts.generate.wandb_workspace --save ENTITY/PROJECT --prefix train/
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollspec.errors import RollspecError
from rollspec.telemetry.metrics import TABLE, Metric

FILE = Path(__file__).resolve().parents[2] / "docs" / "monitoring" / "wandb.json"
NAME = "rollspec"

OVERVIEW: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("speed-up, modelled, and its limits", ("rollout/speedup", "rollout/speedup_oracle", "rollout/speedup_perfect")),
    ("tokens per second of generation", ("rollout/tokens_per_second",)),
    ("tokens per request and step", ("accept/length",)),
    ("acceptance: measured, predicted, at most", ("accept/rate", "accept/predicted", "accept/max_acceptance")),
    ("what is drafted: share of steps per arm", ("tuner/arm/<arm>",)),
    ("versions of the drafter: promoted, rolled back", ("drafter/promoted", "drafter/rolled_back")),
    ("alarms and faults", ("guard/alarms", "faults")),
    ("engine and trainer: log-prob gap", ("health/logprob_gap",)),
)
"""(title, metrics) of the panels on top: what an alert is about, and what it costs or gains."""


def specification(prefix: str = "") -> dict[str, Any]:
    """The workspace as plain data: sections of panels; a panel has `y`, metric names, or `regex`, a pattern of them.

    Args:
        prefix: what the trainer's logger puts before every name.
    """
    by_name = {row.name: row for row in TABLE}
    top = [_panel([by_name[f"rollspec/{n}"] for n in names], title, prefix) for title, names in OVERVIEW]
    sections = [{"name": "rollspec", "open": True, "panels": top}]
    for group in dict.fromkeys(row.name.split("/")[1] for row in TABLE):
        rows = [row for row in TABLE if row.name.split("/")[1] == group]
        panels = [_panel([row], None, prefix) for row in rows]
        sections.append({"name": f"rollspec: {group}", "open": False, "panels": panels})
    return {"name": NAME, "sections": sections}


def render() -> str:
    """The file."""
    return json.dumps(specification(), indent=1) + "\n"


def _panel(rows: Sequence[Metric], title: str | None, prefix: str) -> dict[str, Any]:
    first = rows[0]
    out: dict[str, Any] = {
        "title": title or first.name.removeprefix("rollspec/"),
        "unit": first.unit,
        "meaning": "; ".join(row.meaning for row in rows),
    }
    if first.name.endswith(">"):  # as many series as there are drafters, arms, causes
        out["regex"] = f"^{re.escape(prefix + first.name.rpartition('<')[0])}"
    else:
        out["y"] = [prefix + row.name for row in rows]
    return out


def workspace(entity: str, project: str, prefix: str = "") -> Any:
    """The workspace as the `wandb_workspaces` package has it; `save()` sends it to W&B.

    Raises:
        RollspecError: the package is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
    except ImportError as e:
        raise RollspecError(
            "rollspec: a W&B workspace is made with the wandb-workspaces package, and it is not installed; run pip "
            "install wandb-workspaces."
        ) from e
    spec = specification(prefix)
    # Metrics of transformers' callback have a step of their own (`wandb_run.define`).
    step = "train/global_step" if prefix else "Step"
    sections = []
    for section in spec["sections"]:
        panels = []
        for p in section["panels"]:
            lines = {"metric_regex": p["regex"]} if "regex" in p else {"y": p["y"]}
            panels.append(wr.LinePlot(title=p["title"], x=step, title_y=p["unit"], **lines))
        sections.append(ws.Section(name=section["name"], panels=panels, is_open=section["open"]))
    return ws.Workspace(entity=entity, project=project, name=spec["name"], sections=sections)


def main(argv: Sequence[str]) -> int:
    """Save the workspace; the exit status."""
    parser = argparse.ArgumentParser(description="rollspec's W&B workspace")
    parser.add_argument("--save", metavar="ENTITY/PROJECT", required=True, help="save it as a view of this project")
    parser.add_argument("--prefix", default="", help="what the trainer's logger puts before names (TRL: train/)")
    args = parser.parse_args(argv)
    entity, slash, project = args.save.partition("/")
    if not (entity and slash and project):
        print(f"rollspec: --save {args.save!r} names no project; write ENTITY/PROJECT.", file=sys.stderr)
        return 2
    try:
        print(workspace(entity, project, args.prefix).save().url)
    except RollspecError as e:
        print(e, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
