"""Coupled sampling in vLLM's V1 model runner: the same token for the same (seed, position, policy), drafted or not.

vLLM's own code goes on doing everything before the draw (grammar masks, allowed tokens, bad words, min_tokens,
penalties, temperature, top-k, top-p) and after it (log-probabilities); only the draw itself is replaced, and in a
verify step the comparison with the drafts. Batches without a random request are left to vLLM. min_p, logit_bias and
custom logits processors are refused by vLLM in any engine that speculates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from rollspec.config import RollspecConfig
from rollspec.engine.vllm.hooks import runner_v1 as v1
from rollspec.engine.vllm.noise_keys import GREEDY, NoiseKeys
from rollspec.engine.vllm.ranks import Ranks
from rollspec.sampling.coupled import accept, kernel_for, sample
from rollspec.sampling.noise import Ints, Words

T = TypeVar("T")


class CoupledSampler(NoiseKeys):
    """Replaces how one model runner samples. On every rank: tensor-parallel ranks each draw, and must draw alike.

    Args:
        runner: vLLM's `GPUModelRunner` (vllm/v1/worker/gpu_model_runner.py), whose `_sample` is wrapped.
        count: told the cause of a fault. After one the engine samples as without this class: from the same law, with
            noise that cannot be repeated.
        ranks: that draw the same. All of them go over to vLLM's sampling at the same step, or they would go on with
            different texts.
    """

    def __init__(self, runner: Any, config: RollspecConfig, count: Callable[[str], None], ranks: Ranks) -> None:
        super().__init__(runner, config, count)
        self._ranks = ranks
        self._runner = runner
        self._drawing = False  # a step without drafts is about to be drawn
        kernel = kernel_for(runner.device, int(runner.model_config.get_vocab_size()))
        self._kernel = kernel if ranks.least(int(kernel is not None)) else None  # paths may differ where scores tie
        self._standard = v1.Sample.put(runner, self._sample, __name__)
        self._draw_standard = v1.DrawTokens.put(runner.sampler.topk_topp_sampler, self._draw, __name__)

    def sample(self, logits: torch.Tensor, keys: Words, positions: Ints) -> torch.Tensor:
        """As `rollspec.sampling.coupled.sample`."""
        return sample(logits, keys, positions, self._kernel)

    # ---- the draw ---------------------------------------------------------------------------------------------------

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        """vLLM's `_sample`: logits [rows, vocab], one row per request, or one per draft token and one more."""
        runner = self._runner
        sampling = runner.input_batch.sampling_metadata
        if logits is None or sampling.all_greedy or not self.on:
            return self._standard(logits, spec_decode_metadata)
        if spec_decode_metadata is None:
            self._drawing = True
            try:
                return self._standard(logits, None)  # ends in `_draw`
            finally:
                self._drawing = False
        out = self._attempt(lambda: self._verify(logits, spec_decode_metadata, sampling))
        # `_verify` writes into copies only: these logits are as the model left them.
        return self._standard(logits, spec_decode_metadata) if out is None else out

    def _attempt(self, draw: Callable[[], T]) -> T | None:
        """What `draw` returns; None where it fails on any rank, and coupled sampling is off on all of them."""
        error, out = self._broken, None
        if error is None:
            try:
                out = draw()
            except Exception as e:
                error = e
        if self._ranks.least(int(error is None)):
            return out
        self.fail(error or RuntimeError("it failed on another rank of the engine"))
        return None

    def _noise_of(self, metadata: Any) -> tuple[Words, Ints]:
        """Key and position of each row of logits. A row is fed the token at i and yields the one at i + 1."""
        runner = self._runner
        requests = runner.input_batch.req_ids[: runner.input_batch.num_reqs]
        keys = np.array([self.streams.keys[r] for r in requests], dtype=np.uint64)
        if metadata is None:
            fed = runner.query_start_loc.gpu[1 : len(requests) + 1] - 1
        else:
            fed = metadata.logits_indices
            keys = np.repeat(keys, np.array(metadata.num_draft_tokens) + 1)
        return keys, runner.positions[fed].cpu().numpy().astype(np.int64) + 1

    def _draw(self, logits: torch.Tensor, generators: Any, k: Any, p: Any) -> Any:
        """vLLM's `TopKTopPSampler.forward`, with coupled noise in the place of its own."""
        if not self._drawing:  # a dummy run, or vLLM's own verification
            return self._draw_standard(logits, generators, k, p)
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        logits = apply_top_k_top_p(logits, k, p)
        tokens = self._attempt(lambda: self.sample(logits, *self._noise_of(None)))
        if tokens is None:  # top-k and top-p are applied; top-p a second time would cut off more
            return self._draw_standard(logits, generators, None, None)
        mode = self._runner.sampler.logprobs_mode
        processed = None
        if mode == "processed_logits":
            processed = logits
        elif mode == "processed_logprobs":
            processed = logits.log_softmax(dim=-1, dtype=torch.float32)
        return tokens, processed

    # ---- a verify step ----------------------------------------------------------------------------------------------

    def _verify(self, logits: torch.Tensor, metadata: Any, sampling: Any) -> Any:
        """vLLM's `RejectionSampler.forward` (vllm/v1/sample/rejection_sampler.py), without its rejection."""
        from vllm.v1.outputs import SamplerOutput

        rejection = self._runner.rejection_sampler
        counts = np.array(metadata.num_draft_tokens)
        if _temperature_alone(sampling):
            scores = logits.float()
            temperature = _per_row(sampling.temperature, counts)
            if bool((temperature != 1.0).any()):
                scores = scores / torch.where(temperature < GREEDY, 1.0, temperature)[:, None]
        else:
            scores = self._processed(logits, metadata, sampling)
        tokens = self.sample(scores, *self._noise_of(metadata))
        if not sampling.all_random:
            greedy = _per_row(sampling.temperature, counts) < GREEDY
            tokens = torch.where(greedy, scores.argmax(-1), tokens)
        drafts = metadata.draft_token_ids.cpu().numpy().astype(np.int64)
        emitted = accept(tokens.cpu().numpy(), drafts, counts, metadata.max_spec_len + 1)
        out = torch.from_numpy(emitted).to(logits.device, torch.int32)
        log_probs = None
        if sampling.max_num_logprobs is not None:
            of = scores if rejection.is_processed_logprobs_mode else logits
            log_probs = rejection._get_logprobs_tensors(
                sampling.max_num_logprobs,
                metadata,
                logits,
                of[metadata.target_logits_indices],
                of[metadata.bonus_logits_indices],
                out,
            )
        return SamplerOutput(sampled_token_ids=out, logprobs_tensors=log_probs)

    def _processed(self, logits: torch.Tensor, metadata: Any, sampling: Any) -> torch.Tensor:
        """What both kinds of rows are sampled from, in the order of `logits`: each through its own code of vLLM."""
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
        from vllm.v1.sample.rejection_sampler import apply_sampling_constraints

        sampler, rejection = self._runner.sampler, self._runner.rejection_sampler
        last = logits[metadata.bonus_logits_indices].float()
        last = sampler.apply_logits_processors(last, sampling, predict_bonus_token=True)
        last = sampler.apply_temperature(last, sampling.temperature, sampling.all_random)
        for processor in sampling.logitsprocs.argmax_invariant:
            last = processor.apply(last)
        drafted = logits[metadata.target_logits_indices].float()
        drafted = rejection.apply_logits_processors(drafted, sampling, metadata)
        scores = torch.empty_like(logits, dtype=torch.float32)
        scores[metadata.bonus_logits_indices] = apply_top_k_top_p(last, sampling.top_k, sampling.top_p)
        scores[metadata.target_logits_indices] = apply_sampling_constraints(
            drafted, metadata.cu_num_draft_tokens, sampling
        )
        return scores


def _temperature_alone(sampling: Any) -> bool:
    """Whether a temperature is all that stands between logits and law."""
    holder = sampling.thinking_budget_state_holder
    return (
        sampling.top_k is None
        and sampling.top_p is None
        and sampling.no_penalties
        and not sampling.bad_words_token_ids
        and sampling.allowed_token_ids_mask is None
        and not any(getattr(p, "min_toks", True) for p in sampling.logitsprocs.non_argmax_invariant)
        and not any(getattr(p, "min_p_count", True) for p in sampling.logitsprocs.argmax_invariant)
        and not (holder is not None and holder.has_tracked_requests())
    )


def _per_row(values: torch.Tensor, counts: Ints) -> torch.Tensor:
    """A value per request, repeated for each of its rows."""
    return torch.repeat_interleave(values, torch.from_numpy(counts + 1).to(values.device))
