"""Views of tensors that a kernel receives as addresses, and small arrays that every step needs."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np

MIN_LENGTH = 4096


@lru_cache(maxsize=256)
def int32_at(address: int, length: int) -> np.ndarray:
    """A writable view of `length` int32 values at `address`; the caller keeps the memory alive."""
    return np.frombuffer((ctypes.c_int32 * length).from_address(address), dtype=np.int32)


@lru_cache(maxsize=1)
def _arange(length: int) -> np.ndarray:
    values = np.arange(length)
    values.setflags(write=False)
    return values


def arange(length: int) -> np.ndarray:
    """`np.arange(length)`, read-only, from one array that grows by doubling."""
    return _arange(max(MIN_LENGTH, 1 << (length - 1).bit_length()) if length > MIN_LENGTH else MIN_LENGTH)[:length]
