"""Whole verl jobs on CPU with the stock vLLM rollout: GRPO until its engine is killed, PPO with a critic, two replicas
that train the drafter and resume, lossy reuse.

A job takes 170 CPU-seconds before its first step, so each asserts as much as can be asserted of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import young_head
from running_job import metrics_of, running, title_of

from drafter_online.versions import Versions
from examples.demo.job import Job, JobSettings, build_job, prepare_assets
from examples.demo.runner import log_tail, run_job
from rollspec.telemetry.report import write_report

# Bounds against hangs, not expectations: a job takes one to two minutes on an idle machine of two cores.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1700)]

SETTINGS = JobSettings(size="tiny", train_prompts=16, prompts_per_step=8, n=4, epochs=2, max_response_length=200)

STATIC = ("tuning.strategy=static", "tuning.guard.enabled=false", "proposal.budget.rule=fixed")
"""What is drafted and verified depends on no clock."""

NOTED = ("telemetry.health.max_overlap=0.02", *STATIC)
"""verl numbers samples by session and noise by arrival, so that not every pair that is compared repeats itself."""

DRAFTER_SUMS = (
    "captured", "passes", "train_steps", "idle_seconds", "used_seconds", "swaps", "promoted", "rolled_back"
)  # fmt: skip


YOUNG_HEAD = (*young_head.OVERRIDES, *STATIC)  # what it drafts is verified all the same


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Job]:
    assets = prepare_assets(SETTINGS, tmp_path_factory.mktemp("assets"))

    def build(
        folder: Path,
        *more: str,
        speculate: bool = True,
        preset: str = "default",
        overrides: tuple[str, ...] = (),
        **changes: Any,
    ) -> Job:
        settings = dataclasses.replace(SETTINGS, **changes)
        folder.mkdir(parents=True, exist_ok=True)
        job = build_job(settings, assets, folder, speculate=speculate, preset=preset, overrides=overrides)
        environment = {**job.environment, "TENSORBOARD_DIR": str(folder / "tensorboard")}
        return dataclasses.replace(job, command=(*job.command, *more), environment=environment)

    return build


@pytest.mark.supports("verl", "sync", "drafts", "policy versions", "metrics")
def test_grpo_reports_and_accepts_until_its_engine_is_killed(make: Callable[..., Job], tmp_path: Path) -> None:
    """Two epochs, the second drafted from the first under the same noise, engine and trainer agree. Then the engine is
    killed in mid-rollout, and the job ends by its own error. Started without the demo's runner, which would clean up:
    the job itself must end and leave nothing.
    """
    loggers = "trainer.logger=[console,file,wandb,tensorboard]"
    job = make(tmp_path / "job", loggers, epochs=50, dtype="float32", preset="coupled_reuse", overrides=NOTED)
    with running(job) as started:
        metrics = job.folder / "metrics.jsonl"
        # Two epochs of two steps. What is written is in rows: the last may still be on its way.
        started.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 4, 800)
        time.sleep(0.3)  # the next rollout has begun
        engine = next(pid for pid in started.family.alive() if "VLLM::Engine" in title_of(pid))
        names = {name for pid in started.family.alive() for name in segments_of(pid)}
        assert names, "vLLM's processes share no memory any more; this test and `segments_below` can be made simpler"
        os.kill(engine, signal.SIGKILL)
        started.wait_for(lambda: started.process.poll() is not None, 180)
        assert started.process.returncode != 0
        text = started.log.read_text(errors="replace")
        assert "rollspec: the vLLM engine of replica 0 died" in text
        # The job's own last word; lines of its actors may still follow it.
        sentence = "rollspec_verl.servers.EngineLost: rollspec: the vLLM engine of rollout replica 0 is dead"
        assert any(line.startswith(sentence) for line in log_tail(started.log, lines=40, width=500).splitlines())
        started.wait_for(lambda: not started.family.alive(strays=True), 60)
        assert not [name for name in names if (Path("/dev/shm") / name).exists()]

    steps = metrics_of(job)[:4]
    for row in steps:
        assert row["rollspec/rollout/speculating"] == 1.0
        assert row["rollspec/faults"] == 0
        assert row["rollspec/health/logprob_corr"] > 0.999
        assert row["training/rollout_actor_probs_pearson_corr"] > 0.999
        assert row["rollspec/history/rewarded"] == 32
        assert row["rollspec/rollout/tokens"] == pytest.approx(row["response_length/mean"] * 32, rel=0.005)
        assert 0 < row["rollout/spec_accept_rate"] <= 1 <= row["rollout/spec_accept_length"]
        assert row["rollspec/reuse/correlated"] == 1.0 and row["rollspec/health/ess_token"] > 0.99
    assert [r["rollspec/policy/version"] for r in steps] == sorted({r["rollspec/policy/version"] for r in steps})
    first, second = steps[:2], steps[2:]
    assert sum(r["rollspec/accept/length"] for r in second) > sum(r["rollspec/accept/length"] for r in first)
    for row in second:
        assert row["rollspec/accept/length"] > 1.2 and row["rollspec/reuse/share"] > 0
        assert row["rollspec/health/epoch_overlap"] > row["rollspec/health/epoch_overlap_chance"]
        assert row["rollspec/health/warnings/overlap"] == 1.0
    assert "noise is kept over epochs (reuse.mode = replay)" in text and "reuse.mode = replay does that" in text
    lengths = [json.loads(line) for line in (job.folder / "lengths.jsonl").read_text().splitlines()]
    assert [len(x["lengths"]) for x in lengths[:4]] == [32] * 4
    assert "rollspec/accept/rate" in text
    assert list((job.folder / "tensorboard").rglob("events.*")) and list(job.folder.rglob("*.wandb"))


def test_an_engine_killed_within_a_sync_ends_it(run_bounded: Callable[..., Any], tmp_path: Path) -> None:
    """verl's socket would wait for the next acknowledgement for ever."""
    from rollspec_verl_cpu import environment

    done = run_bounded([sys.executable, Path(__file__).with_name("killed_sync.py"), tmp_path], 120, env=environment())
    assert done.returncode == 0, done.stdout[-3000:]
    assert "rollspec: the vLLM engine took no weights for 2 s, so it is dead or stuck" in done.stdout


def ppo(make: Callable[..., Job], folder: Path, speculate: bool, **size: Any) -> tuple[Job, list[dict[str, Any]]]:
    """A job of two steps with a critic, with noise that is kept where it speculates."""
    from rollspec_verl_cpu import critic_overrides

    job = make(folder, speculate=speculate, preset="coupled_reuse", overrides=NOTED, **size)
    model = next(o.split("=", 1)[1] for o in job.command if o.startswith("actor_rollout_ref.model.path="))
    critic = [
        "algorithm.adv_estimator=gae",
        f"critic.model.path={model}",
        "critic.ppo_micro_batch_size_per_gpu=4",
        *critic_overrides(),
    ]
    job = dataclasses.replace(job, command=(*job.command, *critic))
    run_job(job, timeout=800, stall=600)
    steps = metrics_of(job)
    assert len(steps) == 2 and "critic/vf_loss" in steps[0]
    assert ("rollspec/accept/rate" in steps[1]) is speculate
    assert steps[1]["rollspec/health/logprob_corr"] > 0.99
    return job, steps


@pytest.mark.slow  # noise is kept in the GRPO job as well, and rollspec sees nothing of a critic
def test_ppo_with_a_critic_and_kept_noise(make: Callable[..., Job], tmp_path: Path) -> None:
    """Two epochs of one step each: the second repeats the first while the policy agrees."""
    job, steps = ppo(make, tmp_path, True, train_prompts=8, epochs=2)
    first, second = steps
    for row in steps:
        assert row["rollspec/reuse/correlated"] == 1.0 and row["rollspec/faults"] == 0
        assert row["rollspec/health/ess_token"] > 0.99
    assert second["rollspec/reuse/share"] > 0 and "rollspec/health/epoch_overlap" not in first
    assert second["rollspec/health/epoch_overlap"] > second["rollspec/health/epoch_overlap_chance"]
    assert second["rollspec/health/warnings/overlap"] == 1.0
    log = (job.folder / "job.log").read_text(errors="replace")
    assert "noise is kept over epochs (reuse.mode = replay)" in log and "reuse.mode = replay does that" in log


@pytest.mark.slow  # `test_disabled_asks_no_server` and `test_inert_without_a_switch` are its shorter siblings
def test_ppo_with_rollspec_disabled(make: Callable[..., Job], tmp_path: Path) -> None:
    ppo(make, tmp_path, False, epochs=1)


@pytest.mark.supports("verl", "sync", "draft head", "resume")
@pytest.mark.modes
@pytest.mark.slow  # its parts are in tests of two engines, of training beside one, and of checkpoints
@pytest.mark.timeout(1600)
def test_long_tail_trains_while_a_replica_idles_swaps_and_resumes(make: Callable[..., Job], tmp_path: Path) -> None:
    """Two replicas and one head: it is trained on the device of one while that one's share of a rollout is finished,
    and both take it over. A resumed job goes on from the versions, the samples and the training of the checkpoint.
    """
    checkpoints = f"trainer.default_local_dir={tmp_path / 'checkpoints'}"
    job = make(tmp_path / "first", checkpoints, "trainer.save_freq=3", preset="long_tail", overrides=YOUNG_HEAD,
               replicas=2, steps=3)  # fmt: skip
    run_job(job, timeout=840, stall=600)  # two engines and two trainers start on the same cores
    steps = metrics_of(job)
    assert len(steps) == 3
    for row in steps:
        assert row["rollspec/faults"] == 0 and row["rollspec/health/logprob_corr"] > 0.99
    total = young_head.totals(steps, *DRAFTER_SUMS)
    assert 80 <= total["captured"] <= 96 and total["passes"] > 0, total
    assert total["train_steps"] > 0 and 0 < total["used_seconds"] <= total["idle_seconds"], total
    # Nothing is idle while the trainer computes.
    assert total["idle_seconds"] < sum(r["timing_s/gen"] for r in steps)
    assert total["swaps"] >= 1 and total["promoted"] + total["rolled_back"] >= 1, total
    assert {"rollspec/drafter/staleness", "rollspec/drafter/loss", "rollspec/drafter/accept_length"} <= set(steps[-1])
    assert any("rollspec/accept/rate/eagle3" in r for r in steps)
    page = write_report(job.folder)[0].read_text()
    assert "Draft head: acceptance length" in page and "Idle time and what training made of it" in page

    saved = tmp_path / "checkpoints" / "global_step_3" / "rollspec"
    assert [p.parent for p in saved.rglob("drafter")] == [saved], "one head for both"
    store = Versions(saved / "drafter" / "versions")
    assert store.numbers() and store.events()
    assert list(saved.glob("drafter/state/step-*")) and (saved / "drafter" / "buffer" / "index.json").is_file()
    number = young_head.promote_by_hand(store)
    resume = ("trainer.resume_mode=auto", "trainer.total_training_steps=5")
    taken = (*young_head.RESUMED_OVERRIDES, *STATIC)
    again = make(tmp_path / "second", checkpoints, *resume, preset="long_tail", overrides=taken, epochs=3,
                 replicas=2)  # fmt: skip
    again = dataclasses.replace(again, total_steps=2)
    run_job(again, timeout=600, stall=600)
    row, last = metrics_of(again)
    assert row["rollspec/faults"] == last["rollspec/faults"] == 0
    kept = steps[-1]["rollspec/history/prompts"]
    assert row["rollspec/history/prompts"] >= kept, "the checkpoint's history was not loaded"
    assert last["rollspec/drafter/version"] >= number, "the checkpoint's drafter was not taken"


@pytest.mark.modes
@pytest.mark.slow  # `test_verl_teacher.py` and `test_service_ray.py` are its shorter siblings
@pytest.mark.timeout(1200)
def test_the_policys_training_pass_teaches_the_head(make: Callable[..., Job], tmp_path: Path) -> None:
    """The trainer has its samples from the log-prob pass; the engine records none and serves what it publishes."""
    job = make(tmp_path / "job", preset="long_tail", overrides=("drafter.mode=policy", *YOUNG_HEAD), steps=4)
    run_job(job, timeout=900, stall=600)
    steps = metrics_of(job)
    assert len(steps) == 4
    for row in steps:
        assert row["rollspec/faults"] == 0 and row["rollspec/health/logprob_corr"] > 0.99
        assert row["rollspec/drafter/policy_dropped"] == 0 and 0 < row["rollspec/drafter/policy_share"] < 0.5
    total = young_head.totals(steps, "captured", "policy_samples", "swaps")
    assert total["captured"] == 0 and total["policy_samples"] >= 48, total
    assert total["swaps"] >= 1, total
    assert any("rollspec/accept/rate/eagle3" in r for r in steps)
    print({k: [r.get(f"rollspec/drafter/{k}") for r in steps] for k in ("policy_samples", "policy_share", "version")})


@pytest.mark.slow  # `test_lenient_engine.py` and `test_verl_reuse.py` are its shorter siblings
def test_lossy_reuse_says_so_and_keeps_to_the_present_policys_log_probs(
    make: Callable[..., Job], tmp_path: Path
) -> None:
    """The second epoch starts from the first one's responses; engine and trainer agree about every token of them."""
    job = make(tmp_path / "lossy", preset="spec_rl", train_prompts=8, max_response_length=96)
    run_job(job, timeout=800, stall=600)
    first, second = metrics_of(job)
    for row in (first, second):
        assert row["rollspec/reuse/lossy"] == (row is second) and row["rollspec/reuse/bias"] == 0.5
        assert row["rollspec/faults"] == 0
        assert row["rollspec/health/ess_token"] > 0.99 and row["rollspec/health/logprob_corr"] > 0.99
    assert "rollspec/reuse/skip_ratio" not in first
    assert second["rollspec/reuse/verified"] == 32
    assert 0 < second["rollspec/reuse/avg_saved_tokens"] <= second["rollspec/reuse/avg_resp_len"]
    assert second["rollspec/reuse/skip_ratio"] + second["rollspec/reuse/cont_ratio"] == pytest.approx(1.0)
    assert second["rollspec/health/epoch_overlap"] > second["rollspec/health/epoch_overlap_chance"] + 0.2
    assert second["rollspec/health/warnings/overlap"] == 1.0
    log = (job.folder / "job.log").read_text(errors="replace")
    assert "LOSSY: old responses are reused (reuse.mode = lenient, bias 0.5" in log


def segments_of(pid: int) -> list[str]:
    try:
        return re.findall(r"/dev/shm/(psm_\w+)", Path(f"/proc/{pid}/maps").read_text())
    except OSError:
        return []
