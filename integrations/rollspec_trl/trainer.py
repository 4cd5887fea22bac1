"""Hooks on `GRPOTrainer`: its step to the policy version, rewards to the history, measurements to its logger, history
to its checkpoints.

TRL's own code runs unchanged; what rollspec adds is caught, logged once, counted and left out.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from rollspec.engine.vllm.hooks.base import wrap_all
from rollspec.log_once import LogOnce
from rollspec.proposal.base import as_tokens, prompt_key
from rollspec.telemetry.health import rollout_metrics
from rollspec.telemetry.metrics import engine_metrics
from rollspec_trl import engines
from rollspec_trl.state import TrlState

log_once = LogOnce()


def install(module: ModuleType) -> None:
    """Wrap the methods of `GRPOTrainer` (trl/trainer/grpo_trainer.py)."""
    hooks = {
        "_generate_and_score_completions": _batch,
        "_calculate_rewards": _rewards,
        "log": _log,
        "_save_checkpoint": _save,
        "_load_optimizer_and_scheduler": _resume,
    }
    wrap_all(module.GRPOTrainer, "TRL's GRPOTrainer", hooks, "nothing is measured")


def state_of(trainer: Any) -> TrlState | None:
    """The state of the trainer's engine; None where it does not generate with vLLM."""
    generation = trainer.__dict__.get("vllm_generation")
    if generation is None:
        log_once.warn("use_vllm=False is not accelerated; set use_vllm=True, or leave rollspec out")
        return None
    return TrlState.of(generation)


# ---- hooks


def _batch(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Prompts in, scored rollouts out."""
    state = state_of(self)
    if state is None:
        return original(self, *args, **kwargs)
    if state.step is None:
        state.step = lambda: int(self.state.global_step)
        self.__dict__["_rollspec_logged"] = time.perf_counter()
    state.turns, state.scores = [], None
    out = original(self, *args, **kwargs)
    if self.model.training:
        items: list[list[Any]] = []
        with state.faults.left_out("rollouts"):
            _on_batch(state, out, items, self.accelerator.num_processes == 1)
        # By itself: with a server all ranks meet in it, whatever failed on one of them.
        with state.faults.left_out("rewards"):
            _send_rewards(self, state, items)
    return out


def _rewards(original: Callable[..., Any], self: Any, inputs: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
    """TRL returns the rewards of all ranks, [batch of all ranks, reward functions], NaN where one does not apply."""
    out = original(self, inputs, prompts, *args, **kwargs)
    state = state_of(self)
    if state is not None:
        with state.faults.left_out("rewards"):
            first = self.accelerator.process_index * len(prompts)
            rewards = out[first : first + len(prompts)].float().cpu().numpy()  # [local batch, functions]
            weights = self.reward_weights.float().cpu().numpy()
            state.scores = np.where(np.isnan(rewards).all(1), np.nan, np.nansum(rewards * weights, 1))
    return out


def _on_batch(state: TrlState, out: dict[str, Any], items: list[list[Any]], alone: bool) -> None:
    """Rollouts are finished and scored: measure them; `items` gets the rewards that the engine records.

    `alone`: this process has every rollout of the job, so that the n-th of a prompt is the same sample in every epoch.
    """
    mask = out["completion_mask"].bool()  # [local batch, longest]
    if "tool_mask" in out:
        mask &= out["tool_mask"].bool()
    sampled, trained = out.get("sampling_per_token_logps"), out.get("old_per_token_logps")
    logprobs = None if sampled is None else _by_response(sampled, mask)
    if logprobs is not None:
        state.logprobs[0].extend(logprobs)
        if trained is not None:
            state.logprobs[1].extend(_by_response(trained, mask))
    if not state.turns:
        return
    prompts, responses, begun = state.turns[0]
    if alone and len(state.turns) == 1:
        state.overlaps.append(_epochs(state, prompts, responses, logprobs))
    # TRL can mask truncated responses, so with one turn they are counted before that.
    state.lengths.extend(map(len, responses) if len(state.turns) == 1 else map(int, mask.sum(1).tolist()))
    if state.scores is None or len(state.scores) != len(responses):
        return
    state.rewards.extend(map(float, state.scores))
    rows = zip(prompts, responses, state.scores, strict=True)
    items.extend([prompt_key(p), prompt_key(r), float(s)] for p, r, s in rows if np.isfinite(s))
    # Later turns of a rollout with tools, where they are known: the engine has them under the first one's prompt.
    scores = {r.name: s for r, s in zip(begun, state.scores, strict=False) if r is not None}
    for later, said, rollouts in state.turns[1:]:
        for prompt, response, r in zip(later, said, rollouts, strict=False):
            if r is not None and np.isfinite(scores[r.name]):
                items.append([prompt_key(prompt[: r.first]), prompt_key(response), float(scores[r.name])])


def _by_response(values: Any, mask: Any) -> list[Any]:
    """Rows [tokens of the response] of a padded tensor."""
    return [row[kept].float().cpu().numpy() for row, kept in zip(values, mask, strict=True)]


def _epochs(state: TrlState, prompts: list[Any], responses: list[Any], logprobs: list[Any] | None) -> dict[str, float]:
    """How much of the last epoch's responses these repeat; a sample is named by its place among its prompt's."""
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
    keys = [prompt_key(p) for p in prompts]
    samples = [str(next(numbers[key])) for key in keys]
    return state.health.epochs(keys, samples, [as_tokens(r) for r in responses], logprobs)


def _suspects(trainer: Any) -> dict[str, list[str]]:
    """What in this job is known to move importance ratios away from 1, or to repeat the last epoch, as clauses."""
    generation, config = trainer.vllm_generation, engines.config()
    clauses = []
    if (getattr(generation, "top_p", None) or 1.0) < 1.0 or (getattr(generation, "top_k", None) or 0) > 0:
        clauses.append("top_p and top_k cut the engine's distribution, and the trainer's is whole")
    kept = config.enabled and config.reuse.mode == "replay"
    return {"ratios": clauses, "overlap": ["reuse.mode = replay does that"] if kept else []}


def _send_rewards(trainer: Any, state: TrlState, items: list[list[Any]]) -> None:
    if not engines.config().enabled:
        return
    if trainer.vllm_generation.mode == "server" and trainer.accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        items = gather_object(items)  # the main process talks to the server
    if state.engine is not None and items:
        state.engine.call("rewards", {"items": items})


def _log(original: Callable[..., Any], self: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """A training step is logged (evaluations, and the summary at the end, have no `loss`)."""
    if self.model.training and "loss" in logs:
        state = state_of(self)
        if state is not None:
            with state.faults.left_out("collecting metrics"):
                _add_metrics(self, state, logs)
            state.watch.observe(logs)
    return original(self, logs, *args, **kwargs)


def _add_metrics(trainer: Any, state: TrlState, logs: dict[str, Any]) -> None:
    now = time.perf_counter()
    since = trainer.__dict__.get("_rollspec_logged", now)
    trainer.__dict__["_rollspec_logged"] = now
    seconds, state.generation_seconds = state.generation_seconds, 0.0
    mine: dict[str, list[Any]] = {"lengths": state.lengths, "rewards": state.rewards}
    mine["answers"] = [state.engine.call("stats")] if state.engine is not None else []
    engine, trained = state.logprobs
    overlaps = [found for found in state.overlaps if found]
    state.lengths, state.rewards, state.logprobs, state.overlaps = [], [], ([], []), []
    parts = [mine]
    if trainer.accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        parts = gather_object([mine])  # nothing before this may raise on one rank only: the others would wait
    faults = state.faults.drain()
    lengths = [n for p in parts for n in p["lengths"]]
    measured = rollout_metrics(lengths, [r for p in parts for r in p["rewards"]], engine, trained)
    for name in {name for found in overlaps for name in found}:
        measured[name] = float(np.mean([found[name] for found in overlaps if name in found]))
    if trainer.accelerator.process_index == 0:  # whose metrics are logged
        measured |= state.health.check(measured, int(trainer.state.global_step), _suspects(trainer))
    logs.update(measured)
    logs["rollspec/rollout/generation_seconds"] = seconds
    logs["rollspec/rollout/generation_share"] = seconds / max(now - since, 1e-9)
    if engines.config().enabled:
        logs.update(engine_metrics([a for p in parts for a in p["answers"]], faults))


# ---- checkpoints


def _save(original: Callable[..., Any], self: Any, model: Any, trial: Any, *args: Any, **kwargs: Any) -> Any:
    """TRL removes old checkpoints whole, so their histories go with them."""
    out = original(self, model, trial, *args, **kwargs)
    state = state_of(self)
    # A server may be on another machine and outlives the trainer: its history is its own (history.dir).
    if state is not None and state.engine is not None and self.vllm_generation.mode == "colocate":
        checkpoint = Path(self._get_output_dir(trial=trial)).resolve() / f"checkpoint-{self.state.global_step}"
        rank = self.accelerator.process_index
        with state.faults.left_out("saving history"):
            state.engine.call("save", {"dir": str(checkpoint / "rollspec" / f"replica_{rank}")})
    return out


def _resume(original: Callable[..., Any], self: Any, checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
    """`train(resume_from_checkpoint=...)`: its history is loaded once the engine has its weights and version."""
    out = original(self, checkpoint, *args, **kwargs)
    state = state_of(self) if checkpoint is not None else None
    if state is not None and self.vllm_generation.mode == "colocate":
        saved = sorted(Path(checkpoint).resolve().glob("rollspec/replica_*"))
        if saved:  # another number of ranks than when it was saved: histories are shared out again
            state.resume = saved[self.accelerator.process_index % len(saved)]
    return out
