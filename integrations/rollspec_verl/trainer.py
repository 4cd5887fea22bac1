"""The trainer side, in verl's task runner: rewards to the history, measurements to verl's logger, history to
checkpoints.

Every hook runs verl's own code first and unchanged. What rollspec does after it is caught, logged once and left out:
a training job does not end because a measurement failed.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rollspec.engine.vllm.patches.base import on_import
from rollspec_verl import options
from rollspec_verl.rollouts import Rollouts

logger = logging.getLogger("rollspec")

WAIT_SECONDS = 60.0
"""Bound on waiting for the servers' answers at the end of a step."""

POLL_SECONDS = 0.05
"""verl's replay buffer looks for finished rollouts every 2.0 s (replay_buffer.py, `poll_interval`), which rounds every
generation time up to it and would hide what speculation saves."""

ENV_LENGTHS = "ROLLSPEC_VERL_LENGTHS"
"""File that gets one JSON line per step with all response lengths (loggers take scalars only); unset writes none."""


def register() -> None:
    """Hook the trainer where it is, or will be, imported: only in the task runner."""
    on_import("verl.trainer.ppo.v1.trainer_base", install)


def install(module: ModuleType) -> None:
    """Wrap the methods of `PPOTrainer` (verl/trainer/ppo/v1/trainer_base.py). Idempotent."""
    cls = module.PPOTrainer  # type: ignore[attr-defined]
    if getattr(cls, "_rollspec", False):
        return
    cls._rollspec = True
    _after(cls, "_compute_advantage", _on_rollouts)
    _after(cls, "_save_checkpoint", _on_save)
    _after(cls, "on_train_begin", _on_train_begin)
    _wrap_step(cls)
    _wrap_metrics(cls)
    _wrap_sample(module.ReplayBuffer)  # type: ignore[attr-defined]


class State:
    """What the hooks keep per trainer."""

    def __init__(self, trainer: Any) -> None:
        self.config = options.read(trainer.config.actor_rollout_ref.rollout)
        self.metrics: dict[str, float] = {}
        self.step_began = time.perf_counter()
        self.failed: set[str] = set()

    @classmethod
    def of(cls, trainer: Any) -> State:
        """The trainer's state, made when first asked for."""
        state = trainer.__dict__.get("_rollspec_state")
        if state is None:
            state = trainer.__dict__["_rollspec_state"] = cls(trainer)
        return state  # type: ignore[no-any-return]

    def guard(self, what: str, error: Exception) -> None:
        """Log a failed hook once."""
        if what not in self.failed:
            self.failed.add(what)
            logger.error("rollspec: %s failed and is left out (%s: %s).", what, type(error).__name__, error)


def servers(trainer: Any) -> list[Any]:
    """Handles of the policy's servers, one per replica (trainer_base.py, `_rollout_server_managers`)."""
    return [
        replica.server_handle
        for manager in trainer._rollout_server_managers()
        for replica in manager.get_replicas()
        if replica.server_handle is not None
    ]


def call(trainer: Any, op: str, payload: Callable[[int], dict[str, Any]], wait: bool = True) -> list[dict[str, Any]]:
    """Run one operation on every replica; `payload` takes the replica's number. Without `wait` nothing is returned."""
    import ray

    pending = [server.rollspec_call.remote(op, payload(i)) for i, server in enumerate(servers(trainer))]
    if not wait:
        return []
    ready, _ = ray.wait(pending, num_returns=len(pending), timeout=WAIT_SECONDS)
    return [a for a in ray.get(ready) if a]


# ---- hooks
# --------------------------------------------------------------------------------------------------------------


def _after(cls: type, name: str, hook: Callable[..., None]) -> None:
    original = getattr(cls, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        state = State.of(self)
        try:
            hook(self, state, *args, **kwargs)
        except Exception as e:
            state.guard(hook.__name__.removeprefix("_on_").replace("_", " "), e)
        return out

    setattr(cls, name, wrapped)


def _on_train_begin(trainer: Any, state: State) -> None:
    """Resumed from a checkpoint: its history first (trainer_base.py, `_load_checkpoint`, ran before the first step)."""
    folder = Path(trainer.config.trainer.default_local_dir) / f"global_step_{trainer.global_steps - 1}" / "rollspec"
    if state.config.enabled and folder.is_dir():
        for answer in call(trainer, "load", lambda i: {"dir": str(folder / f"replica_{i}")}):
            logger.warning("rollspec: history of the checkpoint %s: %s", folder, answer)


def _on_save(trainer: Any, state: State) -> None:
    folder = Path(trainer.config.trainer.default_local_dir) / f"global_step_{trainer.global_steps}" / "rollspec"
    if state.config.enabled:
        call(trainer, "save", lambda i: {"dir": str(folder.resolve() / f"replica_{i}")})


def _on_rollouts(trainer: Any, state: State, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Rollouts are finished and scored: measure them, and send their rewards to the engines."""
    rollouts = Rollouts.read(batch)
    state.metrics.update(rollouts.metrics())
    path = os.environ.get(ENV_LENGTHS)
    if path:
        with open(path, "a", encoding="utf-8") as f:
            f.write(json.dumps({"step": trainer.global_steps, "lengths": rollouts.lengths}) + "\n")
    if state.config.enabled:
        items = rollouts.rewards()
        call(trainer, "rewards", lambda i: {"items": items}, wait=False)


def _wrap_step(cls: type) -> None:
    step = cls.step  # type: ignore[attr-defined]

    @functools.wraps(step)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        State.of(self).step_began = time.perf_counter()
        return step(self, *args, **kwargs)

    cls.step = timed  # type: ignore[attr-defined]


def _wrap_metrics(cls: type) -> None:
    """`_consume_sync_metrics` (trainer_base.py) is merged into the step's metrics right before they are logged."""
    consume = cls._consume_sync_metrics  # type: ignore[attr-defined]

    @functools.wraps(consume)
    def with_rollspec(self: Any) -> dict[str, Any]:
        out = dict(consume(self))
        state = State.of(self)
        try:
            out.update(_metrics(self, state))
        except Exception as e:
            state.guard("collecting metrics", e)
        return out

    cls._consume_sync_metrics = with_rollspec  # type: ignore[attr-defined]


def _metrics(trainer: Any, state: State) -> dict[str, float]:
    from rollspec.telemetry.metrics import EngineStats, to_metrics

    out, state.metrics = state.metrics, {}
    generation = trainer.timing_raw.get("gen")
    if generation is not None:
        out["rollspec/rollout/generation_share"] = generation / max(time.perf_counter() - state.step_began, 1e-9)
    if not state.config.enabled:
        return out
    answers = [a for a in call(trainer, "stats", lambda i: {}) if "error" not in a]
    stats = EngineStats.merge(EngineStats.from_dict(a) for a in answers)
    out.update(to_metrics(stats))
    # verl fills these two for its own MTP drafts only (trainer_base.py:1901); here they are weighted by tokens.
    if stats.drafted:
        out["rollout/spec_accept_rate"] = stats.accepted / stats.drafted
    if stats.verified:
        out["rollout/spec_accept_length"] = 1.0 + stats.accepted / stats.verified
    return out


def _wrap_sample(cls: type) -> None:
    sample = cls.sample  # type: ignore[attr-defined]

    @functools.wraps(sample)
    def sample_promptly(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.poll_interval = min(self.poll_interval, POLL_SECONDS)
        return sample(self, *args, **kwargs)

    cls.sample = sample_promptly  # type: ignore[attr-defined]
