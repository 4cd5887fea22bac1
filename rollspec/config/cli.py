"""`rollspec config`: the knobs, what a preset or file resolves to, and the presets."""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer
import yaml
from pydantic_core import to_jsonable_python
from rich.text import Text

from drafter_online.console import show_table
from rollspec.config import RollspecConfig, knobs, presets, resolve

app = typer.Typer(
    help="List the knobs, show a resolved configuration, list the presets.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _config(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print the knobs as JSON.")] = False,
) -> None:
    """List every knob with its type, default and meaning; `show` resolves a configuration, `presets` lists them."""
    if ctx.invoked_subcommand:
        return
    # The defaults as they would be written in a file (lists, strings, null), not as Python objects.
    rows = [(name, kind, to_jsonable_python(default), text) for name, kind, default, text in knobs(RollspecConfig)]
    if as_json:
        fields = ("name", "type", "default", "description")
        typer.echo(json.dumps([dict(zip(fields, row, strict=True)) for row in rows], indent=2))
        return
    show_table(
        ("knob", "default", "what it does"),
        [(Text(n, "bold"), json.dumps(d), Text.assemble(t, " ", (_readable(k), "dim"))) for n, k, d, t in rows],
        caption="Set one in YAML, by --set name=value, or as ROLLSPEC__PROPOSAL__K_MAX=8 in the environment.",
    )


@app.command("show")
def _show(
    source: Annotated[
        str, typer.Argument(metavar="PRESET_OR_YAML", help="A preset's name or a YAML file.")
    ] = "default",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a knob; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
) -> None:
    """Print the configuration that a preset or file resolves to, after the environment and --set."""
    data = resolve(source, overrides=overrides or ()).to_dict()
    typer.echo(json.dumps(data, indent=2) if as_json else yaml.safe_dump(data, sort_keys=False), nl=as_json)


@app.command("presets")
def _presets(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the presets with the first sentence of their headers."""
    found = [
        {"name": name, "path": str(path), "summary": _headline(path.read_text(encoding="utf-8"))}
        for name, path in presets().items()
    ]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        show_table(("preset", "what it is"), [(Text(preset["name"], "bold"), preset["summary"]) for preset in found])


def _headline(text: str) -> str:
    """The first sentence of a preset's comment header, without its name."""
    header: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        header.append(line.lstrip("# ").rstrip())
    sentence = " ".join(header).split(": ", 1)[-1].split(". ", 1)[0].rstrip(".")
    return f"{sentence}." if sentence else ""


def _readable(kind: str) -> str:
    """A type as a user would say it: `Literal['fixed', 'goodput']` is `fixed | goodput`."""
    kind = re.sub(r"Literal\[([^\]]*)\]", lambda m: m[1].replace("'", "").replace(", ", " | "), kind)
    kind = re.sub(r"tuple\[(.*), \.\.\.\]", r"list of \1", kind)
    return kind.replace("pathlib.", "").lower()
