"""`gloo`: a checkpoint engine for CPU, the stand-in for NCCL (verl/checkpoint_engine/nccl_checkpoint_engine.py).

verl's `separate_async` trainer refuses the naive engine, and the engines that verl brings need an accelerator or RDMA.

    actor_rollout_ref.rollout.checkpoint_engine.backend=gloo
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=rollspec_verl_cpu.gloo_engine

    actor 0 ── bucket, bucket, ... ──▶ rollout workers       a broadcast each; actors 1.. take no part
       └─ a TCP store: where they meet, and what is in each bucket
"""

from __future__ import annotations

import asyncio
import datetime
import pickle
from collections.abc import AsyncGenerator, Generator
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    TensorMeta,
    merge_weight_chunks,
    split_weight_chunks,
)

HOST = "127.0.0.1"
"""The whole job is on one machine: there is no other where verl runs on CPU."""

TIMEOUT = datetime.timedelta(seconds=300)
"""Bound on every wait for another process."""

Weights = Generator[tuple[str, torch.Tensor], None, None]


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Broadcasts weights from actor 0. The group is made anew for every sync, so replicas may come and go.

    Args:
        bucket_size: bytes that are sent at once.
        is_master: True in actor 0.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.rank = -1
        self._store: Any = None
        self._group: Any = None

    def prepare(self) -> int | None:
        """The port where the workers meet; None from all but the master."""
        if not self.is_master:
            return None
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return int(self._store.port)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[int | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of `init_process_group` for actors and rollout workers."""
        size = 1 + rollout_world_size
        ranks = [0, *[-1] * (actor_wg_world_size - 1)], list(range(1, size))
        actors, rollouts = ({"rank": r, "world_size": [size] * len(r), "port": [metadata[0]] * len(r)} for r in ranks)
        return actors, rollouts

    def init_process_group(self, rank: int, world_size: int, port: int) -> None:
        """Meet the others. Rank -1 takes no part."""
        self.rank = rank
        if rank < 0:
            return
        if self._store is None:
            self._store = TCPStore(HOST, port, is_master=False, timeout=TIMEOUT)
        self._group = ProcessGroupGloo(self._store, rank, world_size, TIMEOUT)

    def finalize(self) -> None:
        """Part."""
        self._group = self._store = None
        self.rank = -1

    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> None:
        """Send all weights; every actor has to walk them, because making them whole takes all of them."""
        if self.rank < 0:
            for _ in weights:
                pass
            return
        number, size, bucket = 0, 0, []
        async for meta, chunk in split_weight_chunks(weights, self.bucket_size):
            if bucket and size + meta.chunk_size > self.bucket_size:
                await self._send(number, bucket)
                number, size, bucket = number + 1, 0, []
            meta.offset = size
            size += meta.chunk_size
            bucket.append((meta, chunk.clone()))  # the generator may use its tensor again
        await self._send(number, bucket)
        await self._send(number + 1, [])

    async def _send(self, number: int, bucket: list[tuple[TensorMeta, torch.Tensor]]) -> None:
        """An empty bucket is the last one."""
        self._store.set(f"bucket {number}", pickle.dumps([meta for meta, _ in bucket]))
        if bucket:
            await self._broadcast(torch.cat([chunk for _, chunk in bucket]))

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yields the weights, each a view of memory that is not used again."""
        async for named in merge_weight_chunks(self._receive(), self.bucket_size):
            yield named

    async def _receive(self) -> AsyncGenerator[tuple[TensorMeta, torch.Tensor], None]:
        number = 0
        while metas := pickle.loads(await asyncio.to_thread(self._store.get, f"bucket {number}")):
            data = torch.empty(sum(meta.chunk_size for meta in metas), dtype=torch.uint8)
            await self._broadcast(data)
            for meta in metas:
                yield meta, _aligned(data[meta.offset : meta.offset + meta.chunk_size], meta.dtype)
            number += 1

    async def _broadcast(self, data: torch.Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        work = self._group.broadcast([data], options)
        await asyncio.to_thread(work.wait)


def _aligned(chunk: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`chunk`, in a place where it can be viewed as `dtype`."""
    return chunk if chunk.storage_offset() % dtype.itemsize == 0 else chunk.clone()
