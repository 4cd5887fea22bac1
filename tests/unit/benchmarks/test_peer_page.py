"""What `rollspec bench peers` says of its turns: who wins, the page, the figures."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import peer_page, peer_table
from benchmarks.peer_arms import PEERS

CLEAN = {"git": "c" * 40, "dirty": False, "load": [0], "time": "2026-01-01T00:00:00Z", "cpu": "x", "cores": 2,
         "versions": {"vllm": "0"}}  # fmt: skip


def turn(seed: int, workload: str, **seconds: float) -> dict[str, Any]:
    one = {"tokens": 100, "accepted": 20, "drafted": 40}
    works = {"epochs": 3, "shift": 8}.get(workload, 1)
    slow = 1.0 + seed  # the machine's mood, which pairs share
    arms = {n.replace("_K", " K="): [{**one, "seconds": slow * s}] * works for n, s in seconds.items()}
    return {"seed": seed, "workload": workload, "arms": arms}


TURNS = [
    t
    for seed in range(6)
    for t in (
        turn(seed, "epochs", none=4.0, rollspec=2.0, das=2.2, spec_rl=1.0),
        turn(seed, "full", none=4.0, rollspec=4.0, das=5.0, ngram_K2=3.0),
    )
]


def test_the_summary_says_who_wins_and_leaves_lossy_arms_out_of_the_best() -> None:
    found = peer_table.summarise(TURNS)
    epochs, full = (found["workloads"][w] for w in ("epochs", "full"))
    assert epochs["arms"]["das"]["speedup"]["median"] == pytest.approx(4 / 2.2)
    assert epochs["arms"]["das"]["speedup"]["n"] == 12 and full["arms"]["das"]["speedup"]["n"] == 6
    assert (epochs["best"], epochs["faster"]) == ("das", ["spec_rl"])
    assert (full["best"], full["faster"]) == ("ngram K=2", ["ngram K=2"])
    overall = found["overall"]  # ngram and spec_rl did not do every workload
    assert overall["best"] == "das" and overall["best_over_ours"] == pytest.approx((2 / 2.2 * 4 / 5) ** 0.5)
    assert overall["ours"] == pytest.approx(2**0.5)
    said = " ".join(peer_table.sentences(found))
    assert "Arms whose whole interval is more than 2 % above it: ngram K=2" in said
    assert peer_table.table("epochs", epochs).row_count == 4


def result() -> dict[str, Any]:
    distance = [{"epoch": 1, "measured": 0.123, "error": 0.004, "theory": 0.12, "positions": 900}]
    return {
        "provenance": CLEAN, "policy": {"model": "/x/smol", "made_by": "test"}, "idle_seconds": 4.0,
        "summary": peer_table.summarise(TURNS), "failed": {"tlt": "it ended"}, "left": {"suffix": "V2 has none"},
        "distance": {"spec_rl": distance}, "overlapping": {"none": True, "ngram K=2": False},
    }  # fmt: skip


def test_the_page_is_a_stub_until_there_is_a_result() -> None:
    assert "no result yet" in peer_page.render({})
    text = peer_page.render({"peers": result()})
    assert "no result yet" not in text and "`benchmarks/results/peers.json`" in text
    assert "| **rollspec** | **2.00x** |" in text and "| spec_rl (lossy) | 4.00x |" in text
    assert "(img/peers-epochs.svg)" in text and "(img/peers-full.svg)" in text
    assert "- Steps did not overlap in `ngram K=2`.\n" in text
    assert "- tlt: failed: it ended" in text and "- suffix: V2 has none" in text
    assert "0.123 ± 0.004" in text and "repeat those of the epoch" not in text
    still = result() | {"distance": {"spec_rl": [{**result()["distance"]["spec_rl"][0], "theory": 0.0}]}}
    assert "repeat those of the epoch" in peer_page.render({"peers": still})
    assert all(f"| {name} |" in text for name in PEERS)


def test_the_figure_has_every_arm_and_is_always_the_same() -> None:
    summary = peer_table.summarise(TURNS)["workloads"]["full"]
    drawn = peer_page.figure("full", summary)
    assert drawn == peer_page.figure("full", summary) and drawn.startswith("<svg")
    assert all(f">{name}<" in drawn for name in ("rollspec", "das", "ngram K=2")) and ">none<" not in drawn
