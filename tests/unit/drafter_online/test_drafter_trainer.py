"""Training on a tiny random target: it learns, resumes bit for bit, and survives what can happen to it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_target import VOCABULARY, filled, head, sample

from drafter_online import checkpoint as checkpoint_module
from drafter_online import head as heads
from drafter_online import trainer as trainer_module
from drafter_online.buffer import Buffer
from drafter_online.errors import HeadError, TrainingError, VersionError
from drafter_online.idle import Idle
from drafter_online.model import DraftModel, Eagle3
from drafter_online.trainer import DrafterTraining, Trainer
from drafter_online.versions import Versions


@pytest.fixture(scope="module")
def buffer(tiny_target: Path) -> Buffer:
    return filled(tiny_target, errors=2)


def settings(**kw: Any) -> DrafterTraining:
    return DrafterTraining(**{"batch_tokens": 96, "window_tokens": 48, "warmup_steps": 2, "learning_rate": 3e-3, **kw})


def trainer(tiny_target: Path, buffer: Buffer, folder: Path | None = None, **kw: Any) -> Trainer:
    return Trainer(Eagle3(head(tiny_target)), buffer, settings(**kw), checkpoints=folder)


def weights(t: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in t.drafter.module.named_parameters() if p.requires_grad}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"objective": "top1"},
        {"objective": "matched", "draft_sampling": "probabilistic"},
        {"rejected": 0.5},
        {"reward_beta": 1.0},
        {"precision": "bf16"},
    ],
)
def test_it_learns(tiny_target: Path, buffer: Buffer, terms: dict[str, Any]) -> None:
    t = trainer(tiny_target, buffer, **terms)
    held_out = [sample(tiny_target, 100 + i) for i in range(4)]
    first = [t.micro_step() for _ in range(4)]
    for _ in range(70):
        t.micro_step()
    last = [t.micro_step() for _ in range(4)]
    mean = [sum(r.terms["loss"] for r in reports) / 4 for reports in (first, last)]
    assert mean[1] < 0.8 * mean[0], mean
    assert ("rejected" in last[0].terms) is ("rejected" in terms)
    assert t.evaluate(held_out).drafts == 4 * 17
    assert t.drafter.module.training


def test_rewards_weight_the_loss_where_they_are_asked_to(tiny_target: Path) -> None:
    """Two siblings: what is learned of them differs with their rewards, and only with `reward_beta`."""

    def learned(rewards: tuple[float, float], beta: float) -> tuple[float, dict[str, torch.Tensor]]:
        buffer = Buffer()
        for i, reward in enumerate(rewards):
            buffer.add(sample(tiny_target, i, prompt_key="p", reward=reward))
        t = trainer(tiny_target, buffer, reward_beta=beta)
        return t.micro_step().terms["loss"], weights(t)

    loss, unweighted = learned((0.0, 1.0), 0.0)
    for rewards, beta, changes in (((0.0, 1.0), 1.0, True), ((1.0, 0.0), 0.0, False), ((1.0, 1.0), 1.0, False)):
        other, after = learned(rewards, beta)
        assert (abs(other - loss) > 1e-4) is changes and equal(after, unweighted) is not changes, (rewards, beta)
    assert learned((1.0, 0.0), 1.0)[0] != pytest.approx(learned((0.0, 1.0), 1.0)[0], abs=1e-4)


def test_frozen_parts_stay_the_targets(tiny_target: Path, buffer: Buffer) -> None:
    t = trainer(tiny_target, buffer)
    before = {n: p.clone() for n, p in t.drafter.module.state_dict().items() if "embed" in n or "lm_head" in n}
    t.micro_step()
    after = t.drafter.module.state_dict()
    assert len(before) == 3 and all(torch.equal(p, after[n]) for n, p in before.items())


@pytest.mark.parametrize("kw", [{}, {"precision": "bf16"}])
def test_resumes_bit_for_bit(tiny_target: Path, buffer: Buffer, tmp_path: Path, kw: dict[str, Any]) -> None:
    a = trainer(tiny_target, buffer, tmp_path / "state", **kw)
    for _ in range(4):
        a.micro_step()
    a.checkpoint()
    buffer.save(tmp_path / "buffer")
    reports = [a.micro_step() for _ in range(5)]
    a.close()
    b = trainer(tiny_target, Buffer.load(tmp_path / "buffer", buffer.config), tmp_path / "state", **kw)
    with torch.no_grad():
        b.drafter.module.fc.weight.add_(1.0)  # a fresh process has other weights
    assert b.resume() and b.counts.micro_steps == 4
    again = [b.micro_step() for _ in range(5)]
    assert [r.terms for r in again] == [r.terms for r in reports] and equal(weights(a), weights(b))
    assert b.counts == a.counts


@pytest.mark.parametrize("kw", [{}, {"precision": "bf16"}])
def test_goes_on_after_a_move_as_if_there_had_been_none(
    tiny_target: Path, buffer: Buffer, tmp_path: Path, kw: dict[str, Any]
) -> None:
    moved, stayed = trainer(tiny_target, buffer, tmp_path, **kw), trainer(tiny_target, buffer, **kw)
    for _ in range(3):
        moved.micro_step(), stayed.micro_step()
    moved.to("cpu")
    assert [moved.micro_step().terms for _ in range(3)] == [stayed.micro_step().terms for _ in range(3)]
    assert equal(weights(moved), weights(stayed))


def test_nothing_to_resume(tiny_target: Path, buffer: Buffer, tmp_path: Path) -> None:
    assert not trainer(tiny_target, buffer, tmp_path).resume() and not trainer(tiny_target, buffer).resume()


def test_an_empty_buffer_is_no_step(tiny_target: Path) -> None:
    t = trainer(tiny_target, Buffer())
    assert t.micro_step().skipped == "empty" and t.counts.steps == 0


def test_preempted_it_changes_nothing_and_draws_the_same_again(tiny_target: Path, buffer: Buffer) -> None:
    a, b = trainer(tiny_target, buffer), trainer(tiny_target, buffer)
    a.micro_step()
    b.micro_step()
    for stop_at in (1, 2, 3, 4):
        asked = iter(range(1, 10))
        assert b.micro_step(lambda asked=asked, at=stop_at: next(asked) == at).skipped == "preempted"  # type: ignore[misc]
    assert b.counts.preempted == 4
    assert b.micro_step().terms == a.micro_step().terms and equal(weights(a), weights(b))


def poison(t: Trainer) -> None:
    with torch.no_grad():
        t.drafter.module.fc.weight.fill_(math.nan)


def test_a_loss_that_is_not_finite_is_skipped_and_counted(
    tiny_target: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = trainer(tiny_target, buffer)
    t.micro_step()
    before = weights(t)
    real = trainer_module.evaluate

    def nan(*args: Any) -> Any:
        result = real(*args)
        result.terms["loss"] = math.nan
        return result

    with monkeypatch.context() as m:
        m.setattr(trainer_module, "evaluate", nan)
        assert t.micro_step().skipped == "not_finite"
    assert equal(weights(t), before) and t.counts.not_finite == 1 and t.counts.restored == 0
    assert t.micro_step().skipped is None and t._bad_in_a_row == 0


def test_after_some_in_a_row_it_goes_back_to_the_last_good_state(tiny_target: Path, buffer: Buffer) -> None:
    t = trainer(tiny_target, buffer, max_bad_steps=2, checkpoint_every=2)
    for _ in range(2):
        t.micro_step()
    good = weights(t)
    t.micro_step()
    poison(t)
    assert [t.micro_step().skipped for _ in range(2)] == ["not_finite"] * 2
    assert t.counts.restored == 1 and equal(weights(t), good)
    assert t.micro_step().skipped is None and math.isfinite(t.last_loss)


def test_with_nothing_good_left_it_says_so(tiny_target: Path, buffer: Buffer) -> None:
    broken = head(tiny_target)
    with torch.no_grad():
        broken.fc.weight.fill_(math.nan)
    t = Trainer(Eagle3(broken), buffer, settings(max_bad_steps=1))
    with pytest.raises(TrainingError, match="no good state"):
        t.micro_step()


def test_a_gradient_that_is_not_finite_changes_nothing(
    tiny_target: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = trainer(tiny_target, buffer)
    before = weights(t)
    handle = t.drafter.module.fc.weight.register_hook(lambda g: g * math.inf)
    assert t.micro_step().skipped == "not_finite"
    handle.remove()
    assert equal(weights(t), before) and t.counts.steps == 0
    assert t.micro_step().skipped is None


class Fails:
    """A drafter whose backward or forward raises once."""

    def __init__(self, t: Trainer, error: Exception, where: str) -> None:
        self.error: Exception | None = error
        t.drafter.module.fc.weight.register_hook(self.backward) if where == "backward" else (
            t.drafter.module.norm.register_forward_pre_hook(self.forward)
        )

    def _raise(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        self._raise()
        return gradient

    def forward(self, _: Any, args: Any) -> None:
        self._raise()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_crash_within_a_step_leaves_no_trace(tiny_target: Path, buffer: Buffer, where: str) -> None:
    a, b = trainer(tiny_target, buffer), trainer(tiny_target, buffer)
    a.micro_step()
    b.micro_step()
    Fails(b, ValueError("boom"), where)
    with pytest.raises(ValueError, match="boom"):
        b.micro_step()
    assert b.counts.failed == 1
    assert b.micro_step().terms == a.micro_step().terms and equal(weights(a), weights(b))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_halves_the_batch(tiny_target: Path, buffer: Buffer, where: str) -> None:
    t = trainer(tiny_target, buffer, batch_tokens=200)
    Fails(t, torch.OutOfMemoryError("CUDA out of memory"), where)
    assert t.micro_step().skipped == "out_of_memory"
    assert t.batch_tokens == 100 and t.counts.out_of_memory == 1
    report = t.micro_step()
    assert report.skipped is None and 0 < report.tokens <= 100


def test_a_step_that_fails_is_wasted_idle_time(tiny_target: Path, buffer: Buffer) -> None:
    t = trainer(tiny_target, buffer)
    Fails(t, RuntimeError("device lost"), "backward")
    idle = Idle[Any](settle_seconds=0.0)
    with pytest.raises(RuntimeError, match="device lost"):
        idle.tick(lambda: None, t.micro_step)
    assert idle.counts.wasted > 0
    report = idle.tick(lambda: None, t.micro_step)
    assert report is not None and report.skipped is None and idle.counts.steps == 1


def test_it_trains_inside_an_engines_inference_mode(tiny_target: Path, buffer: Buffer) -> None:
    with torch.inference_mode():
        t = trainer(tiny_target, buffer)
        assert t.micro_step().skipped is None


def test_publishes_what_loads_as_a_head(tiny_target: Path, buffer: Buffer, tmp_path: Path) -> None:
    t = trainer(tiny_target, buffer)
    t.micro_step()
    store = Versions(tmp_path)
    one = t.publish(store, torch.bfloat16)
    t.micro_step()
    two = t.publish(store)
    v = store.load(two, base=t.drafter.base, newer_than=one)
    assert (one, two) == (1, 2) and v.manifest.parent == 1 and v.manifest.kind == "eagle3"
    assert v.manifest.provenance["counts"]["steps"] == 2 and v.manifest.provenance["speculators"] == "0.9.0"
    again = heads.load(store.path(two), tiny_target)
    assert all(torch.equal(p, t.drafter.module.state_dict()[n]) for n, p in again.state_dict().items())
    assert store.load(one).tensors["fc.weight"].dtype == torch.bfloat16
    with pytest.raises(VersionError, match="is for the target"):
        store.load(two, base="llama-l2-h8-v9-00000000")


def test_weights_that_are_not_finite_are_not_published(tiny_target: Path, buffer: Buffer, tmp_path: Path) -> None:
    t = trainer(tiny_target, buffer)
    poison(t)
    with pytest.raises(VersionError, match="NaN or infinity"):
        t.publish(Versions(tmp_path))
    assert Versions(tmp_path).numbers() == [] and t.parent is None


@pytest.mark.parametrize("how", ["truncate", "flip", "delete"])
def test_a_damaged_checkpoint_is_passed_over(tiny_target: Path, buffer: Buffer, tmp_path: Path, how: str) -> None:
    a = trainer(tiny_target, buffer, tmp_path)
    states = []
    for _ in range(2):
        a.micro_step()
        a.checkpoint()
        a.close()
        states.append(weights(a))
    older, newest = sorted(tmp_path.iterdir())
    data = bytearray(newest.read_bytes())
    data[-40] ^= 1
    if how == "delete":
        newest.unlink()
    else:
        newest.write_bytes(data[:-60] if how == "truncate" else data)
    b = trainer(tiny_target, buffer, tmp_path)
    assert b.resume() and b.counts.steps == 1 and equal(weights(b), states[0])
    older.write_bytes(b"")
    with pytest.raises(TrainingError, match=r"no checkpoint in .* can be read"):
        trainer(tiny_target, buffer, tmp_path).resume()


def test_a_checkpoint_of_another_drafter_is_refused(tiny_target: Path, buffer: Buffer, tmp_path: Path) -> None:
    a = trainer(tiny_target, buffer, tmp_path)
    a.checkpoint()
    a.close()
    other = Trainer(Eagle3(head(tiny_target, layers=2)), buffer, settings(), checkpoints=tmp_path)
    with pytest.raises(TrainingError, match="of another drafter"):
        other.resume()
    other.drafter.base = "another"
    with pytest.raises(TrainingError, match="is for the target"):
        other.resume()


def test_a_full_disk_costs_a_checkpoint_and_not_the_training(
    tiny_target: Path, buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = trainer(tiny_target, buffer, tmp_path, checkpoint_every=1)
    t.micro_step()
    t.close()

    def steps() -> list[str]:
        return sorted(p.name[:13] for p in tmp_path.glob("step-*"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(checkpoint_module, "replace", full)
        assert t.micro_step().skipped is None
        t.close()
    assert t.checkpoints is not None
    assert "No space left" in (t.checkpoints.failed or "") and steps() == ["step-00000001"]
    t.micro_step()
    t.close()
    assert t.checkpoints.failed is None and steps() == ["step-00000001", "step-00000003"]


def test_a_separate_draft_model_is_distilled_by_the_same_trainer(
    tiny_target: Path, buffer: Buffer, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    def small(**kw: Any) -> LlamaForCausalLM:
        torch.manual_seed(3)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        return LlamaForCausalLM(
            LlamaConfig(**{"vocab_size": VOCABULARY, "max_position_embeddings": 256, **sizes, **kw})
        )

    with pytest.raises(HeadError, match="must have its target's vocabulary"):
        DraftModel(small(vocab_size=50), tiny_target)
    for tied in (False, True):
        t = Trainer(DraftModel(small(tie_word_embeddings=tied), tiny_target), buffer, settings(rejected=0.5))
        reports = [t.micro_step() for _ in range(50)]
        assert reports[-1].terms["loss"] < 0.8 * reports[0].terms["loss"] and "rejected" in reports[-1].terms
        store = Versions(tmp_path / str(tied))
        v = store.load(t.publish(store))
        assert v.manifest.kind == "draft_model" and ("lm_head.weight" in v.tensors) is not tied
        again = AutoModelForCausalLM.from_pretrained(store.path(v.number))
        assert all(torch.equal(p, t.drafter.module.state_dict()[n]) for n, p in again.state_dict().items())
