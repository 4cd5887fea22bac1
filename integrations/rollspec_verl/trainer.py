"""The trainer side, in verl's task runner: rewards to the history, measurements to verl's logger, history to
checkpoints.

Every hook runs verl's own code unchanged. What rollspec adds is caught, logged once, counted and left out: a training
job does not end because a measurement failed. One thing is not caught: an engine that is dead, for which verl would
wait forever (servers.py).
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from rollspec.config import RollspecConfig
from rollspec.engine.vllm.hooks.base import wrap, wrap_all
from rollspec.telemetry.faults import Faults
from rollspec.telemetry.health import HealthWatch
from rollspec.telemetry.metrics import engine_metrics
from rollspec.telemetry.wandb_run import WandbWatch
from rollspec_verl import options, reuse, servers, teacher
from rollspec_verl.rollouts import Rollouts

logger = logging.getLogger("rollspec")

POLL_SECONDS = 0.05
"""verl's replay buffer looks for finished rollouts every 2.0 s (replay_buffer.py:144, `poll_interval`), which rounds
every generation time up to it and would hide what speculation saves."""

POLL_SHARE = 0.05
"""Most of its time that polling may take: with very many prompts one look is slow, and the queue serves others too."""

ENV_LENGTHS = "ROLLSPEC_VERL_LENGTHS"
"""File that gets one JSON line per step about all its responses (loggers take scalars only); unset writes none. Their
lengths, the first and last policy version that verl noted of each, and its keys as `Rollouts.rewards` has them.
"""


def install(module: ModuleType) -> None:
    """Wrap the methods of `PPOTrainer` (verl/trainer/ppo/v1/trainer_base.py). Idempotent; all or nothing."""
    more = ("_rollout_server_managers",)
    if wrap_all(module.PPOTrainer, "verl's PPOTrainer", HOOKS, "nothing is measured", more):
        look = functools.partial(_look, module.ReplayBufferAsync)
        wrap(module.ReplayBuffer, "_sync_metadata_from_transfer_queue", look)


def legacy(module: ModuleType) -> None:
    """Say what `trainer.use_v1=false` goes without."""
    logger.warning("rollspec: trainer.use_v1=false has no hooks: rollouts are accelerated, but nothing is measured.")


class VerlState:
    """What the hooks keep per trainer."""

    def __init__(self, config: RollspecConfig) -> None:
        self.config = config
        self.rollouts: list[Rollouts] = []
        """Of this step: one part per mini-batch, of which verl's `separate_async` trainer has several."""
        self.health = HealthWatch(config.telemetry.health, config.history.max_bytes, _log_line)
        self.faults = Faults(_log_line)
        self.watch = WandbWatch()
        self.step_began = time.perf_counter()

    @classmethod
    def of(cls, trainer: Any) -> VerlState:
        """The trainer's state, made when first asked for."""
        state = trainer.__dict__.get("_rollspec_state")
        if state is None:
            state = trainer.__dict__["_rollspec_state"] = cls(_config(trainer))
        return state  # type: ignore[no-any-return]


def _log_line(text: str) -> None:
    """For the job's log: once the job runs, what the task runner logs does not reach it, and what it prints does."""
    print(text, flush=True)


def _config(trainer: Any) -> RollspecConfig:
    rollout = trainer.config.actor_rollout_ref.rollout
    off = RollspecConfig(enabled=False)
    try:
        config = options.read(rollout)
    except Exception as e:  # the servers were refused these options already; nothing here may add to that
        logger.error("%s", e)
        return off
    if config.enabled and rollout.get("name") != "vllm":
        logger.warning(
            "rollspec: rollout.name=%s is not accelerated, only vllm is; set it, or remove rollspec_verl.",
            rollout.get("name"),
        )
        return off
    return config


# ---- wrappers


def _settle_first(load: Callable[..., Any], self: Any) -> Any:
    """Resolve the job's settings in `_init_dataloader` (trainer_base.py:708): the first method after the one that
    imported this package, before any worker or server exists. They are made with what is written here.
    """
    options.settle(self.config.actor_rollout_ref.rollout)
    return load(self)


def _fit(fit: Callable[..., Any], self: Any, agent_loop_manager: Any) -> Any:
    """A look at the engines before prompts are sent, and the history of the checkpoint that `_load_checkpoint` resumed
    from (trainer_base.py:850, which has set `global_steps`).
    """

    def alive(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A dead engine fails each prompt at once, and sync_refill_failed_groups would send new ones without end.
        servers.require_alive(servers.replicas_of(self))
        return generate(*args, **kwargs)

    state = VerlState.of(self)
    with state.faults.left_out("fit"):
        wrap(agent_loop_manager, "generate_sequences", alive)
        if self.global_steps > 0:
            load(self, state, _resumed_from(self.config.trainer, self.global_steps))
    try:
        return fit(self, agent_loop_manager)
    finally:
        with state.faults.left_out("end"):
            servers.tidy(self)


def _compute_advantage(original: Callable[..., Any], self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Rollouts are finished and scored."""
    out = original(self, batch, *args, **kwargs)
    state = VerlState.of(self)
    with state.faults.left_out("rollouts"):
        take(self, state, Rollouts.read(batch))
    return out


def _save_checkpoint(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Before verl's own part, which ends with the file that names the latest checkpoint: a job that is killed while it
    saves resumes from a checkpoint that is whole.
    """
    state = VerlState.of(self)
    folder = Path(self.config.trainer.default_local_dir).resolve() / f"global_step_{self.global_steps}"
    with state.faults.left_out("save"):
        save(self, state, folder)
    out = original(self, *args, **kwargs)
    with state.faults.left_out("save"):
        prune(state, folder)
    return out


def _step(step: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    VerlState.of(self).step_began = time.perf_counter()
    try:
        return step(self, *args, **kwargs)
    except servers.EngineLost:
        raise
    except Exception as e:
        # verl reports a dead engine as, for example, a batch without trajectories: say what it was.
        sentence = None
        with suppress(Exception):  # the job's own error is the one to show
            sentence = servers.lost(servers.replicas_of(self))
        if sentence is None:
            raise
        raise servers.EngineLost(sentence) from e


def _consume_sync_metrics(consume: Callable[..., Any], self: Any) -> dict[str, Any]:
    """verl merges these (trainer_base.py:674) into the step's metrics right before they are logged."""
    out, state = dict(consume(self)), VerlState.of(self)
    with state.faults.left_out("collecting metrics"):
        out.update(metrics(self, state))
        state.watch.observe(out)
    return out


def _look(asynchronous: type, look: Callable[..., Any], self: Any) -> Any:
    """Look for finished rollouts often, in synchronous training: trainer_separate_async.py:299 reads the interval."""
    began = time.perf_counter()
    out = look(self)
    if not isinstance(self, asynchronous):
        most = self.__dict__.setdefault("_rollspec_poll", self.poll_interval)
        self.poll_interval = min(most, max(POLL_SECONDS, (time.perf_counter() - began) / POLL_SHARE))
    return out


HOOKS: dict[str, Callable[..., Any]] = {
    "_init_dataloader": _settle_first,
    "fit": _fit,
    "step": _step,
    "_compute_advantage": _compute_advantage,
    "_save_checkpoint": _save_checkpoint,
    "_consume_sync_metrics": _consume_sync_metrics,
}


# ---- what they do


def load(trainer: Any, state: VerlState, folder: Path) -> None:
    """The engines take what is rollspec's in a checkpoint's `folder`."""
    own = folder / "rollspec"
    saved = sorted(own.glob("replica_*"))
    if not saved and (own / "drafter").is_dir():  # its engines ended before they had written their parts
        saved = [own / "replica_0"]
    if state.config.enabled and saved:
        # Another number of replicas than when it was saved: histories are shared out again.
        answers = servers.call(trainer, "load", lambda i: {"dir": str(saved[i % len(saved)])})
        print(f"rollspec: history of the checkpoint {saved[0].parent}: {answers}", flush=True)


def save(trainer: Any, state: VerlState, checkpoint: Path) -> None:
    """The engines write what is rollspec's to the folder of a checkpoint."""
    if state.config.enabled:
        servers.call(trainer, "save", lambda i: {"dir": str(checkpoint / "rollspec" / f"replica_{i}")})


def prune(state: VerlState, checkpoint: Path) -> None:
    """Remove what is rollspec's of checkpoints before this one whose weights are gone: verl removes those beyond
    max_actor_ckpt_to_keep and leaves the rest of their folders.
    """
    if state.config.enabled:
        for old in checkpoint.parent.glob("global_step_*"):
            if old != checkpoint and not (old / "actor").exists():
                shutil.rmtree(old / "rollspec", ignore_errors=True)


def take(trainer: Any, state: VerlState, rollouts: Rollouts) -> None:
    """Keep scored rollouts until they are measured, and send their rewards to the engines."""
    state.rollouts.append(rollouts)
    if state.config.enabled:
        if state.config.reuse.mode == "lenient":
            reuse.remember(servers.replicas_of(trainer), rollouts, trainer.global_steps)
        items = rollouts.rewards()
        servers.call(trainer, "rewards", lambda i: {"items": items}, wait=False)


def _measure(trainer: Any, state: VerlState, step: int) -> dict[str, float]:
    """What the step's rollouts were like, all mini-batches together."""
    parts, state.rollouts = state.rollouts, []
    if not parts:
        return {}
    rollouts = Rollouts.join(parts)
    found = rollouts.metrics() | rollouts.epochs(state.health)
    found |= state.health.check(found, step, _suspects(trainer, state, rollouts))
    path = os.environ.get(ENV_LENGTHS)
    if path:
        keys = [keys for *keys, _ in rollouts.rewards()]
        row = {"step": step, "lengths": rollouts.lengths, "versions": rollouts.versions, "keys": keys}
        with open(path, "a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")
    return found


def _suspects(trainer: Any, state: VerlState, rollouts: Rollouts) -> dict[str, list[str]]:
    """What in this job is known to move importance ratios away from 1, or to repeat the last epoch, as clauses."""
    rollout, clauses = trainer.config.actor_rollout_ref.rollout, []
    if rollout.get("top_p", 1.0) < 1.0 or rollout.get("top_k", -1) > 0:
        clauses.append("rollout.top_p and rollout.top_k cut the engine's distribution, and the trainer's is whole")
    if not str(rollout.get("logprobs_mode") or "processed").startswith("processed") and rollout.temperature != 1.0:
        clauses.append(f"rollout.logprobs_mode = {rollout.logprobs_mode} leaves out the temperature")
    if rollout.get("quantization"):
        clauses.append(f"the engine's weights are quantised ({rollout.quantization})")
    if spanning := rollouts.spanning:
        clauses.append(f"{spanning} of {len(rollouts.responses)} responses were sampled by several policy versions")
    mode = state.config.reuse.mode
    repeats = [] if not state.config.enabled or mode == "independent" else [f"reuse.mode = {mode} does that"]
    return {"ratios": clauses, "overlap": repeats}


def _resumed_from(config: Any, step: int) -> Path:
    """The checkpoint's folder, as `_load_checkpoint` finds it."""
    if config.get("resume_mode") == "resume_path":
        return Path(config.resume_from_path).resolve()
    return Path(config.default_local_dir).resolve() / f"global_step_{step}"


def metrics(trainer: Any, state: VerlState, step: int | None = None) -> dict[str, float]:
    """What rollspec says of the rollouts and engines since it was asked last. `step`: where it is not the trainer's."""
    out: dict[str, float] = {}
    with state.faults.left_out("measuring rollouts"):
        out |= _measure(trainer, state, trainer.global_steps if step is None else step)
    generation = getattr(trainer, "timing_raw", {}).get("gen")
    if generation is not None:
        # An asynchronous trainer generates all the time: what it spends there is waiting.
        name = "generation_share" if getattr(trainer, "trainer_mode", "sync") == "sync" else "wait_share"
        out[f"rollspec/rollout/{name}"] = generation / max(time.perf_counter() - state.step_began, 1e-9)
    if not state.config.enabled:
        return out
    answers = servers.call(trainer, "stats")
    out.update(engine_metrics(answers, state.faults.drain()))
    if state.config.drafter.mode == "policy":
        with state.faults.left_out("asking what the policy taught the draft head"):
            out |= teacher.metrics(trainer.actor_rollout_wg.rollspec_teacher(), trainer)
    if (lossy := state.config.reuse).mode == "lenient":
        out["rollspec/reuse/bias"] = lossy.bias
    # verl fills these two for its own MTP drafts only (trainer_base.py:1901), as means over requests
    # (ray_trainer.py:138); here every token counts the same, so a long response weighs more than a short one.
    if drafted := out.get("rollspec/accept/drafted"):
        out["rollout/spec_accept_rate"] = out["rollspec/accept/accepted"] / drafted
        # Drafted tokens over those per draft: the drafts that were verified.
        verified = drafted / out["rollspec/accept/draft_length"]
        out["rollout/spec_accept_length"] = 1.0 + out["rollspec/accept/accepted"] / verified
    return out
