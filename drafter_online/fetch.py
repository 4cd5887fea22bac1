"""A version that is copied from the daemon in pieces, for an engine that does not see its store.

fetch = Fetch(manifest, folder)
while (ask := fetch.wants()) is not None:
    link.send(Message("fetch", ask)); ...; fetch.take(chunk)
path = fetch.done()          # folder/00000007, to be verified by `Versions.load` like any other

The daemon answers each of them with a `piece`.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from drafter_online.errors import VersionError, WireError
from drafter_online.files import digest
from drafter_online.versions import CONFIG, MANIFEST, MODEL, Versions
from drafter_online.wire import Message

MOST_BYTES = 16 << 30
CHUNK = 8 << 20  # bytes of a version per message
KEEP = 2  # versions that stay in the folder besides the newest


class Fetch:
    """One version on its way.

    Args:
        manifest: its manifest.json, as the daemon sent it.
        folder: where versions are kept here.

    Raises:
        VersionError: the manifest is damaged, or the version is larger than anything sensible.
    """

    def __init__(self, manifest: bytes, folder: Path) -> None:
        try:
            data = json.loads(manifest)
            if data.pop("checksum") != digest({k: v for k, v in data.items() if k != "format"}):
                raise ValueError("its checksum does not match")
            self.number = int(data["version"])
            self._sizes = {n: int(data["files"][n]["bytes"]) for n in (CONFIG, MODEL)}
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise VersionError(f"drafter-online: a version is refused: its manifest is damaged ({e}).") from e
        if (
            not 0 < self.number < 10**8
            or not 0 <= sum(self._sizes.values()) <= MOST_BYTES
            or min(self._sizes.values()) < 0
        ):
            raise VersionError(f"drafter-online: version {self.number} is refused: it has {self._sizes} bytes.")
        self._manifest = manifest
        self._store = Versions(folder)
        self.folder = folder / f".publish-fetch-{self.number:08d}-{os.getpid()}"  # where its files are put together
        self._have = dict.fromkeys(self._sizes, 0)
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
        except OSError as e:
            raise VersionError(f"drafter-online: a version cannot be kept in {folder} ({e.strerror or e}).") from e

    def wants(self) -> dict[str, Any] | None:
        """What to ask for next; None when everything is here."""
        for name, size in self._sizes.items():
            if self._have[name] < size:
                return {"version": self.number, "file": name, "offset": self._have[name]}
        return None

    def take(self, message: Message) -> bool:
        """A piece came. False: it is not the one that was asked for.

        Raises:
            VersionError: the version is not there any more, has another size than its manifest says, or cannot be
                written here.
        """
        ask, data = self.wants(), message.tensors.get("data")
        if ask is None or data is None or any(message.body.get(k) != v for k, v in ask.items()):
            return False
        name = ask["file"]
        if not data.numel() or self._have[name] + data.numel() > self._sizes[name]:
            self.close()
            raise VersionError(
                f"drafter-online: version {self.number} is refused: its {name} ends at {self._have[name]} bytes or is "
                f"longer than the {self._sizes[name]} of its manifest."
            )
        try:
            with open(self.folder / name, "ab") as f:
                f.write(data.numpy().tobytes())
        except OSError as e:
            self.close()
            raise VersionError(
                f"drafter-online: version {self.number} cannot be written to {self.folder} ({e.strerror or e})."
            ) from e
        self._have[name] += data.numel()
        return True

    def done(self) -> Path:
        """The version's folder, once nothing is wanted any more.

        Raises:
            VersionError: it cannot be put there.
        """
        path = self._store.path(self.number)
        try:
            (self.folder / MANIFEST).write_bytes(self._manifest)
            shutil.rmtree(path, ignore_errors=True)
            os.rename(self.folder, path)
        except OSError as e:
            self.close()
            raise VersionError(
                f"drafter-online: version {self.number} cannot be put at {path} ({e.strerror or e})."
            ) from e
        for old in self._store.numbers()[: -1 - KEEP]:
            shutil.rmtree(self._store.path(old), ignore_errors=True)
        return path

    def close(self) -> None:
        """Give up; what came is deleted."""
        shutil.rmtree(self.folder, ignore_errors=True)


def piece(versions: Versions, body: dict[str, Any]) -> Message:
    """The daemon's answer to what `Fetch.wants`: up to `CHUNK` bytes of a version's file, none past its end.

    Raises:
        WireError: the message asks for no part of a version.
    """
    number, name, offset = body.get("version"), body.get("file"), body.get("offset")
    if not isinstance(number, int) or name not in (MODEL, CONFIG) or not isinstance(offset, int) or offset < 0:
        raise WireError("malformed", f"there is no {name!r} of version {number!r} to fetch from {offset!r}")
    try:
        with open(versions.path(number) / name, "rb") as f:
            f.seek(offset)
            data = f.read(CHUNK)
    except OSError:
        data = b""
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return Message("chunk", {"version": number, "file": name, "offset": offset}, {"data": tensor})
