"""A weight sync by verl's own sender and receiver, whose receiver is killed after the first bucket; prints how it ends.

python killed_sync.py FOLDER
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import torch
from rollspec_verl import servers
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer

SOCKET = f"ipc://{sys.argv[1]}/socket"


def dies(bucket: list[tuple[str, Any]], is_last: bool) -> None:
    assert bucket and not is_last
    os.kill(os.getpid(), signal.SIGKILL)


if (engine := os.fork()) == 0:
    transfer.BucketedWeightReceiver(SOCKET, torch.device("cpu"), use_shm=True).receive_weights(dies)
    os._exit(1)
servers.BUCKET_SECONDS = 2.0
servers.install_sender(transfer)
parts = ((f"layer{i}", torch.full((200_000,), float(i))) for i in range(8))
try:
    asyncio.run(transfer.BucketedWeightSender(SOCKET, bucket_size_mb=1, use_shm=True).async_send_weights(parts))
except TimeoutError as e:
    print(e)
assert os.waitstatus_to_exitcode(os.waitpid(engine, 0)[1]) == -signal.SIGKILL
