"""What training sees of the worker's draft head, wherever the trainer runs: in idle time (`online.py`) or in a daemon
(`dedicated.py`). `head.py` owns both; they do not know it.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

from rollspec.engine.vllm.bridge import Bridge
from rollspec.engine.vllm.capture import Capture
from rollspec.engine.vllm.domains import Domains
from rollspec.engine.vllm.ranks import Ranks
from rollspec.engine.vllm.swap import Swapper


class TrainedHead(Protocol):
    """See `DraftHead`, whose attributes these are."""

    bridge: Bridge
    runner: Any
    ranks: Ranks
    drafter: Any
    layers: tuple[int, ...]
    asleep: bool
    reading: threading.Lock
    swapper: Swapper | None
    capture: Capture | None
    domains: Domains | None

    def target_parts(self) -> dict[str, torch.Tensor]:
        """The target's embedding, last norm and LM head; all ranks must call it."""
