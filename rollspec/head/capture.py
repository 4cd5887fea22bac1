"""Training samples for the drafter, taken from what the target computes anyway.

Some requests are recorded, whole: per position the target's auxiliary and last hidden states (one more auxiliary
layer), per verify step what was proposed, by whom, how much was accepted, and, where the trainer learns from rejected
proposals, the target's top-k logits at every proposed position. When the request ends, however it ends, this becomes a
`drafter_online.samples.Sample`.

What it costs is timed, and no new request is recorded while it exceeds its share of the step; memory is bounded.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from drafter_online.files import replace
from drafter_online.inbox import Inbox
from drafter_online.samples import NO_DRAFTER, Sample, Verify, VerifyStep
from rollspec.drafting.requests import Request
from rollspec.head import metadata
from rollspec.head.host import Host
from rollspec.proposal.base import as_tokens, prompt_key

logger = logging.getLogger("rollspec")

KEEP = 0.99
"""Per step, of the sums that the share of the step time is judged by."""

HOLD_BYTES = 256 << 20
"""Bytes of samples kept until they are drained; the oldest are dropped first."""

TOP_K = 8
"""Logits of the target kept per proposed token, for the loss on rejected proposals."""

LEAST_TOKENS = 4
"""Shorter responses teach nothing about drafts."""


@dataclass(slots=True)
class _Recording:
    """Positions [start, end) so far."""

    start: int = 0
    end: int = 0
    aux: list[torch.Tensor] = field(default_factory=list)  # [n, A*H] each
    last: list[torch.Tensor] = field(default_factory=list)  # [n, H] each
    steps: list[VerifyStep] = field(default_factory=list)
    bytes: int = 0


W = TypeVar("W", bound=Callable[..., None])


def guarded(work: W) -> W:
    """Of a method of `Capture`: a fault ends the capture and not the job, and what it takes is timed."""

    @functools.wraps(work)
    def run(self: Capture, *args: Any, **kwargs: Any) -> None:
        if self.off:
            return
        begin = time.perf_counter()
        try:
            work(self, *args, **kwargs)
        except Exception as e:
            self.give_up(e)
        spent = time.perf_counter() - begin
        self.seconds += spent
        self._share[0] += spent

    return cast(W, run)


class Capture:
    """Records requests of one worker. Everything runs on the worker's thread; it never raises into the engine.

    Args:
        layers: of the target, whose hidden states the head reads, in its order.
    """

    def __init__(self, host: Host, runner: Any, layers: tuple[int, ...]) -> None:
        self._host = host
        self._runner = runner
        self._layers = layers
        self.config = host.config.drafter.capture
        self.by_another: Callable[[str], bool] = lambda req_id: False
        """Whether a request's draft is of a head that is not trained."""
        self.off = False
        self.paused = False  # no trainer wants samples now
        self.logits = True  # whether it learns from what was rejected: top-k of a whole vocabulary per proposed token
        self.seconds = 0.0  # since the last drain of the counters
        self._counts = {"recorded": 0, "skipped": 0, "tokens": 0, "private": 0}
        self._lost = 0  # recordings, for room
        self._share = [0.0, 0.0]  # discounted seconds: capturing, stepping
        self._recordings: dict[str, _Recording] = {}
        self._recorded = 0  # bytes of them
        self._seen: set[str] = set()  # running requests that were decided upon
        self._done = Inbox(HOLD_BYTES)  # training takes samples from a thread of its own
        self._logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._rows: dict[str, tuple[int, int]] = {}

    @property
    def bytes(self) -> int:
        """Of what is kept."""
        return self._done.bytes + self._recorded

    @property
    def counts(self) -> dict[str, int]:
        """Since the start."""
        return {**self._counts, "samples": self._done.received, "dropped": self._done.dropped + self._lost}

    @property
    def ready(self) -> bool:
        """Whether a sample is waiting."""
        return len(self._done) > 0

    def take(self, most: int | None = None) -> list[Sample]:
        """The oldest `most` finished samples (all where None); they are forgotten here."""
        return self._done.take(most)

    def drain(self, folder: Path) -> dict[str, Any]:
        """Write all finished samples to `folder`, one safetensors file each, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        sizes = []
        for sample in self.take():  # only one sample at a time is in memory twice
            blob = sample.to_bytes()
            replace(folder / f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.safetensors", blob)
            sizes.append(len(blob))
        return {**self.info(), "samples": len(sizes), "bytes": sum(sizes)}

    def info(self) -> dict[str, Any]:
        """Counts since the start, and the samples that wait."""
        return {**self.counts, "held": len(self._done), "recording": len(self._recordings), "held_bytes": self.bytes}

    def stepped(self, seconds: float) -> None:
        """A step took `seconds`."""
        self._share[0] *= KEEP
        self._share[1] = KEEP * self._share[1] + seconds

    # ---- the step ---------------------------------------------------------------------------------------------------

    @guarded
    def look(self, logits: torch.Tensor | None, req_ids: Sequence[str], drafted: Sequence[int]) -> None:
        """A step is about to be sampled: keep the target's best tokens where something was proposed.

        Args:
            logits: of all requests' rows, one per draft and one more, [rows, vocab].
            req_ids: requests in their order; there may be more.
            drafted: drafts that each verifies; none where the step verifies nothing.
        """
        self._logits, self._rows = None, {}
        if logits is None or not self._recordings:
            return
        index: list[int] = []
        at = 0
        for req_id, n in zip(req_ids, drafted, strict=False):
            if n and req_id in self._recordings:
                self._rows[req_id] = (len(index), len(index) + n)
                index += range(at, at + n)
            at += n + 1
        if index and not self.logits:
            n = len(index)
            none = torch.zeros(n, 0)
            self._logits = (none.long(), none, torch.zeros(n))
        elif index:
            chosen = logits[torch.tensor(index, device=logits.device)].float()
            values, ids = chosen.topk(min(TOP_K, chosen.shape[-1]), dim=-1)
            self._logits = (ids, values, chosen.logsumexp(-1))

    @guarded
    def step(
        self, req_ids: list[str], starts: dict[str, int], tokens: list[list[int]], rows: list[tuple[int, int]], aux: Any
    ) -> None:
        """The target computed a step.

        Args:
            req_ids: the batch.
            starts: first position of each request in it.
            tokens: that each request emitted; empty while it is in its prompt.
            rows: first row of each request in the step's tensors, and how many of its rows were not rejected.
            aux: the states of the auxiliary layers and the last one, each [all rows, H].
        """
        recorded = [i for i, req_id in enumerate(req_ids) if self._wanted(req_id)]
        if not recorded:
            return
        width = len(self._layers)
        index = torch.cat([torch.arange(rows[i][0], sum(rows[i])) for i in recorded]).to(aux[0].device)
        place = width  # of the last layer, where no head reads it
        if len(aux) == width:
            place = self._layers.index(int(self._runner.model_config.get_total_num_hidden_layers()))
        last = aux[place][index]  # [rows, H]
        states = torch.cat([h[index] for h in aux[:width]], dim=-1) if width else last[:, :0]  # [rows, A*H]
        at = 0
        for i in recorded:
            req_id, n = req_ids[i], rows[i][1]
            r, start = self._recordings[req_id], starts[req_ids[i]]
            if start != r.end or not r.aux:  # computed again after a preemption, or begun behind a cached prefix
                self._grow(r, -sum(t.nbytes for t in (*r.aux, *r.last)))
                r.start, r.aux, r.last = start, [], []
            r.end = start + n
            r.aux.append(states[at : at + n].clone())
            r.last.append(last[at : at + n].clone())
            self._grow(r, r.aux[-1].nbytes + r.last[-1].nbytes)
            at += n
            if tokens[i] and req_id in self._rows:
                self._verified(r, req_id, start, len(tokens[i]) - 1)
        self._bound()

    @guarded
    def finish(self, req_id: str, request: Request | None, scheduled: bool = False) -> None:
        """A request ended, was aborted, or is unknown. `scheduled`: there may be steps of it yet, to be passed over."""
        if not scheduled:
            self._seen.discard(req_id)
        r = self._recordings.pop(req_id, None)
        if r is None:
            return
        self._recorded -= r.bytes
        if request is None or not r.aux or len(request.output) < LEAST_TOKENS:
            return
        with torch.inference_mode(False):  # it is trained on
            sample = self._sample_of(r, request)
        self._counts["tokens"] += len(sample)
        self._done.put(sample)
        self._bound()

    def end(self) -> None:
        """A step is over: requests that ended in it are finished now; the engine says so only when the next begins."""
        for req_id in list(self._recordings):
            r = self._host.engine.requests.get(req_id)
            if r is not None and r.ended:
                self.finish(req_id, r, scheduled=True)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def give_up(self, error: Exception) -> None:
        """Nothing is captured from now on."""
        self.off = True
        self._recordings.clear()
        cause = f"capture: {type(error).__name__}: {error}"
        self._host.count(cause)
        logger.warning("rollspec: no training samples are captured from now on (%s).", cause, exc_info=error)

    def _wanted(self, req_id: str) -> bool:
        """Whether to record a request; decided once, when it is first seen."""
        if req_id in self._seen:
            return req_id in self._recordings
        self._seen.add(req_id)
        busy = self._share[0] > self.config.share * self._share[1] and self._share[1] > 0.0
        if metadata.of_running(self._host.running, req_id).private:
            self._counts["private"] += 1
        elif self.paused or busy or self.bytes > HOLD_BYTES:
            self._counts["skipped"] += 1
        else:
            self._counts["recorded"] += 1
            self._recordings[req_id] = _Recording()
        return req_id in self._recordings

    def _verified(self, r: _Recording, req_id: str, position: int, accepted: int) -> None:
        scheduled = self._host.scheduled.get(req_id)
        request = self._host.engine.requests.get(req_id)
        if not scheduled or self._logits is None or request is None:
            return
        a, b = self._rows[req_id]
        ids, values, lse = (t[a:b].clone() for t in self._logits)
        self._grow(r, ids.nbytes + values.nbytes + lse.nbytes)
        # The weights may have been swapped since it was drafted.
        drafter, version = ("head", request.head.version) if request.head.sent else ("suffix", NO_DRAFTER)
        if request.head.sent and self.by_another(req_id):
            drafter, version = "specialist", NO_DRAFTER
        accepted = min(accepted, len(scheduled))
        r.steps.append(VerifyStep(position, drafter, list(scheduled), accepted, ids, values, lse, version))

    def _sample_of(self, r: _Recording, request: Request) -> Sample:
        tokens = torch.cat([torch.from_numpy(request.prompt.copy()), torch.tensor(request.output, dtype=torch.int32)])
        # The sampler may have drawn some tokens past a stop, which were never emitted.
        end = min(r.end, len(tokens))
        positions = torch.arange(r.start, end)
        params = getattr(self._host.running.get(request.req_id), "sampling_params", None)
        steps = [dataclasses.replace(s, position=s.position - r.start) for s in r.steps if r.start <= s.position < end]
        return Sample(
            input_ids=tokens[r.start : end].long(),
            hidden_states=torch.cat(r.aux)[: len(positions)].to("cpu"),
            verifier_last_hidden_states=torch.cat(r.last)[: len(positions)].to("cpu"),
            loss_mask=positions >= len(request.prompt),
            position_ids=positions,
            prompt_key=request.key,
            # What the trainer's rewards are joined by: prompt and response.
            request_id=f"{request.key}:{prompt_key(as_tokens(request.output))}",
            target_version=request.version,
            draft_version=next((s.draft_version for s in reversed(steps) if s.drafter == "head"), NO_DRAFTER),
            temperature=float(params.temperature) if params is not None else 1.0,
            response_length=len(request.output),
            domain=metadata.of(params).domain,
            verify=Verify.gather(steps),
        )

    def _bound(self) -> None:
        """Oldest samples go first, then recordings, longest first."""
        self._done.keep(max(0, HOLD_BYTES - self._recorded))
        while self._recorded > HOLD_BYTES:
            longest = max(self._recordings, key=lambda q: self._recordings[q].bytes)
            self._recorded -= self._recordings.pop(longest).bytes
            self._lost += 1

    def _grow(self, r: _Recording, size: int) -> None:
        r.bytes += size
        self._recorded += size
