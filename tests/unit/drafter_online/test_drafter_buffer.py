from __future__ import annotations

import collections
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_sample import make_sample, same

from drafter_online.buffer import INDEX, Buffer, BufferConfig, add_all
from drafter_online.errors import BufferFileError, SampleError
from drafter_online.inbox import Inbox
from drafter_online.rewards import Rewards
from drafter_online.samples import Sample, Verify

ONE = make_sample(20, verify=Verify.gather(())).nbytes


def plain(seed: int, length: int = 20, version: int = 0, **kw: Any) -> Sample:
    return make_sample(length, seed=seed, target_version=version, request_id=f"r{seed}", verify=Verify.gather(()), **kw)


def buffer(samples: int = 10, **kw: Any) -> Buffer:
    return Buffer(BufferConfig(max_bytes=ONE * samples + 100, **kw))


def held(b: Buffer) -> list[int]:
    return sorted(int(s.request_id[1:]) for s in b)


def test_bytes_are_bounded_and_counted() -> None:
    b = buffer(10)
    for i in range(100):
        b.add(plain(i))
    assert b.bytes == sum(s.nbytes for s in b) <= b.config.max_bytes
    assert len(b) == 10 and b.counts.added == 100 and b.counts.dropped == 90 == b.counts.unseen
    assert b.stats()["samples"] == 10


def test_what_stays_of_a_version_is_a_uniform_sample() -> None:
    """A reservoir: the k-th to come is as likely to be there as the first (chi-square, 1e-4)."""
    counts = collections.Counter[int]()
    for seed in range(300):
        b = buffer(5, tail_quota=0.0, seed=seed)
        for i in range(20):
            b.add(plain(i))
        counts.update(held(b))
    expected = 300 * 5 / 20
    assert sum((counts[i] - expected) ** 2 / expected for i in range(20)) < 50.8  # 19 degrees of freedom


def test_older_versions_keep_less_but_something() -> None:
    b = buffer(30, half_life=1.0, tail_quota=0.0)
    for version in range(3):
        for i in range(60):
            b.add(plain(100 * version + i, version=version))
    kept = collections.Counter(i // 100 for i in held(b))
    assert kept[2] > kept[1] > kept[0] > 0
    assert kept[2] == pytest.approx(30 * 4 / 7, abs=1.5) and kept[0] == pytest.approx(30 / 7, abs=1.5)


def test_only_the_newest_versions_stay_where_that_is_wanted(tmp_path: Path) -> None:
    """Tail or not, and a late sample of an older one does not come in."""
    b = buffer(30, keep_versions=1)
    for version in range(3):
        for i in range(4):
            assert b.add(plain(10 * version + i, length=60 if i == 0 else 20, version=version))
        assert {i // 10 for i in held(b)} == {version}
    assert not b.add(plain(99, version=1)) and held(b) == [20, 21, 22, 23]
    assert b.counts.dropped == 9 and b.bytes == sum(s.nbytes for s in b)
    two = buffer(30, keep_versions=2)
    for version in range(4):
        two.add(plain(version, version=version))
    assert held(two) == [2, 3]
    assert held(Buffer.load(two.save(tmp_path), BufferConfig(keep_versions=1))) == [3]


def test_another_job_that_counts_versions_from_0_is_not_older_than_what_was_loaded(tmp_path: Path) -> None:
    b = buffer(30)
    for version in (7, 8, 9):
        b.add(plain(version, version=version))
    again = Buffer.load(b.save(tmp_path), BufferConfig(keep_versions=1))
    assert again.newest == 9
    assert again.add(plain(1, version=0)) and again.newest == 0
    assert again.add(plain(2, version=1)) and held(again) == [2]
    resumed = Buffer.load(tmp_path, BufferConfig())
    resumed.add(plain(10, version=10))
    assert resumed.newest == 10 and [s.target_version for s in resumed] == [7, 8, 9, 10]
    assert [s.target_version for s in Buffer.load(resumed.save(tmp_path))] == [7, 8, 9, 10]
    resumed = Buffer.load(tmp_path)
    resumed.add(plain(11, version=8))
    assert [s.target_version for s in Buffer.load(resumed.save(tmp_path))] == [7, 8, 8, 8, 8]


def test_the_longest_responses_survive_although_later_steps_lack_them() -> None:
    b = buffer(20, half_life=1.0, tail_quota=0.3)
    long = [plain(i, 30) for i in range(2)]
    for s in long:
        b.add(s)
    for version in range(1, 5):
        for i in range(60):
            b.add(plain(100 * version + i, version=version))
    assert {0, 1} <= set(held(b))
    assert b.stats()["tail_bytes"] <= 0.3 * b.config.max_bytes
    without = buffer(20, half_life=1.0, tail_quota=0.0)
    for s in [*long, *(plain(100 * v + i, version=v) for v in range(1, 8) for i in range(60))]:
        without.add(s)
    assert not {0, 1} & set(held(without))
    # Policies change: after tail_versions they are as any other.
    for version in range(5, 16):
        for i in range(60):
            b.add(plain(100 * version + i, version=version))
    assert not {0, 1} & set(held(b))


def test_windows_come_from_the_whole_response() -> None:
    b = buffer(100)
    b.add(plain(0, 200, response_length=196))
    rng = random.Random(0)
    seen = collections.Counter[int]()
    for _ in range(400):
        (w,) = b.draw(rng, 40, 40)
        assert len(w) == 40 and torch.equal(
            w.position_ids, torch.arange(int(w.position_ids[0]), int(w.position_ids[0]) + 40)
        )
        seen.update(w.position_ids.tolist())
    assert min(seen[i] for i in range(4, 200)) >= 1
    assert seen[199] > 0 and max(seen.values()) < 3 * sum(seen.values()) / 200


def test_several_windows_fill_a_batch() -> None:
    b = buffer(100)
    for i in range(10):
        b.add(plain(i, 20))
    for seed in range(20):
        windows = b.draw(random.Random(seed), 64, 512)
        assert 56 < sum(map(len, windows)) <= 64 and len(windows) >= 3
    assert Buffer().draw(random.Random(0), 64, 64) == []


def test_recent_samples_are_drawn_more_and_by_their_tokens() -> None:
    b = buffer(100, half_life=1.0)
    b.add(plain(0, version=0))
    b.add(plain(1, version=2))
    b.add(plain(2, 36, version=2))
    rng = random.Random(0)
    got = collections.Counter(b.draw(rng, 20, 20)[0].request_id for _ in range(1200))
    assert got["r1"] / got["r0"] == pytest.approx(4.0, rel=0.35)
    assert got["r2"] / got["r1"] == pytest.approx(2.0, rel=0.2)  # 32 response tokens against 16


def test_rewards_join_by_request_whenever_they_come() -> None:
    b = buffer()
    b.add(plain(0))
    assert b.reward({"r0": 1.0, "r1": 0.0, "r9": float("nan")}) == 1
    b.add(plain(1))
    b.add(plain(2, reward=0.5))
    assert {s.request_id: s.reward for s in b} == {"r0": 1.0, "r1": 0.0, "r2": 0.5}
    assert b.reward({"r0": 7.0}) == 0  # the first one counts
    mean, std = b.rewards.moments
    assert mean == pytest.approx(0.5) and std == pytest.approx((0.5**2 * 2 / 3) ** 0.5)
    assert b.stats()["rewarded"] == 3 and b.stats()["pending_rewards"] == 0


def test_what_a_reward_is_worth_follows_a_policy_that_learns() -> None:
    rewards = Rewards()
    for value in [0.0] * 5000 + [1.0] * 3000:
        rewards.add(value)
    assert rewards.moments[0] > 0.95, "of all rewards 3 in 8 are 1"


def test_what_does_not_fit_is_refused_and_counted() -> None:
    b = buffer(100)
    b.add(plain(0))
    wide = make_sample(20, h=5, verify=Verify.gather(()))
    unmasked = dataclasses.replace(plain(1), loss_mask=torch.zeros(20, dtype=torch.bool))
    bad = dataclasses.replace(plain(2), hidden_states=plain(2).hidden_states / 0)
    errors = add_all(b, [wide, unmasked, bad, plain(3)])
    assert len(errors) == 3 and all(isinstance(e, SampleError) for e in errors)
    assert "15 wide" in str(errors[0]) and "loss_mask" in str(errors[1])
    assert len(b) == 2 and b.counts.refused == 3


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    b = buffer(8)
    for i in range(20):
        b.add(make_sample(20, seed=i, target_version=i // 5, request_id=f"r{i}"))
    b.draw(random.Random(0), 64, 64)
    b.reward({f"r{i}": float(i) for i in range(30)})
    b.save(tmp_path)
    again = Buffer.load(tmp_path, b.config)
    assert again.stats() == b.stats() and again.rewards.moments == b.rewards.moments
    assert all(same(x, y) for x, y in zip(b, again, strict=True))
    for x, y in zip(b.draw(random.Random(1), 99, 16), again.draw(random.Random(1), 99, 16), strict=True):
        assert same(x, y)
    for i in range(20, 40):  # what is kept from now on is decided alike
        assert b.add(plain(i, version=4)) == again.add(plain(i, version=4))
    assert held(b) == held(again)
    b.save(tmp_path)
    assert len(list((tmp_path / "samples").iterdir())) == len(b)


def test_a_smaller_bound_holds_after_loading(tmp_path: Path) -> None:
    b = buffer(10)
    for i in range(10):
        b.add(plain(i))
    small = Buffer.load(b.save(tmp_path), BufferConfig(max_bytes=4 * ONE))
    assert len(small) == 4 and small.bytes <= 4 * ONE


@pytest.mark.parametrize("how", ["truncate", "flip", "delete"])
def test_a_damaged_sample_costs_only_itself(tmp_path: Path, how: str) -> None:
    b = buffer(10)
    for i in range(6):
        b.add(plain(i))
    b.save(tmp_path)
    victim = next((tmp_path / "samples").iterdir())
    data = bytearray(victim.read_bytes())
    if how == "delete":
        victim.unlink()
    else:
        data[-5] ^= 1
        victim.write_bytes(data if how == "flip" else data[:-30])
    again = Buffer.load(tmp_path, b.config)
    assert len(again) == 5 and again.counts.damaged == 1
    again.save(tmp_path)
    assert Buffer.load(tmp_path, b.config).stats() == again.stats()


def test_a_damaged_index_is_refused_and_set_aside(tmp_path: Path) -> None:
    b = buffer(10)
    b.add(plain(0))
    b.save(tmp_path)
    (tmp_path / INDEX).write_text(
        (tmp_path / INDEX).read_text().replace("r0", "r1").replace('"added": 1', '"added": 2')
    )
    with pytest.raises(BufferFileError, match=r"index.json is refused .* moved to .*corrupt"):
        Buffer.load(tmp_path)
    assert (tmp_path / f"{INDEX}.corrupt").exists() and len(Buffer.load(tmp_path)) == 0


def test_a_full_disk_leaves_the_saved_buffer_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b = buffer(10)
    b.add(plain(0))
    b.save(tmp_path)
    b.add(plain(1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr("drafter_online.files.os.fsync", full)
        with pytest.raises(BufferFileError, match="No space left"):
            b.save(tmp_path)
    assert held(Buffer.load(tmp_path)) == [0]
    b.save(tmp_path)
    assert held(Buffer.load(tmp_path)) == [0, 1]


def test_token_counts_are_of_responses(tmp_path: Path) -> None:
    b = buffer()
    s = plain(0)
    b.add(s)
    assert sum(b.token_counts().values()) == 16
    assert b.token_counts()[int(s.input_ids[4])] >= 1


def test_an_inbox_drops_the_oldest_and_counts() -> None:
    box = Inbox(3 * ONE)
    box.put(plain(9, 100))
    assert len(box) == 0, "larger than the bound alone"
    for i in range(5):
        box.put(plain(i))
    assert box.bytes == 3 * ONE
    assert [s.request_id for s in box.take(2)] == ["r2", "r3"] and [s.request_id for s in box.take()] == ["r4"]
    assert (box.received, box.dropped, len(box), box.bytes) == (6, 3, 0, 0)
