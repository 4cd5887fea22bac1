"""Capture without an engine: steps as the model runner would show them, with states that say their position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_like import like

torch = pytest.importorskip("torch")

from drafter_online.samples import Sample  # noqa: E402
from rollspec import RollspecConfig, step  # noqa: E402
from rollspec.head import capture  # noqa: E402
from rollspec.head.capture import Capture  # noqa: E402
from rollspec.proposal.base import Turn, prompt_key  # noqa: E402

H, VOCAB = 4, 50


class Engine:
    """One step at a time: which positions are computed, what was drafted, what was said."""

    def __init__(self, layers: tuple[int, ...] = (0, 1, 2), **overrides: Any) -> None:
        given = {"proposal.drafters": ["eagle3"], "proposal.head.model": "x", "drafter.mode": "capture"}
        given |= {"drafter.capture.share": 1.0, **overrides}
        config = RollspecConfig.load(given, env={})
        self.engine = step.DraftEngine(config, 4096, "eagle3")
        faults: dict[str, int] = {}
        self.bridge = like(
            "rollspec.engine.bridge:Bridge", config=config, engine=self.engine, faults=faults, scheduled={}, running={},
            count=lambda cause: faults.update({cause: faults.get(cause, 0) + 1}),
        )  # fmt: skip
        self.layers = layers
        self.capture = Capture(self.bridge, None, layers)  # type: ignore[arg-type]

    def begin(self, req_id: str, prompt: list[int], limit: int = 100, **metadata: Any) -> None:
        self.engine.begin(req_id, prompt, limit)
        params = like("vllm:SamplingParams", temperature=0.7, extra_args={"rollspec": metadata} if metadata else None)
        self.bridge.running[req_id] = like("rollspec.engine.vllm.v2.adapter:ScheduledRequest", sampling_params=params)

    def step(self, batch: dict[str, tuple[int, int, list[int], list[int]]]) -> None:
        """`batch`: request -> (first position, positions computed, draft, tokens said)."""
        ids = list(batch)
        self.bridge.scheduled = {q: draft for q, (_, _, draft, _) in batch.items() if draft}
        drafts = [len(draft) for _, _, draft, _ in batch.values()]
        logits = torch.zeros(sum(n + 1 for n in drafts), VOCAB)
        for row in range(len(logits)):
            logits[row, row % VOCAB] = 5.0
        self.capture.look(logits, ids, drafts)
        rows, positions, at = [], [], 0
        for first, n, draft, said in batch.values():
            rows.append((at, n - (len(draft) + 1 - len(said) if draft else 0)))
            positions += range(first, first + n)
            at += n
        each = torch.tensor(positions, dtype=torch.float32)[:, None].repeat(1, H)
        aux = [each + 0.1 * i for i in range(4)][-1 - len(self.layers) :]
        starts = {q: b[0] for q, b in batch.items()}
        self.capture.step(ids, starts, [b[3] for b in batch.values()], rows, aux)
        for q, (_, _, _, said) in batch.items():
            if said:
                self.engine.requests[q].emitted = said
                self.engine.requests[q].append()
        self.capture.end()

    def one_rejected(self) -> Sample:
        """A request of which the target rejected the second of two drafted tokens."""
        self.begin("a", [1, 2, 3], limit=4)
        self.step({"a": (0, 3, [], [10])})
        self.engine.requests["a"].head.sent = True
        self.step({"a": (3, 3, [11, 12], [11, 9])})
        self.step({"a": (5, 1, [], [8])})
        (sample,) = self.capture.take()
        return sample

    def end(self, req_id: str) -> None:
        self.capture.finish(req_id, self.engine.requests.get(req_id))
        self.engine.finish(req_id)


def check(s: Sample, prompt: list[int], output: list[int]) -> None:
    n = len(s)
    assert s.validate().input_ids.tolist() == (prompt + output)[:n]
    expected = torch.arange(n, dtype=torch.float32)
    assert torch.equal(s.hidden_states[:, 0], expected) and torch.allclose(s.hidden_states[:, H], expected + 0.1)
    assert torch.allclose(s.verifier_last_hidden_states[:, 0], expected + 0.3)
    assert s.loss_mask.tolist() == [i >= len(prompt) for i in range(n)]


def test_a_request_becomes_a_sample() -> None:
    e = Engine()
    prompt = [1, 2, 3, 4, 5]
    e.begin("a", prompt, limit=7)
    e.step({"a": (0, 3, [], [])})  # the prompt in two parts
    e.step({"a": (3, 2, [], [10])})
    e.engine.requests["a"].head.sent = True
    e.engine.requests["a"].head.version = 3
    e.engine.swapped(4)  # after it was drafted
    e.step({"a": (5, 4, [11, 12, 13], [11, 12, 9])})  # two accepted, one rejected
    e.engine.requests["a"].head.sent = False
    e.step({"a": (8, 3, [20, 21], [20, 21, 22])})  # the seventh token: it ends here
    (s,) = e.capture.take()
    check(s, prompt, [10, 11, 12, 9, 20, 21, 22])
    v = s.verify
    assert v.position.tolist() == [5, 8] and v.lengths.tolist() == [3, 2] and v.accepted.tolist() == [2, 2]
    assert v.drafter == ("head", "suffix") and v.draft_version.tolist() == [3, -1] and s.draft_version == 3
    assert v.proposed.tolist() == [11, 12, 13, 20, 21]
    assert v.top_ids[:, 0].tolist() == [0, 1, 2, 0, 1] and s.temperature == pytest.approx(0.7)
    assert s.response_length == 7 and e.capture.bytes == 0
    e.end("a")
    assert e.capture.info()["samples"] == 1 and e.capture.info()["recording"] == 0


def test_a_specialists_draft_teaches_the_general_head_nothing_of_its_rejections() -> None:
    e = Engine()
    e.capture.by_another = {"a"}.__contains__
    e.begin("a", [1, 2, 3], limit=4)
    e.step({"a": (0, 3, [], [10])})
    e.engine.requests["a"].head.sent = True
    e.step({"a": (3, 4, [11, 12, 13], [11, 12, 9])})
    (s,) = e.capture.take()
    assert s.verify.drafter == ("specialist",) and s.draft_version == -1


def test_what_no_trainer_reads_of_the_logits_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-k over a vocabulary, for every proposed token, is most of what recording costs."""
    e = Engine()
    e.capture.logits = False
    monkeypatch.setattr(torch.Tensor, "topk", lambda *_, **__: pytest.fail("not needed"))
    s = e.one_rejected()
    assert not e.capture.off and s.validate().verify.top_ids.shape == (2, 0)
    assert s.verify.proposed.tolist() == [11, 12] and s.verify.accepted.tolist() == [1]
    assert Sample.from_bytes(s.to_bytes()).verify.logsumexp.shape == (2,)


def test_of_a_later_turn_only_what_it_says_is_a_target() -> None:
    """Not what the policy said before, which was one, and not what a tool said. Its reward is the rollout's."""
    e = Engine()
    prompt = [1, 2, 3, 20, 21, 9, 9]  # the first prompt, the first turn, the tool
    e.engine.begin("a", prompt, 5, turn=Turn("x", 1, 3, 5))
    e.bridge.running["a"] = like("rollspec.engine.vllm.v2.adapter:ScheduledRequest", sampling_params=None)
    e.step({"a": (0, 7, [], [30])})
    e.step({"a": (7, 4, [31, 32, 33], [31, 32, 33, 34])})
    (s,) = e.capture.take()
    assert s.input_ids.tolist() == [*prompt, 30, 31, 32, 33] and s.loss_mask.tolist() == [False] * 7 + [True] * 4
    assert (
        s.prompt_key == prompt_key([1, 2, 3]) and s.request_id == f"{s.prompt_key}:{prompt_key([30, 31, 32, 33, 34])}"
    )


def test_a_draft_model_gets_tokens_best_tokens_and_the_last_layer_alone() -> None:
    e = Engine(layers=())
    s = e.one_rejected()
    assert s.validate().hidden_states.shape == (len(s), 0) and s.verifier_last_hidden_states.shape == (len(s), H)
    assert s.verify.drafter == ("head",) and s.verify.top_ids[:, 0].tolist() == [0, 1]
    again = Sample.from_bytes(s.to_bytes())
    assert again.hidden_states.shape == s.hidden_states.shape and len(again.windows(1)[0]) <= 16


def test_preempted_aborted_and_forgotten_requests() -> None:
    e = Engine()
    for q in ("a", "b", "c"):
        e.begin(q, [1, 2, 3])
    e.step({q: (0, 3, [], [10]) for q in ("a", "b", "c")})
    for i in range(6):
        e.step({"a": (3 + i, 1, [], [11 + i]), "b": (3 + i, 1, [], [11 + i])})
    e.step({"a": (0, 5, [], [])})  # preempted, and computed again
    e.step({"a": (5, 5, [], [17])})
    e.end("b")  # aborted
    e.end("c")  # aborted after one token: too short to teach anything
    e.end("a")
    b, a = e.capture.take()
    check(a, [1, 2, 3], [10, 11, 12, 13, 14, 15, 16, 17])
    check(b, [1, 2, 3], [10, 11, 12, 13, 14, 15, 16])
    assert e.capture.bytes == 0 and not e.capture._recordings and not e.capture._seen


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "HOLD_BYTES", 1 << 16)
    e = Engine()
    for i in range(60):
        e.begin(f"{i}", [1, 2, 3])
        e.step({f"{i}": (0, 3, [], [10])})
        e.step({f"{i}": (3, 30, [], list(range(10, 40)))})
        e.end(f"{i}")
        assert e.capture.bytes <= 1 << 16
    assert e.capture.counts["dropped"] > 0
    assert e.capture.take()[-1].input_ids.tolist()[:3] == [1, 2, 3], "the newest stay"


def test_no_new_request_is_recorded_while_it_costs_too_much() -> None:
    e = Engine(**{"drafter.capture.share": 0.01})
    e.capture.stepped(1.0)
    e.begin("a", [1, 2, 3])
    e.step({"a": (0, 3, [], [10])})
    assert e.capture.counts["recorded"] == 1
    e.capture._share[0] = 1.0
    e.begin("b", [1, 2, 3])
    e.step({"b": (0, 3, [], [10])})
    assert e.capture.counts == {"recorded": 1, "samples": 0, "dropped": 0, "skipped": 1, "tokens": 0, "private": 0}


def test_private_requests_are_not_recorded_and_neither_is_anything_while_it_is_paused() -> None:
    e = Engine()
    e.begin("secret", [1, 2, 3], domain="code", private=True)
    e.begin("open", [1, 2, 3], domain="code")
    e.step({"secret": (0, 3, [], [4]), "open": (0, 3, [], [4])})
    assert (e.capture.counts["recorded"], e.capture.counts["private"]) == (1, 1)
    e.capture.paused = True
    e.begin("later", [1, 2, 3])
    e.step({"later": (0, 3, [], [4])})
    assert e.capture.counts["recorded"] == 1 and e.capture.counts["skipped"] == 1


def test_files_are_whole_and_a_fault_only_ends_the_capture(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    e = Engine()
    e.begin("a", [1, 2, 3], limit=6)
    e.step({"a": (0, 3, [], [10])})
    e.step({"a": (3, 5, [], [11, 12, 13, 14, 15])})
    assert e.capture.drain(tmp_path)["samples"] == 1
    (path,) = tmp_path.iterdir()
    assert Sample.from_bytes(path.read_bytes()).response_length == 6
    e.begin("b", [1, 2, 3])
    e.capture.step(["b"], {}, [[1]], [(0, 1)], None)  # a step that cannot be
    assert e.capture.off and len(e.bridge.faults) == 1 and "no training samples" in caplog.text
    e.step({"b": (0, 3, [], [10])})
