"""One training sample: what the target computed about one sequence, and its verification of drafts.

A superset of the `speculators` data format, with provenance and verify steps; one safetensors blob across processes.

Row t of `hidden_states` and `verifier_last_hidden_states` is what the target computed *when it read* `input_ids[t]`, so
`verifier_last_hidden_states[t]`, after the final norm and the LM head, predicts `input_ids[t + 1]`:

    input_ids                    x0  x1  x2  x3
    hidden_states                g0  g1  g2  g3      [T, A*H]  residual stream entering layers a, b, c
    verifier_last_hidden_states  y0  y1  y2  y3      [T, H]    residual stream after the last layer, before the norm
    the head is trained on       (x1, g0) -> y1,  (x2, g1) -> y2, ...

Auxiliary layer `i` is the residual stream *entering* decoder layer `i` (0: the embedding; the number of layers: after
the last one), as in vLLM and speculators (`eagle_aux_hidden_state_layer_ids`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from drafter_online.errors import SampleError

FORMAT = "drafter-online-sample-1"
LONGEST_DOMAIN = 64
WINDOW_BYTES = 32 << 20  # longer samples go over the wire in windows
NO_DRAFTER = -1  # draft_version of what no draft head had a part in, or is not known of which


@dataclass(frozen=True, eq=False)
class VerifyStep:
    """One verify step of one request, as an engine sees it; `Verify.gather` packs many."""

    position: int  # index in `input_ids` of the last token known before the step; proposed[0] is for position + 1
    drafter: str  # who proposed: "head", "suffix", ...
    proposed: list[int]  # [K] token ids
    accepted: int  # how many of them were accepted, 0..K
    top_ids: Tensor  # [K, k] integers
    top_logits: Tensor  # [K, k]
    logsumexp: Tensor  # [K]
    draft_version: int = NO_DRAFTER  # of the weights that proposed, where the draft head did


@dataclass(frozen=True, eq=False)
class Verify:
    """The verify steps of a sample: S steps, P = sum of `lengths` proposed tokens, in step order.

    Row j of `top_ids`, `top_logits` and `logsumexp` is the target's distribution where `proposed[j]` was proposed,
    given everything before it *including the earlier proposals of its step, accepted or not*. Logits are the model's
    own, before temperature; the log-sum-exp is over the whole vocabulary, in nats.
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
    def gather(cls, steps: Iterable[VerifyStep]) -> Verify:
        """Pack steps, which all have as many logits; steps without proposals are left out."""
        kept = [s for s in steps if s.proposed]

        def numbers(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.int64)

        def rows(name: str, dtype: torch.dtype, *none: int) -> Tensor:
            return torch.cat([getattr(s, name).to("cpu", dtype) for s in kept] or [torch.zeros(none, dtype=dtype)])

        return cls(
            position=numbers(s.position for s in kept),
            lengths=numbers(len(s.proposed) for s in kept),
            accepted=numbers(s.accepted for s in kept),
            drafter=tuple(s.drafter for s in kept),
            draft_version=numbers(s.draft_version for s in kept),
            proposed=numbers(t for s in kept for t in s.proposed),
            top_ids=rows("top_ids", torch.int64, 0, 0),
            top_logits=rows("top_logits", torch.float32, 0, 0),
            logsumexp=rows("logsumexp", torch.float32, 0),
        )

    def __len__(self) -> int:
        return len(self.drafter)

    def between(self, start: int, stop: int) -> Verify:
        """The steps whose `position` lies in [start, stop), with positions counted from `start`."""
        keep = (self.position >= start) & (self.position < stop)  # [S]
        rows = keep.repeat_interleave(self.lengths)  # [P]
        return Verify(
            **{n: getattr(self, n)[keep] for n in _OF_STEPS} | {"position": self.position[keep] - start},
            **{n: getattr(self, n)[rows] for n in _OF_TOKENS},
            drafter=tuple(d for d, k in zip(self.drafter, keep.tolist(), strict=True) if k),
        )


_OF_STEPS = ("position", "lengths", "accepted", "draft_version")
_OF_TOKENS = ("proposed", "top_ids", "top_logits", "logsumexp")
_VERIFY = (*_OF_STEPS, *_OF_TOKENS)
_TENSORS = ("input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask", "position_ids")


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
    verify: Verify = dataclasses.field(default_factory=lambda: Verify.gather(()))

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        mine = [getattr(self, n) for n in _TENSORS] + [getattr(self.verify, n) for n in _VERIFY]
        return sum(int(t.numel() * t.element_size()) for t in mine)

    def window(self, start: int, stop: int) -> Sample:
        """Tokens [start, stop) with their verify steps; tensors are views."""
        if not 0 <= start < stop <= len(self):
            raise SampleError(f"window [{start}, {stop}) is not inside a sample of {len(self)} tokens.")
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
        for field, value, fits, want in chain(_tensors(self), _verify(self), _facts(self)):
            if not fits:
                raise SampleError(f"a sample is refused: `{field}` is {value}, but must be {want}.")
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
            found, record = header["format"], json.loads(header["sample"])
        except (SafetensorError, ValueError, KeyError, TypeError) as e:
            raise SampleError(f"a sample of {len(blob)} bytes is refused: it cannot be read ({e}).") from e
        if found != FORMAT:
            raise SampleError(f"a sample of format {found!r} is refused; use {FORMAT!r}.")
        return cls.of_parts(tensors, record).validate()

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Contiguous tensors by name, and the rest as a JSON object."""
        tensors = {n: getattr(self, n).contiguous() for n in _TENSORS}
        tensors |= {f"verify.{n}": getattr(self.verify, n).contiguous() for n in _VERIFY}
        names = sorted(set(self.verify.drafter))
        drafters = {"drafters": names, "drafter": [names.index(d) for d in self.verify.drafter]}
        return tensors, {n: getattr(self, n) for n in _FACTS} | drafters

    @classmethod
    def of_parts(cls, tensors: dict[str, Tensor], record: dict[str, Any]) -> Sample:
        """The inverse of `parts`; not validated beyond what it takes to build it.

        Raises:
            SampleError: a tensor or a field is missing or of another kind.
        """
        try:
            drafter = [record["drafters"][i] for i in record["drafter"]]
            verify = {n: tensors[f"verify.{n}"] for n in _VERIFY} | {"drafter": drafter}
            return msgspec.convert(record | {n: tensors[n] for n in _TENSORS} | {"verify": verify}, cls)
        except (msgspec.ValidationError, KeyError, IndexError, TypeError) as e:
            raise SampleError(f"a sample is refused: {e!r} is missing or of the wrong kind.") from e


_FACTS = tuple(f.name for f in dataclasses.fields(Sample) if f.name not in (*_TENSORS, "verify"))
"""What crosses process borders beside the tensors."""

_Check = tuple[str, object, bool, str]
"""A field, what it is, whether that fits, and what it must be; computed once all before it fit."""


def _shape(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def _is(t: Tensor, dtype: torch.dtype, *shape: int) -> bool:
    return t.dtype == dtype and t.shape == shape


def _tensors(s: Sample) -> Iterator[_Check]:
    ids, last, aux, pos = s.input_ids, s.verifier_last_hidden_states, s.hidden_states, s.position_ids
    t = ids.numel()
    yield "input_ids", _shape(ids), _is(ids, torch.int64, t) and t > 0, "int64[T] with T at least 1"
    yield "input_ids", f"{int(ids.min())} somewhere", int(ids.min()) >= 0, "token ids, none of them negative"
    fits = last.is_floating_point() and last.dim() == 2 and last.shape[0] == t and last.shape[1] > 0
    yield "verifier_last_hidden_states", _shape(last), fits, f"floating point [T, H] with T = {t}"
    h = last.shape[1]
    fits = aux.dtype == last.dtype and aux.dim() == 2 and aux.shape[0] == t and aux.shape[1] % h == 0
    yield "hidden_states", _shape(aux), fits, f"{last.dtype} [T, A*H] with T = {t} and H = {h}"
    for name, states in (("hidden_states", aux), ("verifier_last_hidden_states", last)):
        yield name, "NaN or infinite somewhere", bool(states.isfinite().all()), "finite"
    yield "loss_mask", _shape(s.loss_mask), _is(s.loss_mask, torch.bool, t), f"bool[{t}]"
    yield "position_ids", _shape(pos), _is(pos, torch.int64, t), f"int64[{t}]"
    fits = int(pos[0]) >= 0 and torch.equal(pos, torch.arange(t) + pos[0])
    yield "position_ids", "not consecutive", fits, "consecutive positions from 0 or later, one per token"


def _verify(s: Sample) -> Iterator[_Check]:
    v = s.verify
    steps, rows = len(v.drafter), int(v.lengths.sum())
    for name in ("position", "lengths", "accepted", "draft_version", "proposed"):
        t, n = getattr(v, name), rows if name == "proposed" else steps
        yield f"verify.{name}", _shape(t), _is(t, torch.int64, n), f"int64[{n}]"
    ids, logits, lse = v.top_ids, v.top_logits, v.logsumexp
    fits = ids.dtype == torch.int64 and ids.dim() == 2 and ids.shape[0] == rows
    yield "verify.top_ids", _shape(ids), fits, f"int64[{rows}, k]"
    fits = logits.is_floating_point() and logits.shape == ids.shape
    yield "verify.top_logits", _shape(logits), fits, f"floating point {list(ids.shape)}, as top_ids"
    fits = lse.is_floating_point() and lse.shape == (rows,)
    yield "verify.logsumexp", _shape(lse), fits, f"floating point [{rows}]"
    fits = bool((v.lengths >= 1).all())
    yield "verify.lengths", v.lengths.tolist(), fits, "at least 1: a step without proposals is left out"
    fits = bool(((v.position >= 0) & (v.position < len(s))).all())
    yield "verify.position", v.position.tolist(), fits, f"indices into the sample's {len(s)} tokens"
    fits = bool(((v.accepted >= 0) & (v.accepted <= v.lengths)).all())
    yield "verify.accepted", v.accepted.tolist(), fits, "between 0 and the step's number of proposals"
    fits = bool((v.proposed >= 0).all()) and bool((ids >= 0).all())
    yield "verify.proposed or verify.top_ids", "negative somewhere", fits, "token ids"
    fits = not bool(logits.isnan().any()) and bool(lse.isfinite().all())
    yield "verify.top_logits or verify.logsumexp", "NaN or infinite somewhere", fits, "finite (-inf logits: no value)"


def _facts(s: Sample) -> Iterator[_Check]:
    yield "target_version", s.target_version, s.target_version >= 0, "0 or more"
    yield "reward", s.reward, s.reward is None or math.isfinite(s.reward), "finite, or None while it is not known"
    yield "temperature", s.temperature, 0 <= s.temperature < math.inf, "finite and not negative"
    yield "response_length", s.response_length, s.response_length >= 0, "a number of tokens"
    fits = len(s.domain) <= LONGEST_DOMAIN and (s.domain or "-").isprintable()
    yield "domain", repr(s.domain[:LONGEST_DOMAIN]), fits, f"{LONGEST_DOMAIN} printable characters at most"
