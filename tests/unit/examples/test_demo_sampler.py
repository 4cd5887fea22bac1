"""The order in which both runs of the demonstration train their responses."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl")


def test_a_steps_responses_come_by_length_with_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import replay_buffer

    from examples.demo.sampler import ByLength

    cleared: list[Any] = []
    monkeypatch.setattr(replay_buffer.tq, "kv_clear", lambda **given: cleared.append(given))
    none = OmegaConf.create({})
    sampler = ByLength(
        trainer_mode="sync",
        trainer_config=none,
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=none,
    )
    lengths = {"b_0_0": 7, "a_1_0": 30, "c_0_0": 1, "a_0_0": 7, "b_1_0": 2}
    batch = sampler._materialize_batch("train", ["a", "b"], {k: {"response_len": n} for k, n in lengths.items()})
    assert batch.keys == ["b_1_0", "a_0_0", "b_0_0", "a_1_0"]
    assert [tag["response_len"] for tag in batch.tags] == [lengths[key] for key in batch.keys]
    assert cleared == [{"partition_id": "train", "keys": ["a", "b"]}]
