"""Several heads beside each other on a speculator that is counted with: who drafts, what is read, who is left out."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_like import check, like, plays

torch = pytest.importorskip("torch")

from rollspec.engine.vllm import specialists  # noqa: E402
from rollspec.engine.vllm.specialists import Specialists  # noqa: E402
from rollspec.head.ranks import Ranks  # noqa: E402

K = 3
SPECULATOR = "vllm.v1.worker.gpu.spec_decode.eagle.speculator:EagleSpeculator"
TARGET_SLOTS = 7


@plays(SPECULATOR)
class Fake:
    """A speculator whose heads draft and are as sure as they say, [requests, K] each."""

    def __init__(self) -> None:
        self.vllm_config = like(
            "vllm.config:VllmConfig",
            compilation_config=like("vllm.config:CompilationConfig", static_forward_context={}),
        )
        self.block_tables = like(
            "vllm.v1.worker.gpu.block_table:BlockTables", slot_mappings=torch.full((1, 4), TARGET_SLOTS)
        )
        check(SPECULATOR, "model", "propose", "load_draft_model", *vars(self))
        self.probs = torch.zeros(4, K)
        self.tokens = torch.zeros(4, K, dtype=torch.int64)
        self.model: Any = None
        self.ran: list[tuple[Any, dict[str, Any]]] = []
        self.loaded: list[str] = []

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        self.loaded.append("general")
        return head(5, [0.5, 0.5, 0.5])

    def propose(self, input_batch: Any, **kwargs: Any) -> Any:
        self.ran.append((self.model, kwargs))
        if not kwargs.get("dummy_run"):
            assert bool((self.block_tables.slot_mappings == TARGET_SLOTS).all()), "a head reads at another one's slots"
            self.block_tables.slot_mappings.fill_(-1)
            passes = kwargs["num_speculative_tokens"]
            self.probs[: input_batch.num_reqs, :passes] = self.model.sure[: input_batch.num_reqs, :passes]
            self.tokens.fill_(self.model.token)
        return self.tokens[: input_batch.num_reqs]


def head(token: int, *sure: list[float]) -> Any:
    found = torch.nn.Linear(2, 2)
    found.token, found.sure = token, torch.tensor([*sure, *sure][:2])
    return found


def load(monkeypatch: pytest.MonkeyPatch, heads: dict[str, Any]) -> tuple[Fake, Specialists]:
    """A speculator that has loaded the general head and `heads`; one that is an error cannot be."""
    speculator = Fake()

    def read(found: Specialists, folder: str) -> Any:
        found._layers[f"specialist_{folder}"] = object()
        if isinstance(heads[folder], Exception):
            raise heads[folder]
        return heads[folder]

    monkeypatch.setattr(Specialists, "_load", read)
    specialists.arrange(speculator, {name: name for name in heads}, Ranks())
    speculator.model = speculator.load_draft_model(torch.nn.Module(), set())
    found = specialists.of(speculator)
    assert found is not None
    return speculator, found


def step(speculator: Fake, passes: int = K, **kwargs: Any) -> Any:
    batch = like("vllm.v1.worker.gpu.input_batch:InputBatch", num_reqs=2, req_ids=["a", "b"])
    speculator.block_tables.slot_mappings.fill_(TARGET_SLOTS)
    return speculator.propose(batch, num_speculative_tokens=passes, **kwargs)


def test_the_most_confident_drafts_for_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    # `code` begins surer than the general head for a, which expects more tokens; for b it is surer of all.
    speculator, found = load(monkeypatch, {"code": head(9, [0.6, 0.0, 0.0], [0.9, 0.9, 0.9])})
    found.attach(speculator.probs)
    assert step(speculator).tolist() == [[5] * K, [9] * K]
    assert speculator.probs[:2].tolist() == [[0.5] * K, [pytest.approx(0.9)] * K]
    assert [m for m, _ in speculator.ran] == found.models, "every head reads the step"
    assert speculator.model is found.models[0]
    found.scored("a", 1, 3)
    found.scored("b", 2, 3)
    found.scored("b", 3, 3)  # without a draft for it since
    found.scored("gone", 1, 1)
    assert found.info() == {
        "general": {"drafts": 1, "known": 3, "accepted": 1}, "code": {"drafts": 1, "known": 3, "accepted": 2},
    }  # fmt: skip


def test_a_domains_head_drafts_for_its_requests_and_no_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    speculator, found = load(monkeypatch, {"code": head(9, [0.1] * K), "math": head(7, [0.9] * K)})
    domains = {"a": "code", "b": "weather"}
    found.attach(speculator.probs, domains.__getitem__)
    assert step(speculator).tolist() == [[9] * K, [5] * K], "the domain decides, not how sure a head is"
    assert speculator.probs[0].tolist() == [pytest.approx(0.1)] * K
    assert [m for m, _ in speculator.ran] == found.models[:2], "no request is about math"
    found.scored("a", 1, 3)
    found.scored("b", 2, 3)
    assert found.drafted("a") and not found.drafted("b") and not found.drafted("gone"), "who is to learn from it"
    assert [t["accepted"] for t in found.info().values()] == [2, 1, 0]
    speculator.ran.clear()
    domains["b"] = "code"  # a request keeps its head: its KV is in that head's cache
    assert step(speculator).tolist() == [[9] * K, [5] * K]


def test_only_the_passes_of_the_step_count(monkeypatch: pytest.MonkeyPatch) -> None:
    speculator, found = load(monkeypatch, {"code": head(9, [0.6, 0.0, 0.0])})
    found.attach(speculator.probs)
    speculator.probs.fill_(1.0)  # of an earlier step
    assert step(speculator, passes=1)[:, 0].tolist() == [9, 9]
    assert step(speculator, passes=0).shape == (2, K), "heads read a step without passes"
    assert len(speculator.ran) == 4


def test_heads_never_replay_the_one_graph_and_all_are_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    speculator, found = load(monkeypatch, {"code": head(9, [0.6, 0.0, 0.0])})
    step(speculator, dummy_run=True)
    found.attach(speculator.probs)
    step(speculator)
    assert [m for m, _ in speculator.ran] == 2 * found.models
    assert all(kwargs["is_profile"] for _, kwargs in speculator.ran)


def test_the_general_head_is_back_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    speculator, found = load(monkeypatch, {"code": head(9, [0.6, 0.0, 0.0])})
    seen: list[Any] = []

    def read(batch: str, spans: list[int]) -> None:
        seen.append((speculator.model, batch, spans))
        if len(seen) == 2:
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        found.each(read, "batch", [1])
    assert seen == [(m, "batch", [1]) for m in found.models] and speculator.model is found.models[0]


def test_a_head_that_cannot_be_loaded_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wild = head(1, [1.0] * K)
    wild.weight.data[0, 0] = float("nan")
    given = {"math": ValueError("a shape"), "wild": wild, "code": head(9, [0.6] * K)}
    speculator, found = load(monkeypatch, given)
    assert found.names == ["general", "code"]
    assert "'math' in math is left out (ValueError: a shape)" in caplog.text
    assert "'wild' in wild is left out (ValueError: it has NaN or infinity in it)" in caplog.text
    assert len(caplog.records) == 2
    assert list(found._layers) == ["specialist_code"], "their layers would get a KV cache"
    assert speculator.load_draft_model(None, set()).token == 5 and speculator.loaded == ["general"] * 2, (
        "the copy for a swap is of the general head alone"
    )


def test_without_any_the_speculator_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    speculator = Fake()
    monkeypatch.setattr(Specialists, "_load", lambda *_: (_ for _ in ()).throw(OSError("gone")))
    specialists.arrange(speculator, {"code": "code"}, Ranks())
    speculator.load_draft_model(torch.nn.Module(), set())
    assert specialists.of(speculator) is None and speculator.propose.__func__ is Fake.propose


def test_weights_come_back_after_a_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    code = head(9, [0.6] * K)
    before = code.weight.detach().clone()
    _, found = load(monkeypatch, {"code": code})
    code.weight.data.fill_(77)
    found.stale = True
    found.restore()
    assert torch.equal(code.weight, before) and not found.stale
