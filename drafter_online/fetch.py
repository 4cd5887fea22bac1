"""A version on its way from the daemon to an engine: its files in pieces, so that feedback does not wait for them.

    fetch = Fetch(manifest, folder)
    while (ask := fetch.wants()) is not None:
        link.send(Message("fetch", ask)); ...; fetch.take(chunk)
    fetch.path                   # folder/00000007, to be verified by `Versions.load` like any other

The daemon answers each of them with a `piece`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from drafter_online.errors import VersionError, WireError
from drafter_online.files import oserror_as
from drafter_online.versions import CONFIG, MANIFEST, MODEL, Versions, parse
from drafter_online.wire import Message

MOST_BYTES = 16 << 30
CHUNK = 8 << 20  # bytes of a version per message


class Fetch:
    """One version on its way.

    Args:
        manifest: its manifest.json, as the daemon sent it.
        folder: where it is put; what else is there (the version before, which was swapped in or refused) is deleted.

    Raises:
        VersionError: the manifest is damaged, the version is larger than anything sensible, or cannot be kept here.
    """

    def __init__(self, manifest: bytes, folder: Path) -> None:
        try:
            m = parse(manifest)
            self._sizes = {n: int(m.files[n]["bytes"]) for n in (CONFIG, MODEL)}
            sizes = self._sizes.values()
            if not 0 < m.version < 10**8 or min(sizes) < 0 or sum(sizes) > MOST_BYTES:
                raise ValueError(f"version {m.version} of {self._sizes} bytes")
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise VersionError(f"a version is refused: its manifest is damaged ({e}).") from e
        self.number = m.version
        self.path = Versions(folder).path(m.version)
        self._have = dict.fromkeys(self._sizes, 0)
        shutil.rmtree(folder, ignore_errors=True)
        with oserror_as(VersionError, f"a version cannot be kept in {folder}"):
            self.path.mkdir(0o700, parents=True)
            (self.path / MANIFEST).write_bytes(manifest)

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
            raise VersionError(
                f"version {self.number} is refused: its {name} ends at {self._have[name]} bytes or is "
                f"longer than the {self._sizes[name]} of its manifest."
            )
        with (
            oserror_as(VersionError, f"version {self.number} cannot be written to {self.path}"),
            open(self.path / name, "ab") as f,
        ):
            f.write(data.numpy().data)
        self._have[name] += data.numel()
        return True


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
