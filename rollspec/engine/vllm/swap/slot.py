"""The one place for a version that is being staged or on canary in an engine, and its transitions.

Everything but staging runs on the worker's own thread. All ranks of a tensor-parallel group make the same transitions
at the same step: what each finds for itself (is my part staged?) is agreed by `Ranks.least`.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from drafter_online.canary import Canary, CanaryVerdict
from drafter_online.lifecycle import Event, State
from rollspec.engine.vllm.ranks import Ranks
from rollspec.engine.vllm.swap.deployment import Deployment
from rollspec.engine.vllm.swap.owner import SwapOwner
from rollspec.engine.vllm.swap.payload import SwapRefusedError, unprepared
from rollspec.engine.vllm.swap.swap import Swap
from rollspec.engine.vllm.swap.verdicts import Verdicts

CANARY_RATIO = 0.9
"""New weights are rolled back below this part of the old ones' hits; at 1 chance would decide between equals."""


class Slot:
    """One worker's. Arguments as of `Swapper`."""

    def __init__(self, owner: SwapOwner, canary_drafts: int) -> None:
        self.owner = owner
        self.deployment = Deployment(owner)
        self.verdicts = Verdicts(owner.record_fault)
        self.swap: Swap | None = None
        self.canary: Canary | None = None
        self.verdict: CanaryVerdict | None = None  # of the canary; it takes effect when all ranks know it
        self._drafts = canary_drafts

    @property
    def gives_way(self) -> bool:
        """Whether a newer offer may take the place of what is in it."""
        if self.swap is not None:
            self.swap.notice()
        return self.swap is None or (self.swap.replaceable and self.swap.life.state is State.STAGED)

    def stage(self, swap: Swap, ranks: Ranks) -> dict[str, Any]:
        """Begin to stage; with `swap.wait`, swap as well.

        Raises:
            SwapRefusedError: the place is taken; or, with `swap.wait`, as `settle`.
        """
        if self.canary is not None:
            raise SwapRefusedError(
                f"rollspec: version {self.canary.version} has been running for {self.canary.seen} of its "
                f"{self.canary.drafts} canary drafts; try again after its verdict."
            )
        if self.swap is not None:
            if not swap.replaces:
                raise SwapRefusedError("rollspec: a swap is being prepared; try again when it is done.")
            self.swap.life.apply(Event.SUPERSEDE)
        self.join()
        self.swap = swap
        swap.life.apply(Event.STAGE)
        try:
            self.deployment.weights.build()
        except Exception as e:  # on one rank perhaps: all must learn of it
            swap.error = unprepared(e)
        if swap.wait:
            self.deployment.stage(swap)
            return self.settle(ranks) or {}
        swap.thread = threading.Thread(target=self.deployment.stage, args=(swap,), name="rollspec-stage", daemon=True)
        swap.thread.start()
        return {"staging": True, "version": self.deployment.running.version}

    def settle(self, ranks: Ranks) -> dict[str, Any] | None:
        """Swap if all ranks have staged; None while one has not.

        Raises:
            SwapRefusedError: one of them refused; it is counted.
        """
        swap = self.swap
        assert swap is not None
        done = swap.done
        swap.notice()
        agreed = ranks.least(0 if not done else 1 if swap.error is not None else 2)
        if agreed == 0:
            return None
        if agreed == 1:
            error = swap.error or SwapRefusedError(
                "rollspec: drafter weights were not loaded: another rank refused them."
            )
            self.refuse(swap, error)
            raise error
        return self._swap_in(swap, ranks)

    def refuse(self, swap: Swap, error: SwapRefusedError) -> None:
        """A version, in this place or on its way to it, is refused."""
        swap.life.apply(Event.REFUSE)
        if self.swap is swap:
            self.swap = None
        self.verdicts.refused(swap, error)

    def _swap_in(self, swap: Swap, ranks: Ranks) -> dict[str, Any]:
        begin = time.perf_counter()
        staged = swap.staged
        assert staged is not None
        rates = self.owner.acceptance.measured  # of the weights before
        try:
            reread = self.deployment.swap_in(staged)
        except BaseException:
            self.swap = None  # it is not tried again at every step
            raise
        if swap.canary and self._drafts:
            swap.life.apply(Event.SWAP)
            self.canary = Canary(staged.given.version, rates, self._drafts, CANARY_RATIO)
        self.owner.canary(self.canary is not None)
        pause = time.perf_counter() - begin
        self.deployment.pauses.append(pause)
        self.verdicts.last = {
            "version": staged.given.version,
            "pause_ms": 1e3 * pause,
            "stage_ms": 1e3 * staged.seconds,
            "change": staged.change,
            "reread": reread,
        }
        if self.canary is not None:
            self.deployment.keep_before()
        else:
            self.conclude("promoted", ranks)
        return dict(self.verdicts.last)

    def observe(self, hits: int, length: int, ranks: Ranks) -> None:
        """A draft of the version on canary was scored."""
        if self.canary is None or self.verdict is not None:
            return
        self.verdict = self.canary.observe(hits, length)
        if self.verdict is not None and ranks.alone:
            self.conclude(self.verdict, ranks)

    def conclude(self, verdict: CanaryVerdict, ranks: Ranks) -> None:
        """The canary is over, or none was needed: the weights are promoted, or those before them come back."""
        swap, self.swap = self.swap, None
        canary, self.canary, self.verdict = self.canary, None, None
        assert swap is not None
        swap.life.judge(verdict)
        self.owner.canary(False)
        ran = self.deployment.running
        if verdict == "promoted":
            self.deployment.promote()
        else:
            self.deployment.roll_back()
        reason = "without a canary" if canary is None else canary.reason
        self.verdicts.judged(ran.version, verdict, reason)
        self.verdicts.keep(ran.store if ranks.first else None, ran.version, verdict, reason, canary is not None)

    def join(self) -> None:
        """Wait for what is being loaded into the second copy."""
        self.deployment.weights.wait()
        if self.swap is not None and self.swap.thread is not None:
            self.swap.thread.join()
