"""What the commands of `drafter-online` share: options, tables beside JSON, and errors as one sentence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from drafter_online.errors import DrafterError, HeadError

USAGE = 2  # exit status of a mistake the user can mend


class _Group(TyperGroup):
    """Prints what the library raises on purpose as its one sentence."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DrafterError as e:
            typer.echo(str(e), err=True)
            raise typer.Exit(USAGE) from e
        except ModuleNotFoundError as e:
            typer.echo(f"drafter-online: {e.name} is not installed; run pip install 'rollspec[drafter]'.", err=True)
            raise typer.Exit(USAGE) from e


def group(text: str) -> typer.Typer:
    """A group of commands, with help and errors as all of them have."""
    return typer.Typer(
        cls=_Group,
        help=text,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Target = Annotated[str, typer.Option("--target", help="Folder (or hub name) of the target's checkpoint.")]
Aux = Annotated[str | None, typer.Option("--aux", help="Auxiliary layers, e.g. 2,18,33; chosen when left out.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A knob of training; may be repeated.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads that train; torch decides when left out.")
]
Dtype = Annotated[str, typer.Option("--dtype", help="Of the weights as written: bfloat16, float16 or float32.")]


def values(items: list[str] | None, prefix: str = "") -> dict[str, Any]:
    """KEY=VALUE as a mapping; a value is JSON where it can be read as that."""
    values: dict[str, Any] = {}
    for item in items or ():
        name, _, text = item.partition("=")
        try:
            values[name.removeprefix(prefix)] = json.loads(text)
        except ValueError:
            values[name.removeprefix(prefix)] = text
    return values


def aux_layers(text: str | None) -> list[int] | None:
    """The layers of `--aux`, numbers with commas between them; None where it is left out.

    Raises:
        HeadError: it is none.
    """
    try:
        return [int(x) for x in text.split(",")] if text else None
    except ValueError as e:
        raise HeadError(f"--aux {text!r} is not a list of layers such as 2,18,33.") from e


def torch_dtype(name: str) -> Any:
    """The dtype of `--dtype`.

    Raises:
        HeadError: it is none that weights are written in.
    """
    import torch

    if name not in ("bfloat16", "float16", "float32"):
        raise HeadError(f"--dtype {name!r} is not bfloat16, float16 or float32.")
    return getattr(torch, name)


def bars(quiet: bool) -> Progress:
    """Progress bars on stderr; beside a task's bar stands its field `text`."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=quiet)


def show_facts(facts: dict[str, Any], as_json: bool) -> None:
    """Names and values, as a table or as JSON."""
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    plain = [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in facts.items()]
    show_table(("what", "value"), plain)


def show_table(columns: tuple[str, ...], rows: Sequence[tuple[str | Text, ...]], caption: str | None = None) -> None:
    """Rows under their columns. A string stands as it is; what has styles is a `Text`."""
    table = Table(caption=caption, caption_justify="left", header_style="bold", pad_edge=False)
    for i, column in enumerate(columns):
        # Names are for copying: they must not be cut or wrapped.
        table.add_column(column, no_wrap=i == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    Console().print(table)
