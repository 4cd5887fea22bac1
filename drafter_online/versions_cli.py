"""`drafter-online versions`: look into a store of drafter versions, and decide about them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from drafter_online.console import Json, group, show_facts, show_table
from drafter_online.errors import VersionError
from drafter_online.versions import Event, Versions

app = group("Look into a store of drafter versions, and decide about them.")

Store = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of versions.")]


@app.command("list")
def versions_list(store: Store, as_json: Json = False) -> None:
    """The versions in a store, oldest first, and what became of them."""
    from drafter_online.status import list_versions

    versions = Versions(store)
    rows = list_versions(versions, versions.promoted())
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    show_table(
        ("version", "of policy", "parent", "verdict", "created", "size"),
        [
            (str(r["version"]), "-", "-", "damaged", "-", "-")
            if "error" in r
            else (
                f"{r['version']}{' *' if r['promoted'] else ''}",
                str(r["target_version"]),
                str(r["parent"] or "-"),
                str(r["verdict"] or "-"),
                str(r["created"])[:19],
                decimal(r["bytes"]),
            )
            for r in rows
        ],
        caption="* promoted; `show` says what is wrong with a damaged one",
    )


@app.command("show")
def versions_show(
    store: Store, version: Annotated[int, typer.Argument(help="Its number.")], as_json: Json = False
) -> None:
    """Verify one version and show its manifest and its verdicts."""
    versions = Versions(store)
    facts = dataclasses.asdict(versions.load(version).manifest)
    facts["events"] = [dataclasses.asdict(e) for e in versions.events() if e.version == version]
    if not as_json:
        facts["tensors"] = f"{len(facts['tensors'])}, all verified"
    show_facts(facts, as_json)


@app.command("promote")
def versions_promote(
    store: Store,
    version: Annotated[int, typer.Argument(help="Its number.")],
    reason: Annotated[str, typer.Option("--reason", help="Kept with the verdict.")] = "by hand",
    as_json: Json = False,
) -> None:
    """Verify a version and record that it is the one to run; retention then keeps it."""
    versions = Versions(store)
    versions.load(version)
    event = versions.record(version, "promoted", reason)
    _decided(versions, event, f"version {version} is promoted", as_json)


@app.command("rollback")
def versions_rollback(
    store: Store,
    version: Annotated[int | None, typer.Argument(help="Its number; the promoted one when left out.")] = None,
    reason: Annotated[str, typer.Option("--reason", help="Kept with the verdict.")] = "by hand",
    as_json: Json = False,
) -> None:
    """Record that a version must not run; the one promoted before it is the promoted one again."""
    versions = Versions(store)
    number = version if version is not None else versions.promoted()
    if number is None:
        raise VersionError(f"no version in {store} is promoted, so there is nothing to roll back.")
    event = versions.record(number, "rolled_back", reason)
    now = versions.promoted()
    text = f"version {number} is rolled back; promoted is now {'none' if now is None else now}"
    _decided(versions, event, text, as_json)


def _decided(versions: Versions, event: Event, text: str, as_json: bool) -> None:
    facts = {**dataclasses.asdict(event), "promoted": versions.promoted()}
    typer.echo(json.dumps(facts, indent=2) if as_json else text)
