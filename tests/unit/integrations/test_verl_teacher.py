"""The policy's log-prob pass as teacher: samples are what the model computed, and the model is unchanged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_like import like, plays

torch = pytest.importorskip("torch")
omegaconf = pytest.importorskip("omegaconf")
pytest.importorskip("verl")
transformers = pytest.importorskip("transformers")

from rollspec_verl import teacher  # noqa: E402

from rollspec.config import resolve  # noqa: E402
from rollspec.proposal.base import as_tokens, prompt_key  # noqa: E402

LAYERS, HIDDEN = 5, 32
AUX = (1, 2, 4)


@pytest.fixture
def model(tmp_path: Path) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).eval()
    made.save_pretrained(tmp_path / "model")
    made.folder = str(tmp_path / "model")
    return made


@pytest.fixture(params=["as it is", "FSDP2"])
def trained(model: Any, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """The model, also as verl's engine shards it, on one rank."""
    if request.param == "as it is":
        yield model
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
        yield model
    finally:
        torch.distributed.destroy_process_group()


def made(model: Any, share: float = 1.0) -> teacher.Teacher:
    config = resolve("default", env={}, overrides={
        "proposal.drafters": ["suffix", "eagle3"], "drafter.mode": "policy", "drafter.capture.share": share,
        "drafter.endpoint": "tcp://127.0.0.1:9",
    })  # fmt: skip
    return teacher.Teacher(config, model.folder)


def batch(*rows: tuple[int, int], mask: Any = None) -> dict[str, Any]:
    """A micro-batch as verl nests it; rows: (prompt tokens, response tokens)."""
    torch.manual_seed(1)
    whole = [torch.randint(0, 64, (p + r,)) for p, r in rows]

    def jagged(parts: list[Any]) -> Any:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    masks = [torch.ones(r, dtype=torch.int64) for _, r in rows] if mask is None else mask
    return {
        "input_ids": jagged(whole),
        "prompts": jagged([w[:p] for w, (p, _) in zip(whole, rows, strict=True)]),
        "response_mask": jagged(masks),
        "temperature": 0.7,
    }


@plays("verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead")
class Engine:
    """The part of verl's FSDP engine that the hooks meet: its module, and a step over a micro-batch."""

    use_ulysses_sp = False

    def __init__(self, module: Any, packed: bool) -> None:
        self.module, self.packed = module, packed

    def forward_step(self, micro_batch: dict[str, Any], loss_function: Any, forward_only: bool) -> Any:
        ids = micro_batch["input_ids"]
        if self.packed:
            lengths = ids.offsets().diff().tolist()
            positions = torch.cat([torch.arange(n) for n in lengths])[None]
            return self.module(input_ids=ids.values()[None], position_ids=positions, use_cache=False).logits
        padded = torch.nested.to_padded_tensor(ids, 0)
        mask = torch.arange(padded.shape[1])[None] < ids.offsets().diff()[:, None]
        return self.module(input_ids=padded, attention_mask=mask.long(), use_cache=False).logits


def taught(t: teacher.Teacher, engine: Engine, *batches: dict[str, Any]) -> list[Any]:
    """The samples of one pass over `batches`, as verl's worker runs it."""
    with torch.no_grad(), t.reading(engine):
        for micro in batches:
            teacher._forward_step(Engine.forward_step, engine, micro, None, True)
    return t.inbox.take()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher.Teacher, "_send", lambda self: None)


@pytest.mark.parametrize("packed", [False, True])
def test_samples_are_what_the_model_computed(model: Any, packed: bool) -> None:
    micro = batch((5, 9), (3, 6), (4, 2))  # the last response is too short
    samples = taught(made(model), Engine(model, packed), micro)
    assert len(samples) == 2
    for sample, row, prompt in zip(samples, micro["input_ids"].unbind(), (5, 3), strict=False):
        sample.validate()
        assert torch.equal(sample.input_ids, row)
        if packed:  # without varlen kernels a packed row attends to the ones before it: only the first is alone
            alone = samples[0].input_ids
            if sample is not samples[0]:
                continue
            row = alone
        with torch.no_grad():
            states = model(input_ids=row[None], output_hidden_states=True, use_cache=False).hidden_states
        want = torch.cat([states[i][0] for i in AUX], dim=-1)
        torch.testing.assert_close(sample.hidden_states, want, atol=1e-5, rtol=1e-4)
        normed = model.model.norm(sample.verifier_last_hidden_states)
        torch.testing.assert_close(normed, states[-1][0], atol=1e-5, rtol=1e-4)
        assert sample.loss_mask.tolist() == [False] * prompt + [True] * (len(row) - prompt)
        assert sample.temperature == pytest.approx(0.7)
        key = prompt_key(as_tokens(row[:prompt].numpy()))
        assert sample.prompt_key == key and sample.request_id == f"{key}:{prompt_key(as_tokens(row[prompt:].numpy()))}"


def test_what_a_tool_said_is_context(model: Any) -> None:
    said = torch.tensor([1, 1, 0, 0, 0, 1, 1, 1])
    (sample,) = taught(made(model), Engine(model, False), batch((4, 8), mask=[said]))
    assert sample.loss_mask.tolist() == [False] * 4 + said.bool().tolist()


def test_gradients_and_outputs_are_the_same_bit_by_bit(trained: Any) -> None:
    model, parameters = trained, list(trained.parameters())  # an optimizer's: FSDP2 has others between two passes

    def run(t: teacher.Teacher | None) -> tuple[Any, list[Any]]:
        engine, micro = Engine(model, False), batch((5, 9), (3, 6))
        state = torch.random.get_rng_state()
        if t is not None:
            assert len(taught(t, engine, micro)) == 2  # the hooks stay on the model
        else:
            with torch.no_grad():  # the log-prob pass is there without a teacher, too
                engine.forward_step(micro, None, True)
        for p in parameters:
            p.grad = None
        logits = engine.forward_step(micro, None, False)
        logits.float().log_softmax(-1)[..., 0].sum().backward()
        assert torch.equal(state, torch.random.get_rng_state())
        grads = [p.grad for p in parameters]
        assert all(g is not None and g.abs().sum() > 0 for g in grads)
        return logits.detach().clone(), [(g.to_local() if hasattr(g, "to_local") else g).clone() for g in grads]

    logits, grads = run(None)
    again, with_it = run(made(model))
    assert torch.equal(logits, again) and all(map(torch.equal, grads, with_it))
    t = made(model)
    read = taught(t, Engine(model, False), batch((5, 9)))
    assert read and not any(s.hidden_states.requires_grad for s in read)


def test_a_share_of_the_time_bounds_what_is_taken(model: Any) -> None:
    t, engine = made(model, share=0.01), Engine(model, False)
    taught(t, engine, batch((5, 9)))
    t.spent, t.began = 1.0, time.perf_counter() - 10.0
    assert not taught(t, engine, batch((5, 9))) and t.counts["skipped"] == 1
    t.began = time.perf_counter() - 1000.0
    assert taught(t, engine, batch((5, 9)))


def test_a_fault_ends_the_teaching_and_not_the_pass(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    t, engine = made(model), Engine(model, False)
    broken = batch((5, 9))
    del broken["prompts"]
    assert not taught(t, engine, broken, batch((5, 9)))
    assert t.fault is not None and "KeyError" in t.fault and t.info()["fault"] == t.fault
    assert caplog.text.count("gets no more samples of the policy") == 1
    flat = Engine(torch.nn.Linear(2, 2), False)
    t = made(model)
    with t.reading(flat):
        pass
    assert "no list of decoder layers" in str(t.fault)


def test_settings_that_cannot_be_read_end_nothing(caplog: pytest.LogCaptureFixture) -> None:
    given = {"rollout": {"custom": {"rollspec": {"drafter": {"mode": "nonsense"}}}}}
    rank = like("verl.workers.engine_workers:ActorRolloutRefWorker", config=omegaconf.OmegaConf.create(given))
    assert teacher._log_probs(lambda self, data: data, rank, 7) == 7
    assert teacher._log_probs(lambda self, data: data, rank, 8) == 8
    assert caplog.text.count("gets no samples of the policy") == 1 and teacher._info(rank) == {}


def test_metrics_count_since_the_last_step_and_say_a_fault_once(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = like("verl.trainer.ppo.v1.trainer_base:PPOTrainer")
    first = [{"samples": 3, "dropped": 1, "share": 0.01}, {"samples": 2, "dropped": 0, "share": 0.02}, {}]
    out = teacher.metrics(first, trainer)
    assert out["rollspec/drafter/policy_samples"] == 5.0 and out["rollspec/drafter/policy_share"] == 0.02
    again = teacher.metrics([{**first[0], "samples": 9, "fault": "x: y"}, first[1]], trainer)
    assert again["rollspec/drafter/policy_samples"] == 6.0 and again["rollspec/drafter/policy_dropped"] == 0.0
    teacher.metrics([{**first[0], "samples": 9, "fault": "x: y"}, first[1]], trainer)
    assert capsys.readouterr().out.count("x: y") == 1
