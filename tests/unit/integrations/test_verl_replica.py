"""A server's calls into its engine: bounded, never raising, and given up after a few that had no answer."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from vllm_like import like, plays

from rollspec.engine import calls

pytest.importorskip("verl")


def server(answer: Any, *, on: bool = True) -> Any:
    from rollspec_verl.replica import ServerCalls

    asked: list[Any] = []

    async def collective_rpc(method: str, *, args: tuple[Any, ...]) -> Any:
        asked.append(args)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            await asyncio.sleep(60)
        return answer

    out: Any = ServerCalls()
    out.replica_rank, out.node_rank, out.rollspec_on, out.calls = 0, 0, on, asked
    resources = like("vllm.v1.engine.core_client:BackgroundResources", engine_dead=False)
    core = like("vllm.v1.engine.core_client:AsyncMPClient", resources=resources)
    out.engine = like(
        "vllm.v1.engine.async_llm:AsyncLLM", collective_rpc=collective_rpc, errored=False, engine_core=core
    )
    return out


def ask(s: Any, op: str = "stats") -> dict[str, Any]:
    return asyncio.run(s.rollspec_call(op, {}))  # type: ignore[no-any-return]


def test_the_rank_that_drafts_answers() -> None:
    assert ask(server([{}, {"steps": 3}])) == {"steps": 3}
    assert ask(server([{}, {}])) == {}


def test_off_and_other_nodes_are_not_asked() -> None:
    off, other = server([{"a": 1}], on=False), server([{"a": 1}])
    other.node_rank = 1
    assert ask(off) == ask(other) == {}
    assert off.calls == other.calls == []


@pytest.mark.parametrize("wait", [False, True])
def test_verls_word_for_a_pause_is_vllms(wait: bool) -> None:
    from rollspec_verl.replica import accept_wait_flag

    got: list[Any] = []

    @plays("vllm.v1.engine.async_llm:AsyncLLM")
    class Engine:
        async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
            got.append((mode, clear_cache))

    class Old:
        async def pause_generation(self, *, wait_for_inflight_requests: bool = False, clear_cache: bool = True) -> None:
            got.append(wait_for_inflight_requests)

    for engine in (Engine(), Old()):
        for _ in range(2):
            accept_wait_flag(engine)
        asyncio.run(engine.pause_generation(wait_for_inflight_requests=wait, clear_cache=False))
    asyncio.run(Engine().pause_generation(mode="keep"))
    assert got == [("wait" if wait else "abort", False), wait, ("keep", True)]


def test_training_yields_where_a_server_trains() -> None:
    s = server([{"updating": True}])
    asyncio.run(s.rollspec_yield())
    assert s.calls == [], "it does not train"
    s.rollspec_trains = True
    asyncio.run(s.rollspec_yield())
    assert s.calls == [("updating", {"on": True})]


def test_a_stuck_engine_costs_a_few_bounded_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calls, "CALL_SECONDS", 0.01)
    s = server(None)
    with caplog.at_level(logging.ERROR, "rollspec"):
        assert all("error" in ask(s) for _ in range(calls.MOST_FAILURES + 3))
    assert len(s.calls) == len(caplog.records) == calls.MOST_FAILURES
    assert "the engine of replica 0, which is not asked again, does" in caplog.records[-1].message


def test_a_busy_engine_that_answers_again_is_asked_again() -> None:
    s = server([{"steps": 1}])
    s.rollspec_failures = calls.MOST_FAILURES - 1
    assert ask(s) == {"steps": 1} and s.rollspec_failures == 0


def test_a_dead_engine_is_not_asked_and_is_said_to_be_dead(capsys: pytest.CaptureFixture[str]) -> None:
    s = server([{"steps": 1}])
    assert asyncio.run(s.rollspec_lost()) == ""
    s.engine.errored = s.engine.engine_core.resources.engine_dead = True
    assert "error" in ask(s) and s.calls == []
    assert "process has ended" in asyncio.run(s.rollspec_lost())
    asyncio.run(s._rollspec_watch())
    assert capsys.readouterr().out.count("replica 0 died") == 1


def test_the_engines_shared_memory_is_removed_by_name_and_nothing_else(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import multiprocessing
    from multiprocessing import shared_memory

    from rollspec_verl import replica

    mine = shared_memory.SharedMemory(create=True, size=4096)
    child = multiprocessing.get_context("fork").Process(target=_sleep, daemon=True)
    child.start()
    try:
        s = server([{}])
        s.rollspec_segments = frozenset(replica.segments_below())
        assert mine.name in s.rollspec_segments
        monkeypatch.setattr(replica, "SHM", tmp_path)
        (tmp_path / mine.name).touch()
        (tmp_path / "psm_other").touch()
        for _ in range(2):
            asyncio.run(s.rollspec_tidy())
            assert [p.name for p in tmp_path.iterdir()] == ["psm_other"]
    finally:
        child.kill()
        child.join()
        mine.close()
        mine.unlink()


def _sleep() -> None:
    import time

    time.sleep(60)
