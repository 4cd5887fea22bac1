"""Training of the worker's draft head as its engine sees it, in idle time (`idle.py`) or another process
(`dedicated.py`).

Whatever fails in it costs the training, not the engine: the fault is recorded and logged once.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

import torch

from rollspec.head.draft_head import DraftHead
from rollspec.log_once import LogOnce

logger = logging.getLogger("rollspec")

TICK_SECONDS = 0.05
"""Between two looks of the training's thread."""


class HeadTraining:
    """One worker's part in it: a thread, which a subclass starts when it is ready.

    Attributes:
        updating: the policy's trainer uses the machine.
        error: why the training has ended.
        resumed: optimiser steps and tokens that an earlier run made.
        parts: the target's own tensors where they were put together from several ranks.
    """

    ends_with = "drafter training", "rollspec: the drafter is not trained from now on (%s)."
    """The name under which a fault that ends it is counted, and its log message."""

    def __init__(self, head: DraftHead) -> None:
        assert head.capture is not None  # on the rank that drafts
        self.head, self.capture = head, head.capture
        self.config = head.bridge.config.drafter
        self.updating = False
        self.error: str | None = None
        self.resumed = (0, 0)
        self.parts: dict[str, torch.Tensor] | None = None
        self._rewards: deque[tuple[str, float]] = deque(maxlen=1 << 16)
        self._hung = False
        self._log_once = LogOnce()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollspec-drafter", daemon=True)

    # ---- what the engine's thread says ------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """The engine computes."""

    def step_ended(self) -> None:
        """The engine has computed."""

    def observed(self, sampled: list[list[int]]) -> None:
        """What the requests of a step emitted."""

    def reward(self, items: list[tuple[str, str, float]]) -> None:
        """Rewards by (prompt key, response key), for the samples of these responses."""
        self._rewards.extend((f"{prompt}:{response}", value) for prompt, response, value in items)

    def stop(self) -> None:
        """End the thread; it is a daemon, so nothing need wait for it."""
        self._stop.set()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except Exception as e:
            self.error = f"{type(e).__name__}: {e}"
            self.capture.paused = True
            kind, message = self.ends_with
            self.head.bridge.count(f"{kind}: {self.error}")
            logger.warning(message, self.error, exc_info=e)
        finally:
            self._close()

    def _work(self) -> None:
        """Until `_stop` is set."""
        raise NotImplementedError

    def _close(self) -> None:
        """The thread ends."""

    def _fault(self, what: str, cause: str) -> None:
        """`what` failed (saving, resuming, publishing): training continues without."""
        self.head.bridge.count(f"drafter training, {what}: {cause}")
        self._log_once(what, "rollspec: %s the drafter's training failed and is left out (%s).", what, cause)

    def _watch(self, hangs: str | None, where: str = "") -> None:
        """Log and count a step that hangs, once: it cannot do so itself. `hangs`: why it is taken for one."""
        if hangs is not None and not self._hung:
            self.head.bridge.count("drafter training: a step hangs")
            logger.warning("rollspec: %s%s; the engine keeps the drafter it has.", hangs, where)
        self._hung = hangs is not None

    def _target(self) -> dict[str, torch.Tensor] | None:
        """The target's parts without the rows that vLLM pads for its shards; None where they are not to be had now: all
        ranks must give them, which they do with the next weights, or vLLM is loading new ones.
        """
        if self.parts is None and not self.head.ranks.alone:
            return None
        parts = self.parts if self.parts is not None else self.head.target_parts()
        if any(w.is_meta for w in parts.values()):  # its weight transfer puts a layer's there until all have come
            return None
        vocabulary = int(self.head.runner.model_config.get_vocab_size())
        return {n: w if n == "norm" else w[:vocabulary] for n, w in parts.items()}
