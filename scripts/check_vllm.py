#!/usr/bin/env python
"""Judges a release of vLLM in a minute: what became of every function and class that rollspec hooks or uses.

    scripts/check_vllm.py                          the installed vLLM
    scripts/check_vllm.py vllm-0.33.0-*.whl        a wheel, also one that cannot be imported here
    scripts/check_vllm.py FOLDER                   a folder that holds vllm/
    scripts/check_vllm.py --hooks [PATH]           whether each hook would be on there, a line each
    scripts/check_vllm.py --record [PATH]          note it in scripts/vllm_signatures.json

A version is compared with its own record if it is in the tested range, else with the newest recorded one that is.
Exit status: 0 unchanged, 1 bodies changed (read them), 2 signatures changed or gone, 3 nothing to compare; with --hooks
1 where engines would run as without rollspec.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file; verl installs another `scripts`

from rollspec.engine.vllm.compat import unsupported_version
from rollspec.engine.vllm.hooks import HOOKS
from scripts import vllm_signatures as signatures
from scripts.vllm_source import Source
from scripts.vllm_uses import USES


def main(argv: list[str]) -> int:
    """Compare, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", help="a wheel, or a folder that holds vllm/; the installed vLLM if left out")
    parser.add_argument("--against", metavar="VERSION", help="the recorded version to compare with")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.add_argument("--hooks", action="store_true", help="print which hooks would be on, and why the others not")
    parser.add_argument("--record", action="store_true", help="note this version's signatures")
    args = parser.parse_args(argv)
    try:
        source = Source.open(args.path)
    except ValueError as e:
        print(e, file=sys.stderr)
        return 3
    record = signatures.Record.load()
    if args.record:
        record.add(source)
        record.save()
        print(f"vLLM {source.version} is recorded: {len(signatures.targets())} targets in {signatures.FILE}")
        return 0
    against = args.against or record.baseline(source.version)
    if against not in record.versions:
        known = ", ".join(record.versions) or "none"
        print(
            f"rollspec: vLLM {against} is not recorded (recorded: {known}); record it with --record.", file=sys.stderr
        )
        return 3
    changes = signatures.compare(source, record, against)
    if args.hooks:
        return show_hooks(source, changes, args.json)
    if args.json:
        rows = [dataclasses.asdict(c) | {"used_by": users(c.target)} for c in changes]
        print(json.dumps({"version": source.version, "against": against, "changes": rows}, indent=2))
    else:
        show(source.version, against, changes)
    kinds = {c.kind for c in changes}
    return 2 if kinds & {"signature changed", "gone"} else 1 if kinds & {"body changed", "new"} else 0


def users(target: str) -> list[str]:
    """The hooks and modules that a target belongs to."""
    return [h.name for h in HOOKS if target in h.targets] + [m for m, group in USES.items() if target in group]


def show_hooks(source: Source, changes: list[signatures.Change], as_json: bool) -> int:
    """A line for each hook; the exit status."""
    rows = [(h.name, *signatures.verdict(h, source, changes)) for h in HOOKS]
    problem = unsupported_version(source.version)
    if as_json:
        listed = [dict(zip(("name", "state", "why"), row, strict=True)) for row in rows]
        print(json.dumps({"vllm": source.version, "problem": problem, "hooks": listed}, indent=2))
    else:
        print(f"{problem or f'vLLM {source.version} is in the tested range'}.")
        for name, state, why in rows:
            print(f"{name:32}{state:5}{why}.")
    return int(problem is not None)


def show(version: str, against: str, changes: list[signatures.Change]) -> None:
    """A line for whatever changed, and the counts."""
    for c in sorted(changes, key=lambda c: c.kind):
        if c.kind == "unchanged":
            continue
        print(f"{c.kind:18}{c.target}  [{', '.join(users(c.target))}]")
        if c.kind == "signature changed":
            print(f"    {difference(str(c.before), str(c.now))}")
    counts = ", ".join(f"{n} {kind}" for kind, n in signatures.summary(changes).items() if n)
    print(f"vLLM {version} against {against}: {counts}")


def difference(before: str, now: str) -> str:
    """Two signatures; of classes only the fields that went and came."""
    if not before.startswith("class"):
        return f"{before} -> {now}"
    old, new = before.split(), now.split()
    return " ".join([*(f"-{w}" for w in old if w not in new), *(f"+{w}" for w in new if w not in old)]) or "order"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
