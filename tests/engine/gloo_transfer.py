"""TRL's weight sync to a server on a CPU: a Gloo group stands in for `PyNcclCommunicator`, and nothing for streams.

All else is TRL's and vLLM's: rendezvous, requests, packing, the layerwise reload. Named as `worker_extension_cls`, this
module is imported in the worker's process; a trainer calls `trainer`. The import puts the stand-ins in place.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer import nccl_common, packed_tensor


class Worker:
    """Adds nothing to the worker; a worker extension has to be a class."""


class Group:
    """What weight transfer uses of `PyNcclCommunicator`."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, device: Any = None) -> None:
        self._gloo = stateless_init_torch_distributed_process_group(host, port, rank, world_size, "gloo")
        self.group = self  # TRL lets its sockets go when it closes

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = src
        self._gloo.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        del self._gloo


class Stream:
    def synchronize(self) -> None: ...


def trainer() -> None:
    """In the trainer's process: its client does not ask for a CUDA device."""
    from trl.generation.vllm_client import VLLMClient

    init = VLLMClient.init_communicator
    VLLMClient.init_communicator = lambda self, device: init(self, torch.device("cuda"))


nccl_common.stateless_init_process_group = Group
packed_tensor._get_streams = lambda device, n: (Stream(),) * n
torch.accelerator.current_device_index = lambda: 0
