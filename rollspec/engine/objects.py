"""Versions through Ray's object store, for engines that do not see the trainer's folder.

The trainer puts a version into the store once; nodes pass it on among themselves, and the engines of a node share a
copy. An engine's worker is a child of a Ray process and none itself, so a short-lived process asks for it: whatever
becomes of the cluster, the engine is not touched. Where this fails the version comes over the wire, in pieces.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger("rollspec")

ACTOR_VARIABLE = "ROLLSPEC_DRAFTER_ACTOR"
"""How engines find the trainer's actor: JSON of `address`, `namespace`, `name`, and the `endpoint` it listens at."""

ASK_SECONDS = 30.0
GET_SECONDS = 300.0
MOST_SECONDS = ASK_SECONDS + GET_SECONDS + 30.0  # with importing and connecting


def remember(ray: Any, name: str, endpoint: str) -> None:
    """Tell this process and its children where the trainer's actor is."""
    context = ray.get_runtime_context()
    found = {"address": context.gcs_address, "namespace": context.namespace, "name": name, "endpoint": endpoint}
    os.environ[ACTOR_VARIABLE] = json.dumps(found)


class Shelf:
    """The trainer's side: versions as objects, each put once, the newest ones kept."""

    def __init__(self, keep: int = 2) -> None:
        self._keep = keep
        self._refs: dict[int, Any] = {}

    def put(self, number: int, folder: Path) -> list[Any]:
        """A reference in a list, so that Ray hands on the reference and not what it refers to.

        Raises:
            OSError: the version is not there (any more).
        """
        import ray

        from drafter_online.versions import CONFIG, MODEL

        if number not in self._refs:
            self._refs[number] = ray.put({n: (folder / n).read_bytes() for n in (CONFIG, MODEL)})
        found = self._refs[number]
        for old in sorted(self._refs)[: -self._keep]:
            del self._refs[old]  # Ray frees it once nobody reads it
        return [found]


def get(number: int, folder: Path, endpoint: str) -> Getting | None:
    """Begin to get a version; None where no actor listens at `endpoint`, or no process can be started."""
    try:
        if json.loads(os.environ.get(ACTOR_VARIABLE, "{}")).get("endpoint") != endpoint:
            return None
        return Getting(number, folder)
    except (OSError, ValueError, AttributeError) as e:
        logger.debug("rollspec: no process for a version (%s)", e)
        return None


class Getting:
    """A process that writes a version's files into a folder."""

    def __init__(self, number: int, folder: Path) -> None:
        self._end = time.monotonic() + MOST_SECONDS
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process; a pipe could fill
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rollspec.engine.objects", str(number), str(folder)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._log, start_new_session=True,
        )  # fmt: skip

    @property
    def busy(self) -> bool:
        """Whether it runs; it is ended when its time is up."""
        if time.monotonic() > self._end:
            self._kill()
        return self._process.poll() is None

    @property
    def problem(self) -> str | None:
        """Why it failed, once it is not busy; None where it did not."""
        if self._process.returncode == 0:
            return None
        self._log.seek(0)
        said = self._log.read(1 << 16).decode(errors="replace").strip().splitlines()
        return said[-1][:300] if said else f"exit status {self._process.returncode}"

    def close(self) -> None:
        """End it."""
        self._kill()
        self._log.close()

    def _kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def main() -> int:
    """The process: NUMBER FOLDER."""
    import ray

    signal.alarm(int(MOST_SECONDS))  # whatever becomes of the engine that waits for it
    where = json.loads(os.environ[ACTOR_VARIABLE])
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    ray.init(address=where["address"], namespace=where["namespace"], log_to_driver=False, configure_logging=False)
    try:
        (reference,) = ray.get(ray.get_actor(where["name"]).version.remote(number), timeout=ASK_SECONDS)
        for name, data in ray.get(reference, timeout=GET_SECONDS).items():
            (folder / Path(name).name).write_bytes(data)
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
