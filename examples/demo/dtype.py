"""In which number format a job runs on this machine."""

from __future__ import annotations

import re
from pathlib import Path

BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16", "svebf16")
"""Flags of CPUs with bfloat16 arithmetic. Others emulate it: a matrix product then takes thirty times as long."""

MIXED = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
"""verl's `fsdp_config.mixed_precision` for a job in float32: by itself it computes in bfloat16, whatever the model."""


def native_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name of the format: `bfloat16` where the CPU computes in it, else `float32`."""
    try:
        text = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return "float32"
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return "bfloat16" if found and set(found.group(1).split()) & set(BFLOAT16) else "float32"
