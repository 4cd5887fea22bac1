"""Suffix drafts in a real vLLM engine: what is sampled does not change, and faults leave a working engine.

float32 and greedy: the distribution is deterministic, so every comparison is token identity.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engines import MAX_LEN, bridge, build, call, close, generate, say_together

from rollspec.proposal.base import prompt_key

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    llm = build(model, {"preset": "default", "history.dir": str(tmp_path_factory.mktemp("history"))})
    yield llm
    close(llm)


def test_inert_without_a_switch(plain: dict[str, Any]) -> None:
    assert plain["info"]["state"] == "off"


def test_greedy_tokens_are_identical_over_epochs(engine: Any, prompts: list[list[int]], plain: dict[str, Any]) -> None:
    rates = []
    for version in range(3):
        call(engine, "set_version", version=version)
        assert generate(engine, prompts) == plain["greedy"]
        stats = call(engine, "stats")
        assert stats["speculating"] and not stats["faults"]
        rates.append((stats["drafted"], stats["accepted"], stats["steps"]))
    assert rates[0][0] > 0, "siblings were not drafted from"
    # The second epoch replays the first: nearly everything is accepted, in far fewer steps.
    assert rates[1][1] > 0.9 * rates[1][0]
    assert rates[1][2] < 0.5 * rates[0][2]
    assert call(engine, "info")["state"] == "suffix"


def test_k_changes_between_steps(engine: Any, prompts: list[list[int]], plain: dict[str, Any]) -> None:
    from vllm import SamplingParams

    rng = random.Random(1)
    core = engine.llm_engine
    for i, prompt in enumerate(prompts):
        core.add_request(f"k-{i}", {"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=120))
    done: dict[str, list[int]] = {}
    seen = set()
    for _ in range(2000):
        if not core.has_unfinished_requests():
            break
        k = rng.choice([0, 1, 3, 16])
        seen.add(k)
        assert call(engine, "set_k", k=k) == {"k": k}
        for out in core.step():
            if out.finished:
                done[out.request_id.split("-")[1]] = list(out.outputs[0].token_ids)
    call(engine, "set_k", k=16)
    assert len(seen) > 2
    for i in range(len(prompts)):
        expected = plain["greedy"][2 * i][:120]
        assert done[str(i)][: len(expected)] == expected
    assert "error" in call(engine, "set_k", k=99)


def test_identical_up_to_the_context_limit(engine: Any, prompts: list[list[int]], plain: dict[str, Any]) -> None:
    for _ in range(2):
        out = generate(engine, prompts[:4], copies=1, limit=MAX_LEN, ignore_eos=True)
        assert out == plain["limit"]
    assert not call(engine, "stats")["faults"]


def test_identical_with_a_repetition_penalty(engine: Any, prompts: list[list[int]], plain: dict[str, Any]) -> None:
    assert generate(engine, prompts, copies=1, repetition_penalty=1.3) == plain["penalty"]


def test_allowed_tokens_of_a_request_that_left_mask_no_other(
    engine: Any, prompts: list[list[int]], plain: dict[str, Any]
) -> None:
    """Requests with and without them in turn, more than the batch holds: those that wait take the rows of others."""
    from vllm import SamplingParams

    allowed = list(range(16, 24))
    requests: list[Any] = []
    params: list[Any] = []
    for i, prompt in enumerate(p for p in prompts for _ in range(2)):
        requests += [{"prompt_token_ids": prompt}] * 2
        some = {"allowed_token_ids": allowed, "max_tokens": 3 + i, "ignore_eos": True}
        params += [SamplingParams(temperature=0.0, **given) for given in (some, {"max_tokens": 160 - 7 * (i % 5)})]
    said = [list(o.outputs[0].token_ids) for o in say_together(engine, requests, params)]
    assert said[1::2] == plain["greedy"]
    assert [len(text) for text in said[::2]] == [3 + i for i in range(len(said) // 2)]
    assert {token for text in said[::2] for token in text} <= set(allowed)


def test_a_seed_is_one_text(engine: Any, prompts: list[list[int]]) -> None:
    call(engine, "stats")
    free = {"copies": 1, "limit": 80, "temperature": 1.0, "ignore_eos": True}
    said = [generate(engine, prompts[:2], seed=5, **free) for _ in range(3)]
    assert said[0] == said[1] == said[2]
    assert call(engine, "stats")["accepted"] > 0
    assert generate(engine, prompts[:2], **free) != generate(engine, prompts[:2], **free)


def test_aborted_requests_leave_nothing_behind(engine: Any, prompts: list[list[int]]) -> None:
    from vllm import SamplingParams

    core = engine.llm_engine
    for i, prompt in enumerate(prompts):
        core.add_request(f"abort-{i}", {"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=120))
    for _ in range(4):
        core.step()
    core.abort_request([f"abort-{i}" for i in range(len(prompts))])
    generate(engine, prompts[:1], copies=1)
    call(engine, "rewards", items=[])  # collects what ended in the last step
    assert call(engine, "info")["running"] == 0


def test_rewards_join_their_responses(engine: Any, prompts: list[list[int]]) -> None:
    call(engine, "set_version", version=10)
    out = generate(engine, prompts[:2], copies=1)
    items = [[prompt_key(p), prompt_key(o), 1.0] for p, o in zip(prompts[:2], out, strict=True)]
    assert call(engine, "rewards", items=[*items, ["no such prompt", "x", 0.0]]) == {"matched": 2, "of": 3}


def _responses(worker: Any, version: int) -> list[list[int]]:
    """Of this version in the history, short ones first."""
    history = bridge(worker).engine.history
    found = [r.tokens.tolist() for _, entry in history for r in entry.responses if r.version == version]
    return sorted(found, key=len)


def test_what_is_asked_while_requests_run_makes_no_response_of_a_step_too_many(
    engine: Any, prompts: list[list[int]]
) -> None:
    """Where steps overlap, one more of a request is on its way when its end is seen."""
    from vllm import SamplingParams

    call(engine, "set_version", version=30)
    core = engine.llm_engine
    limits = [20 + 9 * i for i in range(len(prompts))]
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True)
        core.add_request(f"asked-{i}", {"prompt_token_ids": prompt}, params)
    while core.has_unfinished_requests():
        core.step()
        call(engine, "rewards", items=[])
    (said,) = engine.collective_rpc(_responses, args=(30,))
    assert [len(response) for response in said] == limits


def test_a_cache_that_is_reset_in_mid_rollout_doubles_no_text(
    engine: Any, prompts: list[list[int]], plain: dict[str, Any]
) -> None:
    """vLLM preempts every request, drops its tokens in flight, and samples them again."""
    from vllm import SamplingParams

    call(engine, "set_version", version=40)
    core = engine.llm_engine
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=60 + i, ignore_eos=True)
        core.add_request(f"reset-{i}", {"prompt_token_ids": prompt}, params)
    done: dict[str, list[int]] = {}
    steps = 0
    while core.has_unfinished_requests():
        for out in core.step():
            if out.finished:
                done[out.request_id.split("-")[1]] = list(out.outputs[0].token_ids)
        steps += 1
        if steps in (5, 9):
            assert core.reset_prefix_cache(reset_running_requests=True)
    expected = [plain["long"][2 * i][: 60 + i] for i in range(len(prompts))]
    assert [done[str(i)] for i in range(len(prompts))] == expected
    call(engine, "rewards", items=[])  # collects what ended in the last step
    assert engine.collective_rpc(_responses, args=(40,)) == [expected]
    assert not call(engine, "stats")["faults"]


@pytest.mark.supports("vLLM", "any program", "resume")
def test_history_survives_a_restart(engine: Any, model: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    expected = generate(engine, prompts, copies=1)
    saved = Path(call(engine, "save", dir=str(tmp_path))["path"])
    assert saved.is_file()
    # The same operations on a file that was damaged: refused in one sentence, set aside, the engine goes on.
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / saved.name).write_bytes(saved.read_bytes()[:-7])
    error = call(engine, "load", dir=str(damaged))["error"]
    assert "refused" in error and str(damaged) in error
    assert list(damaged.glob("*.corrupt"))
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "cannot be written" in call(engine, "save", dir=str(blocked / "sub"))["error"]
    assert "no operation" in call(engine, "nonsense")["error"]

    again = build(model, {"preset": "default", "history.dir": str(tmp_path)})
    try:
        call(again, "set_version", version=11)
        assert generate(again, prompts, copies=1) == expected
        stats = call(again, "stats")
        assert stats["accepted"] > 0.5 * stats["emitted"], "reloaded history was not drafted from"
        # A fault while drafting: off, said, counted; the tokens stay the same.
        again.collective_rpc(_break_drafting)
        assert generate(again, prompts, copies=1) == expected
        info = call(again, "info")
        assert info["state"] == "none" and "planted" in info["reason"]
        assert any("planted" in cause for cause in call(again, "stats")["faults"])
    finally:
        close(again)


def _break_drafting(worker: Any) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted fault")

    bridge(worker).engine.suffix.draft = broken


def test_measurements_reach_the_file_and_the_trainer(model: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    import json

    path = tmp_path / "metrics.jsonl"
    llm = build(model, {"preset": "default", "telemetry.jsonl": str(path)})
    try:
        generate(llm, prompts, copies=1)
        stats = call(llm, "stats")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert sum(r["rollspec/rollout/tokens"] for r in rows) == stats["emitted"] > 0
        assert call(llm, "stats")["emitted"] == 0
    finally:
        close(llm)
