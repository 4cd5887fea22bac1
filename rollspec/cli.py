"""The `rollspec` command. Its `--help` needs only the base dependencies: a command's module is imported when it runs.

    rollspec demo | doctor | audit | drafter | bench | report | config

A command's module defines `command`, a plain function with typer annotations, or `app`, a `typer.Typer`, where it has
sub-commands of its own. What rollspec raises on purpose is printed as its one sentence, with exit status 2.
"""

from __future__ import annotations

import importlib
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
    "config": Lazy("rollspec.config.cli", "List the knobs, show a resolved configuration, list the presets."),
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
            problem = f"is not in this installation ({missing} is missing)"
            clone = f"clone the repository, where it is, and run `make {name}`"
            remedy = clone if lazy.checkout else "reinstall rollspec"
        else:
            problem = f"needs {missing}, which is not installed"
            remedy = f"run pip install 'rollspec[{lazy.extra}]'" if lazy.extra else f"install {missing}"
        raise RollspecError(f"rollspec: `rollspec {name}` {problem}; {remedy}.") from e
    entry: Any = getattr(module, "command", None) or module.app
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


if __name__ == "__main__":
    app()
