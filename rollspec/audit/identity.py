"""What an audit was run on, as hashes (BLAKE2b, 16 bytes): a later reader can check whether it was the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollspec.machine import local_folder


def checkpoint(model: str | Path) -> dict[str, Any]:
    """`files`, `bytes`, `blake2b` of the safetensors files of a checkpoint, and `of` what of them. Never raises.

    Each file's name and size go in as `name NUL size NUL`, then its bytes, in the order of names. `blake2b` is None
    where there are no such files or they cannot be read, and `of` says so.
    """
    h, total, of = hashlib.blake2b(digest_size=16), 0, "names, sizes and contents"
    files: list[Path] = []
    try:
        for file in sorted(local_folder(model).glob("*.safetensors")):
            size = file.stat().st_size
            h.update(f"{file.name}\0{size}\0".encode())
            with file.open("rb") as f:
                while part := f.read(1 << 24):
                    h.update(part)
            files.append(file)
            total += size
    except Exception as e:  # an audit is worth more than its checkpoint's name
        files, of = [], f"not hashed ({type(e).__name__}: {e})"
    else:
        of = of if files else "not hashed: there is no safetensors file"
    return {"files": len(files), "bytes": total, "blake2b": h.hexdigest() if files else None, "of": of}


def prompts(token_ids: Sequence[Sequence[int]]) -> str:
    """Hash of the prompts' token ids, as JSON without spaces."""
    text = json.dumps([[int(t) for t in ids] for ids in token_ids], separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
