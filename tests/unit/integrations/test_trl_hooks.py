"""TRL's hooks on small stand-ins for its classes; the real ones run in tests/e2e/test_trl.py."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rollspec_trl
from rollspec_trl import generation, trainer
from rollspec_trl.trainer import state_of
from vllm_like import like

from rollspec.proposal.base import prompt_key
from rollspec.telemetry import health

torch = pytest.importorskip("torch")

from trl_stand_ins import PROMPTS, Llm, generation_class, trainer_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("tested_trl")


def test_a_step_sends_version_and_rewards_and_logs_metrics(tmp_path: Path) -> None:
    rollspec_trl.enable("suffix_only")
    llm = Llm()
    t = trainer_of(llm, tmp_path)
    assert t.vllm_generation.built_with.preset == "suffix_only"
    for step in range(2):
        t.state.global_step = step
        t._generate_and_score_completions(PROMPTS)
        t.log({"loss": 0.1})
    assert llm.named("set_version") == [{"version": 0}, {"version": 1}]
    # 1.0 * 0.5 + 2.0 * 0.25; the second response has no reward.
    assert llm.named("rewards") == [{"items": [[prompt_key([1, 2]), prompt_key([7, 8]), 1.0]]}] * 2
    out = t.logged[-1]
    assert out["loss"] == 0.1 and out["rollspec/reward/mean"] == 1.0
    assert out["rollspec/accept/rate"] == 0.5 and out["rollspec/policy/version"] == 3
    assert out["rollspec/length/max"] == 2 and out["rollspec/health/nan_logprobs"] == 0
    assert out["rollspec/health/logprob_gap"] == pytest.approx(0.1)
    assert 0 <= out["rollspec/rollout/generation_share"] <= 1


def test_a_step_says_once_what_is_wrong_with_its_rollouts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in says the same in every epoch, and its trainer is 0.1 nats away from its engine."""
    rollspec_trl.enable({"mode": "coupled", "reuse.mode": "replay", "telemetry.health.max_overlap": 0.1})
    monkeypatch.setitem(health.LIMITS, "gap", 0.05)
    t = trainer_of(Llm(), tmp_path, top_p=0.9)
    with caplog.at_level(logging.WARNING, "rollspec"):
        for epoch in range(3):
            t.state.global_step = epoch
            t._generate_and_score_completions(PROMPTS)
            t.log({"loss": 0.1})
    first, second, _ = t.logged
    assert "rollspec/health/epoch_overlap" not in first and first["rollspec/health/warnings"] == 1.0
    assert second["rollspec/health/epoch_overlap"] == second["rollspec/health/epoch_identical"] == 1.0
    # e^-0.5 + e^-0.75 + e^-1, of three tokens
    assert second["rollspec/health/epoch_overlap_chance"] == pytest.approx(0.4822, abs=1e-4)
    assert second["rollspec/health/ess_sequence"] == pytest.approx(0.9975, abs=1e-4), "of two responses, not of a batch"
    assert second["rollspec/health/warnings/gap"] == second["rollspec/health/warnings/overlap"] == 1.0
    texts = [r.getMessage() for r in caplog.records]
    assert len(texts) == 2 and "at step 0 engine and trainer differ" in texts[0] and "top_p and top_k cut" in texts[0]
    assert "at step 1" in texts[1] and "reuse.mode = replay does that" in texts[1]


def test_of_several_processes_none_knows_which_sample_is_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollspec_trl.enable()
    t = trainer_of(Llm(), tmp_path)
    t.accelerator.num_processes = 2
    for _ in range(2):
        t._generate_and_score_completions(PROMPTS)
    assert state_of(t).overlaps == []


def test_evaluations_and_the_summary_stay_as_they_are(tmp_path: Path) -> None:
    rollspec_trl.enable()
    llm = Llm()
    t = trainer_of(llm, tmp_path)
    t.model.training = False
    t._generate_and_score_completions(PROMPTS)
    t.log({"eval_loss": 1.0})
    t.model.training = True
    t.log({"train_runtime": 1.0})
    assert t.logged == [{"eval_loss": 1.0}, {"train_runtime": 1.0}]
    assert llm.named("rewards") == [] and llm.named("stats") == []


def test_the_same_weights_sent_again_are_no_new_version(tmp_path: Path) -> None:
    rollspec_trl.enable()
    llm = Llm()
    t = trainer_of(llm, tmp_path)
    t._generate_and_score_completions(PROMPTS)
    t.vllm_generation.sync_weights()  # TRL's sleep mode does
    assert llm.named("set_version") == [{"version": 0}]


def test_other_trainers_have_versions_without_a_step() -> None:
    rollspec_trl.enable()
    llm = Llm()
    g = generation_class()(llm)
    g.sync_weights()
    g.generate(prompts=PROMPTS, images=None, num_generations=2)
    g.sync_weights()
    assert llm.named("set_version") == [{"version": 0}, {"version": 1}]


def test_checkpoints_carry_the_history(tmp_path: Path) -> None:
    rollspec_trl.enable()
    llm = Llm()
    t = trainer_of(llm, tmp_path)
    t.state.global_step = 4
    assert t._save_checkpoint(None, None) == "saved"
    folder = tmp_path / "checkpoint-4" / "rollspec" / "replica_0"
    assert llm.named("save") == [{"dir": str(folder)}]
    folder.mkdir(parents=True)
    assert t._load_optimizer_and_scheduler(None) == t._load_optimizer_and_scheduler(str(tmp_path / "none")) == "loaded"
    t._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-4"))
    assert llm.named("load") == []
    t._generate_and_score_completions(PROMPTS)
    # After the version, so that what is loaded is older than what is said from now on.
    assert [op for op, _ in llm.calls if op in ("set_version", "load")] == ["set_version", "load"]
    t._generate_and_score_completions(PROMPTS)
    assert llm.named("load") == [{"dir": str(folder)}]


def test_a_failing_hook_is_logged_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollspec_trl.enable()
    t = trainer_of(Llm(), tmp_path)
    monkeypatch.setattr(np, "isfinite", lambda x: 1 / 0)
    with caplog.at_level(logging.ERROR, "rollspec"):
        for _ in range(2):
            t._generate_and_score_completions(PROMPTS)
    monkeypatch.undo()
    assert len(caplog.records) == 1 and "rollouts failed" in caplog.text
    t.log({"loss": 0.1})
    assert t.logged[0]["rollspec/faults/rollouts"] == 2


def test_the_turns_of_a_rollout_are_marked_and_all_of_them_get_its_reward(tmp_path: Path) -> None:
    """TRL's tool loop generates again for those that called a tool, in their order; two have said the same."""
    rollspec_trl.enable("suffix_only")
    seen: list[list[Any]] = []

    class Generating(Llm):
        def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool) -> None:
            seen.append(sampling_params)

    llm = Generating()
    t = trainer_of(llm, tmp_path)
    first = [[1, 2], [1, 2], [3, 4]]
    calls = [
        (first, [[7, 8], [7, 8], [9]]),
        ([[1, 2, 7, 8, 50], [3, 4, 9, 51]], [[10], [11]]),
        ([[3, 4, 9, 51, 11, 52]], [[12]]),
    ]
    params = like("vllm:SamplingParams", temperature=1.0, extra_args={"theirs": 1})

    def say(self: Any, prompts: Any, images: Any, num_generations: int, profiler: Any = None) -> Any:
        self.llm.generate(prompts, sampling_params=params, use_tqdm=False)
        return prompts, next(said for asked, said in calls if asked == prompts), None, None

    def score(inputs: Any) -> dict[str, Any]:
        for prompts, _ in calls:
            said = generation._generate(say, t.vllm_generation, prompts, None, 1)[1]
            said[0] = [*said[0], 99]  # TRL keeps whole rollouts in the list that it was given
        state = state_of(t)
        state.scores = np.array([1.0, 0.0, np.nan])
        return {"completion_mask": torch.ones(3, 2)}

    state = state_of(t)
    state.step, state.turns = (lambda: 0), []
    out = score(None)
    items: list[list[Any]] = []
    trainer._on_batch(state, out, items, True)
    marks = [[p.extra_args["rollspec"]["turn"] for p in batch] for batch in seen]
    names = [mark[0] for mark in marks[0]]
    assert len(set(names)) == 3 and [mark[1:] for mark in marks[0]] == [[0, 2, 2]] * 3
    assert marks[1] == [[names[0], 1, 2, 4], [names[2], 1, 2, 3]] and marks[2] == [[names[2], 2, 2, 5]]
    assert params.extra_args == {"theirs": 1} and seen[0][0].extra_args["theirs"] == 1
    assert items == [
        [prompt_key([1, 2]), prompt_key([7, 8]), 1.0], [prompt_key([1, 2]), prompt_key([7, 8]), 0.0],
        [prompt_key([1, 2]), prompt_key([10]), 1.0],
    ]  # fmt: skip
    assert "generate" not in vars(llm)
