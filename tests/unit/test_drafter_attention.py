"""Attention by documents against one dense mask: the same logits, gradients, and nothing between documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("speculators")

from drafter_target import head, sample, target  # noqa: E402
from reference_samples import logits  # noqa: E402

from drafter_online import attention  # noqa: E402
from drafter_online.model import Eagle3  # noqa: E402
from drafter_online.packing import pack  # noqa: E402

STEPS = 4


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target(tmp_path_factory.mktemp("attention"))


def both(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Eagle3, Eagle3]:
    """By documents, and by the library's own dense mask."""
    mine = Eagle3(head(path, seed=3))
    with monkeypatch.context() as m:
        m.setattr(attention, "use", lambda head: None)
        theirs = Eagle3(head(path, seed=3))
    assert mine.head._attn_impl == attention.NAME and theirs.head._attn_impl == "sdpa"
    return mine, theirs


def test_the_same_logits_and_gradients_as_one_dense_mask(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pack([sample(tiny_target, i, n) for i, n in enumerate((24, 9, 30))], steps=STEPS)
    gradients: list[dict[str, Any]] = []
    found: list[Any] = []
    for drafter in both(tiny_target, monkeypatch):
        out = logits(drafter, batch, STEPS)
        real = batch.document_ids[0] >= 0
        sum((o[0, real].float() ** 2).mean() for o in out).backward()
        found.append([o[0, real] for o in out])
        gradients.append({n: p.grad.clone() for n, p in drafter.module.named_parameters() if p.grad is not None})
    assert len(gradients[0]) > 5
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    for name, g in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], g, atol=1e-5, rtol=1e-3)


def test_padding_is_finite_and_seen_by_nobody(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pack([sample(tiny_target, 0, 20)], steps=STEPS)
    more = {n: getattr(batch, n) for n in ("input_ids", "hidden_states", "verifier_last_hidden_states", "position_ids")}
    ids = torch.cat([batch.document_ids, torch.full((1, 5), -1)], 1)
    padded = {n: torch.cat([t, torch.zeros_like(t[:, :5])], 1) for n, t in more.items()}
    import dataclasses

    wide = dataclasses.replace(batch, document_ids=ids, **padded)
    mine, theirs = both(tiny_target, monkeypatch)
    a, b = logits(mine, wide, STEPS), logits(theirs, wide, STEPS)
    n = batch.input_ids.shape[1]
    for x, y, z in zip(a, b, logits(mine, batch, STEPS), strict=True):
        assert bool(x.isfinite().all())
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(x[:, :n], z, atol=1e-5, rtol=1e-4)


def test_runs_of_ids_are_found() -> None:
    ids = torch.tensor([[4, 4, 5, -1, -1]])
    assert attention.spans(ids) == [(0, 2, True), (2, 3, True), (3, 5, False)]
    assert attention.spans(torch.tensor([[-1]])) == [(0, 1, False)]
