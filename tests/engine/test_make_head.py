"""`drafter-online make-head` with a real engine: vLLM without rollspec serves what it writes, and a job takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ALWAYS, build, call, close, generate
from served import Server, counted
from typer.testing import CliRunner

from drafter_online.buffer import Buffer
from drafter_online.cli import app
from drafter_online.held_out import split

K = 4

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command says of a head that was made in seconds, of greedy text; a busy machine gets more of them."""
    threads = torch.get_num_threads()
    given = [
        "make-head", "--model", model, "--prompts", model.parent / "train.parquet", "--temperature", 0, "--max-tokens",
        80, "--out", tmp_path_factory.mktemp("made") / "head", "--set", "learning_rate=0.004", "--engine",
        "dtype=float32", "--dtype", "float32", "--threads", 1, "--json",
    ]  # fmt: skip
    facts: dict[str, Any] = {}
    for minutes in (0.25, 0.5, 1, 2, 4):  # of all calls together: each goes on with what the last one left
        result = CliRunner().invoke(app, [str(a) for a in (*given, "--minutes", minutes)])
        torch.set_num_threads(threads)
        assert result.exit_code == 0, result.output
        facts = json.loads(result.stdout)
        if facts["after"]["acceptance_length"] > 1.5:
            break
    return facts


def test_it_learns_from_what_the_engine_says_unspeculated(made: dict[str, Any]) -> None:
    assert made["prompts"] > 100 and made["samples"] > 20 and made["held_out_coverage"] == 1.0
    buffer = Buffer.load(Path(made["head"]) / "buffer")
    assert not any(len(s.verify) for s in buffer), "the head beside the engine drafted"
    # The recorded states' likeliest tokens are what was said: text and states belong together, from the prompt on.
    assert all(int(s.position_ids[0]) == 0 for s in buffer)
    assert made["max_acceptance"]["acceptance_length"] == pytest.approx(1 + K, abs=0.01)
    assert made["before"]["acceptance_length"] < 1.3 < made["after"]["acceptance_length"]


def test_vllm_without_rollspec_serves_it(
    model: Path, made: dict[str, Any], prompts: list[list[int]], plain: dict[str, Any]
) -> None:
    """`vllm serve` with the option of `docs/drafter.md`; rollspec's plugin is not loaded in its processes."""
    from openai import OpenAI

    _, measured = split(Buffer.load(Path(made["head"]) / "buffer"), made["hold_out"])
    unseen = {tuple(s.input_ids[~s.loss_mask].tolist()) for s in measured}
    option = {"method": "eagle3", "model": made["head"], "num_speculative_tokens": K}
    server = Server(model, "--speculative-config", json.dumps(option), VLLM_PLUGINS="vllm_cpu_v2")
    try:
        server.wait()
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        kwargs: dict[str, Any] = {"model": "policy", "temperature": 0.0, "extra_body": {"return_token_ids": True}}
        client.completions.create(prompt=[list(p) for p in sorted(unseen)], max_tokens=80, **kwargs)
        names = ("drafts", "draft_tokens", "accepted_tokens")
        drafts, drafted, accepted = (counted(server.url, f"vllm:spec_decode_num_{n}_total") for n in names)
        assert drafted == K * drafts > 0
        length = 1 + accepted / drafts
        assert length == pytest.approx(made["after"]["acceptance_length"], rel=0.25), (length, made["after"])
        limit = 132  # the shortest of those of `plain`
        answer = client.completions.create(prompt=prompts, max_tokens=limit, **kwargs)
        assert [list(c.token_ids) for c in answer.choices] == [ids[:limit] for ids in plain["greedy"][::2]]
        assert not server.worker_call("rollspec", "info").ok, "rollspec is in its worker"
    finally:
        server.end()


def test_a_job_starts_from_it(
    model: Path, made: dict[str, Any], prompts: list[list[int]], plain: dict[str, Any]
) -> None:
    options = {"proposal.drafters": ["eagle3"], "proposal.head.model": made["head"], **ALWAYS}
    llm = build(model, {**options, "proposal.head.k_max": K})
    try:
        assert generate(llm, prompts) == plain["greedy"]
        stats = call(llm, "stats")
        assert not stats["faults"] and stats["accepted"] > 0.1 * stats["drafted"] > 10, stats
    finally:
        close(llm)
