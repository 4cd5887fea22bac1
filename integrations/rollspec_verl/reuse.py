"""LOSSY reuse of the last epoch's responses in verl (`reuse.mode: lenient`), in three parts:

- the agent loop says with each request which of its prompt's samples it is (`install_single`);
- the task runner sends a step's finished rollouts, with the log-probs they were sampled with, to every server
  (`remember`): which server gets a prompt in the next epoch is the load balancer's choice;
- the server verifies, cuts and continues (`ReusingServer`, around rollspec/sampling/lenient_reuse.py).

Single-turn rollouts of text only. Whatever else comes is generated whole, and the reason is logged once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rollspec.config import HistoryConfig, RollspecConfig
from rollspec.engine.vllm.hooks.base import wrap
from rollspec.head import metadata
from rollspec.log_once import LogOnce
from rollspec.proposal.base import prompt_key
from rollspec.proposal.history import tokenizer_name
from rollspec.sampling import lenient_reuse, scoring
from rollspec.sampling.lenient_reuse import LenientReuse, Prefix
from rollspec.telemetry.faults import Faults
from rollspec_verl import options, resume
from rollspec_verl.rollouts import Rollouts

logger = logging.getLogger("rollspec")
log_once = LogOnce()

SAMPLE = "sample"
"""Key, in a request's own settings, of the sample's name: session and output number, as in verl's trajectory keys."""

SINGLE_TURN = "SingleTurnAgentLoop"

# ---- the agent loops


_VALIDATES: contextvars.ContextVar[bool] = contextvars.ContextVar("_VALIDATES", default=False)
_REUSES: dict[int, bool] = {}  # by the identity of a process's whole configuration


def install(module: ModuleType) -> None:
    """Note which rollouts validate (`rollout_trace_attr`, agent_loop.py:670); say what is not reused. Idempotent.

    Not the loops' worker: Ray wraps every method of an actor's class when the class is made, inherited ones too, so
    what is patched onto `AgentLoopWorker` later is never called.
    """
    wrap(module, "rollout_trace_attr", _trace)
    wrap(module.AgentLoopBase, "__init__", _init)


def install_single(module: ModuleType) -> None:
    """Wrap `SingleTurnAgentLoop.run` (single_turn_agent_loop.py:38): its requests carry their sample. Idempotent."""
    wrap(module.SingleTurnAgentLoop, "run", _run)


@contextlib.contextmanager
def _trace(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    token = _VALIDATES.set(bool(kwargs.get("validate")))
    try:
        with original(*args, **kwargs):
            yield
    finally:
        _VALIDATES.reset(token)


def _init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    name = type(self).__name__
    if name != SINGLE_TURN and not _VALIDATES.get() and _lenient(self):
        log_once.warn(f"responses of the agent loop {name} are not reused, only those of {SINGLE_TURN} are")


async def _run(original: Callable[..., Any], self: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
    if not _VALIDATES.get() and _lenient(self):
        if (session := kwargs.get("session_id")) is not None:
            sampling_params = resume.marked(sampling_params, {SAMPLE: f"{int(session)}_0"})
        else:
            log_once.warn(
                "nothing is reused because verl does not number the samples of a prompt here; use trainer.use_v1=true"
            )
    return await original(self, sampling_params, *args, **kwargs)


def _lenient(loop: Any) -> bool:
    on = _REUSES.get(id(loop.config))
    if on is None:
        try:
            config = options.read(loop.rollout_config)
            on = config.enabled and config.reuse.mode == "lenient"
        except Exception as e:  # the servers were refused these options already
            logger.error("%s", e)
            on = False
        _REUSES[id(loop.config)] = on
    return on


# ---- the task runner


def remember(replicas: Sequence[Any], rollouts: Rollouts, version: int) -> None:
    """Send what can be reused to every server, without waiting."""
    import ray

    items = reusable(rollouts)
    if items:
        sent = ray.put(items)
        for r in replicas:
            if r.server_handle is not None:
                r.server_handle.rollspec_remember.remote(sent, version)


def reusable(rollouts: Rollouts) -> list[tuple[str, str, Any, Any]]:
    """(prompt key, sample, tokens, log-probs) of the rollouts whose tokens were all sampled, in one output."""
    if rollouts.responses and not rollouts.engine_logprobs:
        log_once.warn("nothing is reused without log-probs of the rollouts; set rollout.calculate_log_probs=true")
        return []
    out = []
    for prompt, sample, tokens, logprobs in zip(
        rollouts.prompts, rollouts.samples, rollouts.responses, rollouts.engine_logprobs, strict=True
    ):
        if sample.endswith("_0") and len(tokens) == len(logprobs) > 0:
            out.append((prompt_key(prompt), sample, tokens, logprobs))
    return out


# ---- the server


class ReusingServer:
    """Mixed into verl's server before it; needs `EngineCalls` after it (replica.py)."""

    rollspec_reuse: LenientReuse | None = None
    rollspec_reuse_faults: Faults
    rollspec_tokenizer = ""

    async def rollspec_begin_reuse(self, config: RollspecConfig, info: dict[str, Any]) -> None:
        """Switch lenient reuse on, or say why not. Never raises."""
        me: Any = self
        self.rollspec_reuse_faults = Faults()
        try:
            reason = self._rollspec_no_reuse(info)
            if reason is None:
                model, tokenizer = me.engine.model_config, me.model_config.tokenizer
                name = await asyncio.to_thread(lambda: tokenizer_name(tokenizer.get_vocab().items()))
                self.rollspec_tokenizer = name
                self.rollspec_reuse = LenientReuse(
                    config.reuse,
                    lenient_reuse.old_responses(config.history.max_bytes),
                    int(model.max_model_len),
                    min(int(model.get_vocab_size()), len(tokenizer)),
                    scoring.eos_tokens(me.engine),
                    str(model.logprobs_mode),
                )
        except Exception as e:
            reason = f"of {type(e).__name__}: {e}"
        if reason is not None:
            logger.error("rollspec: replica %d reuses no old responses because %s.", me.replica_rank, reason)
            return
        # A print, because verl leaves the loggers of its actors at WARNING.
        print(f"rollspec: replica {me.replica_rank}: {lenient_reuse.warning(config.reuse)}", flush=True)
        if self.rollspec_reuse is not None and config.history.dir is not None:
            self._rollspec_restore(self.rollspec_reuse, config.history.dir)

    def _rollspec_no_reuse(self, info: dict[str, Any]) -> str | None:
        """Why this server cannot reuse anything; None where it can."""
        me: Any = self
        for found, what in (
            (info.get("reuse") != "lenient", "its engine runs without rollspec or cannot score prompts"),
            (me.lora_as_adapter, "the policy is a LoRA adapter"),
            (me._disaggregation_role != "null", "prefill and decode are disaggregated"),
            (me.config.enable_rollout_routing_replay, "routed experts are recorded (enable_rollout_routing_replay)"),
            (me.config.full_determinism, "full_determinism seeds all requests alike, so the rest would repeat draws"),
        ):
            if found:
                return what
        return None

    async def rollspec_remember(self, items: list[tuple[str, str, Any, Any]], version: int) -> None:
        """Take a step's finished rollouts (see `reusable`)."""
        if self.rollspec_reuse is not None:
            self.rollspec_reuse.remember(items, version)

    async def rollspec_call(self, op: str, payload: dict[str, Any]) -> dict[str, Any]:
        """As `EngineCalls.rollspec_call`, with what is kept here saved, loaded and counted along."""
        answer: dict[str, Any] = await super().rollspec_call(op, payload)  # type: ignore[misc]
        reuse = self.rollspec_reuse
        if reuse is not None and op == "save":
            await self._rollspec_keep(reuse, Path(payload["dir"]).parent)
        elif reuse is not None and op == "load":
            self._rollspec_restore(reuse, Path(payload["dir"]).parent)
        elif reuse is not None and op == "stats" and answer and "error" not in answer:
            faults = {**answer.get("faults", {}), **self.rollspec_reuse_faults.drain()}
            answer = {**answer, "lenient": reuse.drain(), "faults": faults}
        return answer

    async def rollspec_new_version(self, version: int, history: HistoryConfig) -> None:
        """The policy changed."""
        if (reuse := self.rollspec_reuse) is not None:
            reuse.version = version
            if history.dir is not None:
                await self._rollspec_keep(reuse, history.dir)

    async def generate(self, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, **kwargs: Any) -> Any:
        """verl's `generate` (vllm_async_server.py:558), after as much of the old response as is accepted."""
        whole = functools.partial(super().generate, request_id=request_id, **kwargs)  # type: ignore[misc]
        if self.rollspec_reuse is None:
            return await whole(prompt_ids, sampling_params)
        from verl.utils.tokenizer import normalize_token_ids
        from verl.workers.rollout.replica import TokenOutput

        prompt_ids = normalize_token_ids(prompt_ids)
        params = dict(sampling_params)
        own = metadata.mapping((params.get("extra_args") or {}).get(scoring.KEY))
        if len(prompt_ids) > own.get(scoring.PROMPT, len(prompt_ids)):
            # An aborted rollout resumes (resume.py); what it was started from is in front of it already.
            return await whole(prompt_ids, params)
        sample = own.pop(SAMPLE, None)
        if resume.shows(kwargs):
            log_once.warn("responses to prompts with images, video or sound are not reused")
            sample = None
        limit = self._rollspec_limit(params, len(prompt_ids))
        found: Prefix | None = None
        with self.rollspec_reuse_faults.left_out("lenient reuse"):  # generated whole then, from the policy itself
            score = functools.partial(self._rollspec_score, f"{request_id}-score", kwargs.get("priority", 0))
            found = await self.rollspec_reuse.prefix(score, prompt_ids, params, limit, sample)
        if found is None or not found.tokens:
            return await whole(prompt_ids, params)
        if found.finished:
            fields = {"global_steps": self.global_steps, "num_cached_tokens": None}  # type: ignore[attr-defined]
            return TokenOutput(
                token_ids=found.tokens, log_probs=found.logprobs, stop_reason="completed", extra_fields=fields
            )
        params.pop("max_new_tokens", None)
        params["max_tokens"] = limit - len(found.tokens)
        params["extra_args"] = {
            **(params.get("extra_args") or {}),
            scoring.KEY: {**own, scoring.PROMPT: len(prompt_ids)},
        }
        rest = await whole([*prompt_ids, *found.tokens], params)
        rest.token_ids = [*found.tokens, *rest.token_ids]
        rest.log_probs = [*found.logprobs, *(rest.log_probs or [])]
        return rest

    def _rollspec_limit(self, params: dict[str, Any], prompt: int) -> int:
        """Most response tokens, as `generate` computes them."""
        config: Any = self.config  # type: ignore[attr-defined]
        given = params.get("max_tokens", params.get("max_new_tokens"))
        if given is None:
            given = min(config.response_length, config.prompt_length + config.response_length - prompt)
        return max(1, min(int(given), int(config.max_model_len) - prompt))

    async def _rollspec_score(self, request_id: str, priority: int, prompt: list[int], params: Any) -> Any:
        """One scoring request, through the gate that verl closes while it syncs weights."""
        me: Any = self
        if await me._park_until_admitted(request_id) is not None:
            return None
        final, admitted = None, False
        try:
            async for output in me.engine.generate(
                prompt={"prompt_token_ids": prompt}, sampling_params=params, request_id=request_id, priority=priority
            ):
                if not admitted:
                    admitted = True
                    me._admitting -= 1
                final = output
        finally:
            if not admitted:
                me._admitting -= 1
        return final if final is not None and final.outputs else None

    async def _rollspec_keep(self, reuse: LenientReuse, folder: Path) -> None:
        """Every server has the same responses: one file beside the replicas' own folders, written by the first."""
        if self.replica_rank != 0:  # type: ignore[attr-defined]
            return
        # Weights are being synced, or a checkpoint written: neither may fail by this.
        with self.rollspec_reuse_faults.left_out("saving old responses"):
            old = reuse.responses
            await asyncio.to_thread(old.save, folder, old.snapshot(), self.rollspec_tokenizer)

    def _rollspec_restore(self, reuse: LenientReuse, folder: Path) -> None:
        with self.rollspec_reuse_faults.left_out("loading old responses"):
            count = reuse.responses.load(folder, reuse.version, tokenizer=self.rollspec_tokenizer)
            if count:
                print(f"rollspec: {count} old responses of {folder}.", flush=True)
