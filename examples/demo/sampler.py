"""verl's sampler with one order of responses, by verl's own hook (`trainer.v1.sampler.custom_sampler`)."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class ByLength(ReplayBuffer):  # type: ignore[misc]
    """Gives the trainer a step's responses by length, shortest first.

    verl gives them in the order in which they ended. Without drafts that is nearly this one, with drafts it is not; and
    on a CPU a pass over neighbours of different length takes longer, so the two runs would not train alike.
    """

    def _materialize_batch(self, *args: Any) -> Any:
        batch = super()._materialize_batch(*args)
        order = sorted(zip(batch.keys, batch.tags, strict=True), key=lambda item: (item[1]["response_len"], item[0]))
        batch.keys, batch.tags = [key for key, _ in order], [tag for _, tag in order]
        return batch
