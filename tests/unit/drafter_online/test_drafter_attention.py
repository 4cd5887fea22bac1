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
        sum((o.float() ** 2).mean() for o in out).backward()
        found.append(out)
        gradients.append({n: p.grad.clone() for n, p in drafter.module.named_parameters() if p.grad is not None})
    assert len(gradients[0]) > 5
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    for name, g in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], g, atol=1e-5, rtol=1e-3)


def test_runs_of_ids_are_found() -> None:
    ids = torch.tensor([[4, 4, 5, 6, 6]])
    assert attention.spans(ids) == [(0, 2), (2, 3), (3, 5)] and attention.spans(torch.tensor([[0]])) == [(0, 1)]
