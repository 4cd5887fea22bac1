"""One training sample: what the target computed about one sequence, and its verification of drafts.

A superset of the `speculators` data format (hs-connectors: `input_ids`, `hidden_states`, `verifier_last_hidden_states`,
`loss_mask`, `position_ids`), with provenance and with the verify steps of speculative decoding. It is made where the
engine runs and crosses process borders as one safetensors blob:

    blob = Sample(input_ids=ids, hidden_states=aux, ...).to_bytes()
    sample = Sample.from_bytes(blob)          # SampleError when it is damaged or does not fit together

Alignment. Row t of `hidden_states` and `verifier_last_hidden_states` is what the target computed *when it read*
`input_ids[t]`, so `verifier_last_hidden_states[t]`, after the final norm and the LM head, predicts `input_ids[t + 1]`:

    input_ids                    x0  x1  x2  x3
    hidden_states                g0  g1  g2  g3      [T, A*H]  residual stream entering layers a, b, c
    verifier_last_hidden_states  y0  y1  y2  y3      [T, H]    residual stream after the last layer, before the norm
    the head is trained on       (x1, g0) -> y1,  (x2, g1) -> y2, ...

Auxiliary layer `i` is the residual stream *entering* decoder layer `i`, that is after `i` layers (0: the embedding;
the number of layers: after the last one). This is vLLM's and speculators' convention
(`eagle_aux_hidden_state_layer_ids`) and `output_hidden_states[i]` of transformers for `i` below the number of layers.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from drafter_online.errors import SampleError

FORMAT = "drafter-online-sample-1"
LONGEST_DOMAIN = 64
WINDOW_BYTES = 32 << 20  # longer samples go over the wire in windows
NO_DRAFTER = -1  # draft_version of what no learned drafter had a part in, or is not known of which


@dataclass(frozen=True, eq=False)
class VerifyStep:
    """One verify step of one request, as an engine sees it; `Verify.gather` packs many."""

    position: int  # index in `input_ids` of the last token known before the step; proposed[0] is for position + 1
    drafter: str  # who proposed: "head", "suffix", ...
    proposed: list[int]  # [K] token ids
    accepted: int  # how many of them were accepted, 0..K
    top_ids: Tensor | None = None  # [K, k] integers
    top_logits: Tensor | None = None  # [K, k]
    logsumexp: Tensor | None = None  # [K]
    draft_version: int = NO_DRAFTER  # of the weights that proposed, where the learned drafter did


@dataclass(frozen=True, eq=False)
class Verify:
    """The verify steps of a sample: S steps, P = sum of `lengths` proposed tokens, in step order.

    Row j of `top_ids`, `top_logits` and `logsumexp` is the target's distribution of the token for which `proposed[j]`
    was proposed, given everything before it *including the earlier proposals of its step, accepted or not*: the rows
    after the first rejected proposal are the target's opinion on states that only the drafter reached. Logits are the
    model's own, before temperature; the log-sum-exp is over the whole vocabulary, in nats.
    """

    position: Tensor  # [S] int64
    lengths: Tensor  # [S] int64, each at least 1
    accepted: Tensor  # [S] int64, 0..lengths
    drafter: tuple[str, ...]  # [S]
    draft_version: Tensor  # [S] int64; weights may be swapped between two steps of a sequence
    proposed: Tensor  # [P] int64
    top_ids: Tensor  # [P, k] int64; k may be 0 where the engine did not keep logits
    top_logits: Tensor  # [P, k] float32
    logsumexp: Tensor  # [P] float32

    @classmethod
    def empty(cls) -> Verify:
        """No verify steps."""
        return cls.gather(())

    @classmethod
    def gather(cls, steps: Iterable[VerifyStep]) -> Verify:
        """Pack steps; steps without proposals are left out.

        Where some steps have logits and others have not, or fewer of them, rows are filled up with id 0, logit -inf and
        log-sum-exp 0, which no loss term counts.
        """
        kept = [s for s in steps if s.proposed]
        k = max((s.top_ids.shape[1] for s in kept if s.top_ids is not None), default=0)
        total = sum(len(s.proposed) for s in kept)
        ids = torch.zeros(total, k, dtype=torch.int64)
        logits = torch.full((total, k), float("-inf"))
        lse = torch.zeros(total)
        at = 0
        for s in kept:
            n = len(s.proposed)
            if s.top_ids is not None and s.top_logits is not None and s.logsumexp is not None:
                width = s.top_ids.shape[1]
                ids[at : at + n, :width] = s.top_ids.to("cpu", torch.int64)
                logits[at : at + n, :width] = s.top_logits.to("cpu", torch.float32)
                lse[at : at + n] = s.logsumexp.to("cpu", torch.float32)
            at += n
        return cls(
            position=torch.tensor([s.position for s in kept], dtype=torch.int64),
            lengths=torch.tensor([len(s.proposed) for s in kept], dtype=torch.int64),
            accepted=torch.tensor([s.accepted for s in kept], dtype=torch.int64),
            drafter=tuple(s.drafter for s in kept),
            draft_version=torch.tensor([s.draft_version for s in kept], dtype=torch.int64),
            proposed=torch.tensor([t for s in kept for t in s.proposed], dtype=torch.int64),
            top_ids=ids,
            top_logits=logits,
            logsumexp=lse,
        )

    def __len__(self) -> int:
        return len(self.drafter)

    def between(self, start: int, stop: int) -> Verify:
        """The steps whose `position` lies in [start, stop), with positions counted from `start`."""
        keep = (self.position >= start) & (self.position < stop)  # [S]
        rows = keep.repeat_interleave(self.lengths)  # [P]
        return Verify(
            position=self.position[keep] - start,
            lengths=self.lengths[keep],
            accepted=self.accepted[keep],
            drafter=tuple(d for d, k in zip(self.drafter, keep.tolist(), strict=True) if k),
            draft_version=self.draft_version[keep],
            proposed=self.proposed[rows],
            top_ids=self.top_ids[rows],
            top_logits=self.top_logits[rows],
            logsumexp=self.logsumexp[rows],
        )


_TENSORS = ("input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask", "position_ids")
_VERIFY = ("position", "lengths", "accepted", "draft_version", "proposed", "top_ids", "top_logits", "logsumexp")


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence (or a contiguous window of one). T tokens, hidden size H, A auxiliary layers. Tensors on the CPU.

    `eq` is identity: two samples are the same only if they are one object.
    """

    input_ids: Tensor  # [T] int64
    hidden_states: Tensor  # [T, A*H] floating point (A = 3 for EAGLE-3, 0 for a draft model)
    verifier_last_hidden_states: Tensor  # [T, H] the same dtype
    loss_mask: Tensor  # [T] bool: True where the token is the response's
    position_ids: Tensor  # [T] int64: place in the whole sequence, from 0; consecutive
    prompt_key: str  # groups the responses to one prompt
    request_id: str  # joins rewards
    target_version: int  # policy version that produced the sequence
    draft_version: int = NO_DRAFTER  # drafter version that proposed last
    reward: float | None = None  # may join later: `Buffer.reward`
    temperature: float = 1.0
    response_length: int = 0  # tokens of the whole response, of which this may be a window
    domain: str = ""  # what the request called its domain
    verify: Verify = dataclasses.field(default_factory=Verify.empty)

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        mine = [getattr(self, n) for n in _TENSORS] + [getattr(self.verify, n) for n in _VERIFY]
        return sum(int(t.numel() * t.element_size()) for t in mine)

    def with_reward(self, reward: float) -> Sample:
        """The same sample, rewarded; tensors are shared."""
        return dataclasses.replace(self, reward=float(reward))

    def window(self, start: int, stop: int) -> Sample:
        """Tokens [start, stop) with their verify steps; tensors are views."""
        if not 0 <= start < stop <= len(self):
            raise SampleError(f"drafter-online: window [{start}, {stop}) is not inside a sample of {len(self)} tokens.")
        cut = {n: getattr(self, n)[start:stop] for n in _TENSORS}
        return dataclasses.replace(self, **cut, verify=self.verify.between(start, stop))

    def random_window(self, rng: random.Random, width: int) -> Sample:
        """A window of at most `width` tokens, placed uniformly over where the response is."""
        total = len(self)
        if total <= width:
            return self
        first = int(self.loss_mask.int().argmax())
        # A quarter of the window may be prompt: the first response tokens need something to attend to.
        low = min(max(0, first - width // 4), total - width)
        start = rng.randint(low, total - width)
        return self.window(start, start + width)

    def windows(self, limit: int = WINDOW_BYTES) -> list[Sample]:
        """Itself, or in parts whose hidden states have at most `limit` bytes, auxiliary and last ones each."""
        widest = max(self.hidden_states.shape[1], self.verifier_last_hidden_states.shape[1])
        rows = max(16, limit // max(1, widest * self.hidden_states.element_size()))
        if len(self) <= rows:
            return [self]
        parts = [self.window(a, min(a + rows, len(self))) for a in range(0, len(self), rows)]
        return [p for p in parts if len(p) >= 2 and bool(p.loss_mask.any())]

    def validate(self) -> Sample:
        """Check that the fields fit each other and hidden states are finite; returns the sample.

        Raises:
            SampleError: the first thing that does not fit, by field and value.
        """
        _check_tensors(self)
        _check_verify(self)
        if self.target_version < 0:
            raise _bad("target_version", self.target_version, "0 or more")
        if self.reward is not None and not abs(self.reward) < float("inf"):
            raise _bad("reward", self.reward, "finite, or None while it is not known")
        if not 0 <= self.temperature < float("inf"):
            raise _bad("temperature", self.temperature, "finite and not negative")
        if self.response_length < 0:
            raise _bad("response_length", self.response_length, "a number of tokens")
        if len(self.domain) > LONGEST_DOMAIN or not (self.domain or "-").isprintable():
            raise _bad("domain", repr(self.domain[:LONGEST_DOMAIN]), f"{LONGEST_DOMAIN} printable characters at most")
        for name in ("hidden_states", "verifier_last_hidden_states"):
            if not bool(getattr(self, name).isfinite().all()):
                raise _bad(name, "NaN or infinity in it", "finite; the target's forward pass went wrong")
        return self

    # ---- bytes ------------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """One safetensors blob: the tensors, and everything else as JSON in its metadata."""
        tensors, record = self.parts()
        return bytes(save(tensors, metadata={"format": FORMAT, "sample": json.dumps(record, separators=(",", ":"))}))

    @classmethod
    def from_bytes(cls, blob: bytes) -> Sample:
        """The inverse of `to_bytes`.

        Raises:
            SampleError: `blob` is truncated, altered beyond recognition, of another format, or inconsistent.
        """
        try:
            tensors = load(blob)
            # The header is 8 bytes of length and that many bytes of JSON (safetensors' format definition).
            header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])["__metadata__"]
            if header["format"] != FORMAT:
                raise SampleError(
                    f"drafter-online: a sample of format {header['format']!r} is refused; use {FORMAT!r}."
                )
            record = json.loads(header["sample"])
        except (SafetensorError, ValueError, KeyError, TypeError) as e:
            if isinstance(e, SampleError):
                raise
            raise SampleError(
                f"drafter-online: a sample of {len(blob)} bytes is refused: it cannot be read ({e})."
            ) from e
        return cls.of_parts(tensors, record).validate()

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Contiguous tensors by name, and the rest as a JSON object."""
        tensors = {n: getattr(self, n).contiguous() for n in _TENSORS}
        tensors |= {f"verify.{n}": getattr(self.verify, n).contiguous() for n in _VERIFY}
        names = sorted(set(self.verify.drafter))
        record = {
            "prompt_key": self.prompt_key,
            "request_id": self.request_id,
            "target_version": self.target_version,
            "draft_version": self.draft_version,
            "reward": self.reward,
            "temperature": self.temperature,
            "response_length": self.response_length,
            "domain": self.domain,
            "drafters": names,
            "drafter": [names.index(d) for d in self.verify.drafter],
        }
        return tensors, record

    @classmethod
    def of_parts(cls, tensors: dict[str, Tensor], record: dict[str, Any]) -> Sample:
        """The inverse of `parts`; not validated beyond what it takes to build it.

        Raises:
            SampleError: a tensor or a field is missing or of another kind.
        """
        try:
            names = [str(n) for n in record["drafters"]]
            if "verify.draft_version" not in tensors:  # samples of earlier versions have none
                tensors = {**tensors, "verify.draft_version": torch.full_like(tensors["verify.position"], NO_DRAFTER)}
            verify = Verify(
                drafter=tuple(names[i] for i in record["drafter"]), **{n: tensors[f"verify.{n}"] for n in _VERIFY}
            )
            return cls(
                **{n: tensors[n] for n in _TENSORS},
                prompt_key=str(record["prompt_key"]),
                request_id=str(record["request_id"]),
                target_version=int(record["target_version"]),
                draft_version=int(record["draft_version"]),
                reward=None if record["reward"] is None else float(record["reward"]),
                temperature=float(record["temperature"]),
                response_length=int(record["response_length"]),
                domain=str(record.get("domain", "")),  # samples of earlier versions have none
                verify=verify,
            )
        except (KeyError, IndexError, TypeError, ValueError) as e:
            raise SampleError(f"drafter-online: a sample is refused: {e!r} is missing or of the wrong kind.") from e


def _bad(field: str, value: object, want: str) -> SampleError:
    return SampleError(f"drafter-online: a sample is refused: `{field}` is {value}, but must be {want}.")


def _shape(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def _check_tensors(s: Sample) -> None:
    ids = s.input_ids
    if ids.dim() != 1 or ids.dtype != torch.int64 or len(ids) == 0:
        raise _bad("input_ids", _shape(ids), "int64[T] with T at least 1")
    t = len(ids)
    if int(ids.min()) < 0:
        raise _bad("input_ids", f"{int(ids.min())} somewhere", "token ids, none of them negative")
    last, aux = s.verifier_last_hidden_states, s.hidden_states
    if last.dim() != 2 or last.shape[0] != t or not last.is_floating_point() or last.shape[1] == 0:
        raise _bad("verifier_last_hidden_states", _shape(last), f"floating point [T, H] with T = {t}")
    h = last.shape[1]
    if aux.dim() != 2 or aux.shape[0] != t or aux.shape[1] % h or not aux.is_floating_point():
        raise _bad("hidden_states", _shape(aux), f"floating point [T, A*H] with T = {t} and H = {h}")
    if aux.dtype != last.dtype:
        raise _bad("hidden_states", _shape(aux), f"of the dtype of verifier_last_hidden_states, {last.dtype}")
    if s.loss_mask.shape != ids.shape or s.loss_mask.dtype != torch.bool:
        raise _bad("loss_mask", _shape(s.loss_mask), f"bool[{t}]")
    pos = s.position_ids
    if pos.shape != ids.shape or pos.dtype != torch.int64:
        raise _bad("position_ids", _shape(pos), f"int64[{t}]")
    if int(pos[0]) < 0 or not torch.equal(pos, torch.arange(t) + pos[0]):
        raise _bad("position_ids", "not consecutive", "consecutive positions from 0 or later, one per token")


def _check_verify(s: Sample) -> None:
    v = s.verify
    steps, rows = len(v.drafter), int(v.lengths.sum()) if v.lengths.numel() else 0
    for name in ("position", "lengths", "accepted", "draft_version", "proposed"):
        t, n = getattr(v, name), rows if name == "proposed" else steps
        if t.shape != (n,) or t.dtype != torch.int64:
            raise _bad(f"verify.{name}", _shape(t), f"int64[{n}]")
    if v.top_ids.dim() != 2 or v.top_ids.shape[0] != rows or v.top_ids.dtype != torch.int64:
        raise _bad("verify.top_ids", _shape(v.top_ids), f"int64[{rows}, k]")
    if v.top_logits.shape != v.top_ids.shape or not v.top_logits.is_floating_point():
        raise _bad("verify.top_logits", _shape(v.top_logits), f"floating point {list(v.top_ids.shape)}, as top_ids")
    if v.logsumexp.shape != (rows,) or not v.logsumexp.is_floating_point():
        raise _bad("verify.logsumexp", _shape(v.logsumexp), f"floating point [{rows}]")
    if not steps:
        return
    if int(v.lengths.min()) < 1:
        raise _bad("verify.lengths", int(v.lengths.min()), "at least 1: a step without proposals is left out")
    if int(v.position.min()) < 0 or int(v.position.max()) >= len(s):
        raise _bad("verify.position", v.position.tolist(), f"indices into the sample's {len(s)} tokens")
    if bool((v.accepted < 0).any()) or bool((v.accepted > v.lengths).any()):
        raise _bad("verify.accepted", v.accepted.tolist(), "between 0 and the step's number of proposals")
    if int(v.proposed.min()) < 0 or (v.top_ids.numel() and int(v.top_ids.min()) < 0):
        raise _bad("verify.proposed or verify.top_ids", "negative somewhere", "token ids")
    if bool(v.top_logits.isnan().any()) or not bool(v.logsumexp.isfinite().all()):
        raise _bad(
            "verify.top_logits or verify.logsumexp", "NaN or infinite somewhere", "finite (-inf logits: no value)"
        )
