"""`rollspec bench peers` without an engine: its arms, what fits in the minutes, going on, the summary and the page."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import (
    options,
    peer_arms,
    peer_load,
    peer_plan,
    peer_store,
    peer_table,
    peers,
)
from benchmarks.drift import Drift
from benchmarks.engines import Arm, Work
from benchmarks.peer_arms import PEERS, Chosen
from benchmarks.peer_bias import Ruled
from benchmarks.peer_plan import Costs, Heat
from rollspec.config import RollspecConfig
from rollspec.errors import RollspecError

HEAD = Path("/heads/one")


# ---- lists of options -----------------------------------------------------------------------------------------------


def test_lists_are_checked_and_the_sentence_names_option_and_value() -> None:
    assert options.numbers("--seeds", "0,2") == (0, 2)
    assert options.names("--arms", "b; a;b", ("a", "b"), ";") == ("b", "a")
    assert options.names("--arms", None, ("a", "b")) == ("a", "b")
    for wrong in ("x", "1,", "99"):
        with pytest.raises(RollspecError, match=f"--batches '{wrong}'"):
            options.numbers("--batches", wrong, 1, 64)
    with pytest.raises(RollspecError, match=r"--arms has 'c'; choose from a, b"):
        options.names("--arms", "a,c", ("a", "b"))


# ---- arms -----------------------------------------------------------------------------------------------------------


def test_every_arm_runs_or_says_why_not() -> None:
    bare, one, two = (peer_arms.chosen(None, [HEAD] * n) for n in range(3))
    for found in (bare, one, two):
        assert set(found.arms) | set(found.left) == set(PEERS)
        assert all(a.rollspec is None or isinstance(a.rollspec, dict) for a in found.arms.values())
    assert bare.left["rollspec+head"] == bare.left["eagle3 K=4"] == "needs --head" and "tlt" in bare.arms
    assert {"rollspec+head", "rollspec+trainer", "eagle3 K=1"} <= set(one.arms)
    assert "2 times" in one.left["taps"] and "taps" in two.arms
    assert bare.left.keys() >= one.left.keys() >= two.left.keys()


def test_an_arm_of_the_first_runner_says_which_package_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_arms, "find_spec", lambda name: None)
    assert "pip install arctic-inference" in peer_arms.chosen("suffix K=8", ()).left["suffix K=8"]
    monkeypatch.setattr(peer_arms, "find_spec", lambda name: object())
    found = peer_arms.chosen("suffix", ()).arms
    arm = found["suffix K=8"]
    assert {"suffix K=4", "suffix K=16"} <= found.keys() and arm.environment == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert arm.speculative == {"method": "suffix", "num_speculative_tokens": 8} and not found["none"].environment


def test_a_language_model_goes_to_the_arm_that_drafts_with_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    found = peer_arms.chosen(None, [tmp_path, HEAD])
    head = found.arms["osd+model"].rollspec["proposal"]["head"]  # type: ignore[index, call-overload]
    assert head["model"] == str(tmp_path)
    assert "taps" in found.left, "it is no head"
    assert "small language model" in peer_arms.chosen(None, [HEAD]).left["osd+model"]


def test_a_head_goes_to_the_arms_that_take_one_and_to_no_other() -> None:
    found = peer_arms.chosen(None, [HEAD, Path("/heads/two")]).arms
    for name, arm in found.items():
        shown = json.dumps([arm.rollspec, arm.speculative])
        assert (str(HEAD) in shown) == (PEERS[name].takes or PEERS[name].heads > 0), name
    assert found["taps"].rollspec["proposal"]["head"]["specialists"] == {"head2": "/heads/two"}  # type: ignore[index, call-overload]


def test_published_policies_are_not_overruled() -> None:
    found = peer_arms.chosen("exp3spec,eesd,svip,smartspec", []).arms
    plays = {n: RollspecConfig.from_dict(a.rollspec) for n, a in found.items() if isinstance(a.rollspec, dict)}
    rules = {n: (p.tuning.strategy, p.proposal.budget.rule) for n, p in plays.items() if n != "rollspec"}
    assert rules == {n: ("static", n) for n in ("exp3spec", "eesd", "svip")} | {"smartspec": ("smartspec", "fixed")}
    assert not any(p.tuning.guard.enabled for n, p in plays.items() if n != "rollspec")


def test_what_is_not_there_is_listed_and_unknown_arms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "tomorrow", peer_arms.Peer("", {"preset": "tomorrow"}))
    monkeypatch.setitem(PEERS, "elsewhere", peer_arms.Peer("", {"preset": "default", "proposal.drafters": ["x"]}))
    found = peer_arms.chosen("tomorrow,elsewhere", [])
    assert set(found.arms) == {"none", "rollspec"}
    assert found.left["tomorrow"].startswith("not there (") and "'x'" in found.left["elsewhere"]
    with pytest.raises(RollspecError, match="--arms has 'yesterday'"):
        peer_arms.chosen("none,yesterday", [])
    assert [a for a in peer_arms.asked("ngram") if a.startswith("ngram")] == ["ngram K=2", "ngram K=4", "ngram K=8"]


# ---- load -----------------------------------------------------------------------------------------------------------


def load(workloads: tuple[str, ...] = ("epochs", "shift"), topics: int = 2, each: int = 600) -> peer_load.Load:
    prompts = [[[t, i % 250, i // 250, 7] for i in range(each)] for t in range(topics)]
    return peer_load.Load(prompts, ["", "v1", "v2"], workloads)


def test_workloads_are_what_they_are_called() -> None:
    found = load()
    epochs, fresh, shift, full = (found.works(w, 1) for w in ("epochs", "fresh", "shift", "full"))
    assert [w.weights for w in epochs] == ["", "v1", "v2"] and epochs[0].prompts == epochs[2].prompts
    assert len({tuple(p) for p in epochs[0].prompts}) * 8 == len(epochs[0].prompts)
    assert [{p[0] for p in w.prompts} for w in shift] == [{0}] * 4 + [{1}] * 4
    assert [w.batch for w in shift] == [1, 2, 4, 8, 1, 2, 4, 8]
    assert full[0].lengths == [48] * 128 and full[0].batch == 64 and fresh[0].lengths is None
    versions = [w.version for name in peer_load.WORKLOADS for w in found.works(name, 1)]
    assert versions == sorted(set(versions)) and versions[0] > max(w.version for w in found.works("full", 0))


def test_no_two_turns_share_a_prompt() -> None:
    found = load(tuple(peer_load.WORKLOADS))
    found.check(3)
    seen: set[tuple[int, ...]] = set()
    for seed in range(3):
        for name in peer_load.WORKLOADS:
            mine = {tuple(p) for w in found.works(name, seed) for p in w.prompts}
            assert not mine & seen
            seen |= mine


def test_a_workload_that_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RollspecError, match=r"shift needs prompts of two topics.*--prompts"):
        load(topics=1).check(1)
    with pytest.raises(RollspecError, match=r"--workloads epochs needs 400 different prompts for --seeds 100"):
        load(("epochs",)).check(100)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 163}')
    with pytest.raises(RollspecError, match=r"has a context of 163 tokens, and the longest prompt \(4\).* needs 164"):
        load().check(1, str(tmp_path))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 164}')
    load().check(1, str(tmp_path))


def test_a_layer_that_the_target_has_not_is_no_arm(tmp_path: Path) -> None:
    assert "num_nextn_predict_layers" in peer_arms.chosen("mtp", []).left["mtp"]
    (tmp_path / "config.json").write_text('{"num_nextn_predict_layers": 1}')
    assert peer_arms.chosen("mtp", [], tmp_path).arms["mtp"].rollspec["proposal"]["drafters"] == ["mtp"]  # type: ignore[index]


def test_the_best_length_of_a_sweep_is_named() -> None:
    def arm(speed: float | None) -> dict[str, Any]:
        speedup = {"median": 1.2, "low": 1.1, "high": 1.3, "n": 6}
        return {"over_ours": None if speed is None else {"median": speed}, "speedup": speedup}

    arms = {
        "none": arm(None),
        "rollspec": arm(None),
        "ngram K=2": arm(0.7),
        "ngram K=4": arm(0.8),
        "eagle3 K=2": arm(1),
    }
    assert peer_table.swept(arms) == {"ngram": ("ngram K=4", ["ngram K=2", "ngram K=4"])}


# ---- plan -----------------------------------------------------------------------------------------------------------

ARMS = ("none", "rollspec", *(f"a{i}" for i in range(6)))
WANTED = dict.fromkeys(ARMS, ("epochs", "full"))
COSTS = Costs(8.0, 2.0, {"epochs": 8.0, "full": 2.0}, {"epochs": 8.0, "full": 2.0})


def planned(minutes: float, done: dict[str, Any] | None = None, arms: tuple[str, ...] = ARMS) -> peer_plan.Plan:
    return peer_plan.plan(arms, WANTED, 6, 60 * minutes, COSTS, done or {}, alive=6)


def test_all_of_it_where_there_is_time() -> None:
    found = planned(60)
    assert [tuple(h.arms) for h in found.heats] == [("a0", "a1", "a2", "a3"), ("a4", "a5")]
    assert all(len(h.cells) == 12 for h in found.heats) and not found.left and found.seconds < 3600
    assert "2 heats" in found.text() and "seeds 0, 1, 2, 3, 4, 5" in found.text()


def test_a_trainer_takes_the_memory_of_an_engine() -> None:
    found = peer_plan.plan(ARMS, WANTED, 1, 3600, COSTS, {}, training={"a0": 4.0, "a2": 4.0}, alive=5)
    assert [tuple(h.arms) for h in found.heats] == [("a0", "a1"), ("a2", "a3"), ("a4", "a5")]


def test_fewer_pairs_then_fewer_arms_then_one_sentence() -> None:
    def pairs(found: peer_plan.Plan) -> int:
        return max(s for h in found.heats for s, _ in h.cells) + 1

    whole = planned(60).seconds / 60
    some = planned(0.7 * whole)
    assert 3 <= pairs(some) < 6 and not some.left and some.seconds <= 0.7 * whole * 60
    few = planned(0.35 * whole)
    assert pairs(few) == 3 and list(few.left) and "a5" in few.left and "a0" not in few.left
    assert few.seconds <= 0.35 * whole * 60
    one = planned(1.5)
    assert pairs(one) < 3 and one.heats
    with pytest.raises(RollspecError, match=r"--minutes 0\.2 is too small: one pair needs about"):
        planned(0.2)


def test_what_is_done_is_not_planned_again() -> None:
    every = {(s, w) for s in range(6) for w in ("epochs", "full")}
    done: dict[str, Any] = {a: every for a in ("none", "rollspec", "a0", "a1", "a2")} | {"a3": every - {(5, "full")}}
    found = planned(60, done)
    every_other = tuple((s, w) for s in range(6) for w in ("epochs", "full"))
    assert found.heats == [Heat({"a3": ((5, "full"),), "a4": every_other, "a5": every_other})]
    assert set(found.heats[0].cells) == every and found.heats[0].turns == 12 * 2 + 1 + 12 + 12
    assert planned(1, dict.fromkeys(ARMS, every)).heats == []
    # The default has a heat of its own where it alone is missing.
    assert planned(60, {}, ("none", "rollspec")).heats[0].arms == {}


# ---- a run, with fakes ----------------------------------------------------------------------------------------------

CLEAN = {"git": "c" * 40, "dirty": False, "load": [0], "time": "2026-01-01T00:00:00Z", "cpu": "x", "cores": 2,
         "engines_on": [0], "trainer_on": "1", "OMP_NUM_THREADS": "1", "versions": {"vllm": "0"}}  # fmt: skip
PACE = {"none": 2.0, "rollspec": 1.0, "das": 1.6, "seer": 1.5, "smartspec": 1.8, "ngram K=2": 2.5, "spec_rl": 0.5}


class Fake:
    """An engine whose arm decides how long a token takes."""

    def __init__(self, arm: Arm, log: list[tuple[str, Work]], broken: str) -> None:
        self.arm, self.log, self.broken, self.running, self.ended = arm, log, broken, True, False
        self.overlapping = not arm.speculative

    def run(self, work: Work) -> dict[str, Any]:
        assert self.running and not self.ended
        if self.arm.name == self.broken and work.version > 1000:
            raise RuntimeError("it ended")
        self.log.append((self.arm.name, work))
        tokens = sum(work.lengths or [5 + len(p) for p in work.prompts])
        out = {"seconds": PACE[self.arm.name] * tokens, "tokens": tokens, "steps": tokens, "accepted": 0, "drafted": 0}
        if self.arm.name == "spec_rl":
            out |= {"texts": [[1] * n for n in work.lengths or ()], "ruled": [1 for _ in work.prompts]}
        return out if work.lengths else out | {"lengths": [5 + len(p) for p in work.prompts]}

    def suspend(self) -> None:
        self.running = False

    def resume(self) -> None:
        self.running = True

    def close(self) -> None:
        self.running, self.ended = False, True


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(peers, "provenance", lambda: dict(CLEAN))
    monkeypatch.setattr(peers, "room", lambda: 6)
    log: list[tuple[str, Work]] = []

    def peer(arms: str = "das", broken: str = "", later: str = "", minutes: float = 1e6, **more: Any) -> peers.Peers:
        def engine(arm: Arm) -> Fake:
            if arm.name == broken:
                raise RuntimeError("it ended")
            return Fake(arm, log, later)

        policy = Drift("m", "", ["", "v1", "v2"], "test")
        chosen = peer_arms.chosen(arms, [])
        run = peers.Peers(policy, load(), Chosen(chosen.arms, chosen.left), 2, minutes, {"n": 0}, tmp_path / "p.json")
        run.engine = engine
        for name, value in more.items():
            setattr(run, name, value)
        return run

    return SimpleNamespace(peer=peer, log=log, out=tmp_path / "p.json")


def test_every_arm_does_the_same_tokens_in_turns(made: Any) -> None:
    found = json.loads(made.peer().run().read_text())
    turns = found["turns"]
    assert found["overlapping"] == {"none": True, "rollspec": True, "das": True}
    assert [(t["seed"], t["workload"]) for t in turns] == [(s, w) for s in (0, 1) for w in ("epochs", "shift")]
    for turn in turns:
        assert list(turn["arms"]) == (["none", "rollspec", "das"] if turn["seed"] == 0 else ["das", "rollspec", "none"])
        assert len({json.dumps([r["tokens"] for r in runs]) for runs in turn["arms"].values()}) == 1
    # Engines of their own for every seed, started the other way round in the next; before them the one that records.
    starts = [name for name, work in made.log if work.version == 1]
    assert starts == ["none", "none", "rollspec", "das", "das", "rollspec", "none"]
    epochs = found["summary"]["workloads"]["epochs"]["arms"]
    assert epochs["das"]["speedup"]["median"] == pytest.approx(1.25) and epochs["das"]["speedup"]["n"] == 4
    assert epochs["rollspec"]["speedup"]["median"] == pytest.approx(2.0)


def test_a_second_call_goes_on_and_another_commit_begins_anew(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made.peer().run()
    before = len(made.log)
    made.peer().run()
    assert not made.log[before:], "nothing is left to measure, or to record"
    made.peer("das,ngram K=2").run()
    again = [name for name, w in made.log[before:] if w.version > 100]
    assert "ngram K=2" in again and "das" not in again
    both = json.loads(made.out.read_text())
    assert {"das", "ngram K=2"} <= set(both["summary"]["workloads"]["shift"]["arms"])
    monkeypatch.setattr(peers, "provenance", lambda: {**CLEAN, "git": "d" * 40})
    monkeypatch.setattr(peer_store, "changed", lambda root, commit, paths: False)
    before = len(made.log)
    made.peer().run()
    assert not made.log[before:], "the code is the same"
    monkeypatch.setattr(peer_store, "changed", lambda root, commit, paths: commit == "c" * 40)
    made.peer().run()
    kept = json.loads(made.out.with_suffix(".json.before").read_text())
    assert len(kept["turns"]) > len(json.loads(made.out.read_text())["turns"])


def test_of_a_changed_tree_nothing_is_gone_on_from(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "provenance", lambda: {**CLEAN, "dirty": True})
    made.peer().run()
    before = len(made.log)
    made.peer().run()
    assert "das" in {name for name, _ in made.log[before:]}


def test_an_arm_that_fails_is_named_and_the_others_go_on(made: Any) -> None:
    found = json.loads(made.peer("das,ngram K=2", broken="das").run().read_text())
    assert found["failed"] == {"das": "it ended"}
    assert set(found["turns"][0]["arms"]) == {"none", "rollspec", "ngram K=2"}
    found = json.loads(made.peer("das,ngram K=2", later="das", out=made.out.with_name("r.json")).run().read_text())
    assert found["failed"] == {"das": "it ended"} and set(found["turns"][-1]["arms"]) == {
        "none",
        "rollspec",
        "ngram K=2",
    }
    with pytest.raises(RollspecError, match="without speculation failed"):
        made.peer("ngram K=2", broken="none", out=made.out.with_name("q.json")).run()


def test_too_few_minutes_are_refused_and_what_is_there_is_kept(made: Any) -> None:
    made.peer().run()
    turns = json.loads(made.out.read_text())["turns"]
    with pytest.raises(RollspecError, match="too small"):
        made.peer("das,ngram K=2", minutes=0.001).run()
    assert json.loads(made.out.read_text())["turns"] == turns


# ---- the lossy arm --------------------------------------------------------------------------------------------------


def test_what_a_lossy_arm_said_is_measured_though_its_call_was_cut_off(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turns are not run again, so that what they said has to be kept until its distance is known."""
    seen: list[dict[int, Ruled]] = []

    def distance(epochs: dict[int, Ruled], model: str, weights: list[str], bias: float) -> list[dict[str, Any]]:
        seen.append(epochs)
        if len(seen) == 1:
            raise KeyboardInterrupt
        row = {"tokens": 9, "ruled": 9, "positions": 9, "measured": 0.1, "error": 0.01, "theory": 0.1, "largest": 0.2}
        return [{"epoch": n, **row, "bias": bias, "agrees": True, "z": 10.0} for n in epochs]

    monkeypatch.setattr(peers, "distance", distance)
    with pytest.raises(KeyboardInterrupt):
        made.peer("spec_rl").run()
    assert "distance" not in json.loads(made.out.read_text())
    runs = len([name for name, _ in made.log if name == "spec_rl"])
    found = json.loads(made.peer("spec_rl").run().read_text())
    assert len([name for name, _ in made.log if name == "spec_rl"]) == runs, "no turn was run again"
    assert seen[1] == seen[0] and {len(e.texts) for e in seen[1].values()} == {len(e.prompts) for e in seen[1].values()}
    assert [row["epoch"] for row in found["distance"]["spec_rl"]] == [*seen[1]] and found["ruled"] == {}
    made.peer("spec_rl").run()
    assert len(seen) == 2, "and measured once"
