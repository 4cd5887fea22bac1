"""verl's sampler for its asynchronous trainers, by its own hook: it looks for finished rollouts without two seconds'
pause, in which a small policy finishes those of the next step too, so that none would be aborted for new weights.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync


class QuickSampler(ReplayBufferAsync):
    """Looks every 20 ms."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(poll_interval=0.02, **kwargs)
