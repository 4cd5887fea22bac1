"""Coupled sampling, checked token by token: the audit derives each request's noise itself and takes the argmax.

In `mode: coupled` a token is a function of logits and noise: argmax(logits / T + noise). So every sampled token is
compared with the argmax of the reference model's logits and the same noise. Rounding may swap two tokens whose scores
are equal to within the engine's precision; anything else is a fault, found at the first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rollspec.audit.evidence import Evidence, Samples
from rollspec.audit.statistics import Floats
from rollspec.config import RollspecConfig
from rollspec.sampling.streams import Streams

Words: TypeAlias = npt.NDArray[np.uint64]
Hashes: TypeAlias = npt.NDArray[np.uint32]


def gumbel(keys: Words, positions: npt.NDArray[np.int64], vocab: int) -> Floats:
    """The noise that vLLM's second model runner draws with, float32 [n, vocab], for requests whose seed is their key:
    murmur3 of (seed, position, token), then the float32 steps of `vllm/v1/worker/gpu/sample/gumbel.py` in its order.

    Args:
        keys: [n]. positions: [n] of the drawn tokens; the runner names a draw by the position it is computed from.
    """
    h = np.zeros((len(keys), 1), np.uint32)
    for word in (keys, keys >> np.uint64(32), positions - 1):
        h = _mixed(h, word.astype(np.uint32)[:, None])
    h = _mixed(h, np.arange(vocab, dtype=np.uint32)) ^ np.uint32(16)  # [n, vocab]; 16 bytes were hashed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ h >> np.uint32(shift)) * np.uint32(factor)
    low, high = (h & np.uint32(0xFFFF)).astype(np.float32), (h >> np.uint32(16)).astype(np.float32)
    u = (low + np.float32(0.5)) * np.float32(2**-32) + high * np.float32(2**-16)
    log = np.log(np.maximum(np.float32(1) - u, np.float32(2**-24)))  # log(1 - u); a series where u is small
    small = u < np.float32(0.25)
    series, v = np.zeros(int(small.sum()), np.float32), u[small]
    for n in (8, 7, 6, 5, 4, 3, 2):
        series = (series + np.float32(1 / n)) * v
    log[small] = -v * (series + np.float32(1))
    found: Floats = -np.log(-log)
    return found


def _mixed(h: Hashes, word: Hashes) -> Hashes:
    """murmur3's state `h` after one more word."""
    word = word * np.uint32(0xCC9E2D51)
    h = h ^ (word << np.uint32(15) | word >> np.uint32(17)) * np.uint32(0x1B873593)
    return (h << np.uint32(13) | h >> np.uint32(19)) * np.uint32(5) + np.uint32(0xE6546B64)


@dataclass(slots=True)
class NoiseCheck:
    """`exact` tokens are the argmax, `ties` lose to it by no more than `tie`, `wrong` by more. `first`: the first wrong
    one as (sequence, position in the response, the argmax, the token, by how much). `largest`: the largest gap.
    """

    tie: float
    tokens: int = 0
    exact: int = 0
    ties: int = 0
    wrong: int = 0
    largest: float = 0.0
    first: tuple[int, int, int, int, float] | None = None

    @property
    def failure(self) -> str | None:
        """A token that rounding does not explain."""
        if self.first is None:
            return None
        _, position, best, token, distance = self.first
        return (
            f"{self.wrong} of {self.tokens} tokens are not the ones that the target and their noise make; the first is "
            f"token {position} of a response: {token} where {best} wins by {distance:.3g}."
        )


class Witness:
    """Takes the target's distributions as `Evidence` does, hands them on to it, and checks the tokens' noise.

    Args:
        samples: all that was sampled. evidence: about the first of them, or all.
        keys: [sequences] of noise. prompts: tokens by prompt index. tie: gap that rounding explains.
    """

    def __init__(
        self, samples: Samples, evidence: Evidence, keys: Words, prompts: Sequence[Sequence[int]], tie: float
    ) -> None:
        self.samples, self.found = samples, NoiseCheck(tie)
        self._evidence, self._keys, self._prompts = evidence, keys, prompts

    def add(self, sequence: int, log_probs: Floats, first: int = 0) -> None:
        """As `Evidence.add`."""
        if sequence < len(self._evidence.samples.tokens):
            self._evidence.add(sequence, log_probs, first)
        n, vocab = log_probs.shape
        start = len(self._prompts[int(self.samples.prompt[sequence])]) + first
        scores = log_probs + gumbel(np.repeat(self._keys[sequence], n), start + np.arange(n), vocab)
        tokens, best = self.samples.tokens[sequence][first : first + n], scores.argmax(1)
        gaps = scores[np.arange(n), best] - scores[np.arange(n), tokens]
        found, wrong, exact = self.found, gaps > self.found.tie, int((best == tokens).sum())
        found.tokens += n
        found.exact += exact
        found.wrong += int(wrong.sum())
        found.ties += n - exact - int(wrong.sum())
        found.largest = max(found.largest, float(gaps.max(initial=0.0)))
        if wrong.any() and (found.first is None or (sequence, first) < found.first[:2]):
            i = int(wrong.argmax())
            found.first = (sequence, first + i, int(best[i]), int(tokens[i]), float(gaps[i]))


def keys_of(
    samples: Samples, prompts: Sequence[Sequence[int]], config: RollspecConfig, engine_seed: int, version: int
) -> Words:
    """[sequences] noise keys of an engine that began its rounds at policy `version`, one version per round, and got the
    requests in the order of `samples` (rollspec/engine/noise_keys.py).
    """
    streams = Streams(config.coupled.seed, (engine_seed, 0), keep=config.reuse.seeds == "keep")
    out = []
    for s, (prompt, r) in enumerate(zip(samples.prompt.tolist(), samples.round.tolist(), strict=True)):
        streams.set_version(version + r)
        out.append(streams.begin(str(s), prompts[prompt]))
    return np.array(out, dtype=np.uint64)


def first_round(samples: Samples) -> Samples:
    """The samples of round 0, which come first."""
    n = int((samples.round == 0).sum())
    return Samples(
        samples.tokens[:n], samples.prompt[:n], samples.round[:n], samples.log_probs and samples.log_probs[:n]
    )
