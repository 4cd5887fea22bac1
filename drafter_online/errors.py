"""The errors a user can meet. Each message is one sentence: which field or file, which value, what to do."""

from __future__ import annotations


class DrafterError(Exception):
    """Base of everything drafter_online raises on purpose; shown with its name before the sentence."""

    @property
    def plain(self) -> str:
        """The sentence alone."""
        return super().__str__()

    def __str__(self) -> str:
        return f"drafter-online: {self.plain}"


class SampleError(DrafterError, ValueError):
    """A training sample whose fields do not fit each other, or bytes that are not a sample."""


class VersionError(DrafterError):
    """A drafter version, or the folder of versions, that cannot be used."""


class HeadError(DrafterError, ValueError):
    """A target or draft checkpoint that a head cannot be made of."""


class BufferFileError(DrafterError):
    """A saved buffer that cannot be read or written."""


class TrainingError(DrafterError):
    """Training that cannot continue: nothing good to go back to, or a checkpoint that cannot be read or written."""


class WireError(DrafterError):
    """A message that is refused, or a connection that cannot be made. `kind`: what refusals are counted by."""

    def __init__(self, kind: str, why: str) -> None:
        self.kind = kind
        what = "" if kind in ("token", "endpoint") else "a message is refused: "
        super().__init__(f"{what}{why}.")


class ServiceError(DrafterError):
    """A daemon that cannot be started or asked for what it has not."""


class Preempted(Exception):  # noqa: N818 - not an error: the engine needs the machine
    """A micro-step was asked to stop before it changed anything."""
