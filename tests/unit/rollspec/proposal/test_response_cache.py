"""Old responses: the newest per sample, bounded, saved and reloaded, and never those of another tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollspec.errors import HistoryError
from rollspec.proposal.base import as_tokens
from rollspec.proposal.response_cache import FILE, CachedResponse, ResponseCache, tokenizer_name


def response(*tokens: int, version: int = 1) -> CachedResponse:
    return CachedResponse(as_tokens(tokens), -0.5 * np.arange(len(tokens), dtype=np.float32), version)


def filled() -> ResponseCache:
    old = ResponseCache(1 << 20)
    old.add("a", "0_0", response(1, 2, 3))
    old.add("a", "1_0", response(4, version=3))
    old.add("b", "0_0", response(5, 6))
    return old


def test_the_newest_of_a_sample_is_kept() -> None:
    old = filled()
    assert len(old) == 3 and old.bytes == 6 * 8
    old.add("a", "0_0", response(9, version=4))
    assert len(old) == 3 and old.bytes == 4 * 8
    found = old.get("a", "0_0")
    assert found is not None and (found.tokens.tolist(), found.version) == ([9], 4)
    assert old.get("a", "2_0") is None and old.get("c", "0_0") is None


def test_the_prompts_not_seen_for_longest_go_first() -> None:
    old = ResponseCache(5 * 8)
    for key in ("a", "b", "a", "c"):
        old.add(key, "0_0", response(1, 2))
    assert old.get("b", "0_0") is None and old.get("a", "0_0") is not None and old.bytes == 4 * 8
    old.add("d", "0_0", response(*range(9)))
    assert len(old) == 0 and old.bytes == 0, "larger than the bound"


@pytest.mark.parametrize("logprobs", [[-1.0], [-1.0, np.nan], [-1.0, -np.inf]])
def test_log_probs_that_cannot_be_compared_are_refused(logprobs: list[float]) -> None:
    with pytest.raises(ValueError, match="as many finite log-probs"):
        ResponseCache(1 << 20).add("a", "0_0", CachedResponse(as_tokens([1, 2]), np.array(logprobs, np.float32), 1))


def test_saved_and_loaded_again(tmp_path: Path) -> None:
    assert filled().save(tmp_path / "deep" / "er", "T") == tmp_path / "deep" / "er" / FILE
    again = ResponseCache(1 << 20)
    assert again.load(tmp_path / "deep" / "er", "T", version=7) == 3
    found = again.get("a", "0_0")
    assert found is not None and found.tokens.tolist() == [1, 2, 3] and found.version == 1
    assert found.logprobs.tolist() == [0.0, -0.5, -1.0] and found.logprobs.dtype == np.float32
    assert ResponseCache(1 << 20).load(tmp_path, "T") == 0, "no file is no error"
    fresh = ResponseCache(1 << 20)
    fresh.load(tmp_path / "deep" / "er", "T", version=2)
    assert {fresh.get("a", "0_0").version, fresh.get("a", "1_0").version} == {-1, 1}  # type: ignore[union-attr]
    assert ResponseCache(1 << 20).save(tmp_path, "T").stat().st_mode & 0o077 == 0
    assert ResponseCache(1 << 20).load(tmp_path, "T") == 0, "an empty one is a file as well"


def test_another_tokenizer_is_refused_in_one_sentence(tmp_path: Path) -> None:
    filled().save(tmp_path, "T")
    old = ResponseCache(1 << 20)
    with pytest.raises(HistoryError, match="are of another tokenizer") as e:
        old.load(tmp_path, "U")
    assert len(old) == 0 and "\n" not in str(e.value) and (tmp_path / FILE).is_file()


@pytest.mark.parametrize("damage", ["truncated", "altered", "not safetensors"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = filled().save(tmp_path, "T")
    data = bytearray(path.read_bytes())
    if damage == "altered":
        data[-3] ^= 1
    path.write_bytes({"truncated": bytes(data[:-5]), "altered": bytes(data), "not safetensors": b"{}"}[damage])
    old = ResponseCache(1 << 20)
    with pytest.raises(HistoryError, match="is refused"):
        old.load(tmp_path, "T")
    assert len(old) == 0


def test_an_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryError, match="cannot be written"):
        filled().save(tmp_path / "file" / "below", "T")


def test_a_tokenizers_name_changes_with_any_pair() -> None:
    one = tokenizer_name([("a", 0), ("b", 1)])
    assert one == tokenizer_name([("b", 1), ("a", 0)])
    assert len({one, tokenizer_name([("a", 1), ("b", 0)]), tokenizer_name([("a", 0)]), tokenizer_name([])}) == 4
