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
import young_head

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

ROLLOUT = "actor_rollout_ref.rollout"
COLOCATED = (
    "trainer.v1.trainer_mode=colocate_async",
    "trainer.v1.colocate_async.num_warmup_batches=1",
    f"trainer.v1.sampler.custom_sampler.path={SUPPORT / 'quick_sampler.py'}",  # by path: verl takes seconds to import
    "trainer.v1.sampler.custom_sampler.name=QuickSampler",
)
SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
    "actor_rollout_ref.hybrid_engine=false",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.n_gpus_per_node=1",
    f"{ROLLOUT}.checkpoint_engine.backend=gloo",
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module=rollspec_verl_cpu.gloo_engine",
    "ray_kwargs.ray_init.num_gpus=2",
)

HEAD = ("proposal.drafters=[suffix,eagle3]", *young_head.OVERRIDES)
HEAD_STEPS = 10
"""Of a job with a head: its trainer takes some of them to start."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[list[dict[str, Any]], History, Any]]:
    assets = prepare_assets(SETTINGS, tmp_path_factory.mktemp("assets"))

    def run(
        folder: Path, *mode: str, more: tuple[str, ...] = (), steps: int = STEPS
    ) -> tuple[list[dict[str, Any]], History, list[dict[str, Any]]]:
        """Metrics of each step, what the engine kept, and what verl noted. `more`: settings of rollspec."""
        kept = folder / "history"
        # All that was said is kept; how much is drafted depends on no clock.
        overrides = (
            f"history.dir={kept}",
            "proposal.suffix.window=16",
            "tuning.policy=static",
            "tuning.guard.enabled=false",
            *more,
        )
        settings = dataclasses.replace(SETTINGS, steps=steps, epochs=steps // 2 + 1)
        job = build_job(settings, assets, folder, speculate=True, preset="coupled_reuse", overrides=overrides)
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


def check(rows: list[dict[str, Any]], history: History, noted: list[dict[str, Any]], steps: int = STEPS) -> None:
    assert len(rows) == len(noted) == steps
    for row in rows:
        assert row["rollspec/guard/faults"] == 0 and row["rollspec/history/rewarded"] == PROMPTS * N
        assert "rollspec/rollout/wait_share" in row
    # What was sampled and is trained by the first policy; later rollouts are older than what they train.
    assert rows[0]["rollspec/health/logprob_corr"] > 0.999
    assert rows[0]["training/rollout_actor_probs_pearson_corr"] > 0.999
    # A step whose responses were all there already rolls nothing out.
    later = [row["rollspec/accept/length"] for row in rows[steps // 2 :] if row["rollspec/rollout/tokens"] > 0]
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
    rows, history, noted = run(tmp_path / "job", *COLOCATED)
    check(rows, history, noted)
    assert sum(row["rollspec/policy/spanning"] for row in rows) > 0, "no response was aborted and went on"


@pytest.mark.supports("verl", "separate_async", "drafts", "versions", "metrics")
@pytest.mark.slow  # `test_colocate_async` aborts as well, and the Gloo engine is in `test_verl_cpu.py`
def test_separate_async(run: Any, tmp_path: Path) -> None:
    """Rollouts on a replica of their own, two updates of the policy per sync, weights sent by a checkpoint engine.

    On two cores training takes longer than rollouts, so that mostly none runs when new weights come.
    """
    check(*run(tmp_path / "job", *SEPARATE))


@pytest.mark.supports("verl", "colocate_async", "draft head")
@pytest.mark.slow  # `test_colocate_async` and `test_service_ray.py` are its shorter siblings
def test_a_head_is_trained_beside_a_colocated_job(run: Any, tmp_path: Path) -> None:
    """By a trainer of its own: colocated rollouts leave the engine no idle time that is not the policy's training."""
    more = (*HEAD, "drafter.mode=dedicated")
    total = head_of(*run(tmp_path / "job", *COLOCATED, more=more, steps=HEAD_STEPS))
    assert total["sent"] > 0, total


@pytest.mark.supports("verl", "separate_async", "draft head")
@pytest.mark.slow  # `test_separate_async` and `test_online_engine.py` are its shorter siblings
def test_an_idle_replica_trains_its_head_while_the_policy_is_trained(run: Any, tmp_path: Path) -> None:
    total = head_of(*run(tmp_path / "job", *SEPARATE, more=(*HEAD, "drafter.mode=idle"), steps=HEAD_STEPS))
    assert 0 < total["used_seconds"] <= total["idle_seconds"], total


def head_of(rows: list[dict[str, Any]], history: History, noted: list[dict[str, Any]]) -> dict[str, float]:
    """What became of the head, summed over the steps, whose versions are the head's and the policy's."""
    check(rows, history, noted, HEAD_STEPS)
    names = ("captured", "sent", "train_steps", "swaps", "passes", "idle_seconds", "used_seconds")
    total = young_head.totals(rows, *names)
    assert total["captured"] >= PROMPTS * N and total["train_steps"] > 0 and total["passes"] > 0, total
    assert total["swaps"] >= 1, "no version was swapped in"
    assert rows[-1]["rollspec/drafter/version"] > 0
    for row in rows:
        assert 0 <= row["rollspec/drafter/staleness"] <= row["rollspec/policy/version"] + 1
    return total
