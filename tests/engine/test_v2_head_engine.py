"""A head that rests: what it reads after a rest is what it would have read without one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from engines import ALWAYS, build, call, close, generate
from heads import random_head

pytestmark = pytest.mark.engine


def _forget(worker: Any) -> None:
    """Every few steps: draft, lose the head's whole KV, read it again from the kept states, and draft again."""
    from rollspec.engine.vllm.v2.install import bridge

    head = bridge(worker).head
    propose, speculator = head.drafter.propose, head.drafter.speculator
    layers = worker.vllm_config.compilation_config.static_forward_context
    worker.found = []
    steps = 0

    def twice(passes: int, batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        slots = speculator.block_tables.slot_mappings.clone()  # of the step; the later passes of a head write over them
        tokens, probs = propose(passes, batch, *args, **kwargs)
        if not passes or steps % 2:
            return tokens, probs
        before = tokens[:, :passes].clone(), probs[:, :passes].clone()
        for name in speculator.draft_attn_layer_names:
            cache = layers[name].kv_cache
            for tensor in cache if isinstance(cache, (list, tuple)) else [cache]:
                tensor.zero_()
        for entry in head.drafter_kv._entries.values():
            entry.done = entry.base
        first = batch.positions[batch.query_start_loc[: batch.num_reqs].long()].tolist()
        starts = dict(zip(batch.req_ids, first, strict=True))
        read = functools.partial(head.drafter.read, batch)
        assert head.repair(list(batch.req_ids), starts, read, head.drafter.max_num_reqs)
        speculator.block_tables.slot_mappings.copy_(slots)
        tokens, probs = propose(passes, batch, *args, **kwargs)
        same = bool((tokens[:, :passes] == before[0]).all())
        worker.found.append((same, float((probs[:, :passes] - before[1]).abs().max()), batch.num_reqs))
        return tokens, probs

    head.drafter.propose = twice


def _found(worker: Any) -> list[tuple[bool, float, int]]:
    return list(worker.found)


@pytest.mark.parametrize("drafter", ["eagle3", "draft_model"])
def test_what_is_read_late_is_what_was_missed(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path, drafter: str
) -> None:
    folder = random_head(tmp_path / "head", model, scale=0.3) if drafter == "eagle3" else model
    config = {"proposal.drafters": [drafter], "proposal.head.model": str(folder), **ALWAYS}
    llm = build(model, config)
    try:
        llm.collective_rpc(_forget)
        assert generate(llm, prompts) == plain["greedy"]
        found = llm.collective_rpc(_found)[0]
        assert len(found) > 5 and max(n for *_, n in found) > 1
        assert all(same and off < 1e-4 for same, off, _ in found), found
        assert not call(llm, "stats")["faults"]
    finally:
        close(llm)
