"""Packed documents are closed to each other, and replayed errors are what the drafter would see in the engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_target import AUX, VOCABULARY, head, model, sample, sequence
from reference_samples import capture, verify
from reference_samples import logits as logits_of
from reference_samples import targets as targets_of

from drafter_online import losses, objective
from drafter_online.errors import Preempted
from drafter_online.model import DraftModel, Eagle3
from drafter_online.objective import LossTerms, evaluate
from drafter_online.packing import ALWAYS, pack
from drafter_online.samples import Sample

STEPS = 3


@pytest.fixture(scope="module")
def eagle(tiny_target: Path) -> Eagle3:
    return Eagle3(head(tiny_target))


@pytest.fixture(scope="module")
def small(tiny_target: Path) -> DraftModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=256,
        )  # fmt: skip
        return DraftModel(LlamaForCausalLM(config).eval(), tiny_target)


def test_alignment(tiny_target: Path) -> None:
    a, b = sample(tiny_target, 0, 9), sample(tiny_target, 1, 7)
    p = pack([a, b], [2.0, 0.5], steps=STEPS)
    assert p.input_ids[0].tolist() == [*a.input_ids[1:].tolist(), *b.input_ids[1:].tolist()]
    assert p.document_ids[0].tolist() == [0] * 8 + [1] * 6 and p.tokens == 14
    assert torch.equal(p.hidden_states[0, :8], a.hidden_states[:-1])
    assert torch.equal(p.verifier_last_hidden_states[0, 8:14], b.verifier_last_hidden_states[1:])
    assert p.position_ids[0].tolist() == [*range(1, 9), *range(1, 7)]
    assert p.weight[0].tolist() == [2.0] * 8 + [0.5] * 6
    assert int(p.forced_until.min()) == ALWAYS and len(p.rejected.column) == 0


@pytest.mark.parametrize("kind", ["eagle", "small"])
def test_documents_do_not_see_each_other(tiny_target: Path, kind: str, request: pytest.FixtureRequest) -> None:
    drafter: Any = request.getfixturevalue(kind)
    steps = STEPS if kind == "eagle" else 1
    a, b, c = (sample(tiny_target, i, 15) for i in range(3))
    alone = logits_of(drafter, pack([b], steps=steps), steps)
    for others, at in (([a, b, c], 14), ([b, a], 0), ([c, c, b, a], 28)):
        packed = logits_of(drafter, pack(others, steps=steps), steps)
        for i, (x, y) in enumerate(zip(alone, packed, strict=True)):
            n = 14 - i  # the last columns of a document have nothing of its own left to read at step i
            torch.testing.assert_close(x[0, :n], y[0, at : at + n], atol=1e-5, rtol=1e-5)
            assert bool(y.isfinite().all())


def test_no_target_of_the_next_document_is_learnt(tiny_target: Path, eagle: Eagle3) -> None:
    a, b = sample(tiny_target, 0, 12), sample(tiny_target, 1, 12)
    changed = dataclasses.replace(
        b,
        input_ids=(b.input_ids + 7) % VOCABULARY,
        hidden_states=b.hidden_states * 3,
        verifier_last_hidden_states=-b.verifier_last_hidden_states,
    )
    terms = LossTerms(rejected=1.0)

    def loss(other: Sample) -> torch.Tensor:
        p = pack([a, other], [1.0, 0.0], steps=STEPS)  # the second counts nothing
        return evaluate(eagle, eagle.states(p, STEPS), p, terms).loss

    torch.testing.assert_close(loss(b), loss(changed), atol=1e-6, rtol=1e-5)


def test_replayed_errors_are_the_states_the_engine_was_in(tiny_target: Path, eagle: Eagle3) -> None:
    s = sample(tiny_target, 3, 24, errors=1)
    (at,), proposed = s.verify.position.tolist(), s.verify.proposed.tolist()
    assert s.verify.accepted.tolist() == [1]
    p = pack([s], steps=STEPS, rejected=True)
    assert p.forced_until[0, at - 1] == 1 and int((p.forced_until == ALWAYS).sum()) == 22
    assert p.rejected.column.tolist() == [at - 1] * 2
    assert p.rejected.step.tolist() == [1, 2]
    # The same prefix, had the proposals been emitted: teacher forcing then gives the very same states.
    ids = s.input_ids.clone()
    ids[at + 1 : at + 4] = torch.tensor(proposed)
    as_if = dataclasses.replace(s, input_ids=ids)
    want = logits_of(eagle, pack([as_if], steps=STEPS), STEPS)
    have = logits_of(eagle, p, STEPS)
    plain = logits_of(eagle, pack([s], steps=STEPS), STEPS)
    for i in range(STEPS):
        torch.testing.assert_close(have[i][0, at - 1], want[i][0, at - 1], atol=1e-5, rtol=1e-5)
        rest = [c for c in range(23) if c != at - 1]
        torch.testing.assert_close(have[i][0, rest], plain[i][0, rest], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(have[2][0, at - 1], plain[2][0, at - 1], atol=1e-4)


def test_a_rejection_after_four_accepted_tokens_is_learned_from(tiny_target: Path) -> None:
    """As long as drafts of five are trained for five: with fewer passes it would be lost."""
    ids, at = sequence(3, 24), 4
    wrong = (ids[at + 5] + 5) % VOCABULARY
    step = verify(model(tiny_target), ids, at, [*ids[at + 1 : at + 5], wrong], k=VOCABULARY)
    s = capture(model(tiny_target), ids, 4, AUX, steps=[step], request_id="r", prompt_key="p")
    assert s.verify.accepted.tolist() == [4]
    rejected = pack([s], steps=5, rejected=True).rejected
    assert rejected.column.tolist() == [at - 1] and rejected.step.tolist() == [4]
    assert len(pack([s], steps=4, rejected=True).rejected.column) == 0


def test_rejected_rows_say_what_the_target_says_there(tiny_target: Path, eagle: Eagle3) -> None:
    s = sample(tiny_target, 3, 24, errors=1)
    (at,), proposed = s.verify.position.tolist(), s.verify.proposed.tolist()
    p = pack([s], steps=STEPS, rejected=True)
    with torch.no_grad():
        read = torch.tensor([s.input_ids[: at + 1].tolist() + proposed])
        logits = model(tiny_target)(read).logits[0, at + 1 : at + 3]
    terms = LossTerms(accept=0.0, rejected=2.0)
    result = evaluate(eagle, eagle.states(p, STEPS), p, terms)
    z = torch.stack([logits_of(eagle, p, STEPS)[i][0, at - 1] for i in (1, 2)])
    forward = losses.forward_kl(z, logits).mean()
    assert result.terms["rejected"] == pytest.approx(float(forward), rel=1e-3)
    assert result.terms["loss"] == pytest.approx(float(2 * forward), rel=1e-3)


def test_only_the_heads_own_errors_are_replayed(tiny_target: Path) -> None:
    s = sample(tiny_target, 3, 24, errors=2)
    other = dataclasses.replace(s, verify=dataclasses.replace(s.verify, drafter=("suffix", "head")))
    assert len(pack([other], steps=STEPS, rejected=True).rejected.column) == 2
    assert len(pack([other], steps=STEPS).rejected.column) == 0


def test_a_model_of_sequences_learns_the_first_rejection_in_its_own_column(tiny_target: Path) -> None:
    s = sample(tiny_target, 3, 24, errors=1)
    p = pack([s], steps=1, rejected=True)
    (at,) = s.verify.position.tolist()
    assert p.rejected.column.tolist() == [at] and p.rejected.step.tolist() == [0] and len(p.replace_step) == 0


def test_accept_term_by_hand(tiny_target: Path, eagle: Eagle3) -> None:
    s = sample(tiny_target, 5, 14)
    p = pack([s], steps=2)
    z, t = logits_of(eagle, p, 2), targets_of(eagle, p)
    result = evaluate(eagle, eagle.states(p, 2), p, LossTerms())
    per = [losses.forward_kl(z[i][0, : 13 - i], t[0, i:])[s.loss_mask[1 + i :]].mean() for i in range(2)]
    assert result.terms["accept_0"] == pytest.approx(float(per[0]), rel=1e-5)
    assert result.terms["accept_1"] == pytest.approx(float(per[1]), rel=1e-5)
    assert result.terms["loss"] == pytest.approx(float(per[0] + 0.8 * per[1]), rel=1e-5)


@pytest.mark.parametrize("at_once", [1, 150, 1 << 22])
@pytest.mark.parametrize("kind", ["eagle", "pruned", "small"])
def test_parts_have_the_gradients_of_the_whole(
    tiny_target: Path, small: DraftModel, monkeypatch: pytest.MonkeyPatch, at_once: int, kind: str
) -> None:
    """All logits kept, and torch's own derivatives, against few at a time; a draft model's LM head is trained, too."""
    extra = {"draft_vocab_size": 30, "counts": {i: 1 for i in range(30)}} if kind == "pruned" else {}
    drafter: Any = small if kind == "small" else Eagle3(head(tiny_target, **extra))
    steps = 1 if kind == "small" else STEPS
    samples = [sample(tiny_target, 3, 24, errors=1), sample(tiny_target, 1, 17), sample(tiny_target, 2, 9)]
    p = pack(samples, [1.0, 0.3, 2.0], steps=steps, rejected=True)
    # A head that drafts fewer tokens than the engine kept has no "any other": its logarithm is of rounding errors.
    terms = LossTerms() if kind == "pruned" else LossTerms(rejected=0.7)
    monkeypatch.setitem(objective.LOGITS, "cpu", at_once)

    def gradients(loss: torch.Tensor) -> dict[str, torch.Tensor]:
        drafter.module.zero_grad()
        (loss / 2).backward()
        return {n: g.grad.clone() for n, g in drafter.module.named_parameters() if g.grad is not None}

    result = evaluate(drafter, drafter.states(p, steps), p, terms)
    z, t = logits_of(drafter, p, steps), targets_of(drafter, p)
    n, r = p.input_ids.shape[1], p.rejected
    whole = torch.zeros(())
    for i in range(steps):
        same = p.document_ids[0, : n - i] == p.document_ids[0, i:]
        mask = same & p.loss_mask[0, i:] & (p.forced_until[0, : n - i] >= i)
        w = p.weight[0, : n - i][mask]
        whole = whole + 0.8**i * (losses.forward_kl(z[i][0, : n - i][mask], t[0, i:][mask]) * w).sum() / w.sum()
    rows = torch.stack([x[0] for x in z])[r.step, r.column]
    ids = r.ids if drafter.to_draft is None else drafter.to_draft[r.ids]
    forward = losses.divergence(*losses.truncated(rows, ids, r.logits, r.logsumexp))
    w = p.weight[0, r.column]
    whole = whole + terms.rejected * (forward * w).sum() / w.sum()
    assert float(result.loss) == pytest.approx(float(whole), rel=1e-5)
    assert result.terms["loss"] == pytest.approx(float(whole), rel=1e-5)
    have, want = gradients(result.loss), gradients(whole)
    assert set(have) == set(want) and ("lm_head.weight" in have) is (kind == "small")
    for name, g in want.items():
        torch.testing.assert_close(have[name], g, atol=1e-6, rtol=1e-4)


def test_evaluation_asks_for_no_targets(tiny_target: Path, eagle: Eagle3, monkeypatch: pytest.MonkeyPatch) -> None:
    p = pack([sample(tiny_target, 1, 17)], steps=STEPS)
    want = evaluate(eagle, eagle.states(p, STEPS), p, LossTerms()).acceptance
    monkeypatch.setattr(eagle, "targets", None)
    with torch.no_grad():
        assert evaluate(eagle, eagle.states(p, STEPS), p, LossTerms()).acceptance == want


def test_temperature_and_weights_count(tiny_target: Path, eagle: Eagle3) -> None:
    hot = pack([sample(tiny_target, 5, 14, temperature=2.0)], steps=1)
    greedy = pack([sample(tiny_target, 5, 14, temperature=0.0)], steps=1)
    z, t = logits_of(eagle, hot, 1), targets_of(eagle, hot)
    mask, states = hot.loss_mask[0], eagle.states(hot, 1)

    def accept(p: Any, **kw: Any) -> float:
        return evaluate(eagle, states, p, LossTerms(**kw)).terms["accept_0"]

    assert accept(hot) == pytest.approx(float(losses.forward_kl(z[0][0], t[0] / 2)[mask].mean()), rel=1e-5)
    both = losses.forward_kl(z[0][0] / 2, t[0] / 2)[mask].mean()
    assert accept(hot, draft_sampling="probabilistic") == pytest.approx(float(both), rel=1e-5)
    assert accept(greedy) == pytest.approx(float(losses.forward_kl(z[0][0], t[0])[mask].mean()), rel=1e-5)
    assert LossTerms(objective="matched").divergence == "top1"
    assert LossTerms(objective="matched", draft_sampling="probabilistic").divergence == "lk_hybrid"


class Given:
    """Its states are its logits; it agrees with no other."""

    vocabulary, to_draft, trained_head = VOCABULARY, None, ()

    def score(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def targets(self, states: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(states), VOCABULARY)


def test_acceptance_counts_leading_matches(tiny_target: Path) -> None:
    s = sample(tiny_target, 0, 12, prompt=4)
    p = pack([s], steps=2)
    ids = p.input_ids[0]
    right = [torch.nn.functional.one_hot(ids.roll(-1 - i), VOCABULARY)[None].float() for i in range(2)]
    whole = evaluate(Given(), right, p, LossTerms()).acceptance
    assert whole.drafts == 7 and whole.reached == (7, 7) and whole.length == 3.0
    wrong = [right[0].clone(), right[1]]
    wrong[0][0, 5] = right[0][0, 6]
    assert evaluate(Given(), wrong, p, LossTerms()).acceptance.reached == (6, 6)


def test_preemption_between_steps(tiny_target: Path, eagle: Eagle3) -> None:
    asked = 0

    def interrupt() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    p = pack([sample(tiny_target)], steps=STEPS)
    with pytest.raises(Preempted):
        logits_of(eagle, p, STEPS, interrupt)
    assert asked == 3
    logits_of(eagle, p, STEPS)  # its hook is gone, and its LM head back
    assert not eagle.head.embed_tokens._forward_pre_hooks
