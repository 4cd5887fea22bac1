"""Around one V2 model runner: what a step sampled goes to rollspec, and drafts of any length per request come back.

    execute_model(scheduled)      the scheduler padded every request to k draft slots; unused ones are removed
      sample(...)                 tokens [requests, k + 1] and how many each request emitted
      speculator.propose(...)     observe, plan, propose, select (`Engine`); the head runs the passes that it asks for
    sample_tokens(grammar)        the removed slots' masks are removed, too
    take_draft_token_ids()        the drafts, for a scheduler that waits for them or checks them against a grammar

Under asynchronous scheduling the next step is scheduled before this one's drafts exist: k slots for every request. A
padded slot holds -1 or an old token; taken for a draft it would change what is sampled, so it leaves the step when it
begins, and the scheduler sees it as rejected. On a CPU everything runs in line. On a GPU a thread waits for
the step's tokens, which vLLM copies to the host anyway, while the device runs what is queued, and its drafts are put in
place when the next step begins: the step's own thread waits for the device only where a draft head needs the
tokens just sampled. While the tuner rests no drafts can come, and steps begin without waiting for the tokens of the one
before, as in an engine without speculation.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from rollspec.drafting.requests import StepResult
from rollspec.engine.bridge import Bridge
from rollspec.engine.vllm.v2.scheduling import DRAFTED
from rollspec.head.ranks import Ranks

if TYPE_CHECKING:
    from rollspec.head.draft_head import DraftHead

Ints = npt.NDArray[np.integer[Any]]
StepBegun = tuple[dict[str, list[int]], int, float | None]
"""Of a step: the drafts that it verifies, the tokens that it computes, and when it began (as `StepResult.began`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """What of a scheduled request the runner does not keep."""

    prompt_token_ids: Sequence[int] | None
    sampling_params: Any


class Adapter:
    """One runner's drafts. Every rank has one; the output rank decides, and the others take its drafts."""

    def __init__(self, bridge: Bridge, runner: Any, ranks: Ranks) -> None:
        self.bridge = bridge
        self.runner = runner
        self.ranks = ranks
        self.k = int(runner.num_speculative_steps)
        self.head: DraftHead | None = None
        self.requests: dict[str, ScheduledRequest] = {}
        self._drafts: dict[str, list[int]] = {}  # newest draft of every running request
        self._slots: dict[str, int] = {}  # draft slots that the scheduler reserved in this step
        self._verified: dict[str, list[int]] = {}  # the drafts in them
        self._tokens = 0  # that this step computes
        self._last: list[str] = []  # requests of the last step, in the runner's order
        self._sampled: tuple[torch.Tensor, torch.Tensor] | None = None
        self._batch: Any = None  # of the step that is being sampled
        self._thread = ThreadPoolExecutor(1, "rollspec-draft") if runner.device.type == "cuda" else None
        self._late: deque[tuple[Any, Future[list[list[int]]]]] = deque()  # batches whose drafts are not taken yet
        self._ahead = 0  # steps that may begin without them
        self._waited = True  # this step began when the tokens of the one before were known

    # ---- a step begins ----------------------------------------------------------------------------------------------

    def execute_model(self, execute: Callable[..., Any], scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        """Around `GPUModelRunner.execute_model`."""
        if kwargs.get("dummy_run") or (len(args) > 1 and args[1]):
            return execute(scheduled, *args, **kwargs)
        self._waited = not (self._ahead > 0 and self.bridge.begins_nothing(scheduled))
        if self._waited:
            self._ahead = 0
            self.join()
        else:
            self._ahead -= 1
        for new in scheduled.scheduled_new_reqs:
            self._drafts.pop(new.req_id, None)  # preempted: what was drafted lies in a slot that it gave up
        scheduled = self._settle(scheduled)
        self._begin(scheduled)
        return execute(scheduled, *args, **kwargs)

    def _begin(self, scheduled: Any) -> None:
        if self.bridge.policy is not None:
            self.bridge.policy.before_step()
        self.bridge.before_step(scheduled)  # adds the ended requests' responses to history
        for req_id in scheduled.finished_req_ids:
            self.requests.pop(req_id, None)
            self._drafts.pop(req_id, None)
        for new in scheduled.scheduled_new_reqs:
            self.requests[new.req_id] = ScheduledRequest(new.prompt_token_ids, new.sampling_params)

    def _settle(self, scheduled: Any) -> Any:
        """The step without its padded draft slots."""
        slots = scheduled.scheduled_spec_decode_tokens
        self._slots = {r: len(p) for r, p in slots.items()}
        self._verified = {}
        counts = dict(scheduled.num_scheduled_tokens)
        for req_id, given in slots.items():
            # A scheduler that waited knows the drafts; a grammar may have cut them.
            known = len(given) - given.count(-1)
            draft = self._drafts.get(req_id, [])[: known or len(given)]
            if draft:
                self._verified[req_id] = draft
            counts[req_id] -= len(given) - len(draft)
        if slots:
            scheduled = copy.copy(scheduled)
            scheduled.num_scheduled_tokens = counts
            scheduled.total_num_scheduled_tokens = sum(counts.values())
            scheduled.scheduled_spec_decode_tokens = self._verified
        self._tokens = scheduled.total_num_scheduled_tokens
        return scheduled

    # ---- a step is sampled ------------------------------------------------------------------------------------------

    def sample_tokens(self, sample_tokens: Callable[..., Any], grammar: Any) -> Any:
        """Around `GPUModelRunner.sample_tokens`."""
        computed = self.runner.execute_model_state is not None
        if hasattr(self.runner.structured_outputs_worker, "num_bonus_tokens"):  # until 0.33
            grammar = _masks(grammar, self._slots, self._verified)
        output = sample_tokens(grammar)
        if computed and self._slots and output is not None:
            inner = getattr(output, "model_runner_output", output)
            inner.__dict__[DRAFTED] = {r: len(d) for r, d in self._verified.items()}
        batch, self._batch = self._batch, None
        if batch is not None and self._thread is not None:
            step = self._verified, self._tokens, self.bridge.began if self._waited else None
            self._late.append((batch, self._thread.submit(self._wait_and_draft, batch, output, step)))
        return output

    def _wait_and_draft(self, batch: Any, output: Any, step: StepBegun) -> list[list[int]]:
        """On the drafting thread: the step's tokens are on the host when vLLM's copy of them is done. The next step may
        have begun by then.
        """
        output.copy_event.synchronize()
        return self._draft(batch, output.sampled_token_ids, output.num_sampled_tokens_np, step)

    def join(self) -> None:
        """Take the drafts of the last step, where a thread makes them. Before anything else reads or changes rollspec's
        state.
        """
        if not self._late:
            return
        while self._late:
            batch, late = self._late.popleft()
            drafts = self._keep(batch, late.result())
        self._ahead = self.bridge.rests_for() if self.ranks.alone else 0
        if not any(drafts):
            return
        rows = torch.zeros(len(drafts), self.k, dtype=torch.int64, pin_memory=self.runner.device.type == "cuda")
        _write(rows, drafts)
        # Slots behind a draft's end leave the step; what they hold is not read.
        self.runner.req_states.draft_tokens[batch.idx_mapping] = rows.to(self.runner.device, non_blocking=True)

    def sample(self, sample: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around `GPUModelRunner.sample`: remember what was sampled until `propose`."""
        output, num_sampled, num_rejected = sample(*args, **kwargs)
        self._sampled = output.sampled_token_ids, num_sampled
        return output, num_sampled, num_rejected

    def propose(self, propose: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Around the speculator's `propose`: drafts [requests, k], of which each request has its own length."""
        if kwargs.get("dummy_run"):  # vLLM names every argument then
            return propose(*args, **kwargs)
        batch, given = args[0], args[1:]
        if self.head is None and self.bridge.fault is None:
            out = propose(*args, **kwargs)
        else:  # the head runs when it is asked, and not at all after a fault
            last: torch.Tensor = self.runner.req_states.last_sampled_tokens  # [max_num_reqs, 1]
            out = last[batch.idx_mapping].expand(-1, self.k).clone()  # valid tokens where there is no draft
        if self._thread is not None and self.head is None:
            self._batch = batch
            return out
        assert self._sampled is not None
        sampled, counts = (t.cpu().numpy() for t in self._sampled)
        step = self._verified, self._tokens, self.bridge.began
        drafts = self._keep(batch, self._draft(batch, sampled, counts, step, given, kwargs))
        _write(out, drafts)
        if self.head is not None:
            self.head.end()
        return out

    def _draft(
        self,
        batch: Any,
        sampled: Ints,
        counts: Ints,
        begun: StepBegun,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[list[int]]:
        """Drafts of the batch, after a step that sampled the first `counts` [n] of the tokens `sampled` [n, k + 1];
        `args` and `kwargs` are those of the speculator's `propose`, for the head.
        """
        verified, computed, began = begun
        tokens = [row[:n] for row, n in zip(sampled.tolist(), counts.tolist(), strict=True)]
        context = float(batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs].sum())
        step = StepResult(batch.req_ids, tokens, verified, computed, context, began)
        if self.head is None:
            self.bridge.decide(step)
            return self.bridge.finish(None, None, batch.num_reqs)
        try:
            rows, probs = self.head.drafts(step, batch, args, kwargs or {})
        except Exception as e:  # what was sampled stands
            self.bridge.fail("drafting", e)
            rows = probs = None
        return self.bridge.finish(rows, probs, batch.num_reqs)

    def _keep(self, batch: Any, drafts: list[list[int]]) -> list[list[int]]:
        """The output rank's drafts, on every rank: each feeds its own device."""
        if not self.ranks.alone:
            drafts = self.ranks.share(drafts, batch.num_reqs, self.k)
        self._last = list(batch.req_ids)
        self._drafts.update(zip(self._last, drafts, strict=True))
        return drafts

    def take_draft_token_ids(self, take: Callable[[], Any]) -> Any:
        """Around `GPUModelRunner.take_draft_token_ids`: the drafts as they are, in lists that the caller may change."""
        from vllm.v1.outputs import DraftTokenIds

        taken = take()
        if taken is None:
            return None
        self.join()
        return DraftTokenIds(list(self._last), [list(self._drafts.get(r, ())) for r in self._last])


def _write(rows: torch.Tensor, drafts: Sequence[Sequence[int]]) -> None:
    """Write each draft over the beginning of its row; rows [n, k], on any device, in one call for all."""
    if not any(drafts):
        return
    used = torch.arange(rows.shape[1]) < torch.tensor([len(d) for d in drafts])[:, None]  # [n, k]
    tokens = torch.tensor(list(chain.from_iterable(drafts)), dtype=rows.dtype)
    rows.masked_scatter_(used.to(rows.device), tokens.to(rows.device))


def _masks(grammar: Any, slots: Mapping[str, int], drafts: Mapping[str, list[int]]) -> Any:
    """A `GrammarOutput`'s masks for the rows there are: vLLM 0.32 has one for each slot reserved, and one more.

    From 0.33 on every request has as many masks as a step may have rows of it, and the kernel passes the others over.
    """
    if grammar is None or not slots:
        return grammar
    rows: list[int] = []
    at = 0
    for request in grammar.structured_output_request_ids:
        rows.extend(range(at, at + 1 + len(drafts.get(request, ()))))
        at += 1 + slots.get(request, 0)
    return dataclasses.replace(grammar, grammar_bitmask=grammar.grammar_bitmask[np.array(rows, dtype=np.int64)])
