"""Files of the repository that are written from the code: written anew, or compared with what the code says now."""

from __future__ import annotations

import sys
from pathlib import Path


def keep(path: Path, text: str, module: str, check: bool) -> int:
    """Write `text` to `path`, or with `check` compare the two; the exit status. `module` is the one that writes it."""
    if check:
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            return 0
        print(f"{path} is out of date; run `python -m {module}`.", file=sys.stderr)
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(path)
    return 0
