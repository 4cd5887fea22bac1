"""What `rollspec bench peers` says of its turns: who wins, the page, the figures."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import peer_bias, peer_page, peer_table
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
    found = peer_table.summarise(TURNS, {})
    epochs, full = (found["workloads"][w] for w in ("epochs", "full"))
    assert epochs["arms"]["das"]["speedup"]["median"] == pytest.approx(4 / 2.2)
    assert epochs["arms"]["das"]["speedup"]["n"] == 12 and full["arms"]["das"]["speedup"]["n"] == 6
    assert (epochs["best"], epochs["faster"]) == ("das", ["spec_rl"])
    assert (full["best"], full["faster"]) == ("ngram K=2", ["ngram K=2"])
    slow = [turn(n, "full", none=4.0, rollspec=4.4) for n in range(2)]
    assert peer_table.summarise(slow, {})["workloads"]["full"]["faster"] == ["none"]
    overall = found["overall"]  # ngram and spec_rl did not do every workload
    assert overall["best"] == "das" and overall["best_over_ours"] == pytest.approx((2 / 2.2 * 4 / 5) ** 0.5)
    assert overall["ours"] == pytest.approx(2**0.5)
    said = " ".join(peer_table.sentences(found))
    assert "Arms whose whole interval is more than 2 % above it: `ngram K=2`" in said
    assert peer_table.table("epochs", epochs).row_count == 4


def test_what_perfect_drafts_would_give() -> None:
    """They save steps, of each what does not depend on its tokens; not what the tokens and the prompts take."""
    assert peer_table.least_steps([1, 17 + 1, 17 + 2], 4) == 3 and peer_table.least_steps([18, 1, 18], 2) == 3
    t = turn(0, "epochs", none=4.0, rollspec=2.0)
    for run in t["arms"]["none"]:
        run["steps"] = 23
    lengths = {"epochs": {"0": [[35] * 32] * 3}}
    assert peer_table.summarise([t], lengths)["workloads"]["epochs"]["perfect"] is None
    for run in t["arms"]["rollspec"]:
        run["cost"] = {"c0": 0.1, "c1": 0.01, "fitted": True}
    s = peer_table.summarise([t], lengths)
    assert s["workloads"]["epochs"]["perfect"] == pytest.approx(4.0 / (4.0 - 0.1 * (23 - 3)))
    assert "accepted, and cost nothing: 2.00x" in peer_table.sentences(s)[0]


def result() -> dict[str, Any]:
    distance = [{"epoch": 1, "measured": 0.123, "error": 0.004, "theory": 0.12, "positions": 900}]
    return {
        "provenance": CLEAN, "policy": {"model": "/x/smol", "made_by": "test"}, "idle_seconds": 4.0,
        "summary": peer_table.summarise(TURNS, {}), "failed": {"tlt": "it ended"}, "left": {"suffix": "V2 has none"},
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
    summary = peer_table.summarise(TURNS, {})["workloads"]["full"]
    drawn = peer_page.figure("full", summary)
    assert drawn == peer_page.figure("full", summary) and drawn.startswith("<svg")
    assert all(f">{name}<" in drawn for name in ("none", "rollspec", "das", "ngram K=2"))


def test_the_figure_is_of_ratios_that_all_heats_have() -> None:
    """Over rollspec's default; no speculation has no such ratio of its own, so it is the default's, inverted."""
    arms = peer_table.ratios(peer_table.summarise(TURNS, {})["workloads"]["epochs"]["arms"])
    assert arms["das"]["median"] == pytest.approx(2.0 / 2.2) and arms["rollspec"]["median"] == 1.0
    assert arms["none"]["median"] == pytest.approx(0.5)
    drawn = peer_page.figure("epochs", peer_table.summarise(TURNS, {})["workloads"]["epochs"])
    assert "times as fast as rollspec" in drawn and "as no speculation" not in drawn


def test_goals_and_their_outcomes() -> None:
    shift = {"none": 4.0, "rollspec": 2.0, "eagle3_K2": 2.2, "eagle3_K4": 2.4, "rollspec+trainer": 2.0}
    turns = [*TURNS, *(turn(seed, "shift", **shift) for seed in range(2))]
    small = result() | {"summary": peer_table.summarise(turns, {}), "turns": turns}
    text = peer_page.render({"peers": small})
    assert "| *shift*: at least 1.15x of the frozen head, `eagle3 K=2` | 1.100x (1.100-1.100) | 2 | missed, of" in text
    assert "`rollspec+trainer` at least 1.15x of the frozen head, `eagle3 K=2` | 1.100x (1.100-1.100) | 2 |" in text
    assert "| *epochs*: at least 1.5x of no speculation | 2.000x (2.000-2.000) | 12 | reached |" in text
    assert "| `ngram K=2` in *full* | 2 to 12 | missed |" in text  # `spec_rl` is lossy
    assert "the null control was not run at that size" in text
    assert "was not run at that size" not in peer_page.render({"peers": small}, ("4", "64"))
    assert "at least 1.15x" not in peer_page.render({"peers-demo": small})


def test_a_file_of_calls_with_other_cores_says_so() -> None:
    trained = result() | {
        "summary": peer_table.summarise([*TURNS, turn(0, "fresh", none=4.0, rollspec=2.0, tlt=2.5)], {})
    }
    assert "different core settings" not in peer_page.render({"peers": trained})  # an earlier result has no cores
    for trainer_on, says in ((None, True), ("1", False)):
        made = CLEAN | {"engines_on": [0, 1], "trainer_on": trainer_on}
        text = peer_page.render({"peers": trained | {"provenance": made}})
        assert ("ran under different core settings" in text) is says and ("although `tlt` trained" in text) is says


def test_a_page_may_have_any_arm_and_knows_which_train() -> None:
    trained = {name for name, peer in PEERS.items() if not peer.refused and peer_page._trains(name)}
    assert trained == {
        "rollspec+training", "rollspec+trainer", "rollspec+leap", "rollspec+pays", "osd+model", "tlt", "respec",
        "aurora", "osd",
    }  # fmt: skip


def test_arms_that_ran_twice_stand_beside_each_other() -> None:
    text = peer_page.render({"peers-demo": result(), "peers-rules": result()})
    assert "Over rollspec's default in *epochs* and *full*:" in text
    assert "| das | 0.91x / 0.80x | 0.91x / 0.80x |" in text
    assert "ran [again](#the-demos-policy-four-arms-again)" in text
    again = (
        text.partition("Over rollspec's default in *epochs* and *full*:")[2].partition("\n\n|")[2].partition("\n\n")[0]
    )
    assert "| das |" in again and "| ngram K=2 |" not in again  # in one workload only


def test_a_bias_is_found_in_all_seeds_together() -> None:
    one = {"epoch": 1, "tokens": 900, "ruled": 500, "positions": 400, "measured": 0.02, "error": 0.01, "theory": 0.02,
           "largest": 0.3, "bias": 0.5}  # fmt: skip
    twice = peer_bias.joined([one], [one])
    assert [r["epoch"] for r in twice] == [1] and twice[0]["positions"] == 800
    assert twice[0]["measured"] == pytest.approx(0.02) and twice[0]["error"] == pytest.approx(0.01 / 2**0.5)
    assert twice[0]["z"] == pytest.approx(peer_bias.overall(twice)) == pytest.approx(2 * 2**0.5)
    assert [r["epoch"] for r in peer_bias.joined([one], [{**one, "epoch": 2}])] == [1, 2]
    here = peer_bias.Ruled([[1]], [[2, 3]], [2])
    assert here.and_(here) == peer_bias.Ruled([[1], [1]], [[2, 3]] * 2, [2, 2])
