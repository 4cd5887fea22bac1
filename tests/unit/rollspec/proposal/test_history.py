from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollspec.errors import HistoryError
from rollspec.proposal.base import as_tokens, prompt_key
from rollspec.proposal.history import FILE, OLD_RESPONSES, History, Response, tokenizer_name


def filled(prompts: int = 3, rounds: int = 2, window: int = 4, max_bytes: int = 1 << 20) -> History:
    h = History(max_bytes, window)
    for version in range(rounds):
        for i in range(prompts):
            prompt = as_tokens([i, i + 1, i + 2])
            h.add(prompt_key(prompt), prompt, Response(as_tokens([version, i] * 5), version))
    return h


def contents(h: History) -> dict[str, list[tuple[list[int], int, float | None]]]:
    return {k: [(r.tokens.tolist(), r.version, r.reward) for r in e.responses] for k, e in h}


def test_window_keeps_the_latest_rounds() -> None:
    h = filled(prompts=1, rounds=6, window=2)
    ((_, entry),) = list(h)
    assert [r.version for r in entry.responses] == [3, 4, 5]


def test_a_rollout_that_resumes_stays_as_long_as_its_last_tokens() -> None:
    h = History(1 << 20, 2)
    prompt = as_tokens([1, 2])
    for version in range(9):
        part = Response(
            as_tokens(range(version + 1)), 0, origin="long", spans=tuple((v, v) for v in range(version + 1))
        )
        if version < 6:
            h.add("k", prompt, part)
        h.add("k", prompt, Response(as_tokens([version]), version))
        found = h.part("k", "long")
        assert (found is None) == (version > 7) and (found is None or found.newest == min(version, 5))
    assert [r.version for r in h.get("k").responses] == [6, 7, 8]  # type: ignore[union-attr]


def test_late_samples_of_a_round_look_back_as_far_as_its_first() -> None:
    h = History(1 << 20, 1)
    prompt = as_tokens([1, 2])
    key = prompt_key(prompt)
    for version in range(3):
        for stream in range(2):
            expected = as_tokens([version - 1, stream]) if version else None
            found = h.previous(key, stream, version)
            assert (found is None) if expected is None else found.tolist() == expected.tolist()  # type: ignore[union-attr]
            h.add(key, prompt, Response(as_tokens([version, stream]), version, stream=stream))


def test_bytes_are_bounded_and_counted() -> None:
    h = filled(prompts=200, rounds=2, max_bytes=2000)
    assert h.bytes <= 2000
    assert h.bytes == sum(e.prompt.nbytes + sum(r.tokens.nbytes for r in e.responses) for _, e in h)
    assert h.evicted > 0


def test_one_prompt_larger_than_the_bound_keeps_its_newest_response() -> None:
    h = History(200, 10)
    prompt = as_tokens([1, 2])
    for version in range(5):
        h.add("k", prompt, Response(as_tokens(range(40)), version))
    assert [r.version for r in h.get("k").responses] == [4]  # type: ignore[union-attr]
    h.add("k", prompt, Response(as_tokens(range(400)), 9))
    assert h.bytes <= 200 and len(h) == 0


def test_save_and_load_round_trip(tmp_path: Path) -> None:
    h = filled()
    key = next(k for k, _ in h)
    response = h.get(key).responses[-1]  # type: ignore[union-attr]
    assert h.reward([(key, prompt_key(response.tokens), 0.5), (key, "unknown", 1.0)]) == 1
    assert h.save(tmp_path).stat().st_mode & 0o077 == 0, "prompts are in it: they are this user's alone"
    again = History(1 << 20, 4)
    assert again.load(tmp_path, version=6) == 6
    assert contents(again) == contents(h)
    assert again.bytes == h.bytes


def test_unfinished_responses_are_saved_too(tmp_path: Path) -> None:
    h = filled(prompts=1)
    new = as_tokens([9, 9, 9])
    h.save(tmp_path, h.snapshot([(prompt_key(new), new, Response(as_tokens([5, 6]), 3))]))
    again = History(1 << 20, 4)
    again.load(tmp_path)
    assert again.get(prompt_key(new)).responses[0].tokens.tolist() == [5, 6]  # type: ignore[union-attr]


def test_no_file_is_an_empty_history(tmp_path: Path) -> None:
    assert History(1000, 1).load(tmp_path) == 0


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "foreign"])
def test_damaged_file_is_refused_set_aside_and_rebuilt(tmp_path: Path, damage: str) -> None:
    h = filled()
    path = h.save(tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(data[:-9])
    elif damage == "flip":
        data[-3] ^= 1
        path.write_bytes(data)
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        from safetensors.numpy import save_file

        save_file({"tokens": np.zeros(3, np.int32), "lengths": np.zeros(1, np.int64)}, path)
    again = History(1 << 20, 4)
    with pytest.raises(HistoryError, match="refused") as e:
        again.load(tmp_path)
    assert "\n" not in str(e.value)
    assert len(again) == 0
    assert list(tmp_path.glob("*.corrupt")) and not path.exists()
    h.save(tmp_path)  # and the next save goes through
    assert again.load(tmp_path, version=6) == 6


def test_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryError, match="cannot be written"):
        filled().save(tmp_path / "file")


def test_a_failed_write_keeps_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    h = filled()
    h.save(tmp_path)
    before = (tmp_path / FILE).read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HistoryError, match="No space left"):
        filled(prompts=9).save(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [FILE]


def test_what_a_longer_job_said_is_older_than_what_this_one_says(tmp_path: Path) -> None:
    """A new job, or one resumed from an earlier checkpoint, starts at a version below the saved ones."""
    old = History(1 << 20, 2)
    prompt, key = as_tokens([1, 2, 3]), prompt_key([1, 2, 3])
    for version in (498, 499):
        old.add(key, prompt, Response(as_tokens([version]), version))
    old.save(tmp_path)
    h = History(1 << 20, 2)
    h.load(tmp_path)
    for version in (0, 1, 2):
        h.add(key, prompt, Response(as_tokens([version]), version))
    assert [r.version for r in h.get(key).responses] == [0, 1, 2]  # type: ignore[union-attr]


def test_loading_twice_replaces(tmp_path: Path) -> None:
    h = filled()
    h.save(tmp_path)
    size, evicted = h.bytes, h.evicted
    h.load(tmp_path, version=6)
    assert (h.bytes, h.evicted) == (size, evicted)
    assert sum(len(e.responses) for _, e in h) == 6


def test_log_probs_are_kept_with_the_newest_response_of_each_sample(tmp_path: Path) -> None:
    h = History(1 << 20, 9, OLD_RESPONSES)
    for sample, tokens in (("0_0", [9]), ("0_0", [1, 2, 3]), ("1_0", [4])):
        logprobs = -0.5 * np.arange(len(tokens), dtype=np.float32)
        h.add("a", as_tokens([]), Response(as_tokens(tokens), 1, origin=sample, logprobs=logprobs))
    assert h.bytes == 4 * 8
    assert h.save(tmp_path, tokenizer="T") == tmp_path / OLD_RESPONSES
    again = History(1 << 20, 9, OLD_RESPONSES)
    assert again.load(tmp_path, version=1, tokenizer="T") == 2 and again.bytes == h.bytes
    found = again.part("a", "0_0")
    assert found is not None and found.tokens.tolist() == [1, 2, 3] and found.version == 0
    assert found.logprobs is not None and found.logprobs.tolist() == [0.0, -0.5, -1.0]
    with pytest.raises(HistoryError, match="is of another tokenizer"):
        again.load(tmp_path, tokenizer="U")


def test_a_tokenizers_name_changes_with_any_pair() -> None:
    one = tokenizer_name([("a", 0), ("b", 1)])
    assert one == tokenizer_name([("b", 1), ("a", 0)])
    assert len({one, tokenizer_name([("a", 1), ("b", 0)]), tokenizer_name([("a", 0)]), tokenizer_name([])}) == 4
