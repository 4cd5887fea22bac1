"""One replica tries a version, the others wait for its verdict: agreed on through the store alone.

A replica that wants a version as its canary claims it (`claims`). No clocks are compared: a claim is dead when its beat
has not changed for `lease_seconds` of the onlooker's own clock. Then, or when it was released, the next replica claims
the version. Retention keeps a version that is claimed.

Where a version stands follows from the files by the table of `lifecycle`. Of several verdicts (a replica that was
thought dead comes back) the worse counts: a version that any replica rolled back is not run. A version during whose
canary several replicas died is refused.

    canary = SharedCanary(Versions(folder), replica="3")
    d = canary.decide(running=6)     # "try", "take", "wait", "back" or "none"
    canary.beat()                    # while trying, more often than every lease_seconds
    canary.conclude("promoted", "1.9 accepted per step against 1.6")
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

from drafter_online import claims, files
from drafter_online.claims import Claim
from drafter_online.errors import VersionError
from drafter_online.lifecycle import BAD, Event, Life, State, Verdict
from drafter_online.versions import Versions

LEASE_SECONDS = 10.0
"""A claim whose beat stands still for so long is dead."""

DEATHS = 3
"""Replicas that may die while they try a version; then it is refused."""

VERDICTS: dict[State, Verdict] = {
    State.PROMOTED: "promoted",
    State.ROLLED_BACK: "rolled_back",
    State.REFUSED: "refused",
}

Action = Literal["none", "try", "take", "wait", "back"]


@dataclass(frozen=True)
class Decision:
    """What a replica should do. `version`: which one; for `back` None means the weights that it started with."""

    action: Action
    version: int | None = None
    reason: str = ""


class SharedCanary:
    """One replica's view of a store that replicas share. One thread.

    Args:
        replica: a name that no other replica has.
        lease_seconds: see `LEASE_SECONDS`; more than twice the time between two beats.
        clock: seconds that never go back; of this process only.
    """

    def __init__(
        self,
        store: Versions,
        replica: str,
        *,
        lease_seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.replica = replica
        self.lease_seconds = lease_seconds
        self.trying: int | None = None
        """The version that this replica tries."""
        self._attempt = 0
        self._beat = 0
        self._life = uuid.uuid4().hex  # a replica that was started again under its old name is another one
        self._clock = clock
        self._seen: dict[tuple[int, int], tuple[str, float]] = {}  # claim -> its token, and since when it stands still

    # ---- deciding ---------------------------------------------------------------------------------------------------

    def decide(self, running: int, willing: bool = True) -> Decision:
        """What to do next; with "try" this replica holds the claim.

        Args:
            running: the version that runs here, 0 for the weights that the replica started with.
            willing: False never answers "try" (a replica without traffic cannot judge).

        Raises:
            VersionError: the store cannot be written.
        """
        numbers = self.store.numbers()
        self._seen = {k: v for k, v in self._seen.items() if k[0] in numbers}
        lives = self._lives(numbers)
        good = [n for n in numbers if lives[n].state is State.PROMOTED]
        if running in lives and lives[running].state in BAD:
            last = max((n for n in good if n < running), default=None)
            return Decision("back", last, f"version {running} was rolled back elsewhere")
        if self.trying is not None:
            if self.trying in numbers:
                return Decision("try", self.trying)
            self.trying = None  # it was deleted
        newer = [n for n in reversed(numbers) if n > running and lives[n].state not in BAD]
        for n in newer:
            if lives[n].state is State.PROMOTED:
                return Decision("take", n)
        latest = {n: claims.latest(self.store.path(n)) for n in newer}
        for n, claim in latest.items():  # every one: each is watched from now on
            if claim is not None and self._lives_on(n, claim):
                lives[n].apply(Event.CLAIM)
        for n, claim in latest.items():
            if lives[n].state is State.CANARY and claim is not None:
                return Decision("wait", n, f"replica {claim.replica} tries it")
        for n, claim in latest.items():
            deaths = self._deaths(n)
            if deaths >= DEATHS:
                self._verdict(n, deaths, "refused", f"{deaths} replicas died while they tried it")
                continue
            if not willing:
                return Decision("wait", n, "no replica tries it yet")
            # After the claim that was found to be over, not after what is the latest by now.
            if self._claim(n, 0 if claim is None else claim.attempt + 1):
                return Decision("try", n)
            return Decision("wait", n, "another replica was faster")
        return Decision("none")

    def verdicts(self, number: int) -> list[Verdict]:
        """All verdicts on a version that replicas have written, oldest claim first."""
        folder = self.store.path(number)
        found = (claims.verdict(folder, attempt) for attempt in range(len(claims.attempts(folder)) + 1))
        return [v for v in found if v is not None]

    def _lives(self, numbers: list[int]) -> dict[int, Life]:
        """Every version in the store, or that has a verdict, by the verdicts of replicas and operators."""
        found = {n: list(self.verdicts(n)) for n in numbers}
        for e in self.store.events():
            found.setdefault(e.version, []).append(e.verdict)
        lives = {n: Life(n, State.OFFERED) for n in found}
        for n, verdicts in found.items():
            for verdict in verdicts:
                lives[n].judge(verdict)
        return lives

    # ---- claims -----------------------------------------------------------------------------------------------------

    def _lives_on(self, number: int, claim: Claim) -> bool:
        """Whether a replica has the version on canary at present."""
        return not claim.released and self._still(number, claim) < self.lease_seconds

    def _still(self, number: int, claim: Claim) -> float:
        """Seconds for which this replica has not seen the claim's beat change."""
        now = self._clock()
        token, since = self._seen.get((number, claim.attempt), ("", now))
        if token != claim.token:
            since = now
        self._seen[number, claim.attempt] = (claim.token, since)
        return now - since

    def _deaths(self, number: int) -> int:
        """Claims that ended without a verdict and were not released."""
        folder = self.store.path(number)
        ended = [a for a in claims.attempts(folder) if not claims.read(folder, a).released]
        return sum(claims.verdict(folder, a) is None for a in ended)

    def _claim(self, number: int, attempt: int) -> bool:
        try:
            fd = os.open(self._path(number, attempt), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except (FileExistsError, FileNotFoundError):
            return False  # another replica was faster, or retention was
        except OSError as e:
            raise VersionError(
                f"drafter-online: the claim on version {number} cannot be written to {self.store.path(number)} "
                f"({e.strerror or e}); make it writable or free space."
            ) from e
        os.close(fd)
        self.trying, self._attempt, self._beat = number, attempt, 0
        self.beat()
        return self.trying is not None

    def _path(self, number: int, attempt: int) -> Path:
        return claims.path(self.store.path(number), attempt)

    def beat(self) -> bool:
        """Say that this replica still tries. False when it need not continue: the version is gone, or another tries it.

        A beat that cannot be written is left out; if that persists, the claim passes to another replica.
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
        return max(claims.attempts(self.store.path(self.trying)), default=0) == self._attempt

    def release(self) -> None:
        """Release the claim without a verdict: this replica leaves, or has no traffic to judge by."""
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
        """Write the verdict of this replica's canary; what counts is returned: the worst of all there are.

        Raises:
            VersionError: it cannot be written; the claim then lapses, and another replica tries.
        """
        number, self.trying = self.trying, None
        if number is None:
            raise VersionError("drafter-online: there is no canary to conclude; decide() begins one.")
        self._verdict(number, self._attempt, verdict, reason, **facts)
        life = Life(number, State.CANARY)
        for one in [verdict, *self.verdicts(number)]:
            life.judge(one)
        return VERDICTS[life.state]

    def _verdict(self, number: int, attempt: int, verdict: Verdict, reason: str, **facts: Any) -> None:
        row = {"replica": self.replica, "verdict": verdict, "reason": reason, "facts": facts}
        worse = set(self.verdicts(number)) - {"promoted"}
        try:
            if self.store.path(number).is_dir():
                files.replace(claims.verdict_path(self.store.path(number), attempt), json.dumps(row).encode())
        except OSError as e:
            raise VersionError(
                f"drafter-online: the verdict {verdict!r} on version {number} cannot be written to "
                f"{self.store.path(number)} ({e.strerror or e}); make it writable or free space."
            ) from e
        if verdict != "promoted" or not worse:  # `Versions.promoted` believes the last line
            self.store.record(number, verdict, reason, replica=self.replica, **facts)
