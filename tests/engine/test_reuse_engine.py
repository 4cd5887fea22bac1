"""Reuse under kept noise in a real vLLM engine: old responses return while the policy agrees, and no further."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import CACHING, bridge, build, call, close, metric, pace, say_together
from models import make_sharp_model

from rollspec import RollspecConfig
from rollspec.audit.distribution import distribution_tests
from rollspec.audit.evidence import Evidence, Samples, samples_from
from rollspec.audit.noise import NoiseCheck, Witness, keys_of
from rollspec.audit.reference import Reference
from rollspec.audit.verdict import AuditResult
from rollspec.proposal.base import Turn
from rollspec.sampling.streams import Streams

pytestmark = pytest.mark.engine

PROMPTS = tuple(tuple(range(3 + i, 11 + i)) for i in range(6))
REUSE = {
    "preset": "default", "mode": "coupled", "reuse.mode": "replay", "coupled.seed": 5,
    "tuning.strategy": "static", "proposal.budget.rule": "fixed",  # how much is drafted must not depend on the clock
}  # fmt: skip
COPIES, LIMIT = 40, 48


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A policy, and the same after a step that moved all its weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first = make_sharp_model(tmp_path_factory.mktemp("first"))
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.0 + 0.02 * torch.randn_like(p))
    second = tmp_path_factory.mktemp("second")
    model.save_pretrained(second)
    AutoTokenizer.from_pretrained(first).save_pretrained(second)
    return [first, second]


@pytest.fixture(scope="module")
def engine(policies: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    llm = build(policies[0], REUSE | {"history.dir": str(tmp_path_factory.mktemp("history"))})
    yield llm
    close(llm)


def _load(worker: Any, folder: str) -> None:
    from safetensors.torch import load_file

    worker.model_runner.model.load_weights(list(load_file(f"{folder}/model.safetensors").items()))


def _epoch(llm: Any, version: int) -> tuple[list[list[int]], dict[str, Any]]:
    from vllm import SamplingParams

    call(llm, "set_version", version=version)
    call(llm, "stats")
    params = SamplingParams(temperature=1.0, max_tokens=LIMIT, detokenize=False)
    requests = [{"prompt_token_ids": list(p)} for p in PROMPTS for _ in range(COPIES)]
    said = [list(o.outputs[0].token_ids) for o in llm.generate(requests, params, use_tqdm=False)]
    call(llm, "rewards", items=[])  # collects what ended in the last step
    stats = call(llm, "stats")
    assert not stats["faults"]
    return said, stats


def _samples(said: list[list[int]]) -> Samples:
    return samples_from(said, [i for i in range(len(PROMPTS)) for _ in range(COPIES)])


def _check(policy: Path, said: list[list[int]]) -> tuple[NoiseCheck, Any]:
    """Every token against the policy's logits and its noise, and all of them against the policy's distribution."""
    samples = _samples(said)
    target = Reference(policy, 1.0)
    evidence = Evidence(samples, target.vocab, np.random.default_rng(0))
    keys = keys_of(samples, PROMPTS, RollspecConfig.load(REUSE, env={}), engine_seed=0, version=0)
    witness = Witness(samples, evidence, keys, PROMPTS, tie=1e-4)
    target.fill(witness, PROMPTS)
    return witness.found, AuditResult(distribution_tests(evidence), samples.n_tokens)


def test_old_responses_return_until_the_policy_disagrees(engine: Any, policies: list[Path]) -> None:
    first, stats = _epoch(engine, 0)
    assert stats["reuse"] == [0, 0, 0, 0] and stats["correlated"]
    n, tokens = len(first), sum(map(len, first))
    again, stats = _epoch(engine, 1)
    assert again == first
    assert stats["reuse"] == [n, tokens, tokens, n]
    assert stats["accepted"] == stats["drafted"] > 0.5 * stats["emitted"]
    assert set(stats["by_source"]) == {"replay"}

    engine.collective_rpc(_load, args=(str(policies[1]),))
    moved, stats = _epoch(engine, 2)
    responses, _, repeated, identical = stats["reuse"]
    assert responses == n and 0 < repeated < sum(map(len, moved)) and identical < n
    assert stats["by_source"]["replay"][2] > 0 and len(stats["by_source"]) > 1, "no realignment by the suffix drafter"
    for said, policy in ((first, policies[0]), (moved, policies[1])):
        noise, result = _check(policy, said)
        assert noise.tokens == sum(map(len, said)) and not noise.failure, noise
        assert noise.ties <= 2
        assert result.verdict == "pass", result.reasons
    wrong, _ = _check(policies[0], moved)
    assert wrong.failure, "the check would not see another policy"


def _dialogues(llm: Any, version: int, marked: bool) -> tuple[list[tuple[list[int], list[int]]], dict[str, Any]]:
    """A tool answers after the first turn: the second is a request of its own, whose prompt is all that was said.
    `marked`: requests say which turn they are. Returns prompt and response of each.
    """
    from vllm import SamplingParams

    call(llm, "set_version", version=version)
    call(llm, "stats")
    prompts = [list(p) for p in PROMPTS for _ in range(4)]
    said: list[tuple[list[int], list[int]]] = []
    since = [len(p) for p in prompts]
    for turn in range(2):
        marks = [[f"{version}-{i}", turn, 8, n] for i, n in enumerate(since)]
        params = [
            SamplingParams(
                temperature=1.0, max_tokens=30, detokenize=False,
                extra_args={"rollspec": {"turn": mark}} if marked else None,
            )
            for mark in marks
        ]  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        answers = [list(o.outputs[0].token_ids) for o in outputs]
        said += zip(prompts, answers, strict=True)
        since = [len(p) + len(a) for p, a in zip(prompts, answers, strict=True)]
        prompts = [[*p, *a, 5, 6, 7 + turn] for p, a in zip(prompts, answers, strict=True)]
    call(llm, "rewards", items=[])
    return said, call(llm, "stats")


@pytest.mark.parametrize("marked", [True, False])
def test_the_turns_of_a_dialogue_return_too(engine: Any, policies: list[Path], marked: bool) -> None:
    """Also where the first turn is not computed again for the second: the texts are those of an engine that does."""
    engine.collective_rpc(_load, args=(str(policies[0]),))
    caching = build(policies[0], REUSE, **CACHING)
    versions = (40, 41) if marked else (50, 51)
    try:
        found = [_dialogues(llm, version, marked) for llm in (engine, caching) for version in versions]
        assert metric(caching, "prefix_cache_hits") > 0
    finally:
        close(caching)
    once = found[0][0]
    assert all(said == once for said, _ in found)
    tokens = sum(len(response) for _, response in once)
    for _, stats in found[1::2]:
        responses, emitted, repeated, identical = stats["reuse"]
        assert responses == identical == len(once) and emitted == repeated == tokens
    if marked:
        _check_turns(engine, policies[0], once)


def _check_turns(engine: Any, policy: Path, once: list[tuple[list[int], list[int]]]) -> None:
    """All that was sampled follows the policy and the rollouts' noise, and is kept under the first prompts, without
    what the tool said.
    """
    half = len(once) // 2
    streams = Streams(5, (0, 0), keep=True)
    turns = [Turn(str(i % half), i // half, 8, 8) for i in range(len(once))]
    keys = [streams.begin(str(i), p, turn=t) for i, ((p, _), t) in enumerate(zip(once, turns, strict=True))]
    prompts = [tuple(p) for p, _ in once]
    samples = samples_from([response for _, response in once], range(len(once)))
    target = Reference(policy, 1.0)
    evidence = Evidence(samples, target.vocab, np.random.default_rng(0))
    witness = Witness(samples, evidence, np.array(keys, dtype=np.uint64), prompts, tie=1e-4)
    target.fill(witness, prompts)
    assert witness.found.tokens == samples.n_tokens and not witness.found.failure, witness.found
    for prompt in PROMPTS:
        kept, begun = engine.collective_rpc(_history, args=(list(prompt), 41))[0]
        assert sorted(kept) == sorted(response for p, response in once if tuple(p[:8]) == prompt) and begun == 1


WARNINGS: list[str] = []
"""In the worker: what rollspec logs, once `_listen` ran there."""


def _listen(worker: Any) -> None:
    import logging

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            WARNINGS.append(record.getMessage())

    logging.getLogger("rollspec").addHandler(Ear(logging.WARNING))


def _warnings(worker: Any) -> list[str]:
    return list(WARNINGS)


def test_requests_that_cannot_be_reused_are_named_once_and_answered(engine: Any) -> None:
    """At temperature 0, and with the seed of a sibling, beside it or after it; their neighbours are reused as ever."""
    from vllm import SamplingParams

    engine.collective_rpc(_listen)

    def epoch(version: int) -> tuple[list[list[int]], list[int]]:
        call(engine, "set_version", version=version)
        call(engine, "stats")
        said: list[list[int]] = []
        for given in ({"temperature": 0.0}, {"seed": 3}, {"seed": 3}, {}), ({"seed": 3}, {"seed": 4}):
            params = [
                SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False, **{"temperature": 1.0, **own})
                for own in given
            ]
            requests = [{"prompt_token_ids": list(PROMPTS[0])} for _ in params]
            said += [list(o.outputs[0].token_ids) for o in say_together(engine, requests, params)]
        call(engine, "rewards", items=[])
        stats = call(engine, "stats")
        assert not stats["faults"] and call(engine, "info")["mode"] == "coupled"
        return said, stats["reuse"]

    once, _ = epoch(52)
    again, reuse = epoch(53)
    assert again == once and [len(t) for t in once] == [20] * 6
    assert once[1] == once[2] == once[4] != once[5]
    assert reuse == [2, 40, 40, 2], "the one without a seed, and the one whose seed no other one has"
    warned: list[str] = engine.collective_rpc(_warnings)[0]
    for sentence in (
        "temperature 0 reuse no old",
        "whose seed another one of their group has",
        "have seed 3 under one",
    ):
        assert len([h for h in warned if sentence in h]) == 1, warned
    assert all(h.startswith("rollspec: ") and h.endswith(".") for h in warned)


def _history(worker: Any, prompt: list[int], since: int) -> tuple[list[list[int]], int]:
    """What a prompt's history holds since a version, and how many prompts begin with it."""
    from rollspec.proposal.base import prompt_key

    history = bridge(worker).engine.history
    found = [r.tokens.tolist() for r in history.get(prompt_key(prompt)).responses if r.version >= since]
    return found, sum(entry.prompt.tolist()[: len(prompt)] == prompt for _, entry in history)


def test_rollouts_that_are_aborted_go_on_as_if_nothing_had_been(engine: Any) -> None:
    """As verl does it for new weights: aborted, and submitted again with what they said, most under the next version; a
    sibling comes in between.
    """
    from vllm import SamplingParams

    llm, prompt, long = engine.llm_engine, [20, 21, 22, 23, 24], 200
    k = call(engine, "info")["k"]
    call(engine, "set_k", k=3)  # at least 50 steps
    pace(engine, 0.05)

    def submit(name: str, said: list[int], marked: bool = True) -> None:
        own = {"origin": name, "prompt_tokens": len(prompt)} if marked else {}
        params = SamplingParams(
            temperature=1.0, max_tokens=long - len(said), detokenize=False, ignore_eos=True,
            extra_args={"rollspec": own},
        )  # fmt: skip
        llm.add_request(f"{name}-{len(said)}", {"prompt_token_ids": [*prompt, *said]}, params)

    def run(said: dict[str, list[int]], until: int) -> None:
        while llm.has_unfinished_requests() and min(map(len, said.values())) < until:
            for output in llm.step():
                name, start = output.request_id.split("-")
                said[name] = said[name][: int(start)] + list(output.outputs[0].token_ids)

    def epoch(version: int, abort: bool) -> tuple[dict[str, list[int]], dict[str, Any]]:
        call(engine, "set_version", version=version)
        call(engine, "stats")
        said: dict[str, list[int]] = {name: [] for name in "abc"}
        for name in said:
            submit(name, [], marked=abort)
        if abort:
            run(said, 9)
            assert all(0 < len(tokens) < long for tokens in said.values()), said
            llm.abort_request([f"{name}-0" for name in said])
            submit("c", said["c"])
        said["d"] = []
        submit("d", [], marked=abort)
        if abort:
            run(said, 1)
            call(engine, "set_version", version=version + 1)
            submit("b", said["b"])
            submit("a", said["a"])
        run(said, long)
        call(engine, "rewards", items=[])
        stats = call(engine, "stats")
        assert not stats["faults"]
        return said, stats

    once, _ = epoch(70, abort=False)
    assert len({tuple(tokens) for tokens in once.values()}) == 4
    disturbed, stats = epoch(71, abort=True)
    assert disturbed == once and stats["by_source"]["replay"][2] > 0
    assert stats["reuse"] == [4, 4 * long, 4 * long, 4]
    ((responses, prompts),) = engine.collective_rpc(_history, args=(prompt, 71))
    assert sorted(responses) == sorted(once.values()) and prompts == 1
    again, stats = epoch(73, abort=False)
    assert again == once and stats["reuse"] == [4, 4 * long, 4 * long, 4]
    pace(engine, 0)
    call(engine, "set_k", k=k)


def test_noise_of_a_history_on_disk_is_found_again(engine: Any, policies: list[Path], tmp_path: Path) -> None:
    engine.collective_rpc(_load, args=(str(policies[1]),))
    said, _ = _epoch(engine, 80)  # above every version before it: the newest rounds are what is kept
    call(engine, "save", dir=str(tmp_path))
    other = build(policies[1], REUSE | {"history.dir": str(tmp_path)})
    try:
        again, stats = _epoch(other, 81)
    finally:
        close(other)
    ties = 0
    for tokens in (said, again):
        noise, _ = _check(policies[1], tokens)
        assert not noise.failure and noise.ties <= 2, noise
        ties += noise.ties
    # One engine was given its weights and the other read them: only where two tokens tie may they part.
    same = sum(a == b for a, b in zip(again, said, strict=True))
    assert same >= len(said) - ties
    assert stats["reuse"][0] == len(said) and stats["reuse"][3] == same
