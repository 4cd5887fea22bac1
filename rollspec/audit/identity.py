"""What an audit was run on, as hashes (BLAKE2b, 16 bytes): a later reader can check whether it was the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WHOLE_BYTES = 2 << 30
"""Checkpoints up to this size are hashed whole."""

END_BYTES = 1 << 20
"""Of a file of a larger one: how much of its tensors is hashed at the start and at the end."""

MOST_HEADER = 100_000_000
"""A safetensors header is no longer, by its format."""

WHOLE = "names, sizes and contents"
PARTS = "names, sizes, headers, and the first and last MiB of tensors (they have more than 2 GiB)"


def checkpoint(model: str | Path) -> dict[str, Any]:
    """`files`, `bytes`, `blake2b` of the safetensors files of a checkpoint, and `of` what of them. Never raises.

    Each file's name and size go in as `name NUL size NUL`, then its bytes, in the order of names. `blake2b` is None
    where there are no such files or they cannot be read, and `of` says so.
    """
    nothing = {"files": 0, "bytes": 0, "blake2b": None}
    try:
        files = sorted(_folder(model).glob("*.safetensors"))
        total = sum(f.stat().st_size for f in files)
        h = hashlib.blake2b(digest_size=16)
        for file in files:
            h.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            for part in _all(file) if total <= WHOLE_BYTES else _parts(file):
                h.update(part)
    except Exception as e:  # an audit is worth more than its checkpoint's name
        return nothing | {"of": f"not hashed ({type(e).__name__}: {e})"}
    if not files:
        return nothing | {"of": "not hashed: there is no safetensors file"}
    of = WHOLE if total <= WHOLE_BYTES else PARTS
    return {"files": len(files), "bytes": total, "blake2b": h.hexdigest(), "of": of}


def prompts(token_ids: Sequence[Sequence[int]]) -> str:
    """Hash of the prompts' token ids, as JSON without spaces."""
    text = json.dumps([[int(t) for t in ids] for ids in token_ids], separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _folder(model: str | Path) -> Path:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    # The engine and the reference have loaded it: it is in the cache.
    return Path(snapshot_download(str(model), local_files_only=True))


def _all(file: Path) -> Iterator[bytes]:
    with file.open("rb") as f:
        while part := f.read(1 << 24):
            yield part


def _parts(file: Path) -> Iterator[bytes]:
    with file.open("rb") as f:
        size = f.read(8)
        yield size
        yield f.read(min(int.from_bytes(size, "little"), MOST_HEADER))
        yield f.read(END_BYTES)
        f.seek(max(f.tell(), file.stat().st_size - END_BYTES))
        yield f.read()
