"""Whole verl jobs whose driver, engine or head's trainer is killed in the middle of a save, a swap and a weight sync:
the job ends by its own error or goes on, and what resumes has the head of the last checkpoint.

Processes halt at these points until the test has killed one of them (`tests/support/halting`).
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import young_head
from rollspec_verl.servers import BUCKET_SECONDS
from running_job import RunningJob, metrics_of, running, title_of

from drafter_online.versions import Event, Versions
from examples.demo.job import Job, JobSettings, build_job, prepare_assets
from examples.demo.runner import log_tail

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]

SUPPORT = Path(__file__).parents[1] / "support"
SETTINGS = JobSettings(
    size="tiny", train_prompts=8, prompts_per_step=8, n=4, epochs=200, max_response_length=96, dtype="float32"
)
POINTS = ("save", "swap", "sync")
TITLES = {"engine": "VLLM::", "trainer": "TrainerActor"}
"""How their processes name themselves."""


@dataclasses.dataclass
class Halted:
    """A job that runs, and the points that it can halt at."""

    job: Job
    run: RunningJob
    points: Path

    @property
    def store(self) -> Versions:
        """The head's versions in the newest checkpoint that is whole."""
        return Versions(self.checkpoint / "rollspec" / "drafter" / "versions")

    @property
    def live(self) -> Versions:
        """Those that its trainer has."""
        return Versions(self.job.folder / "drafter" / "versions")

    @property
    def checkpoint(self) -> Path:
        folder = self.points.parent / "checkpoints"
        return folder / f"global_step_{(folder / 'latest_checkpointed_iteration.txt').read_text()}"

    @property
    def steps(self) -> list[dict[str, Any]]:
        return metrics_of(self.job)

    def until(self, condition: Callable[[], Any], seconds: float = 300, every: float = 0.2) -> None:
        """Until it holds; the job must not end meanwhile."""

        def holds() -> bool:
            assert self.run.process.poll() is None, log_tail(self.run.log, lines=60, width=300)
            try:
                return bool(condition())
            except FileNotFoundError:  # not written yet
                return False

        self.run.wait_for(holds, seconds, every)

    def kill_at(self, point: str, who: str) -> None:
        """One of the job's processes, when one of them has come to the point; the job goes on from there."""
        at = self.points / point
        at.with_suffix(".armed").touch()
        self.until(at.with_suffix(".halted").exists, every=0.01)
        for pid in [self.run.process.pid] if who == "driver" else titled(self.run, TITLES[who]):
            os.kill(pid, signal.SIGKILL)
        at.with_suffix(".on").touch()


def titled(run: RunningJob, title: str) -> list[int]:
    """Of the job's processes, those with the title; there is one at least."""
    found = [pid for pid in run.family.alive(strays=True) if title in title_of(pid)]
    assert found, title
    return found


def left(run: RunningJob, but: str | None) -> list[str]:
    """Titles of the job's processes, but for those with one that may stay."""
    titles = [title_of(pid) for pid in run.family.alive(strays=True)]
    return [title for title in titles if title and (but is None or but not in title)]


@pytest.fixture
def start(tmp_path: Path) -> Callable[[str], Any]:
    assets = prepare_assets(SETTINGS, tmp_path / "assets")
    # Every version is promoted at once: four drafts of so young a head decide by chance.
    overrides = (*young_head.RESUMED_OVERRIDES, "drafter.mode=dedicated", "tuning.strategy=static",
                 "tuning.guard.enabled=false", "proposal.budget.rule=fixed")  # fmt: skip
    points = tmp_path / "points"
    points.mkdir()
    more = (f"trainer.default_local_dir={tmp_path / 'checkpoints'}", "trainer.save_freq=1", "trainer.resume_mode=auto")

    def start(name: str) -> Any:
        folder = tmp_path / name
        folder.mkdir()
        for old in points.iterdir():
            old.unlink()
        here = (*overrides, f"drafter.dir={folder / 'drafter'}")
        job = build_job(SETTINGS, assets, folder, speculate=True, preset="long_tail", overrides=here)
        halting = {"ROLLSPEC_TEST_HALT": str(points), "PYTHONPATH": str(SUPPORT / "halting")}
        job = dataclasses.replace(job, command=(*job.command, *more), environment=job.environment | halting)
        return job, points

    return start


def tensors(store: Versions) -> dict[int, dict[str, torch.Tensor]]:
    """Of all that are in a store; each is whole."""
    found = {number: dict(store.load(number).tensors) for number in store.numbers()}
    assert found and all(found.values())
    return found


def same(some: dict[int, dict[str, torch.Tensor]], others: dict[int, dict[str, torch.Tensor]]) -> bool:
    """Whether the versions that both have are the same."""
    both = some.keys() & others.keys()
    return all(torch.equal(t, others[v][name]) for v in both for name, t in some[v].items())


CHAINS = {
    "driver first": (("save", "driver"), ("swap", "engine"), ("sync", "driver")),
    "engine first": (("save", "engine"), ("swap", "driver"), ("sync", "engine")),
}
"""Jobs, each resumed by the next: where they halt, and who is killed."""


@pytest.mark.parametrize("chain", CHAINS)
def test_it_ends_by_its_own_error_and_resumes_with_the_same_head(start: Callable[[str], Any], chain: str) -> None:
    before: list[Event] = []
    weights: dict[int, dict[str, torch.Tensor]] = {}
    step = 0
    for number, (point, who) in enumerate((*CHAINS[chain], ("", ""))):
        job, points = start(f"job-{number}")
        with running(job) as run:
            it = Halted(job, run, points)
            if weights:  # before it trains
                it.until(lambda it=it, weights=weights: weights.keys() <= set(it.live.numbers()), 800)
                assert same(weights, tensors(it.live)), "another head than the checkpoint's is trained further"
            it.until(lambda it=it: it.steps, 800)
            assert it.steps[0]["training/global_step"] == step + 1
            last = before[-1].version if before else 0
            it.until(lambda it=it, last=last: (it.store.promoted() or 0) > last)
            it.until(lambda it=it, step=step: it.steps[-1]["training/global_step"] >= step + 2)
            assert it.store.events()[: len(before)] == before, "another head than the checkpoint's was trained"
            assert same(weights, tensors(it.store))
            for row in it.steps:
                assert row["rollspec/faults"] == 0 and row["rollspec/health/logprob_corr"] > 0.999
            assert it.steps[-1]["rollspec/drafter/version"] > last, "its versions are not swapped in"
            if not point:
                break
            it.kill_at(point, who)
            # A worker that sends weights to an engine that died waits for so long.
            run.wait_for(lambda run=run: run.process.poll() is not None, BUCKET_SECONDS + 120)
            assert run.process.returncode != 0
            # vLLM's engine stays when its server is killed, with rollspec and without; nothing else does.
            stays = TITLES["engine"] if who == "driver" else None
            run.wait_for(lambda run=run, stays=stays: not left(run, stays), 240, every=1.0)
            if who == "engine":
                assert "rollspec: the vLLM engine" in run.log.read_text(errors="replace")
            before, weights, step = it.store.events(), tensors(it.store), int(it.checkpoint.name.rpartition("_")[2])
            assert before and before[-1].verdict == "promoted"


def test_it_goes_on_without_the_heads_trainer(start: Callable[[str], Any]) -> None:
    """Killed three times in one job: Ray starts it again, it takes up its state, and engines take its versions."""
    job, points = start("job")
    with running(job) as run:
        it = Halted(job, run, points)
        it.until(lambda: it.steps, 800)
        for point in POINTS:
            it.until(lambda: it.store.promoted())
            before, at = it.store.promoted(), len(it.steps)
            it.kill_at(point, "trainer")
            assert before is not None
            it.until(lambda before=before: (it.store.promoted() or 0) > before)
            it.until(lambda at=at: len(it.steps) > at + 2)
            tensors(it.store)
        for row in it.steps:
            assert row["rollspec/health/logprob_corr"] > 0.999
        assert it.steps[-1]["rollspec/drafter/version"] > 0
