"""verl's asynchronous trainers on CPU, by the same one line: rollouts are aborted for new weights and go on with them.

Checked on each: drafts from the second epoch on, log-probs, and rollspec's history against what verl noted itself:
every response once, every token its version's.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import young_head
from marked_weights import band
from running_job import metrics_of

from drafter_online.versions import Versions
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
QUICK = (
    f"trainer.v1.sampler.custom_sampler.path={SUPPORT / 'quick_sampler.py'}",  # by path: verl takes seconds to import
    "trainer.v1.sampler.custom_sampler.name=QuickSampler",
)
COLOCATED = (
    "trainer.v1.trainer_mode=colocate_async",
    "trainer.v1.colocate_async.num_warmup_batches=1",
    *QUICK,
)
GLOO = (
    f"{ROLLOUT}.checkpoint_engine.backend=gloo",
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module=rollspec_verl_cpu.gloo_engine",
)
SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.n_gpus_per_node=1",
    *GLOO,
    "ray_kwargs.ray_init.num_gpus=2",
)

ALONE = "actor_rollout_ref.hybrid_engine=false"
"""Rollouts have the standalone replica and nothing else."""

LENT = (
    "trainer.v1.separate_async.hybrid_rollout.enable_switch=true",
    "trainer.v1.separate_async.num_warmup_batches=0",  # nothing is rolled out ahead: training waits for every step's
    *QUICK,
)
"""A second replica is on the trainer's device, which rollouts have while training waits for them."""

RECIPE = "verl.experimental.fully_async_policy.fully_async_main"
FULLY = (
    ALONE,
    "data.train_batch_size=0",
    "data.gen_batch_size=1",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=1",
    f"rollout.n={N}",
    f"rollout.total_rollout_steps={PROMPTS * STEPS}",
    "algorithm.rollout_correction.bypass_mode=false",  # log-probs of its own, which can be compared
    "async_training.trigger_parameter_sync_step=1",
    "async_training.staleness_threshold=1",
    *GLOO,
    "ray_kwargs.ray_init.num_cpus=48",
    "ray_kwargs.ray_init.num_gpus=2",
)

BOTH = "proposal.drafters=[suffix,eagle3]"
HEAD, RESUMED_HEAD = (BOTH, *young_head.OVERRIDES), (BOTH, *young_head.RESUMED_OVERRIDES)
HEAD_STEPS = 10
"""Of a job with a head: its trainer takes some of them to start."""

LENT_STEPS = 6
CORRELATION = "training/rollout_actor_probs_pearson_corr"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[list[dict[str, Any]], list[History], Any]]:
    assets = prepare_assets(SETTINGS, tmp_path_factory.mktemp("assets"))

    def run(
        folder: Path,
        *mode: str,
        more: tuple[str, ...] = (),
        steps: int = STEPS,
        program: str = "verl.trainer.main_ppo",
        replicas: int = 1,
        done: int = 0,
        marked: bool = False,
    ) -> tuple[list[dict[str, Any]], list[History], list[dict[str, Any]]]:
        """Metrics of each step, what each engine kept, and what verl noted. `more`: settings of rollspec. `done`: steps
        of the checkpoint that it resumes from. `marked`: engines get weights that say by each token which version
        they are.
        """
        kept = folder / "history"
        # All that was said is kept; how much is drafted depends on no clock.
        overrides = (
            f"history.dir={kept}",
            "proposal.suffix.window=16",
            "tuning.strategy=static",
            "tuning.guard.enabled=false",
            *more,
        )
        settings = dataclasses.replace(SETTINGS, steps=steps, epochs=steps // 2 + 1)
        job = build_job(settings, assets, folder, speculate=True, preset="coupled_reuse", overrides=overrides)
        command = [program if part == "verl.trainer.main_ppo" else part for part in job.command]
        modules = [*(["rollspec_verl_cpu", "rollspec_verl"] if program == RECIPE else []), *["marked_weights"] * marked]
        environment = job.environment | {"VERL_USE_EXTERNAL_MODULES": ",".join(modules), "PYTHONPATH": str(SUPPORT)}
        job = dataclasses.replace(job, command=(*command, *mode), environment=environment, total_steps=steps - done)
        folder.mkdir(parents=True, exist_ok=True)
        run_job(job, timeout=540, stall=400)
        histories = [History(1 << 30, 99) for _ in range(replicas)]
        loaded = [h.load(file.parent, version=99) for h, file in zip(histories, sorted(kept.rglob(FILE)), strict=True)]
        assert all(loaded) if replicas == 1 else any(loaded)  # one that is lent may have said nothing last
        return metrics_of(job), histories, read(folder / "lengths.jsonl")

    return run


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check(
    rows: list[dict[str, Any]], histories: list[History], noted: list[dict[str, Any]], steps: int = STEPS
) -> None:
    assert len(rows) == len(noted) == steps
    for row, sizes in zip(rows, noted, strict=True):
        # Of two rollouts of a prompt that said the same in two engines, each finds its reward in both.
        same = sum(n for n in Counter(map(tuple, sizes["keys"])).values() if n > 1) if len(histories) > 1 else 0
        assert 0 <= row["rollspec/history/rewarded"] - PROMPTS * N <= same
        assert row["rollspec/faults"] == 0 and "rollspec/rollout/wait_share" in row
    # What was sampled and is trained by the first policy; later rollouts are older than what they train.
    assert rows[0]["rollspec/health/logprob_corr"] > 0.999
    assert rows[0][CORRELATION] > 0.999
    # A step whose responses were all there already rolls nothing out.
    later = [row["rollspec/accept/length"] for row in rows[steps // 2 :] if row["rollspec/rollout/tokens"] > 0]
    assert later and min(later) > 1.2
    check_history(histories, noted)


def check_history(histories: list[History], noted: list[dict[str, Any]]) -> None:
    """Every response that verl trained on was kept once, and its tokens under verl's own versions."""
    trained: dict[str, Counter[Any]] = {}
    for row in noted:
        for (prompt, response), versions in zip(row["keys"], row["versions"], strict=True):
            trained.setdefault(prompt, Counter())[(response, *versions)] += 1
    late = Counter((prompt, response, *v) for (prompt, response), v in zip(row["keys"], row["versions"], strict=True))
    responses: dict[str, list[Any]] = {}
    for prompt, entry in chain(*histories):
        responses.setdefault(prompt, []).extend(entry.responses)
    lost = []
    for prompt, found in responses.items():
        kept = {(prompt_key(r.tokens), *r.versions()[[0, -1]].tolist()): r.tokens.tolist() for r in found}
        counts = Counter((prompt_key(r.tokens), *r.versions()[[0, -1]].tolist()) for r in found)
        ours = trained.get(prompt, Counter())
        lost += [(prompt, *r) for r, n in (ours - counts).items() for _ in range(n)]
        if len(histories) > 1:  # the part of a rollout that went on in another engine stays in the first one
            continue
        ahead = counts - ours
        # Two batches are in flight: of a group that is still at it when its batch is taken, the next round may be done.
        assert ahead.total() <= 2 * N, "more than two rounds of a prompt are not trained on yet"
        for response in ahead:
            parts = [r for r in ours if r in kept and r[1] == response[1] and _begins(kept[r], kept[response])]
            assert not parts, "a part of a rollout is kept beside it"
    # The file of the last sync may come too late for the job's end, so that the last step's are not in it.
    assert not Counter(lost) - late, "lost, or of other policy versions than verl noted"
    assert set(responses) >= set(trained)


FEW = f"{ROLLOUT}.max_num_seqs=2"
"""Requests at a time: so few that rollouts take longer than training, and run when new weights come."""

MARKED = {
    "sync": ((), "verl.trainer.main_ppo"),
    "colocate_async": (COLOCATED, "verl.trainer.main_ppo"),
    "separate_async": ((*SEPARATE, ALONE, FEW), "verl.trainer.main_ppo"),
    "fully_async": ((*FULLY, FEW), RECIPE),
}


@pytest.mark.slow  # `test_every_token_is_of_the_version_whose_weights_said_it` of the engine is its sibling
@pytest.mark.parametrize("mode", MARKED)
def test_every_token_is_of_the_version_whose_weights_said_it(run: Any, tmp_path: Path, mode: str) -> None:
    """By a mark in the weights, whatever the trainer notes; the policy that is trained stays without."""
    more, program = MARKED[mode]
    rows, histories, _ = run(tmp_path / "job", *more, program=program, marked=True)
    assert not any(row.get("rollspec/faults") for row in rows)
    wrong, seen, responses, spanning = [], set(), 0, 0
    for prompt, entry in chain(*histories):
        for r in entry.responses:
            versions, tokens = r.versions().tolist(), r.tokens.tolist()
            wrong += [(prompt, i, v) for i, (t, v) in enumerate(zip(tokens, versions, strict=True)) if t not in band(v)]
            responses, spanning, seen = responses + 1, spanning + (len(set(versions)) > 1), seen | set(versions)
    assert not wrong, f"{len(wrong)} tokens are of another version: {wrong[:5]}"
    assert responses >= PROMPTS * N * (STEPS - 1) and len(seen) >= STEPS - 1, (responses, seen)
    assert spanning > 0 or mode == "sync", "no response was aborted and went on"


def _begins(whole: list[int], part: list[int]) -> bool:
    return whole[: len(part)] == part


@pytest.mark.supports("verl", "colocate_async", "drafts", "policy versions", "metrics")
def test_colocate_async(run: Any, tmp_path: Path) -> None:
    """One machine in turns: rollouts of the next step begin while this one's are finished, and wait for its update."""
    rows, histories, noted = run(tmp_path / "job", *COLOCATED)
    check(rows, histories, noted)
    assert sum(row["rollspec/policy/spanning"] for row in rows) > 0, "no response was aborted and went on"


@pytest.mark.supports("verl", "separate_async", "drafts", "policy versions", "metrics")
@pytest.mark.modes
@pytest.mark.slow  # `test_colocate_async` aborts as well, and the Gloo engine is in `test_verl_cpu.py`
def test_separate_async(run: Any, tmp_path: Path) -> None:
    """Rollouts on a replica of their own, two updates of the policy per sync, weights sent by a checkpoint engine.

    On two cores training takes longer than rollouts, so that mostly none runs when new weights come.
    """
    check(*run(tmp_path / "job", *SEPARATE, ALONE))


@pytest.mark.supports("verl", "colocate_async", "draft head", "resume")
@pytest.mark.slow  # `test_colocate_async` and `test_service_ray.py` are its shorter siblings
@pytest.mark.timeout(1300)
def test_a_head_is_trained_beside_a_colocated_job_and_resumes(run: Any, tmp_path: Path) -> None:
    """By a trainer of its own: colocated rollouts leave the engine no idle time that is not the policy's training."""
    total = trained_and_resumed(run, tmp_path, *COLOCATED, head="dedicated")
    assert total["sent"] > 0, total


@pytest.mark.supports("verl", "separate_async", "draft head", "resume")
@pytest.mark.slow  # `test_separate_async` and `test_online_engine.py` are its shorter siblings
@pytest.mark.timeout(1300)
def test_an_idle_replica_trains_its_head_while_the_policy_is_trained_and_resumes(run: Any, tmp_path: Path) -> None:
    total = trained_and_resumed(run, tmp_path, *SEPARATE, ALONE, head="idle")
    assert 0 < total["used_seconds"] <= total["idle_seconds"], total


def trained_and_resumed(run: Any, tmp_path: Path, *mode: str, head: str) -> dict[str, float]:
    """What a job's head did, summed over its steps; a job that resumes from its checkpoint goes on with the head."""
    more = (*HEAD, f"drafter.mode={head}")
    mode = (*mode, f"trainer.default_local_dir={tmp_path / 'checkpoints'}")
    save = f"trainer.save_freq={HEAD_STEPS}"
    rows, histories, noted = run(tmp_path / "job", *mode, save, more=more, steps=HEAD_STEPS)
    total = head_of(rows, histories, noted)
    assert rows[-1]["rollspec/drafter/version"] > 0

    (saved,) = (tmp_path / "checkpoints" / f"global_step_{HEAD_STEPS}" / "rollspec").glob("**/drafter")
    number = young_head.promote_by_hand(Versions(saved / "versions"))
    resume, more = "trainer.resume_mode=auto", (*RESUMED_HEAD, f"drafter.mode={head}")
    again, _, _ = run(tmp_path / "again", *mode, resume, more=more, steps=HEAD_STEPS + 2, done=HEAD_STEPS)
    assert [row["rollspec/faults"] for row in again] == [0, 0]
    assert again[0]["rollspec/history/prompts"] >= rows[-1]["rollspec/history/prompts"], "no history was loaded"
    assert again[0]["rollspec/policy/version"] >= rows[-1]["rollspec/policy/version"]
    assert again[-1]["rollspec/drafter/version"] >= number, "the checkpoint's head was not taken"
    return total


@pytest.mark.supports("verl", "separate_async, enable_switch", "drafts", "draft head", "policy versions", "metrics")
@pytest.mark.slow  # `test_drafter_idle.py` and `test_verl_replica.py` are its shorter siblings
def test_a_device_that_is_lent_to_rollouts_and_returned(run: Any, tmp_path: Path) -> None:
    """verl's `enable_switch`: the replica on the trainer's device joins the rollouts, and sleeps while the policy is
    trained there; then its head is not trained either.
    """
    rows, histories, noted = run(
        tmp_path / "job", *SEPARATE, *LENT, more=(*HEAD, "drafter.mode=idle"), steps=LENT_STEPS, replicas=2
    )
    total = head_of(rows, histories, noted, LENT_STEPS)
    assert sum(row["separate_async/decision/should_switch_to_rollout"] for row in rows) >= 1, "it was never lent"
    assert 0 < total["used_seconds"] <= total["idle_seconds"], total
    # A device is given back within a micro-step.
    assert young_head.totals(rows, "preempted")["preempted"] > 0, "training never had to give a device back"
    assert max(row["rollspec/drafter/preempt_seconds"] for row in rows) < 2.0


@pytest.mark.supports("verl", "fully_async recipe", "drafts", "draft head", "policy versions", "metrics", "resume")
@pytest.mark.modes
@pytest.mark.slow  # `test_verl_fully_async.py` and `test_separate_async` are its shorter siblings
@pytest.mark.timeout(1300)
def test_fully_async_recipe(run: Any, tmp_path: Path) -> None:
    """verl's older recipe: rollouts and training in two actors that never wait for a step of the other. A trainer of
    its own learns from the rollouts, and the head drafts. A resumed job goes on with history, versions and head.
    """
    mode = (*FULLY, f"trainer.default_local_dir={tmp_path / 'checkpoints'}", f"trainer.save_freq={STEPS}")
    rows, histories, noted = run(tmp_path / "job", *mode, more=(*HEAD, "drafter.mode=dedicated"), program=RECIPE)
    ours = [row for row in rows if "rollspec/policy/version" in row]
    assert len(ours) >= STEPS, [sorted(row) for row in rows]
    assert not any(row["rollspec/faults"] for row in ours)
    versions = [row["rollspec/policy/version"] for row in ours]
    assert versions == sorted(set(versions)) and versions[-1] >= STEPS
    corr = [row[CORRELATION] for row in rows if CORRELATION in row]
    assert corr[0] > 0.999 and min(corr) > 0.99, corr  # later responses are of policies before the one that is trained
    assert sum(row.get("rollspec/history/rewarded", 0) for row in ours) >= PROMPTS * N * (STEPS - 1)
    later = [row["rollspec/accept/length"] for row in ours[STEPS // 2 :] if row["rollspec/rollout/tokens"] > 0]
    assert later and min(later) > 1.2
    check_history(histories, noted)
    total = young_head.totals(ours, "captured", "sent", "train_steps", "passes")
    assert min(total.values()) > 0, total

    done = max(int(folder.name.rpartition("_")[2]) for folder in (tmp_path / "checkpoints").glob("global_step_*"))
    (saved,) = (tmp_path / "checkpoints" / f"global_step_{done}" / "rollspec").glob("**/drafter")
    number = young_head.promote_by_hand(Versions(saved / "versions"))
    taken = (*RESUMED_HEAD, "drafter.mode=dedicated")
    longer = (*mode, "trainer.resume_mode=auto", f"rollout.total_rollout_steps={PROMPTS * (done + 3)}")
    rows, histories, _ = run(tmp_path / "again", *longer, more=taken, program=RECIPE, steps=done + 3, done=done)
    again = [row for row in rows if "rollspec/policy/version" in row]
    assert again and not any(row["rollspec/faults"] for row in again)
    assert min(row["rollspec/policy/version"] for row in again) >= done, "versions go on"
    assert again[0]["rollspec/history/prompts"] == 2 * PROMPTS, "no history was loaded"
    assert again[-1]["rollspec/drafter/version"] >= number, "the checkpoint's head was not taken"


def head_of(
    rows: list[dict[str, Any]], histories: list[History], noted: list[dict[str, Any]], steps: int = HEAD_STEPS
) -> dict[str, float]:
    """What became of the head, summed over the steps, whose versions are the head's and the policy's."""
    check(rows, histories, noted, steps)
    names = ("captured", "sent", "train_steps", "swaps", "passes", "idle_seconds", "used_seconds")
    total = young_head.totals(rows, *names)
    assert total["captured"] >= PROMPTS * N and total["train_steps"] > 0 and total["passes"] > 0, total
    assert total["swaps"] >= 1, "no version was swapped in"
    for row in rows:
        assert 0 <= row["rollspec/drafter/staleness"] <= row["rollspec/policy/version"] + 1
    if len(histories) == 1:  # of several replicas each has its own version
        follows_the_policy(rows)
    return total


def follows_the_policy(rows: list[dict[str, Any]]) -> None:
    """A version of the head belongs to one version of the policy, and a later one to none before."""
    belongs: dict[float, set[float]] = {}
    for row in rows:
        policy = row["rollspec/policy/version"] - row["rollspec/drafter/staleness"]
        belongs.setdefault(row["rollspec/drafter/version"], set()).add(policy)
    assert all(len(policies) == 1 for policies in belongs.values()), belongs
    policies = [min(belongs[version]) for version in sorted(belongs)]
    assert policies == sorted(policies) and policies[-1] > 0, belongs
