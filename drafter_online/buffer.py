"""What the drafter is trained on: bounded in bytes, fair to every policy version, and with the long tail kept.

Kept. Per target version a uniform sample of all that came (a reservoir by random priority); a version's share of the
bytes halves every `half_life` versions. Besides, the longest responses of the last `tail_versions` versions, up to
`tail_quota` of the bytes: they are rare, finish last, and gain most from speculation.

Drawn. Windows from anywhere in the responses, samples chosen by recency times response tokens, so that a token late in
a long response is seen as often as an early one.

Saved as one file per sample, named by its checksum, and an index: a damaged file costs that sample and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from drafter_online.errors import BufferFileError, SampleError
from drafter_online.files import digest, oserror_as, replace, set_aside, sha256, sync_folder
from drafter_online.rewards import Rewards
from drafter_online.samples import Sample

FORMAT = "drafter-online-buffer-1"
INDEX, SAMPLES = "index.json", "samples"


class BufferConfig(BaseModel):
    """How much is kept, and what."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    max_bytes: int = Field(1 << 30, ge=1 << 12, description="Bytes of samples kept in memory.")
    half_life: float = Field(4.0, gt=0, description="Policy versions after which a sample's weight halves.")
    tail_quota: float = Field(0.25, ge=0, le=0.9, description="Share of the bytes kept for the longest responses.")
    tail_versions: int = Field(8, ge=1, description="Policy versions after which a long response is as any other.")
    keep_versions: int | None = Field(
        None, ge=1, description="Newest policy versions whose samples stay at all; 1: the newest only; unset: all."
    )
    seed: int = Field(0, ge=0, description="Seed of what is kept.")


@dataclass(eq=False)
class _Entry:
    sample: Sample
    priority: float
    drawn: int = 0
    checksum: str | None = None  # of its file, once written

    def __post_init__(self) -> None:
        self.nbytes = self.sample.nbytes
        self.response = int(self.sample.loss_mask.sum())  # response tokens kept


@dataclass
class SampleCounts:
    """What became of samples. `dropped`: evicted, of which `unseen` were never drawn."""

    added: int = 0
    dropped: int = 0
    unseen: int = 0
    refused: int = 0
    rewarded: int = 0
    damaged: int = 0


class Buffer:
    """Samples to train on. Not thread-safe: one owner, fed through an `Inbox`."""

    def __init__(self, config: BufferConfig | None = None) -> None:
        self.config = config or BufferConfig()
        self.bytes = 0
        self.counts = SampleCounts()
        self._rng = random.Random(self.config.seed)
        self._entries: list[_Entry] = []
        self.newest = 0
        """The newest target version that came, 0 when none did."""
        self._loaded = False  # and no sample has come since
        self.rewards = Rewards()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sample]:
        return (e.sample for e in self._entries)

    # ---- coming in --------------------------------------------------------------------------------------------------

    def add(self, sample: Sample) -> bool:
        """Take a sample, then drop what does not fit. False: the sample itself was not kept.

        Raises:
            SampleError: it does not fit together, is not finite, or has other sizes than the samples in the buffer.
        """
        try:
            self._check(sample)
        except SampleError:
            self.counts.refused += 1
            raise
        reward = self.rewards.pending.pop(sample.request_id, None)
        if reward is not None and sample.reward is None:
            sample = dataclasses.replace(sample, reward=reward)
        if sample.reward is not None:
            self._count_reward(sample.reward)
        self._renumber(sample.target_version)
        entry = self._append(_Entry(sample, self._rng.random()))
        self.counts.added += 1
        self._evict()
        return entry in self._entries

    def _append(self, entry: _Entry) -> _Entry:
        self._entries.append(entry)
        self.newest = max(self.newest, entry.sample.target_version)
        self.bytes += entry.nbytes
        return entry

    def _renumber(self, version: int) -> None:
        """Samples that were loaded are no newer than the first that comes: another job counts versions from 0 again."""
        if not self._loaded:
            return
        self._loaded = False
        self.newest = min(self.newest, version)
        for e in self._entries:
            if e.sample.target_version > version:
                e.sample, e.checksum = dataclasses.replace(e.sample, target_version=version), None

    def _check(self, sample: Sample) -> None:
        sample.validate()
        if not bool(sample.loss_mask.any()):
            raise SampleError("a sample is refused: `loss_mask` has no response token in it.")
        if self._entries:
            other = self._entries[0].sample
            for name in ("hidden_states", "verifier_last_hidden_states"):
                mine, theirs = getattr(sample, name), getattr(other, name)
                if mine.shape[1] != theirs.shape[1]:
                    raise SampleError(
                        f"a sample is refused: `{name}` is {mine.shape[1]} wide, but the others' are "
                        f"{theirs.shape[1]}; it is of another target."
                    )

    def reward(self, rewards: Mapping[str, float]) -> int:
        """Join rewards by request id; those of samples still to come are remembered. Returns how many joined now."""
        rewards = {request: float(value) for request, value in rewards.items() if math.isfinite(value)}
        joined = 0
        for e in self._entries:
            value = rewards.get(e.sample.request_id)
            if value is not None and e.sample.reward is None:
                e.sample = dataclasses.replace(e.sample, reward=value)
                self._count_reward(value)
                joined += 1
        for request in rewards.keys() - {e.sample.request_id for e in self._entries}:
            self.rewards.keep(request, rewards[request])
        return joined

    def _count_reward(self, value: float) -> None:
        self.counts.rewarded += 1
        self.rewards.add(value)

    # ---- retention --------------------------------------------------------------------------------------------------

    def _tail(self) -> set[_Entry]:
        """The longest responses that the quota keeps."""
        room = self.config.tail_quota * self.config.max_bytes
        oldest = self.newest - self.config.tail_versions
        young = [e for e in self._entries if e.sample.target_version > oldest]
        kept: set[_Entry] = set()
        for e in sorted(young, key=lambda e: (-e.sample.response_length, -e.priority)):
            room -= e.nbytes
            if room < 0:
                break
            kept.add(e)
        return kept

    def recency(self, version: int) -> float:
        """2^(-age / half_life), age in policy versions; never quite 0, however old."""
        return float(2.0 ** max(-(self.newest - version) / self.config.half_life, -1000.0))

    def forget(self, before: int) -> int:
        """Drop samples of target versions before `before`, tail or not; returns how many."""
        return self._drop({e for e in self._entries if e.sample.target_version < before})

    def _drop(self, gone: set[_Entry]) -> int:
        self._entries = [e for e in self._entries if e not in gone]
        self.bytes -= sum(e.nbytes for e in gone)
        self.counts.dropped += len(gone)
        self.counts.unseen += sum(e.drawn == 0 for e in gone)
        return len(gone)

    def _evict(self) -> None:
        if self.config.keep_versions is not None:
            self.forget(self.newest - self.config.keep_versions + 1)
        over = self.bytes - self.config.max_bytes
        if over <= 0:
            return
        tail = self._tail()
        rest: dict[int, list[_Entry]] = {}
        for e in sorted(self._entries, key=lambda e: -e.priority):
            if e not in tail:
                rest.setdefault(e.sample.target_version, []).append(e)
        size = {v: sum(e.nbytes for e in es) for v, es in rest.items()}
        gone: set[_Entry] = set()
        while over > 0 and rest:
            version = max(rest, key=lambda v: size[v] / self.recency(v))  # furthest beyond its share
            e = rest[version].pop()
            if not rest[version]:
                del rest[version]
            gone.add(e)
            size[version] -= e.nbytes
            over -= e.nbytes
        self._drop(gone)

    # ---- going out --------------------------------------------------------------------------------------------------

    def draw(self, rng: random.Random, tokens: int, window: int, least: int = 8) -> list[Sample]:
        """Windows of at most `window` tokens that together hold up to `tokens`; empty when the buffer is. `rng` decides
        what is drawn; no window is cut shorter than `least` to fill up the rest.
        """
        if not self._entries:
            return []
        weights = [self.recency(e.sample.target_version) * e.response for e in self._entries]
        out: list[Sample] = []
        room = tokens
        while room >= least:
            (e,) = rng.choices(self._entries, weights)
            cut = e.sample.random_window(rng, min(window, room))
            if len(cut) < 2 or (len(cut) < least and out):
                break
            e.drawn += 1
            out.append(cut)
            room -= len(cut)
        return out

    def token_counts(self) -> Counter[int]:
        """How often each response token occurs: for the vocabulary map of a fresh head."""
        counts: Counter[int] = Counter()
        for e in self._entries:
            counts.update(e.sample.input_ids[e.sample.loss_mask].tolist())
        return counts

    def stats(self) -> dict[str, Any]:
        """The contents in numbers, as a JSON object."""
        versions: dict[int, dict[str, float]] = {}
        for e in self._entries:
            v = versions.setdefault(e.sample.target_version, {"samples": 0, "bytes": 0, "tokens": 0, "rewarded": 0})
            v["samples"] += 1
            v["bytes"] += e.nbytes
            v["tokens"] += e.response
            v["rewarded"] += e.sample.reward is not None
        c = self.counts
        return {
            "samples": len(self),
            "bytes": self.bytes,
            "max_bytes": self.config.max_bytes,
            "tail_bytes": sum(e.nbytes for e in self._tail()),
            "versions": {str(v): versions[v] for v in sorted(versions)},
            "domains": dict(Counter(e.sample.domain for e in self._entries if e.sample.domain)),
            "added": c.added,
            "dropped": c.dropped,
            "dropped_unseen": c.unseen,
            "refused": c.refused,
            "rewarded": c.rewarded,
            "damaged": c.damaged,
            "pending_rewards": len(self.rewards.pending),
        }

    # ---- disk -------------------------------------------------------------------------------------------------------

    def save(self, folder: Path | str) -> Path:
        """Write what is new and the index; then delete the files of samples that are no longer kept.

        Raises:
            BufferFileError: the folder cannot be written; what was saved before is still valid.
        """
        folder = Path(folder)
        with oserror_as(
            BufferFileError, f"the buffer cannot be written to {folder}", "make it writable, or free space"
        ):
            (folder / SAMPLES).mkdir(parents=True, exist_ok=True)
            for e in self._entries:
                if e.checksum is None or not _file(folder, e.checksum).exists():
                    blob = e.sample.to_bytes()
                    e.checksum = sha256(blob)
                    replace(_file(folder, e.checksum), blob)
            sync_folder(folder / SAMPLES)
            index = self._index()
            replace(folder / INDEX, json.dumps({**index, "checksum": digest(index)}).encode())
            kept = {e.checksum for e in self._entries}
            for path in (folder / SAMPLES).iterdir():
                if path.stem not in kept:
                    path.unlink(missing_ok=True)
        return folder

    def _index(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "rng": list(self._rng.getstate()[1]),
            **self.rewards.to_dict(),
            "counts": vars(self.counts),
            "samples": [[e.checksum, e.priority, e.drawn, e.sample.reward] for e in self._entries],
        }

    @classmethod
    def load(cls, folder: Path | str, config: BufferConfig | None = None) -> Buffer:
        """Read a saved buffer; empty where there is none. A damaged sample is refused and counted.

        Raises:
            BufferFileError: the index is damaged; it is renamed to `index.json.corrupt`, so that the next save does
                not destroy it.
        """
        buffer = cls(config)
        path = Path(folder) / INDEX
        if not path.is_file():
            return buffer
        try:
            index = json.loads(path.read_bytes())
            if index.pop("checksum") != digest(index) or index["format"] != FORMAT:
                raise ValueError("its checksum or format does not match")
            buffer._restore(Path(folder), index)
            buffer._loaded = True
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise BufferFileError(
                f"the buffer's index {path} is refused ({e}); {set_aside(path)} and the buffer starts empty."
            ) from e
        buffer._evict()
        return buffer

    def _restore(self, folder: Path, index: dict[str, Any]) -> None:
        version, _, gauss = self._rng.getstate()
        self._rng.setstate((version, tuple(index["rng"]), gauss))
        self.rewards = Rewards.from_dict(index)
        self.counts = SampleCounts(**index["counts"])
        for checksum, priority, drawn, reward in index["samples"]:
            try:
                blob = _file(folder, checksum).read_bytes()
                if sha256(blob) != checksum:
                    raise ValueError("altered")
                sample = Sample.from_bytes(blob)
            except (OSError, ValueError, SampleError):
                self.counts.damaged += 1
                continue
            sample = sample if reward is None else dataclasses.replace(sample, reward=reward)
            self._append(_Entry(sample, priority, drawn, checksum))


def add_all(buffer: Buffer, samples: Iterable[Sample]) -> list[SampleError]:
    """Add samples; returns why some were refused."""
    errors = []
    for sample in samples:
        try:
            buffer.add(sample)
        except SampleError as e:
            errors.append(e)
    return errors


def _file(folder: Path, checksum: str) -> Path:
    return folder / SAMPLES / f"{checksum}.safetensors"
