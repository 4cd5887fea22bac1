"""The `rollspec` command. Its `--help` needs only the base dependencies: a command's module is imported when it runs.

    rollspec demo | doctor | audit | drafter | bench | report | config

A command's module defines `command`, a plain function with typer annotations, or `app`, a `typer.Typer`, where it has
sub-commands of its own. What rollspec raises on purpose is printed as its one sentence, with exit status 2.
"""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rollspec.errors import RollspecError

USAGE = 2  # exit status of a mistake the user can mend, as typer uses for a wrong option


@dataclass(frozen=True, slots=True)
class Lazy:
    """A command whose module is imported only when it is run or asked for its own help."""

    module: str
    help: str
    extra: str | None = None  # the optional dependencies it needs: pip install 'rollspec[extra]'
    checkout: bool = False  # whether it is in the repository only


COMMANDS: dict[str, Lazy] = {
    "demo": Lazy("examples.demo.cli", "Run a small GRPO job on this machine with and without rollspec.", "verl", True),
    "doctor": Lazy("rollspec.doctor", "Say what is installed, what it enables, and what is off and why."),
    "audit": Lazy(
        "rollspec.audit.cli", "Test on your own model that speculation does not change the distribution.", "audit"
    ),
    "drafter": Lazy("drafter_online.cli", "Make, convert, train and inspect draft heads.", "drafter"),
    "bench": Lazy("benchmarks.cli", "Run the benchmarks and print their tables.", checkout=True),
    "report": Lazy("rollspec.telemetry.report", "Write one self-contained HTML page about a run.", "report"),
    "config": Lazy("rollspec.cli", "List the knobs, show a resolved configuration, list the presets."),
}


class _Group(TyperGroup):
    """Replaces a lazy command's stub by the real command when it is resolved, not when the list is printed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name in COMMANDS:
            self.commands[name] = _load(name)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RollspecError as e:
            typer.echo(str(e), err=True)
            raise typer.Exit(USAGE) from e


def _load(name: str) -> Any:
    lazy = COMMANDS[name]
    try:
        module = importlib.import_module(lazy.module)
    except ModuleNotFoundError as e:
        missing = e.name or str(e)
        if lazy.module == missing or lazy.module.startswith(f"{missing}."):
            where = (
                f"clone the repository, where it is, and run `make {name}`" if lazy.checkout else "reinstall rollspec"
            )
            raise RollspecError(
                f"rollspec: `rollspec {name}` is not in this installation ({missing} is missing); {where}."
            ) from e
        remedy = f"pip install 'rollspec[{lazy.extra}]'" if lazy.extra else f"install {missing}"
        raise RollspecError(
            f"rollspec: `rollspec {name}` needs {missing}, which is not installed; run {remedy}."
        ) from e
    entry: Any = config_app if lazy.module == __name__ else getattr(module, "command", None) or module.app
    if not isinstance(entry, typer.Typer):
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(name, help=None if entry.__doc__ else lazy.help)(entry)
        entry = single
    loaded = typer.main.get_command(entry)
    loaded.name = name
    return loaded


app = typer.Typer(
    cls=_Group,
    name="rollspec",
    help="Exact speculative decoding for the rollouts of RL post-training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from rollspec import __version__

        typer.echo(f"rollspec {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _stub() -> None:
    raise AssertionError("a stub is replaced before it runs")


for _name, _lazy in COMMANDS.items():
    app.command(_name, help=_lazy.help)(_stub)


config_app = typer.Typer(
    help=COMMANDS["config"].help, invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False
)


@config_app.callback()
def _config(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print the knobs as JSON.")] = False,
) -> None:
    """List every knob with its type, default and meaning; `show` resolves a configuration, `presets` lists them."""
    if ctx.invoked_subcommand:
        return
    from pydantic_core import to_jsonable_python

    from rollspec.config import RollspecConfig, knobs

    # The defaults as they would be written in a file (lists, strings, null), not as Python objects.
    rows = [(name, kind, to_jsonable_python(default), text) for name, kind, default, text in knobs(RollspecConfig)]
    if as_json:
        fields = ("name", "type", "default", "description")
        typer.echo(json.dumps([dict(zip(fields, row, strict=True)) for row in rows], indent=2))
        return
    from rich.text import Text

    from drafter_online.console import show_table

    show_table(
        ("knob", "default", "what it does"),
        [(Text(n, "bold"), json.dumps(d), Text.assemble(t, " ", (_readable(k), "dim"))) for n, k, d, t in rows],
        caption="Set one in YAML, by --set name=value, or as ROLLSPEC__PROPOSAL__K_MAX=8 in the environment.",
    )


@config_app.command("show")
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
    import yaml

    from rollspec.config import resolve

    data = resolve(source, overrides=overrides or ()).to_dict()
    typer.echo(json.dumps(data, indent=2) if as_json else yaml.safe_dump(data, sort_keys=False), nl=as_json)


@config_app.command("presets")
def _presets(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the presets with the first sentence of their headers."""
    from rollspec.config import presets

    found = {name: (str(path), _headline(path.read_text(encoding="utf-8"))) for name, path in presets().items()}
    if as_json:
        typer.echo(json.dumps([{"name": n, "path": p, "summary": s} for n, (p, s) in found.items()], indent=2))
        return
    from rich.text import Text

    from drafter_online.console import show_table

    show_table(("preset", "what it is"), [(Text(n, "bold"), s) for n, (_, s) in found.items()])


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


if __name__ == "__main__":
    app()
