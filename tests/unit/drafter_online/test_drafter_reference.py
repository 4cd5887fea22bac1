from __future__ import annotations

from pathlib import Path

import torch
from drafter_target import AUX, VOCABULARY, head, model, sample, sequence
from reference_samples import capture, logits, proposals, replay, verify, verify_all

from drafter_online.model import Eagle3
from drafter_online.packing import pack


def test_hidden_states_are_those_transformers_shows(tiny_target: Path) -> None:
    m = model(tiny_target)
    ids = sequence(0, 12)
    s = capture(m, ids, 4, (0, 2, 4), request_id="r").validate()
    with torch.no_grad():
        out = m(torch.tensor([ids]), output_hidden_states=True)
    h = s.verifier_last_hidden_states.shape[1]
    assert torch.equal(s.hidden_states[:, :h], out.hidden_states[0][0])
    assert torch.equal(s.hidden_states[:, h : 2 * h], out.hidden_states[2][0])
    assert torch.equal(s.hidden_states[:, 2 * h :], s.verifier_last_hidden_states)  # layer 4 of 4: after the last
    # transformers shows the last one after the norm.
    with torch.no_grad():
        assert torch.equal(m.model.norm(s.verifier_last_hidden_states), out.hidden_states[-1][0])


def test_a_verify_step_holds_the_targets_distribution(tiny_target: Path) -> None:
    m = model(tiny_target)
    ids = sequence(1, 14)
    step = verify(m, ids, 5, [ids[6], (ids[7] + 1) % VOCABULARY, 3], k=VOCABULARY)
    assert step.accepted == 1 and step.top_ids is not None and step.top_logits is not None
    with torch.no_grad():
        logits = m(torch.tensor([[*ids[:6], ids[6], (ids[7] + 1) % VOCABULARY]])).logits[0, 5:]
    full = torch.zeros(3, VOCABULARY).scatter(1, step.top_ids, step.top_logits)
    torch.testing.assert_close(full, logits)
    torch.testing.assert_close(step.logsumexp, logits.logsumexp(-1))


def test_proposals_are_the_greedy_chain(tiny_target: Path) -> None:
    for kw in ({}, {"draft_vocab_size": 30, "counts": {i: 1 for i in range(5, 35)}}):
        drafter = Eagle3(head(tiny_target, **kw))
        s = sample(tiny_target, 2, 16)
        rows = proposals(drafter, s, 3)
        assert rows.shape == (16, 3) and rows[0].tolist() == [-1] * 3
        to_target = torch.arange(VOCABULARY) if not kw else torch.arange(5, 35)
        for t in (1, 5, 15):
            # One chain by hand: the sequence up to t, then the proposals so far as if they had been emitted.
            ids = s.input_ids[: t + 1]
            for i in range(3):
                as_if = torch.cat([ids, torch.tensor(rows[t, :i].tolist(), dtype=torch.int64)])
                longer = sample(tiny_target, 2, 20).window(0, len(as_if))
                object.__setattr__(longer, "input_ids", as_if)
                row = logits(drafter, pack([longer], steps=i + 1), i + 1)[i][0, t - 1]
                assert int(to_target[row.argmax()]) == int(rows[t, i])


def test_replay_walks_the_sequence_as_an_engine_would(tiny_target: Path) -> None:
    drafter = Eagle3(head(tiny_target))
    s = sample(tiny_target, 4, 30, AUX[0])
    r = replay(model(tiny_target), drafter, s, 3).validate()
    positions, accepted = r.verify.position.tolist(), r.verify.accepted.tolist()
    assert positions[0] == 1 and all(
        b == a + n + 1 for a, b, n in zip(positions, positions[1:], accepted, strict=False)
    )
    rows = proposals(drafter, s, 3)
    assert r.verify.proposed.reshape(-1, 3).tolist() == [rows[p].tolist() for p in positions]


def test_all_verify_steps_in_one_pass_are_what_each_is_alone(tiny_target: Path) -> None:
    m = model(tiny_target)
    ids = sequence(2, 20)
    drafts = [[ids[p + 1], (ids[p + 2] + 3) % VOCABULARY, 7] for p in (4, 6, 17)]
    for p, draft, step in zip((4, 6, 17), drafts, verify_all(m, ids, (4, 6, 17), drafts, k=VOCABULARY), strict=True):
        alone = verify(m, ids, p, draft, k=VOCABULARY)
        assert (step.position, step.proposed, step.accepted) == (alone.position, alone.proposed, alone.accepted)
        rows = [torch.zeros(3, VOCABULARY).scatter(1, x.top_ids, x.top_logits) for x in (step, alone)]
        torch.testing.assert_close(*rows, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(step.logsumexp, alone.logsumexp, atol=1e-4, rtol=1e-4)
    assert verify_all(m, ids, (), ()) == []
