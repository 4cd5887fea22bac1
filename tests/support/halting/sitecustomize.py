"""Halts a job at a point that a test has armed, in the process that comes there, until the test lets it go on.

Python imports this module in every process that has its folder on PYTHONPATH. Points are files in the folder that
ROLLSPEC_TEST_HALT names: `<point>.armed` is taken away by who halts and writes `<point>.halted`; `<point>.on` ends it.
"""

import os
from pathlib import Path

LONGEST = 120.0  # seconds of a halt that a test forgot


def halt(point):  # type: ignore[no-untyped-def]
    """Where the test has armed this point."""
    import time

    at = Path(os.environ["ROLLSPEC_TEST_HALT"], point)
    try:
        at.with_suffix(".armed").unlink()
    except FileNotFoundError:
        return
    at.with_suffix(".halted").write_text(str(os.getpid()))
    end = time.monotonic() + LONGEST
    while not at.with_suffix(".on").exists() and time.monotonic() < end:
        time.sleep(0.02)


def sync(module):  # type: ignore[no-untyped-def]
    """In the trainer's worker: when an engine has the first of the policy's new weights."""
    sender, send = module.BucketedWeightSender, module.BucketedWeightSender.async_send_weights

    async def halted(weights):  # type: ignore[no-untyped-def]
        from verl.workers.rollout.utils import ensure_async_iterator

        i = 0
        async for each in ensure_async_iterator(weights):
            if i == 1:
                halt("sync")
            i += 1
            yield each

    async def sends(self, weights, *args, **kwargs):  # type: ignore[no-untyped-def]
        await send(self, halted(weights), *args, **kwargs)

    sender.async_send_weights = sends


def swap(module):  # type: ignore[no-untyped-def]
    """In the engine: when the first tensor of the running draft head is the new version's, and no other."""
    exchange = module.DraftWeights.exchange

    def exchanges(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        for mine, new in self._pairs[:1]:
            mine.data.copy_(new.data)
        halt("swap")
        exchange(self, *args, **kwargs)

    module.DraftWeights.exchange = exchanges


def save(module):  # type: ignore[no-untyped-def]
    """In the head's trainer: when its part of the job's checkpoint is written, and not in its place yet."""
    synced = module.sync_tree

    def syncs(*args):  # type: ignore[no-untyped-def]
        synced(*args)
        halt("save")

    module.sync_tree = syncs


if "ROLLSPEC_TEST_HALT" in os.environ:
    from rollspec.engine.vllm.hooks.base import on_import

    on_import("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer", sync)
    on_import("rollspec.engine.vllm.draft_weights", swap)
    on_import("drafter_online.job_checkpoint", save)
