"""Runs one part in a process of its own, so that a crash, or memory that is not given back, costs that part alone.

python -m benchmarks.gpu.child FUNCTION SPEC.json OUT.json
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import NotHereError, Spec
from drafter_online.files import replace


def run(function: str, spec: Spec) -> dict[str, Any]:
    """What the part found, or why it found nothing."""
    module, _, name = function.partition(":")
    try:
        measure = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
        return {"state": "done", "found": measure(spec)}
    except NotHereError as e:
        return {"state": "skipped", "reason": str(e)}
    except Exception as e:
        traceback.print_exc()
        return {"state": "failed", "reason": f"{type(e).__name__}: {e}"[:2000]}


def main() -> None:
    """One part, from its files to its file."""
    function, given, out = sys.argv[1:]
    result = run(function, Spec(**json.loads(Path(given).read_text())))
    replace(Path(out), json.dumps(result, default=_json).encode())


def _json(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


if __name__ == "__main__":
    main()
