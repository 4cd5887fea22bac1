"""Finds or starts the trainer of a job (`drafter.mode` without an endpoint): one for all its replicas.

Where Ray runs, it is a named actor, which Ray starts again where it dies; elsewhere a process on this machine, behind
a socket in a folder that only this user can enter. The first replica that builds an engine starts it and the others
find it. It is no process's child: it ends by itself when no engine has been connected for `LINGER` seconds, however the
job ended, or when the next job wants its folder; its state is in drafter.dir. With `drafter.mode: idle` it goes to the
device of the first replica that made a step, and trains while the engine there has nothing to do.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter_online.activity import give_way
from drafter_online.files import replace, try_lock
from rollspec.config import RollspecConfig
from rollspec.machine import TRAINER_CORES, when_orphaned

if TYPE_CHECKING:
    from drafter_online.service import Service

logger = logging.getLogger("rollspec")

LINGER = 90.0
"""Seconds without an engine: longer than an engine takes to start again."""

NICE = {"idle": 19, "dedicated": 10}
"""How far a trainer on the CPU gives way: `idle` is on the engine's own cores, and ends there what it has begun when a
request comes.
"""

START_SECONDS = 120.0
"""Bound on waiting for a Ray actor to say where it listens."""

LEAVE_SECONDS = 30.0
"""Bound on waiting for the trainer of a job before to save its state and end."""

RUNNING = "trainer.json"
"""File of a trainer that can be asked to end: its process, and its settings."""

ACTOR = "rollspec-drafter-"
"""What names of trainers in a Ray cluster begin with."""

RESTARTS = 3
"""Times that Ray starts an actor again that died. It resumes from its folder, and engines find it where it was."""


def settle(config: RollspecConfig, target: str) -> RollspecConfig:
    """The configuration with the trainer's endpoint and folder filled in; where none can be started, with training off.

    Args:
        config: with the head's folder in `proposal.head.model`.
        target: folder (or hub name) of the target.
    """
    try:
        ray = sys.modules.get("ray")
        on_ray = ray is not None and ray.is_initialized()
        job = secrets.token_hex(6) if on_ray else _job()  # the first replica's, where they share no folder
        config = config.change({"drafter.dir": str(folder_of(config, job))})
        if on_ray:
            endpoint, folder = _actor(ray, config, target)
            if folder != str(config.drafter.dir):
                _leave(Path(str(config.drafter.dir)))
                config = config.change({"drafter.dir": folder})
        else:
            endpoint = _process(config, target)
    except Exception as e:  # an engine without a trainer is an engine
        logger.warning("rollspec: the drafter is not trained, because its trainer cannot be started (%s).", e)
        return config.change({"drafter.mode": "off"})
    logger.info("rollspec: the drafter is trained behind %s.", endpoint)
    return config.change({"drafter.endpoint": endpoint})


def options(config: RollspecConfig, target: str) -> dict[str, Any]:
    """The daemon's settings, in JSON types: by policy versions, and gone with the job."""
    d = config.drafter
    where = {"yields_to": str(devices(Path(str(d.dir))))} if d.mode == "idle" else {"device": d.device}
    return where | {
        "dir": str(d.dir),
        "target": target,
        "head": config.proposal.head.model,
        "publish_every": d.publish_every,
        "train_when": d.train_when,
        "buffer_bytes": d.buffer_bytes,
        "training": config.drafter_training,
        "recency": 0,
        "linger": LINGER,
        "job": True,
    }


def folder_of(config: RollspecConfig, job: str) -> Path:
    """Where the trainer keeps its state: drafter.dir, in history.dir, or a temporary folder of this job."""
    if config.drafter.dir is not None:
        return config.drafter.dir
    if config.history.dir is not None:
        return config.history.dir / "drafter"
    return _private("job-" + _short(job)) / "state"


def devices(folder: Path) -> Path:
    """Where engines on this machine say when they compute, each by the name of its device, to the trainer with this
    folder.
    """
    return _run_folder(folder) / "devices"


# ---- a process ------------------------------------------------------------------------------------------------------


def _process(config: RollspecConfig, target: str) -> str:
    folder = config.drafter.dir
    assert folder is not None
    run = _run_folder(folder)
    endpoint = f"ipc://{run}/wire"
    given = {**options(config, target), "endpoint": endpoint}
    lock = try_lock(run / "lock")
    if lock is None:
        lock = _of_job_before(run, given)
    if lock is None:  # the trainer that another replica started has it
        return endpoint
    try:
        (run / RUNNING).unlink(missing_ok=True)  # of a job before, which was killed, as its state
        _leave(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "daemon.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "rollspec.engine.daemon", json.dumps(given)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=_environment(config),
                pass_fds=[lock],  # which the trainer keeps until it ends, in whatever way
            )
        threading.Thread(target=process.wait, name="rollspec-daemon", daemon=True).start()  # no zombie
    finally:
        os.close(lock)
    return endpoint


def _of_job_before(run: Path, given: dict[str, Any]) -> int | None:
    """The lock of a trainer with other settings, once it has ended; None where it has these, or engines use it."""
    try:
        pid, before = json.loads((run / RUNNING).read_bytes())
    except (OSError, ValueError):  # it is being started
        return None
    if before == given:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGHUP)
    lock, end = None, time.monotonic() + LEAVE_SECONDS
    while lock is None and time.monotonic() < end:
        time.sleep(0.25)
        lock = try_lock(run / "lock")
    if lock is None:
        changed = sorted(k for k in given if before.get(k) != given[k])
        logger.warning(
            "rollspec: engines use the drafter's trainer of %s, so it keeps its settings, which differ in: %s.",
            given["dir"], ", ".join(changed),
        )  # fmt: skip
    return lock


def _environment(config: RollspecConfig) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "ROLLSPEC" and not k.startswith("ROLLSPEC__")}
    if config.drafter.mode == "idle":
        kept.pop("CUDA_VISIBLE_DEVICES", None)  # it finds the engine's among all
    elif config.drafter.device == "cpu":
        kept["CUDA_VISIBLE_DEVICES"] = ""
    return kept


def _run_folder(folder: Path) -> Path:
    """On this machine, of the trainer with this folder; short: the path of a socket has 107 bytes at most."""
    return _private(_short(str(folder.resolve())))


def _leave(folder: Path) -> None:
    """The job has ended: a state in no folder of the user's goes with it."""
    if folder.parent.parent == _temporary():
        shutil.rmtree(folder.parent, ignore_errors=True)


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"rollspec-drafter-{os.getuid()}"


def _private(name: str) -> Path:
    """A folder below the temporary one that only this user can enter."""
    parent = _temporary()
    parent.mkdir(mode=0o700, exist_ok=True)
    if parent.stat().st_uid != os.getuid() or parent.stat().st_mode & 0o077:
        raise PermissionError(f"{parent} is not this user's alone")
    (parent / name).mkdir(mode=0o700, exist_ok=True)
    return parent / name


def _job() -> str:
    """What the replicas of one job on this machine have in common."""
    ranks = [os.environ[name] for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT") if name in os.environ]
    return "-".join([*ranks, str(os.getppid())]) if ranks else str(os.getpid())


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _give_way(given: dict[str, Any]) -> None:
    """Of this thread, and so of those that it will start: engines come first, on their cores and on the trainer's."""
    idle = "yields_to" in given
    if idle or given.get("device") == "cpu":
        give_way(NICE["idle" if idle else "dedicated"])
    if not idle:  # else it is on the engine's
        _take_cores()


def _take_cores() -> None:
    """Move the threads of this process, and so those that they will start, to the trainer's cores."""
    text = os.environ.get(TRAINER_CORES, "")
    try:
        spans = [[int(n) for n in part.split("-")] for part in text.split(",") if part.strip()]
        cores = {core for span in spans for core in range(span[0], span[-1] + 1)}
        for thread in os.listdir("/proc/self/task") if cores else ():
            os.sched_setaffinity(int(thread), cores)
    except (ValueError, OSError) as e:
        logger.warning(
            "rollspec: %s=%r names no cores of this machine (%s); the trainer keeps those of its engine. Write it as "
            "2,5-7.", TRAINER_CORES, text, e,
        )  # fmt: skip


def main() -> int:
    """The process: a service with the settings in its only argument."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    given = json.loads(sys.argv[1])
    _give_way(given)  # first: what is imported here starts threads
    from drafter_online.errors import DrafterError
    from drafter_online.service import Service
    from drafter_online.settings import settings

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        service = Service(settings(given))
    except DrafterError as e:
        logger.error("%s", e)
        return 2
    signal.signal(signal.SIGHUP, lambda *_: service.leaves.set())
    replace(
        Path(given["endpoint"].removeprefix("ipc://")).with_name(RUNNING), json.dumps([os.getpid(), given]).encode()
    )
    service.start()
    reason = service.run(stop)
    service.close()
    _leave(service.config.dir)
    logger.info("rollspec: the drafter's trainer has ended because %s.", reason)
    return 0


# ---- a Ray actor ----------------------------------------------------------------------------------------------------


class TrainerActor:
    """The same service as a Ray actor; it ends its process itself, also when Ray's node is gone and its engines stay.

    Args:
        given: settings of the service without its endpoint.
        token: what engines prove themselves with, also to an actor that was started again.
    """

    def __init__(self, given: dict[str, Any], token: str) -> None:
        import ray

        from drafter_online.wire import TOKEN_VARIABLE

        _give_way(given)
        if "yields_to" in given:  # Ray shows it no device, as it asks for none; it finds the engine's among all
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        self._token = os.environ[TOKEN_VARIABLE] = token
        self._service = _listening(given, f"tcp://{ray.util.get_node_ip_address()}")
        self._service.start()
        threading.Thread(target=self._run, name="drafter-service", daemon=True).start()

    def _run(self) -> None:
        import ray

        status = 1  # Ray starts it again
        orphaned = threading.Event()
        threading.Thread(target=when_orphaned, args=(os.getppid(), orphaned), daemon=True).start()
        try:
            self._service.run(orphaned)
            self._service.close()
            _leave(self._service.config.dir)
            if not orphaned.is_set():
                ray.kill(ray.get_actor(actor_name(ray)), no_restart=True)
            status = 0
        finally:
            os._exit(status)

    def leave(self, folder: str) -> None:
        """Save and end where this is the trainer's folder and its engines are gone."""
        if folder == str(self._service.config.dir):
            self._service.leaves.set()
            while self._service.leaves.is_set():  # if it ends, until the process does
                time.sleep(0.1)

    def address(self) -> tuple[str, str, str]:
        """Endpoint, token and folder."""
        return self._service.hub.endpoint, self._token, str(self._service.config.dir)


def _listening(given: dict[str, Any], host: str) -> Service:
    """The service, behind the port that it had before where this is the same host and the port is free."""
    from drafter_online.errors import WireError
    from drafter_online.service import Service
    from drafter_online.settings import settings

    known = Path(given["dir"]) / "endpoint"
    before = known.read_text(errors="replace") if known.is_file() else ""
    service = None
    if before.rpartition(":")[0] == host:
        try:
            service = Service(settings({**given, "endpoint": before}))
        except WireError as e:
            logger.warning("rollspec: engines that know the drafter's trainer at %s will not find it (%s).", before, e)
    service = service or Service(settings({**given, "endpoint": f"{host}:0"}))
    with contextlib.suppress(OSError):  # engines that start later find it all the same
        replace(known, service.hub.endpoint.encode())
    return service


def actor_name(ray: Any) -> str:
    """Of this job's trainer."""
    return f"{ACTOR}{ray.get_runtime_context().get_job_id()}"


def _actor(ray: Any, config: RollspecConfig, target: str) -> tuple[str, str]:
    """The actor's endpoint and folder."""
    from drafter_online.wire import TOKEN_VARIABLE

    name = actor_name(ray)
    place = _place(ray, config)
    found = {a["name"]: a["namespace"] for a in ray.util.list_named_actors(all_namespaces=True)}
    theirs = name in found  # another replica's
    for other, namespace in () if theirs else found.items():
        if other.startswith(ACTOR):  # of a job before, which may still have the folder
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                before = ray.get_actor(other, namespace=namespace)
                ray.get(before.leave.remote(str(config.drafter.dir)), timeout=LEAVE_SECONDS)
    actor = (
        ray.remote(TrainerActor)
        # Detached: a replica that started it may end before the others.
        .options(name=name, get_if_exists=True, lifetime="detached", max_restarts=RESTARTS, **place)
        .remote(options(config, target), secrets.token_urlsafe(32))
    )
    try:
        endpoint, token, folder = ray.get(actor.address.remote(), timeout=START_SECONDS)
    except ray.exceptions.GetTimeoutError as e:
        if theirs:
            raise TimeoutError(f"the actor {name} did not answer for {START_SECONDS:g} s") from e
        ray.kill(actor)  # it must not begin when no job waits for it
        raise TimeoutError(
            f"no node of the Ray cluster had {place} free for {START_SECONDS:g} s, or starting took longer; change "
            "drafter.ray or drafter.device"
        ) from e
    os.environ[TOKEN_VARIABLE] = token  # the engine's processes are children of this one
    return endpoint, folder


def _place(ray: Any, config: RollspecConfig) -> dict[str, Any]:
    """What the actor asks of the node that it is put on, in Ray's names."""
    if config.drafter.mode == "idle":  # beside the engine
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = ray.get_runtime_context().get_node_id()
        return {"num_cpus": 0.0, "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False)}
    gpus = float(config.drafter.device.startswith("cuda"))
    return {"num_cpus": 0.0, "num_gpus": gpus, "resources": dict(config.drafter.ray.resources)}


if __name__ == "__main__":
    sys.exit(main())
