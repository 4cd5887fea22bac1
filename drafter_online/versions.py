"""Versions of a drafter in a folder: published whole or not at all, and verified before anything runs them.

    store/
      00000007/model.safetensors   the drafter's own weights; what it shares with the target is not in it
      00000007/config.json         as the engine and `speculators` read it
      00000007/manifest.json       checksums, shapes, base, target version, parent, provenance
      events.jsonl                 what became of versions: promoted, rolled_back, refused

A publisher fills a temporary folder, syncs it to disk and renames it to the next free number. Renaming a folder onto
one that has files in it fails, so two publishers never get one number and a reader never sees half a version.

    store = Versions(folder)
    number = store.publish(weights, config, base=base, target_version=17)
    version = store.load(number, base=base, newer_than=running)     # VersionError: one sentence, nothing loaded
    store.record(number, "promoted", "canary: 1.9 accepted per step against 1.6")
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drafter_online.errors import VersionError
from drafter_online.files import digest, oserror_as, sha256, sync_folder, temporary_folder, write_synced

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "drafter-online-version-1"
MODEL, CONFIG, MANIFEST, EVENTS = "model.safetensors", "config.json", "manifest.json", "events.jsonl"
STALE_SECONDS = 3600.0  # a temporary folder older than this was left by a publisher that died

Kind = Literal["eagle3", "draft_model"]
Verdict = Literal["promoted", "rolled_back", "refused"]


@dataclass(frozen=True)
class Manifest:
    """What a version says about itself. `tensors`: name -> [dtype, shape]; `files`: name -> {sha256, bytes}."""

    version: int
    kind: Kind
    base: str  # the target it is for: `architecture.base_of`
    target_version: int  # the newest policy version among its training data
    parent: int | None  # the version it was trained on from
    created: str  # UTC, ISO 8601
    files: dict[str, dict[str, Any]]
    tensors: dict[str, list[Any]]
    provenance: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Version:
    """A verified version: its manifest, configuration and weights (on the CPU)."""

    manifest: Manifest
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def number(self) -> int:
        """The version's number in its store."""
        return self.manifest.version


@dataclass(frozen=True)
class Event:
    """A verdict on a version."""

    version: int
    verdict: Verdict
    reason: str
    time: str


class Versions:
    """A folder of versions.

    Args:
        keep: newest versions kept; the promoted one and `on_canary` are kept besides.
    """

    def __init__(self, folder: Path | str, keep: int = 4) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.floor = 0
        """New versions are numbered above this: engines run it, though it may be gone from the store."""
        self.on_canary: int | None = None
        """Engines try this version, or may yet: it is kept however many are published meanwhile."""

    def path(self, number: int) -> Path:
        """The folder of a version, whether or not it exists."""
        return self.folder / f"{number:08d}"

    def numbers(self) -> list[int]:
        """Published versions, oldest first; empty where the store does not exist."""
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(n) for n in names if len(n) == 8 and n.isdigit())

    def latest(self) -> int | None:
        """The newest published version, whatever became of it."""
        return max(self.numbers(), default=None)

    def candidate(self, after: int | None = None) -> int | None:
        """The newest version above `after` that was neither refused nor rolled back."""
        bad = {e.version for e in self.events() if e.verdict != "promoted"}
        good = (n for n in self.numbers() if n not in bad and (after is None or n > after))
        return max(good, default=None)

    def promoted(self) -> int | None:
        """The version promoted last and not rolled back since."""
        stack: list[int] = []
        for e in self.events():
            stack = [v for v in stack if v != e.version]
            if e.verdict == "promoted":
                stack.append(e.version)
        return stack[-1] if stack else None

    # ---- publishing -------------------------------------------------------------------------------------------------

    def publish(
        self,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        *,
        base: str,
        target_version: int,
        kind: Kind = "eagle3",
        parent: int | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> int:
        """Write a version and return its number, above every other in the store and above `parent`.

        Raises:
            VersionError: a weight is not finite or belongs to the target, or the store cannot be written; nothing of
                the version is left behind.
        """
        from safetensors.torch import save

        _check_payload(tensors, kind)
        plain = {n: t.detach().to("cpu").contiguous() for n, t in tensors.items()}
        files = {
            MODEL: save(plain, metadata={"format": "pt"}),
            CONFIG: json.dumps(dict(config), indent=2, sort_keys=True).encode(),
        }
        manifest = Manifest(
            version=0,
            kind=kind,
            base=base,
            target_version=target_version,
            parent=parent,
            created=_now(),
            files={n: {"sha256": sha256(b), "bytes": len(b)} for n, b in files.items()},
            tensors={n: [str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in plain.items()},
            provenance=dict(provenance or {}),
        )
        what = f"a drafter version cannot be written to {self.folder}"
        with (
            oserror_as(VersionError, what, "make it writable, free space, or choose another folder"),
            temporary_folder(self.folder, ".publish") as temporary,
        ):
            for name, data in files.items():
                write_synced(temporary / name, data)
            number = self._rename(temporary, manifest, parent)
        self._prune()
        return number

    def _rename(self, temporary: Path, manifest: Manifest, parent: int | None) -> int:
        number = max(self.latest() or 0, parent or 0, self.floor)
        while True:
            number += 1
            data = {**dataclasses.asdict(manifest), "version": number}
            written = json.dumps({"format": FORMAT, **data, "checksum": digest(data)}, indent=2)
            write_synced(temporary / MANIFEST, written.encode())
            sync_folder(temporary)
            try:
                os.rename(temporary, self.path(number))
            except OSError as e:
                if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                continue  # another publisher was faster: the next number
            sync_folder(self.folder)
            return number

    def _prune(self) -> None:
        """Drop what retention does not keep; what cannot be deleted now is tried again at the next publication."""
        kept = self.promoted(), self.on_canary
        for number in self.numbers()[: -self.keep]:
            if number not in kept:
                # Renamed first: a reader sees the whole version or none.
                doomed = self.folder / f".publish-old-{number:08d}-{uuid.uuid4().hex[:8]}"
                with contextlib.suppress(OSError):
                    os.rename(self.path(number), doomed)
                    shutil.rmtree(doomed, ignore_errors=True)
        for left in self.folder.glob(".publish-*"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > STALE_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def manifest(self, number: int) -> Manifest:
        """A version's manifest, verified by its own checksum.

        Raises:
            VersionError: the version is not there, or its manifest is damaged.
        """
        path = self.path(number) / MANIFEST
        try:
            found = parse(path.read_bytes())
        except FileNotFoundError as e:
            have = f"it has {self.numbers()}" if self.folder.is_dir() else "the folder does not exist"
            raise VersionError(f"version {number} is not in {self.folder}; {have}.") from e
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise _refused(number, f"{path} is damaged ({e})") from e
        if found.version != number:
            raise _refused(number, f"its manifest is that of version {found.version}")
        return found

    def load(self, number: int, *, base: str | None = None, newer_than: int | None = None) -> Version:
        """Verify a version and read its weights.

        Args:
            base: the target it is to draft for; another one is refused.
            newer_than: the version that runs; this one or an older one is refused (None: any).

        Raises:
            VersionError: in one sentence, what is wrong: missing, truncated, altered, of another base, older than what
                runs, non-finite, or with weights of the target in it.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        m = self.manifest(number)
        if base is not None and m.base != base:
            raise _refused(number, f"it is for the target {m.base!r}, not {base!r}")
        if newer_than is not None and number <= newer_than:
            raise _refused(number, f"it is not newer than version {newer_than}, which runs")
        blobs = {}
        for name in (MODEL, CONFIG):
            path = self.path(number) / name
            with oserror_as(VersionError, f"drafter version {number} is refused: {path} cannot be read"):
                blobs[name] = path.read_bytes()
            if sha256(blobs[name]) != m.files.get(name, {}).get("sha256"):
                raise _refused(number, f"{path} does not match its checksum: it is truncated or altered")
        try:
            tensors = load(blobs[MODEL])
            _check_payload(tensors, m.kind)
        except SafetensorError as e:
            raise _refused(number, f"{MODEL} is not a readable safetensors file ({e})") from e
        except VersionError as e:
            raise _refused(number, e.plain.rstrip(".")) from e
        return Version(m, json.loads(blobs[CONFIG]), tensors)

    # ---- verdicts ---------------------------------------------------------------------------------------------------

    def record(self, number: int, verdict: Verdict, reason: str = "") -> Event:
        """Append a verdict to `events.jsonl`.

        Raises:
            VersionError: the file cannot be written.
        """
        event = Event(number, verdict, reason, _now())
        line = json.dumps(dataclasses.asdict(event), separators=(",", ":")).encode() + b"\n"
        what = f"the verdict {verdict!r} on version {number} cannot be written to {self.folder / EVENTS}"
        with oserror_as(VersionError, what):
            self.folder.mkdir(parents=True, exist_ok=True)
            # One write in append mode: concurrent recorders do not mix their lines.
            with open(self.folder / EVENTS, "ab", buffering=0) as f:
                f.write(line)
                os.fsync(f.fileno())
        return event

    def events(self) -> list[Event]:
        """All verdicts, oldest first. A line that a crash cut short is left out."""
        try:
            lines = (self.folder / EVENTS).read_bytes().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):
                found.append(Event(**json.loads(line)))
        return found


def parse(manifest: bytes) -> Manifest:
    """The contents of a manifest.json.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is damaged, or none.
    """
    data = json.loads(manifest)
    checksum = data.pop("checksum")
    if data.pop("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    if checksum != digest(data):
        raise ValueError("its checksum does not match")
    return Manifest(**data)


def _check_payload(tensors: Mapping[str, Tensor], kind: Kind) -> None:
    if not tensors:
        raise VersionError("a version without weights.")
    for name, t in tensors.items():
        # The target's embedding is shared by reference in the engine: loading it would change the target.
        if kind == "eagle3" and ("embed_tokens" in name or name.startswith("verifier_")):
            raise VersionError(f"{name} belongs to the target and must not be in a drafter version.")
        if t.is_floating_point() and not bool(t.isfinite().all()):
            raise VersionError(f"{name} has NaN or infinity in it.")


def _refused(number: int, why: str) -> VersionError:
    return VersionError(f"drafter version {number} is refused: {why}.")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
