"""A whole verl job on CPU whose policy calls tools: verl's own tool loop with the example's calculator and sandbox."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from running_job import metrics_of

from examples.agent_tools.job import build
from examples.agent_tools.tokenizer import build_tokenizer
from examples.demo.runner import run_job
from rollspec.proposal.base import prompt_key
from rollspec.proposal.history import History

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1700)]
PROMPTS, N = 8, 4


@pytest.mark.supports("verl", "tools (agent loop)", "drafts", "policy versions", "metrics")
def test_tools_in_verls_agent_loop(tmp_path: Path) -> None:
    """Two epochs. Later turns are drafted like first ones; what is kept and rewarded is what the policy sampled, turn
    by turn, under the first prompts; engine and trainer agree about it.
    """
    job = build(
        tmp_path / "job", tmp_path / "assets", speculate=True, size="tiny", dtype="float32",
        train_prompts=PROMPTS, prompts_per_step=PROMPTS // 2, n=N, epochs=2,
    )  # fmt: skip
    job.folder.mkdir(parents=True)
    run_job(dataclasses.replace(job, command=(*job.command, "trainer.save_freq=4")), timeout=1500, stall=900)
    steps = metrics_of(job)
    lengths = [json.loads(line) for line in (job.folder / "lengths.jsonl").read_text().splitlines()]
    assert len(steps) == len(lengths) == 4
    for row, sizes in zip(steps, lengths, strict=True):
        assert row["rollspec/faults"] == 0 and row["rollspec/reward/mean"] > 0.1
        assert row["rollspec/health/logprob_corr"] > 0.999
        assert row["num_turns/mean"] > 3  # a question, and a call, its answer, and what follows
        turns = sizes["keys"]
        assert len(turns) > len(sizes["lengths"]) == PROMPTS // 2 * N
        # A last turn that is cut to the response's length is not what the engine sampled.
        assert 0.9 * len(turns) < row["rollspec/history/rewarded"] <= len(turns)
        assert row["rollspec/rollout/tokens"] == pytest.approx(sum(sizes["lengths"]), rel=0.05)
        assert row["response_length/mean"] * PROMPTS // 2 * N > 1.1 * sum(sizes["lengths"]), "tools said nothing"
        assert row["rollspec/accept/thinking_length"] >= 1 and 0 < row["rollspec/accept/thinking_share"] < 1
    for row in steps[2:]:
        assert row["rollspec/accept/length"] > 1.3, "the second epoch is not drafted from the first"
        apart = [row[f"rollspec/accept/{part}_length"] for part in ("thinking", "answer")]
        assert min(apart) < row["rollspec/accept/length"] < max(apart), "thinking is not counted apart"
    assert sum(r["rollspec/accept/answer_length"] for r in steps[2:]) > sum(
        r["rollspec/accept/answer_length"] for r in steps[:2]
    )

    history = History(1 << 30, 16)
    saved = job.folder / "checkpoints" / "global_step_4" / "rollspec" / "replica_0"
    assert history.load(saved) > 0
    sampled = {tuple(keys) for row in lengths for keys in row["keys"]}
    kept = [(key, prompt_key(r.tokens)) for key, entry in history for r in entry.responses]
    assert len(history) == PROMPTS, "a grown prompt is no prompt of its own"
    assert sum(keys in sampled for keys in kept) > 0.9 * len(kept)
    tool = build_tokenizer().convert_tokens_to_ids("<tool_response>")
    assert not [r for _, entry in history for r in entry.responses if tool in r.tokens.tolist()]
    assert {r.turn for _, entry in history for r in entry.responses} >= {0, 1, 2}
