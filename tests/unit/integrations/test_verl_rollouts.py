"""What is measured of one step's rollouts, and the keys rewards travel under."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from vllm_like import like

from rollspec.proposal.base import as_tokens, prompt_key

pytest.importorskip("verl")
torch = pytest.importorskip("torch")


def rollouts(**changes: Any) -> Any:
    from rollspec_verl.rollouts import Rollouts

    fields: dict[str, Any] = {
        "prompts": [as_tokens([1, 2]), as_tokens([3])],
        "responses": [as_tokens([4, 5, 6]), as_tokens([7])],
        "scores": [1.0, 0.0],
        "engine_logprobs": [np.log([0.5, 0.25, 0.9]), np.log([0.1])],
        "trainer_logprobs": [np.log([0.5, 0.25, 0.9]), np.log([0.1])],
    }
    return Rollouts(**{**fields, **changes})


def test_rewards_carry_the_keys_the_engine_computes() -> None:
    assert rollouts().rewards()[0] == [prompt_key([1, 2]), prompt_key([4, 5, 6]), 1.0]


def test_metrics_of_agreeing_log_probs() -> None:
    m = rollouts().metrics()
    assert m["rollspec/reward/mean"] == 0.5
    assert (m["rollspec/length/p50"], m["rollspec/length/max"]) == (2.0, 3.0)
    assert m["rollspec/health/logprob_gap"] == 0.0
    assert m["rollspec/health/logprob_corr"] == pytest.approx(1.0)


def test_disagreement_and_nan_show() -> None:
    wrong = rollouts(trainer_logprobs=[np.log([0.9, 0.5, 0.25]), np.log([0.1])]).metrics()
    assert wrong["rollspec/health/logprob_corr"] < 0.99 and wrong["rollspec/health/logprob_gap"] > 0.5
    broken = rollouts(engine_logprobs=[np.full(3, np.nan), np.log([0.1])]).metrics()
    assert math.isnan(broken["rollspec/health/logprob_gap"])


def test_importance_weights_are_measured() -> None:
    m = rollouts(trainer_logprobs=[np.log([0.5, 0.5, 0.9]), np.log([0.1])]).metrics()
    assert m["rollspec/health/ratio_max"] == pytest.approx(2.0) and m["rollspec/health/ratio_outside"] == 0.25
    assert m["rollspec/health/ess_token"] == pytest.approx(25 / 28)
    assert m["rollspec/health/ess_sequence"] == pytest.approx(9 / 10)


def test_no_log_probs_and_no_rollouts_leave_metrics_out() -> None:
    assert "rollspec/health/logprob_gap" not in rollouts(engine_logprobs=[]).metrics()
    assert rollouts(prompts=[], responses=[], scores=[], engine_logprobs=[], trainer_logprobs=[]).metrics() == {}


def test_read_drops_padding_and_tokens_the_policy_did_not_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from rollspec_verl.rollouts import Rollouts

    def nested(*rows: Any) -> Any:
        return torch.nested.nested_tensor([torch.tensor(r, dtype=torch.float32) for r in rows], layout=torch.jagged)

    data = {
        "prompts": nested([1, 2], [3], [0]),
        "responses": nested([4, 5, 6], [7, 8], [0]),
        "response_mask": nested([1, 0, 1], [1, 1], [0]),
        "rm_scores": nested([0, 0, 1], [0, 0.5], [9]),
        "rollout_log_probs": nested([-1, -9, -2], [-3, -4], [-9]),
    }
    queue = like("transfer_queue", kv_batch_get=lambda keys, partition_id, select_fields: data)
    monkeypatch.setitem(sys.modules, "transfer_queue", queue)
    got = Rollouts.read(
        like(
            "transfer_queue:KVBatchMeta",
            keys=["u1_0_0", "u1_11_0", "pad"],
            partition_id="train",
            tags=[{"min_global_steps": 3, "max_global_steps": 4}, {"min_global_steps": None}, {"is_padding": True}],
        )
    )
    assert got.samples == ["0_0", "11_0"] and got.spanning == 1
    assert got.lengths == [2, 2]
    assert got.scores == [1.0, 0.5]
    assert [list(x) for x in got.engine_logprobs] == [[-1, -2], [-3, -4]]
    assert got.trainer_logprobs == []
    assert got.rewards()[0] == [prompt_key([1, 2]), prompt_key([4]), 1.0], "each turn is a response to the engine"
    assert got.rewards()[2][:2] == [prompt_key([3]), prompt_key([7, 8])] and len(got.rewards()) == 3


def test_turns_of_two_epochs_are_compared_without_what_a_tool_said() -> None:
    from rollspec.config import RollspecConfig
    from rollspec.telemetry.health import HealthWatch

    watch = HealthWatch(RollspecConfig.load("default", env={}).telemetry.health, 1 << 20)
    turns = [[as_tokens([4]), as_tokens([6])], [as_tokens([7])]]
    both = [np.log([0.5, 0.9]), np.log([0.1])]
    found = rollouts(samples=["0_0", "0_0"], turns=turns, engine_logprobs=both, trainer_logprobs=both)
    assert found.epochs(watch) == {}
    assert found.epochs(watch)["rollspec/health/epoch_identical"] == 1.0
    assert found.lengths == [2, 1]
