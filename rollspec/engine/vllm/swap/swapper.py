"""Drives a version's life (`drafter_online.lifecycle`) in one engine, from step to step.

    stage    read, verified and loaded into the second copy of the drafter, on a thread, while the engine steps
    swap     copied into the first one's own storage (CUDA graphs hold its addresses), at the start of a step
    canary   the next drafts are compared with what the old weights reached; then they are promoted or rolled back

Requests, the target's KV and the batch are not touched. The drafter's own KV is the old weights'; where they moved
much, it is computed anew from the hidden states that are kept (`SwapOwner.rewind`), a part per step.

Tensor-parallel ranks stage their parts each for itself and swap at the first step at which all are ready; a version
that one rank refuses is refused by all (`Ranks`). While the engine sleeps its weights have no memory: a swap that is
asked for then is deferred to the first step, and what woke up is verified before that step.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafter_online.canary import Canary
from drafter_online.lifecycle import Event
from rollspec.engine.vllm.ranks import NOTHING, Note, Ranks
from rollspec.engine.vllm.swap.deployment import Deployment
from rollspec.engine.vllm.swap.offers import Offers
from rollspec.engine.vllm.swap.owner import SwapOwner
from rollspec.engine.vllm.swap.payload import SwapRefusedError
from rollspec.engine.vllm.swap.slot import Slot
from rollspec.engine.vllm.swap.swap import Swap
from rollspec.engine.vllm.swap.verdicts import Verdicts


class Swapper:
    """Swaps for one worker's drafter. Everything but staging runs on the worker's own thread, between steps.

    Args:
        owner: the engine.
        ranks: of its tensor-parallel group.
        canary_drafts: scored drafts until a canary's verdict; 0 promotes everything at once.
    """

    def __init__(self, owner: SwapOwner, ranks: Ranks | None = None, canary_drafts: int = 64) -> None:
        self.owner = owner
        self.ranks = ranks or Ranks()
        self._slot = Slot(owner, canary_drafts)
        self._offers = Offers()
        self._announced: Swap | None = None  # the offer that the other ranks are being told of
        self._deferred: Swap | None = None  # asked for while the engine slept
        self._woke = False

    @property
    def deployment(self) -> Deployment:
        """What runs."""
        return self._slot.deployment

    @property
    def verdicts(self) -> Verdicts:
        """What became of versions."""
        return self._slot.verdicts

    @property
    def canary(self) -> Canary | None:
        """The canary that runs."""
        return self._slot.canary

    @property
    def version(self) -> int:
        """The version that runs; 0: what the engine was started with."""
        return self.deployment.running.version

    @property
    def since(self) -> int:
        """Newest policy version that the running weights were trained on, or under which they came."""
        return self.deployment.running.since

    @property
    def counts(self) -> dict[str, int]:
        """Verdicts by kind, and `resent`: times that lost weights were put back."""
        return {**self.verdicts.counts, "resent": self.deployment.resent}

    @property
    def last(self) -> dict[str, Any]:
        """What became of the last swap; a new object for each."""
        return self.verdicts.last

    @property
    def busy(self) -> bool:
        """Whether a swap is on its way or on canary."""
        return any(s is not None for s in (self._slot.swap, self._deferred, self._offers.waiting))

    @property
    def open(self) -> bool:
        """Whether a newer version may be offered: none is on canary, and no offer that needs none is in the way."""
        waiting = self._offers.waiting
        return self.canary is None and self._deferred is None and (waiting is None or waiting.canary)

    def info(self) -> dict[str, Any]:
        """What runs, and what became of the last swap."""
        swap = self._deferred if self._slot.swap is None else self._slot.swap
        state = "settled" if swap is None else swap.life.state.value
        return {
            "version": self.version, "state": state, **self.counts, "last": self.last,
            "started_with": self.owner.draft_folder,
        }  # fmt: skip

    # ---- asking for a swap ------------------------------------------------------------------------------------------

    def request(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Stage new weights, and swap them in when they are ready.

        Args:
            payload: `dir`, a version's folder or a head's; or `tensors`, a state dict in the checkpoint's names (in
                this process only). `version`: its number where the folder does not say; `canary`: False promotes at
                once; `back`: True allows an older version, and without `dir` the weights that the engine was started
                with; `wait`: True returns after the swap, else it happens at the start of a later step.

        Returns:
            what was done: `version`, and with `wait` also `pause_ms`, `stage_ms`, `change`, `reread` (positions);
            `deferred` where the engine sleeps, and the swap waits until it is awake.

        Raises:
            SwapRefusedError: in one sentence, why nothing was touched.
        """
        return self._begin(Swap(dict(payload)))

    def offer(self, folder: Path | None, canary: bool = True, back: bool = False) -> None:
        """Have a version staged when the next step begins. For other threads. Arguments as in `request`.

        It takes the place of an offer that was not swapped in yet: one that no step has taken up, and once also one
        that is staged. Once only, or short bursts of steps with an offer between any two would never swap.
        """
        self._offers.put(Swap({"dir": str(folder or ""), "canary": canary, "back": back}, offered=True))

    def withdraw(self) -> bool:
        """Take an offer back; False where there is none, or a step has taken it up. For other threads."""
        return self._offers.withdraw()

    def prepare(self) -> None:
        """Make the second copy of the drafter now rather than at the first swap."""
        self.deployment.weights.build()

    def wake(self) -> None:
        """The engine woke up: what its memory holds is not known before it was verified."""
        self._woke = True

    # ---- at every step ----------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """A step begins: swap in what is ready."""
        if self._woke:
            self._woke = False
            self.verify()
        asked, self._deferred = self._deferred, None
        if asked is None and self.ranks.alone:
            asked = self._accept()
        if asked is not None:
            self._begin_or_refuse(asked)
        elif self._slot.swap is not None and self._slot.swap.preparing:
            with contextlib.suppress(SwapRefusedError):  # counted and logged
                self._slot.settle(self.ranks)

    def note(self) -> Note:
        """What the other ranks must be told; on the first rank of several."""
        if self.ranks.alone:
            return NOTHING
        if self._slot.verdict is not None:
            return Note(self._slot.verdict)
        self._announced = self._accept()
        return NOTHING if self._announced is None else Note("swap", json.dumps(self._announced.payload))

    def apply(self, note: Note) -> None:
        """Do what the first rank says; on every rank of several, at the same step."""
        if note.kind == "swap":
            announced, self._announced = self._announced, None
            self._begin_or_refuse(announced or Swap(json.loads(note.text)))
        elif note.kind:
            self._slot.conclude(note.kind, self.ranks)

    def observe(self, hits: int, length: int) -> None:
        """A draft of the new weights was scored: `hits` of `length` positions were right."""
        self._slot.observe(hits, length, self.ranks)

    def verify(self) -> bool:
        """Whether the drafter still has its weights; if not (a policy sync, a sleep), they are put back."""
        if self.owner.asleep:
            self._woke = True  # looked at when there is something to look at
            return True
        # Ranks compute the drafter's KV anew together, so what one has lost all put back.
        if self.ranks.least(int(self.deployment.weights.intact())):
            return True
        self._slot.join()
        self.deployment.put_back(None if self._slot.swap is None else self._slot.swap.staged)
        return False

    def _accept(self) -> Swap | None:
        """The offer, if it can be staged now."""
        replaces = self._slot.swap is not None
        # Ranks swap what is staged first: none of them knows that all have staged.
        if replaces and not (self.ranks.alone and self._slot.gives_way):
            return None
        swap = self._offers.take()
        if swap is not None:
            swap.replaces = replaces
        return swap

    def _begin(self, swap: Swap) -> dict[str, Any]:
        if not self.owner.asleep:
            return self._slot.stage(swap, self.ranks)
        if self._deferred is not None:
            self._deferred.life.apply(Event.SUPERSEDE)
        swap.life.apply(Event.DEFER)
        self._deferred = swap
        return {"deferred": True, "version": self.version}

    def _begin_or_refuse(self, swap: Swap) -> None:
        swap.wait = False  # a step does not
        try:
            self._begin(swap)
        except SwapRefusedError as e:
            self._slot.refuse(swap, e)
