"""Several heads in a real vLLM engine: each has its own KV cache, the most confident drafts, no token changes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engines import ALWAYS, bridge, build, call, close, generate
from heads import random_head
from models import moved
from noted import note_heads, noted

pytestmark = pytest.mark.engine

HEADS = {**ALWAYS, "proposal.drafters": ["eagle3"], "proposal.head.k_max": 3}
TIGHT = {"max_num_batched_tokens": 160, "enable_chunked_prefill": True, "num_gpu_blocks_override": 24}


def _spoil(worker: Any) -> None:
    """What a deep sleep leaves of the weights, as far as this can be had without a GPU."""
    import torch

    from rollspec.engine.vllm.v2.install import bridge

    found = bridge(worker).head.specialists
    with torch.no_grad():
        for t in found._own(found.models[1]).values():
            t.data.fill_(77)
    found.stale = True


def _whole(worker: Any) -> bool:
    """Whether specialists hold what they were loaded with."""
    from rollspec.engine.vllm.v2.install import bridge

    found = bridge(worker).head.specialists
    own = found._own(found.models[1])
    return own.keys() == found._kept[1].keys() and all(bool((t == found._kept[1][n]).all()) for n, t in own.items())


@pytest.mark.slow  # `test_the_most_confident_head_drafts_and_comes_back_after_a_sleep` is its shorter sibling
def test_the_same_head_twice_is_one_head(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    """Were a cache shared or a head read twice, the drafts of the runs would differ; so they would were a specialist's
    KV not what it is alone, which the third run shows: its general head knows nothing and is never chosen.
    """
    head, same = random_head(tmp_path / "head", model), {"same": str(random_head(tmp_path / "same", model))}
    unsure = random_head(tmp_path / "unsure", model, scale=0.0)
    found = []
    for general, further in ((head, {}), (head, same), (unsure, same)):
        options = {"proposal.head.model": str(general), "proposal.head.specialists": further}
        llm = build(model, {**HEADS, **options})
        try:
            assert generate(llm, prompts) == plain["greedy"]
            stats = call(llm, "stats")
            assert not stats["faults"], stats["faults"]
            found.append((stats["drafted"], stats["accepted"]))
            if general is unsure:
                heads = call(llm, "info")["drafter"]["specialists"]
                assert not heads["general"]["drafts"] and heads["same"]["drafts"]
        finally:
            close(llm)
    assert found[0] == found[1] == found[2] and found[0][1] > 0


def test_the_most_confident_head_drafts_and_comes_back_after_a_sleep(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Preempted, with prompts in chunks; and heads that cannot run here are left out."""
    loud = random_head(tmp_path / "loud", model, seed=1, scale=0.3)  # larger logits: surer, and no better
    misfit = random_head(tmp_path / "misfit", model)
    config = (misfit / "config.json").read_text()
    (misfit / "config.json").write_text(config.replace('"draft_vocab_size": ', '"draft_vocab_size": 1'))
    options = {
        **HEADS,
        "proposal.head.model": str(random_head(tmp_path / "head", model)),
        "proposal.head.specialists": {
            "loud": str(loud), "misfit": str(misfit), "gone": str(tmp_path / "gone"), "general": str(loud),
        },
    }  # fmt: skip
    llm = build(model, options, **TIGHT)
    try:
        for text in ("'misfit' is left out", "'gone' is left out", "'general' is left out"):
            assert text in caplog.text
        assert generate(llm, prompts) == plain["greedy"]
        heads = call(llm, "info")["drafter"]["specialists"]
        assert list(heads) == ["general", "loud"]
        assert heads["loud"]["drafts"] > heads["general"]["drafts"]
        assert sum(h["accepted"] for h in heads.values()) > 0 and all(
            h["known"] >= h["accepted"] for h in heads.values()
        )
        llm.collective_rpc(_spoil)
        assert generate(llm, prompts) == plain["greedy"]
        assert llm.collective_rpc(_whole) == [True]
        stats = call(llm, "stats")
        assert not stats["faults"] and list(call(llm, "info")["drafter"]["specialists"]) == ["general", "loud"]
    finally:
        close(llm)


def test_each_class_of_requests_has_a_draft_model_of_its_own(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    """OSD's routing. The target itself drafts for one class and is hardly ever wrong, a spoiled copy for the others."""
    options = {
        "preset": "osd",
        "drafter.mode": "off",
        "proposal.drafters": ["draft_model"],
        "proposal.head.model": str(moved(model, tmp_path / "other", 3.0)),
        "proposal.head.specialists": {"sums": str(model)},
    }
    llm = build(model, options, **TIGHT)
    try:
        llm.collective_rpc(note_heads)

        def own(i: int) -> dict[str, Any]:
            return {"extra_args": {"rollspec": {"domain": ("sums", "talk", "general")[i % 3]}}}

        assert generate(llm, prompts, own=own) == plain["greedy"]
        stats, models = call(llm, "stats"), call(llm, "info")["drafter"]["specialists"]
        assert not stats["faults"] and set(stats["plays"]) == {"draft_model:5"}
        rates = {name: tally["accepted"] / tally["known"] for name, tally in models.items()}
        assert rates["sums"] > 0.95 and rates["general"] < 0.5, models
        assert models["general"]["drafts"] > models["sums"]["drafts"], "two classes of three have no model of their own"
        routed: Counter[str] = Counter()
        for request, proposed, draft in llm.collective_rpc(noted)[0]:
            head = "general" if int(request.split("-")[0]) % 3 else "sums"
            said = {name: tokens[: len(draft)] for name, (tokens, _) in proposed.items()}
            assert draft == said[head], (request, said, draft)
            routed[head] += list(said.values()).count(draft) < len(said)
        assert len(routed) == 2 and min(routed.values()) > 20, routed
    finally:
        close(llm)


def test_specialists_without_a_head_are_left_out(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = random_head(tmp_path / "head", model)
    llm = build(model, {"preset": "default", "proposal.head.specialists": {"code": str(head)}})
    try:
        assert "the specialists are left out because proposal.drafters has no head" in caplog.text
        assert generate(llm, prompts) == plain["greedy"] and call(llm, "info")["state"] == "suffix"
    finally:
        close(llm)


def _fc(worker: Any) -> list[float]:
    return [float(m.model.fc.weight.sum()) for m in bridge(worker).head.specialists.models]


def test_heads_are_loaded_where_the_targets_weights_are_to_be_sent(model: Path, tmp_path: Path) -> None:
    """With `load_format: dummy`, which trainers ask for."""
    from safetensors.torch import load_file

    heads = [random_head(tmp_path / name, model, seed=i) for i, name in enumerate(("head", "code"))]
    options = {
        **HEADS,
        "proposal.head.model": str(heads[0]),
        "proposal.head.specialists": {"code": str(heads[1])},
    }
    llm = build(model, options, load_format="dummy")
    try:
        wanted = [float(load_file(h / "model.safetensors")["fc.weight"].sum()) for h in heads]
        assert llm.collective_rpc(_fc) == [pytest.approx(wanted, rel=1e-3)]
    finally:
        close(llm)
