"""verl's asynchronous trainers on CPU, by the same one line: rollouts are aborted for new weights and go on with them.

Checked on each: drafts from the second epoch on, log-probs, and rollspec's history against what verl noted itself:
every response once, every token its version's.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.demo.job import JobSettings, build_job, prepare_assets
from examples.demo.runner import run_job
from rollspec.proposal.base import prompt_key
from rollspec.proposal.history import FILE, History

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SUPPORT = Path(__file__).parents[1] / "support"
STEPS, PROMPTS, N = 4, 8, 4
SETTINGS = JobSettings(
    size="tiny", train_prompts=2 * PROMPTS, prompts_per_step=PROMPTS, n=N, epochs=3, steps=STEPS, max_num_seqs=16,
    max_response_length=128, dtype="float32",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[list[dict[str, Any]], History, Any]]:
    assets = prepare_assets(SETTINGS, tmp_path_factory.mktemp("assets"))

    def run(folder: Path, *mode: str) -> tuple[list[dict[str, Any]], History, list[dict[str, Any]]]:
        """Metrics of each step, what the engine kept, and what verl noted."""
        kept = folder / "history"
        # All that was said is kept; how much is drafted depends on no clock.
        overrides = (
            f"history.dir={kept}",
            "proposal.suffix.window=16",
            "tuning.policy=static",
            "tuning.guard.enabled=false",
        )
        job = build_job(SETTINGS, assets, folder, speculate=True, preset="coupled_reuse", overrides=overrides)
        job = dataclasses.replace(job, command=(*job.command, *mode))
        folder.mkdir(parents=True, exist_ok=True)
        run_job(job, timeout=540, stall=400)
        history = History(1 << 30, 99)
        (file,) = kept.rglob(FILE)
        assert history.load(file.parent, version=99)
        return read(folder / "metrics.jsonl", "data"), history, read(folder / "lengths.jsonl")

    return run


def read(path: Path, key: str | None = None) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row[key] for row in rows] if key else rows


def check(rows: list[dict[str, Any]], history: History, noted: list[dict[str, Any]]) -> None:
    assert len(rows) == len(noted) == STEPS
    for row in rows:
        assert row["rollspec/guard/faults"] == 0 and row["rollspec/history/rewarded"] == PROMPTS * N
        assert "rollspec/rollout/wait_share" in row
    # What was sampled and is trained by the first policy; later rollouts are older than what they train.
    assert rows[0]["rollspec/health/logprob_corr"] > 0.999
    assert rows[0]["training/rollout_actor_probs_pearson_corr"] > 0.999
    # A step whose responses were all there already rolls nothing out.
    later = [row["rollspec/accept/length"] for row in rows[STEPS // 2 :] if row["rollspec/rollout/tokens"] > 0]
    assert later and min(later) > 1.2

    trained: dict[str, Counter[Any]] = {}
    for row in noted:
        for (prompt, response), versions in zip(row["keys"], row["versions"], strict=True):
            trained.setdefault(prompt, Counter())[(response, *versions)] += 1
    late = Counter((prompt, response, *v) for (prompt, response), v in zip(row["keys"], row["versions"], strict=True))
    lost = []
    for prompt, entry in history:
        kept = {(prompt_key(r.tokens), *r.versions()[[0, -1]].tolist()): r.tokens.tolist() for r in entry.responses}
        counts = Counter((prompt_key(r.tokens), *r.versions()[[0, -1]].tolist()) for r in entry.responses)
        ours = trained.get(prompt, Counter())
        lost += [(prompt, *r) for r, n in (ours - counts).items() for _ in range(n)]
        ahead = counts - ours
        assert ahead.total() <= N, "more than one round of a prompt is not trained on yet"
        for response in ahead:
            parts = [r for r in ours if r in kept and r[1] == response[1] and _begins(kept[r], kept[response])]
            assert not parts, "a part of a rollout is kept beside it"
    # The file of the last sync may come too late for the job's end, so that the last step's are not in it.
    assert not Counter(lost) - late, "lost, or of other policy versions than verl noted"
    assert {key for key, _ in history} >= set(trained)


def _begins(whole: list[int], part: list[int]) -> bool:
    return whole[: len(part)] == part


@pytest.mark.supports("verl", "colocate_async", "drafts", "versions", "metrics")
def test_colocate_async(run: Any, tmp_path: Path) -> None:
    """One machine in turns: rollouts of the next step begin while this one's are finished, and wait for its update."""
    sampler = "trainer.v1.sampler.custom_sampler"
    mode = (
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.v1.colocate_async.num_warmup_batches=1",
        f"{sampler}.path={SUPPORT / 'quick_sampler.py'}",  # by path: verl takes seconds to import
        f"{sampler}.name=QuickSampler",
    )
    rows, history, noted = run(tmp_path / "job", *mode)
    check(rows, history, noted)
    assert sum(row["rollspec/policy/spanning"] for row in rows) > 0, "no response was aborted and went on"


@pytest.mark.supports("verl", "separate_async", "drafts", "versions", "metrics")
@pytest.mark.slow  # `test_colocate_async` aborts as well, and the Gloo engine is in `test_verl_cpu.py`
def test_separate_async(run: Any, tmp_path: Path) -> None:
    """Rollouts on a replica of their own, two updates of the policy per sync, weights sent by a checkpoint engine.

    On two cores training takes longer than rollouts, so that mostly none runs when new weights come.
    """
    rollout = "actor_rollout_ref.rollout"
    mode = (
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
        "actor_rollout_ref.hybrid_engine=false",
        f"{rollout}.nnodes=1",
        f"{rollout}.n_gpus_per_node=1",
        f"{rollout}.checkpoint_engine.backend=gloo",
        f"{rollout}.checkpoint_engine.custom_backend_module=rollspec_verl_cpu.gloo_engine",
        "ray_kwargs.ray_init.num_gpus=2",
    )
    check(*run(tmp_path / "job", *mode))
