"""The log-probs that the policy gives to given tokens, at the temperature it is sampled at: one prefill, no sampling.

vLLM's `prompt_logprobs` are of the unscaled logits (vllm/v1/worker/gpu/sample/prompt_logprob.py), so the worker divides
them itself for requests that ask for it (`v2/scoring.py`).

    params = scoring.params(temperature=0.7)
    async for output in engine.generate({"prompt_token_ids": prompt + response}, params, request_id): ...
    logprobs = scoring.read(output, first=len(prompt))     # [len(response)]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rollspec.proposal.base import Turn
from rollspec.proposal.history import Spans, read_spans
from rollspec.sampling.streams import Origin

KEY = "rollspec"  # under which a request carries rollspec's own settings in `SamplingParams.extra_args`

TEMPERATURE = "score_temperature"  # at which its prompt is scored
PROMPT = "prompt_tokens"  # of its prompt, where what follows was emitted by this rollout already
ORIGIN = "origin"  # names it over several submissions (`streams.Origin`)
TURN = "turn"  # of a rollout with tools: name, number, first, since (`proposal.base.Turn`)
SPANS = "spans"  # which policy versions emitted that (`proposal.history.Spans`)


def params(temperature: float) -> Any:
    """Sampling parameters of a request whose prompt is scored. vLLM samples one token at least; it means nothing."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={KEY: {TEMPERATURE: float(temperature)}},
    )


def read(output: Any, first: int) -> npt.NDArray[np.float32]:
    """Log-probs of the prompt's tokens from position `first` >= 1 on, from a finished `RequestOutput`."""
    tokens, found = output.prompt_token_ids, output.prompt_logprobs
    values = [found[i][tokens[i]].logprob for i in range(first, len(tokens))]
    return np.array(values, dtype=np.float32)


def eos_tokens(engine: Any) -> frozenset[int]:
    """Tokens that end a response on `engine` (`AsyncLLM`) unless a request ignores them."""
    from vllm import SamplingParams

    found = SamplingParams()
    processor = engine.input_processor
    found.update_from_generation_config(processor.generation_config_fields, processor.renderer.get_eos_token_id())
    return frozenset(found.all_stop_token_ids)


def asked(sampling_params: Any) -> Mapping[str, Any]:
    """Rollspec's own settings of a request; empty where it has none."""
    given = (getattr(sampling_params, "extra_args", None) or {}).get(KEY)
    return given if isinstance(given, Mapping) else {}


def spans(sampling_params: Any) -> Spans:
    """Which policy versions sampled what a rollout brings along; empty where it does not say, or not for all of it."""
    try:
        return read_spans(asked(sampling_params).get(SPANS), sys.maxsize)
    except (TypeError, ValueError):
        return ()


def origin(sampling_params: Any) -> Origin | None:
    """Which rollout a request belongs to that is submitted again if it is aborted; None where it does not say."""
    own = asked(sampling_params)
    name, prompt = own.get(ORIGIN), own.get(PROMPT)
    return Origin(name, prompt) if isinstance(name, str) and isinstance(prompt, int) else None


def turn(sampling_params: Any) -> Turn | None:
    """Which turn of which rollout a request is; None where it does not say."""
    match asked(sampling_params).get(TURN):
        case [str(name), int(number), int(first), int(since)] if number >= 0 < first <= since:
            return Turn(name, number, first, since)
    return None
