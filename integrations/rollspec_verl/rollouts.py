"""The finished rollouts of one training step, as verl's transfer queue holds them, and what rollspec measures of
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, compress
from typing import Any

import numpy as np
import numpy.typing as npt

from rollspec.proposal.base import TokenArray, as_tokens, prompt_key
from rollspec.telemetry.health import HealthWatch, rollout_metrics

NAMES = {"prompts", "responses", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs"}
"""What is read of verl's batches."""


@dataclass
class Rollouts:
    """Per response: tokens of prompt and response, reward, the engine's and the trainer's log-probs if kept, which of
    its prompt's samples it is, and the first and last policy version it was sampled under, if verl noted them. `turns`:
    the tokens of each of its turns, where an environment spoke between them: what it said is in `responses` alone.
    """

    prompts: list[TokenArray]
    responses: list[TokenArray]
    scores: list[float]
    engine_logprobs: list[np.ndarray]
    trainer_logprobs: list[np.ndarray]
    samples: list[str] = field(default_factory=list)
    versions: list[tuple[Any, Any]] = field(default_factory=list)
    turns: list[list[TokenArray]] = field(default_factory=list)

    @classmethod
    def read(cls, batch: Any) -> Rollouts:
        """Fetch `batch` (verl's `KVBatchMeta`) from the transfer queue; padding samples are left out."""
        import transfer_queue as tq

        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=sorted(NAMES))
        kept = [not tag.get("is_padding", False) for tag in batch.tags]
        rows = {name: list(compress(data[name].unbind(), kept)) for name in data.keys() & NAMES}
        # Keys are uid_session_output (replay_buffer.py:70); a prompt's uid is another one in every epoch.
        samples = [key.partition("_")[2] for key in compress(batch.keys, kept)]
        versions = [(t.get("min_global_steps"), t.get("max_global_steps")) for t in compress(batch.tags, kept)]
        return cls._made(rows, samples, versions)

    @classmethod
    def of(cls, batch: Any) -> Rollouts:
        """The same of a `DataProto` of verl's agent loops: prompts padded on the left, responses on the right."""
        tensors, notes = batch.batch, batch.non_tensor_batch
        width = tensors["prompts"].shape[1]
        there = tensors["attention_mask"].bool()
        rows = {}
        for name in tensors.keys() & NAMES:
            mask = there[:, :width] if name == "prompts" else there[:, width:]
            rows[name] = [v[m] for v, m in zip(tensors[name], mask, strict=True)]
        versions = zip(notes["min_global_steps"], notes["max_global_steps"], strict=True)
        return cls._made(rows, [str(i) for i in range(len(there))], list(versions))

    @classmethod
    def _made(
        cls, tensors: Mapping[str, Sequence[Any]], samples: list[str], versions: list[tuple[Any, Any]]
    ) -> Rollouts:
        """`tensors`: one per response, by verl's name, without padding."""
        rows = {name: [t.detach().float().cpu().numpy() for t in found] for name, found in tensors.items()}
        masks = [m > 0 for m in rows.get("response_mask", ())]

        def sampled(name: str) -> list[np.ndarray]:  # tool output in a multi-turn response is not
            return [v[m] if v.shape == m.shape else v for v, m in zip(rows.get(name, ()), masks, strict=False)]

        responses = [as_tokens(r) for r in rows["responses"]]
        return cls(
            [as_tokens(p) for p in rows["prompts"]],
            responses,
            [float(s.sum()) for s in rows.get("rm_scores", ())],
            sampled("rollout_log_probs"),
            sampled("old_log_probs"),
            samples,
            versions,
            [split(r, m) for r, m in zip(responses, masks, strict=True)] if masks else [],
        )

    @classmethod
    def join(cls, parts: Sequence[Rollouts]) -> Rollouts:
        """The mini-batches of one step together."""
        return cls(*(list(chain.from_iterable(getattr(p, f.name) for p in parts)) for f in fields(cls)))

    @property
    def lengths(self) -> list[int]:
        """Tokens per response that the policy sampled."""
        return [sum(map(len, turns)) for turns in self._turns]

    def rewards(self) -> list[list[Any]]:
        """`[prompt key, response key, reward]` per turn, as the engine's operation `rewards` takes them: to the engine
        each turn is a response, and a rollout's reward is that of all its turns. None of rollouts without scores.
        """
        if not self.scores:
            return []
        rows = zip(self.prompts, self._turns, self.scores, strict=True)
        return [[prompt_key(p), prompt_key(t), s] for p, turns, s in rows for t in turns]

    @property
    def _turns(self) -> list[list[TokenArray]]:
        return self.turns or [[r] for r in self.responses]

    @property
    def spanning(self) -> int:
        """Responses whose tokens were sampled by more than one policy version."""
        return sum(first is not None and last is not None and first != last for first, last in self.versions)

    def epochs(self, watch: HealthWatch) -> dict[str, float]:
        """How much of the last epoch's responses these repeat."""
        keys = [prompt_key(p) for p in self.prompts]
        said = [np.concatenate([as_tokens([]), *turns]) for turns in self._turns]
        return watch.epochs(keys, self.samples, said, self.engine_logprobs or self.trainer_logprobs or None)

    def metrics(self) -> dict[str, float]:
        """See `rollout_metrics`."""
        out = rollout_metrics(self.lengths, self.scores, self.engine_logprobs, self.trainer_logprobs)
        if any(last is not None for _, last in self.versions):
            out["rollspec/policy/spanning"] = float(self.spanning)
        return out


def split(response: TokenArray, mask: npt.NDArray[np.bool_]) -> list[TokenArray]:
    """The runs of `response` [n] where `mask` [n] is set: its turns, without what stands between them."""
    ends = np.flatnonzero(np.diff(mask)) + 1
    return [run for run, on in zip(np.split(response, ends), np.split(mask, ends), strict=True) if on.any()]
