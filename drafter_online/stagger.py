"""One replica tries a version, the others wait for its verdict: agreed on through the store alone.

    store/00000007/trial-0.json      who tries it: {"replica", "life", "beat", "released"}
    store/00000007/verdict-0.json    what came of that: {"replica", "verdict", "reason", "facts"}

A replica that wants to try a version creates the next `trial-K.json`; creating a file that exists fails, so exactly one
does. It rewrites the file as long as it lives (`beat`). Nobody compares clocks: a trial is dead when its beat has not
changed for `lease_seconds` of the onlooker's own clock. Then, or when it was given back, the next replica tries.

Of several verdicts (a replica that was thought dead comes back) the worse counts: a version that anybody took back is
not run. A version that nobody survives trying is refused.

    stagger = Stagger(Versions(folder), replica="3")
    d = stagger.decide(running=6)     # "try", "take", "wait", "back" or "none"
    stagger.beat()                    # while trying, more often than every lease_seconds
    stagger.conclude("promoted", "1.9 accepted per step against 1.6")
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from drafter_online import files
from drafter_online.errors import VersionError
from drafter_online.versions import Verdict, Versions

LEASE_SECONDS = 10.0
"""A trial whose beat stands still for so long is dead."""

DEATHS = 3
"""Replicas that may die while they try a version; then it is refused."""

Action = Literal["none", "try", "take", "wait", "back"]


@dataclass(frozen=True)
class Decision:
    """What a replica should do. `version`: which one; for `back` None means the weights that it started with."""

    action: Action
    version: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class Trial:
    """A version's latest trial. `attempt` counts from 0; `token` changes with every beat."""

    attempt: int
    replica: str
    life: str
    token: str
    released: bool


class Stagger:
    """One replica's view of a store that replicas share. One thread.

    Args:
        store: where versions are published.
        replica: a name that no other replica has.
        lease_seconds: see `LEASE_SECONDS`; more than twice the time between two beats.
        deaths: see `DEATHS`.
        clock: seconds that never go back; of this process only.
    """

    def __init__(
        self,
        store: Versions,
        replica: str,
        *,
        lease_seconds: float = LEASE_SECONDS,
        deaths: int = DEATHS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if lease_seconds <= 0 or deaths < 1:
            raise VersionError(
                f"drafter-online: stagger.lease_seconds = {lease_seconds} and deaths = {deaths} cannot be used; give "
                "positive numbers."
            )
        self.store = store
        self.replica = replica
        self.lease_seconds = lease_seconds
        self.deaths = deaths
        self.trying: int | None = None
        """The version that this replica tries."""
        self._attempt = 0
        self._beat = 0
        self._life = uuid.uuid4().hex  # a replica that was started again under its old name is another one
        self._clock = clock
        self._seen: dict[tuple[int, int], tuple[str, float]] = {}  # trial -> its token, and since when it stands still

    # ---- deciding ---------------------------------------------------------------------------------------------------

    def decide(self, running: int, willing: bool = True) -> Decision:
        """What to do next; with "try" this replica holds the trial.

        Args:
            running: the version that runs here, 0 for the weights that the replica started with.
            willing: False never answers "try" (a replica without traffic cannot judge).

        Raises:
            VersionError: the store cannot be written.
        """
        numbers = self.store.numbers()
        self._seen = {k: v for k, v in self._seen.items() if k[0] in numbers}
        good, bad = self._known(numbers)
        if running in bad:
            last = max((n for n in good if n < running), default=None)
            return Decision("back", last, f"version {running} was taken back elsewhere")
        if self.trying is not None:
            if self.trying in numbers:
                return Decision("try", self.trying)
            self.trying = None  # retention dropped it
        newer = [n for n in reversed(numbers) if n > running and n not in bad]
        for n in newer:
            if n in good:
                return Decision("take", n)
        latest = {n: self._latest(n) for n in newer}
        live = {n: self._live(n, trial) for n, trial in latest.items()}  # of every one: each is watched from now on
        for n, trial in latest.items():
            if trial is not None and live[n]:
                return Decision("wait", n, f"replica {trial.replica} tries it")
        for n, trial in latest.items():
            deaths = self._deaths(n)
            if deaths >= self.deaths:
                self._verdict(n, deaths, "refused", f"{deaths} replicas died while they tried it")
                continue
            if not willing:
                return Decision("wait", n, "nobody tries it yet")
            # After the trial that was found to be over, not after what is the latest by now.
            if self._claim(n, 0 if trial is None else trial.attempt + 1):
                return Decision("try", n)
            return Decision("wait", n, "another replica was faster")
        return Decision("none")

    def verdicts(self, number: int) -> list[Verdict]:
        """All verdicts on a version that replicas have written, oldest trial first."""
        found = []
        for attempt in range(len(self._trials(number)) + 1):
            row = _read(self.store.path(number) / f"verdict-{attempt}.json")
            if row is not None and row.get("verdict") in ("promoted", "rolled_back", "refused"):
                found.append(row["verdict"])
        return found

    def _known(self, numbers: list[int]) -> tuple[set[int], set[int]]:
        """Versions in the store that may run untried, and versions that must not: replicas' and operators' verdicts."""
        said = {n: set(self.verdicts(n)) for n in numbers}
        for e in self.store.events():
            said.setdefault(e.version, set()).add(e.verdict)
        bad = {n for n, verdicts in said.items() if verdicts - {"promoted"}}
        return {n for n in numbers if said[n]} - bad, bad

    # ---- trials -----------------------------------------------------------------------------------------------------

    def _trials(self, number: int) -> list[int]:
        try:
            names = os.listdir(self.store.path(number))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(
            int(n[6:-5]) for n in names if n.startswith("trial-") and n.endswith(".json") and n[6:-5].isdigit()
        )

    def _trial(self, number: int, attempt: int) -> Trial:
        """A trial's file. One that is being written, or is damaged, is somebody's whose name is not known."""
        row = _read(self._path(number, attempt)) or {}
        return Trial(
            attempt,
            str(row.get("replica", "?")),
            str(row.get("life", "")),
            json.dumps(row, sort_keys=True),
            row.get("released") is True,
        )

    def _latest(self, number: int) -> Trial | None:
        attempts = self._trials(number)
        return self._trial(number, attempts[-1]) if attempts else None

    def _live(self, number: int, trial: Trial | None) -> bool:
        """Whether somebody tries a version at present."""
        return trial is not None and not trial.released and self._still(number, trial) < self.lease_seconds

    def _still(self, number: int, trial: Trial) -> float:
        """Seconds for which this replica has not seen the trial's beat change."""
        now = self._clock()
        token, since = self._seen.get((number, trial.attempt), ("", now))
        if token != trial.token:
            since = now
        self._seen[number, trial.attempt] = (trial.token, since)
        return now - since

    def _deaths(self, number: int) -> int:
        """Trials that ended without a verdict and were not given back."""
        there = self._trials(number)
        ended = [a for a in there if not self._trial(number, a).released]
        return sum(_read(self.store.path(number) / f"verdict-{a}.json") is None for a in ended)

    def _claim(self, number: int, attempt: int) -> bool:
        try:
            fd = os.open(self._path(number, attempt), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except (FileExistsError, FileNotFoundError):
            return False  # another replica was faster, or retention was
        except OSError as e:
            raise VersionError(
                f"drafter-online: the trial of version {number} cannot be written to {self.store.path(number)} "
                f"({e.strerror or e}); make it writable or free space."
            ) from e
        os.close(fd)
        self.trying, self._attempt, self._beat = number, attempt, 0
        self.beat()
        return self.trying is not None

    def _path(self, number: int, attempt: int) -> Path:
        return self.store.path(number) / f"trial-{attempt}.json"

    def beat(self) -> bool:
        """Say that this replica still tries. False when it need not go on: the version is gone, or another tries it.

        A beat that cannot be written is left out; if that goes on, the trial passes to another replica.
        """
        if self.trying is None:
            return False
        self._beat += 1
        try:
            self._write()
        except FileNotFoundError:
            self.trying = None
            return False
        except OSError:
            return True
        return max(self._trials(self.trying), default=0) == self._attempt

    def release(self) -> None:
        """Give the trial back without a verdict: this replica leaves, or has no traffic to judge by."""
        if self.trying is None:
            return
        with contextlib.suppress(OSError):  # then it lapses
            self._write(released=True)
        self.trying = None

    def _write(self, released: bool = False) -> None:
        assert self.trying is not None
        row = {"replica": self.replica, "life": self._life, "beat": self._beat, "released": released}
        if not self.store.path(self.trying).is_dir():
            raise FileNotFoundError(self.trying)
        files.replace(self._path(self.trying, self._attempt), json.dumps(row).encode())

    # ---- verdicts ---------------------------------------------------------------------------------------------------

    def conclude(self, verdict: Verdict, reason: str = "", **facts: Any) -> Verdict:
        """Write the verdict of this replica's trial; what counts is returned: the worst of all there are.

        Raises:
            VersionError: it cannot be written; the trial then lapses, and another replica tries.
        """
        number, self.trying = self.trying, None
        if number is None:
            raise VersionError("drafter-online: there is no trial to conclude; decide() begins one.")
        self._verdict(number, self._attempt, verdict, reason, **facts)
        return max([verdict, *self.verdicts(number)], key=("promoted", "rolled_back", "refused").index)

    def _verdict(self, number: int, attempt: int, verdict: Verdict, reason: str, **facts: Any) -> None:
        row = {"replica": self.replica, "verdict": verdict, "reason": reason, "facts": facts}
        worse = set(self.verdicts(number)) - {"promoted"}
        try:
            if self.store.path(number).is_dir():
                files.replace(self.store.path(number) / f"verdict-{attempt}.json", json.dumps(row).encode())
        except OSError as e:
            raise VersionError(
                f"drafter-online: the verdict {verdict!r} on version {number} cannot be written to "
                f"{self.store.path(number)} ({e.strerror or e}); make it writable or free space."
            ) from e
        if verdict != "promoted" or not worse:  # `Versions.promoted` believes the last line
            self.store.record(number, verdict, reason, replica=self.replica, **facts)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        row = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return row if isinstance(row, dict) else None
