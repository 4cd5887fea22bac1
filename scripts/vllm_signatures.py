"""What became of everything that rollspec hooks or uses, from one version of vLLM to another.

    for change in compare(Source.open("vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl"), Record.load()):
        print(change)

`vllm_signatures.json` has what the recorded versions were like: a list of states per target, each from a version on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from packaging.version import Version

from rollspec.engine.vllm.compat import TESTED
from rollspec.engine.vllm.hooks import HOOKS, Hook
from rollspec.tested import in_range
from scripts.vllm_source import Source, State
from scripts.vllm_uses import USES

FILE = Path(__file__).with_suffix(".json")

Kind = Literal["unchanged", "body changed", "signature changed", "gone", "new"]


def targets() -> list[str]:
    """Every function, class and attribute of vLLM that is hooked or used."""
    found = [t for h in HOOKS for t in h.targets] + [t for group in USES.values() for t in group]
    return [t for t in sorted(set(found)) if t not in ADDED]


ADDED = frozenset({"vllm.v1.worker.worker_base:WorkerBase.rollspec"})
"""Targets that vLLM does not have: rollspec adds them."""


@dataclass
class Record:
    """What was seen: per target (version from which on, state), ascending; a state of None: it was not there."""

    versions: list[str]
    states: dict[str, list[tuple[str, State | None]]]

    @classmethod
    def load(cls, path: Path = FILE) -> Record:
        """Read the file beside this module; empty where there is none."""
        if not path.is_file():
            return cls([], {})
        raw = json.loads(path.read_text(encoding="utf-8"))
        states = {t: [(v, cast(State, tuple(s)) if s else None) for v, s in rows] for t, rows in raw["targets"].items()}
        return cls(raw["versions"], states)

    def save(self, path: Path = FILE) -> None:
        """Write it, a line per state."""
        body = ",\n".join(
            f"  {json.dumps(t)}: [\n" + ",\n".join(f"   {json.dumps(row)}" for row in rows) + "\n  ]"
            for t, rows in sorted(self.states.items())
        )
        path.write_text(
            f'{{\n "versions": {json.dumps(self.versions)},\n "targets": {{\n{body}\n }}\n}}\n', encoding="utf-8"
        )

    def add(self, source: Source) -> None:
        """Note what a version is like."""
        everything = {v: {t: self.at(t, v) for t in self.states} for v in self.versions}
        everything[source.version] = {t: source.state(t) for t in targets()}
        self.versions = sorted(everything, key=Version)
        self.states = {}
        for target in targets():
            rows: list[tuple[str, State | None]] = []
            for v in self.versions:
                state = everything[v].get(target)
                if not rows or rows[-1][1] != state:
                    rows.append((v, state))
            self.states[target] = rows

    def at(self, target: str, version: str) -> State | None:
        """What a target was like in a recorded version."""
        state = None
        for since, found in self.states.get(target, []):
            if Version(since) <= Version(version):
                state = found
        return state

    def baseline(self, version: str) -> str | None:
        """What to compare `version` with: its own record if it is tested, else the newest tested one."""
        tested = [v for v in self.versions if in_range(v, TESTED)]
        return version if version in tested else tested[-1] if tested else None


@dataclass(frozen=True)
class Change:
    """What became of one target since the version it is compared with. Signatures are None where it is not there."""

    target: str
    kind: Kind
    before: str | None
    now: str | None

    @property
    def name(self) -> str:
        """The target without its module."""
        return self.target.partition(":")[2]


def compare(source: Source, record: Record, against: str | None = None) -> list[Change]:
    """What became of every target since the recorded version `against` (`Record.baseline` if not given)."""
    against = against or record.baseline(source.version) or "0"
    changes = []
    for target in targets():
        before, now = record.at(target, against), source.state(target)
        kind: Kind = "unchanged"
        if now is None:
            kind = "gone" if before is not None else "unchanged"
        elif before is None:
            kind = "new"
        elif before[0] != now[0]:
            kind = "signature changed"
        elif before[1] != now[1]:
            kind = "body changed"
        changes.append(Change(target, kind, before and before[0], now and now[0]))
    return changes


def verdict(hook: Hook, source: Source, changes: list[Change]) -> tuple[Literal["on", "warn", "off"], str]:
    """Whether a hook would be applied in one version of vLLM, and why; `changes`: what became of its targets."""
    if hook.cpu_only and not source.cpu:
        return "off", str(hook.off_because(source.version, source.cpu))
    mine = [c for c in changes if c.target in hook.targets]
    gone = [f"{c.name} is gone" for c in mine if c.now is None]
    moved = [f"{c.name} changed from {c.before} to {c.now}" for c in mine if c.kind == "signature changed"]
    inside = [f"the body of {c.name} changed" for c in mine if c.kind == "body changed"]
    facts = [*gone, *moved, *inside]
    if (reason := hook.off_because(source.version)) is not None:
        return "off", "; ".join([reason, *(facts or ["its targets have not changed"])])
    if gone:
        return "off", "; ".join(facts)
    return ("warn", "; ".join(facts)) if facts else ("on", hook.why)


def summary(changes: list[Change]) -> dict[str, int]:
    """Counts by kind."""
    return {kind: sum(c.kind == kind for c in changes) for kind in get_args(Kind)}
