"""The continual drafter as a daemon: feedback of one or more engines in, guarded versions out.

    service = Service(ServiceConfig(dir="drafter", target="MODEL"))
    service.start()              # threads: one listens, one trains
    service.run(stop)            # until `stop` is set
    service.close()              # everything is on disk afterwards

    dir/versions   what is published, and what became of it        dir/state      checkpoints of training
    dir/buffer     samples (unless keep_samples is off)            dir/lock       one daemon per folder

Every part may fail without the others: a full disk costs versions and checkpoints, a damaged sample costs itself, an
engine that disconnects costs its feedback. What is wrong is an alarm, and is tried again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import threading
import time
from collections import Counter, deque
from typing import Any

import msgspec

from drafter_online import engines, startup, wire
from drafter_online.activity import Watched
from drafter_online.alarms import Alarms
from drafter_online.buffer import add_all
from drafter_online.engines import ConnectedEngine, Engines, Hello, Progress, Status, read
from drafter_online.errors import BufferFileError, ServiceError, TrainingError, VersionError
from drafter_online.fetch import piece
from drafter_online.hub import Hub
from drafter_online.idle import Idle
from drafter_online.inbox import Inbox
from drafter_online.job_checkpoint import JobCheckpoint, finish
from drafter_online.modes import normal_mode
from drafter_online.release import Release
from drafter_online.rewards import MOST_PENDING
from drafter_online.samples import Sample
from drafter_online.settings import ServiceConfig
from drafter_online.target import TargetParts
from drafter_online.trainer import StepReport
from drafter_online.versions import Versions
from drafter_online.wire import Awake, Message
from drafter_online.worth import WhenItPays, Worth

log = logging.getLogger(__name__)

WAIT_SECONDS = 0.05  # of training, for something to do
BACK_OFF = (1.0, 60.0)  # seconds after a failed step: first, longest
ASK_SECONDS = 30.0  # for the target's tensors, once an engine that was asked has not sent them


class Service:
    """One daemon.

    Raises:
        DrafterError: in one sentence, why it cannot be started: another one has the folder, the endpoint is taken, the
            head does not fit, ...
    """

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.started = time.time()
        token = wire.read_token(config.token_file)
        wire.check_endpoint(config.endpoint, token)
        self.engines, self.alarms = Engines(), Alarms()
        self.inbox = Inbox(config.inbox_bytes)
        self.counts: Counter[str] = Counter()
        self.versions = Versions(config.dir / "versions", config.keep_versions)
        self._stop = threading.Event()
        self.rewards: deque[tuple[str, float]] = deque(maxlen=MOST_PENDING)  # request, reward
        self.leaves = threading.Event()  # another trainer wants the folder
        self._clock = Awake()
        self._alone, self._served = self._clock.now(), False
        self._saved = time.monotonic()
        self._fresh = 0  # tokens that came since the start
        self._asked = -ASK_SECONDS  # when an engine was last asked for the target's tensors
        self.parts = TargetParts()
        self.device = config.yields_to and Watched(config.yields_to)  # the engine's that it is shared with
        self._on = config.device
        self.idle: Idle[StepReport] = Idle(settle_seconds=0.02 if self.device else 0.0)
        self.watch = self.idle.watch
        self.when = WhenItPays(config.publish_every) if config.train_when == "pays" else None
        self.terms: dict[str, float] = {}  # of the latest loss
        self.worth = Worth(config.training.update_interval)
        self.length = 1.0  # acceptance length on the latest training windows
        self.job_checkpoint = JobCheckpoint(self)
        self._lock_file = startup.lock_folder(config.dir)
        try:
            finish(config.dir)
            self.trainer = startup.trainer(config, self.versions, self.alarms)
            self._published_at, self._tokens_before = self.trainer.counts.steps, self.trainer.counts.tokens
            self.release = Release(self.versions, self.engines, self.publish_first, config.patience)
            rejected = self.trainer.config.rejected > 0
            self.hub = Hub(config.endpoint, self, token=token, welcome={"rejected": rejected})
        except BaseException:
            os.close(self._lock_file)
            raise
        self._thread = threading.Thread(target=self._train, name="drafter-training", daemon=True)

    # ---- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen and train, on threads."""
        self._alone = self._clock.now() + 9 * (self.config.linger or 0.0)  # an engine takes its time to load
        self.hub.start()
        self._thread.start()

    def run(self, stop: threading.Event) -> str:
        """Look after alarms until `stop` is set, no engine was there for `linger`, or one left and `leaves` is set."""
        while not stop.wait(0.25):
            self.tick()
            if self._clock.now() - self._alone > (self.config.linger or math.inf):
                return f"no engine was connected for {self.config.linger:g} s"
            if self.leaves.is_set():
                if self._served and not len(self.hub):
                    return "its engines are gone and another trainer wants its folder"
                self.leaves.clear()
        return "it was stopped"

    def tick(self) -> None:
        """Look after alarms, and notice whether an engine is connected."""
        if len(self.hub):
            self._alone, self._served = self._clock.now(), True
        failed = self.trainer.checkpoints.failed if self.trainer.checkpoints is not None else None
        self.alarms.set("checkpoint", failed)
        self.alarms.set("hang", self.watch.hangs)
        self.alarms.set("verdicts", self.release.problem)
        self.alarms.set("device", self.device.missing if self.device and len(self.inbox) else None)
        self.alarms.set("collapse", self.engines.collapsed)
        self.alarms.set("faults", self.engines.degraded)

    def close(self) -> None:
        """Stop training within a micro-step, save everything, and free the endpoint and the folder."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(60)
        self.hub.close()
        self.trainer.checkpoint()
        self.trainer.close()
        self._save()
        os.close(self._lock_file)

    # ---- feedback, on the hub's thread ------------------------------------------------------------------------------

    def greeted(self, session: str, body: dict[str, Any]) -> str | None:
        """An engine says hello: is it one that this drafter drafts for?"""
        hello: Hello = read(body, Hello)
        why = engines.refusal(self.trainer.drafter, hello)
        if why is None:
            self.engines.by_session[session] = ConnectedEngine(hello)
        return why

    def gone(self, session: str) -> None:
        """An engine has disconnected."""
        engine = self.engines.by_session.pop(session, None)
        if engine is not None:
            self.release.left(engine.name)

    def received(self, session: str, message: Message) -> None:
        """A message of an engine."""
        if message.kind == "samples":
            self._admit(session, message)
        elif message.kind == "status":
            self._report(session, read(message.body, Status))
        elif message.kind == "rewards":
            self.rewards.extend(read(message.body, dict[str, float]).items())
        elif message.kind == "fetch":
            self.hub.send(session, piece(self.versions, message.body))
        elif message.kind == "target":
            self.parts.add(message)
            if self.parts.ready:
                self._asked = -ASK_SECONDS
        elif message.kind in ("save", "load"):
            self.job_checkpoint.ask(session, message)

    def _admit(self, session: str, message: Message) -> None:
        sample = Sample.of_parts(dict(message.tensors), message.body).validate()
        engines.check_sample(self.trainer.drafter, sample)
        engine = self.engines.by_session.get(session)
        version = sample.target_version
        if self.config.recency:
            version = int(time.time() // self.config.recency)
        if engine is not None and not engine.reported:  # no engine: the policy's training pass, of the version served
            version = max(version, self.engines.policy)
        self.inbox.put(dataclasses.replace(sample, target_version=version))
        if engine is not None:
            engine.samples += 1

    def _report(self, session: str, status: Status) -> None:
        before, seconds = self.engines.total() if self.when else None, self.engines.seconds
        engine = self.engines.report(session, status)
        if engine is None:
            return
        if self.when is not None and before is not None:
            now = self.engines.total()
            self.when.served(now.emitted - before.emitted, now.steps - before.steps, self.engines.seconds - seconds)
        for found in status.verdicts[-16:]:
            if self.release.judge(engine.name, found):
                text = f"version {found.version} was {found.verdict.replace('_', ' ')} by {engine.name}: {found.reason}"
                log.info("drafter-online: %s", text)
                self.alarms.set("rollback", None if found.verdict == "promoted" else text)
        c, loss = self.trainer.counts, self.trainer.last_loss
        progress = Progress(
            c.steps, c.tokens, loss if math.isfinite(loss) else None, self.terms, self.length,
            len(self.trainer.buffer), self.watch.age, self.watch.hangs, len(self.hub),
            *(({**self.idle.sums, "preempted": c.preempted}, self.idle.levels) if self.device else ()),
        )  # fmt: skip
        self.hub.send(session, Message("status", msgspec.to_builtins(progress)))
        if status.policy > self.parts.policy and time.monotonic() - self._asked > ASK_SECONDS:
            self._asked = time.monotonic()
            self.hub.send(session, Message("refresh", {"policy": status.policy}))
        offer = self.release.offer(engine)
        if offer is not None:
            number, canary = offer
            with contextlib.suppress(OSError):  # the store was deleted: the next version will do
                manifest = (self.versions.path(number) / "manifest.json").read_bytes()
                self.hub.send(session, Message("offer", {"version": number, "canary": canary, "manifest": manifest}))

    # ---- training ---------------------------------------------------------------------------------------------------

    @property
    def training(self) -> str:
        """What the training does now: `running`, or why it does not."""
        if not len(self.trainer.buffer):
            return "waiting for feedback"
        return "running" if self._credit() > 0 else "waiting for new feedback"

    def _credit(self) -> float:
        due = not self.worth.waits(self.engines.policy)
        return due * (self.config.passes * self._fresh - (self.trainer.counts.tokens - self._tokens_before))

    def _train(self) -> None:
        failures, again = 0, 0.0
        while not self._stop.is_set():
            self.job_checkpoint.run()
            try:
                if time.monotonic() < again or not self._turn():
                    self._stop.wait(WAIT_SECONDS)
                    continue
                failures = 0
            except TrainingError as e:
                self.alarms.set("training", f"training has ended: {e.plain}")
                return
            except Exception as e:  # a bad sample, a device that is gone: serving continues, and this is tried again
                failures += 1
                self.counts["failed_steps"] += 1
                text = f"{failures} training steps in a row failed, the last with {type(e).__name__}: {e}"
                self.alarms.set("training", text)
                log.debug("drafter-online: a training step failed", exc_info=e)
                again = time.monotonic() + min(BACK_OFF[0] * 2 ** min(failures - 1, 16), BACK_OFF[1])

    def _wanted(self) -> float | None:
        """Since when an engine has the device that this trains on; None where training may use it."""
        return self.device.wanted() if self.device else None

    def _turn(self) -> bool:
        """While no engine needs the device: take what came, make a micro-step, publish where it is time."""
        self.idle.cost.at(self.device.busy if self.device else 0.0)
        if self._wanted() is not None:
            self.idle.allows(True)
            if self.device and self.device.was_lent():
                self.trainer.lends()
            return False
        if self.device and self.device.device != self._on:
            self.trainer.to(startup.torch_device(self.device.device))
            self._on = self.device.device
        self._take()
        if not len(self.trainer.buffer) or not self.idle.allows(False):
            return False
        if time.monotonic() - self._saved > self.config.save_seconds:
            self._save()
        if self.trainer.counts.steps - self._published_at >= self.config.publish_every:
            self._publish()  # also where training waits: an earlier version may have been on canary until now
        if self._credit() <= 0 or (self.when is not None and not self.when.allows(self.trainer.counts.steps)):
            return False
        used = self.idle.counts.used
        report = self.idle.tick(
            self._wanted, lambda interrupt: self.trainer.micro_step(lambda: self._stop.is_set() or interrupt())
        )
        if report is None:
            return False
        if self.when is not None:
            self.when.trained(self.idle.counts.used - used)
        if report.skipped is not None:
            self.alarms.set("loss", "the latest losses were not finite" if report.skipped == "not_finite" else None)
            return report.skipped not in ("empty", "out_of_memory")
        self.terms = {k: v for k, v in report.terms.items() if k != "loss"}
        self.length = report.acceptance.length
        self.worth.observe(self.length)
        self.alarms.set("loss", None)
        self.alarms.set("training", None)
        return True

    def _take(self) -> None:
        samples = self.inbox.take(64)
        if samples:
            self._fresh += sum(map(len, samples))
            self.counts["refused_samples"] += len(add_all(self.trainer.buffer, samples))
        if rewards := dict(self.rewards.popleft() for _ in range(len(self.rewards))):
            self.counts["rewards"] += self.trainer.buffer.reward(rewards)
        if found := self.parts.take():
            with normal_mode():
                self.trainer.drafter.refresh(found, self.trainer.buffer.token_counts())
            self.counts["refreshed"] += 1

    def _publish(self) -> None:
        """What was learned, as a version: no other one is on canary, and it pays, or nothing better comes soon."""
        waited = self.trainer.counts.steps - self._published_at
        if self.release.candidate is not None and waited < 10 * self.config.publish_every:
            return
        if self._credit() > 0 and not self.worth.pays(self.trainer.buffer, waited, self.config.publish_every):
            return
        self._published_at = self.trainer.counts.steps
        if not self.engines.policy:  # a policy that does not move sends its tensors no second time
            startup.fit_vocabulary(self.config, self.trainer, self.alarms)
        self.versions.floor = self.engines.newest
        policy = self.engines.policy if self.config.recency else None
        try:
            number = self.trainer.publish(self.versions, startup.dtype(self.config), policy)
        except VersionError as e:
            self.alarms.set("store", e.plain)
            self.counts["failed_publications"] += 1
            return
        self.alarms.set("store", None)
        self.counts["published"] += 1
        self.worth.published(self.engines.policy)
        self.release.published(number)
        log.info("drafter-online: version %d is published (loss %.3f).", number, self.trainer.last_loss)
        self._save()

    def publish_first(self) -> int:
        """Publish the head that engines were started with; for going back where nothing else is good."""
        self.versions.floor = self.engines.newest
        return startup.publish_first(self.config, self.versions)

    def _save(self) -> None:
        self._saved = time.monotonic()
        buffer = self.trainer.buffer
        if self.config.recency:
            age = int((time.time() - 3600 * self.config.retention_hours) // self.config.recency)
            self.counts["expired"] += buffer.forget(age)
        if not self.config.keep_samples:
            return
        try:
            buffer.save(self.config.dir / "buffer")
            self.alarms.set("buffer", None)
        except BufferFileError as e:
            self.alarms.set("buffer", e.plain)

    # ---- checkpoints of a job, on the thread that trains ------------------------------------------------------------

    def save_all(self) -> None:
        """Write state and samples.

        Raises:
            ServiceError: the state cannot be written.
        """
        self.trainer.checkpoint()
        self.trainer.close()
        self._save()
        assert self.trainer.checkpoints is not None
        if self.trainer.checkpoints.failed is not None:
            raise ServiceError(f"{self.trainer.checkpoints.failed}.")

    def taken_over(self) -> None:
        """The trainer resumed another state, whose buffer and versions are in the folder now."""
        self.trainer.buffer = startup.buffer(self.config, self.alarms)
        self._published_at = self.trainer.counts.steps
        self._tokens_before, self._fresh = self.trainer.counts.tokens, 0
        self.parts = TargetParts()
        running = self.versions.floor = self.release.running
        before = self.release.current
        # Engines take nothing older than what they run, and under one number they may run something else.
        if running and (before is None or before <= running):
            self.release.promote(self.publish_first() if before is None else before, "from a checkpoint")

    # ---- what others ask --------------------------------------------------------------------------------------------

    @property
    def trains(self) -> bool:
        """Whether training continues."""
        return self._thread.is_alive()

    def healthy(self) -> tuple[bool, str]:
        """Whether both threads live and no step hangs, and what does not."""
        if not self.hub.listens:
            return False, "the thread that listens has ended"
        if not self.trains:
            return False, "the thread that trains has ended"
        if (hangs := self.watch.hangs) is not None:
            return False, hangs
        return True, "ok"
