"""The simulation of scale against closed forms, and its canaries against the code that decides about real ones."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import cli as bench_cli
from benchmarks import scale
from benchmarks.scale import costs, limits, picture
from benchmarks.scale.events import Clock, Queue
from benchmarks.scale.feedback import Feedback, feedback, rate_for, server_seconds
from benchmarks.scale.fleet import Fleet, Replica, _Simulation, simulate
from benchmarks.scale.spread import Kind, Spread
from rollspec.errors import RollspecError

MEASURED = costs.Measured(2e-8, 1e-8, 3e-9, 3e-10, 1e-5, None)
WORLD = costs.World()
QUIET = Fleet(
    replicas=8, kind="tree", copy=0.0, sender=0.0, readers=1, load=0.0, publish=0.0, publish_every=100.0, canary=3.0,
    bad=0.0, poll=0.0, lease=10.0,
)  # fmt: skip


def fleet(**changes: Any) -> Fleet:
    return dataclasses.replace(QUIET, **changes)


def test_events_run_in_order_and_a_queue_serves_in_parallel() -> None:
    clock, seen = Clock(), []
    clock.after(2.0, lambda: seen.append("b"))
    clock.after(1.0, lambda: clock.after(1.0, lambda: seen.append("c")))
    clock.run(1.5)
    assert seen == [] and clock.now == 1.5
    clock.run(9.0)
    assert seen == ["b", "c"]
    times: list[float] = []
    queue = Queue(clock, channels=2)
    for _ in range(5):
        queue.put(3.0, lambda: times.append(clock.now - 9.0))
    assert queue.drop() and len(queue) == 2
    clock.run(100.0)
    assert times == [3.0, 3.0, 6.0, 6.0] and queue.busy == 12.0 and not queue.drop()


@pytest.mark.parametrize("n", [1, 2, 7, 8, 63, 64, 1000])
@pytest.mark.parametrize("kind", ["star", "store", "tree"])
def test_all_asking_at_once_take_what_the_closed_form_says(kind: Kind, n: int) -> None:
    clock, readers, seconds, sender = Clock(), 8, 0.5, 0.25
    spread = Spread(clock, kind, seconds, readers, sender)
    times: list[float] = []
    for _ in range(n):
        spread.fetch(1, lambda: times.append(clock.now))
    clock.run(1e6)
    want = {
        "star": n * sender,
        "store": math.ceil(n / readers) * seconds,
        "tree": math.ceil(math.log2(n + 1)) * seconds,
    }[kind]
    assert len(times) == n and max(times) == pytest.approx(want)


def test_holders_that_leave_are_missed_but_never_the_last() -> None:
    clock = Clock()
    spread = Spread(clock, "tree", 1.0, 1, 1.0)
    for _ in range(3):
        spread.fetch(1, lambda: None)
    clock.run(10.0)
    for _ in range(9):
        spread.left(1)
    spread.left(7)  # no replica has it
    times: list[float] = []
    for _ in range(3):
        spread.fetch(1, lambda: times.append(clock.now))
    clock.run(99.0)
    assert times == [11.0, 12.0, 12.0]


def test_waiting_is_that_of_a_queue_whose_samples_come_at_random_with_fixed_service() -> None:
    for load in (0.3, 0.7):
        f = Feedback(arrivals=load / 0.02, seconds=0.02, sample_bytes=1e6, waiting=10**9, tokens=100.0)
        found = feedback(f, 5_000.0, 1)
        want = load * 0.02 / (2 * (1 - load))  # M/D/1
        assert found["wait_mean"] == pytest.approx(want, rel=0.08) and found["dropped"] == 0.0
        assert found["tokens_per_second"] == pytest.approx(100.0 * f.arrivals, rel=0.02)


def test_what_is_more_than_the_trainers_end_takes_is_dropped() -> None:
    f = Feedback(arrivals=200.0, seconds=0.02, sample_bytes=1e6, waiting=10, tokens=1.0)
    found = feedback(f, 500.0, 0)
    assert found["dropped"] == pytest.approx(1 - 1 / 4.0, rel=0.03)
    assert found["tokens_per_second"] == pytest.approx(50.0, rel=0.02)
    # The oldest waiting go first, so what is served has waited less than the whole queue takes.
    assert found["wait_p99"] < 10 * 0.02


def test_the_budget_keeps_the_trainers_end_below_its_load() -> None:
    made = WORLD.tokens_per_second
    rates = [rate_for(n, WORLD, MEASURED) for n in (1, 8, 64, 512)]
    assert rates[0] == 1.0 and rates == sorted(rates, reverse=True)
    assert rates[2] / rates[3] == pytest.approx(8.0)
    for n, rate in zip((8, 64, 512), rates[1:], strict=True):
        f = Feedback.of(n, WORLD, MEASURED, rate)
        assert f.arrivals * f.seconds <= WORLD.load + 1e-9
        assert n * made * rate <= WORLD.trained_tokens + 1e-6
    assert feedback(Feedback.of(512, WORLD, MEASURED, rates[3]), 300.0, 0)["dropped"] < 0.05


def test_ages_are_a_saw_between_two_versions() -> None:
    # Each version is everywhere `canary` seconds after its publication: mean age = canary + half an interval.
    found = simulate(fleet(canary=3.0, publish_every=100.0), 10_000.0, 0)
    assert found["to_verdict"] == pytest.approx(3.0) and found["fan_out"] == pytest.approx(0.0)
    assert found["age"] == pytest.approx(3.0 + 50.0, rel=0.02) and found["reached"] == 1.0
    delayed = simulate(fleet(canary=3.0, copy=4.0, load=2.0, kind="store", readers=99), 10_000.0, 0)
    assert delayed["to_verdict"] == pytest.approx(4.0 + 2.0 + 3.0) and delayed["fan_out"] == pytest.approx(6.0)
    # One of eight has it at the verdict, the others 6 s later.
    assert delayed["age"] == pytest.approx(9.0 + 7 / 8 * 6.0 + 50.0, rel=0.02)


def test_what_its_canary_rolls_back_no_other_replica_gets() -> None:
    found = simulate(fleet(bad=1.0), 950.0, 0)
    assert found["promoted"] == 0 and found["canaries"] == found["versions"] == found["copies"] == 10.0
    half = simulate(fleet(bad=0.5), 40_000.0, 0)
    assert half["promoted"] == pytest.approx(200, abs=40)


def test_polls_delay_by_half_their_interval() -> None:
    found = simulate(fleet(replicas=200, poll=10.0, canary=0.0), 5_000.0, 0)
    assert found["to_verdict"] < 0.5, "of 200 replicas one looks soon"
    assert found["fan_out"] == pytest.approx(10.0, abs=0.3), "the last one looks after a whole interval"
    alone = simulate(fleet(replicas=1, poll=10.0, canary=0.0, publish_every=97.3), 30_000.0, 0)
    assert alone["to_verdict"] == pytest.approx(5.0, rel=0.1)


def test_star_stops_where_arithmetic_says() -> None:
    size = costs.version_bytes(WORLD)
    most = limits.limits(WORLD, MEASURED)["star"]
    assert most == pytest.approx(WORLD.publish_every / (size / WORLD.replica_link))
    below, above = (simulate(Fleet.of(int(f * most), "star", WORLD, MEASURED), 1800.0, 0) for f in (0.8, 2.5))
    assert below["fan_out"] < WORLD.publish_every < above["fan_out"]
    assert above["promoted"] < 0.7 * below["promoted"]


def killed(f: Fleet, crash: bool) -> _Simulation:
    """A simulation whose first replica with a canary leaves one second into it."""
    s = _Simulation(dataclasses.replace(f, crashes=float(crash)), 3)

    def kill() -> None:
        assert s.state.holder is not None
        s._leave(s.state.holder)

    s.clock.after(2.0, kill)
    return s


def test_a_canary_passes_on_at_once_when_its_replica_leaves_and_after_its_lease_when_it_dies() -> None:
    left = killed(fleet(canary=5.0, poll=1.0), crash=False).run(90.0)
    died = killed(fleet(canary=5.0, poll=1.0, lease=10.0), crash=True).run(90.0)
    assert left["canaries"] == died["canaries"] == 2.0 and died["died_on_canary"] == 1.0
    assert left["to_verdict"] == pytest.approx(2.0 + 5.0, abs=1.0)
    assert died["to_verdict"] == pytest.approx(2.0 + 10.0 + 5.0, abs=1.0)


def real(folder: Path, f: Fleet, seed: int, kill: float | None = None) -> tuple[float, float]:
    """The same fleet with `drafter_online.release` deciding: (to the verdict, from it to the last replica)."""
    from drafter_online import release as module
    from drafter_online.engines import ConnectedEngine, Engines, Hello, Status, VersionVerdict
    from drafter_online.versions import Versions

    clock, rng, store = Clock(), random.Random(seed), Versions(folder)
    engines = [ConnectedEngine(Hello(str(i), "b", []), offered=-1e3) for i in range(f.replicas)]
    took, decided = [0.0] * f.replicas, []

    def report(i: int) -> None:
        if engines[i].offered == math.inf:
            return  # it has died
        clock.after(f.poll, lambda: report(i))
        offered = release.offer(engines[i])
        if offered is None:
            return
        if release.candidate is None:
            run(i, offered[0])
        else:
            engines[i].status = Status(0, busy=True)
            clock.after(f.canary, lambda: judge(i, offered[0]))

    def run(i: int, version: int) -> None:
        engines[i].status, took[i] = Status(version), clock.now

    def judge(i: int, version: int) -> None:
        if engines[i].offered < math.inf:
            run(i, version)
            decided.append(clock.now)
            release.judge(str(i), VersionVerdict(version, "promoted"))

    def die() -> None:
        (name,) = release.canaries
        engines[int(name)].offered = math.inf
        clock.after(f.lease, lambda: release.left(name))

    for i in range(f.replicas):
        clock.after(rng.uniform(0, f.poll), lambda i=i: report(i))  # type: ignore[misc]
    store.publish({"w": torch.ones(2)}, {}, base="b", target_version=1)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
        release = module.Release(store, Engines(), lambda: 0, patience=1e6)
        if kill is not None:
            clock.after(kill, die)
        clock.run(60.0)
    assert all(e.status.version == 1 for e in engines if e.offered < math.inf)
    return decided[0], max(took) - decided[0]


@pytest.mark.parametrize("seed", range(3))
def test_the_real_canaries_take_as_long_as_the_simulated_ones(tmp_path: Path, seed: int) -> None:
    f = fleet(poll=1.0, canary=3.0, replicas=6)
    found = simulate(f, 90.0, seed)
    verdict, rest = real(tmp_path / "a", f, seed)
    assert verdict == pytest.approx(found["to_verdict"], abs=1e-6)  # the same phases
    assert rest == pytest.approx(found["fan_out"], abs=1e-6)
    died = killed(f, crash=True).run(90.0)["to_verdict"]
    assert real(tmp_path / "b", f, seed, kill=2.0)[0] == pytest.approx(died, abs=f.poll)


def test_elastic_replicas_take_what_is_good_when_they_come() -> None:
    f = fleet(replicas=50, life=200.0, crashes=0.5, poll=1.0, publish_every=20.0, canary=2.0)
    found = simulate(f, 4000.0, 0)
    assert found["promoted"] > 0.6 * found["versions"] and found["died_on_canary"] > 0
    assert found["joining"] < 2.0 and found["reached"] > 0.9
    simulation = _Simulation(f, 0)
    simulation.run(500.0)
    assert len(simulation.replicas) == 50 and all(isinstance(r, Replica) and r.alive for r in simulation.replicas)


def test_sizes_are_those_of_a_head_and_of_a_sample(tmp_path: Path) -> None:
    pytest.importorskip("speculators")
    from drafter_sample import make_sample
    from drafter_target import HIDDEN, target

    from drafter_online import head as heads
    from drafter_online.samples import Verify, VerifyStep

    small = costs.World(hidden=HIDDEN, intermediate=48, heads=2, kv_heads=1, head_dim=16)
    own = heads.own_weights(heads.fresh(target(tmp_path)))
    assert sum(t.numel() for t in own.values() if t.is_floating_point()) == costs.head_parameters(small)
    t = 300
    steps = [
        VerifyStep(i, "head", [1] * 4, 1, torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, 8), torch.zeros(4))
        for i in range(0, t, 5)
    ]
    sample = make_sample(
        t,
        hidden_states=torch.zeros(t, 3 * HIDDEN).bfloat16(),
        verifier_last_hidden_states=torch.zeros(t, HIDDEN).bfloat16(),
        verify=Verify.gather(steps),
    )
    small = dataclasses.replace(small, accepted_per_step=4.0)
    assert sample.nbytes == pytest.approx(t * costs.token_bytes(small), rel=0.01)


def test_a_step_gives_what_one_head_of_two_replicas_was_measured_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "RESULTS", tmp_path)
    assert costs.world() == WORLD, "nothing was measured"
    rows = [{"arm": "one head", "length": 1.75}, {"arm": "two heads, half the steps each", "length": 1.5}]
    (tmp_path / "drafter-replicas.json").write_text(json.dumps({"replicas": rows}))
    assert costs.world() == dataclasses.replace(WORLD, accepted_per_step=0.75)


def test_the_whole_benchmark_writes_json_and_a_picture(tmp_path: Path) -> None:
    done = CliRunner().invoke(bench_cli.command, ["scale", "--quick", "--out", str(tmp_path / "s.json"), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "s.json").read_text())
    assert [r["replicas"] for r in found["replicas"]] == list(scale.REPLICAS[:3])
    assert found["measured"]["report_seconds"] > 0 and found["measured"]["load_seconds_per_byte"] > 0
    assert found["provenance"]["cores"] and set(found["limits"]) >= {"star", "store", "look", "record_all"}
    drawn = (tmp_path / "s.svg").read_text()
    assert drawn.count('<g id="line ') == sum(len(p.lines) for p in picture.panels(found)) and "http" in drawn
    again = scale.run(quick=True, out=tmp_path / "t.json", measured_in=tmp_path / "s.json")
    other = json.loads(again.read_text())
    assert other["measured"] == found["measured"] and other["measured_provenance"] == found["provenance"]
    assert other["replicas"] == found["replicas"], "nothing else is left to chance"
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(RollspecError, match=r"x.json is no result"):
        costs.earlier(tmp_path / "x.json")
    assert limits.table(found).row_count == 3 and len(limits.sentences(found)) == 3


def test_the_trainers_end_is_the_slower_of_its_link_and_its_reading() -> None:
    size = costs.sample_bytes(WORLD)
    slow = dataclasses.replace(WORLD, trainer_link=1e6)
    assert server_seconds(slow, MEASURED) == pytest.approx(size / 1e6)
    assert server_seconds(WORLD, MEASURED) == pytest.approx(size * 3e-9)
