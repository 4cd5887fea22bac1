"""A version from one place to many replicas, three ways.

    star    the trainer sends it to one after another over its own link
    store   replicas read it from a store whose links are shared: a parallel file system, an object store in the network
    tree    each replica that has it passes it on, one at a time: what an object store of the cluster does

With all replicas asking at once: N·S/B, ceil(N/k)·S/b with k = A/b readers at full speed, and ceil(log2(N+1))·S/b.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from benchmarks.scale.events import Clock, Queue

Kind = Literal["star", "store", "tree"]
KINDS: tuple[Kind, ...] = ("star", "store", "tree")


class Spread:
    """Copies of versions on their way. Seconds are those of one copy over one link.

    Args:
        clock: of the simulation.
        kind: see above.
        seconds: of a copy at the speed of a replica's own link.
        readers: of a store, copies at full speed at the same time.
        sender: of a star, seconds of a copy over the trainer's link.
    """

    def __init__(self, clock: Clock, kind: Kind, seconds: float, readers: int, sender: float) -> None:
        self.clock = clock
        self.kind = kind
        self.seconds = seconds
        self.sender = sender
        self.copies = 0
        self._shared = Queue(clock, 1 if kind == "star" else readers)
        self._trees: dict[int, Queue] = {}  # a version's holders

    def fetch(self, version: int, done: Callable[[], None]) -> None:
        """A replica wants `version`; `done` when it has it."""
        self.copies += 1
        if self.kind == "star":
            self._shared.put(self.sender, done)
        elif self.kind == "store":
            self._shared.put(self.seconds, done)
        else:
            holders = self._trees.setdefault(version, Queue(self.clock))

            def arrived() -> None:
                holders.add()
                done()

            holders.put(self.seconds, arrived)

    def left(self, version: int) -> None:
        """A replica that held `version` is gone, and its copy with it. One holder is always there: the store."""
        holders = self._trees.get(version)
        if holders is not None and holders.free > 1:
            holders.free -= 1
