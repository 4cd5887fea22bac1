"""A head made, trained and written by drafter_online is served by vLLM, and accepted there as the library says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import build, close, generate
from reference_samples import capture, replay

from drafter_online import head as heads
from drafter_online.buffer import Buffer
from drafter_online.model import Eagle3
from drafter_online.samples import Sample
from drafter_online.trainer import DrafterTraining, Trainer
from drafter_online.versions import Versions

K = 3
LIMIT = 80
STEPS = 60

pytestmark = pytest.mark.engine


@dataclass
class Trained:
    drafter: Eagle3
    policy: Any
    head: Path
    before: float
    after: float


def problems(model: Path, split: str, count: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    from examples.grpo_arithmetic.data import problems as draw
    from examples.grpo_arithmetic.tokenizer import prompt_text

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer.encode(prompt_text(p.question), add_special_tokens=False) for p in draw(split, count)]


def greedy(policy: Any, prompts: list[list[int]], aux: list[int]) -> list[Sample]:
    """What transformers says to the prompts; a batch padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    done = policy.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=LIMIT)
    eos = policy.generation_config.eos_token_id
    out = []
    for i, (prompt, row) in enumerate(zip(prompts, done[:, width:].tolist(), strict=True)):
        answer = row[: row.index(eos) + 1] if eos in row else row
        out.append(captured(policy, prompt, answer, aux, str(i)))
    return out


def captured(policy: Any, prompt: list[int], answer: list[int], aux: list[int], name: str = "") -> Sample:
    return capture(policy, prompt + answer, len(prompt), aux, request_id=name, temperature=0.0)


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A fresh head after some micro-steps on greedy responses of the example's policy."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    fresh = heads.fresh(model)
    aux = fresh.config.eagle_aux_hidden_state_layer_ids
    buffer = Buffer()
    for s in greedy(policy, problems(model, "train", 40), aux):
        buffer.add(s)
    held_out = greedy(policy, problems(model, "val", 12), aux)
    config = DrafterTraining(learning_rate=4e-3, batch_tokens=384)
    trainer = Trainer(Eagle3(fresh), buffer, config)
    before = trainer.evaluate(held_out).length
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads of tiny products wait for each other where cores are shared
    for _ in range(STEPS):
        trainer.micro_step()
    torch.set_num_threads(threads)
    after = trainer.evaluate(held_out).length
    store = Versions(tmp_path_factory.mktemp("versions"))
    number = trainer.publish(store, torch.float32)
    assert store.load(number, base=trainer.drafter.base).number == 1
    return Trained(Eagle3(fresh), policy, store.path(number), before, after)


@pytest.fixture(scope="module")
def llm(model: Path, trained: Trained) -> Iterator[Any]:
    spec = {"method": "eagle3", "model": str(trained.head), "num_speculative_tokens": K}
    engine = build(model, speculative_config=spec)
    yield engine
    close(engine)


@pytest.mark.slow  # `test_it_learns_from_what_the_engine_says_unspeculated` is its sibling
def test_acceptance_rises_on_prompts_it_was_not_trained_on(trained: Trained) -> None:
    assert trained.before < 1.3 and trained.after > trained.before + 0.3, (trained.before, trained.after)


def counters(llm: Any) -> dict[str, Any]:
    found = {m.name.removeprefix("vllm:spec_decode_num_"): m for m in llm.get_metrics() if "spec_decode" in m.name}
    return {n: getattr(m, "value", None) or getattr(m, "values", 0) for n, m in found.items()}


@pytest.mark.slow  # `test_a_job_starts_from_it` is its shorter sibling
def test_the_engine_accepts_what_the_library_predicts(model: Path, trained: Trained, llm: Any) -> None:
    prompts = problems(model, "val", 12)
    aux = trained.drafter.head.config.eagle_aux_hidden_state_layer_ids
    emitted = generate(llm, prompts, copies=1, limit=LIMIT, max_tokens=LIMIT)
    expected = [captured(trained.policy, p, e, aux) for p, e in zip(prompts, emitted, strict=True)]
    got = counters(llm)
    drafts = accepted = 0
    for s in expected:
        v = replay(trained.policy, trained.drafter, s, K).verify
        drafts += len(v)
        accepted += int(v.accepted.sum())
    assert got["drafts"] == pytest.approx(drafts, rel=0.03), (got, drafts, accepted)
    # As many steps for the same tokens: what the engine accepted besides lies beyond the end of a response (a limit or
    # an end token within the last step's drafts), where the replay has nothing to compare with.
    assert 0.97 * accepted <= got["accepted_tokens"] <= 1.03 * accepted + K * len(prompts), (got, drafts, accepted)
