"""`rollspec report RUN [--baseline RUN ...]`: the command around `rollspec.telemetry.report`."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from rollspec.telemetry.report import write_report


def command(
    run: Annotated[Path, typer.Argument(help="Run folder (metrics.jsonl; TRL's or W&B's folder), or a demo folder.")],
    baseline: Annotated[
        list[Path] | None,
        typer.Option(
            help="Run folder of the same job without rollspec; further ones tell how far its runs differ by chance."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="HTML file or folder to write; default: inside RUN.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Write one self-contained HTML page (and JSON) about a run, alone or against a baseline."""
    paths = write_report(run, baseline, out)
    if as_json:
        sys.stdout.write(paths.json.read_text(encoding="utf-8"))
    else:
        typer.echo(paths.headline)
        if paths.limits:
            typer.echo(paths.limits)
        typer.echo(f"report: {paths.html}\nnumbers: {paths.json}")
    if open_page:
        webbrowser.open(paths.html.resolve().as_uri())
