"""Past rollouts: per prompt, the responses of the latest rounds; bounded in bytes; saved and reloaded.

This is the durable part of suffix drafting, whose corpora are rebuilt from it, and of lenient reuse, which keeps
log-probs as well and one response per sample (its origin). One safetensors file holds flat arrays with row lengths and
a JSON header with a checksum; a file that does not match its checksum is refused and set aside, never half-loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drafter_online.files import replace, set_aside
from rollspec.errors import HistoryError
from rollspec.proposal.base import TokenArray, as_tokens, prompt_key

FORMAT = "rollspec-history-1"
FILE, OLD_RESPONSES = "history.safetensors", "old_responses.safetensors"

COLUMNS = ("versions", "rewards", "streams", "spans", "origins", "turns")  # what a file holds of a prompt's responses

ARRAYS = {"tokens": "<i4", "lengths": "<i8", "logprobs": "<f4"}
"""What else it holds, of all rows together; log-probs only where responses have them."""

Spans = tuple[tuple[int, int], ...]
"""Which policy version sampled which tokens of a response: (first token, version), ascending."""


def extend_spans(spans: Sequence[tuple[int, int]], start: int, version: int) -> Spans:
    """`spans` up to the token `start`, and `version` from there on."""
    kept = tuple((s, v) for s, v in spans if s < start)
    return kept if kept and kept[-1][1] == version else (*kept, (start, version))


@dataclass(slots=True)
class Response:
    """One response, perhaps unfinished. `version`: policy version it was started under. `stream`: key of its noise, if
    that is kept. `origin`: names the rollout, where an abort may leave it in parts; each one begins with all before it.
    `spans`: empty where `version` sampled all tokens. `logprobs`: [n] of the tokens, where they are kept. `turn`: of a
    rollout with tools, each of whose turns is a response; what the environment said between them is none.
    """

    tokens: TokenArray
    version: int
    reward: float | None = None
    key: str | None = None  # prompt_key of the tokens, computed when a reward first asks for it
    stream: int | None = None
    origin: str | None = None
    spans: Spans = ()
    logprobs: npt.NDArray[np.float32] | None = None
    turn: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.tokens.nbytes + (self.logprobs.nbytes if self.logprobs is not None else 0)

    @property
    def newest(self) -> int:
        """The policy version that sampled its last tokens."""
        return self.spans[-1][1] if self.spans else self.version

    def versions(self) -> npt.NDArray[np.int64]:
        """[n] the policy version that sampled each token."""
        starts, versions = zip(*(self.spans or ((0, self.version),)), strict=True)
        return np.repeat(versions, np.diff([*starts, len(self.tokens)]))


@dataclass(slots=True)
class PromptHistory:
    """A prompt's tokens and its responses, oldest first."""

    prompt: TokenArray
    responses: list[Response]


class History:
    """Responses by prompt key, least recently used prompt evicted first.

    Args:
        max_bytes: bound on the bytes kept; a single prompt larger than it is not kept at all.
        window: rounds (distinct policy versions) kept per prompt before its newest one, which still grows.
        file: where it is saved, in the folder given.
    """

    def __init__(self, max_bytes: int, window: int, file: str = FILE) -> None:
        self.file = file
        self.max_bytes = max_bytes
        self.window = window
        self.bytes = 0
        self.evicted = 0
        self.rewarded = 0
        self._prompts: OrderedDict[str, PromptHistory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[tuple[str, PromptHistory]]:
        return iter(self._prompts.items())

    def get(self, key: str) -> PromptHistory | None:
        """The prompt's history, now the most recently used, or None."""
        entry = self._prompts.get(key)
        if entry is not None:
            self._prompts.move_to_end(key)
        return entry

    def previous(self, key: str, stream: int, version: int, origin: str | None = None) -> TokenArray | None:
        """The latest response to a prompt that was sampled with the noise `stream` before policy `version`, and is no
        part of the rollout `origin`.
        """
        entry = self.get(key)
        for r in reversed(entry.responses if entry else ()):
            if r.stream == stream and r.version < version and (origin is None or r.origin != origin):
                return r.tokens
        return None

    def part(self, key: str, origin: str | None) -> Response | None:
        """What the rollout `origin` had emitted when it was aborted; None where that is not known."""
        entry = self.get(key) if origin is not None else None
        return next((r for r in entry.responses if r.origin == origin), None) if entry else None

    def add(self, key: str, prompt: TokenArray, response: Response) -> None:
        """Keep `response` in the place of an earlier part of it, drop rounds of this prompt beyond the window, then
        prompts beyond the byte bound.
        """
        entry = self._prompts.get(key)
        if entry is None:
            entry = self._prompts[key] = PromptHistory(prompt, [])
            self.bytes += prompt.nbytes
        self._prompts.move_to_end(key)
        if response.origin is not None:
            self._keep(entry, lambda r: r.origin != response.origin)  # replaced, not lost
        entry.responses.append(response)
        self.bytes += response.nbytes
        versions = sorted({r.version for r in entry.responses})
        if len(versions) > self.window + 1:
            # A rollout that was aborted often is as old as its last tokens: it may have to resume.
            self.evicted += self._keep(entry, lambda r: r.newest >= versions[-self.window - 1])
        while self.bytes > self.max_bytes and self._prompts:
            oldest = next(iter(self._prompts))
            if oldest == key and len(entry.responses) > 1:
                # Only this prompt is left: keep its newest response rather than nothing.
                self.evicted += self._keep(entry, lambda r: r is response)
                if self.bytes <= self.max_bytes:
                    break
            self.evicted += self._drop(oldest)

    def reward(self, items: Iterable[tuple[str, str, float]]) -> int:
        """Join rewards, (prompt key, key of the response tokens, reward), to responses; returns the matches."""
        found = 0
        for key, response_key, value in items:
            entry = self._prompts.get(key)
            for r in reversed(entry.responses if entry else ()):
                if r.key is None:
                    r.key = prompt_key(r.tokens)
                if r.key == response_key and r.reward is None:
                    r.reward = float(value)
                    found += 1
                    break
        self.rewarded += found
        return found

    def _keep(self, entry: PromptHistory, wanted: Callable[[Response], bool]) -> int:
        """Drop the other responses; how many there were."""
        kept = [r for r in entry.responses if wanted(r)]
        dropped = len(entry.responses) - len(kept)
        self.bytes -= sum(r.nbytes for r in entry.responses) - sum(r.nbytes for r in kept)
        entry.responses[:] = kept
        return dropped

    def _drop(self, key: str) -> int:
        """Drop a prompt; how many responses it had."""
        entry = self._prompts.pop(key)
        self.bytes -= entry.prompt.nbytes + sum(r.nbytes for r in entry.responses)
        return len(entry.responses)

    # ---- disk -------------------------------------------------------------------------------------------------------

    def snapshot(self, unfinished: Iterable[tuple[str, TokenArray, Response]] = ()) -> dict[str, Any]:
        """What `save` writes, cheap enough for the step path; `unfinished` responses replace earlier parts of them."""
        unfinished = list(unfinished)
        resumed = {r.origin for _, _, r in unfinished if r.origin is not None}
        kept = [(key, e.prompt, [r for r in e.responses if r.origin not in resumed]) for key, e in self]
        prompts: dict[str, dict[str, Any]] = {}
        rows: list[TokenArray] = []
        logprobs: list[npt.NDArray[np.float32]] = []
        for key, prompt, responses in [*kept, *((key, prompt, [r]) for key, prompt, r in unfinished)]:
            if key not in prompts:
                prompts[key] = {"key": key, **{column: [] for column in COLUMNS}, "row": len(rows)}
                rows.append(prompt)
            record = prompts[key]
            for r in responses:
                origin = r.origin if r.logprobs is not None else None
                values = ([r.version, len(rows)], r.reward, r.stream, r.spans or None, origin, r.turn)
                for column, value in zip(COLUMNS, values, strict=True):
                    record[column].append(value)
                rows.append(r.tokens)
                if r.logprobs is not None:
                    logprobs.append(r.logprobs)
        arrays = {
            "tokens": np.concatenate([np.empty(0, np.int32), *rows], dtype=np.int32),
            "lengths": np.array([len(r) for r in rows], dtype=np.int64),
        }
        if logprobs:
            arrays["logprobs"] = np.concatenate(logprobs)
        return {**arrays, "prompts": list(prompts.values())}

    def save(self, folder: Path | str, snapshot: dict[str, Any] | None = None, tokenizer: str | None = None) -> Path:
        """Write the file in `folder` atomically. `tokenizer` names whose tokens they are, where it is known.

        Raises:
            HistoryError: the folder cannot be written or the disk is full; an earlier file is not changed.
        """
        from safetensors.numpy import save

        snap = self.snapshot() if snapshot is None else snapshot
        arrays = {name: snap[name] for name in ARRAYS if name in snap}
        header = {"format": FORMAT, "prompts": json.dumps(snap["prompts"], separators=(",", ":"))}
        header |= {"tokenizer": tokenizer} if tokenizer is not None else {}
        header["checksum"] = _checksum(arrays, header["prompts"])
        target = Path(folder) / self.file
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            replace(target, save(arrays, metadata=header), private=True)
        except OSError as e:
            raise HistoryError(
                f"rollspec: history cannot be written to {folder} ({e.strerror or e}); make it writable, free space, "
                "or set history.dir elsewhere."
            ) from e
        return target

    def load(self, folder: Path | str, version: int = 0, vocab: int | None = None, tokenizer: str | None = None) -> int:
        """Take what the file in `folder` holds; returns the number of responses, 0 where there is no file.

        What is kept for a prompt already is replaced. Versions are shifted to below `version`, the present one, where
        they are not: another job's must not count as newer than what is emitted now. `vocab`: size of the target's
        vocabulary. `tokenizer`: its tokenizer's name.

        Raises:
            HistoryError: the file is truncated, altered, of another format, vocabulary or tokenizer; it is set aside.
        """
        path = Path(folder) / self.file
        if not path.is_file():
            return 0
        try:
            snap = _read(path, vocab, tokenizer)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as e:
            raise HistoryError(
                f"rollspec: the history file {path} is refused ({e}); {set_aside(path)} and history starts empty."
            ) from e
        count = 0
        newest = max((r.newest for _, _, responses in snap for r in responses), default=version)
        shift = min(0, version - 1 - newest)
        for key, prompt, responses in snap:
            if key in self._prompts:
                self._drop(key)  # replaced, not lost
            for r in responses:
                r.version += shift
                r.spans = tuple((start, v + shift) for start, v in r.spans)
                self.add(key, prompt, r)
                count += 1
        return count


def tokenizer_name(vocabulary: Iterable[tuple[str, int]]) -> str:
    """A short name of a tokenizer that changes with any of its (token, id) pairs."""
    h = hashlib.blake2b(digest_size=8)
    for token, number in sorted(vocabulary, key=lambda pair: pair[1]):
        h.update(f"{number}\0{token}\0".encode("utf-8", "surrogatepass"))
    return h.hexdigest()


def _checksum(arrays: Mapping[str, npt.NDArray[Any]], prompts: str) -> str:
    h = hashlib.blake2b(digest_size=16)
    for name, array in arrays.items():
        h.update(array.astype(ARRAYS[name]).tobytes())
    h.update(prompts.encode())
    return h.hexdigest()


def _read(path: Path, vocab: int | None, tokenizer: str | None) -> list[tuple[str, TokenArray, list[Response]]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as f:
            header = f.metadata() or {}
            arrays = {name: f.get_tensor(name) for name in ARRAYS if name in f.keys()}  # noqa: SIM118 - no mapping
    except SafetensorError as e:
        raise ValueError(f"it is not a readable safetensors file: {e}") from e
    if header.get("format") != FORMAT:
        raise ValueError(f"its format is {header.get('format')!r}, not {FORMAT!r}")
    if _checksum(arrays, header["prompts"]) != header.get("checksum"):
        raise ValueError("its checksum does not match its contents")
    theirs = header.get("tokenizer")
    if None not in (theirs, tokenizer) and theirs != tokenizer:
        raise ValueError(f"it is of another tokenizer ({theirs}, not {tokenizer})")
    tokens, lengths, logprobs = arrays["tokens"], arrays["lengths"], arrays.get("logprobs")
    if vocab is not None and len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
        raise ValueError(f"it has token {int(tokens.max())}, and the model's vocabulary ends at {vocab - 1}")
    rows = [slice(end - n, end) for n, end in zip(lengths, np.cumsum(lengths), strict=True)]
    out = []
    for record in json.loads(header["prompts"]):
        none = [None] * len(record["versions"])
        # Older versions wrote fewer columns.
        parts = zip(*(record.get(column) or none for column in COLUMNS), strict=True)
        responses = [
            Response(
                as_tokens(tokens[rows[i]]),
                int(version),
                reward,
                stream=stream,
                origin=origin,
                spans=read_spans(spans, int(lengths[i])),
                logprobs=logprobs[rows[i]] if logprobs is not None else None,
                turn=int(turn or 0),
            )
            for (version, i), reward, stream, spans, origin, turn in parts
        ]
        out.append((str(record["key"]), as_tokens(tokens[rows[record["row"]]]), responses))
    return out


def read_spans(given: Any, length: int) -> Spans:
    """Spans of a response of `length` tokens from JSON. Raises ValueError or TypeError if they cannot be."""
    spans = tuple((int(start), int(version)) for start, version in given or ())
    starts = [start for start, _ in spans]
    if starts and (starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= length):
        raise ValueError(f"a response of {length} tokens has policy versions from its tokens {starts} on")
    return spans
