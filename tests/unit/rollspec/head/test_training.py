"""An engine's side of the daemon: what it sends, what it takes, and that it does without."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("zmq")

from drafter_target import sample  # noqa: E402
from training_side import Side  # noqa: E402
from vllm_like import like  # noqa: E402
from wire_ends import Ends, Recorder, until  # noqa: E402

from drafter_online import fetch  # noqa: E402
from drafter_online.activity import Watched  # noqa: E402
from drafter_online.errors import VersionError, WireError  # noqa: E402
from drafter_online.fetch import Fetch  # noqa: E402
from drafter_online.samples import Sample  # noqa: E402
from drafter_online.target import TargetParts, pieces  # noqa: E402
from drafter_online.versions import Versions  # noqa: E402
from drafter_online.wire import Message  # noqa: E402
from rollspec.head import training  # noqa: E402


@pytest.fixture
def ends(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> Ends:
    monkeypatch.setattr("drafter_online.link.HELLO_SECONDS", 0.2)
    monkeypatch.setattr("drafter_online.link.AWAY_SECONDS", 3.0)
    monkeypatch.setattr(training, "STATUS_SECONDS", 0.1)
    return ends


def side(ends: Ends, hub: Any, **kw: Any) -> Side:
    s = Side(hub.endpoint, **kw)
    ends.open.append(s)
    until(lambda: s.training.info()["away"] is None)
    return s


def of(hub: Any, kind: str) -> list[Message]:
    handler: Recorder = hub.handler
    return [m for m in list(handler.messages) if m.kind == kind]


def last(hub: Any) -> list[Any]:
    """The latest verdict that the engine sent."""
    verdicts: list[list[Any]] = of(hub, "status")[-1].body["verdicts"]
    return verdicts[-1] if verdicts else []


def test_samples_rewards_and_reports_go_out(ends: Ends, tiny_target: Path) -> None:
    hub = ends.hub()
    s = side(ends, hub)
    s.capture.waiting = [sample(tiny_target, i, errors=1) for i in range(3)]
    s.training.reward([("p", "r", 0.5)])
    until(lambda: len(of(hub, "samples")) == 3 and of(hub, "rewards") and of(hub, "status"))
    got = of(hub, "samples")[0]
    again = Sample.of_parts(dict(got.tensors), got.body).validate()
    assert torch.equal(again.hidden_states, sample(tiny_target, 0, errors=1).hidden_states) and len(again.verify) == 1
    assert of(hub, "rewards")[0].body == {"p:r": 0.5}
    status = of(hub, "status")[-1].body
    assert status["version"] == 0 and status["speculating"] and status["domains"] == {}
    assert s.training.info()["sent"] == 3 and s.training.info()["away"] is None


@pytest.mark.parametrize(
    ("welcome", "wanted"), [({"rejected": False}, False), ({"rejected": True}, True), (None, True)]
)
def test_logits_are_recorded_for_a_trainer_that_learns_from_them(ends: Ends, welcome: Any, wanted: bool) -> None:
    hub = ends.hub(welcome=welcome)
    s = side(ends, hub)
    until(lambda: not s.capture.paused and s.capture.logits is wanted)


def test_versions_come_in_pieces(ends: Ends, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(fetch, "CHUNK", 1 << 10)
    store = Versions(tmp_path / "store")
    hub = ends.hub()
    take = hub.handler.received
    hub.handler.received = lambda session, m: (
        hub.send(session, fetch.piece(store, m.body)) if m.kind == "fetch" else take(session, m)
    )
    s = side(ends, hub)
    until(lambda: of(hub, "status"))
    session = hub.handler.sessions[-1]

    def offer(number: int, canary: bool = True) -> None:
        manifest = (store.path(number) / "manifest.json").read_bytes()
        hub.send(session, Message("offer", {"version": number, "canary": canary, "manifest": manifest}))

    for i in range(3):
        store.publish({"w": torch.full((1000,), float(i))}, {"a": i}, base="b", target_version=0)
    offer(1, canary=False)
    until(lambda: s.swapper.version == 1)
    first, canary = s.swapper.offered[0]
    assert first.parent != store.folder and not canary
    until(lambda: not first.parent.exists())  # its verdict is there
    offer(2)
    until(lambda: s.swapper.version == 2)
    assert s.swapper.offered[-1][1] and s.training.info()["fetched"] == 2
    assert float(s.swapper.tensors["w"][0]) == 1.0
    until(lambda: last(hub) == [2, "promoted", "fine"])
    # What is not newer, or not to be had, is left alone.
    offer(1)
    (store.path(3) / "model.safetensors").write_bytes(b"")
    offer(3)
    until(lambda: last(hub)[:2] == [3, "refused"])
    hub.send(session, Message("offer", {"version": 4, "manifest": b"{}"}))
    until(lambda: last(hub)[:2] == [4, "refused"])
    assert s.swapper.version == 2 and s.training.error is None
    # One that no step has taken up yet is neither fetched again nor replaced.
    store.publish({"w": torch.ones(1000)}, {}, base="b", target_version=0)  # number 4, which was refused above
    number = store.publish({"w": torch.ones(1000)}, {}, base="b", target_version=0)
    s.swapper.offer = lambda folder, canary=True: setattr(s.swapper, "busy", True)  # type: ignore[method-assign]
    offer(number)
    until(lambda: s.training.info()["fetched"] == 3)
    offers = s.training.info()["offers"]
    offer(number)
    sent = len(of(hub, "status"))
    until(lambda: len(of(hub, "status")) > sent + 2)
    assert s.training.info()["offers"] == offers and of(hub, "status")[-1].body["busy"]
    s.training.stop()
    assert not first.parent.exists()


def test_a_head_of_20_mb_takes_a_fraction_of_a_second_and_holds_up_no_step(ends: Ends, tmp_path: Path) -> None:
    store = Versions(tmp_path / "store")
    store.publish({"w": torch.randn(10 << 20).bfloat16()}, {}, base="b", target_version=0)
    hub = ends.hub()
    hub.handler.received = lambda session, m: m.kind == "fetch" and hub.send(session, fetch.piece(store, m.body))
    s = side(ends, hub)
    s.swapper.offer = lambda folder, canary: setattr(s.swapper, "busy", True)  # type: ignore[method-assign]
    manifest = (store.path(1) / "manifest.json").read_bytes()
    begin = time.monotonic()
    hub.send(hub.handler.sessions[-1], Message("offer", {"version": 1, "manifest": manifest}))
    longest, last = 0.0, begin
    while not s.swapper.busy:  # what the engine's own thread would do meanwhile
        time.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    # 0.2 s and 0.02 s on an idle core, with the daemon in the same process.
    assert last - begin < 5.0 and longest < 0.5


def test_it_does_without_a_daemon_and_resumes(ends: Ends, tiny_target: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub = ends.hub()
    s = side(ends, hub)
    s.capture.waiting = [sample(tiny_target, 0)]
    until(lambda: of(hub, "samples"))
    endpoint = hub.endpoint
    hub.close()
    ends.open.remove(hub)
    until(lambda: s.training.info()["away"])
    until(lambda: s.capture.paused)
    s.capture.waiting = [sample(tiny_target, 1), sample(tiny_target, 2)]
    until(lambda: not s.capture.ready)
    assert s.training.info()["feedback_dropped"] == 2 and caplog.text.count("is away") == 1
    again = ends.hub(endpoint)
    until(lambda: s.training.info()["away"] is None and not s.capture.paused)
    s.capture.waiting = [sample(tiny_target, 3)]
    until(lambda: of(again, "samples"))
    assert s.training.info()["lost"] == 1 and s.training.info()["sessions"] == 2


def test_the_target_is_sent_when_it_is_asked_for(ends: Ends, monkeypatch: Any) -> None:
    monkeypatch.setattr("drafter_online.target.PIECE_BYTES", 32)
    hub = ends.hub()
    s = side(ends, hub)
    until(lambda: of(hub, "status"))
    s.head.bridge.engine.version = 4
    s.head.asleep = True
    hub.send(hub.handler.sessions[-1], Message("refresh", {}))
    sent = len(of(hub, "status"))
    until(lambda: len(of(hub, "status")) > sent + 2)
    assert not of(hub, "target"), "its memory is not there"
    s.head.asleep = False
    # vLLM is loading weights: a layer that has not all of its own yet has none.
    whole, s.head.target_parts = s.head.target_parts, lambda: {"norm": torch.ones(4, device="meta")}
    hub.send(hub.handler.sessions[-1], Message("refresh", {}))
    sent = len(of(hub, "status"))
    until(lambda: len(of(hub, "status")) > sent + 2)
    assert not of(hub, "target") and s.training.error is None
    s.head.target_parts = whole
    hub.send(hub.handler.sessions[-1], Message("refresh", {}))
    parts = TargetParts()
    until(lambda: len(of(hub, "target")) == 7)
    for m in of(hub, "target"):
        parts.add(m)
    found = parts.take()
    assert parts.policy == 4 and not parts.take()
    assert torch.equal(found["embed"], torch.arange(20.0).reshape(5, 4)) and found["norm"].shape == (4,)
    # Pieces that do not follow each other are refused, and begin anew.
    messages = list(pieces({"embed": torch.ones(8, 4), "norm": torch.ones(8)}, "x", 1))
    with pytest.raises(WireError, match="beginning"):
        parts.add(messages[1])
    parts.add(messages[0])
    with pytest.raises(WireError, match="follow"):
        parts.add(messages[2])
    bad = list(pieces({"norm": torch.full((4,), float("nan"))}, "x", 2))
    with pytest.raises(WireError, match="not finite"):
        parts.add(bad[0])
    for m in messages:
        parts.add(m)
    assert set(parts.take()) == {"embed", "norm"}


def test_a_fault_ends_the_feedback_and_nothing_else(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    hub = ends.hub()
    s = side(ends, hub)
    until(lambda: of(hub, "status"))
    s.capture.take = None  # type: ignore[method-assign,assignment]
    s.capture.waiting = [None]  # type: ignore[list-item]
    until(lambda: s.training.error)
    assert s.capture.paused and any("drafter feedback" in c for c in s.head.bridge.faults)
    until(lambda: "no feedback from now on" in caplog.text)  # said after it is noted
    until(lambda: hub.handler.left)


def answering(hub: Any, **answer: Any) -> None:
    """Answers checkpoint requests as a daemon would."""

    def received(session: str, m: Message) -> None:
        Recorder.received(hub.handler, session, m)
        if m.kind in ("save", "load"):
            hub.send(session, Message("done", {"id": m.body["id"], "done": True, "error": None, **answer}))

    hub.handler.received = received


def test_a_checkpoint_has_the_daemons_state(ends: Ends, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    hub = ends.hub()
    s = side(ends, hub)
    asked, folder = tmp_path / "replica_0" / "drafter", tmp_path / "drafter"
    with monkeypatch.context() as m:
        m.setattr("drafter_online.job_checkpoint.SAVE_SECONDS", 0.5)
        assert not s.training.save(asked), "one that does not answer"
    assert not folder.exists() and any("has not answered for" in c for c in s.head.bridge.faults)
    answering(hub)
    assert s.training.save(asked) and of(hub, "save")[-1].body["folder"] == str(folder)
    s.training.load(tmp_path / "nothing")
    assert s.training.load(asked)
    until(lambda: of(hub, "load"))
    assert of(hub, "load")[0].body["folder"] == str(folder)
    answering(hub, done=False, error="no room")
    assert not s.training.save(asked)
    assert "drafter training, saving: no room" in s.head.bridge.faults
    assert caplog.text.count("saving the drafter's training failed") == 1, "said once"
    answering(hub, done=False)
    before = dict(s.head.bridge.faults)
    assert not s.training.save(asked) and s.head.bridge.faults == before, "a daemon that is no job's"
    assert s.training.error is None


def test_a_copy_is_taken_over_when_the_daemon_comes(ends: Ends, tmp_path: Path, monkeypatch: Any) -> None:
    hub = ends.hub()
    endpoint = hub.endpoint
    hub.close()
    ends.open.remove(hub)
    s = Side(endpoint, **{"dir": str(tmp_path)})
    ends.open.append(s)
    assert s.training.load(tmp_path)
    assert not s.training.save(tmp_path / "checkpoint") and "has not answered yet" in str(s.head.bridge.faults)
    s.training.checkpoints.load(tmp_path / "late")
    list(s.training.checkpoints._open.values())[-1].asked = -1e9
    until(lambda: any("loading: the daemon has not" in c for c in s.head.bridge.faults))
    hub = ends.hub(endpoint)
    answering(hub)
    until(lambda: [m.body["folder"] for m in of(hub, "load")] == [str(tmp_path)])
    until(lambda: not s.training.checkpoints._open)


def test_how_the_daemons_training_goes(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    hub = ends.hub()
    s = side(ends, hub)
    until(lambda: of(hub, "status"))
    session = hub.handler.sessions[-1]
    body = {"steps": 5, "tokens": 900, "engines": 2, "loss": 2.5, "terms": {"accept_0": 2.0}, "length": 1.5}
    body |= {"samples": 7, "step_age": 0.5}
    hub.send(session, Message("status", body))
    until(lambda: s.training.info().get("loss") == 2.5)
    info = s.training.info()
    assert (info["terms"], info["length"], info["samples"]) == ({"accept_0": 2.0}, 1.5, 7)
    assert (info["steps"], info["tokens"]) == (0, 0), "trained before the engine knew of it"
    hub.send(session, Message("status", {**body, "steps": 9, "tokens": 1500}))
    until(lambda: s.training.info()["steps"] == 2 and s.training.info()["tokens"] == 300)
    hub.send(session, Message("status", {**body, "steps": 3, "tokens": 100}))  # it resumed an older state
    hub.send(session, Message("status", {**body, "steps": 4, "tokens": 140}))
    until(lambda: s.training.info()["tokens"] == 320)
    idle = {"idle_seconds": 4.0, "used_seconds": 2.0}
    hub.send(session, Message("status", {**body, "idle": idle, "levels": {"idle_cost": 0.01}}))
    until(lambda: s.training.info().get("used_seconds") == 1.0)
    assert s.training.info()["idle_seconds"] == 2.0 and s.training.info()["idle_cost"] == 0.01
    for _ in range(2):
        hub.send(session, Message("status", {**body, "step_age": 200.0, "hangs": "a step runs for 200 s"}))
    until(lambda: s.training.info()["hangs"])
    until(lambda: s.training.info()["step_age_seconds"] == 200.0)
    until(lambda: "a step runs for 200 s" in caplog.text)  # said after it is counted
    hub.send(session, Message("status", {"steps": "many"}))
    hub.send(session, Message("status", {**body, "loss": 1.0}))
    until(lambda: s.training.info()["loss"] == 1.0)
    assert s.head.bridge.faults == {"drafter training: a step hangs": 1}
    assert caplog.text.count("a step runs for 200 s") == 1


def test_a_trainer_on_the_device_sees_when_the_engine_has_it(ends: Ends, tmp_path: Path) -> None:
    hub = ends.hub()
    watched = Watched(tmp_path / "devices")
    s = side(ends, hub, device=tmp_path / "devices" / "cpu")
    until(lambda: len(of(hub, "status")) > 1)
    assert watched.wanted() is not None, "until it has made a step, the engine measures what memory it may take"
    s.training.step_begins()
    s.training.step_ended()
    until(lambda: watched.wanted() is None)
    s.training.step_begins()
    assert watched.wanted() is not None
    s.training.step_ended()
    until(lambda: watched.wanted() is None)
    assert watched.busy == s.training.activity.busy > 0.0
    s.training.updating(True)
    assert watched.wanted() is not None
    s.training.step_begins()  # the engine has its device back
    s.training.step_ended()
    until(lambda: watched.wanted() is None)
    s.head.asleep = True
    s.training.rests()
    assert watched.wanted() is not None
    until(lambda: of(hub, "status")[-1].body["seconds"] == s.training.activity.busy)


def test_an_engine_without_a_place_for_it_is_served_all_the_same(ends: Ends, tmp_path: Path, caplog: Any) -> None:
    hub = ends.hub()
    (tmp_path / "file").write_text("")
    s = side(ends, hub, device=tmp_path / "file" / "cpu")
    s.training.step_begins()
    s.training.step_ended()
    until(lambda: len(of(hub, "status")) > 2)
    assert caplog.text.count("sharing the device with the drafter's training failed") == 1
    assert s.training.activity.busy > 0.0 and s.training.error is None


def test_long_samples_go_in_windows(tiny_target: Path) -> None:
    long = sample(tiny_target, 0, 200, prompt=80)
    width = long.hidden_states.shape[1] * long.hidden_states.element_size()
    parts = long.windows(50 * width)
    assert [(int(p.position_ids[0]), len(p)) for p in parts] == [(50, 50), (100, 50), (150, 50)]
    assert long.windows() == [long]
    assert all(p.request_id == long.request_id and p.validate() for p in parts)


def test_fetching_survives_what_it_is_sent(tmp_path: Path) -> None:
    store = Versions(tmp_path / "store")
    number = store.publish({"w": torch.ones(4)}, {}, base="b", target_version=0)
    manifest = (store.path(number) / "manifest.json").read_bytes()
    for bad in (b"", b"[]", b"{}", manifest.replace(b'"bytes": ', b'"bytes": 1'), manifest[:-9]):
        with pytest.raises(VersionError, match="refused"):
            Fetch(bad, tmp_path / "here")
    (tmp_path / "file").write_text("")
    with pytest.raises(VersionError, match="cannot be kept"):
        Fetch(manifest, tmp_path / "file")
    fetch = Fetch(manifest, tmp_path / "here")
    ask = fetch.wants()
    assert ask is not None
    assert not fetch.take(Message("chunk", {**ask, "offset": 5}, {"data": torch.ones(1, dtype=torch.uint8)}))
    assert not fetch.take(Message("chunk", ask))
    with pytest.raises(VersionError, match="longer than"):
        fetch.take(Message("chunk", ask, {"data": torch.ones(9999, dtype=torch.uint8)}))


def test_what_is_reported_of_training() -> None:
    from rollspec.head.draft_head import DraftHead
    from rollspec.telemetry.engine_stats import EngineStats
    from rollspec.telemetry.metrics import find, to_metrics

    info: dict[str, Any] = {
        "loss": 2.5, "terms": {"accept_0": 2.0, "rejected": 1.0}, "length": 1.5, "samples": 7, "step_age_seconds": 0.0,
        "hangs": None, "steps": 2, "tokens": 40, "wasted_seconds": 0.5, "idle_seconds": 9.0, "used_seconds": 8.0,
        "preempted": 1, "preempt_seconds": 0.2, "preempt_p99_seconds": 0.1, "micro_step_seconds": 0.3, "away": None,
    }  # fmt: skip
    running = like("rollspec.head.swap.payload:LoadedVersion", number=0, since=0)
    deployment = like("rollspec.head.swap.deployment:Deployment", pauses=[], running=running)
    drafts = like(
        "rollspec.head.draft_head:DraftHead", caught_up=0, rebuilt=0, capture=None, _drained={},
        swapper=like("rollspec.head.swap.swapper:Swapper", counts={}, deployment=deployment),
        training=like("rollspec.head.training:HeadTraining", info=lambda: info),
        engine=like("rollspec.step:DraftEngine", version=0, head=like("rollspec.drafting.head:Head", reached=None)),
    )  # fmt: skip
    for trained in (2.0, 0.0):  # since the call before
        sums, levels = DraftHead.drain(drafts)  # type: ignore[arg-type]
        metrics = to_metrics(EngineStats(drafter=sums, drafter_levels=levels))
        got = {n.removeprefix("rollspec/drafter/"): v for n, v in metrics.items() if "/drafter/" in n}
        assert all(find(n) is not None for n in metrics) and got["train_steps"] == trained
        assert (got["loss"], got["loss/accept_0"], got["loss/rejected"], got["away"]) == (2.5, 2.0, 1.0, 0.0)
        assert (got["preempt_p99_seconds"], got["micro_step_seconds"]) == (0.1, 0.3)
