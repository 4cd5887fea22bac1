"""Drives a version's life in one engine, from step to step.

    stage    read, verified and loaded into the second copy of the drafter, on a thread, while the engine steps
    swap     copied into the first one's own storage (CUDA graphs hold its addresses), at the start of a step
    canary   the next drafts are compared with what the old weights reached; then they are promoted or rolled back

Requests, the target's KV and the batch are not touched. Where the weights moved much, the drafter's KV is computed anew
from the hidden states that are kept, a part per step. Ranks swap at the first step at which all are ready; what one
refuses, all refuse. While the engine sleeps its weights have no memory: a swap waits for the first step.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter_online.canary import Canary, CanaryVerdict
from drafter_online.errors import DrafterError
from drafter_online.versions import Verdict, Versions
from rollspec.head.draft_head import DraftHead
from rollspec.head.ranks import NOTHING, Note, Ranks
from rollspec.head.swap.deployment import Deployment, Staged
from rollspec.head.swap.payload import LoadedVersion, SwapRefusedError, not_loaded, unprepared
from rollspec.log_once import LogOnce

CANARY_RATIO = 0.9
"""New weights are rolled back below this part of what the old ones had accepted; 1 leaves equals to chance."""


@dataclass(slots=True, eq=False)
class Swap:
    """Weights that were asked for; `payload`: see `Swapper.request`. `offered`: by another thread, not by hand.

        offered ──▶ staging ──▶ staged ──▶ canary ──▶ promoted, or rolled back
           └─▶ deferred ▲         └── without a canary ──▶ promoted

    Until a step takes it up, a newer offer takes its place.
    """

    payload: Mapping[str, Any]
    offered: bool = False
    staged: Staged | None = None
    error: SwapRefusedError | None = None  # why it could not be staged, on this rank


class Swapper:
    """Swaps for one worker's drafter. Everything but staging runs on the worker's own thread, between steps.

    Args:
        head: whose weights. weights: those that run, and a second copy (engine/vllm/draft_weights.py, `DraftWeights`).
        ranks: of its tensor-parallel group, which all make the same transitions at the same step.
        canary_drafts: scored drafts until a canary's verdict; 0 promotes everything at once.
    """

    def __init__(self, head: DraftHead, weights: Any, ranks: Ranks | None = None, canary_drafts: int = 64) -> None:
        self.head = head
        self.ranks = ranks or Ranks()
        self.deployment = Deployment(head, weights)
        self.canary: Canary | None = None
        self.last: dict[str, Any] = {}
        """What became of the last swap; a new object for each."""
        self.report: Callable[[int, Verdict, str], None] | None = None
        """Called with (version, verdict, reason) instead of recording it in the version's store."""
        self._verdicts = {"promoted": 0, "rolled_back": 0, "refused": 0}
        self._log_once = LogOnce()
        self._canary_drafts = canary_drafts
        self._swap: Swap | None = None  # being staged, staged, or on canary
        self._verdict: CanaryVerdict | None = None  # of the canary; it takes effect when all ranks know it
        self._offer: Swap | None = None  # of another thread; no step has taken it up
        self._lock = threading.Lock()  # of the offer
        self._deferred: Swap | None = None  # asked for while the engine slept
        self._unverified = False

    @property
    def version(self) -> int:
        """The version that runs; 0: what the engine was started with."""
        return self.deployment.running.number

    @property
    def counts(self) -> dict[str, int]:
        """Verdicts by kind, and `resent`: times that lost weights were put back."""
        return {**self._verdicts, "resent": self.deployment.resent}

    @property
    def busy(self) -> bool:
        """Whether a swap is on its way or on canary."""
        return any(s is not None for s in (self._swap, self._deferred, self._offer))

    def info(self) -> dict[str, Any]:
        """What runs, and what became of the last swap."""
        state = "settled" if self._deferred is None else "deferred"
        if self._swap is not None:
            state = "canary" if self.canary is not None else "staging" if self._swap.staged is None else "staged"
        return {
            "version": self.version, "state": state, **self.counts, "last": self.last,
            "started_with": self.head.draft_folder,
        }  # fmt: skip

    # ---- asking for a swap ------------------------------------------------------------------------------------------

    def request(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Stage new weights, and swap them in when they are ready; returns what was done.

        Args:
            payload: `dir`, a version's folder or a head's; `version`: its number where the folder does not say;
                `canary`: False promotes at once; `back`: True allows an older version, and without `dir` the weights
                that the engine was started with; `wait`: True returns after the swap, with its times, else it happens
                at the start of a later step.

        Raises:
            SwapRefusedError: in one sentence, why nothing was touched.
        """
        return self._begin(Swap(dict(payload)), wait=bool(payload.get("wait")))

    def offer(self, folder: Path, canary: bool = True) -> None:
        """Have a version staged when the next step begins. For other threads. Arguments as in `request`.

        It takes the place of an offer that was not swapped in yet: one that no step has taken up, and once also one
        that is staged. Once only, or short bursts of steps with an offer between any two would never swap.
        """
        swap = Swap({"dir": str(folder), "canary": canary}, offered=True)
        with self._lock:
            self._offer = swap

    def wake(self) -> None:
        """The engine is awake again: verify the weights at the next step, because its memory may hold anything."""
        self._unverified = True

    # ---- at every step ----------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """A step begins: swap in what is ready."""
        if self._unverified:
            self._unverified = False
            self.verify()
        asked, self._deferred = self._deferred, None
        if asked is None and self.ranks.alone:
            asked = self._accept()
        if asked is not None:
            self._begin_or_refuse(asked)
        elif self._swap is not None and self.canary is None:
            with contextlib.suppress(SwapRefusedError):  # counted and logged
                self._settle(self._swap)

    def note(self) -> Note:
        """What the other ranks must learn; on the first rank of several."""
        if self.ranks.alone:
            return NOTHING
        if self._verdict is not None:
            return Note(self._verdict)
        offer = self._accept()
        return NOTHING if offer is None else Note("swap", json.dumps(offer.payload))

    def apply(self, note: Note) -> None:
        """Do what the first rank says; on every rank of several, at the same step."""
        if note.kind == "swap":
            self._begin_or_refuse(Swap(json.loads(note.text), offered=True))
        elif note.kind:
            self._conclude(note.kind)

    def observe(self, accepted: int, length: int) -> None:
        """A draft of the new weights was scored: `accepted` of `length` positions were."""
        if self.canary is None or self._verdict is not None:
            return
        self._verdict = self.canary.observe(accepted, length)
        if self._verdict is not None and self.ranks.alone:
            self._conclude(self._verdict)

    def verify(self) -> bool:
        """Whether the drafter still has its weights; if not (a policy sync, a sleep), they are put back."""
        if self.head.asleep:
            self._unverified = True  # verified when the engine is awake
            return True
        # Ranks compute the drafter's KV anew together, so what one has lost all put back.
        if self.ranks.least(int(self.deployment.weights.intact())):
            return True
        self.deployment.wait()
        self.deployment.put_back(None if self._swap is None else self._swap.staged)
        return False

    # ---- one version's way ------------------------------------------------------------------------------------------

    def _accept(self) -> Swap | None:
        """The offer, if it can be staged now."""
        if self._swap is not None:
            return None
        with self._lock:
            swap, self._offer = self._offer, None
        return swap

    def _begin(self, swap: Swap, wait: bool = False) -> dict[str, Any]:
        """Begin to stage; with `wait`, swap as well.

        Raises:
            SwapRefusedError: another one is in the way; or, with `wait`, as `_settle`.
        """
        if self.head.asleep:
            self._deferred = swap
            return {"deferred": True, "version": self.version}
        if self.canary is not None:
            raise SwapRefusedError(
                f"rollspec: version {self.canary.version} has been running for {self.canary.seen} of its "
                f"{self.canary.drafts} canary drafts; try again after its verdict."
            )
        if self._swap is not None:
            raise SwapRefusedError("rollspec: a swap is being prepared; try again when it is done.")
        self.deployment.wait()
        self._swap = swap
        try:
            self.deployment.weights.build()
        except Exception as e:  # on one rank perhaps: all must learn of it
            swap.error = unprepared(e)
        if wait:
            self._stage(swap)
            return self._settle(swap) or {}
        self.deployment.load_later(self._stage, swap)
        return {"staging": True, "version": self.version}

    def _stage(self, swap: Swap) -> None:
        """Stage, or note why not. Never raises."""
        if swap.error is not None:
            return
        try:
            swap.staged = self.deployment.stage(swap.payload)
        except Exception as e:
            swap.error = e if isinstance(e, SwapRefusedError) else unprepared(e)

    def _begin_or_refuse(self, swap: Swap) -> None:
        try:
            self._begin(swap)
        except SwapRefusedError as e:
            self._refuse(swap, e)

    def _settle(self, swap: Swap) -> dict[str, Any] | None:
        """Swap if all ranks have staged; None while one has not.

        Raises:
            SwapRefusedError: one of them refused; it is counted.
        """
        agreed = self.ranks.least(1 if swap.error is not None else 0 if swap.staged is None else 2)
        if agreed == 0:
            return None
        if agreed == 1:
            error = swap.error or not_loaded("another rank refused them")
            self._refuse(swap, error)
            raise error
        return self._swap_in(swap)

    def _refuse(self, swap: Swap, error: SwapRefusedError) -> None:
        if self._swap is swap:
            self._swap = None
        self._verdicts["refused"] += 1
        self.last = {"refused": str(error)}
        number = Path(str(swap.payload.get("dir", ""))).name  # of a published version
        if swap.offered and number.isdigit() and self.report is not None:
            self.report(int(number), "refused", str(error))
        self._log_once(str(error), "%s", error)

    def _swap_in(self, swap: Swap) -> dict[str, Any]:
        begin = time.perf_counter()
        staged = swap.staged
        assert staged is not None
        rates = self.head.acceptance.measured  # of the weights before
        try:
            reread = self.deployment.swap_in(staged)
        except BaseException:
            self._swap = None  # it is not tried again at every step
            raise
        if self._canary_drafts and swap.payload.get("canary", True):
            self.canary = Canary(staged.version.number, rates, self._canary_drafts, CANARY_RATIO)
        self.head.engine.canary_runs = self.canary is not None  # its drafts are scored more often
        pause = time.perf_counter() - begin
        self.deployment.pauses.append(pause)
        self.last = {
            "version": staged.version.number,
            "pause_ms": 1e3 * pause,
            "stage_ms": 1e3 * staged.seconds,
            "change": staged.change,
            "reread": reread,
        }
        if self.canary is not None:
            self.deployment.keep_before()
        else:
            self._conclude("promoted")
        return dict(self.last)

    def _conclude(self, verdict: CanaryVerdict) -> None:
        """The canary is over, or none was needed: the weights are promoted, or those before them come back."""
        assert self._swap is not None
        self._swap = None
        canary, self.canary, self._verdict = self.canary, None, None
        self.head.engine.canary_runs = False
        ran = self.deployment.running
        if verdict == "promoted":
            self.deployment.promote()
        else:
            self.deployment.roll_back()
        reason = "without a canary" if canary is None else canary.reason
        self._verdicts[verdict] += 1
        self.last |= {"verdict": verdict, "reason": reason}
        level, message = logging.INFO, "rollspec: drafter version %d is promoted: %s."
        if verdict == "rolled_back":
            level, message = logging.WARNING, "rollspec: drafter version %d is rolled back: %s."
        self._log_once(f"{ran.number} {verdict}", message, ran.number, reason, level=level)
        self._record(ran, verdict, reason, canary is not None)

    def _record(self, ran: LoadedVersion, verdict: CanaryVerdict, reason: str, canary: bool) -> None:
        """Pass the verdict on, or record it in the store that the version is from."""
        store = ran.store if self.ranks.first else None
        if self.report is not None:
            self.report(ran.number, verdict, reason)
        elif store is not None:
            versions = Versions(store)
            if not canary and any(e.version == ran.number for e in versions.events()):
                return  # promoted before a restart: logged already
            try:
                versions.record(ran.number, verdict, reason)
            except DrafterError as e:
                problem = e.plain
                self.head.bridge.count(f"drafter versions: {problem}")
                self._log_once("record", "rollspec: %s", problem)
