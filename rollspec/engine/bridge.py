"""Connects one worker of an inference engine to `DraftEngine`: a step's outcome in, drafts out, faults caught.

No failure here may reach the training job: the first fault is logged with its cause,
counted, and the engine runs on without drafts.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

from rollspec.config import RollspecConfig
from rollspec.drafting.requests import StepResult
from rollspec.engine.noise_keys import NoiseKeys
from rollspec.head import metadata
from rollspec.sampling import scoring
from rollspec.step import DraftEngine
from rollspec.telemetry.engine_stats import EngineStats
from rollspec.telemetry.faults import Faults
from rollspec.telemetry.metrics import to_metrics
from rollspec.telemetry.sinks import JsonlSink
from rollspec.tuning.tuner import MODEL_DRAFTERS

logger = logging.getLogger("rollspec")

JSONL_SECONDS = 10.0
"""How often measurements are appended to `telemetry.jsonl`, while the engine steps."""

TRAINER, FILE = "trainer", "file"
"""Readers of the counters; a front end that serves /metrics is another (prometheus.py)."""

LONG_GAP = 0.25
"""Seconds between two steps beyond which the engine was idle rather than busy between them."""


class PolicyWatch:
    """The policy version of programs that do not set it: `begin` is called before the first step with other weights.

    Trainers with an integration say which version they sync (`set_version`). OpenRLHF, and any program that loads
    weights into a running engine, does not; there the next step after a `load_weights` counts as the next version, so
    that past rounds leave the corpora all the same. Many calls between two steps (one per parameter, or per bucket) are
    one version. Once a program announces the version, this only watches.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        self._announced = False
        self.changed = False
        """Whether weights were loaded since the last step."""

    def load(self, load_weights: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around `model.load_weights`."""
        self.changed = True
        return load_weights(*args, **kwargs)

    def announced(self) -> None:
        """A program says which version the weights are."""
        self._announced, self.changed = True, False

    def before_step(self) -> None:
        """The engine starts a step. Never raises."""
        if not self.changed:
            return
        self.changed = False
        if self._announced:
            return
        try:
            self._begin()
        except Exception as e:  # rounds do not slide; what is sampled does not depend on it
            self._announced = True
            logger.error("rollspec: policy versions are not counted any more (%s: %s).", type(e).__name__, e)


class Bridge:
    """Drafts for one worker.

    Args:
        config: of the engine. max_model_len: tokens of prompt and response at most.
        machine: what step costs depend on: a cost model holds for this only.
        tokenizer: says the name of the target's tokenizer, or None.
    """

    def __init__(
        self, config: RollspecConfig, max_model_len: int, machine: dict[str, Any], tokenizer: Callable[[], str | None]
    ) -> None:
        self.config = config
        self.engine = DraftEngine(
            config, max_model_len, next((d for d in config.proposal.drafters if d in MODEL_DRAFTERS), None)
        )
        self.head: Any = None  # a `DraftHead` where a head or a draft model runs
        self.machine = machine
        if heads := len(config.proposal.head.specialists):
            self.machine["specialists"] = heads  # a pass costs as many more
        self._tokenizer = tokenizer
        self.runner: Any = None
        self.join: Callable[[], None] = lambda: None
        """Waits for drafts that are made on a thread of their own."""
        self.running: Mapping[str, Any] = {}
        """Prompt and sampling parameters of the requests that run, as `prompt_token_ids` and `sampling_params`."""
        self.max_acceptance: Any = None
        self.scores = False  # whether prompts can be scored at a temperature
        self.coupled: NoiseKeys | None = None
        self.drafting = False
        self.fault: str | None = None
        self.faults = Faults(logger.warning)
        self.policy: PolicyWatch | None = None  # counts versions that no program announces
        self._untaken: dict[str, list[EngineStats]] = {TRAINER: []}  # what each reader has not had yet
        self._sink = JsonlSink(config.telemetry.jsonl) if config.telemetry.jsonl else None
        self._written = time.perf_counter()
        self.saves: SimpleQueue[Callable[[], Any]] | None = None
        """Writes of the history that wait for their thread."""
        self.collected: set[str] = set()  # ended and in history, before vLLM reported it
        self._scheduler_output: Any = None
        self._now = 0.0  # start of this step's drafting
        self.began = 0.0
        """When this step's forward pass began."""
        self._ended = 0.0  # end of the last step's drafting

    # ---- hooks of the worker ----------------------------------------------------------------------------------------

    @property
    def scheduled(self) -> dict[str, list[int]]:
        """The drafts that this step verifies, by request."""
        return self._scheduler_output.scheduled_spec_decode_tokens  # type: ignore[no-any-return]

    def before_step(self, scheduler_output: Any) -> None:
        """The engine starts a step: note the time, add the responses of finished requests to history, and drop the
        tokens that the engine dropped of preempted ones.
        """
        self._scheduler_output = scheduler_output
        self.began = time.perf_counter()
        if self.coupled is not None:
            self.coupled.before_step(scheduler_output)
        if self.head is not None:
            computes = scheduler_output.total_num_scheduled_tokens > 0
            self.head.before_step(scheduler_output.finished_req_ids, computes)
        if self.drafting:
            try:
                for req_id in scheduler_output.finished_req_ids:
                    self.engine.finish(req_id)
                    self.collected.discard(req_id)
                for resumed in scheduler_output.scheduled_new_reqs:
                    self._forget_dropped(resumed)
            except Exception as e:
                self.fail("history", e)

    def _forget_dropped(self, request: Any) -> None:
        """vLLM drops tokens that were in flight when `reset_prefix_cache` preempted their request, and samples them
        again: the request's output is what it resumes from.
        """
        r = self.engine.requests.get(request.req_id)
        if r is not None and request.prefill_token_ids is not None:
            kept = len(request.prefill_token_ids) - len(r.prompt)
            if len(r.output) > kept:
                r.drop(kept, self.engine.version)

    def set_version(self, version: int) -> None:
        """The policy changed; on every rank."""
        self.engine.set_version(version)
        if self.coupled is not None:
            self.coupled.streams.set_version(version)

    def ended(self, req_id: str) -> bool:
        """Whether a request has emitted all its tokens; overlapping steps may have one more of it scheduled."""
        r = self.engine.requests.get(req_id)
        return req_id in self.collected or (r is not None and r.ended)

    @functools.cached_property
    def tokenizer(self) -> str | None:
        """The name of the target's tokenizer, which saved history carries; None where it is not known."""
        return self._tokenizer()

    @property
    def mode(self) -> str:
        """The distribution's name as it is sampled now."""
        return "coupled" if self.coupled is not None and self.coupled.on else "standard"

    def fail(self, what: str, error: BaseException) -> None:
        """Speculation is off from now on: record the fault, log it once."""
        cause = f"{what}: {type(error).__name__}: {error}"
        self.count(cause)
        if self.fault is None:
            self.fault = cause
            logger.error(
                "rollspec: speculation is off from now on, the engine runs on without it (%s).", cause, exc_info=error
            )
        self.drafting = False
        self.engine.requests.clear()

    def uncouple(self, error: BaseException) -> None:
        """Verification does not follow the seeds of requests any more: record the fault, log it once."""
        if self.coupled is not None:
            self.coupled.fail(error)
        else:
            self.count(f"seeded verification: {type(error).__name__}: {error}")
            logger.error(
                "rollspec: the `seed` of a request does not fix its text any more (%s).", error, exc_info=error
            )

    def count(self, cause: str, error: BaseException | None = None) -> None:
        """Record a fault for telemetry; `error`, where given, is logged once for its cause."""
        self.faults.record(cause, None if error is None else str(error))

    def drain(self, reader: str = TRAINER) -> EngineStats:
        """Everything counted since this reader's last call; readers do not take from each other."""
        if reader == TRAINER:
            self._write()
        return self._read(reader)

    def _read(self, reader: str) -> EngineStats:
        self._untaken.setdefault(reader, [])
        stats = self.engine.drain()
        stats.speculating = self.state()[0] != "none"
        stats.faults = self.faults.drain()
        if self.head is not None:
            stats.drafter, stats.drafter_levels = self.head.drain()
        if self.max_acceptance is not None:
            stats.max_prob, self.max_acceptance.sums = self.max_acceptance.sums, [0.0, 0.0]
        for name, parts in self._untaken.items():
            self._untaken[name] = [EngineStats.merge([*parts, stats])]
        out = self._untaken[reader][0]
        self._untaken[reader] = []
        # Counts add up over time as they do over replicas; levels do not: they are what they are now.
        for level in (
            "version", "history_bytes", "corpus_bytes", "prompts", "speculating", "cost_error", "drafters_off",
        ):  # fmt: skip
            setattr(out, level, getattr(stats, level))
        out.drafter_levels = stats.drafter_levels
        return out

    def _write(self) -> None:
        if self._sink is not None and (stats := self._read(FILE)).steps:
            self._sink.write({"time": time.time(), **to_metrics(stats)})
        self._written = time.perf_counter()

    def state(self) -> tuple[str, str]:
        """(who drafts, such as "suffix" or "suffix+eagle3", or "none"; why not)."""
        if self.drafting and not self.config.proposal.drafters:
            return "none", "proposal.drafters is empty"
        if self.drafting and self.engine.k > 0:
            off = self.head is not None and self.head.off
            return "+".join(d for d in self.config.proposal.drafters if not (off and d in MODEL_DRAFTERS)) or "none", ""
        return "none", self.fault or ("k is 0" if self.drafting else "this rank does not draft")

    # ---- the step ---------------------------------------------------------------------------------------------------

    def rests_for(self) -> int:
        """How many steps after the next one will have no drafts, whatever is sampled until then: the tuner rests."""
        return self.engine.rests_for if self.drafting else 0

    def begins_nothing(self, scheduler_output: Any) -> bool:
        """Whether a step begins and ends no request, and no program or weights have begun a new policy version."""
        changes = scheduler_output.scheduled_new_reqs or scheduler_output.finished_req_ids
        return not changes and (self.policy is None or not self.policy.changed)

    def decide(self, step: StepResult) -> int:
        """How many passes the draft head should run now; `finish` must follow. Never raises."""
        if not self.drafting:
            return 0
        try:
            return self._prepare(step)
        except Exception as e:
            self.fail("drafting", e)
            return 0

    def finish(self, rows: Any, probs: Any, batch: int) -> list[list[int]]:
        """The drafts of the step that `decide` began; `rows` and `probs` as `DraftEngine.complete`. Never raises."""
        if not self.drafting:
            return [[] for _ in range(batch)]
        try:
            drafts = self.engine.complete(rows, probs)
            self._ended = time.perf_counter()
            if self._sink is not None and self._ended - self._written > JSONL_SECONDS:
                self._write()
            self.engine.stats.step_seconds += self._ended - self._now  # part of the step, not of the target's cost
            return drafts
        except Exception as e:
            self.fail("drafting", e)
            return [[] for _ in range(batch)]

    def _prepare(self, step: StepResult) -> int:
        now = self._now = time.perf_counter()
        requests = self.engine.requests
        for req_id, new in zip(step.req_ids, step.sampled, strict=True):
            if new and req_id not in requests and req_id not in self.collected:
                self._begin(req_id)
        batch = len(step.sampled)
        decode_only = step.tokens == batch + sum(map(len, step.verified.values()))
        if step.began is None:  # from the tokens of the step before to its own
            seconds, decode_only = now - self._ended, False
        else:
            # What the engine does between two busy steps (scheduling, detokenising) belongs to the step's cost.
            gap = step.began - self._ended
            seconds = now - step.began + (gap if 0.0 < gap < LONG_GAP else 0.0)
        self.engine.timed(step.tokens, decode_only, seconds, batch)
        if self.head is not None and self.head.capture is not None:
            self.head.capture.stepped(seconds)
        return self.engine.prepare(step.req_ids, step.sampled, step.verified, step.context_tokens)

    def _begin(self, req_id: str) -> None:
        state = self.running[req_id]
        if state.prompt_token_ids is None:
            return  # a prompt of embeddings has no tokens to key or match: the request runs without drafts
        params = state.sampling_params
        own = scoring.asked(params)
        if scoring.TEMPERATURE in own:
            return  # a prompt to be scored: nothing is emitted
        stop: frozenset[int] = frozenset()
        if params is not None and not params.ignore_eos:
            stop = frozenset(params.all_stop_token_ids)
        elif params is not None:
            stop = frozenset(params.stop_token_ids or ())
        limit = params.max_tokens if params is not None and params.max_tokens is not None else self.engine.max_model_len
        stream = self.coupled.stream(req_id, params) if self.coupled is not None else None
        # Tokens that a rollout starts from are not its prompt: corpora and history are the prompt's.
        prompt = state.prompt_token_ids
        cut = int(own.get(scoring.PROMPT, len(prompt)))
        private = metadata.of(params).private
        origin = scoring.origin(params)
        self.engine.begin(
            req_id,
            prompt[:cut],
            limit + len(prompt) - cut,
            stop,
            stream,
            prompt[cut:],
            private,
            origin.name if origin else None,
            params.min_tokens if params is not None and params.all_stop_token_ids else 0,
            scoring.spans(params) if origin else (),
            scoring.turn(params),
        )
