"""CPU implementations of V2's Triton kernels, one module per concern; `KERNELS` maps vLLM's names to them.

Every function takes the launch arguments of its kernel in the kernel's order, and ignores the launch options (block
sizes, warps). The grid is not passed on, so sizes come from the tensors. Index arithmetic runs on numpy views of the
tensors (no copy, cheaper than torch calls); work of a vocabulary's size runs in torch or on whole rows in numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import batch, blocks, drafting, logits, logprobs, ngram, rejection, resampling, sampling, staging

GPU = "vllm.v1.worker.gpu"

KERNELS: dict[str, Callable[..., Any]] = {
    f"{GPU}.buffer_utils._apply_write_kernel": staging.apply_write,
    f"{GPU}.block_table._gather_block_tables_kernel": blocks.gather_block_tables,
    f"{GPU}.block_table._compute_slot_mappings_kernel": blocks.compute_slot_mappings,
    f"{GPU}.input_batch._prepare_prefill_inputs_kernel": batch.prepare_prefill_inputs,
    f"{GPU}.input_batch._prepare_pos_seq_lens_kernel": batch.prepare_pos_seq_lens,
    f"{GPU}.input_batch._combine_sampled_and_draft_tokens_kernel": batch.combine_sampled_and_draft_tokens,
    f"{GPU}.input_batch._get_num_sampled_and_rejected_kernel": batch.get_num_sampled_and_rejected,
    f"{GPU}.input_batch._post_update_kernel": batch.post_update,
    f"{GPU}.input_batch._post_update_num_computed_tokens_kernel": batch.post_update_num_computed_tokens,
    f"{GPU}.input_batch._expand_idx_mapping_kernel": batch.expand_idx_mapping,
    f"{GPU}.sample.gumbel._temperature_kernel": sampling.temperature,
    f"{GPU}.sample.gumbel._gumbel_sample_kernel": sampling.gumbel_sample,
    f"{GPU}.sample.min_p._min_p_kernel": sampling.min_p,
    f"{GPU}.sample.penalties._penalties_kernel": logits.penalties,
    f"{GPU}.sample.penalties._bincount_kernel": logits.bincount,
    f"{GPU}.sample.logit_bias._bias_kernel": logits.bias,
    f"{GPU}.sample.bad_words._bad_words_kernel": logits.bad_words,
    f"{GPU}.structured_outputs._apply_grammar_bitmask_kernel": logits.apply_grammar_bitmask,
    f"{GPU}.metrics.logits._num_nans_kernel": logits.num_nans,
    f"{GPU}.sample.logprob._topk_log_softmax_kernel": logprobs.topk_log_softmax,
    f"{GPU}.sample.logprob._ranks_kernel": logprobs.ranks,
    f"{GPU}.sample.logprob._fill_logprob_token_ids_kernel": logprobs.fill_logprob_token_ids,
    f"{GPU}.sample.prompt_logprob._prompt_logprobs_token_ids_kernel": logprobs.prompt_logprobs_token_ids,
    f"{GPU}.spec_decode.rejection_sampler._flatten_sampled_kernel": rejection.flatten_sampled,
    f"{GPU}.spec_decode.rejection_sampler._gather_draft_sampled_kernel": rejection.gather_draft_sampled,
    f"{GPU}.spec_decode.rejection_sampler_utils._compute_local_logits_stats_kernel": rejection.compute_logits_stats,
    f"{GPU}.spec_decode.rejection_sampler_utils._compute_cumulative_log_p_kernel": rejection.compute_cumulative_log_p,
    f"{GPU}.spec_decode.rejection_sampler_utils._compute_local_residual_mass_kernel": rejection.compute_residual_mass,
    f"{GPU}.spec_decode.rejection_sampler_utils._rejection_kernel": rejection.reject,
    f"{GPU}.spec_decode.rejection_sampler_utils._resample_kernel": resampling.resample,
    f"{GPU}.spec_decode.rejection_sampler_utils._insert_resampled_kernel": resampling.insert_resampled,
    f"{GPU}.spec_decode.target_dependent_ar.speculator._prepare_prefill_inputs_kernel": drafting.prepare_prefill_inputs,
    f"{GPU}.spec_decode.target_dependent_ar.speculator._prepare_decode_inputs_kernel": drafting.prepare_decode_inputs,
    f"{GPU}.spec_decode.target_dependent_ar.speculator._update_draft_inputs_kernel": drafting.update_draft_inputs,
    f"{GPU}.spec_decode.standalone_ar.speculator._prepare_prefill_inputs_kernel": drafting.prepare_expanded_inputs,
    f"{GPU}.spec_decode.ngram.speculator._ngram_scan_kernel": ngram.scan,
    f"{GPU}.spec_decode.ngram.speculator._ngram_finalize_kernel": ngram.finalize,
}
