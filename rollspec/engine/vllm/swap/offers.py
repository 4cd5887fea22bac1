"""The one place for the version that another thread offers: the newest takes the place of the one before."""

from __future__ import annotations

import threading

from drafter_online.lifecycle import Event
from rollspec.engine.vllm.swap.swap import Swap


class Offers:
    """Filled by any thread, emptied by the engine's at the start of a step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offer: Swap | None = None

    @property
    def waiting(self) -> Swap | None:
        """The offer that no step has taken up."""
        return self._offer

    def put(self, swap: Swap) -> None:
        """Offer a version; one that waits is superseded."""
        with self._lock:
            before, self._offer = self._offer, swap
            if before is not None:
                before.life.apply(Event.SUPERSEDE)

    def take(self) -> Swap | None:
        """The offer, for the step that begins."""
        with self._lock:
            swap, self._offer = self._offer, None
        return swap

    def withdraw(self) -> bool:
        """Take the offer back; False where there is none."""
        swap = self.take()
        if swap is not None:
            swap.life.apply(Event.WITHDRAW)
        return swap is not None
