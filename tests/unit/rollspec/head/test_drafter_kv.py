from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from rollspec.head.drafter_kv import DrafterKV  # noqa: E402


def rows(start: int, n: int) -> object:
    """States that say their position."""
    return torch.arange(start, start + n, dtype=torch.float32)[:, None].repeat(1, 4)


def make(max_bytes: int = 1 << 20, max_rows: int = 1000) -> DrafterKV:
    return DrafterKV(max_bytes, max_rows, width=4, itemsize=4)


def test_what_a_pause_left_unread_is_found_once() -> None:
    s = make()
    s.add("a", 0, rows(0, 10))
    s.read(["a"])
    for p in (10, 11, 12):
        s.add("a", p, rows(p, 1))
    (found,) = s.unread(["a"], {"a": 12})  # position 12 is in the step at hand
    row, entry, start, stop = found
    assert (row, start, stop) == (0, 10, 12)
    assert entry.rows(10, 12)[:, 0].tolist() == [10.0, 11.0]
    assert entry.rows(3, 11)[:, 0].tolist() == [float(i) for i in range(3, 11)]
    s.read(["a"])
    assert not list(s.unread(["a"], {"a": 13}))


def test_a_preempted_request_starts_over() -> None:
    s = make()
    s.add("a", 0, rows(0, 10))
    s.read(["a"])
    s.add("a", 0, rows(0, 6))
    assert s.bytes == 6 * 16
    (found,) = s.unread(["a"], {"a": 6})
    assert found[2:] == (0, 6)
    s.drop("a")
    assert s.bytes == 0 and len(s) == 0


def test_after_a_swap_everything_is_read_again_in_parts() -> None:
    s = make()
    for q in ("a", "b"):
        s.add(q, 0, rows(0, 10))
    s.read(["a", "b"])
    assert s.current("a") and s.rewind() == 20 and not s.current("a")
    parts = []
    while todo := list(s.stale(["a", "b"], 6)):
        for _, entry, start, stop in todo:
            parts.append(stop - start)
            entry.fresh = stop
    assert parts == [6, 4, 2, 6, 2] or sum(parts) == 20
    assert s.current("a") and s.current("b")


def test_memory_is_bounded_and_what_is_unread_stays() -> None:
    s = make(max_bytes=16 * 20, max_rows=1000)
    s.add("old", 0, rows(0, 15))
    s.read(["old"])
    s.add("new", 0, rows(0, 8))
    s.trim()
    assert s.bytes == 8 * 16, "what was read goes first"
    assert not s.full
    s.add("new", 8, rows(8, 8))
    assert s.full, "more than half of the room is unread"
    s.read(["new"])
    assert not s.full
    # What was dropped cannot be read again: its KV stays the old weights'.
    s.rewind()
    assert not s.current("old") and list(s.stale(["new"], 100))


def test_tokens_only() -> None:
    s = DrafterKV(0, 50, width=0, itemsize=4)
    s.add("a", 0, 30)
    assert not s.full and s.bytes == 0
    s.add("a", 30, 30)
    assert s.full
    (found,) = s.unread(["a"], {"a": 60})
    assert found[2:] == (0, 60) and found[1].rows(0, 60) is None
