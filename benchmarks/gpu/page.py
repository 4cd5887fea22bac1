"""One self-contained page of a suite's JSON, in the look of rollspec's reports."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rollspec
from benchmarks.gpu import claims

if TYPE_CHECKING:
    from rollspec.telemetry.figures import Figure

STYLES = {"none": "s-base", "ngram": "s-1", "eagle3": "s-2", "rollspec": "s-run"}
TEMPLATES = Path(rollspec.__file__).parent / "telemetry" / "templates"


def render(result: dict[str, Any]) -> str:
    """The page as HTML; where nothing can draw it, a sentence."""
    try:
        import jinja2
        import matplotlib  # noqa: F401
    except ImportError:  # a machine that only measures
        return "<!doctype html><title>rollspec GPU suite</title><p>Render this where jinja2 and matplotlib are.</p>"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8"))
    states = [c["state"] for c in result["claims"]]
    return template.render(
        headline=claims.headline(result),
        unclaimed=claims.unclaimed_because(result),
        style=(TEMPLATES / "style.css").read_text(encoding="utf-8"),
        tiles=[
            (result["device"]["name"], "device"),
            (str(states.count("holds")), "claims hold"),
            (str(states.count("fails")), "claims fail"),
            (f"{sum(p.get('seconds', 0.0) for p in result['parts'].values()) / 60:.0f} min", "measured"),
        ],
        claims=result["claims"],
        figures=figures(result),
        parts=[(name, _state(part), part.get("seconds", "")) for name, part in result["parts"].items()],
        provenance=_provenance(result),
    )


def figures(result: dict[str, Any]) -> list[Figure]:
    """Step time and tokens per second over the batch, one pair per shape."""
    from rollspec.telemetry.figures import Line, line_chart

    out = []
    for shape, arms in claims.curves(result).items():
        for field, title, unit in (
            ("step_ms", "Time of a decode step", "ms"),
            ("tokens_per_second", "Tokens per second", "tokens/s"),
        ):
            lines = [
                Line(arm, STYLES[arm], [math.log2(r["batch"]) for r in rows], [r[field] for r in rows])
                for arm, rows in arms.items()
            ]
            note = "Weights are random and acceptance is decreed: this is what steps cost, not what drafts are worth."
            out.append(line_chart(f"{title}, {shape}", unit, lines, x_label="log2 of the batch", note=note))
    return out


def _state(part: dict[str, Any]) -> str:
    return f"{part['state']}: {part['reason']}" if "reason" in part else str(part["state"])


def _provenance(result: dict[str, Any]) -> list[tuple[str, str]]:
    tree = {True: "clean", False: "changed", None: "unknown"}[result["clean"]]
    rows = [("commit", f"{result['commit']} ({tree})"), ("began", result["began"]), ("model", result["model"])]
    rows += [(f"device {k}", str(v)) for k, v in result["device"].items()]
    return rows + [(f"version of {k}", v) for k, v in result["versions"].items()]
