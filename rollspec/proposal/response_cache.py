"""Old responses with the log-probs they were sampled with, as prefixes of new rollouts.

Kept per prompt and sample number, the newest only; bounded in bytes; saved and reloaded. One safetensors file holds
flat arrays of tokens and log-probs with row lengths, and a JSON header with a checksum and the name of the tokenizer
that the tokens belong to. A file that does not fit is refused, never half-loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drafter_online.files import replace
from rollspec.errors import HistoryError
from rollspec.proposal.base import TokenArray, as_tokens

FORMAT = "rollspec-old-responses-1"
FILE = "old_responses.safetensors"


@dataclass(frozen=True, slots=True)
class CachedResponse:
    """A finished response.

    Attributes:
        tokens: [n].
        logprobs: [n] float32, of each token under the policy and temperature it was sampled with, nats.
        version: of that policy.
    """

    tokens: TokenArray
    logprobs: npt.NDArray[np.float32]
    version: int

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self.tokens.nbytes + self.logprobs.nbytes


class ResponseCache:
    """The newest response per (prompt key, sample); the prompts not seen for longest are dropped first.

    Args:
        max_bytes: bound on the bytes of tokens and log-probs.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._prompts: OrderedDict[str, dict[str, CachedResponse]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._prompts.values()))

    def get(self, key: str, sample: str) -> CachedResponse | None:
        """The response of that sample of the prompt, or None."""
        return self._prompts.get(key, {}).get(sample)

    def add(self, key: str, sample: str, response: CachedResponse) -> None:
        """Keep `response` in the place of an earlier one.

        Raises:
            ValueError: it has another number of log-probs than tokens, or one is not finite.
        """
        if len(response.tokens) != len(response.logprobs) or not np.isfinite(response.logprobs).all():
            raise ValueError(
                f"rollspec: a response of {len(response.tokens)} tokens needs as many finite log-probs to be reused, "
                f"and has {int(np.isfinite(response.logprobs).sum())}."
            )
        group = self._prompts.setdefault(key, {})
        self._prompts.move_to_end(key)
        self.bytes += response.nbytes - (group[sample].nbytes if sample in group else 0)
        group[sample] = response
        while self.bytes > self.max_bytes and self._prompts:
            _, dropped = self._prompts.popitem(last=False)
            self.bytes -= sum(r.nbytes for r in dropped.values())

    # ---- disk -------------------------------------------------------------------------------------------------------

    def save(self, folder: Path | str, tokenizer: str) -> Path:
        """Write `folder/old_responses.safetensors` atomically; `tokenizer` names whose tokens they are.

        Raises:
            HistoryError: the folder cannot be written or the disk is full; an earlier file is not changed.
        """
        from safetensors.numpy import save

        folder = Path(folder)
        found = [(k, s, r) for k, group in list(self._prompts.items()) for s, r in list(group.items())]
        rows = json.dumps([[k, s, r.version] for k, s, r in found], separators=(",", ":"))
        arrays = {
            "tokens": _flat([r.tokens for _, _, r in found], np.int32),
            "logprobs": _flat([r.logprobs for _, _, r in found], np.float32),
            "lengths": np.array([len(r.tokens) for _, _, r in found], dtype=np.int64),
        }
        header = {"format": FORMAT, "tokenizer": tokenizer, "rows": rows, "checksum": _checksum(arrays, rows)}
        data = save(arrays, metadata=header)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace(folder / FILE, data, private=True)
        except OSError as e:
            raise HistoryError(
                f"rollspec: old responses cannot be written to {folder} ({e.strerror or e}); make it writable, free "
                "space, or set history.dir elsewhere."
            ) from e
        return folder / FILE

    def load(self, folder: Path | str, tokenizer: str, version: int = 0) -> int:
        """Take what `folder/old_responses.safetensors` holds; returns the number of responses, 0 where there is no
        file.

        Versions are shifted to below `version`, the present one, where they are not.

        Raises:
            HistoryError: the file is truncated, altered, of another format or of another tokenizer; nothing of it is
                used, and it is left where it is.
        """
        path = Path(folder) / FILE
        if not path.is_file():
            return 0
        try:
            rows, header = _read(path)
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise HistoryError(
                f"rollspec: the file of old responses {path} is refused ({e}); delete it. Nothing of it is reused."
            ) from e
        if header != tokenizer:
            raise HistoryError(
                f"rollspec: the old responses in {path} are of another tokenizer ({header}, not {tokenizer}); remove "
                "the file or set history.dir elsewhere. Nothing of it is reused."
            )
        shift = min(0, version - 1 - max((r.version for _, _, r in rows), default=version))
        for key, sample, r in rows:
            self.add(key, sample, CachedResponse(r.tokens, r.logprobs, r.version + shift))
        return len(rows)


def tokenizer_name(vocabulary: Iterable[tuple[str, int]]) -> str:
    """A short name of a tokenizer that changes with any of its (token, id) pairs."""
    h = hashlib.blake2b(digest_size=8)
    for token, number in sorted(vocabulary, key=lambda pair: pair[1]):
        h.update(f"{number}\0{token}\0".encode("utf-8", "surrogatepass"))
    return h.hexdigest()


def _flat(rows: list[Any], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate(rows).astype(dtype, copy=False) if rows else np.empty(0, dtype)


def _checksum(arrays: dict[str, npt.NDArray[Any]], rows: str) -> str:
    h = hashlib.blake2b(digest_size=16)
    for name, kind in (("tokens", "<i4"), ("logprobs", "<f4"), ("lengths", "<i8")):
        h.update(arrays[name].astype(kind).tobytes())
    h.update(rows.encode())
    return h.hexdigest()


def _read(path: Path) -> tuple[list[tuple[str, str, CachedResponse]], str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as f:
            header = f.metadata() or {}
            arrays = {name: f.get_tensor(name) for name in ("tokens", "logprobs", "lengths")}
    except SafetensorError as e:
        raise ValueError(f"it is not a readable safetensors file: {e}") from e
    if header.get("format") != FORMAT:
        raise ValueError(f"its format is {header.get('format')!r}, not {FORMAT!r}")
    if _checksum(arrays, header["rows"]) != header.get("checksum"):
        raise ValueError("its checksum does not match its contents")
    ends = np.cumsum(arrays["lengths"])
    out = []
    for (key, sample, version), n, end in zip(json.loads(header["rows"]), arrays["lengths"], ends, strict=True):
        tokens, logprobs = as_tokens(arrays["tokens"][end - n : end]), arrays["logprobs"][end - n : end]
        out.append((str(key), str(sample), CachedResponse(tokens, logprobs, int(version))))
    return out, header["tokenizer"]
