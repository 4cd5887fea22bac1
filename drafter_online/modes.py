"""Torch's modes, set for the length of a block, whatever the caller's are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def normal_mode() -> Iterator[None]:
    """Autograd on: engines run their workers in inference mode, whose tensors cannot be trained."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def evaluating(module: Any) -> Iterator[None]:
    """Evaluation mode, without gradients."""
    was = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was)
