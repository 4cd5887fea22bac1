"""The training thread with a trainer that counts steps, and without an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_like import like

from drafter_online.idle import Idle
from drafter_online.versions import Versions
from rollspec import RollspecConfig
from rollspec.head import idle

RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"


class Buffer:
    def __init__(self, rewards: dict[str, float]) -> None:
        self.reward = rewards.update

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[range]:
        return iter([range(4096)])

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)


class Trainer:
    """Counts steps instead of making them."""

    def __init__(self, folder: Path) -> None:
        self.counts = SimpleNamespace(steps=0, tokens=0, preempted=0)
        self.last_loss = 1.0
        self.rewards: dict[str, float] = {}
        self.buffer = Buffer(self.rewards)
        self.checkpoints = SimpleNamespace(wait=lambda: None)
        self.fail = False
        self.published: list[int] = []  # steps so far

    def micro_step(self, interrupt: Callable[[], bool]) -> Any:
        if self.fail:
            raise RuntimeError("planted")
        if interrupt():
            return SimpleNamespace(skipped="preempted")
        time.sleep(0.001)
        self.counts.steps += 1
        return SimpleNamespace(
            skipped=None,
            terms={"accept_0": 2.0, "loss": 1.0},
            acceptance=SimpleNamespace(rates=[0.5], length=1.5 + self.counts.steps / 100),
        )

    def checkpoint(self) -> None:
        pass

    def publish(self, store: Versions, dtype: Any) -> int:
        self.published.append(self.counts.steps)
        return store.publish({"w": torch.ones(1)}, {}, base="b", target_version=0)


class Trainings:
    """Makes training threads of jobs whose folders are under `folder`, and stops them at the end."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def make(self: Any) -> None:
            self._idle, self._trainer = Idle(settle_seconds=0.0), Trainer(folder)

        monkeypatch.setattr(idle.IdleTraining, "_make", make)
        monkeypatch.setattr(idle.IdleTraining, "_refresh", lambda self, again=False: None)
        monkeypatch.setattr(idle, "add_all", lambda buffer, samples: [])
        self.folder = folder
        self.made: list[Any] = []

    def __call__(self, name: str = "job", asleep: bool = False, **more: Any) -> Any:
        given = {"proposal.drafters": ["eagle3"], "drafter.mode": "idle", "drafter.publish_every": 20}
        config = RollspecConfig.load({**given, "drafter.dir": str(self.folder / name), **more}, env={})
        offered: list[Path] = []
        swapper = SimpleNamespace(open=True, canary=None, offer=lambda folder, canary=True: offered.append(folder))
        faults: dict[str, int] = {}
        bridge = SimpleNamespace(config=config, faults=faults, engine=SimpleNamespace(version=0))
        bridge.count = lambda cause: faults.update({cause: faults.get(cause, 0) + 1})
        head = SimpleNamespace(
            asleep=asleep,
            bridge=bridge,
            capture=SimpleNamespace(ready=True, take=lambda n: []),
            swapper=swapper,
            runner=like(RUNNER, device=torch.device("cpu"), dtype=torch.float32),
        )
        t = idle.IdleTraining(head)  # type: ignore[arg-type]
        self.made.append(t)
        return SimpleNamespace(t=t, offered=offered, head=head, swapper=swapper, faults=faults)

    def stop(self) -> None:
        for t in self.made:
            t.stop()
            t._thread.join(5)


def steps(t: Any) -> int:
    return t._trainer.counts.steps if t._trainer is not None else 0


def until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30.0
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return False


def still(t: Any) -> bool:
    """No step is made any more."""
    time.sleep(0.15)
    before = steps(t)
    time.sleep(0.2)
    return steps(t) == before
