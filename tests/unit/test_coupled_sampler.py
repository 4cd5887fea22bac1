"""Where coupled sampling fails, the step is vLLM's own: the tokens and log-probs of plain vLLM in the same state.

vLLM's sampler and rejection sampler are the real ones; the model runner is what they need of it.
"""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from rollspec import RollspecConfig  # noqa: E402
from rollspec.engine.vllm.coupled import CoupledSampler  # noqa: E402
from rollspec.engine.vllm.ranks import Ranks  # noqa: E402

VOCAB, BATCH, K = 300, 3, 2
FILTERED: dict[str, Any] = {"top_k": torch.full((BATCH,), 40), "top_p": torch.full((BATCH,), 0.6)}
PENALISED: dict[str, Any] = {
    "no_penalties": False,
    "prompt_token_ids": torch.arange(BATCH * 4).view(BATCH, 4),
    "output_token_ids": [[7, 8], [9], [10, 11, 12]],
    "spec_token_ids": [[3, 4]] * BATCH,
    "repetition_penalties": torch.full((BATCH,), 1.5),
    "temperature": torch.full((BATCH,), 0.7),
}


@pytest.fixture(autouse=True)
def kernels() -> None:
    """vLLM's verification kernels in C++, as its CPU worker has them."""
    from vllm.platforms import current_platform

    from rollspec.engine.vllm import hooks

    hooks.install_patches()
    current_platform.register_triton_kernel_overrides()


def metadata() -> Any:
    """Of a step that verifies K drafts for each request."""
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    at = torch.arange(BATCH * (K + 1)).view(BATCH, K + 1)
    ones = (torch.arange(BATCH) + 1).to(torch.int32)
    return SpecDecodeMetadata(
        draft_token_ids=torch.tensor([3, 4] * BATCH, dtype=torch.int32),
        num_draft_tokens=[K] * BATCH,
        cu_num_draft_tokens=ones * K,
        cu_num_sampled_tokens=ones * (K + 1),
        target_logits_indices=at[:, :K].flatten(),
        bonus_logits_indices=at[:, K].clone(),
        logits_indices=torch.arange(BATCH * (K + 1)),
    )


def runner(**more: Any) -> Any:
    """A model runner about to sample `BATCH` requests."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    nothing = torch.zeros(BATCH)
    mode = more.pop("logprobs_mode", "raw_logprobs")
    sampling = SamplingMetadata(
        **{
            "temperature": torch.ones(BATCH),
            "all_greedy": False,
            "all_random": True,
            "top_p": None,
            "top_k": None,
            "generators": {},
            "max_num_logprobs": 2,
            "no_penalties": True,
            "prompt_token_ids": None,
            "frequency_penalties": nothing,
            "presence_penalties": nothing,
            "repetition_penalties": nothing,
            "output_token_ids": [[] for _ in range(BATCH)],
            "allowed_token_ids_mask": None,
            "bad_words_token_ids": {},
            "logitsprocs": LogitsProcessors(),
            **more,
        }
    )
    sampler = Sampler(mode)
    rejection = RejectionSampler(sampler)
    names = [str(i) for i in range(BATCH)]

    def _sample(logits: Any, spec: Any) -> Any:
        if spec is None:
            return sampler(logits=logits, sampling_metadata=sampling)
        return rejection(spec, None, logits, sampling)

    return SimpleNamespace(
        _sample=_sample,
        sampler=sampler,
        rejection_sampler=rejection,
        input_batch=SimpleNamespace(sampling_metadata=sampling, req_ids=names, num_reqs=BATCH),
        positions=torch.arange(BATCH * (K + 1)) + 100,
        query_start_loc=SimpleNamespace(gpu=torch.arange(BATCH + 1)),
        model_config=SimpleNamespace(seed=0, get_vocab_size=lambda: VOCAB),
        parallel_config=SimpleNamespace(data_parallel_rank=0),
        device=torch.device("cpu"),
    )


def coupled(of: Any, causes: list[str], ranks: Ranks | None = None) -> CoupledSampler:
    made = CoupledSampler(of, RollspecConfig.load({"mode": "coupled"}, env={}), causes.append, ranks or Ranks())
    for name in of.input_batch.req_ids:
        made.streams.begin(name, [1, 2])
    return made


def said(of: Any, logits: Any, spec: Any) -> tuple[Any, Any]:
    torch.manual_seed(5)
    out = of._sample(logits, spec)
    return out.sampled_token_ids.tolist(), out.logprobs_tensors.logprobs.tolist()


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "rollspec"]


def _raise(*args: Any) -> Any:
    raise RuntimeError("out of registers")


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("more", [{}, FILTERED, PENALISED, FILTERED | PENALISED])
def test_a_step_whose_draw_fails_is_vllms(
    drafts: bool, more: dict[str, Any], mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(BATCH * (K + 1) if drafts else BATCH, VOCAB)
    logits[:, 3] += 4.0  # a draft that is often right
    plain, ours = (runner(logprobs_mode=mode, **copy.deepcopy(more)) for _ in range(2))
    causes: list[str] = []
    sampler = coupled(ours, causes)
    spec = metadata() if drafts else None
    noisy = said(ours, logits.clone(), spec)
    assert noisy == said(ours, logits.clone(), spec), "noise, and not torch's generator, decides"
    sampler.sample = _raise  # type: ignore[method-assign]
    given = logits.clone()
    expected = said(plain, logits.clone(), spec)
    with caplog.at_level(logging.ERROR, "rollspec"):
        assert said(ours, given, spec) == expected
        assert said(ours, logits.clone(), spec) == expected, "and so are the steps after it"
    if drafts:
        assert (given == logits).all()
    assert causes == ["coupled sampling: RuntimeError: out of registers"] and not sampler.on
    assert len(_told(caplog)) == 1 and "coupled sampling is off from now on" in _told(caplog)[0]
    assert noisy != expected


def test_noise_that_cannot_be_known_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    ours = runner()
    causes: list[str] = []
    sampler = coupled(ours, causes)
    step = SimpleNamespace(finished_req_ids=[], scheduled_new_reqs=[SimpleNamespace(req_id="new")])
    with caplog.at_level(logging.ERROR, "rollspec"):
        for _ in range(3):
            sampler.before_step(step)
            said(ours, torch.randn(BATCH, VOCAB), None)
    assert len(causes) == len(_told(caplog)) == 1 and "AttributeError" in causes[0]


@pytest.mark.parametrize("drafts", [False, True])
def test_ranks_go_over_together(drafts: bool) -> None:
    """The draw worked here, and failed on another rank: its tokens are not used here either."""

    class Broken(Ranks):
        worked = 1

        def least(self, value: int) -> int:
            return min(value, self.worked)

    torch.manual_seed(0)
    logits = torch.randn(BATCH * (K + 1) if drafts else BATCH, VOCAB)
    spec = metadata() if drafts else None
    plain, ours = runner(), runner()
    causes: list[str] = []
    ranks = Broken()
    sampler = coupled(ours, causes, ranks)
    noisy = said(ours, logits.clone(), spec)
    ranks.worked = 0
    assert noisy != said(ours, logits.clone(), spec) == said(plain, logits.clone(), spec)
    assert len(causes) == 1 and "another rank" in causes[0] and not sampler.on
