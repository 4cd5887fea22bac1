"""What became of swaps in one engine: counted, logged once, recorded in the version's store or reported to a daemon."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drafter_online.canary import CanaryVerdict
from drafter_online.errors import DrafterError
from drafter_online.lifecycle import Verdict
from drafter_online.versions import Versions
from rollspec.engine.vllm.swap.payload import SwapRefusedError
from rollspec.engine.vllm.swap.swap import Swap
from rollspec.log_once import LogOnce


class Verdicts:
    """Of one worker. `record_fault`: called with the cause where a store cannot be written."""

    def __init__(self, record_fault: Callable[[str], None]) -> None:
        self.counts = {"promoted": 0, "rolled_back": 0, "refused": 0}
        self.last: dict[str, Any] = {}
        """What became of the last swap; a new object for each."""
        self.report: Callable[[int, Verdict, str], None] | None = None
        """Called with (version, verdict, reason) instead of recording it in the store."""
        self._record_fault = record_fault
        self._once = LogOnce()

    def refused(self, swap: Swap, error: SwapRefusedError) -> None:
        """A swap was refused; nothing was touched."""
        self.counts["refused"] += 1
        self.last = {"refused": str(error)}
        if swap.offered and swap.life.version is not None and self.report is not None:
            self.report(swap.life.version, "refused", str(error))
        self._once(str(error), "%s", error)

    def judged(self, version: int, verdict: CanaryVerdict, reason: str) -> None:
        """Version `version` was promoted or rolled back."""
        self.counts[verdict] += 1
        self.last |= {"verdict": verdict, "reason": reason}
        if verdict == "promoted":
            self._once(
                f"{version} promoted",
                "rollspec: drafter version %d is promoted: %s.",
                version,
                reason,
                level=logging.INFO,
            )
        else:
            self._once(f"{version} rolled back", "rollspec: drafter version %d is rolled back: %s.", version, reason)

    def keep(self, store: Path | None, version: int, verdict: CanaryVerdict, reason: str, canary: bool) -> None:
        """Pass the verdict on, or record it in the store that the version is from.

        `canary`: False where it was promoted on another engine's word; that adds no line to what was said of it.
        """
        if self.report is not None:
            self.report(version, verdict, reason)
        elif store is not None:
            versions = Versions(store)
            if not canary and any(e.version == version for e in versions.events()):
                return  # it had its verdict, from another engine or before a restart
            try:
                versions.record(version, verdict, reason)
            except DrafterError as e:
                problem = str(e).removeprefix("drafter-online: ")
                self._record_fault(f"drafter versions: {problem}")
                self._once("record", "rollspec: %s", problem)
