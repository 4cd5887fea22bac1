"""Where measurements are written besides the trainer's own logger: one JSON object per line, appended.

    sink = JsonlSink("runs/mine/metrics.jsonl")
    sink.write({"training/global_step": 3, "timing_s/gen": 4.2})

Telemetry must never end a training job, so `write` returns False instead of raising, and each cause is logged once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from rollspec.log_once import LogOnce


class JsonlSink:
    """Appends one JSON object per line; a reader never sees half a line of a successful write.

    Atomic because a whole line goes out in one `write` to a file opened with O_APPEND, so several processes may share
    it. A line that a crash or a full disk tore is closed with a newline first, so that the next one is not lost, too.
    A file that another process writes to may look torn, which costs an empty line; readers skip those.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._log = LogOnce()

    def write(self, row: Mapping[str, Any]) -> bool:
        """Append `row`. False when it could not be written; NaN and infinities become null, numpy scalars numbers."""
        try:
            line = _encoded(row) + b"\n"
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                    line = b"\n" + line
                if (sent := file.write(line)) < len(line):
                    raise OSError(f"only {sent} of {len(line)} bytes fitted")
        except (OSError, TypeError, ValueError, RecursionError) as e:
            cause = f"{type(e).__name__}: {e}"
            text = "rollspec: measurements cannot be written to %s (%s); the job continues without them there."
            self._log(cause, text, self.path, cause)
            return False
        return True


def plain(value: Any) -> Any:
    """`value` in strict JSON types, as a line of the file has it."""
    return json.loads(_encoded(value))


def _encoded(value: Any) -> bytes:
    """Strict JSON: numpy scalars and one-element tensors as numbers, non-finite numbers as null."""
    return to_json(value, inf_nan_mode="null", fallback=lambda v: v.tolist() if hasattr(v, "tolist") else str(v))
