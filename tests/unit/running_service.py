"""Daemons with a tiny real head, in the test's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drafter_online.service import Service
from drafter_online.settings import settings

TRAINING = {"batch_tokens": 96, "window_tokens": 48, "warmup_steps": 2, "learning_rate": 3e-3, "checkpoint_every": 10}


class Services:
    """Starts daemons, each in its folder under `folder`, and closes those that are still open at the end."""

    def __init__(self, folder: Path, target: Path, head: Path) -> None:
        self.folder, self.target, self.head = folder, target, head
        self.open: list[Service] = []

    def __call__(self, folder: str = "daemon", **kw: Any) -> Service:
        given: dict[str, Any] = {
            "dir": self.folder / folder, "target": str(self.target), "head": self.head,
            "endpoint": "tcp://127.0.0.1:0", "publish_every": 15, "training": TRAINING, "dtype": "float32", **kw,
        }  # fmt: skip
        service = Service(settings(given))
        service.worth.pays = lambda samples, steps, earliest: steps >= earliest  # type: ignore[method-assign]  # they are few
        self.open.append(service)
        service.start()
        return service

    def close(self) -> None:
        for service in self.open:
            if not service._stop.is_set():
                service.close()
